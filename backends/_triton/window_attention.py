"""Attention of every row to the last `window` keys, and its dq, with the online softmax of softmax.py.

A tile of adjacent rows and their h heads walks the window + rows - 1 keys that its rows see. Steps of BLOCK_K keys
begin at the first of these: with a mask until all windows have begun, then without a mask while all rows see the whole
step. The remaining keys, including the tile's own, take a mask in steps of TAIL_K keys. Other keys are not read.

Within a tile 0 * NaN is NaN: a NaN or infinity in a key or value that one row sees may reach other rows of the tile.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.arguments import Dims, options
from nsa_sel.backends._triton.choose_rows import tile_tokens
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.rows import tile_rows
from nsa_sel.backends._triton.softmax import (
    LN_2,
    LOWEST,
    add_product,
    delta_and_lse,
    finish_softmax,
    p_and_ds,
    softmax_step,
    split_products,
)
from nsa_sel.backends._triton.tiles import (
    MIN_TILE,
    load_columns,
    load_kv,
    load_split,
    load_whole,
    row_pointers,
    store_columns,
    store_split,
    tile_size,
)
from nsa_sel.backends._triton.window_rows import dims_of, key_value_descriptors, keys_of_rows, sizes_of, strides_of
from nsa_sel.core.call import WindowCall
from nsa_sel.settings.schema import KernelConfig


@triton.jit
def key_limits(low, high, BLOCK_K: tl.constexpr):
    """Return step limits for rows that see the keys [low, high).

    These are: the first key that any row sees, the first key inside all windows, the end of the whole steps of BLOCK_K
    keys at or before
    every row's position, and one past the last key.
    """
    first, last = tl.min(low, 0), tl.max(low, 0)
    whole = first + tl.maximum(tl.min(high, 0) - first, 0) // BLOCK_K * BLOCK_K
    return first, last, whole, tl.max(tl.where(low < high, high, 0), 0)


@triton.jit
def masked(logits, low, high, key):
    """Return logits [rows, keys] with -inf where a row does not see a key."""
    return tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), logits, float("-inf"))


@triton.jit
def forward_kernel(
    q, k_desc, k_rest_desc, v_desc, k, v, bounds, o, lse, strides, sizes, scale_log2,
    dims: tl.constexpr, TQ: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_K: tl.constexpr,
):  # fmt: skip
    """Compute o = softmax(scale * q k^T) v and lse for one tile's rows and heads.

    Grid: one program per tile of TQ tokens; where h > ROWS, one program per ROWS heads.
    Tiles: q [ROWS, BLOCK_D + BLOCK_REST], k [BLOCK_K, BLOCK_D + BLOCK_REST], v [BLOCK_K, BLOCK_DV]; TAIL_K keys per
    tail step.
    TMA: k_desc, k_rest_desc and v_desc load steps of BLOCK_K keys; None: pointer loads.
    """
    ACC: tl.constexpr = lse.dtype.element_ty
    REST: tl.constexpr = dims.BLOCK_REST
    BLOCK_DV: tl.constexpr = dims.BLOCK_DV
    b, g, _, s, _, head, out, exists = tile_rows(tl.program_id(0), sizes.S, sizes.G, sizes.tiles, dims.h, TQ, ROWS)
    b64, g64, s64 = b.to(tl.int64), g.to(tl.int64), s.to(tl.int64)
    q_tile, q_rest = load_split(row_pointers(q, strides.q, b64, g64, s64, head), exists, dims.Dk, dims.BLOCK_D, REST)
    low, high = keys_of_rows(bounds, s, sizes)
    first, begun, whole, end = key_limits(low, high, BLOCK_K)

    acc = tl.zeros([ROWS, BLOCK_DV], ACC)
    l = tl.zeros([ROWS], ACC)
    m = tl.full([ROWS], LOWEST, ACC)
    for c in range(whole, end, TAIL_K):
        key = c + tl.arange(0, TAIL_K)
        k_tail, k_rest, v_tail = load_kv(k, v, strides, b64, g64, key, key < end, dims)
        logits = split_products(q_tile, q_rest, k_tail, k_rest, REST)
        logits = masked(logits, low, high, key)
        acc, l, m = softmax_step(logits, v_tail, acc, l, m, scale_log2)
    for c in range(first, whole, BLOCK_K):
        k_tile, k_rest, v_tile = load_whole(k_desc, k_rest_desc, v_desc, k, v, strides, b, g, c, dims, BLOCK_K)
        logits = split_products(q_tile, q_rest, k_tile, k_rest, REST)
        if c < begun:
            logits = masked(logits, low, high, c + tl.arange(0, BLOCK_K))
        acc, l, m = softmax_step(logits, v_tile, acc, l, m, scale_log2)

    o_tile, lse_rows = finish_softmax(acc, l, m, scale_log2)
    store_columns(o + out * dims.Dv, o_tile, exists, 0, dims.Dv)
    tl.store(lse + out, lse_rows * LN_2, mask=exists)


@triton.jit
def add_dq(sums, logits, do_tile, kv, lse2, delta, scale_log2, REST: tl.constexpr):
    """Add one step's contribution to dq / scale (two column tiles)."""
    acc, rest = sums
    k_tile, k_rest, v_tile = kv
    _, ds = p_and_ds(logits, do_tile, v_tile, lse2, delta, scale_log2)
    ds = ds.to(k_tile.dtype)
    acc = add_product(acc, ds, k_tile)
    if REST > 0:
        rest = add_product(rest, ds, k_rest)
    return acc, rest


@triton.jit
def dq_kernel(
    q, k_desc, k_rest_desc, v_desc, k, v, bounds, o, lse, do, dlse, dq, lse2, delta, strides, stride_do, sizes, scale, scale_log2,
    dims: tl.constexpr, TQ: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_K: tl.constexpr,
):  # fmt: skip
    """Compute dq = scale * ds k for one tile's rows and heads; store base-2 lse and delta = sum(do * o) - dlse
    [B,S,G,h].

    Grid, tiles and TMA are those of `forward_kernel`.
    """
    ACC: tl.constexpr = lse.dtype.element_ty
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    REST: tl.constexpr = dims.BLOCK_REST
    b, g, _, s, _, head, out, exists = tile_rows(tl.program_id(0), sizes.S, sizes.G, sizes.tiles, dims.h, TQ, ROWS)
    b64, g64, s64 = b.to(tl.int64), g.to(tl.int64), s.to(tl.int64)
    q_tile, q_rest = load_split(row_pointers(q, strides.q, b64, g64, s64, head), exists, dims.Dk, BLOCK_D, REST)
    do_tile = load_columns(row_pointers(do, stride_do, b64, g64, s64, head), exists, 0, dims.Dv, dims.BLOCK_DV)
    delta_rows, lse2_rows = delta_and_lse(o, do_tile, lse, dlse, delta, out, exists, dims)
    tl.store(lse2 + out, lse2_rows, mask=exists)
    low, high = keys_of_rows(bounds, s, sizes)
    first, begun, whole, end = key_limits(low, high, BLOCK_K)

    acc = tl.zeros([ROWS, BLOCK_D], ACC)
    rest = tl.zeros([ROWS, REST], ACC) if REST > 0 else acc
    for c in range(whole, end, TAIL_K):
        key = c + tl.arange(0, TAIL_K)
        kv = load_kv(k, v, strides, b64, g64, key, key < end, dims)
        logits = masked(split_products(q_tile, q_rest, kv[0], kv[1], REST), low, high, key)
        acc, rest = add_dq((acc, rest), logits, do_tile, kv, lse2_rows, delta_rows, scale_log2, REST)
    for c in range(first, whole, BLOCK_K):
        kv = load_whole(k_desc, k_rest_desc, v_desc, k, v, strides, b, g, c, dims, BLOCK_K)
        logits = split_products(q_tile, q_rest, kv[0], kv[1], REST)
        if c < begun:
            logits = masked(logits, low, high, c + tl.arange(0, BLOCK_K))
        acc, rest = add_dq((acc, rest), logits, do_tile, kv, lse2_rows, delta_rows, scale_log2, REST)
    if bounds is not None:  # p is NaN in padding rows
        saw = (low < high)[:, None]
        acc, rest = tl.where(saw, acc, 0.0), tl.where(saw, rest, 0.0)
    store_split(dq + out * dims.Dk, acc * scale, rest * scale, exists, dims.Dk, REST)


def forward(call: WindowCall, o: Tensor, lse: Tensor, config: KernelConfig) -> None:
    """Launch the forward kernel, which writes o [B,S,G,h,Dv] and lse [B,S,G,h], both contiguous."""
    kernel, sizes, programs = _launched(forward_kernel, call, config)
    descriptors = key_value_descriptors(call, kernel.constants["dims"], config.block_l, config)
    kernel.launch(programs, (call.q, *descriptors, call.k, call.v, call.bounds, o, lse), (strides_of(call), sizes, call.scale_log2()))


def dq(call: WindowCall, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, config: KernelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [B,S,G,h,Dk], and lse2 and delta [B,S,G,h] for dk and dv. o, lse and dlse are contiguous."""
    to, lse2, delta = torch.empty_like(call.q, memory_format=torch.contiguous_format), torch.empty_like(lse), torch.empty_like(lse)
    kernel, sizes, programs = _launched(dq_kernel, call, config)
    descriptors = key_value_descriptors(call, kernel.constants["dims"], config.block_l, config)
    kernel.launch(
        programs,
        (call.q, *descriptors, call.k, call.v, call.bounds, o, lse, do, dlse, to, lse2, delta),
        (strides_of(call), do.stride()[:4], sizes, call.scale, call.scale_log2()),
    )
    return to, lse2, delta


def _launched(function: Any, call: WindowCall, config: KernelConfig) -> tuple[Kernel, Any, int]:
    """Return the kernel, its sizes and its grid: tiles of all sequences and groups; more than `rows` heads take several
    programs."""
    B, S, G, h, _ = call.q.shape
    kernel = _kernel(function, dims_of(call), config)
    tiles = -(-S // kernel.constants["TQ"])
    return kernel, sizes_of(call, tiles), B * G * tiles * -(-h // config.rows)


@functools.lru_cache(REMEMBERED)
def _kernel(function: Any, dims: Dims, config: KernelConfig) -> Kernel:
    tokens = tile_tokens(dims.h, config.rows)
    tail = min(tile_size(tokens, MIN_TILE), config.block_l)  # windows of whole steps leave tokens - 1 keys
    return Kernel(function, dims=dims, TQ=tokens, ROWS=config.rows, BLOCK_K=config.block_l, TAIL_K=tail, **options(config))
