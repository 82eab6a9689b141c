"""Compare runs of examples/train_nsa_lm.py: losses, which should agree step by step, and speed.

    python examples/compare_losses.py runs/packed runs/group runs/tile runs/dense --out losses.png

The first run is the reference. Losses are averaged over --window steps, over the common length of both runs. If an
average of a run with the same attention differs from the reference's by more than --band nats, the exit code is 1.
Runs with another attention are another model and only shown.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Annotated

import typer
from common import Curve, Row, draw, program, read_rows
from tabulate import tabulate

from nsa_sel.errors import ArgumentError

WARMUP_STEPS = 10  # not counted in the speed, because they compile


def averages(rows: list[Row], window: int) -> list[float]:
    """Return the mean loss of every `window` steps, without an incomplete last window."""
    return [statistics.fmean(row["loss"] for row in rows[i : i + window]) for i in range(0, len(rows) - window + 1, window)]


def furthest(rows: list[Row], reference: list[Row], window: int) -> float | None:
    """Return the largest difference of averaged losses, or None for another attention or too few steps."""
    if rows[0]["attention"] != reference[0]["attention"]:
        return None
    pairs = zip(averages(rows, window), averages(reference, window), strict=False)
    return max((abs(a - b) for a, b in pairs), default=None)


def losses(folder: Path) -> list[Row]:
    """Return the rows of a run. Raises ArgumentError if there are none."""
    rows = read_rows(folder / "losses.jsonl")
    if not rows:
        raise ArgumentError("a run", f"{folder} without a step", "a folder that train_nsa_lm.py wrote", "train there first")
    return rows


def main(
    folders: Annotated[list[Path], typer.Argument(help="runs, the reference first")],
    band: Annotated[float, typer.Option(help="nats a byte that an averaged loss may be from the reference's")] = 0.05,
    window: Annotated[int, typer.Option(min=1, help="steps that are averaged")] = 20,
    out: Annotated[Path | None, typer.Option(help="PNG of the curves")] = None,
) -> None:
    """Print a comparison of runs. Exit code 1 if one is out of the band or too short to compare."""
    runs = {folder.name: losses(folder) for folder in folders}
    reference, lines, curves, outside = runs[folders[0].name], [], [], []
    for name, rows in runs.items():
        held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
        speed = statistics.median(row["tokens_per_second"] for row in rows[WARMUP_STEPS:] or rows)
        far, kind = furthest(rows, reference, window), (rows[0]["attention"], rows[0]["backend"] or "-")
        shown = [
            f"{rows[-1]['loss']:.4f}",
            f"{held_out[-1]:.4f}" if held_out else "-",
            f"{speed:.0f}",
            "-" if far is None else f"{far:.4f}",
        ]
        lines.append((name, *kind, len(rows), *shown))
        points = [((i + 0.5) * window, loss) for i, loss in enumerate(averages(rows, window))]
        curves.append(Curve(f"{name} ({rows[0]['backend'] or 'dense'})", points))
        if rows[0]["attention"] == reference[0]["attention"] and (far is None or far > band):
            outside.append(f"{name}: {'fewer steps than a window' if far is None else far}")
    headers = ("run", "attention", "backend", "steps", "last loss", "held out", "tokens/s", "furthest from the first")
    print(tabulate(lines, headers, tablefmt="github", disable_numparse=True))
    if out:
        draw(out, f"loss, nats a byte, mean of {window} steps", curves)
    if outside:
        sys.exit(f"out of the band of {band} nats: {', '.join(outside)}")


if __name__ == "__main__":
    program(main)
