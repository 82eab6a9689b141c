"""Committed profiles are what their rows say, and the policy follows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa_sel.attention import explain_request
from nsa_sel.bench.derive import PROFILES, ROOT, faster_by, read_rows, render, triton_threshold
from nsa_sel.config import shipped_configs
from nsa_sel.request import example_request
from tests.policy_cases import H100, H200


@pytest.mark.parametrize("target", sorted(PROFILES))
def test_a_profile_is_derived_from_its_rows(target: str) -> None:
    assert (ROOT / target).read_text() == render(PROFILES[target]())
    assert Path(target).name in shipped_configs()


def test_the_example_runs_on_triton_where_it_was_measured_faster() -> None:
    decision = explain_request(example_request(needs_grad=True), H200)
    assert (decision.forward, decision.backward) == ("triton-tile", "triton-tile")
    assert decision.settings.profile == "sm90_h200.yaml"
    other = explain_request(example_request(), H100)
    assert (other.forward, other.settings.profile) == ("sdpa-packed", "built-in")


def test_a_threshold_needs_the_margin_at_every_longer_length() -> None:
    def row(backend: str, length: int, ms: float) -> dict[str, object]:
        case = {"case": f"threshold-prefill-D64-L{length}", "direction": "fwd", "n": length // 64, "block": 64}
        return {**case, "backend": backend, "ms_median": ms, "ms_p20": ms * 0.99, "ms_p80": ms * 1.01}

    times = {64: (1.0, 2.0), 256: (1.0, 1.1), 1024: (1.0, 1.3), 4096: (1.0, 9.0)}
    rows = [row(b, L, t[i]) for L, t in times.items() for i, b in enumerate(("triton-group", "sdpa-packed"))]
    found = triton_threshold(rows)
    assert found is not None
    assert found[0] == 1024
    assert triton_threshold(rows[:4]) is None
    assert faster_by(rows[0], rows[1]) == pytest.approx(2.0 * 0.99 / 1.01)
    assert read_rows("bench/results/h200/selection.jsonl")


def test_tables_of_the_documents_are_derived_from_their_rows() -> None:
    from nsa_sel.bench.tables import DOCUMENTS, TABLES, with_tables

    texts = [(ROOT / document).read_text() for document in DOCUMENTS]
    for text in texts:
        assert with_tables(text) == text, "run python -m nsa_sel.bench.tables"
    assert all(any(f"<!-- table: {name} -->" in text for text in texts) for name in TABLES)
