"""The bench of packed batches: its cases, and that all its ways to serve them give right results."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from nsa_sel import decisions
from nsa_sel.bench.core import cases, store
from nsa_sel.bench.core.cases import Case, make_selection, packed_bounds
from nsa_sel.bench.questions import packed_batches
from nsa_sel.errors import ArgumentError


def test_cases_begin_with_blocks_or_do_not() -> None:
    for case in (*cases.packed_cases(), *packed_batches.QUICK):
        bounds = packed_bounds(case)
        assert (len(bounds), bounds[0], bounds[-1]) == (13, 0, case.S)
        assert [bound % case.block == 0 for bound in bounds[1:-1]] == ["whole" in case.case] * 11
        names = [contender.name for contender in packed_batches.contenders(case, packed_batches.compared("cuda"))]
        assert ("triton-tile" in names) == ("whole" in case.case)
        assert ("triton-tile-copied" in names) == ("odd" in case.case)
        assert {"triton-group", "triton-tile-each"} <= set(names)


@pytest.mark.parametrize("kind", ["whole", "odd"])
def test_selections_stay_in_their_sequences(kind: str) -> None:
    case = Case(f"packed-{kind}-x", "packed", 1, 2048, 2048, 1, 1, 8, 8, 3, 16, "float32")
    selection = make_selection(case, "cpu")
    bounds = packed_bounds(case)
    assert (selection.block_size, selection.max_length) == (16 if kind == "whole" else None, 48)
    for start, end in pairwise(bounds):
        chosen = selection.ranges[0, start:end]
        filled = chosen[chosen.diff(dim=-1).squeeze(-1) > 0]
        assert int(filled.min()) == start
        assert int(filled[:, 0].max()) < end


@pytest.mark.usefixtures("instant")
def test_every_way_gives_right_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = [Case(f"packed-{kind}-256", "packed", 1, 256, 256, 1, 1, 16, 16, 2, 2, "float32") for kind in ("whole", "odd")]
    monkeypatch.setattr(packed_batches, "QUICK", tiny)
    packed_batches.main(tmp_path / "rows.jsonl", "numba", "cpu", quick=True)
    rows = store.read(tmp_path / "rows.jsonl")
    assert [(row["case"], row["backend"]) for row in rows if row["direction"] == "fwd"] == [
        *(("packed-whole-256", name) for name in ("numba", "numba-each")),
        *(("packed-odd-256", name) for name in ("numba", "numba-each", "numba-copied")),
    ]
    assert all(row["mae"] < 1e-6 for row in rows)
    assert decisions()[-1].request.block_size == 2  # of numba-copied; the case's own selection is no longer of blocks
    with pytest.raises(ArgumentError, match=r"--device is cpu; .*--quick"):
        packed_batches.main(tmp_path / "rows.jsonl", "", "cpu", quick=False)
