"""New tokens of a paged cache: append their keys and values, and compress the blocks that they complete.

    append     keys and values of three branches to their pages, four of the six tensors in e4m3 if they have scales
    compress   the MLP of Eq. 7 over the keys of every block that a step completes:
                   hidden   W_1 (x + inside) of the compress_block keys of each, in sums of KEYS of them
                   out      W_2 gelu(hidden + b_1) + b_2, to the compressed key's slot

Keys that the step brings are read where the projection left them, all others from their pages, so that nothing waits
until they are appended. A program whose compressed keys all lack a slot (slot >= limit) waits for one load, and
leaves: so it is in most steps of one sequence. Few compressed keys take small tiles, so that many programs share the
weights.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.softmax import add_product
from nsa_sel.backends._triton.tiles import MIN_TILE, tile_size
from nsa_sel.core.call import is_aligned

TENSORS = tl.constexpr(6)  # keys and values of three branches


@triton.jit
def copy_row(
    x, to, scale, stride, to_stride, b, s, slot, PAGE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy x[b, s] [G,D] to key `slot` of pages `to` [pages,PAGE,G,D], divided by scales [G] if `to` is in e4m3.

    e4m3 saturates at 448, with the bits of `nsa_sel.quantize.stored`. NaN stays NaN, because it compares as false.
    """
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    exists = (g < G)[:, None] & (d < D)[None, :]
    group = g.to(tl.int64)[:, None]  # [BLOCK_G, 1]
    row = x + b * stride[0] + s * stride[1] + group * stride[2] + d[None, :]
    numbers = tl.load(row, mask=exists)  # [BLOCK_G, BLOCK_D]
    if scale is not None:
        numbers = numbers.to(tl.float32) * tl.div_rn(1.0, tl.load(scale + g, mask=g < G, other=1.0))[:, None]
        numbers = tl.where(numbers > 448.0, 448.0, tl.where(numbers < -448.0, -448.0, numbers)).to(tl.float8e4nv)
    out = to + slot // PAGE * to_stride[0] + slot % PAGE * to_stride[1] + group * to_stride[2] + d[None, :]
    tl.store(out, numbers, mask=exists)


@triton.jit
def append_kernel(
    k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, k_raw, v_raw, k, v, k_last, v_last, slot, last_slot,
    k_scale, v_scale, k_last_scale, v_last_scale, strides, to_strides, S,
    PAGE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy the new tokens' six tensors, of which some may be None, to their pages.

    Grid: one program per token [B,S] and tensor, because one program for all would pay the memory latency six times.
    Sources are [B,S,G,D], each of its own sizes; k and v go to `slot` [B,S], the others to `last_slot` [B,S]. Scales are [G]
    or None.
    """
    row, which = tl.program_id(0) // TENSORS, tl.program_id(0) % TENSORS
    b, s = (row // S).to(tl.int64), (row % S).to(tl.int64)
    at, last = tl.load(slot + row), tl.load(last_slot + row)
    new, to = (k_cmp, v_cmp, k_slc, v_slc, k_win, v_win), (k_raw, v_raw, k, v, k_last, v_last)
    slots, scales = (last, last, at, at, last, last), (None, None, k_scale, v_scale, k_last_scale, v_last_scale)
    for i in tl.static_range(TENSORS):
        if new[i] is not None:  # noqa: SIM102 - decided when the kernel is compiled
            if which == i:
                copy_row(
                    new[i], to[i], scales[i], strides[i], to_strides[i], b, s, slots[i], PAGE, G[i], D[i], BLOCK_G[i], BLOCK_D[i]
                )  # fmt: skip


def append(
    keys: tuple[Tensor | None, ...], pools: tuple[Tensor | None, ...], slot: Tensor, last_slot: Tensor,
    scales: tuple[Tensor, ...] | None = None,
) -> None:  # fmt: skip
    """Write keys and values of new tokens to pages.

    Args:
        keys: k_cmp, v_cmp, k_slc, v_slc, k_win, v_win [B,S,G,D], each of its own G and D, or None except for the first.
        pools: [pages,page_size,G,D], in this order; of any strides, as keys, with a contiguous last dimension.
        slot, last_slot: [B,S] int64, where those of the selected branch go, and the others.
        scales: float32 [G] of the last four pools, which then are in e4m3 (SM 8.9 and newer); or None.
    """
    B, S = slot.shape
    if B * S:
        strides = (tuple((0, 0, 0) if x is None else x.stride()[:3] for x in some) for some in (keys, pools))
        kernel = _append(pools[0].shape[1], *zip(*((0, 0) if x is None else x.shape[2:] for x in keys), strict=True))  # type: ignore[union-attr]
        kernel.launch(B * S * TENSORS.value, (*keys, *pools, slot, last_slot, *(scales or (None,) * 4)), (*strides, S))


@functools.lru_cache(REMEMBERED)
def _append(page: int, G: tuple[int, ...], D: tuple[int, ...]) -> Kernel:
    block_g, block_d = (tuple(tile_size(size, 1) for size in sizes) for sizes in (G, D))
    return Kernel(append_kernel, PAGE=page, G=G, D=D, BLOCK_G=block_g, BLOCK_D=block_d, num_warps=1)


FEW_KEYS, KEYS = 4, 8  # most keys per partial sum, if few compressed keys can be new, and otherwise
ROW_BYTES, MOST_ROWS = 256, 64  # up to ROW_BYTES per key, a tile has MOST_ROWS rows; its last row is `inside`
OUT_ROWS, OUT_WEIGHTS = 2, 8192  # rows and weights per tile of `out`
Weights = tuple[Any, ...]


@triton.jit
def load_keys(rows, exists, d, D: tl.constexpr, AT_ONCE: tl.constexpr):
    """Load the keys at pointers rows [ROWS, AT_ONCE] as a tile [ROWS, AT_ONCE * BLOCK_D]."""
    if AT_ONCE == 1:
        return tl.load(rows + d[None, :], mask=exists[:, None] & (d < D)[None, :], other=0.0)
    else:
        loaded = exists[:, None, None] & (d < D)[None, None, :]
        return tl.load(rows[:, :, None] + d[None, None, :], mask=loaded, other=0.0).reshape(rows.shape[0], AT_ONCE * d.shape[0])


@triton.jit
def hidden_tile(
    number, x, new, stride_new, covered, fresh, slot, inside, weight, hidden, sizes, limit, width,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store one tile of hidden [BLOCK / KEYS, rows, width]: ROWS - 1 compressed keys of [B,P,G], COLS columns, and the
    partial sum over KEYS of the BLOCK keys that each covers.

    Keys are in pages x [slots,G,D] at `covered` [B,keys]; a piece of STRIDE of them lies within a page, and KEYS
    divides STRIDE. From key fresh[b, 0] on, they are row key + fresh[b, 1] of new [B,S,G,D].
    Tiles of a step, which takes AT_ONCE keys: x [ROWS, AT_ONCE * BLOCK_D], weight [AT_ONCE * BLOCK_D, COLS]. The last
    row of x is `inside`, whose product is added to the others'.
    """
    SUMS: tl.constexpr = BLOCK // KEYS
    columns, part, r = tl.cdiv(width, COLS), number % SUMS, tl.arange(0, ROWS)
    last = r == ROWS - 1  # [ROWS], as all row indices below
    row = number // SUMS // columns * (ROWS - 1) + r
    owner, g = row // sizes[1], row % sizes[1]  # owner: index in [B,P]
    exists = (row < sizes[0]) & ~last
    placed = tl.load(slot + owner, mask=exists, other=limit) < limit
    b, key = (owner // sizes[2]).to(tl.int64), owner % sizes[2] * STRIDE + part * KEYS
    source = tl.load(covered + b * sizes[3] + key, mask=exists, other=0)
    old = tl.load(fresh + 2 * b, mask=exists, other=0) - key  # the number of the sum's keys that are in pages
    s = key + tl.load(fresh + 2 * b + 1, mask=exists, other=0)
    if tl.max(placed.to(tl.int32), 0) > 0:
        column = number // SUMS % columns * COLS + tl.arange(0, COLS)  # [COLS]
        i, d = tl.arange(0, AT_ONCE), tl.arange(0, BLOCK_D)
        # Pointers to the sum's first key in pages, among the new keys, and in `inside`: [ROWS, 1] each.
        in_pages = (x + (source * sizes[1] + g) * D)[:, None]
        in_step = (new + (b * stride_new[0] + s.to(tl.int64) * stride_new[1] + g.to(tl.int64) * stride_new[2]))[:, None]
        of_inside = (inside + (part * KEYS * D + row * 0).to(tl.int64))[:, None]
        exists, inner = placed | last, tl.arange(0, AT_ONCE * BLOCK_D)
        in_weight = (
            weight + column.to(tl.int64)[None, :] * (BLOCK * D) + (part * KEYS * D + inner // BLOCK_D * D + inner % BLOCK_D)[:, None]
        )
        weighs = (column < width)[None, :] & (inner % BLOCK_D < D)[:, None]
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for k in range(0, KEYS, AT_ONCE):
            j = (k + i)[None, :]  # [1, AT_ONCE]
            rows = tl.where(j < old[:, None], in_pages + j * (sizes[1] * D), in_step + j.to(tl.int64) * stride_new[1])
            rows = tl.where(last[:, None], of_inside + j * D, rows)
            rows = tl.multiple_of(rows, [ALIGNED, ALIGNED])  # bytes: so that loads are wide, whichever pointer is taken
            w = tl.load(in_weight + k * D, mask=weighs, other=0.0)
            acc = add_product(acc, load_keys(rows, exists, d, D, AT_ONCE), w)
        acc += tl.sum(tl.where(last[:, None], acc, 0.0), 0)[None, :]
        out = hidden + (part * sizes[0] + row[:, None]) * width + column[None, :]
        tl.store(out, acc, mask=placed[:, None] & (column < width)[None, :])


@triton.jit
def out_tile(
    number, hidden, slot, first_bias, weight, bias, to, sizes, limit,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Store one tile of `to` [slots,G,D] at the slots [B,P] of compressed keys: ROWS keys, and TILES tiles of COLS
    columns.

    Tiles: the sum of hidden [SUMS, rows, WIDTH] over its parts [ROWS, BLOCK_W], weight [COLS, BLOCK_W]. There are too
    few rows for tensor cores.
    """
    columns = tl.cdiv(D, COLS * TILES)
    row = number // columns * ROWS + tl.arange(0, ROWS)
    target = tl.load(slot + row // sizes[1], mask=row < sizes[0], other=limit)
    placed = target < limit
    if tl.max(placed.to(tl.int32), 0) > 0:
        i, column = tl.arange(0, BLOCK_W), number % columns * (COLS * TILES) + tl.arange(0, COLS)
        loaded = placed[:, None] & (i < WIDTH)[None, :]
        at = weight + column[:, None] * WIDTH + i[None, :]
        w = tl.load(at, mask=(column < D)[:, None] & (i < WIDTH)[None, :], other=0.0)
        b = tl.load(first_bias + i, mask=i < WIDTH, other=0.0)
        x = tl.zeros([ROWS, BLOCK_W], tl.float32)
        for part in tl.static_range(SUMS):
            x += tl.load(hidden + (part * sizes[0] + row[:, None]) * WIDTH + i[None, :], mask=loaded, other=0.0)
        x += b.to(tl.float32)[None, :]
        x = (0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))).to(w.dtype).to(tl.float32)
        out = to + (target * sizes[1] + row % sizes[1])[:, None] * D
        for tile in tl.static_range(TILES):
            coming = w
            if tile + 1 < TILES:
                more = (column + (tile + 1) * COLS < D)[:, None] & (i < WIDTH)[None, :]
                coming = tl.load(at + (tile + 1) * COLS * WIDTH, mask=more, other=0.0)
            named = column + tile * COLS  # [COLS]
            # y [ROWS, COLS]
            y = tl.sum(x[:, :, None] * tl.trans(w).to(tl.float32)[None, :, :], 1)
            if bias is not None:
                y += tl.load(bias + named, mask=named < D, other=0.0).to(tl.float32)[None, :]
            tl.store(out + named[None, :], y.to(to.dtype.element_ty), mask=placed[:, None] & (named < D)[None, :])
            w = coming


@triton.jit
def hidden_kernel(
    k, v, new_k, new_v, covered, fresh, slot, inside_k, weight_k, inside_v, weight_v, hidden_k, hidden_v,
    stride_k, stride_v, sizes, limit, widths, of_k,
    Dk: tl.constexpr, Dv: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    KEYS: tl.constexpr, AT_ONCE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Run `hidden_tile` for keys and for values.

    Grid: one program per tile, those of the keys (`of_k` tiles) first. sizes: rows, G, P, keys of `covered`.
    """
    number = tl.program_id(0)
    if number < of_k:
        hidden_tile(
            number, k, new_k, stride_k, covered, fresh, slot, inside_k, weight_k, hidden_k, sizes, limit, widths[0],
            Dk, BLOCK_DK, BLOCK, STRIDE, KEYS, AT_ONCE, ROWS, COLS, ALIGNED,
        )  # fmt: skip
    else:
        hidden_tile(
            number - of_k, v, new_v, stride_v, covered, fresh, slot, inside_v, weight_v, hidden_v, sizes, limit, widths[1],
            Dv, BLOCK_DV, BLOCK, STRIDE, KEYS, AT_ONCE, ROWS, COLS, ALIGNED,
        )  # fmt: skip


@triton.jit
def out_kernel(
    hidden_k, hidden_v, slot, first_k, weight_k, bias_k, first_v, weight_v, bias_v, k, v, sizes, limit, of_k,
    Dk: tl.constexpr, Dv: tl.constexpr, WIDTHS: tl.constexpr, BLOCK_W: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Run `out_tile` for keys and for values. Grid: as in `hidden_kernel`."""
    number = tl.program_id(0)
    if number < of_k:
        out_tile(number, hidden_k, slot, first_k, weight_k, bias_k, k, sizes, limit, Dk, WIDTHS[0], BLOCK_W, SUMS, ROWS, COLS, TILES)
    else:
        number -= of_k
        out_tile(number, hidden_v, slot, first_v, weight_v, bias_v, v, sizes, limit, Dv, WIDTHS[1], BLOCK_W, SUMS, ROWS, COLS, TILES)


def compress(
    raw: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], covered: Tensor, fresh: Tensor, slot: Tensor, of_k: Weights, of_v: Weights,
    to: tuple[Tensor, Tensor], stride: int,
) -> None:  # fmt: skip
    """Write compressed keys and values to pages.

    Args:
        raw: [pages,page_size,G,D], contiguous: what is compressed. page_size is a multiple of the stride.
        new: [B,S,G,D] of any strides with a contiguous last dimension: the step's tokens, which `raw` may
            not hold yet.
        covered: [B,keys] int64, slots of consecutive keys; compressed key p covers those from p * stride on.
        fresh: [B,2] int32: the first of these keys that is new, and the offset from a key's number to its row in `new`.
        slot: [B,P] int64, where compressed key p goes. Slots of the last page and later mean that it is not written.
        of_k, of_v: inside [compress_block,D], of the first layer [width,compress_block * D] and [width], of the second
            [D,width] and [D] or None; all contiguous, of raw's dtype.
        to: [pages,slots,G,D], contiguous.
        stride: compress_stride.
    """
    G, P, (Dk, Dv) = raw[0].shape[2], slot.shape[1], (x.shape[3] for x in raw)
    rows, limit, widths = slot.numel() * G, (to[0].shape[0] - 1) * to[0].shape[1], (len(of_k[1]), len(of_v[1]))
    if not rows:
        return
    few = rows < MIN_TILE
    block, keys = len(of_k[0]), math.gcd(FEW_KEYS if few else KEYS, stride)
    sums, sizes = block // keys, (rows, G, P, covered.shape[1])
    hidden = [x.new_empty(sums, rows, width, dtype=torch.float32) for x, width in zip(raw, widths, strict=True)]
    kernel = _hidden(Dk, Dv, raw[0].element_size(), block, stride, keys, few, is_aligned(*raw, *new, of_k[0], of_v[0]))
    tile, columns = kernel.constants["ROWS"], kernel.constants["COLS"]
    first_k, first_v = (-(-rows // (tile - 1)) * -(-width // columns) for width in widths)
    kernel.launch(
        (first_k + first_v) * sums,
        (*raw, *new, covered, fresh, slot, *of_k[:2], *of_v[:2], *hidden),
        (*(x.stride()[:3] for x in new), sizes, limit, widths, first_k * sums),
    )
    kernel = _out(Dk, Dv, widths, sums, few)
    tile, columns = kernel.constants["ROWS"], kernel.constants["COLS"] * kernel.constants["TILES"]
    last_k, last_v = (-(-rows // tile) * -(-D // columns) for D in (Dk, Dv))
    kernel.launch(last_k + last_v, (*hidden, slot, *of_k[2:], *of_v[2:], *to), (sizes, limit, last_k))


@functools.lru_cache(REMEMBERED)
def _hidden(
    Dk: int, Dv: int, number_bytes: int, block: int, stride: int, keys: int, few: bool, aligned: bool
) -> Kernel:  # fmt: skip
    """Return `hidden_kernel`. A tile of few rows loads all keys of its sum at once if they are small."""
    sizes = {"BLOCK_DK": tile_size(Dk), "BLOCK_DV": tile_size(Dv), "BLOCK": block, "STRIDE": stride, "KEYS": keys}
    wider = -(-max(sizes["BLOCK_DK"], sizes["BLOCK_DV"]) * number_bytes // ROW_BYTES)
    side = MIN_TILE if few else max(MIN_TILE, MOST_ROWS // wider)
    tiles = {"AT_ONCE": max(1, keys // wider) if few else 1, "ROWS": side, "COLS": side, "ALIGNED": 16 if aligned else number_bytes}
    return Kernel(hidden_kernel, Dk=Dk, Dv=Dv, **sizes, **tiles, num_warps=4, num_stages=1 if few else 3)


@functools.lru_cache(REMEMBERED)
def _out(Dk: int, Dv: int, widths: tuple[int, int], sums: int, few: bool) -> Kernel:
    """Return `out_kernel`. With few rows each column tile has a program; otherwise one program loads `hidden` once for
    several."""
    block_w = tile_size(max(widths))
    columns = max(1, OUT_WEIGHTS // block_w)
    tiles = {"BLOCK_W": block_w, "ROWS": OUT_ROWS, "COLS": columns, "TILES": 1 if few else min(4, -(-max(Dk, Dv) // columns))}
    return Kernel(out_kernel, Dk=Dk, Dv=Dv, WIDTHS=widths, SUMS=sums, **tiles, num_warps=8)
