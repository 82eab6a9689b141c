"""A cache's new tokens: their keys and values written to pages, four of the six tensors in e4m3 where they have scales."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.tiles import tile_size

TENSORS = tl.constexpr(6)  # keys and values of three branches


@triton.jit
def to_e4m3(x, scale):
    """x [rows,D] / scale [rows], beyond 448 saturated, with the bits of `nsa_sel.quantize.stored`: NaN compares as false, and stays NaN."""
    x = x.to(tl.float32) * tl.div_rn(1.0, scale)[:, None]
    return tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x)).to(tl.float8e4nv)


@triton.jit
def copy_row(x, to, scale, stride, b, s, slot, G, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    """x[b, s] [G,D] to row `slot` of to [slots,G,D], which has scales [G] where it is in e4m3."""
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    exists = (g < G)[:, None] & (d < D)[None, :]
    row = x + b * stride[0] + s * stride[1] + g.to(tl.int64)[:, None] * stride[2] + d[None, :]
    numbers = tl.load(row, mask=exists)
    if scale is not None:
        numbers = to_e4m3(numbers, tl.load(scale + g, mask=g < G, other=1.0))
    tl.store(to + slot * G * D + (g * D)[:, None] + d[None, :], numbers, mask=exists)


@triton.jit
def append_kernel(
    k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, k_raw, v_raw, k, v, k_last, v_last, slot, last_slot,
    k_scale, v_scale, k_last_scale, v_last_scale, strides, S, G,
    Dk: tl.constexpr, Dv: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Grid: one program per token [B,S] and tensor: one that copied all would wait for each of them before it loads the next.
    Sources [B,S,G,D]; k and v go to `slot` [B,S], the others to `last_slot` [B,S]. Scales [G] or None."""
    row, which = tl.program_id(0) // TENSORS, tl.program_id(0) % TENSORS
    b, s = (row // S).to(tl.int64), (row % S).to(tl.int64)
    at, last = tl.load(slot + row), tl.load(last_slot + row)
    if which == 0:
        copy_row(k_cmp, k_raw, None, strides[0], b, s, last, G, Dk, BLOCK_G, BLOCK_DK)
    elif which == 1:
        copy_row(v_cmp, v_raw, None, strides[1], b, s, last, G, Dv, BLOCK_G, BLOCK_DV)
    elif which == 2:
        copy_row(k_slc, k, k_scale, strides[2], b, s, at, G, Dk, BLOCK_G, BLOCK_DK)
    elif which == 3:
        copy_row(v_slc, v, v_scale, strides[3], b, s, at, G, Dv, BLOCK_G, BLOCK_DV)
    elif which == 4:
        copy_row(k_win, k_last, k_last_scale, strides[4], b, s, last, G, Dk, BLOCK_G, BLOCK_DK)
    else:
        copy_row(v_win, v_last, v_last_scale, strides[5], b, s, last, G, Dv, BLOCK_G, BLOCK_DV)


def append(
    keys: tuple[Tensor, ...], pools: tuple[Tensor, ...], slot: Tensor, last_slot: Tensor, scales: tuple[Tensor, ...] | None = None
) -> None:  # fmt: skip
    """Write keys and values of new tokens to pages.

    Args:
        keys: k_cmp, v_cmp, k_slc, v_slc, k_win, v_win [B,S,G,D], of any strides with a contiguous last dimension.
        pools: [pages,page_size,G,D], contiguous, in this order.
        slot, last_slot: [B,S] int64, where those of the selected branch go, and the others.
        scales: float32 [G] of the last four pools, which then are in e4m3 (SM 8.9 and newer); or None.
    """
    B, S, G, Dk = keys[0].shape
    Dv = keys[1].shape[3]
    if B * S:
        tensors = (*keys, *pools, slot, last_slot, *(scales or (None,) * 4))
        _append(G, Dk, Dv).launch(B * S * TENSORS.value, tensors, (tuple(x.stride()[:3] for x in keys), S, G))


@functools.lru_cache(REMEMBERED)
def _append(G: int, Dk: int, Dv: int) -> Kernel:
    tiles = {"BLOCK_G": tile_size(G, 1), "BLOCK_DK": tile_size(Dk, 1), "BLOCK_DV": tile_size(Dv, 1)}
    return Kernel(append_kernel, Dk=Dk, Dv=Dv, **tiles, num_warps=1)
