"""The bench of a layer's parts: its table, and what the committed rows show of the targets."""

from __future__ import annotations

from typing import Any

from nsa_sel.bench.core import store
from nsa_sel.bench.questions import layer_parts
from tests.helpers.files import ROOT

ROWS = store.read(ROOT / "bench" / "results" / "h200" / "profiles" / "layer_parts.jsonl")


def row(part: str, S: int, direction: str, ms: float) -> dict[str, Any]:
    return {"part": part, "h": 16, "S": S, "direction": direction, "ms_median": ms}


def test_table() -> None:
    rows = [
        row("choose", 8192, "fwd", 1.0),
        row("choose", 8192, "bwd", 2.5),
        row("dense", 32768, "fwd", 29.0),
        row("choose", 8192, "fwd", 0.5),
    ]
    lines = layer_parts.table(rows).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["choose", "16", "0.5 / 2.5", "- / -"]
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == ["dense", "16", "- / -", "29 / -"]


def test_memory_table_leaves_out_what_is_the_result() -> None:
    """And rows that do not know it."""
    memory = [
        {**row("layer", 8192, direction, 1.0), "peak_mib": peak, "outputs_mib": outputs}
        for direction, peak, outputs in (("fwd", 500, 128), ("bwd", 800, 200), ("fwd+bwd", 1200, 300))
    ]
    older = {**row("layer", 32768, "fwd", 1.0), "peak_mib": 2000}
    lines = layer_parts.memory_table([*memory, older]).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == ["part", "h", "8k"]
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["layer", "16", "372 / 900"]
