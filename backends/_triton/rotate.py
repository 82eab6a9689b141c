"""Rotary positions in one pass over memory, (a, b) -> (a cos - b sin, a sin + b cos), and back with -sin.

Grid: one program per ROWS of the B * S * H rows (a row is one head of one token). Tiles: a and b, the halves of a row, [ROWS, BLOCK].
x has any strides with a contiguous last dimension; what is written is contiguous. Computed in the dtype of the angles.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.tiles import load_columns, store_columns, tile_size

TILE = 2048  # numbers of half a tile: 16 per thread
INTERPRETED_TILE = 1 << 16  # the interpreter takes its time for every program


@triton.jit
def rotate_kernel(
    x, cos, sin, out, stride, sequence_angles, rows, S, H, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BACK: tl.constexpr
):  # fmt: skip
    """out [rows, 2 * HALF] of x [B,S,H,2 * HALF]; cos and sin [S, HALF] of each sequence, sequence_angles numbers apart (0: the same)."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = number < rows
    inside = tl.where(exists, number, 0)
    token = inside // H
    b, s = token // S, token % S
    row = x + b * stride[0] + s * stride[1] + inside % H * stride[2]
    at = b * sequence_angles + s * HALF
    c, d = load_columns(cos + at, exists, 0, HALF, BLOCK), load_columns(sin + at, exists, 0, HALF, BLOCK)
    if BACK:
        d = -d
    first = load_columns(row, exists, 0, HALF, BLOCK).to(c.dtype)
    second = load_columns(row + HALF, exists, 0, HALF, BLOCK).to(c.dtype)
    store_columns(out + number * 2 * HALF, first * c - second * d, exists, 0, HALF)
    store_columns(out + number * 2 * HALF + HALF, first * d + second * c, exists, 0, HALF)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """x [B,S,H,D] rotated, contiguous; cos and sin [1 or B,S,D/2], contiguous."""
    B, S, H, D = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block = tile_size(D // 2)
        rows = max(1, (TILE if x.is_cuda else INTERPRETED_TILE) // block)
        apart = 0 if len(cos) == 1 else S * D // 2
        _kernel(D // 2, block, rows, back).launch(-(-B * S * H // rows), (x, cos, sin, out), (x.stride()[:3], apart, B * S * H, S, H))
    return out


@functools.lru_cache(REMEMBERED)
def _kernel(half: int, block: int, rows: int, back: bool) -> Kernel:
    return Kernel(rotate_kernel, HALF=half, BLOCK=block, ROWS=rows, BACK=back, num_warps=4)
