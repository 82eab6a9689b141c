"""Tiles of rows and keys: pointers to rows, loads and stores of their columns, and TMA descriptors (sm_90 and newer).

Strides are tuples in elements: (b, s, g, h) of q-like tensors, (b, g, n) of k and v, (b, s) of positions
(`arguments.Strides`). A head dim such as 192 takes two column tiles, BLOCK_D = 128 and BLOCK_REST = 64 wide; BLOCK_REST
= 0 if one tile holds it.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_sel.backends._triton.kernel import REMEMBERED
from nsa_sel.backends.launcher.cuda_driver import bind_context, thread

MIN_TILE = 16  # the smallest side of a tensor-core operand


def tile_size(width: int, smallest: int = MIN_TILE) -> int:
    """Return the smallest power of two that is at least `width` and `smallest`."""
    return max(smallest, 1 << (width - 1).bit_length())


@triton.jit
def row_pointers(x, stride, b, g, s, head):
    """Return pointers to the rows (s, head) of x [B,S,G,h,D]. Indices are int64; s is a number or a vector."""
    return x + b * stride[0] + g * stride[2] + (s * stride[1] + head * stride[3])


@triton.jit
def key_pointers(x, stride, b, g, position):
    """Return pointers [BLOCK_L] to the keys (or values) at `position` [BLOCK_L] of x [B,G,S_kv,D]; b and g are
    int64."""
    return x + b * stride[0] + g * stride[1] + position.to(tl.int64) * stride[2]


@triton.jit
def cached_pointers(x, stride, b, g, position, page, PAGE: tl.constexpr):
    """Return `key_pointers`. If PAGE > 0, x [pages,G,PAGE,D] is a page pool and the keys lie in the pages `page`
    [BLOCK_L]."""
    if PAGE > 0:
        return x + g * stride[1] + (page.to(tl.int64) * stride[0] + (position % PAGE).to(tl.int64) * stride[2])
    else:
        return key_pointers(x, stride, b, g, position)


@triton.jit
def load_columns(rows, exists, first: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load columns [first, first + WIDTH) of the rows at pointers `rows` [M] as a tile [M, WIDTH].

    Columns past D and rows that do not exist are zero. exists: [M], or None if all rows exist.
    """
    d = first + tl.arange(0, WIDTH)
    inside = (d < D)[None, :] if exists is None else exists[:, None] & (d < D)[None, :]
    return tl.load(rows[:, None] + d[None, :], mask=inside, other=0.0)


@triton.jit
def load_split(rows, exists, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr):
    """Load all D columns as tiles [M, BLOCK_D] and [M, BLOCK_REST]. If BLOCK_REST is 0, the second is unused (it is the
    first)."""
    tile = load_columns(rows, exists, 0, D, BLOCK_D)
    rest = load_columns(rows, exists, BLOCK_D, D, BLOCK_REST) if BLOCK_REST > 0 else tile
    return tile, rest


@triton.jit
def load_kv(k, v, strides, b, g, position, exists, dims: tl.constexpr):
    """Load K (two column tiles, see `load_split`) and V at `position` [BLOCK_L]; keys that do not exist are zero."""
    k_tile, k_rest = load_split(key_pointers(k, strides.k, b, g, position), exists, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
    return k_tile, k_rest, load_columns(key_pointers(v, strides.v, b, g, position), exists, 0, dims.Dv, dims.BLOCK_DV)


@triton.jit
def load_whole(k_desc, k_rest_desc, v_desc, k, v, strides, b, g, c, dims: tl.constexpr, BLOCK_L: tl.constexpr):
    """Load K (two column tiles, see `load_split`) and V of keys [c, c + BLOCK_L), all of which exist.

    Uses TMA, or pointers if the descriptors are None.
    """
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
    """Store x [M, WIDTH] to columns [first, min(first + WIDTH, D)) of the rows at pointers `rows` [M] that exist."""
    d = first + tl.arange(0, x.shape[1])
    tl.store(rows[:, None] + d[None, :], x.to(rows.dtype.element_ty), mask=exists[:, None] & (d < D)[None, :])


@triton.jit
def store_split(rows, x, x_rest, exists, D: tl.constexpr, BLOCK_REST: tl.constexpr):
    """Store the two column tiles that `load_split` loads."""
    store_columns(rows, x, exists, 0, D)
    if BLOCK_REST > 0:
        store_columns(rows, x_rest, exists, x.shape[1], D)


class CheckedDescriptor(TensorDescriptor):  # type: ignore[misc]
    """A TensorDescriptor without Triton's checks, which would repeat those of `arguments.tma_fits`."""

    def __post_init__(self) -> None:
        pass


def key_descriptors(k: Tensor, dims: Any, block_l: int, by_tma: bool = True) -> tuple[CheckedDescriptor | None, CheckedDescriptor | None]:
    """Return descriptors of k [B,G,S_kv,Dk] and of its second column tile, for tiles of block_l keys.

    The second is None if one tile holds k; both are None if not `by_tma` (pointer loads). dims: `arguments.Dims`.
    """
    if not by_tma:
        return None, None
    rest = descriptor(k, 1, 1, block_l, dims.BLOCK_REST) if dims.BLOCK_REST else None
    return descriptor(k, 1, 1, block_l, dims.BLOCK_D), rest


def kv_descriptors(k: Tensor, v: Tensor, dims: Any, block_l: int, by_tma: bool) -> tuple[CheckedDescriptor | None, ...]:
    """Return `key_descriptors` of k, and a descriptor of v [B,G,S_kv,Dv] or None."""
    return *key_descriptors(k, dims, block_l, by_tma), descriptor(v, 1, 1, block_l, dims.BLOCK_DV) if by_tma else None


def row_descriptors(q: Tensor, do: Tensor, dims: Any, rows: int, by_tma: bool) -> tuple[CheckedDescriptor | None, CheckedDescriptor | None]:
    """Return descriptors of q and do for tiles of `rows` (row, head) pairs, or (None, None) if TMA cannot load whole
    rows with their heads, or if not `by_tma`."""
    tokens = rows // dims.h
    if not by_tma or tokens * dims.h != rows or dims.BLOCK_REST or not (aligned(q) and aligned(do)):
        return None, None
    return descriptor(q, 1, tokens, 1, dims.h, dims.BLOCK_D), descriptor(do, 1, tokens, 1, dims.h, dims.BLOCK_DV)


def descriptor(x: Tensor, *tile: int) -> CheckedDescriptor:
    """Return a descriptor of x for tiles of this shape."""
    if x.get_device() not in thread.bound:
        bind_context(x.get_device())  # Triton's launcher encodes the descriptor before it binds a context
    return CheckedDescriptor(x, x.shape, x.stride(), [*tile])


def aligned(x: Tensor) -> bool:
    """Return whether the base and all strides but the last (which is 1) are multiples of 16 bytes, as TMA requires."""
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and _strides_fit(x.stride(), x.element_size())


@functools.lru_cache(REMEMBERED)
def _strides_fit(strides: tuple[int, ...], size: int) -> bool:
    return not any(n * size % 16 for n in strides[:-1])
