"""Write the new tokens of a step to pages and compress complete pieces: with few kernels on a GPU, in plain PyTorch
elsewhere."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nsa_sel.caching.pools import CacheScales, Pools
from nsa_sel.caching.step_tensors import StepTensors
from nsa_sel.compression import BlockMLP
from nsa_sel.core.transforms import hooked
from nsa_sel.quantize import as_bytes, stored

CACHE_KERNELS = "nsa_sel.backends._triton.cache"  # imported at the first step on a GPU
MAX_CACHE_KERNELSED = 4  # most new compressed keys per sequence for which the kernels run; each reads its own keys
MAX_SLOTS = 1 << 16  # most new compressed keys of a step for the kernels, which index in 32 bits

Compress = Callable[[Tensor], Tensor]


def append(pools: Pools, tensors: StepTensors, keys: tuple[Tensor, ...], scales: CacheScales | None = None) -> None:
    """Write the keys and values of new tokens to a layer's pages.

    Args:
        pools: the layer's pages.
        tensors: of the step.
        keys: k_cmp, v_cmp (not yet compressed), k_slc, v_slc, k_win, v_win, each [B,S,G,D].
        scales: with scales, the last four are quantized to e4m3.
    """
    to = pools.k_raw, pools.v_raw, pools.k, pools.v, pools.k_win, pools.v_win
    if pools.k.is_cuda:
        importlib.import_module(CACHE_KERNELS).append(keys, to, tensors.slot, tensors.recent_slot, scales)
        return
    if scales is not None:
        keys = *keys[:2], *(stored(x, scale[:, None]) for x, scale in zip(keys[2:], scales, strict=True))
    slots = (tensors.recent_slot,) * 2 + (tensors.slot,) * 2 + (tensors.recent_slot,) * 2
    for x, slot, y in zip(to, slots, keys, strict=True):
        put(x, slot, y)


def compress(
    pools: Pools, tensors: StepTensors, new: tuple[Tensor, Tensor], by: tuple[Compress, Compress], stride: int, appended: Callable[[], None]
) -> None:  # fmt: skip
    """Write the compressed keys and values whose last key is new.

    Args:
        pools, tensors: a layer's pages, and the tensors of the step.
        new: k_cmp and v_cmp [B,S,G,D] of new tokens, not compressed.
        by: the layer's compression of keys and of values.
        stride: compress_stride.
        appended: waits until the new tokens are in their pages. The kernels read `new` instead and do not call it.
    """
    raws, to = (pools.k_raw, pools.v_raw), (pools.k_cmp, pools.v_cmp)
    k_weights, v_weights = (_weights(work, raws[0]) for work in by)
    few = tensors.compressed_slot.shape[1] <= MAX_CACHE_KERNELSED and tensors.compressed_slot.numel() <= MAX_SLOTS
    if raws[0].is_cuda and few and k_weights is not None and v_weights is not None:
        importlib.import_module(CACHE_KERNELS).compress(
            raws, new, tensors.covered, tensors.first_new, tensors.compressed_slot, k_weights, v_weights, to, stride
        )
        return
    appended()
    for raw, x, work in zip(raws, to, by, strict=True):
        put(x, tensors.compressed_slot, work(covered(raw, tensors)).transpose(1, 2))


def covered(raw: Tensor, tensors: StepTensors) -> Tensor:
    """Return the keys or values [B,N,G,D] from which new compressed ones are made, N as of `StepTensors.covered`."""
    return raw.flatten(0, 1).index_select(0, tensors.covered.flatten()).view(*tensors.covered.shape, *raw.shape[2:])


def put(x: Tensor, slots: Tensor, y: Tensor) -> None:
    """Write y [B,N,G,D] to slots [B,N] of pages x [pages,page_size,G,D]."""
    as_bytes(x).flatten(0, 1).index_copy_(0, slots.flatten(), as_bytes(y).flatten(0, 1))


def _weights(work: Compress, raw: Tensor) -> tuple[Any, ...] | None:
    """Return the weights of a compression for the kernels, or None if they do not support its module, hooks, dtype or
    tensor types."""
    if type(work) is not BlockMLP or hooked(work) or not work.is_plain():
        return None
    weights = work.weights()
    supported = all(x is None or (type(x) in (Tensor, nn.Parameter) and x.dtype == raw.dtype and x.is_contiguous()) for x in weights)
    return weights if supported and raw.dtype != torch.float64 else None
