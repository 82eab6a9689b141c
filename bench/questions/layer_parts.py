"""What does each part of NSA's layer take, forward and backward, beside dense attention, and how much memory does the whole need?

    python -m nsa_sel.bench.questions.layer_parts --out bench/results/h200/profiles/layer_parts.jsonl

One sequence, 4 KV groups, D 128, bf16, NSA's sizes (compressed blocks of 32 every 16 keys, 16 blocks of 64, a window of 512), random
inputs: neighbors choose other blocks, which is the hard case for the selected branch. "select of text" and "layer of text" are those
parts with the blocks that a model chose in a text of this length, as far as bench/data has one; the layer still chooses. Parts:
    choose        compressed_attention: attention to compressed keys, importance, the best blocks
    from_scores   Selection.from_scores on given scores (forward alone)
    select        selection_attention of the chosen blocks, from a new Selection each time, by the policy's choice
    window        sliding_window_attention
    gate          the gated sum of the three by itself, so that backward writes gate * do for each; the layer does not
    layer         nsa_attention: all of these
    recomputed    nsa_attention(recompute=True)
    fla           parallel_nsa of flash-linear-attention, if it is installed: its own compression (means of 64 keys), choice and selected
                  branch on keys that the branches share; no window, for which it needs another package
    dense         causal attention by cuDNN
Directions: fwd, without gradients; bwd, torch.autograd.grad of the part; fwd+bwd, both in one, with all that is saved in between.
`peak_mib` is the most memory beyond what was there before (inputs; for bwd also what forward saved), `outputs_mib` what of it is o and
gradients. `beyond` is the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from nsa_sel.attention import selection_attention
from nsa_sel.bench.core import environment, markdown, peers, store
from nsa_sel.bench.core.baselines import dense_causal_sdpa
from nsa_sel.bench.core.command_line import echo, need_gpu, program
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing, milliseconds
from nsa_sel.bench.questions.text_parts import BLOCK, WINDOW, Part, text_parts
from nsa_sel.branches import nsa_attention
from nsa_sel.compressed import compressed_attention
from nsa_sel.gating import gated_sum
from nsa_sel.selection import Selection
from nsa_sel.telemetry import events
from nsa_sel.window import sliding_window_attention

G, D, N, STRIDE, LENGTH = 4, 128, 16, 16, 32


def parts(S: int, h: int) -> dict[str, Callable[[], Part]]:
    """Every part by name, made with its own inputs when it is called."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda").requires_grad_()

    def q() -> Tensor:
        return random(1, S, G, h, D)

    def keys(count: int = S) -> tuple[Tensor, Tensor]:
        return random(1, G, count, D), random(1, G, count, D)

    def gates() -> Tensor:
        return torch.rand(1, S, G, h, 3, dtype=torch.bfloat16, device="cuda").requires_grad_()

    compressed = (S - LENGTH) // STRIDE + 1

    def choose() -> Part:
        inputs = q(), *keys(compressed)
        return lambda: compressed_attention(*inputs)[0], inputs

    def from_scores() -> Part:
        scores = torch.rand(1, S, G, S // BLOCK, device="cuda")
        return lambda: Selection.from_scores(scores, N, BLOCK).ranges, ()

    def select() -> Part:
        inputs = q(), *keys()
        with torch.no_grad():
            blocks = compressed_attention(inputs[0], *keys(compressed))[1].block_indices
        return lambda: selection_attention(*inputs, Selection.from_blocks(blocks, BLOCK, disjoint=True)), inputs

    def window() -> Part:
        inputs = q(), *keys()
        return lambda: sliding_window_attention(*inputs, WINDOW), inputs

    def gate() -> Part:
        inputs = q(), q(), q(), gates()
        return lambda: gated_sum(*inputs), inputs

    def of_layer() -> tuple[Tensor, ...]:
        return q(), *keys(compressed), *keys(), *keys(), gates()

    def layer() -> Part:
        inputs = of_layer()
        return lambda: nsa_attention(*inputs, window=WINDOW), inputs

    def recomputed() -> Part:
        _, inputs = layer()
        return lambda: nsa_attention(*inputs, window=WINDOW, recompute=True), inputs

    def fla() -> Part:
        inputs = random(1, S, G * h, D), random(1, S, G, D), random(1, S, G, D), random(1, S, G * h), random(1, S, G * h)
        return lambda: peers.fla_layer(*inputs, N, BLOCK), inputs

    def dense() -> Part:
        inputs = q(), *keys()
        return lambda: dense_causal_sdpa(*inputs), inputs

    mine = {made.__name__: made for made in (choose, from_scores, select, window, gate, layer, recomputed)}
    return {**mine, **text_parts(S, h, lambda: (q(), *keys()), of_layer), "fla": fla, "dense": dense}


def measure(part: Part, rep: float) -> list[dict[str, Any]]:
    """Times in ms and memory in MiB, by direction."""
    call, inputs = part
    with torch.no_grad():
        call()
        rows = [{"direction": "fwd", **_measured(lambda: (call(),), rep)}]
    if inputs:
        o = call()
        do = torch.randn_like(o)
        rows.append({"direction": "bwd", **_measured(lambda: torch.autograd.grad(o, inputs, do, retain_graph=True), rep)})
        del o

        def both() -> tuple[Tensor, ...]:
            o = call()
            return o, *torch.autograd.grad(o, inputs, do)

        rows.append({"direction": "fwd+bwd", **_measured(both, rep)})
    return rows


def _measured(work: Callable[[], tuple[Tensor, ...]], rep: float) -> dict[str, Any]:
    work()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = sum(x.nbytes for x in work())
    peak = torch.cuda.max_memory_allocated() - before
    return {**milliseconds(work, Timing(rep)).fields(), "peak_mib": peak >> 20, "outputs_mib": outputs >> 20}


def table(rows: list[Row]) -> str:
    """Milliseconds of each part, forward / backward, by length; the last row of a measurement counts, "-" stands for none."""
    return _by_length(rows, ("fwd", "bwd"), lambda row: f"{row['ms_median']:.3g}")


def memory_table(rows: list[Row]) -> str:
    """MiB beyond inputs and outputs of each part, forward without gradients / forward + backward, by length."""
    known = [row for row in rows if "outputs_mib" in row]
    return _by_length(known, ("fwd", "fwd+bwd"), lambda row: f"{beyond(row)}")


def beyond(row: Row) -> int:
    """MiB beyond inputs and outputs."""
    return int(row["peak_mib"] - row["outputs_mib"])


def _by_length(rows: list[Row], directions: tuple[str, str], shown: Callable[[Row], str]) -> str:
    found = {(row["part"], row["h"], row["S"], row["direction"]): row for row in rows}
    lengths = sorted({row["S"] for row in rows})

    def cell(part: str, h: int, S: int) -> str:
        both = [found.get((part, h, S, direction)) for direction in directions]
        return " / ".join("-" if row is None else shown(row) for row in both)

    lines = [(part, h, *(cell(part, h, S) for S in lengths)) for part, h in dict.fromkeys((row["part"], row["h"]) for row in rows)]
    return markdown.table(["part", "h", *(f"{S // 1024}k" for S in lengths)], lines, left=1)


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file that rows are appended to")],
    lengths: Annotated[str, typer.Option(help="rows of the sequence, comma-separated")] = "8192,32768,65536,131072",
    heads: Annotated[str, typer.Option(help="heads of a group, comma-separated")] = "16",
    only: Annotated[str, typer.Option(help="parts, comma-separated; by default all")] = "",
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a part should fill")] = 200,
) -> None:
    """Time every part at every length; append the rows, and print a table."""
    need_gpu("layer_parts")
    facts, rows = environment.stamp(), list[Row]()
    for S in map(int, lengths.split(",")):
        for h in map(int, heads.split(",")):
            for name, make in parts(S, h).items():
                if only and name not in only.split(","):
                    continue
                if name == "fla" and (lacks := peers.fla_lacks("cuda") or peers.fla_refuses_heads(h)):
                    echo(f"fla was left out: {lacks}")
                    continue
                found = measure(make(), rep)
                decided = events.decisions()[-1].forward if name.split()[0] in ("choose", "select") else None
                new = [{"part": name, "S": S, "G": G, "h": h, "D": D, "backend": decided, **row, **facts} for row in found]
                store.append(out, new)  # now: a later part may not fit
                rows += new
                torch.cuda.empty_cache()
    echo(table(rows))
    echo(memory_table(rows))


if __name__ == "__main__":
    program(main)
