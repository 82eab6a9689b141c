"""The README's picture, docs/report/layer.png and layer-dark.png: `python -m nsa_sel.bench.tables` writes it.

Left, a layer's attention as a share of dense attention's time, part by part; right, training speed with each kind of attention.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed

from matplotlib import pyplot
from matplotlib.lines import Line2D
from PIL import Image

from nsa_sel.bench.core.environment import ROOT

PICTURE = ROOT / "docs/report/layer"
COLORS = {  # on light and on dark ground; parts of a layer are shades of one hue
    "surface": ("#ffffff", "#15181d"),
    "ink": ("#1b1d21", "#e8eaed"),
    "muted": ("#5a6069", "#a6adb7"),
    "grid": ("#dde1e6", "#343a43"),
    "dense": ("#33373d", "#d3d7dc"),
    "choose": ("#0b3c6f", "#d3e6fb"),
    "select": ("#2f7ec4", "#8fc1f0"),
    "window": ("#7fb4e3", "#4d8fcf"),
    "gate": ("#bcd8f1", "#2b5f96"),
}
PALETTE = 96  # colors of the PNG


def draw_shares(axes: Any, color: dict[str, str], shares: Sequence[Any]) -> None:
    """Draw stacked bars, one per length, below a line at dense attention's time."""
    axes.set(title="Attention of one layer, forward + backward", xlabel="tokens", ylabel="% of dense attention's time")
    axes.axhline(100, color=color["dense"], linewidth=1.4)
    for i, each in enumerate(shares):
        bottom = 0.0
        for part, height in each.parts.items():
            axes.bar(i, height, 0.6, bottom=bottom, color=color[part])
            bottom += height
        axes.text(i, bottom + 2, f"{100 / each.whole:.2g}x", ha="center", fontsize=8)
    axes.set_xticks(range(len(shares)), [f"{each.S // 1024}k" for each in shares])


def draw_rates(axes: Any, color: dict[str, str], rates: Sequence[tuple[int, float, float]]) -> None:
    """Draw a pair of bars per context: dense attention, NSAttention."""
    axes.set(title="Training a model of 25M parameters", xlabel="context, tokens", ylabel="thousand tokens per second")
    for i, (_, dense, nsa) in enumerate(rates):
        axes.bar(i - 0.2, dense / 1e3, 0.38, color=color["dense"])
        axes.bar(i + 0.2, nsa / 1e3, 0.38, color=color["select"])
        axes.text(i + 0.2, nsa / 1e3, f"{nsa / dense:.2g}x", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(rates)), [f"{context // 1024}k" for context, _, _ in rates])


def write(shares: Sequence[Any], rates: Sequence[tuple[int, float, float]], parts: Mapping[str, str]) -> None:
    """Write the picture for light and for dark pages.

    Args:
        shares: `Shares` of bench/tables.py, one per length.
        rates: a context; tokens per second with dense attention and with NSAttention.
        parts: words for each part of a layer.
    """
    for i, ending in enumerate(("", "-dark")):
        color = {role: both[i] for role, both in COLORS.items()}
        style: Any = {
            **{"font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.axisbelow": True},
            **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y"},
            **{f"{name}.color": color["muted"] for name in ("xtick", "ytick")},
            **{"figure.facecolor": color["surface"], "axes.facecolor": color["surface"], "grid.color": color["grid"]},
            **{
                "text.color": color["ink"],
                "axes.labelcolor": color["ink"],
                "axes.titlecolor": color["ink"],
                "axes.edgecolor": color["muted"],
            },
        }
        with pyplot.rc_context(style):
            canvas, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.7), layout="constrained")
            draw_shares(left, color, shares)
            draw_rates(right, color, rates)
            canvas.suptitle("NSAttention on an NVIDIA H200", fontsize=12, fontweight="bold", x=0.01, ha="left")
            key = {"dense": "dense attention (cuDNN)", **parts}
            handles = [Line2D([], [], marker="s", linestyle="", markersize=7, color=color[role], label=key[role]) for role in key]
            canvas.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False)
            drawn = io.BytesIO()
            canvas.savefig(drawn, format="png", dpi=110)
            pyplot.close(canvas)
        few = Image.open(drawn).convert("RGB").quantize(PALETTE, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(f"{PICTURE}{ending}.png", optimize=True)
