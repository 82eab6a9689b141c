"""Compare runs of examples/train_nsa_lm.py: loss curves that should be the same, step by step, and their speed.

    python examples/compare_losses.py runs/packed runs/group runs/tile runs/dense --out losses.png

The first run is the reference. Losses are averaged over --window steps, as far as both runs went; a run of the same attention whose
average is ever further than --band nats from the reference's is out of the band, and the exit code 1. Runs of another attention are
another model, and only shown.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import records
import typer
from loss_curves import Curve, draw
from options import program
from tabulate import tabulate

from nsa_sel.errors import ArgumentError

SETTLED = 10  # steps before speed counts: the first ones compile


def averages(rows: list[dict[str, Any]], window: int) -> list[float]:
    """Mean losses of every `window` steps, the last ones left out where they are fewer."""
    return [statistics.fmean(row["loss"] for row in rows[i : i + window]) for i in range(0, len(rows) - window + 1, window)]


def furthest(rows: list[dict[str, Any]], reference: list[dict[str, Any]], window: int) -> float | None:
    """The largest difference of averaged losses over the steps of both; None of another attention, or of too few steps."""
    if rows[0]["attention"] != reference[0]["attention"]:
        return None
    pairs = zip(averages(rows, window), averages(reference, window), strict=False)
    return max((abs(a - b) for a, b in pairs), default=None)


def losses(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, or ArgumentError."""
    rows = records.read(folder / "losses.jsonl")
    if not rows:
        raise ArgumentError("a run", f"{folder} without a step", "a folder that train_nsa_lm.py wrote", "train there first")
    return rows


def table(runs: dict[str, list[dict[str, Any]]], window: int) -> str:
    """One line a run: who ran it, how far, how fast, and how far from the first."""
    reference, lines = next(iter(runs.values())), []
    for name, rows in runs.items():
        held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
        far = furthest(rows, reference, window)
        last, most = (f"{held_out[-1]:.4f}" if held_out else "-"), ("-" if far is None else f"{far:.4f}")
        speed = statistics.median(row["tokens_per_second"] for row in rows[SETTLED:] or rows)
        numbers = len(rows), f"{rows[-1]['loss']:.4f}", last, f"{speed:.0f}", most
        lines.append((name, rows[0]["attention"], rows[0]["backend"] or "-", *numbers))
    headers = ("run", "attention", "backend", "steps", "last loss", "held out", "tokens/s", "furthest from the first")
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def curve(name: str, rows: list[dict[str, Any]], window: int) -> Curve:
    """The averaged losses of a run."""
    points = [((i + 0.5) * window, loss) for i, loss in enumerate(averages(rows, window))]
    return Curve(f"{name} ({rows[0]['backend'] or 'dense'})", points)


def main(
    folders: Annotated[list[Path], typer.Argument(help="runs, the reference first")],
    band: Annotated[float, typer.Option(help="nats a byte that an averaged loss may be from the reference's")] = 0.05,
    window: Annotated[int, typer.Option(min=1, help="steps that are averaged")] = 20,
    out: Annotated[Path | None, typer.Option(help="PNG of the curves")] = None,
) -> None:
    """Print how runs compare; exit code 1 where one is out of the band, or too short to tell."""
    runs = {folder.name: losses(folder) for folder in folders}
    reference = runs[folders[0].name]
    print(table(runs, window))
    if out:
        draw(out, f"loss, nats a byte, mean of {window} steps", [curve(name, rows, window) for name, rows in runs.items()])
    distances = {
        name: furthest(rows, reference, window) for name, rows in runs.items() if rows[0]["attention"] == reference[0]["attention"]
    }
    outside = [
        f"{name}: {'fewer steps than a window' if far is None else far}" for name, far in distances.items() if far is None or far > band
    ]
    if outside:
        sys.exit(f"out of the band of {band} nats: {', '.join(outside)}")


if __name__ == "__main__":
    program(main)
