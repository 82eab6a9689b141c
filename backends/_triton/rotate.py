"""Rotary positions in one pass: (a, b) -> (a cos - b sin, a sin + b cos), or back with -sin, plus another tensor if
given.

Grid: one program per ROWS of the B * S * H rows (a row is one head of one token). Tiles: a and b, the halves of a row,
[ROWS, BLOCK]. x, plus and what is written have any strides with a contiguous last dimension. Computed in the dtype of
the angles.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.tiles import load_columns, store_columns, tile_size

TILE = 2048  # elements per half tile, 16 per thread
INTERPRETED_TILE = 1 << 16  # larger, because the interpreter has a high cost per program


@triton.jit
def rows_of(x, stride, b, s, head):
    """Return pointers to the rows (b, s, head) of x [B,S,H,D]."""
    return x + b * stride[0] + s * stride[1] + head * stride[2]


@triton.jit
def rotate_kernel(
    x, plus, cos, sin, out, strides, sequence_angles, rows, S, H,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """out of x [B,S,H,2 * HALF], plus `plus` if it is not None; strides: of x, plus and out. cos and sin [S, HALF] of
    each sequence, sequence_angles numbers apart (0: the same)."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = number < rows
    inside = tl.where(exists, number, 0)
    token = inside // H
    b, s, head = token // S, token % S, inside % H
    row = rows_of(x, strides[0], b, s, head)
    at = b * sequence_angles + s * HALF
    c, d = load_columns(cos + at, exists, 0, HALF, BLOCK), load_columns(sin + at, exists, 0, HALF, BLOCK)
    if BACK:
        d = -d
    first = load_columns(row, exists, 0, HALF, BLOCK).to(c.dtype)
    second = load_columns(row + HALF, exists, 0, HALF, BLOCK).to(c.dtype)
    first, second = first * c - second * d, first * d + second * c
    if plus is not None:
        more = rows_of(plus, strides[1], b, s, head)
        first += load_columns(more, exists, 0, HALF, BLOCK)
        second += load_columns(more + HALF, exists, 0, HALF, BLOCK)
    to = rows_of(out, strides[2], b, s, head)
    store_columns(to, first, exists, 0, HALF)
    store_columns(to + HALF, second, exists, 0, HALF)


def rotate(x: Tensor, plus: Tensor | None, cos: Tensor, sin: Tensor, back: bool, out: Tensor) -> None:
    """Write x [B,S,H,D] rotated, + plus [B,S,H,D], to out [B,S,H,D]; cos and sin [1 or B,S,D/2], contiguous."""
    B, S, H, D = x.shape
    read = tuple(y if y.stride(-1) == 1 else y.contiguous() for y in (x, x if plus is None else plus))
    if out.numel():
        block = tile_size(D // 2)
        rows = max(1, (TILE if x.is_cuda else INTERPRETED_TILE) // block)
        apart = 0 if len(cos) == 1 else S * D // 2
        strides = tuple(y.stride()[:3] for y in (*read, out))
        tensors = read[0], None if plus is None else read[1], cos, sin, out
        _kernel(D // 2, block, rows, back).launch(-(-B * S * H // rows), tensors, (strides, apart, B * S * H, S, H))


@functools.lru_cache(REMEMBERED)
def _kernel(half: int, block: int, rows: int, back: bool) -> Kernel:
    return Kernel(rotate_kernel, HALF=half, BLOCK=block, ROWS=rows, BACK=back, num_warps=4)
