"""Everything derived from committed rows, anew: `make derived`, or `python -m nsa_sel.bench.report.derived`. Run it after rows were added.

In this order, because each reads what the one before wrote: tables and thresholds of the matrices below bench/results/sel_triton/,
configs/devices/, the documents' tables, docs/report/, the README's picture. Tests derive each of them again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nsa_sel.bench import bench_sel_triton, sel_threshold_from_csv
from nsa_sel.bench.bench_sel_triton import from_csv
from nsa_sel.bench.core import store
from nsa_sel.bench.core.environment import ROOT

AFTER = ("tune.derive", "report.tables", "report.report", "report.layer")


def matrix(folder: Path, out: Path) -> None:
    """Tables of one measured matrix: CSV files, report.md and selection_report.md, into `out`."""
    bench_sel_triton.write(folder, out)
    parts = {part.title: from_csv(out / part.file) for part in bench_sel_triton.PARTS if (out / part.file).exists()}
    store.write_whole(out / "selection_report.md", sel_threshold_from_csv.report(parts))


def folders() -> list[Path]:
    """Those of the committed matrices."""
    return [file.parent for file in sorted((ROOT / bench_sel_triton.RESULTS).glob("*/rows.jsonl"))]


if __name__ == "__main__":
    for folder in folders():
        matrix(folder, folder)
        print(f"{folder.relative_to(ROOT)} written", flush=True)
    for module in AFTER:
        subprocess.run([sys.executable, "-m", f"nsa_sel.bench.{module}"], cwd=ROOT, check=True)
