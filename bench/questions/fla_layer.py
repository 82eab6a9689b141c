"""What does patch_fla change? flash-linear-attention's own layer as it is, on nsa-sel, and with dense attention in its place.

    python -m nsa_sel.bench.questions.fla_layer --out bench/results/h100/profiles/fla_layer.jsonl

fla's `NativeSparseAttention` with 64 heads over 4 KV heads of 128 columns, hidden size 2048, 16 blocks of 64 keys, bf16, random hidden
states: the whole layer, its projections and rotary positions too. Needs flash-linear-attention on a GPU. Parts:
    on nsa-sel         after `patch_fla()`, without a window
    with a window      of 512 keys, after `patch_fla()`
    dense              causal attention by cuDNN in place of `parallel_nsa`
    fla                as it is, without a window, for which it needs another package
Directions and fields are those of layer_parts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch import Tensor

from nsa_sel.bench.core import environment, peers, store
from nsa_sel.bench.core.baselines import dense_causal_sdpa
from nsa_sel.bench.core.command_line import echo, need_gpu, program
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.questions import layer_parts
from nsa_sel.bench.questions.text_parts import Part
from nsa_sel.compat import parallel_nsa
from nsa_sel.errors import ArgumentError

LAYER = "fla.layers.nsa"
HIDDEN, HEADS, GROUPS, D, WINDOW = 2048, 64, 4, 128, 512


def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Dense causal attention with the arguments that fla's layer gives `parallel_nsa`."""
    o = dense_causal_sdpa(torch.unflatten(q, 2, (GROUPS, -1)), k.transpose(1, 2), v.transpose(1, 2))
    return o.flatten(2, 3)


PARTS: dict[str, tuple[int, Callable[..., Tensor] | None]] = {  # window, and what stands in for fla's own parallel_nsa
    "on nsa-sel": (0, parallel_nsa),
    "with a window": (WINDOW, parallel_nsa),
    "dense": (0, dense),
    "fla": (0, None),  # last: it tunes itself for minutes
}


def layer(S: int, window: int, gated: bool) -> Part:
    """fla's layer on hidden states [1,S,HIDDEN]; unless `gated`, without gradients of the gates' weights."""
    torch.manual_seed(0)
    sizes = {"num_heads": HEADS, "num_kv_heads": GROUPS, "head_dim": D, "window_size": window, "layer_idx": 0}
    made = importlib.import_module(LAYER).NativeSparseAttention(HIDDEN, **sizes).to("cuda", torch.bfloat16)
    x = torch.randn(1, S, HIDDEN, dtype=torch.bfloat16, device="cuda").requires_grad_()
    return lambda: made(x)[0], (x, *(weight for name, weight in made.named_parameters() if gated or not name.startswith("g_proj")))


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file that rows are appended to")],
    lengths: Annotated[str, typer.Option(help="rows of the sequence, comma-separated")] = "8192,32768",
    only: Annotated[str, typer.Option(help="parts, comma-separated; by default all")] = "",
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a part should fill")] = 200,
) -> None:
    """Time the layer in every way at every length; append the rows, and print a table."""
    need_gpu("fla_layer")
    if lacks := peers.fla_lacks("cuda"):
        raise ArgumentError("flash-linear-attention", lacks, "installed", "pip install flash-linear-attention")
    facts, rows = environment.stamp(), list[Row]()
    module = importlib.import_module(LAYER)
    for S in map(int, lengths.split(",")):
        for name, (window, call) in PARTS.items():
            if only and name not in only.split(","):
                continue
            with mock.patch.object(module, "parallel_nsa", call or module.parallel_nsa):
                found = layer_parts.measure(layer(S, window, call is not dense), rep)
            new = [{"part": name, "S": S, "G": GROUPS, "h": HEADS // GROUPS, "D": D, **row, **facts} for row in found]
            store.append(out, new)
            rows += new
            torch.cuda.empty_cache()
    echo(layer_parts.table(rows))


if __name__ == "__main__":
    program(main)
