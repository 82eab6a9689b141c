"""From the CSV files of bench_sel_triton to `sel_triton_min_L`, with the evidence as a Markdown report.

    python -m nsa_sel.bench.sel_threshold_from_csv --dense dense.csv --varlen varlen.csv --margin 1.2 --out selection_report.md

dense.csv: one contiguous range a row; varlen.csv: several. The rule is that of threshold_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from tabulate import tabulate

from nsa_sel.bench.bench_sel_triton import from_csv
from nsa_sel.bench.core import markdown, store
from nsa_sel.bench.core.command_line import echo, program
from nsa_sel.bench.core.contenders import PACKED
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.threshold_optimizer import MARGIN, REGRESSION, TRITON, Pair, Threshold, decided, sentence, thresholds


def report(parts: Mapping[str, Sequence[Row]], margin: float = MARGIN, triton: str = TRITON) -> str:
    """The threshold over all parts (name -> rows), then what each part alone says, with the pairs behind it."""
    every = [row for rows in parts.values() for row in rows]
    found = decided(every, margin, triton)
    facts = store.measured(every)[0]
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "triton", "driver") if facts.get(name))
    values = "; ".join(f"{each.direction}: {each.length or 'the default stays'}" for each in found)
    lines = [
        f"# From which L {triton} pays",
        f"{facts['device']}, {versions}, commit {facts['commit']}. {len(store.measured(every))} rows with a time,"
        f" {len(every) - len(store.measured(every))} cases out of memory.",
        f"**`sel_triton_min_L`, {values}.** In each direction, {PACKED}'s 20th percentile over {triton}'s 80th must be {margin} or more in"
        f" every case of L or more keys a row. Below it {PACKED} runs; from it on no case may be over {REGRESSION:.0%} slower than that.",
        _verdicts(found),
    ]
    for name, rows in parts.items():
        alone = thresholds(rows, margin, triton)
        lines.append(f"## {name}")
        lines += [_by_length(threshold) for threshold in alone] if alone else [f"No case with both {triton} and {PACKED}."]
    return markdown.with_note("\n\n".join(lines)) + "\n"


def main(
    dense: Annotated[Path, typer.Option(help="CSV of rows with one contiguous range")],
    varlen: Annotated[Path, typer.Option(help="CSV of rows with several ranges")],
    margin: Annotated[float, typer.Option(help="how much faster Triton must be")] = MARGIN,
    out: Annotated[Path, typer.Option(help="Markdown file")] = Path("selection_report.md"),
    backend: Annotated[str, typer.Option(help="the Triton backend that is compared")] = TRITON,
) -> None:
    """Write the report, and print what it comes to."""
    parts = {"One contiguous range a row": from_csv(dense), "Several ranges a row": from_csv(varlen)}
    text = report(parts, margin, backend)
    store.write_whole(out, text)
    for threshold in decided([row for rows in parts.values() for row in rows], margin, backend):
        echo(sentence(threshold))
    echo(f"{out} written")


def _verdicts(found: Sequence[Threshold]) -> str:
    lines = []
    for threshold in found:
        closest, slowest = threshold.closest, threshold.slowest
        lines.append(
            (
                threshold.direction, threshold.length or ("undecided" if threshold.undecided else "none"),
                ", ".join(map(str, threshold.undecided)) or "-", len(threshold.pairs), closest.triton["case"], _times(closest.triton),
                _times(closest.packed), f"{closest.sure_gain:.2f}x", f"{slowest.gain:.2f}x" if slowest else "-",
            )
        )  # fmt: skip
    headers = [
        *("direction", "min L", "undecided L", "cases", "closest case there", "its ms", "packed, ms", "sure gain"),
        "least gain from there on",
    ]
    return _markdown(headers, lines)


def _by_length(threshold: Threshold) -> str:
    """Gains of one direction by L: the least and the median of the medians' gains, and the least that the spreads allow."""
    lines = []
    for length in threshold.lengths:
        some: list[Pair] = [pair for pair in threshold.pairs if pair.length == length]
        gains = [pair.gain for pair in some]
        state = "undecided" if length in threshold.undecided else "Triton" if length >= (threshold.length or length + 1) else "packed"
        sure = min(pair.sure_gain for pair in some)
        lines.append((threshold.direction, length, len(some), f"{min(gains):.2f}x", f"{median(gains):.2f}x", f"{sure:.2f}x", state))
    return _markdown(["direction", "L", "cases", "least gain", "median gain", "least sure gain", "runs"], lines)


def _times(row: Row) -> str:
    return f"{markdown.ms(row, 4)} ({row['ms_p20']:.4g} to {row['ms_p80']:.4g})"


def _markdown(headers: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    return tabulate([[str(cell) for cell in line] for line in lines], headers=headers, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    program(main)
