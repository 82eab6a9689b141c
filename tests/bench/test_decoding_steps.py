"""The bench of decoding steps: its table, and what the committed rows show."""

from __future__ import annotations

from typing import Any

from nsa_sel.bench.core import store
from nsa_sel.bench.questions import decoding_steps
from tests.helpers.paths import ROOT

ROWS = store.read(ROOT / "bench" / "results" / "h200" / "profiles" / "decoding_steps.jsonl")


def row(part: str, B: int, S_kv: int, ms: float, floor: float) -> dict[str, Any]:
    return {"part": part, "B": B, "S_kv": S_kv, "ms_median": ms, "floor_ms": floor}


def test_table() -> None:
    """The last row of a measurement counts."""
    rows = [row("choose", 1, 16384, 0.9, 0.001), row("choose", 1, 16384, 0.02, 0.001), row("whole", 1, 16384, 0.04, 0.002)]
    lines = decoding_steps.table([*rows, row("dense", 1, 16384, 0.05, 0.03), row("choose", 64, 65536, 0.3, 0.1)]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["B", "keys", "choose", "whole", "dense", "dense / whole"]
    assert cells[2] == ["1", "16k", "20.0 (1.0)", "40.0 (2.0)", "50.0 (30.0)", "1.25x"]
    assert cells[3] == ["64", "64k", "300.0 (100.0)", "-", "-", "-"]


def test_committed_rows() -> None:
    """Every part at every size, and where a step is ahead of dense attention."""
    times = {(row["B"], row["S_kv"], row["part"]): row["ms_median"] for row in ROWS}
    assert {part for _, _, part in times} == {"extend", "choose", "select", "window", "whole", "between", "dense"}
    sizes = {(B, S_kv) for B, S_kv, _ in times}
    assert sizes >= {(B, 1024 * k) for B in (1, 16, 64, 256) for k in (16, 32, 64, 128)}
    assert len(times) == 7 * len(sizes)
    for B, S_kv in sizes:
        assert times[B, S_kv, "between"] < times[B, S_kv, "whole"]
        assert times[B, S_kv, "whole"] < 1.05 * sum(times[B, S_kv, part] for part in ("extend", "choose", "select", "window"))
        assert (times[B, S_kv, "whole"] < times[B, S_kv, "dense"]) == (B * S_kv > 32768)
