"""The bench of host time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nsa_sel
from nsa_sel.bench.core import store
from nsa_sel.bench.questions import host_time
from nsa_sel.bench.questions.host_time import (
    CHOSEN,
    NEW,
    NOTHING,
    case_of,
    parts,
    prepared,
)

CASE = case_of("cpu")


@pytest.mark.parametrize("needs_grad", [False, True])
def test_parts_do_what_they_say(needs_grad: bool) -> None:
    problem = prepared(CASE, "cpu", needs_grad)
    works = parts(problem, "numba")
    assert ("node" in works) == needs_grad
    whole, alone = works["call"](), works["backend"]()
    if needs_grad:
        for other in (alone, works["node"]()):
            assert all(map(lambda a, b: (a - b).abs().max() < 1e-6, whole, other))
    else:
        assert (whole - alone).abs().max() < 1e-6
        assert torch.equal(works[NEW](), whole)
        assert torch.equal(works["many calls, new"](), works["many calls"]())
    assert nsa_sel.decisions()[-1].override.source == "argument"  # type: ignore[union-attr]
    parts(problem, CHOSEN)["call"]()
    assert nsa_sel.decisions()[-1].override is None


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, names = tmp_path / "overhead.jsonl", (NOTHING, CHOSEN, "numba")
    threads = torch.get_num_threads()
    host_time.main(out, rounds=2, calls=2, device="cpu", backends=",".join(names), S=70)
    torch.set_num_threads(threads)
    rows = store.read(out)
    assert {(row["backend"], row["direction"]) for row in rows} == {(name, way) for name in names for way in ("fwd", "fwd+bwd")}
    assert {(row["S"], row["S_kv"]) for row in rows} == {(70, 70)}
    assert all(row["device"] and row["threads"] == 1 and row["command"] for row in rows)
    assert "beyond the backend" in capsys.readouterr().out
    of_parts = {(row["backend"], row["part"]) for row in rows}
    for name in names:
        assert {(name, "further call"), (name, "further call, new")} <= of_parts
