"""A cache's new tokens: their keys and values written to pages, and compressed by the MLP of Eq. 7 where a piece is complete.

    append   one program per token: six tensors to their slots; four of them in e4m3 where they have scales
    hidden   W_1 (x + inside) of the compress_block keys of a new compressed key, in sums of KEYS of them, read from their pages
    out      W_2 gelu(hidden + b_1) + b_2, to the compressed key's slot

Compressed keys without a place (slot >= limit) are skipped: no weight is read for a tile of them. In most steps of one sequence there is no
other.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.softmax import add_product
from nsa_sel.backends._triton.tiles import tile_size

KEYS = 8  # of a program, at most: a single sequence, too, is to read the weights with many programs
MOST_ROWS = 32  # of a program
FEW_ROWS, FEW_COLUMNS, COLUMNS = 64, 16, 32  # so many rows in all take programs of fewer columns
Weights = tuple[Tensor, ...]


@triton.jit
def to_e4m3(x, scale):
    """x [rows,D] / scale [rows], beyond 448 saturated, with the bits of `core.quantized.stored`: NaN compares as false, and stays NaN."""
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
    """Grid: one program per token [B,S]. Sources [B,S,G,D]; k and v go to `slot` [B,S], the others to `last_slot` [B,S]. Scales [G]
    or None."""
    row = tl.program_id(0)
    b, s = (row // S).to(tl.int64), (row % S).to(tl.int64)
    at, last = tl.load(slot + row), tl.load(last_slot + row)
    copy_row(k_cmp, k_raw, None, strides[0], b, s, last, G, Dk, BLOCK_G, BLOCK_DK)
    copy_row(v_cmp, v_raw, None, strides[1], b, s, last, G, Dv, BLOCK_G, BLOCK_DV)
    copy_row(k_slc, k, k_scale, strides[2], b, s, at, G, Dk, BLOCK_G, BLOCK_DK)
    copy_row(v_slc, v, v_scale, strides[3], b, s, at, G, Dv, BLOCK_G, BLOCK_DV)
    copy_row(k_win, k_last, k_last_scale, strides[4], b, s, last, G, Dk, BLOCK_G, BLOCK_DK)
    copy_row(v_win, v_last, v_last_scale, strides[5], b, s, last, G, Dv, BLOCK_G, BLOCK_DV)


@triton.jit
def hidden_tile(
    number, x, covered, slot, inside, weight, hidden, sizes, limit, width,
    D: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """hidden [BLOCK / KEYS, rows + 1, width] of compressed keys [B,P,G] from pages x [slots,G,D], of ROWS keys, COLS columns and one sum.
    The last row is W_1 inside, the same for all compressed keys.

    covered [B,keys] has the slots of keys; a piece of STRIDE keys lies within a page, and KEYS divides STRIDE. Tiles of a step, which is
    one key: x [ROWS, BLOCK_D], weight [BLOCK_D, COLS].
    """
    SUMS: tl.constexpr = BLOCK // KEYS
    columns, part = tl.cdiv(width, COLS), number % SUMS
    row = number // SUMS // columns * ROWS + tl.arange(0, ROWS)
    column = number // SUMS % columns * COLS + tl.arange(0, COLS)
    d = tl.arange(0, BLOCK_D)
    owner, g = row // sizes[1], row % sizes[1]  # of [B,P]
    placed = tl.load(slot + owner, mask=row < sizes[0], other=limit) < limit
    last = row == sizes[0]
    others = last & (sizes[0] >= ROWS)  # rows of other tiles may need it
    if tl.max((placed | others).to(tl.int32), 0) > 0:
        known = placed[:, None] & (d < D)[None, :]
        in_weight = (column < width)[None, :] & (d < D)[:, None]
        acc = tl.zeros([ROWS, COLS], tl.float32)
        piece, first = part * KEYS // STRIDE, part * KEYS % STRIDE
        source = tl.load(covered + owner // sizes[2] * sizes[3] + (owner % sizes[2] + piece) * STRIDE, mask=placed, other=0) + first
        keys = x + (source * sizes[1] + g)[:, None] * D + d[None, :]
        at = weight + column[None, :] * (BLOCK * D) + part * KEYS * D + d[:, None]
        for i in range(0, KEYS):
            x_tile = tl.load(keys + i * sizes[1] * D, mask=known, other=0.0)
            w = tl.load(at + i * D, mask=in_weight, other=0.0)
            position = tl.load(inside + (part * KEYS + i) * D + d, mask=d < D, other=0.0)
            acc = add_product(acc, tl.where(last[:, None], position[None, :], x_tile), w)
        out = hidden + (part * (sizes[0] + 1) + row[:, None]) * width + column[None, :]
        tl.store(out, acc, mask=(placed | last)[:, None] & (column < width)[None, :])


@triton.jit
def out_tile(
    number, hidden, slot, first_bias, weight, bias, to, sizes, limit, width,
    D: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """to [slots,G,D] at the slots [B,P] of compressed keys, from hidden [SUMS, rows + 1, width], of ROWS keys and COLS columns.

    Tiles of a step: hidden [ROWS, BLOCK_K], weight [BLOCK_K, COLS].
    """
    columns = tl.cdiv(D, COLS)
    row, column = number // columns * ROWS + tl.arange(0, ROWS), number % columns * COLS + tl.arange(0, COLS)
    place = tl.load(slot + row // sizes[1], mask=row < sizes[0], other=limit)
    placed = place < limit
    if tl.max(placed.to(tl.int32), 0) > 0:
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for c in range(0, width, BLOCK_K):
            i = c + tl.arange(0, BLOCK_K)
            known = placed[:, None] & (i < width)[None, :]
            x = tl.zeros([ROWS, BLOCK_K], tl.float32)
            for part in tl.static_range(SUMS):
                sums = hidden + part * (sizes[0] + 1) * width + i
                x += tl.load(sums[None, :] + row[:, None] * width, mask=known, other=0.0)
                x += tl.load(sums + sizes[0] * width, mask=i < width, other=0.0)[None, :]
            x += tl.load(first_bias + i, mask=i < width, other=0.0).to(tl.float32)[None, :]
            x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
            w = tl.load(weight + column[None, :] * width + i[:, None], mask=(column < D)[None, :] & (i < width)[:, None], other=0.0)
            acc = add_product(acc, x.to(w.dtype), w)
        acc += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        out = to + (place * sizes[1] + row % sizes[1])[:, None] * D + column[None, :]
        tl.store(out, acc.to(to.dtype.element_ty), mask=placed[:, None] & (column < D)[None, :])


@triton.jit
def hidden_kernel(
    k, v, covered, slot, inside_k, weight_k, inside_v, weight_v, hidden_k, hidden_v, sizes, limit, widths, of_k,
    Dk: tl.constexpr, Dv: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`hidden_tile` of keys and of values. Grid: one program per tile, those of the keys first; sizes: rows, G, P, keys of `covered`."""
    number = tl.program_id(0)
    if number < of_k:
        hidden_tile(
            number, k, covered, slot, inside_k, weight_k, hidden_k, sizes, limit, widths[0],
            Dk, BLOCK, STRIDE, KEYS, ROWS, COLS, BLOCK_DK,
        )  # fmt: skip
    else:
        hidden_tile(
            number - of_k, v, covered, slot, inside_v, weight_v, hidden_v, sizes, limit, widths[1],
            Dv, BLOCK, STRIDE, KEYS, ROWS, COLS, BLOCK_DV,
        )  # fmt: skip


@triton.jit
def out_kernel(
    hidden_k, hidden_v, slot, first_k, weight_k, bias_k, first_v, weight_v, bias_v, k, v, sizes, limit, widths, of_k,
    Dk: tl.constexpr, Dv: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`out_tile` of keys and of values. Grid: as in `hidden_kernel`."""
    number = tl.program_id(0)
    if number < of_k:
        out_tile(number, hidden_k, slot, first_k, weight_k, bias_k, k, sizes, limit, widths[0], Dk, SUMS, ROWS, COLS, BLOCK_K)
    else:
        out_tile(number - of_k, hidden_v, slot, first_v, weight_v, bias_v, v, sizes, limit, widths[1], Dv, SUMS, ROWS, COLS, BLOCK_K)


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
        _append(G, Dk, Dv).launch(B * S, tensors, (tuple(x.stride()[:3] for x in keys), S, G))


def compress(
    raw: tuple[Tensor, Tensor], covered: Tensor, slot: Tensor, of_k: Weights, of_v: Weights, to: tuple[Tensor, Tensor], stride: int
) -> None:  # fmt: skip
    """Write compressed keys and values to pages.

    Args:
        raw: [pages,page_size,G,D], contiguous: what is compressed. page_size is a multiple of the stride.
        covered: [B,keys] int64, slots of keys that follow one another; block p covers those from p * stride on.
        slot: [B,P] int64, where compressed key p goes; the slots of the last page and later are no place.
        of_k, of_v: inside [compress_block,D], of the first layer [width,compress_block * D] and [width], of the second [D,width] and [D];
            all contiguous, of raw's dtype.
        to: [pages,slots,G,D], contiguous.
        stride: compress_stride.
    """
    G, P, (Dk, Dv) = raw[0].shape[2], slot.shape[1], (x.shape[3] for x in raw)
    rows, limit, widths = slot.numel() * G, (to[0].shape[0] - 1) * to[0].shape[1], (len(of_k[1]), len(of_v[1]))
    if not rows:
        return
    block, keys = len(of_k[0]), math.gcd(KEYS, stride)
    hidden = [x.new_empty(block // keys, rows + 1, width, dtype=torch.float32) for x, width in zip(raw, widths, strict=True)]
    tile, columns = min(MOST_ROWS, tile_size(rows + 1)), FEW_COLUMNS if rows <= FEW_ROWS else COLUMNS
    sizes = (rows, G, P, covered.shape[1])
    first_k, first_v = (-(-(rows + 1) // tile) * -(-width // columns) for width in widths)
    last_k, last_v = (-(-rows // tile) * -(-D // columns) for D in (Dk, Dv))
    sums = block // keys
    _hidden(Dk, Dv, block, stride, keys, tile, columns).launch(
        (first_k + first_v) * sums, (*raw, covered, slot, *of_k[:2], *of_v[:2], *hidden), (sizes, limit, widths, first_k * sums)
    )
    _out(Dk, Dv, sums, tile, columns).launch(last_k + last_v, (*hidden, slot, *of_k[2:], *of_v[2:], *to), (sizes, limit, widths, last_k))


@functools.lru_cache(REMEMBERED)
def _append(G: int, Dk: int, Dv: int) -> Kernel:
    tiles = {"BLOCK_G": tile_size(G, 1), "BLOCK_DK": tile_size(Dk, 1), "BLOCK_DV": tile_size(Dv, 1)}
    return Kernel(append_kernel, Dk=Dk, Dv=Dv, **tiles, num_warps=1)


@functools.lru_cache(REMEMBERED)
def _hidden(Dk: int, Dv: int, block: int, stride: int, keys: int, rows: int, columns: int) -> Kernel:
    tiles = {"KEYS": keys, "ROWS": rows, "COLS": columns, "BLOCK_DK": tile_size(Dk), "BLOCK_DV": tile_size(Dv)}
    return Kernel(hidden_kernel, Dk=Dk, Dv=Dv, BLOCK=block, STRIDE=stride, **tiles, num_warps=4, num_stages=3)


@functools.lru_cache(REMEMBERED)
def _out(Dk: int, Dv: int, sums: int, rows: int, columns: int) -> Kernel:
    return Kernel(out_kernel, Dk=Dk, Dv=Dv, SUMS=sums, ROWS=rows, COLS=columns, BLOCK_K=32, num_warps=4, num_stages=3)
