"""Sliding windows: which keys a row sees, and dk and dv without atomics. The forward pass and dq are in runs.py.

Row s at position t = start + s sees the keys t - window + 1 to t. In a packed batch a row sees only keys of its own
sequence, and padding rows, after the last sequence, see none.

    dv = sum p^T do,  dk = scale * sum ds^T q   over rows and heads (softmax.py); p is [keys, rows] from the start

A program takes a tile of keys and all rows that see any of them: the tile's own rows and the window's after it. Those
at both ends do not see all keys.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.arguments import Dims, Strides, dims_of, options
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.softmax import products, split_products
from nsa_sel.backends._triton.tiles import load_kv, row_descriptors
from nsa_sel.backends._triton.walk import add_rows_step, empty_dkdv, load_rows, store_dkdv
from nsa_sel.core.call import WindowCall
from nsa_sel.settings.schema import KernelConfig


class Sizes(NamedTuple):
    """Sizes, as kernels take them."""

    S: int
    S_kv: int
    G: int
    start: int  # position of row 0
    window: int
    tiles: int  # tiles of rows, or of keys


@triton.jit
def keys_of_rows(bounds, s, sizes):
    """Return the window [low, high) of each of the rows s; low >= high for padding. low never decreases with s.

    bounds: first key of each row's sequence [S] (then other facts), or None.
    """
    begin = 0
    if bounds is not None:
        begin = tl.load(bounds + s)
    return tl.maximum(sizes.start + s - sizes.window + 1, begin), sizes.start + s + 1


@triton.jit
def rows_of_keys(bounds, key, sizes):
    """Return the rows [low, high) that see each of the keys `key` (which exist if key < S_kv). high may exceed the last
    row."""
    high = key + sizes.window
    if bounds is not None:
        high = tl.minimum(high, tl.load(bounds + sizes.S + key, mask=key < sizes.S_kv, other=0))
    return key - sizes.start, high - sizes.start


@triton.jit
def row_limits(bounds, first, key, sizes, BLOCK_K: tl.constexpr):
    """Return the rows [low, high) that see any, and [begun, over) that see all, of the keys `key` from `first` on."""
    low = tl.minimum(tl.maximum(first - sizes.start, 0), sizes.S)
    begun = tl.minimum(first + BLOCK_K, sizes.S_kv) - 1 - sizes.start
    over, high = first + sizes.window - sizes.start, first + BLOCK_K - 1 + sizes.window - sizes.start
    if bounds is not None:
        _, until = rows_of_keys(bounds, key, sizes)
        over, high = tl.min(tl.where(key < sizes.S_kv, until, sizes.S), 0), tl.max(until, 0)
    return low, begun, over, tl.maximum(tl.minimum(high, sizes.S), low)


@triton.jit
def add_step(sums, kv, rows, lse2, delta, bounds, row, key, cut, sizes, scale_log2, REST: tl.constexpr):
    """Add one step of rows (q in two column tiles, do) to the sums of the keys `key` [BLOCK_K].

    cut: some row does not see some key.
    """
    k_tile, k_rest, v_tile = kv
    q_tile, q_rest, do_tile = rows
    p = tl.exp2(split_products(k_tile, k_rest, q_tile, q_rest, REST) * scale_log2 - lse2[None, :])  # [BLOCK_K, ROWS]
    ds = p * (products(v_tile, do_tile) - delta[None, :])  # [BLOCK_K, ROWS]
    if cut:
        low, high = rows_of_keys(bounds, key, sizes)  # [BLOCK_K]
        visible = (row[None, :] >= low[:, None]) & (row[None, :] < high[:, None])
        p = tl.where(visible, p, 0.0)
        ds = tl.where(visible, ds, 0.0)
    ds = ds.to(q_tile.dtype)
    return add_rows_step(sums, p.to(do_tile.dtype), ds, (q_tile, q_rest), do_tile, REST)


@triton.jit
def add_rows(
    sums, kv, q, do, lse2, delta, bounds, b, g, key, low, high, begun, over, strides, stride_do, sizes, scale_log2,
    dims: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the rows [low, high) to the sums, loaded through pointers.

    A step takes ROWS pairs of row and head, so that any number of heads fills the tensor cores.
    """
    h: tl.constexpr = dims.h
    r = tl.arange(0, ROWS)
    for pair0 in range(0, (high - low) * h, ROWS):
        row = low + (pair0 + r) // h  # [ROWS], as all below
        exists = row < high
        s, head = tl.minimum(row, sizes.S - 1).to(tl.int64), ((pair0 + r) % h).to(tl.int64)
        rows = load_rows(None, None, q, do, strides, stride_do, b, g, 0, s, head, exists, dims, ROWS)
        out = ((b * sizes.S + s) * sizes.G + g) * h + head
        # A row that does not exist gets p = 0 from an infinite log-sum-exp.
        lse2_rows = tl.load(lse2 + out, mask=exists, other=float("inf"))
        delta_rows = tl.load(delta + out, mask=exists, other=0.0)
        cut = (low + pair0 // h < begun) | (low + (pair0 + ROWS - 1) // h >= over)
        sums = add_step(sums, kv, rows, lse2_rows, delta_rows, bounds, row, key, cut, sizes, scale_log2, dims.BLOCK_REST)
    return sums


@triton.jit
def add_steps(
    sums, kv, q_desc, do_desc, lse2, delta, bounds, b, g, key, low, steps, begun, over, sizes, scale_log2,
    dims: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Do `add_rows` for whole steps from row `low` on, through TMA, which loads TOKENS rows with their heads.

    Programs begin at different steps, in turns: those that run together then read the same rows at about the same time,
    while they are in the L2 cache.
    """
    h: tl.constexpr = dims.h
    TOKENS: tl.constexpr = ROWS // h
    r = tl.arange(0, ROWS)
    pairs = r // h * (sizes.G * h) + r % h
    out = ((b * sizes.S + low) * sizes.G + g) * h
    turn = low // TOKENS % tl.maximum(steps, 1)
    for i in range(0, steps):
        done = tl.where(i < turn, i + steps - turn, i - turn) * TOKENS
        rows = load_rows(q_desc, do_desc, None, None, None, None, b, g, low + done, None, None, None, dims, ROWS)
        here = out + done.to(tl.int64) * (sizes.G * h)
        lse2_rows = tl.load(lse2 + here + pairs)  # [ROWS]
        delta_rows = tl.load(delta + here + pairs)  # [ROWS]
        cut = (low + done < begun) | (low + done + TOKENS > over)
        sums = add_step(sums, kv, rows, lse2_rows, delta_rows, bounds, low + done + r // h, key, cut, sizes, scale_log2, 0)
    return sums


@triton.jit
def dkdv_kernel(
    q, q_desc, do_desc, k, v, bounds, do, lse2, delta, dk, dv, strides, stride_do, sizes, scale, scale_log2,
    dims: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dk [B,G,S_kv,Dk] and dv [B,G,S_kv,Dv] of one tile of keys; zeros for keys that no row sees.

    Grid: one program per tile of keys and pair b*G + g, tiles first.
    Tiles: k and v [BLOCK_K, D], loaded once; q and do [ROWS, D] per step.
    TMA: q_desc and do_desc load whole steps of rows; None: pointer loads.
    """
    number = tl.program_id(0)
    first = number % sizes.tiles * BLOCK_K
    bg = (number // sizes.tiles).to(tl.int64)
    b, g = bg // sizes.G, bg % sizes.G
    key = first + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    kv = load_kv(k, v, strides, b, g, key, key < sizes.S_kv, dims)
    low, begun, over, high = row_limits(bounds, first, key, sizes, BLOCK_K)
    sums = empty_dkdv(BLOCK_K, dims, delta.dtype.element_ty)
    whole = low
    if q_desc is not None:
        TOKENS: tl.constexpr = ROWS // dims.h
        whole = low + (high - low) // TOKENS * TOKENS
    sums = add_rows(
        sums, kv, q, do, lse2, delta, bounds, b, g, key, whole, high, begun, over, strides, stride_do, sizes, scale_log2, dims, ROWS
    )  # fmt: skip
    if q_desc is not None:
        sums = add_steps(
            sums, kv, q_desc, do_desc, lse2, delta, bounds, b, g, key, low, (whole - low) // TOKENS, begun, over, sizes, scale_log2,
            dims, ROWS,
        )  # fmt: skip
    out = bg * sizes.S_kv + key
    store_dkdv(dk + out * dims.Dk, dv + out * dims.Dv, sums, scale, key < sizes.S_kv, dims)


def dkdv(call: WindowCall, do: Tensor, lse2: Tensor, delta: Tensor, config: KernelConfig) -> tuple[Tensor, Tensor]:
    """Return contiguous dk [B,G,S_kv,Dk] and dv [B,G,S_kv,Dv] from lse2 and delta [B,S,G,h] of dq."""
    B, G, S_kv, _ = call.k.shape
    dk, dv = (x.new_empty(x.shape) for x in (call.k, call.v))
    dims, tiles = dims_of(call.q, call.v), -(-S_kv // config.block_l)
    descriptors = row_descriptors(call.q, do, dims, config.rows, config.loads == "tma")
    _dkdv(dims, config).launch(
        B * G * tiles,
        (call.q, *descriptors, call.k, call.v, call.bounds, do, lse2, delta, dk, dv),
        (strides_of(call), do.stride()[:4], sizes_of(call, tiles), call.scale, call.scale_log2()),
    )
    return dk, dv


@functools.lru_cache(REMEMBERED)
def _dkdv(dims: Dims, config: KernelConfig) -> Kernel:
    return Kernel(dkdv_kernel, dims=dims, ROWS=config.rows, BLOCK_K=config.block_l, **options(config))


def strides_of(call: WindowCall) -> Strides:
    return Strides(call.q.stride()[:4], call.k.stride()[:3], call.v.stride()[:3], ())


def sizes_of(call: WindowCall, tiles: int) -> Sizes:
    S, G, S_kv = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    return Sizes(S, S_kv, G, S_kv - S, min(call.window, S_kv), tiles)
