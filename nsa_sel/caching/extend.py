"""New tokens of a step written to pages, and compressed where a piece is complete: by few kernels on a GPU, in plain PyTorch elsewhere."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nsa_sel.caching.numbers import Numbers
from nsa_sel.caching.pools import Pools
from nsa_sel.caching.quantized import Scales
from nsa_sel.compression import BlockMLP
from nsa_sel.core.modules import hooked
from nsa_sel.core.quantized import as_bytes, stored

APPEND = "nsa_sel.backends._triton.cache"  # imported at the first step on a GPU
COMPRESS = "nsa_sel.backends._triton.compress"
MOST_COMPRESSED = 4  # new compressed keys of a sequence up to which the kernels read the keys of each by itself
MOST_SLOTS = 1 << 16  # of a step: kernels count in 32 bits

Compress = Callable[[Tensor], Tensor]


def append(pools: Pools, at: Numbers, keys: tuple[Tensor, ...], scales: Scales | None = None) -> None:
    """Write a layer's k_cmp, v_cmp (not compressed), k_slc, v_slc, k_win, v_win [B,S,G,D] of new tokens to its pages.

    With scales the last four are quantized to e4m3.
    """
    to = pools.k_raw, pools.v_raw, pools.k, pools.v, pools.k_win, pools.v_win
    if pools.k.is_cuda:
        importlib.import_module(APPEND).append(keys, to, at.slot, at.recent_slot, scales)
        return
    if scales is not None:
        keys = *keys[:2], *(stored(x, scale[:, None]) for x, scale in zip(keys[2:], scales, strict=True))
    slots = (at.recent_slot,) * 2 + (at.slot,) * 2 + (at.recent_slot,) * 2
    for x, slot, y in zip(to, slots, keys, strict=True):
        put(x, slot, y)


def compress(
    pools: Pools, at: Numbers, new: tuple[Tensor, Tensor], by: tuple[Compress, Compress], stride: int, appended: Callable[[], None]
) -> None:  # fmt: skip
    """Write the compressed keys and values whose last key is new.

    Args:
        pools, at: a layer's pages, and the step.
        new: k_cmp and v_cmp [B,S,G,D] of new tokens, not compressed.
        by: the layer's compression of keys and of values.
        stride: compress_stride.
        appended: waits until the new tokens are in their pages. The kernels do without.
    """
    raws, to = (pools.k_raw, pools.v_raw), (pools.k_cmp, pools.v_cmp)
    of_k, of_v = (_weights(work, raws[0]) for work in by)
    few = at.compressed_slot.shape[1] <= MOST_COMPRESSED and at.compressed_slot.numel() <= MOST_SLOTS
    if raws[0].is_cuda and few and of_k is not None and of_v is not None:
        importlib.import_module(COMPRESS).compress(raws, new, at.covered, at.fresh, at.compressed_slot, of_k, of_v, to, stride)
        return
    appended()
    for raw, x, work in zip(raws, to, by, strict=True):
        put(x, at.compressed_slot, work(covered(raw, at)).transpose(1, 2))


def covered(raw: Tensor, at: Numbers) -> Tensor:
    """Keys or values [B,(pieces + reach - 1) * compress_stride,G,D] from which new compressed ones are made."""
    return raw.flatten(0, 1).index_select(0, at.covered.flatten()).view(*at.covered.shape, *raw.shape[2:])


def put(x: Tensor, slots: Tensor, y: Tensor) -> None:
    """Write y [B,N,G,D] to the slots [B,N] of pages x [pages,size,G,D]."""
    as_bytes(x).flatten(0, 1).index_copy_(0, slots.flatten(), as_bytes(y).flatten(0, 1))


def _weights(work: Compress, raw: Tensor) -> tuple[Any, ...] | None:
    """What the kernels take of a compression, or None where it has to be called: other modules, hooks, dtypes, kinds of tensors."""
    if type(work) is not BlockMLP or hooked(work) or not work.is_plain():
        return None
    weights = work.weights()
    fit = all(x is None or (type(x) in (Tensor, nn.Parameter) and x.dtype == raw.dtype and x.is_contiguous()) for x in weights)
    return weights if fit and raw.dtype != torch.float64 else None
