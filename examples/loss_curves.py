"""Plot loss curves, for train_nsa_lm.py and compare_losses.py. Needs matplotlib, from the extra `report`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from nsa_sel.errors import NsaSelError


class Curve(NamedTuple):
    """Losses at steps. style: a matplotlib format such as "o-"."""

    name: str
    points: list[tuple[float, float]]  # step, loss
    style: str = "-"


def draw(file: Path, unit: str, curves: list[Curve]) -> None:
    """Write a picture atomically. Raises NsaSelError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise NsaSelError(f"{file.name} is not drawn, because matplotlib is not installed. Remedy: pip install matplotlib") from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points, style in curves:
        axes.plot([step for step, _ in points], [loss for _, loss in points], style, linewidth=1, markersize=3, label=name)
    axes.set(xlabel="step", ylabel=unit)
    axes.legend()
    unfinished = file.with_name(f".{os.getpid()}.{file.name}")  # savefig chooses the format by the ending
    figure.savefig(unfinished, dpi=120)
    unfinished.replace(file)
