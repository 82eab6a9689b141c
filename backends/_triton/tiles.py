"""Tiles in memory: where rows of q, k, v and their gradients begin, and loads and stores of their columns.

Strides are tuples in elements: (b, s, g, h) of q-like tensors, (b, g, n) of k and v, (b, s) of positions (`arguments.Strides`).
A head dimension like 192 takes two tiles, BLOCK_D = 128 and BLOCK_REST = 64 columns wide; BLOCK_REST = 0 where one tile holds it.
"""

from __future__ import annotations

import triton
import triton.language as tl

MIN_TILE = 16  # the smallest side of a tensor-core operand


def tile_size(width: int, smallest: int = MIN_TILE) -> int:
    """The power of two that holds `width`, at least `smallest`."""
    return max(smallest, 1 << (width - 1).bit_length())


@triton.jit
def row_pointers(x, stride, b, g, s, head):
    """Where the rows (s, head) of x [B,S,G,h,D] begin; all indices are int64, s a number or a vector."""
    return x + b * stride[0] + g * stride[2] + (s * stride[1] + head * stride[3])


@triton.jit
def key_pointers(x, stride, b, g, position):
    """Where the keys (or values) at `position` [BLOCK_L] of x [B,G,S_kv,D] begin; b, g are int64."""
    return x + b * stride[0] + g * stride[1] + position.to(tl.int64) * stride[2]


@triton.jit
def cached_pointers(x, stride, b, g, position, page, PAGE: tl.constexpr):
    """`key_pointers`; where PAGE > 0, x [pages,G,PAGE,D] is a pool of pages, and the keys lie in `page` [BLOCK_L]."""
    if PAGE > 0:
        return x + g * stride[1] + (page.to(tl.int64) * stride[0] + (position % PAGE).to(tl.int64) * stride[2])
    else:
        return key_pointers(x, stride, b, g, position)


@triton.jit
def load_columns(rows, exists, first: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Columns [first, first + WIDTH) of the rows at the pointers [M]; zeros past D and where a row does not exist (None: all do)."""
    d = first + tl.arange(0, WIDTH)
    inside = (d < D)[None, :] if exists is None else exists[:, None] & (d < D)[None, :]
    return tl.load(rows[:, None] + d[None, :], mask=inside, other=0.0)


@triton.jit
def load_split(rows, exists, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr):
    """All D columns as two tiles; the second repeats the first, and is not used, where BLOCK_REST is 0."""
    tile = load_columns(rows, exists, 0, D, BLOCK_D)
    rest = load_columns(rows, exists, BLOCK_D, D, BLOCK_REST) if BLOCK_REST > 0 else tile
    return tile, rest


@triton.jit
def load_kv(k, v, strides, b, g, position, exists, dims: tl.constexpr):
    """The tiles of K (two, as `load_split`) and V at `position` [BLOCK_L]; zeros where a key does not exist."""
    k_tile, k_rest = load_split(key_pointers(k, strides.k, b, g, position), exists, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
    return k_tile, k_rest, load_columns(key_pointers(v, strides.v, b, g, position), exists, 0, dims.Dv, dims.BLOCK_DV)


@triton.jit
def load_whole(k_desc, k_rest_desc, v_desc, k, v, strides, b, g, c, dims: tl.constexpr, BLOCK_L: tl.constexpr):
    """K (two tiles, as `load_split`) and V of the keys [c, c + BLOCK_L), all of which exist: by TMA, or by pointers without descriptors."""
    if k_desc is not None:
        k_tile = k_desc.load([b, g, c, 0]).reshape(BLOCK_L, dims.BLOCK_D)
        k_rest = k_tile
        if dims.BLOCK_REST > 0:
            k_rest = k_rest_desc.load([b, g, c, dims.BLOCK_D]).reshape(BLOCK_L, dims.BLOCK_REST)
        return k_tile, k_rest, v_desc.load([b, g, c, 0]).reshape(BLOCK_L, dims.BLOCK_DV)
    else:
        position = c + tl.arange(0, BLOCK_L)
        return load_kv(k, v, strides, b.to(tl.int64), g.to(tl.int64), position, position >= 0, dims)


@triton.jit
def store_columns(rows, x, exists, first: tl.constexpr, D: tl.constexpr):
    """Write x [M, WIDTH] to the columns from `first` on."""
    d = first + tl.arange(0, x.shape[1])
    tl.store(rows[:, None] + d[None, :], x.to(rows.dtype.element_ty), mask=exists[:, None] & (d < D)[None, :])


@triton.jit
def store_split(rows, x, x_rest, exists, D: tl.constexpr, BLOCK_REST: tl.constexpr):
    """Write the tiles of `load_split`."""
    store_columns(rows, x, exists, 0, D)
    if BLOCK_REST > 0:
        store_columns(rows, x_rest, exists, x.shape[1], D)
