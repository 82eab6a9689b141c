"""The picture of the demo: what the rows of one KV head select, and how long each backend takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

from nsa_sel.cli.demo import DENSE, Result
from nsa_sel.cli.demo_text import milliseconds, times_of_dense
from nsa_sel.cli.tensor_file import Problem

matplotlib.use("Agg")  # no display is needed

from matplotlib import pyplot
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

# What a key block is to a row, and its color; told apart by the color-blind too.
KINDS = (
    ("later than the row", "#ffffff"),
    ("not selected", "#e9ecef"),
    ("selected by score", "#0072b2"),
    ("local", "#009e73"),
    ("first", "#e69f00"),
)
FUTURE, PASSED_OVER, BY_SCORE, LOCAL, FIRST = range(len(KINDS))
_FORWARD, _FORWARD_BACKWARD = "#9ecae1", "#3182bd"
_GREYS = {_FORWARD: "#d4d4d4", _FORWARD_BACKWARD: "#a3a3a3"}
_STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "figure.facecolor": "white",
    "axes.edgecolor": "#666666",
}


def selection_map(problem: Problem, head: int) -> tuple[Tensor, int]:
    """What every key block is to every row of the first sequence and one KV head: [S, blocks] of KINDS, and the keys a block.

    Which blocks were forced (first, local) comes from the facts of the trace; without them all count as selected by score.
    """
    start, end = (bound[0, :, head, :, None] for bound in problem.selection.ranges.cpu().unbind(-1))
    S, S_kv, keys = start.shape[0], problem.k.shape[2], problem.selection.block_size or 1
    position = torch.arange(S_kv - S, S_kv) if problem.q_pos is None else problem.q_pos.expand(problem.q.shape[:2])[0].cpu()
    current = position[:, None] // keys
    block = torch.arange(-(-S_kv // keys))
    kinds = torch.where(block > current, FUTURE, PASSED_OVER)
    selected = torch.zeros_like(kinds, dtype=torch.bool)
    for i in range(start.shape[1]):
        selected |= (start[:, i] < (block + 1) * keys) & (end[:, i] > block * keys) & (end[:, i] > start[:, i])
    selected &= block <= current
    kinds = torch.where(selected, BY_SCORE, kinds)
    kinds = torch.where(selected & (block > current - int(problem.facts.get("local", 0))), LOCAL, kinds)
    return torch.where(selected & (block < int(problem.facts.get("first", 0))), FIRST, kinds), keys


def draw(problem: Problem, result: Result, path: Path) -> None:
    """Write the picture to `path`, a PNG."""
    with pyplot.rc_context(_STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 7.2), width_ratios=(1, 1.1), layout="constrained")
        _draw_selection(left, problem, head=0)
        _draw_times(right, result)
        model = f" of {result.facts['model'].split(',')[0]}, layer {result.facts.get('layer', '?')}" if "model" in result.facts else ""
        figure.suptitle(f"NSA selection attention{model}: {_headline(result)}", fontsize=14, fontweight="bold")
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def _headline(result: Result) -> str:
    """How the policy's choice does beside dense attention, in times that were measured in this run."""
    choice = next(row for row in result.rows if row.policy_choice)
    ratios = [times_of_dense(result.rows, choice, field) for field in ("forward", "forward_backward")]
    return f"{ratios[0]} dense attention's speed, {ratios[1]} with backward"


def _draw_selection(axes: Any, problem: Problem, head: int) -> None:
    kinds, keys = selection_map(problem, head)
    names, colors = zip(*KINDS, strict=True)
    (S, blocks), S_kv = kinds.shape, problem.k.shape[2]
    extent = (0, blocks * keys, S, 0)
    axes.imshow(
        kinds.numpy(), cmap=ListedColormap(colors), vmin=0, vmax=len(KINDS) - 1, extent=extent, aspect="auto", interpolation="nearest"
    )
    if problem.q_pos is None:
        # The block of the row itself is read only up to the row's position.
        axes.fill_between((S_kv - S, S_kv), (0, S), 0, color="white", linewidth=0)
        axes.plot((S_kv - S, S_kv), (0, S), color="#222222", linewidth=1.2)
        note = "the row's own position:\nnothing right of it is read"
        axes.annotate(note, (S_kv - 0.45 * S, 0.55 * S), (S_kv - 0.33 * S, 0.47 * S), fontsize=10, arrowprops={"arrowstyle": "->"})
    axes.set(
        xlim=(0, S_kv),
        xlabel=f"key position, in blocks of {keys}",
        ylabel="query row",
        title=f"What KV head {problem.facts.get('head', head)} selects",
    )
    present = [kind for kind in range(len(KINDS)) if kind != FUTURE and bool((kinds == kind).any())]
    handles = [Patch(facecolor=colors[kind], edgecolor="#888888", linewidth=0.5, label=names[kind]) for kind in reversed(present)]
    axes.legend(handles=handles, loc="upper right", framealpha=1.0, title="key blocks of a row")


def _draw_times(axes: Any, result: Result) -> None:
    rows = [row for row in result.rows if row.forward is not None]
    # What is slower than the policy's choice and dense attention runs out of the picture, so that these two can be told apart.
    ends = [row for row in rows if row.policy_choice or row.name == DENSE]
    shown = [spread.p80 for row in ends for spread in (row.forward, row.forward_backward) if spread]
    longest = 1.3 * max(shown, default=1.0)
    for i, row in enumerate(rows):
        for spread, offset, color in ((row.forward, -0.19, _FORWARD), (row.forward_backward, 0.19, _FORWARD_BACKWARD)):
            if spread is None:
                continue
            whiskers = [[spread.median - spread.p20], [spread.p80 - spread.median]]
            color = _GREYS[color] if row.passed is None else color
            axes.barh(
                i + offset, spread.median, 0.36, color=color, xerr=whiskers, error_kw={"ecolor": "#444444", "elinewidth": 1, "capsize": 3}
            )
            out = spread.p80 > longest
            words = f"{milliseconds(spread)} ms" + (" \u2192" if out else "")
            end = longest if out else spread.p80 + longest * 0.015
            axes.text(end, i + offset, words, va="center", ha="right" if out else "left", fontsize=10)
    labels = []
    for row in rows:
        notes = (
            "the policy's choice" if row.policy_choice else "",
            "attends to all keys" if row.passed is None else "",
            "WRONG" if row.passed is False else "",
        )
        labels.append("\n".join([row.name, *(f"({note})" for note in notes if note)]))
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set(
        xlim=(0, longest * 1.17),
        xlabel="milliseconds a call: median, with the 20% and 80% quantiles",
        title=f"Time on {result.device}, {result.dtype}",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        handles=[Patch(color=_FORWARD, label="forward"), Patch(color=_FORWARD_BACKWARD, label="forward + backward")],
        loc="upper right",
        framealpha=1.0,
    )
