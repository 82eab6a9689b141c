"""The README's picture: what a layer's attention takes of dense attention's time, part by part, and what a model trains at with each.

`python -m nsa_sel.bench.report.layer` writes docs/report/layer.png and layer-dark.png from the committed rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nsa_sel.bench.core import store
from nsa_sel.bench.core.environment import ROOT
from nsa_sel.bench.report.figures import DARK, LIGHT, Axes, Draw, Facet, Figure, Theme, png
from nsa_sel.bench.report.shares import PARTS, PARTS_FILE, Rate, Stack, committed

PICTURE = ROOT / "docs/report/layer"


def figure(of_parts: Sequence[Stack], trained: Sequence[Rate]) -> Figure:
    """Both drawings, with what they show in words."""
    shares = ", ".join(f"{whole:.0f}% at {S // 1024}k tokens" for S, _, whole in of_parts)
    rates = ", ".join(f"{nsa / dense:.2f} times at {context // 1024}k" for context, dense, nsa in trained)
    return Figure(
        (
            Facet(f"Attention of one layer, forward and backward, as a share of dense attention's time: {shares}.", _shares(of_parts)),
            Facet(f"Tokens per second of training against dense attention: {rates}.", _rates(trained)),
        ),
        (("dense-cudnn", "dense attention (cuDNN)"), *((part, words) for part, words in PARTS.items())),
    )


def _shares(of_parts: Sequence[Stack]) -> Draw:
    def draw(axes: Axes, theme: Theme) -> None:
        names = [f"{S // 1024}k" for S, _, _ in of_parts]
        axes.set(title="Attention of one layer, forward + backward", xlabel="tokens", ylabel="% of dense attention's time")
        axes.axhline(100, color=theme["dense-cudnn"], linewidth=1.4)
        bottom = [0.0] * len(of_parts)
        for part in PARTS:
            heights = [parts[part] for _, parts, _ in of_parts]
            axes.bar(names, heights, 0.6, bottom=bottom, color=theme[part])
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        for i, (_, _, whole) in enumerate(of_parts):
            axes.text(i, bottom[i] + 2, f"{100 / whole:.2g}x", ha="center", fontsize=8)
        axes.grid(True, axis="y", linewidth=0.6)

    return draw


def _rates(trained: Sequence[Rate]) -> Draw:
    def draw(axes: Axes, theme: Theme) -> None:
        names = [f"{context // 1024}k" for context, _, _ in trained]
        axes.set(title="Training a model of 25M parameters", xlabel="context, tokens", ylabel="thousand tokens per second")
        for offset, column, role in ((-0.2, 1, "dense-cudnn"), (0.2, 2, "select")):
            axes.bar([i + offset for i in range(len(trained))], [pair[column] / 1e3 for pair in trained], 0.38, color=theme[role])
        for i, (_, dense, nsa) in enumerate(trained):
            axes.text(i + 0.2, nsa / 1e3, f"{nsa / dense:.2g}x", ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(trained)), names)
        axes.grid(True, axis="y", linewidth=0.6)

    return draw


def claim() -> str:
    """The README's first figures, in words."""
    of_parts, rates = committed()
    shares, lengths = _listed(f"{whole:.0f}%" for _, _, whole in of_parts), _listed(f"{S // 1024}k" for S, _, _ in of_parts)
    text = max(row["S"] for row in store.read(PARTS_FILE) if row["part"] == "layer of text")
    inputs = "text" if text == of_parts[-1][0] else f"text up to {text // 1024}k, random inputs beyond"
    gains, contexts = _listed(f"{nsa / dense:.2f}" for _, dense, nsa in rates), _listed(f"{context // 1024}k" for context, _, _ in rates)
    return (
        f"Measured on an NVIDIA H200: attention of one layer, forward and backward, takes {shares} of dense attention's time (cuDNN) at"
        f" {lengths} tokens ({inputs}; 4 KV groups of 16 heads, D 128, bf16). A model of 25 million parameters trains at {gains} times as"
        f" many tokens per second as with dense attention at {contexts}. [layer.md](https://github.com/nsa-sel/nsa-sel/blob/main/docs/layer.md)"
        " has all parts, [training.md](https://github.com/nsa-sel/nsa-sel/blob/main/docs/training.md) the losses."
    )


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}"


def write(*shown: Any) -> None:
    """The picture on light and on dark ground."""
    for ending, theme in (("", LIGHT), ("-dark", DARK)):
        png(figure(*shown), theme, Path(f"{PICTURE}{ending}.png"), title="NSAttention on an NVIDIA H200")


if __name__ == "__main__":
    write(*committed())
    print(f"{PICTURE.relative_to(ROOT)}.png and layer-dark.png written")
