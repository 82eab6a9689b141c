"""From the CSV files of bench_sel_triton to `sel_triton_min_L`, with the evidence as a Markdown report.

    python -m nsa_sel.bench.sel_threshold_from_csv --dense dense.csv --varlen varlen.csv --margin 1.2 --out selection_report.md

dense.csv: one contiguous range a row; varlen.csv: several. The rule is that of threshold_optimizer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsa_sel.bench.core.command_line import program
from nsa_sel.bench.threshold_optimizer import MARGIN, TRITON
from nsa_sel.bench.threshold_optimizer import main as threshold


def main(
    dense: Annotated[Path, typer.Option(help="CSV of rows with one contiguous range")],
    varlen: Annotated[Path, typer.Option(help="CSV of rows with several ranges")],
    margin: Annotated[float, typer.Option(help="how much faster Triton must be")] = MARGIN,
    out: Annotated[Path | None, typer.Option(help="Markdown file with the evidence; without it nothing is written")] = None,
    backend: Annotated[str, typer.Option(help="the Triton backend that is compared")] = TRITON,
) -> None:
    """Print the threshold, and write the evidence where --out says."""
    threshold([dense, varlen], margin, backend, out)


if __name__ == "__main__":
    program(main)
