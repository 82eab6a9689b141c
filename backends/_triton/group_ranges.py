"""triton-group kernels with pointer loads: one program per query row and up to BLOCK_H heads of its group.

    forward_ranges_kernel, dq_kernel                ranges of any length. A row's ranges are concatenated
                                                    (rows.walk_ranges), so that short and unaligned ranges fill whole
                                                    tiles of BLOCK_L keys.
    forward_small_blocks_kernel, dq_small_blocks_kernel
                                                    blocks of fewer keys than a tile has: every block, empty or not,
                                                    takes BLOCK key numbers, so that no key searches for its range
Masks: key numbers past the last key are loaded as zeros and get logits of -inf (p = 0).

Constants that forward kernels share:
    cache   where keys lie: LENGTHS (q_pos holds sequence lengths), PAGE (k and v are page pools [pages,G,PAGE,D]; 0:
            not paged), PAGE_SCALES (quantized keys have one scale per page and head), REPEATS (a row may
            name a block twice), PACKED (a sequence is one row of a packed batch)
    SPLIT   few rows: a row's keys are split over `splits` programs, which write float32 partials [rows, splits, ...]
            with base-2 lse for combine.py

Quantized keys and values (e4m3) are converted in registers, and scales multiply logits and probabilities instead of
every element. With stored K, V and scales a, c per head, or per page and head: logits s = (q K^T) a and
o = sum_j p_j c_j V_j. Scales per head multiply whole rows: the products, and the accumulator at the end. Scales per
page differ between keys: a_j multiplies column j of the products, and c_j / r multiplies p_j, where r is the largest
scale so far. When r grows, r / r_new rescales the accumulator, as a new softmax maximum does, so that 16-bit
probabilities stay in range. float16 and bfloat16 hold e4m3 exactly. GPUs convert two elements to float16 in one
instruction, but need several for bfloat16. So bfloat16 queries are converted to float16, times a power of two per row
(`float16_rows`). Factors are 1 where there is nothing to multiply, which the compiler removes: Triton 3.6 functions
cannot return None.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_sel.backends._triton.rows import (
    block_keys,
    count_keys,
    locate_row,
    page_of,
    positions_of,
    row_limit,
    share_of,
    table_row,
    walk_ranges,
)
from nsa_sel.backends._triton.softmax import LN_2, add_product, chosen_step, delta_and_lse, finish_softmax, p_and_ds, products
from nsa_sel.backends._triton.tiles import cached_pointers, key_pointers, load_columns, row_pointers, store_columns
from nsa_sel.backends._triton.walk import empty_sums, store_dq

_SMALLEST = tl.constexpr(1.0e-30)  # initial running scale; not 0, because it is a divisor


@triton.jit
def float16_rows(q_tile):
    """Return bfloat16 rows q_tile [BLOCK_H, BLOCK_D] as float16 times 2^8 / 2^e, and the inverse factors 2^e / 2^8
    [BLOCK_H, 1].

    The row's largest element is in [2^e, 2^(e+1)). Elements below 2^-33 of it are rounded, all others are exact.
    """
    wide = q_tile.to(tl.float32)
    power = (tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(power > _SMALLEST, power, 1.0)
    return (wide * (256.0 / power)[:, None]).to(tl.float16), (power / 256.0)[:, None]


@triton.jit
def quantized_row(q_tile, k, k_scale, v_scale, of_cache, g, PAGE_SCALES: tl.constexpr):
    """Return q_tile in the dtype that multiplies keys, and the factors of its products and of its accumulator (1 if not
    quantized)."""
    k_rate, v_rate = 1.0, 1.0
    if k.dtype.element_ty != q_tile.dtype:
        if q_tile.dtype == tl.bfloat16:
            q_tile, k_rate = float16_rows(q_tile)
        if PAGE_SCALES:
            v_rate = _SMALLEST
        elif k_scale is not None:
            k_rate *= tl.load(k_scale + g * of_cache.k_group)
            v_rate = tl.load(v_scale + g * of_cache.v_group)
    return q_tile, k_rate, v_rate


@triton.jit
def page_scales(k_scale, v_scale, of_cache, g, page, exists, PAGE_SCALES: tl.constexpr):
    """Return the scales of keys and values in the pages `page`: [BLOCK_L] each, or scalars for one page. 1 without
    scales per page."""
    k_factor, v_factor = 1.0, 1.0
    if PAGE_SCALES:
        page = page.to(tl.int64)
        k_factor = tl.load(k_scale + page * of_cache.k_page + g * of_cache.k_group, mask=exists, other=0.0)
        v_factor = tl.load(v_scale + page * of_cache.v_page + g * of_cache.v_group, mask=exists, other=0.0)
    return k_factor, v_factor


@triton.jit
def step_logits(q_tile, k_tile, k_rate, k_factor):
    """Return the products q k^T [BLOCK_H, BLOCK_L] of a step's stored keys, times their scales."""
    return products(q_tile, k_tile.to(q_tile.dtype)) * k_rate * k_factor


@triton.jit
def step_weights(v_factor, v_rate, PAGE_SCALES: tl.constexpr):
    """Return the factors of a step's p and of the accumulator, and the largest page scale so far."""
    weight, shrink = 1.0, 1.0
    if PAGE_SCALES:
        largest = tl.max(tl.abs(v_factor), 0) if v_factor.type.is_block() else tl.abs(v_factor)
        after = tl.maximum(v_rate, largest)
        weight, shrink, v_rate = v_factor / after, v_rate / after, after
    return weight, shrink, v_rate


@triton.jit
def row_heads(
    q, ranges, q_pos, strides, sizes, n, program, dims: tl.constexpr, BLOCK_H: tl.constexpr, LENGTHS: tl.constexpr = False,
):  # fmt: skip
    """Return the row and heads of `program`: b, g, s, heads [BLOCK_H], whether they exist, their index in [B,S,G,h],
    the row's limit, a pointer to its ranges, and its tile of q [BLOCK_H, BLOCK_D]."""
    S, S_kv, G = sizes
    HEAD_TILES: tl.constexpr = (dims.h + BLOCK_H - 1) // BLOCK_H
    head = program % HEAD_TILES * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64)
    b, g, s, row = locate_row(program // HEAD_TILES, S, G)
    limit = row_limit(q_pos, strides.pos, b, s, S, S_kv, LENGTHS)
    s = s.to(tl.int64)
    q_tile = load_columns(row_pointers(q, strides.q, b, g, s, head), head < dims.h, 0, dims.Dk, dims.BLOCK_D)
    return b, g, s, head, head < dims.h, row * dims.h + head, limit, ranges + row // dims.SHARE * n * 2, q_tile


@triton.jit
def add_cached_keys(
    sums, v_rate, q_tile, k_rate, k, v, k_scale, v_scale, strides, of_cache, b, g, position, page, valid, c,
    dims: tl.constexpr, cache: tl.constexpr,
):  # fmt: skip
    """Add the keys at `position` [BLOCK_L], in the pages `page` if paged, to the sums (acc, l, m); keys that are not
    `valid` are masked. Return the sums, and the largest page scale of values so far."""
    acc, l, m = sums
    k_rows = cached_pointers(k, strides.k, b, g, position, page, cache.PAGE)  # [BLOCK_L]
    k_tile = load_columns(k_rows, valid, 0, dims.Dk, dims.BLOCK_D)  # [BLOCK_L, BLOCK_D]
    k_factor, v_factor = page_scales(k_scale, v_scale, of_cache, g, page, valid, cache.PAGE_SCALES)
    logits = tl.where(valid[None, :], step_logits(q_tile, k_tile, k_rate, k_factor), float("-inf"))  # [BLOCK_H, BLOCK_L]
    v_rows = cached_pointers(v, strides.v, b, g, position, page, cache.PAGE)  # [BLOCK_L]
    v_tile = load_columns(v_rows, valid, 0, dims.Dv, dims.BLOCK_DV)  # [BLOCK_L, BLOCK_DV]
    weight, shrink, v_rate = step_weights(v_factor, v_rate, cache.PAGE_SCALES)
    return chosen_step(logits, True, v_tile.to(q_tile.dtype), acc, l, m, c, weight, shrink), v_rate


@triton.jit
def store_rows(sums, v_rate, o, lse, out, split, splits, is_head, c, dims: tl.constexpr, SPLIT: tl.constexpr):
    """Store o and lse of the heads with index `out` [BLOCK_H] in [B,S,G,h], or if SPLIT those of this split of the
    row."""
    acc, l, m = sums
    o_tile, lse2 = finish_softmax(acc * v_rate, l, m, c)  # [BLOCK_H, BLOCK_DV], [BLOCK_H]
    out = out * splits + split
    store_columns(o + out * dims.Dv, o_tile, is_head, 0, dims.Dv)
    tl.store(lse + out, lse2 if SPLIT else lse2 * LN_2, mask=is_head)


@triton.jit
def forward_ranges_kernel(
    q, k, v, ranges, q_pos, block_table, k_scale, v_scale, o, lse, strides, of_cache, sizes, n, splits, scale_log2,
    dims: tl.constexpr, cache: tl.constexpr, SPLIT: tl.constexpr, ONE_PAGE: tl.constexpr, ONE_WALK: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Compute o = softmax(scale * q k^T) v and lse for one row's heads over its ranges.

    Grid: one program per row, tile of BLOCK_H heads, and split of the row's keys.
    Tiles: q [BLOCK_H, BLOCK_D], k [BLOCK_L, BLOCK_D], v [BLOCK_L, BLOCK_DV]. All loads are pointer loads.

    NP: ranges per walk. ONE_WALK: one walk holds all ranges of a split row.
    ONE_PAGE: each range lies within one page, so that its page is read once. Otherwise pages are read one step ahead,
    so that no step waits for them.
    """
    AHEAD: tl.constexpr = cache.PAGE > 0 and not ONE_PAGE
    PAGE: tl.constexpr = cache.PAGE if ONE_PAGE else 0
    split = tl.program_id(0) % splits
    b, g, _, _, is_head, out, limit, row_ranges, q_tile = row_heads(
        q, ranges, q_pos, strides, sizes, n, tl.program_id(0) // splits, dims, BLOCK_H, cache.LENGTHS
    )  # fmt: skip
    q_tile, k_rate, v_rate = quantized_row(q_tile, k, k_scale, v_scale, of_cache, g, cache.PAGE_SCALES)
    table = table_row(block_table, q_pos, strides, of_cache, b, cache.PACKED) if cache.PAGE > 0 else block_table
    low, high = 0, sizes[1]
    if ONE_WALK:
        shift, before, after, total = walk_ranges(row_ranges, 0, n, limit, NP, table, PAGE, cache.REPEATS)
    elif SPLIT:
        total = count_keys(row_ranges, n, limit, NP, cache.REPEATS)
    if SPLIT:
        low, high = share_of(split, splits, total, BLOCK_L)

    sums = empty_sums(BLOCK_H, dims.BLOCK_DV, lse.dtype.element_ty)
    base = 0  # number of the first key of the walk
    for first in range(0, n, NP):
        if ONE_WALK:
            keys = total
        else:
            shift, before, after, keys = walk_ranges(row_ranges, first, n, limit, NP, table, PAGE, cache.REPEATS)
        begin, stop = tl.maximum(low - base, 0), tl.minimum(keys, high - base)
        if AHEAD:
            w = begin + tl.arange(0, BLOCK_L)
            coming = positions_of(w, shift, before, after)
            coming_page = page_of(coming, w < stop, table, cache.PAGE)
        for w0 in range(begin, stop, BLOCK_L):
            w = w0 + tl.arange(0, BLOCK_L)  # [BLOCK_L] key numbers within the walk
            valid = w < stop  # [BLOCK_L]
            if AHEAD:
                position, page = coming, coming_page
                coming = positions_of(w + BLOCK_L, shift, before, after)
                coming_page = page_of(coming, w + BLOCK_L < stop, table, cache.PAGE)
            else:
                position = positions_of(w, shift, before, after)  # [BLOCK_L]
                page = position // cache.PAGE if cache.PAGE > 0 else position
            sums, v_rate = add_cached_keys(
                sums, v_rate, q_tile, k_rate, k, v, k_scale, v_scale, strides, of_cache, b, g, position, page, valid,
                scale_log2, dims, cache,
            )  # fmt: skip
        base += keys
    store_rows(sums, v_rate, o, lse, out, split, splits, is_head, scale_log2, dims, SPLIT)


@triton.jit
def forward_small_blocks_kernel(
    q, k, v, ranges, q_pos, block_table, k_scale, v_scale, o, lse, strides, of_cache, sizes, n, splits, scale_log2,
    dims: tl.constexpr, cache: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Do `forward_ranges_kernel` for ranges that are blocks of BLOCK keys, fewer than a step takes.

    Grid and tiles are those of `forward_ranges_kernel`. Ranges and pages are read one step ahead, so that no step waits
    for them.
    """
    split = tl.program_id(0) % splits
    b, g, _, _, is_head, out, limit, row_ranges, q_tile = row_heads(
        q, ranges, q_pos, strides, sizes, n, tl.program_id(0) // splits, dims, BLOCK_H, cache.LENGTHS
    )  # fmt: skip
    q_tile, k_rate, v_rate = quantized_row(q_tile, k, k_scale, v_scale, of_cache, g, cache.PAGE_SCALES)
    table = table_row(block_table, q_pos, strides, of_cache, b, cache.PACKED) if cache.PAGE > 0 else block_table
    begin, stop = 0, n * BLOCK  # may exceed the number of keys: empty ranges take key numbers, too
    if SPLIT:
        begin, high = share_of(split, splits, n * BLOCK, BLOCK_L)
        stop = tl.minimum(n * BLOCK, high)

    sums = empty_sums(BLOCK_H, dims.BLOCK_DV, lse.dtype.element_ty)
    coming, coming_valid = block_keys(row_ranges, begin, stop, limit, n, BLOCK, BLOCK_L, cache.REPEATS)
    coming_page = page_of(coming, coming_valid, table, cache.PAGE) if cache.PAGE > 0 else coming
    for w0 in range(begin, stop, BLOCK_L):
        position, valid, page = coming, coming_valid, coming_page  # [BLOCK_L]
        coming, coming_valid = block_keys(row_ranges, w0 + BLOCK_L, stop, limit, n, BLOCK, BLOCK_L, cache.REPEATS)
        coming_page = page_of(coming, coming_valid, table, cache.PAGE) if cache.PAGE > 0 else coming
        sums, v_rate = add_cached_keys(
            sums, v_rate, q_tile, k_rate, k, v, k_scale, v_scale, strides, of_cache, b, g, position, page, valid,
            scale_log2, dims, cache,
        )  # fmt: skip
    store_rows(sums, v_rate, o, lse, out, split, splits, is_head, scale_log2, dims, SPLIT)


@triton.jit
def row_gradients(q, ranges, q_pos, o, lse, do, dlse, delta, strides, stride_do, sizes, n, dims: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return this program's row for dq: b, g, which heads exist, their index in [B,S,G,h], the row's limit, a pointer
    to its ranges, q [BLOCK_H, BLOCK_D], do [BLOCK_H, BLOCK_DV], delta and base-2 lse [BLOCK_H]. Also store delta."""
    b, g, s, head, is_head, out, limit, row_ranges, q_tile = row_heads(q, ranges, q_pos, strides, sizes, n, tl.program_id(0), dims, BLOCK_H)
    do_tile = load_columns(row_pointers(do, stride_do, b, g, s, head), is_head, 0, dims.Dv, dims.BLOCK_DV)
    delta_rows, lse2 = delta_and_lse(o, do_tile, lse, dlse, delta, out, is_head, dims)
    return b, g, is_head, out, limit, row_ranges, q_tile, do_tile, delta_rows, lse2


@triton.jit
def add_dq(acc, q_tile, do_tile, lse2, delta, k, v, strides, b, g, position, valid, c, dims: tl.constexpr):
    """Add the keys at `position` [BLOCK_L] to dq / scale [BLOCK_H, BLOCK_D]; keys that are not `valid` are masked."""
    k_tile = load_columns(key_pointers(k, strides.k, b, g, position), valid, 0, dims.Dk, dims.BLOCK_D)
    v_tile = load_columns(key_pointers(v, strides.v, b, g, position), valid, 0, dims.Dv, dims.BLOCK_DV)
    _, ds = p_and_ds(products(q_tile, k_tile), do_tile, v_tile, lse2, delta, c, valid[None, :])  # [BLOCK_H, BLOCK_L]
    return add_product(acc, ds.to(k_tile.dtype), k_tile)


@triton.jit
def dq_kernel(
    q, k, v, ranges, q_pos, o, lse, do, dlse, dq, delta, strides, stride_do, sizes, n, scale, scale_log2,
    dims: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Compute dq = scale * ds k for one row's heads; store delta = sum(do * o) - dlse [B,S,G,h] for the dK/dV kernel.

    Grid: one program per row and tile of BLOCK_H heads. Same walk over keys as `forward_ranges_kernel`.
    Tiles: q, dq [BLOCK_H, BLOCK_D], do [BLOCK_H, BLOCK_DV], k [BLOCK_L, BLOCK_D], v [BLOCK_L, BLOCK_DV].
    """
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    b, g, is_head, out, limit, row_ranges, q_tile, do_tile, delta_rows, lse2 = row_gradients(
        q, ranges, q_pos, o, lse, do, dlse, delta, strides, stride_do, sizes, n, dims, BLOCK_H
    )  # fmt: skip
    acc = tl.zeros([BLOCK_H, BLOCK_D], delta.dtype.element_ty)
    for first in range(0, n, NP):
        shift, before, after, keys = walk_ranges(row_ranges, first, n, limit, NP)
        for w0 in range(0, keys, BLOCK_L):
            w = w0 + tl.arange(0, BLOCK_L)
            position, valid = positions_of(w, shift, before, after), w < keys
            acc = add_dq(acc, q_tile, do_tile, lse2, delta_rows, k, v, strides, b, g, position, valid, scale_log2, dims)
    store_dq(dq + out * dims.Dk, (acc, acc), scale, lse2 != float("-inf"), is_head, dims)


@triton.jit
def dq_small_blocks_kernel(
    q, k, v, ranges, q_pos, o, lse, do, dlse, dq, delta, strides, stride_do, sizes, n, scale, scale_log2,
    dims: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Do `dq_kernel` for ranges that are blocks of BLOCK keys, fewer than a step takes."""
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    b, g, is_head, out, limit, row_ranges, q_tile, do_tile, delta_rows, lse2 = row_gradients(
        q, ranges, q_pos, o, lse, do, dlse, delta, strides, stride_do, sizes, n, dims, BLOCK_H
    )  # fmt: skip
    acc = tl.zeros([BLOCK_H, BLOCK_D], delta.dtype.element_ty)
    for w0 in range(0, n * BLOCK, BLOCK_L):
        position, valid = block_keys(row_ranges, w0, n * BLOCK, limit, n, BLOCK, BLOCK_L)
        acc = add_dq(acc, q_tile, do_tile, lse2, delta_rows, k, v, strides, b, g, position, valid, scale_log2, dims)
    store_dq(dq + out * dims.Dk, (acc, acc), scale, lse2 != float("-inf"), is_head, dims)
