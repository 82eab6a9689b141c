"""The bench of decoding steps: its table, and what the committed rows show."""

from __future__ import annotations

from typing import Any

from nsa_sel.bench.core import store
from nsa_sel.bench.questions import decoding_steps
from tests.helpers.files import ROOT

ROWS = store.read(ROOT / "bench" / "results" / "h200" / "profiles" / "decoding_steps.jsonl")


def row(part: str, B: int, S_kv: int, ms: float, floor: float) -> dict[str, Any]:
    return {"part": part, "B": B, "S_kv": S_kv, "ms_median": ms, "floor_ms": floor}


def test_table() -> None:
    """The last row of a measurement counts. Rows of quantized keys stand apart; they have no dense attention."""
    rows = [row("choose", 1, 16384, 0.9, 0.001), row("choose", 1, 16384, 0.02, 0.001), row("whole", 1, 16384, 0.04, 0.002)]
    rows += [row("dense", 1, 16384, 0.05, 0.03), row("choose", 64, 65536, 0.3, 0.1), {**row("whole", 1, 16384, 0.03, 0.001), "kv": "fp8"}]
    lines = decoding_steps.table(rows).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["B", "keys", "K and V", "choose", "whole", "dense", "dense / whole"]
    assert cells[2] == ["1", "16k", "bf16", "20.0 (1.0)", "40.0 (2.0)", "50.0 (30.0)", "1.25x"]
    assert cells[3] == ["64", "64k", "bf16", "300.0 (100.0)", "-", "-", "-"]
    assert cells[4] == ["1", "16k", "fp8", "-", "30.0 (1.0)", "-", "-"]


def test_committed_rows() -> None:
    """Every part at every size, and where a step is ahead of dense attention."""
    times = {(*decoding_steps.size_of(row), row["part"]): row["ms_median"] for row in ROWS}
    assert {part for *_, part in times} == {"extend", "choose", "select", "window", "whole", "between", "dense"}
    sizes = {(B, S_kv, kv) for B, S_kv, kv, _ in times}
    assert sizes >= {(B, 1024 * k, "bf16") for B in (1, 16, 64, 256) for k in (16, 32, 64, 128)}
    assert len(times) == sum(6 + (kv == "bf16") for *_, kv in sizes)
    for size in sizes:
        parts = sum(times[*size, part] for part in ("extend", "choose", "select", "window"))
        if size[2] == "bf16" or size[0] == 1:
            assert times[*size, "between"] < times[*size, "whole"] < 1.05 * parts
        else:  # docs/serving.md: steps of many sequences over e4m3 caches gain nothing by running the window beside the rest
            assert times[*size, "whole"] < 1.1 * parts
        assert (times[*size, "whole"] < times[*size[:2], "bf16", "dense"]) == (size[0] * size[1] > 32768)
