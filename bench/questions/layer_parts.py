"""Time each part of NSA's layer, forward and backward, and dense attention; measure the whole layer's peak memory.

    python -m nsa_sel.bench.questions.layer_parts --out bench/results/h200/profiles/layer_parts.jsonl

One sequence, 4 KV groups, D 128, bf16, NSA's sizes (compressed blocks of 32 every 16 keys, 16 blocks of 64, a window of
512), random inputs: neighbors choose different blocks, which is the hard case for the selected branch. Parts:
    choose         compressed_attention: attention to compressed keys, importance, the best blocks
    from_scores    Selection.from_scores on given scores (forward alone)
    select         selection_attention of the chosen blocks, from a new Selection each time, by the policy's choice
    window         sliding_window_attention
    flex window    FlexAttention under the same window, compiled; by default it is left out
    gate           the gated sum of the three, so that backward writes gate * do for each; the layer does not
    layer          nsa_attention: all of these
    recomputed     nsa_attention(recompute=True)
    ... of text    select and layer with the blocks that a model chose in a text of this length, if bench/data has one
    fla            parallel_nsa of flash-linear-attention, if it is installed: its own compression (means of 64 keys),
                   choice and selected branch on keys that the branches share; no window, for which it needs another
                   package
    dense          causal attention by cuDNN
Directions: fwd, without gradients; bwd, torch.autograd.grad of the part; fwd+bwd, both in one, with all that is saved
in between. `workspace_mib` is the most memory beyond inputs and outputs; for bwd also beyond what forward saved.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, product, starmap
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from nsa_sel import three_branches
from nsa_sel.attention import selection_attention
from nsa_sel.bench.core import markdown, peers, store
from nsa_sel.bench.core.cases import make_selection, prefill, text_case
from nsa_sel.bench.core.command_line import Out, echo, need_gpu, program
from nsa_sel.bench.core.contenders import dense_causal_sdpa
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing, milliseconds, workspace_bytes
from nsa_sel.branches import nsa_attention
from nsa_sel.choosing import compressed_attention
from nsa_sel.core.call import Rule
from nsa_sel.core.check import check_scale
from nsa_sel.gating import gated_sum
from nsa_sel.selection import Selection
from nsa_sel.telemetry import events
from nsa_sel.window import sliding_window_attention

G, D, N, BLOCK, STRIDE, LENGTH, WINDOW = 4, 128, 16, 64, 16, 32, 512
FLEX = "flex window"
Part = tuple[Callable[[], Tensor], tuple[Tensor, ...]]  # what is timed, and the inputs that get gradients


def parts(S: int, h: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> dict[str, Callable[[], Part]]:
    """Return every part by name. It makes its own inputs when it is called."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device).requires_grad_()

    def q(last: int = D) -> Tensor:
        return random(1, S, G, h, last)

    def keys(count: int = S) -> tuple[Tensor, Tensor]:
        return random(1, G, count, D), random(1, G, count, D)

    def of(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Part:
        return lambda: function(*inputs, **options), inputs

    def of_layer(function: Callable[..., Tensor], **options: Any) -> Part:
        return of(function, q(), *keys(compressed), *keys(), *keys(), q(3), **options)

    def selecting(blocks: Callable[[Tensor], Tensor]) -> Part:
        inputs = q(), *keys()
        with torch.no_grad():
            chosen = blocks(inputs[0])
        return lambda: selection_attention(*inputs, Selection.from_blocks(chosen, BLOCK, disjoint=True)), inputs

    def from_scores() -> Part:
        scores = torch.rand(1, S, G, S // BLOCK, device=device)
        return lambda: Selection.from_scores(scores, N, BLOCK).ranges, ()

    def fla() -> Part:
        inputs = random(1, S, G * h, D), random(1, S, G, D), random(1, S, G, D), random(1, S, G * h), random(1, S, G * h)
        return of(importlib.import_module(peers.FLA).parallel_nsa, *inputs, block_counts=N, block_size=BLOCK)

    compressed, case = (S - LENGTH) // STRIDE + 1, text_case(S, h)
    found: dict[str, Callable[[], Part]] = {
        "choose": lambda: of(lambda *inputs: compressed_attention(*inputs)[0], q(), *keys(compressed)),
        "from_scores": from_scores,
        "select": lambda: selecting(lambda q: compressed_attention(q, *keys(compressed))[1].block_indices),
        "window": lambda: of(sliding_window_attention, q(), *keys(), window=WINDOW),
        FLEX: lambda: of(flex_window(S, device), q(), *keys()),
        "gate": lambda: of(gated_sum, q(), q(), q(), q(3)),
        "layer": lambda: of_layer(nsa_attention, window=WINDOW),
        "recomputed": lambda: of_layer(nsa_attention, window=WINDOW, recompute=True),
        "fla": fla,
        "dense": lambda: of(dense_causal_sdpa, q(), *keys()),
    }
    if case is not None:
        found["select of text"] = lambda: selecting(lambda q: make_selection(case, q.device).block_indices)
        found["layer of text"] = lambda: of_layer(layer_with, blocks=make_selection(case, device).block_indices)
    return found


def layer_with(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_slc: Tensor, v_slc: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor, blocks: Tensor
) -> Tensor:
    """Return o [B,S,G,h,Dv] of `nsa_attention`, which chooses blocks but attends to `blocks` [B,S,G,n] of `BLOCK` keys
    instead.
    """
    inputs = three_branches.Inputs(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, None, blocks)
    options = three_branches.Options(WINDOW, Rule(n=blocks.shape[-1]), check_scale(None, q.shape[4]), None)
    return three_branches.attention(inputs, options)


def flex_window(S: int, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return FlexAttention of S rows that see the last `WINDOW` keys: o of q [B,S,G,h,Dk], k, v [B,G,S,D]."""
    attend = peers.flex(lambda b, head, row, key: (key <= row) & (key > row - WINDOW), None, S, S, device)
    return lambda q, k, v: torch.unflatten(attend(q.flatten(2, 3).transpose(1, 2), k, v).transpose(1, 2), 2, (-1, q.shape[3]))


def measure(part: Part, rep: float, directions: Sequence[str] = ("fwd", "bwd", "fwd+bwd")) -> list[Row]:
    """Return times in ms and memory in MiB, by direction; of a part without gradients "fwd" alone."""
    call, inputs = part
    with torch.no_grad():
        do = torch.randn_like(call()) if inputs else None

    def work(direction: str, saved: Tensor | None) -> tuple[Tensor, ...]:
        o = call() if saved is None else saved
        gradients = torch.autograd.grad(o, inputs, do, retain_graph=saved is not None) if direction != "fwd" else ()
        return gradients if direction == "bwd" else (o, *gradients)

    rows = []
    for direction in directions if inputs else ("fwd",):
        with torch.set_grad_enabled(direction != "fwd"):
            timed = partial(work, direction, call() if direction == "bwd" else None)
            timed()
            space = workspace_bytes(timed)
            times = milliseconds(timed, Timing(rep)).fields()
            del timed  # with what a forward saved
        rows.append({"direction": direction, **times, "workspace_mib": (space or 0) >> 20})
    return rows


def table(rows: list[Row]) -> str:
    """Return ms of each part, forward / backward, by length. The last row of a measurement counts."""
    cells = (((row["part"], row["h"]), f"{row['S'] // 1024}k", row["direction"], f"{row['ms_median']:.3g}") for row in by_length(rows))
    return markdown.pivot(["part", "h"], (cell for cell in cells if cell[2] != "fwd+bwd"), ("fwd", "bwd"), left=1)


def memory_table(rows: list[Row]) -> str:
    """Return MiB beyond inputs and outputs of each part, forward without gradients / forward + backward, by length."""
    cells = []
    for row in by_length(rows):
        used = row["peak_mib"] - row["outputs_mib"] if "outputs_mib" in row else row.get("workspace_mib")  # as older rows have it
        if used is not None and row["direction"] != "bwd":
            cells.append(((row["part"], row["h"]), f"{row['S'] // 1024}k", row["direction"], f"{used}"))
    return markdown.pivot(["part", "h"], cells, ("fwd", "fwd+bwd"), left=1)


def by_length(rows: list[Row]) -> list[Row]:
    """Return rows part by part, with columns in the order of lengths."""
    order = list(dict.fromkeys((row["part"], row["h"]) for row in rows))
    return sorted(rows, key=lambda row: (order.index((row["part"], row["h"])), row["S"]))


def main(
    out: Out,
    lengths: Annotated[str, typer.Option(help="rows of the sequence, comma-separated")] = "8192,32768,65536,131072",
    heads: Annotated[str, typer.Option(help="heads of a group, comma-separated")] = "16",
    only: Annotated[str, typer.Option(help=f"parts, comma-separated; by default all but {FLEX!r}")] = "",
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a part should fill")] = 200,
) -> None:
    """Time every part at every length; append the rows, and print a table."""
    need_gpu("layer_parts")

    def rows_of(S: int, h: int) -> Iterator[Row]:
        for name, make in parts(S, h).items():
            if name not in only.split(",") if only else name == FLEX:
                continue
            if name == "fla" and (why := peers.fla_lacks("cuda") or peers.fla_takes(prefill("random", S, h))):
                echo(f"fla was left out: {why}")
                continue
            found = measure(make(), rep)
            decided = events.decisions()[-1].forward if name.split()[0] in ("choose", "select") else None
            yield from ({"part": name, "S": S, "G": G, "h": h, "D": D, "backend": decided, **row} for row in found)

    sizes = product(map(int, lengths.split(",")), map(int, heads.split(",")))
    rows = store.kept(out, chain.from_iterable(starmap(rows_of, sizes)), store.stamp())
    echo(f"{table(rows)}\n\n{memory_table(rows)}")


if __name__ == "__main__":
    program(main)
