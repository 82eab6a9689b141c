"""From the CSV files of bench_sel_triton to `sel_triton_min_L`, with the evidence as a Markdown report.

    python -m nsa_sel.bench.sel_threshold_from_csv --dense dense.csv --varlen varlen.csv --margin 1.2 --out
    selection_report.md

dense.csv: one contiguous range a row; varlen.csv: several. The rule is that of threshold_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from nsa_sel.bench.bench_sel_triton import DENSE_PART, VARLEN, from_csv
from nsa_sel.bench.core import markdown, store
from nsa_sel.bench.core.command_line import echo, program
from nsa_sel.bench.core.contenders import PACKED
from nsa_sel.bench.core.markdown import factor
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.threshold_optimizer import MARGIN, REGRESSION, TRITON, Pair, Threshold, decided, sentence, thresholds


def report(parts: Mapping[str, Sequence[Row]], margin: float = MARGIN, triton: str = TRITON) -> str:
    """The threshold over all parts (name -> rows), then what each part alone says, with the pairs behind it."""
    every = [row for rows in parts.values() for row in rows]
    found = decided(every, margin, triton)
    timed = store.measured(every)
    values = "; ".join(f"{each.direction}: {each.length or 'the default stays'}" for each in found)
    lines = [
        f"# From which L {triton} pays",
        f"{markdown.environment(timed[0])}. {len(timed)} rows with a time, {len(every) - len(timed)} cases out of memory.",
        f"**`sel_triton_min_L`, {values}.** In each direction, {PACKED}'s 20th percentile over {triton}'s 80th must be {margin} or more in"
        f" every case of L or more keys a row. Below it {PACKED} runs; from it on no case may be over {REGRESSION:.0%} slower than that.",
        _verdicts(found),
    ]
    for name, rows in parts.items():
        alone = thresholds(rows, margin, triton)
        lines.append(f"## {name}")
        lines += [by_length(threshold) for threshold in alone] if alone else [f"No case with both {triton} and {PACKED}."]
    return markdown.with_note("\n\n".join(lines)) + "\n"


def main(
    dense: Annotated[Path, typer.Option(help="CSV of rows with one contiguous range")],
    varlen: Annotated[Path, typer.Option(help="CSV of rows with several ranges")],
    margin: Annotated[float, typer.Option(help="how much faster Triton must be")] = MARGIN,
    out: Annotated[Path | None, typer.Option(help="Markdown file with the evidence; without it nothing is written")] = None,
    backend: Annotated[str, typer.Option(help="the Triton backend that is compared")] = TRITON,
) -> None:
    """Print the threshold, and write the evidence where --out says."""
    parts = {DENSE_PART.title: from_csv(dense), VARLEN.title: from_csv(varlen)}
    if out is not None:
        store.write_whole(out, report(parts, margin, backend))
    for threshold in decided([row for rows in parts.values() for row in rows], margin, backend):
        echo(sentence(threshold))
    if out is not None:
        echo(f"{out} written")


def _verdicts(found: Sequence[Threshold]) -> str:
    lines = []
    for threshold in found:
        closest, slowest = threshold.closest, threshold.slowest
        length = threshold.length or ("undecided" if threshold.undecided else "none")
        undecided = ", ".join(map(str, threshold.undecided)) or "-"
        times = closest.triton["case"], _times(closest.triton), _times(closest.packed)
        gains = factor(closest.sure_gain), factor(slowest and slowest.gain)
        lines.append((threshold.direction, length, undecided, len(threshold.pairs), *times, *gains))
    headers = ["direction", "min L", "undecided L", "cases", "closest case there", "its ms", "packed, ms", "sure gain"]
    headers.append("least gain from there on")
    return markdown.table(headers, lines)


def by_length(threshold: Threshold) -> str:
    """Gains of one direction by L: the least and the median of the medians' gains, and the least that the spreads
    allow.
    """
    lines = []
    for length in threshold.lengths:
        some: list[Pair] = [pair for pair in threshold.pairs if pair.length == length]
        gains = [pair.gain for pair in some]
        state = "undecided" if length in threshold.undecided else "Triton" if length >= (threshold.length or length + 1) else "packed"
        figures = min(gains), median(gains), min(pair.sure_gain for pair in some)
        lines.append((threshold.direction, length, len(some), *map(factor, figures), state))
    return markdown.table(["direction", "L", "cases", "least gain", "median gain", "least sure gain", "runs"], lines)


def _times(row: Row) -> str:
    return f"{markdown.ms(row, 4)} ({markdown.spread(row, 4)})"


if __name__ == "__main__":
    program(main)
