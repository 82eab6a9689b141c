"""Decoding over e4m3 by the variants of the kernel that were tried on an H100, beside bfloat16 and reading alone, in one process."""

from __future__ import annotations

import statistics

from nsa_sel.bench.core import store
from nsa_sel.bench.core.environment import ROOT
from nsa_sel.bench.core.markdown import factor, table

ROWS = ROOT / "bench/results/h100/profiles/e4m3_variants.jsonl"
OF_HEADS = ", in one piece, keys first, e4m3/head"
# What each column shows: its backend, and whether values were in registers ahead of p, and logits in two chains.
COLUMNS = {
    "bfloat16": ("cupy-cuda, in one piece, keys first", "VALUES_AHEAD 0, TWO_CHAINS 0"),
    "e4m3 before": (f"cupy-cuda{OF_HEADS}", "VALUES_AHEAD 0, TWO_CHAINS 0"),
    "values ahead (taken)": (f"cupy-cuda{OF_HEADS}", "VALUES_AHEAD 1, TWO_CHAINS 0"),
    "two chains": (f"cupy-cuda{OF_HEADS}", "VALUES_AHEAD 0, TWO_CHAINS 1"),
    "both": (f"cupy-cuda{OF_HEADS}", "VALUES_AHEAD 1, TWO_CHAINS 1"),
    "reading alone": (f"reading-alone{OF_HEADS}", "VALUES_AHEAD 0, TWO_CHAINS 0"),
}


def variants_table() -> str:
    """Microseconds, medians of both turns; the last column is the taken variant over bfloat16."""
    times: dict[tuple[str, str, str], list[float]] = {}
    for row in store.read(ROWS):
        times.setdefault((row["case"], row["backend"], row["variant"]), []).append(row["ms_median"] * 1e3)
    lines = []
    for case in dict.fromkeys(case for case, _, _ in times):
        us = {name: statistics.median(times[case, *key]) for name, key in COLUMNS.items()}
        lines.append((case, *(f"{each:.4g}" for each in us.values()), factor(us["values ahead (taken)"] / us["bfloat16"], 3)))
    return table(["case", *COLUMNS, "taken over bfloat16"], lines, left=1)
