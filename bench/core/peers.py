"""Others' kernels on our inputs: FlexAttention, masked and dense SDPA of torch, and where they are installed flash-linear-attention's NSA,
FlashAttention and FlashInfer.

Each takes the library's layout and returns o [B,S,G,h,Dv]. Masks and layouts are made once per selection, outside the timed calls;
`prepare_ms` of a row is their cost, and `selection` says "kept". Ours build their plans within the timed calls: "new".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import util
from typing import Any

import torch
from torch import Tensor

from nsa_sel.bench.core.baselines import masked_sdpa, selected, token_mask
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import Contender, Ready, as_it_is, dense
from nsa_sel.bench.core.dense_peers import by_tokens, dense_peers, lacks
from nsa_sel.bench.core.parity import Problem

FLA = "fla.ops.nsa"
FLA_ARGUMENTS = ("q", "k", "v", "g_slc", "block_indices", "block_counts", "block_size")
fla_lacks = lacks("flash-linear-attention", FLA, "parallel_nsa", "pip install flash-linear-attention", FLA_ARGUMENTS)


def peers() -> tuple[Contender, ...]:
    """All of them, whether they run here or not."""
    return (
        Contender("flex-attention", _flex, _flex_lacks, peer=True, selection="kept", forward_only=("cpu",)),
        Contender("masked-sdpa", _masked, peer=True, selection="kept"),
        dense(peer=True),
        dense("dense-flash", "flash", peer=True),
        dense("dense-sdpa", "any", "cpu", peer=True),
        Contender("fla-nsa", _fla, fla_lacks, _fla_refuses, peer=True),
        *dense_peers(),
    )


def _masked(problem: Problem) -> Ready:
    """Dense SDPA under a mask of tokens, which is additive in the inputs' dtype."""
    mask = token_mask(problem.selection, problem.k.shape[2], dtype=problem.q.dtype)
    return as_it_is(lambda q, k, v: masked_sdpa(q, k, v, mask))


def _flex_lacks(device: str) -> str | None:
    missing = util.find_spec("torch.nn.attention.flex_attention") is None
    return "this torch has no FlexAttention: install torch 2.6 or newer" if missing else None


def _flex(problem: Problem) -> Ready:
    """FlexAttention, compiled on a GPU, with a block mask over what every row selects; groups are batches, so that heads share it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # after eight other shapes it would not compile this one, but run it uncompiled
    selection, S_kv, device = problem.selection, problem.k.shape[2], problem.q.device
    B, S, G, h, _ = problem.q.shape
    unit = selection.block_size or 1  # rows select blocks, or keys where ranges are no blocks
    chosen = selected(selection, torch.arange(0, S_kv, unit, device=device)).transpose(1, 2).flatten(0, 1).contiguous()

    def sees(b: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return chosen[b, row, key // unit] & (key <= row + S_kv - S)

    mask = create_block_mask(sees, B * G, None, S, S_kv, device=device, _compile=device.type == "cuda")
    attend: Callable[..., Any] = flex_attention
    if device.type == "cuda":
        attend = torch.compile(attend, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = q.permute(0, 2, 3, 1, 4).flatten(0, 1)  # [B*G,h,S,Dk]
        o: Tensor = attend(heads, k.flatten(0, 1).unsqueeze(1), v.flatten(0, 1).unsqueeze(1), block_mask=mask, enable_gqa=h > 1)
        return o.view(B, G, h, S, -1).permute(0, 3, 1, 2, 4)

    return as_it_is(call)


def fla_layer(
    q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor, g_slc: Tensor, n: int, block_size: int
) -> Tensor:  # fmt: skip
    """o [B,S,heads,Dv] of `parallel_nsa` with its compression and choice of blocks, without a window, for which it needs another package.

    Args:
        q: [B,S,heads,Dk].
        k, v: [B,S,G,Dk] and [B,S,G,Dv], which all branches share.
        g_cmp, g_slc: gates [B,S,heads].
        n: blocks of a row.
        block_size: keys of a block, and of a compressed key: its mean.
    """
    o: Tensor = importlib.import_module(FLA).parallel_nsa(q, k, v, g_cmp, g_slc, block_counts=n, block_size=block_size)
    return o


def _fla_refuses(case: Case) -> str | None:
    if not case.block:
        return "takes whole blocks alone"
    return fla_refuses_heads(case.h)


def fla_refuses_heads(h: int) -> str | None:
    return None if h >= 16 and not h & (h - 1) else "takes 16, 32 ... heads per group alone"


def _fla(problem: Problem) -> Ready:
    """`parallel_nsa` of flash-linear-attention with the selection's blocks, and neither compression nor window.

    It keeps keys as [B,S_kv,G,D]: they lie so in memory before the call, which copies nothing. It averages keys and values over blocks
    in every call, for a compression that is not asked for: that is in its times.
    """
    parallel_nsa = importlib.import_module(FLA).parallel_nsa
    block_size, indices = problem.selection.block_size, problem.selection.block_indices.long().contiguous()
    B, S, G, h, _ = problem.q.shape

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
        options = {"block_indices": indices, "block_counts": indices.shape[-1], "block_size": block_size}
        o: Tensor = parallel_nsa(q.flatten(2, 3).contiguous(), k, v, **options)
        return o.view(B, S, G, h, -1)

    return Ready(call, call, layout=by_tokens)
