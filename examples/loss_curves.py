"""Loss curves as a picture, for train_nsa_lm.py and compare_losses.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class Curve(NamedTuple):
    """Losses at steps. Style is as of matplotlib, such as "o-"."""

    name: str
    points: list[tuple[float, float]]  # step, loss
    style: str = "-"


def draw(file: Path, unit: str, curves: list[Curve]) -> None:
    """Replace the picture at once: a kill leaves the old one or the new one."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, points, style in curves:
        axes.plot([step for step, _ in points], [loss for _, loss in points], style, linewidth=1, markersize=3, label=name)
    axes.set(xlabel="step", ylabel=unit)
    axes.legend()
    unfinished = file.with_name(f".{os.getpid()}.{file.name}")  # savefig goes by the ending
    figure.savefig(unfinished, dpi=120)
    plt.close(figure)
    unfinished.replace(file)
