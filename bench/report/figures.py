"""The report's figures as PNGs for light and dark pages: each a few small drawings side by side.

A color always stands for the same thing (`ROLES`), and the color-blind can tell all of them apart (Okabe and Ito).
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # no display is needed

from matplotlib import pyplot
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image

from nsa_sel.bench.core.contenders import DENSE
from nsa_sel.core.registry import backends

Axes = Any

# Role -> color on light and on dark ground.
_BACKENDS = (  # in the order of the registry
    ("#69707a", "#9aa2ad"),
    ("#8a6a00", "#f0cc4a"),
    ("#a8467f", "#e8a3cb"),
    ("#00805d", "#35d6ab"),
    ("#0072b2", "#56b4e9"),
    ("#c65500", "#ff9d57"),
    ("#8c1c2e", "#ff8f9c"),
)
ROLES = {
    "surface": ("#ffffff", "#15181d"),
    "ink": ("#1b1d21", "#e8eaed"),
    "muted": ("#5a6069", "#a6adb7"),
    "grid": ("#dde1e6", "#343a43"),
    "shade": ("#f5efe8", "#29231d"),
    "on": ("#fefefe", "#0c0e11"),  # text on a backend's color
    **dict(zip(backends(), _BACKENDS, strict=False)),
    DENSE: ("#33373d", "#d3d7dc"),
    "other": ("#4b3f8f", "#b3a6f5"),
    # parts of a layer: shades of one hue
    "choose": ("#0b3c6f", "#d3e6fb"),
    "select": ("#2f7ec4", "#8fc1f0"),
    "window": ("#7fb4e3", "#4d8fcf"),
    "gate": ("#bcd8f1", "#2b5f96"),
}
LIGHT, DARK = ({role: colors[i] for role, colors in ROLES.items()} for i in range(2))
Theme = dict[str, str]
Draw = Callable[[Axes, Theme], None]

SIZE = (4.5, 3.3)  # inches of one drawing
COLORS = 96  # of a PNG
DASHES: Any = (0, (4, 2))
LABEL_GAP = 0.05  # of a drawing's height, between the middles of two labels
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "path.simplify": False,
}


class Facet(NamedTuple):
    """One drawing: what it shows in words, for who can't see it, and how it is drawn."""

    alt: str
    draw: Draw


class Figure(NamedTuple):
    """Drawings that belong together, and the roles whose colors need a key."""

    facets: tuple[Facet, ...]
    key: tuple[tuple[str, str], ...] = ()  # role, words
    dashes: tuple[str, str] | None = None  # what solid and dashed lines are

    @property
    def alt(self) -> str:
        return " ".join(facet.alt for facet in self.facets)


def png(figure: Figure, theme: Theme, path: Path, title: str = "") -> None:
    """All drawings of a figure side by side."""
    columns = min(3, len(figure.facets))
    lines = -(-len(figure.facets) // columns)
    with pyplot.rc_context(_style(theme)):
        canvas, grid = pyplot.subplots(
            lines, columns, figsize=(SIZE[0] * columns, SIZE[1] * lines + 0.4), layout="constrained", squeeze=False
        )
        for axes, facet in zip(grid.flat, figure.facets, strict=False):
            facet.draw(axes, theme)
        for axes in list(grid.flat)[len(figure.facets) :]:
            axes.set_axis_off()
        if title:
            canvas.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left", color=theme["ink"])
        handles = [Line2D([], [], marker="s", linestyle="", markersize=7, color=theme[role], label=words) for role, words in figure.key]
        for words, style in zip(figure.dashes or (), ("-", DASHES), strict=False):
            handles.append(Line2D([], [], linestyle=style, color=theme["muted"], label=words))
        if handles:
            canvas.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, labelcolor=theme["ink"])
        drawn = io.BytesIO()
        canvas.savefig(drawn, format="png", dpi=110)
        pyplot.close(canvas)
    # A palette takes a quarter of the space; this method keeps every color that is used.
    few = Image.open(drawn).convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def _style(theme: Theme) -> Any:
    ink, muted = theme["ink"], theme["muted"]
    colors = {
        "text.color": ink, "axes.labelcolor": ink, "axes.titlecolor": ink, "axes.edgecolor": muted, "xtick.color": muted,
        "ytick.color": muted, "grid.color": theme["grid"], "figure.facecolor": theme["surface"], "axes.facecolor": theme["surface"],
    }  # fmt: skip
    return {**_STYLE, **colors}


class Line(NamedTuple):
    """Points joined by a line. `roles`: of each point's marker; `label` is at its start or its end."""

    x: Sequence[float]
    y: Sequence[float]
    roles: Sequence[str]
    label: str
    role: str = "muted"  # of the line
    dashed: bool = False
    at_start: bool = False

    @property
    def end(self) -> tuple[float, float]:
        """Where its label is."""
        i = 0 if self.at_start else -1
        return self.x[i], self.y[i]


def gains(title: str, x_label: str, y_label: str, lines: Sequence[Line], limit: float, below: str, text: Callable[[float], str]) -> Draw:
    """A drawing of speed-ups over lengths, both by logarithm; the ground below `limit` is shaded and said to be `below`."""

    def draw(axes: Axes, theme: Theme) -> None:
        xs, ys = sorted({x for line in lines for x in line.x}), [y for line in lines for y in line.y]
        axes.set(xscale="log", yscale="log", title=title, xlabel=x_label, ylabel=y_label)
        low, high = min(*ys, limit / 1.3), max(*ys, limit * 1.3)
        axes.set(xlim=(xs[0] / (1.9 if any(line.at_start for line in lines) else 1.3), xs[-1] * 1.3), ylim=(low / 1.35, high * 1.35))
        axes.axhspan(low / 2, limit, color=theme["shade"], linewidth=0, zorder=0)
        axes.axhline(limit, color=theme["ink"], linewidth=1)
        axes.text(0.99, 0.02, below, ha="right", va="bottom", fontsize=8, color=theme["muted"], transform=axes.transAxes)
        _ticks(axes.xaxis, [x for x in xs if _is_power(x / xs[0])] if len(xs) > 6 else xs, text)
        _ticks(axes.yaxis, _nice(low, high), lambda y: f"{y:g}x")
        axes.grid(True, linewidth=0.6)
        for line in lines:
            axes.plot(line.x, line.y, color=theme[line.role], linewidth=1.4, linestyle=DASHES if line.dashed else "-")
            colors = [theme[role] for role in line.roles]
            axes.scatter(line.x, line.y, s=26, c=colors, zorder=3, edgecolors=theme["surface"], linewidths=0.7)
        gap = LABEL_GAP * math.log(high * 1.35 / (low / 1.35))
        for side in {(line.at_start, line.end[0]) for line in lines}:
            together = [line for line in lines if (line.at_start, line.end[0]) == side]
            for line, y in zip(together, _apart([math.log(line.end[1]) for line in together], gap), strict=True):
                color = theme["ink" if line.role == "muted" else line.role]
                offset, ha = (-6, "right") if line.at_start else (6, "left")  # typographic points
                at = line.end[0], math.exp(y)
                axes.annotate(line.label, at, (offset, 0), textcoords="offset points", fontsize=8, va="center", ha=ha, color=color)

    return draw


def _apart(values: Sequence[float], gap: float) -> list[float]:
    """The numbers, moved until they are `gap` apart."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    placed = list(values)
    for _ in range(100):
        for low, high in itertools.pairwise(order):
            push = max(0.0, gap - (placed[high] - placed[low])) / 2
            placed[low], placed[high] = placed[low] - push, placed[high] + push
    return placed


class Share(NamedTuple):
    """Values, of which the drawing says which share is at most x."""

    label: str
    role: str
    values: Sequence[float]


def shares(title: str, x_label: str, curves: Sequence[Share], close: float, most: float) -> Draw:
    """Of each curve: which share of its values is at most x percent, up to `most`; `close` is marked."""

    def draw(axes: Axes, theme: Theme) -> None:
        least = min(sum(value <= 0 for value in curve.values) / len(curve.values) for curve in curves) * 100
        bottom = max(0.0, 10 * math.floor(least / 10) - 10)
        axes.set(title=title, xlabel=x_label, ylabel="share of cases, %")
        axes.set(xlim=(-0.02 * most, most), ylim=(bottom, 100 + (100 - bottom) / 30))
        axes.axvline(close * 100, color=theme["muted"], linewidth=0.8, linestyle=DASHES)
        axes.grid(True, linewidth=0.6)
        for i, curve in enumerate(curves):
            ordered = sorted(100 * value for value in curve.values)
            ranks = [100 * (j + 1) / len(ordered) for j in range(len(ordered))]
            axes.step([0, *ordered, 1e6], [0, *ranks, 100], where="post", color=theme[curve.role], linewidth=1.6)
            axes.text(
                0.97, 0.1 * (len(curves) - i) - 0.02, curve.label, ha="right", fontsize=8, color=theme[curve.role], transform=axes.transAxes
            )

    return draw


def tiles(
    title: str, x_label: str, y_label: str, columns: Sequence[str], rows: Sequence[str], cells: Sequence[Sequence[str | None]]
) -> Draw:
    """A map: cells[row][column] is a backend's name, shown by color and by its name; None: nothing runs."""

    def draw(axes: Axes, theme: Theme) -> None:
        axes.set(title=title, xlabel=x_label, ylabel=y_label, xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(rows) - 0.5))
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.tick_params(length=0, labelcolor=theme["ink"])
        axes.spines[["left", "bottom"]].set_visible(False)
        for y, line in enumerate(cells):
            for x, name in enumerate(line):
                role = name if name in theme else "other"
                axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=theme[role], linewidth=0))
                axes.text(x, y, short(name), ha="center", va="center", fontsize=7.5, color=theme["on"])

    return draw


def short(name: str | None) -> str:
    """A backend's name without what it is made with: tile, group, packed."""
    return "none" if name is None else name.removeprefix("triton-").removeprefix("sdpa-").removeprefix("cupy-")


def role_of(backend: str) -> str:
    return backend if backend in ROLES else "other"


def _ticks(axis: Any, values: Sequence[float], text: Callable[[float], str]) -> None:
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_locator(NullLocator())


def _nice(low: float, high: float) -> list[float]:
    """Plain numbers between two: powers of ten, with 2 and 5 between them where they are few."""
    decades = [10.0**e for e in range(-6, 9)]
    few = [m * d for d in decades for m in (1, 2, 5) if low <= m * d <= high]
    return few if len(few) <= 7 else [d for d in decades if low <= d <= high]


def _is_power(ratio: float) -> bool:
    """Whether it is a power of two, or near one."""
    return any(abs(ratio / 2**e - 1) < 0.01 for e in range(40))
