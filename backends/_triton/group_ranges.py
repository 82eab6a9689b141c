"""triton-group kernels over ranges of any length: one program per query row and up to BLOCK_H heads of its group.

K and V are loaded through pointers. A row's ranges are concatenated (rows.walk_ranges), so that short and unaligned
ranges fill whole tiles of BLOCK_L keys. Masks rely on this: key numbers past the last key are loaded as zeros and get
logits of -inf (p = 0).
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_sel.backends._triton.quantized import page_scales, quantized_row, step_logits, step_weights
from nsa_sel.backends._triton.rows import (
    block_keys,
    count_keys,
    locate_heads,
    locate_row,
    page_of,
    positions_of,
    row_limit,
    share_of,
    walk_keys,
    walk_ranges,
)
from nsa_sel.backends._triton.softmax import LN_2, LOWEST, add_product, delta_and_lse, finish_softmax, p_and_ds, products, softmax_step
from nsa_sel.backends._triton.tiles import cached_pointers, key_pointers, load_columns, row_pointers, store_columns


@triton.jit
def row_heads(q, ranges, q_pos, strides, sizes, n, program, dims: tl.constexpr, BLOCK_H: tl.constexpr, LENGTHS: tl.constexpr = False):
    """Return the row and heads of `program`: b, g, s, heads [BLOCK_H], whether they exist, their index in [B,S,G,h],
    the row's limit, a pointer to its ranges, and its tile of q [BLOCK_H, BLOCK_D]."""
    S, S_kv, G = sizes
    number, head = locate_heads(program, dims.h, BLOCK_H)
    b, g, s, row = locate_row(number, S, G)
    limit = row_limit(q_pos, strides.pos, b, s, S, S_kv, LENGTHS)
    s = s.to(tl.int64)
    q_tile = load_columns(row_pointers(q, strides.q, b, g, s, head), head < dims.h, 0, dims.Dk, dims.BLOCK_D)
    return b, g, s, head, head < dims.h, row * dims.h + head, limit, ranges + row * n * 2, q_tile


@triton.jit
def forward_ranges_kernel(
    q, k, v, ranges, q_pos, block_table, k_scale, v_scale, o, lse, strides, of_cache, sizes, n, parts, scale_log2,
    dims: tl.constexpr, LENGTHS: tl.constexpr, PAGE: tl.constexpr, PAGE_SCALES: tl.constexpr, ONE_PAGE: tl.constexpr, SPLIT: tl.constexpr,
    ONE_WALK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Compute o = softmax(scale * q k^T) v and lse for one row's heads over its ranges.

    Grid: one program per row, tile of BLOCK_H heads, and part of the row's keys.
    Tiles: q [BLOCK_H, BLOCK_D], k [BLOCK_L, BLOCK_D], v [BLOCK_L, BLOCK_DV]. All loads are pointer loads.

    SPLIT: write float32 partials [rows, parts, ...] with base-2 lse for combine.py.
    NP: ranges per walk. ONE_WALK: one walk holds all ranges of a split row.
    PAGE > 0: k and v are page pools [pages,G,PAGE,D]. ONE_PAGE: each range lies within one page.
    BLOCK > 0: ranges are blocks of fewer keys than a step takes, and one walk holds all of them.
    LENGTHS: q_pos holds sequence lengths. k_scale, v_scale, PAGE_SCALES: see quantized.py.
    """
    ACC: tl.constexpr = lse.dtype.element_ty
    BLOCK_DV: tl.constexpr = dims.BLOCK_DV
    part = tl.program_id(0) % parts
    b, g, _, _, is_head, out, limit, row_ranges, q_tile = row_heads(
        q, ranges, q_pos, strides, sizes, n, tl.program_id(0) // parts, dims, BLOCK_H, LENGTHS
    )

    q_tile, k_rate, v_rate = quantized_row(q_tile, k, k_scale, v_scale, of_cache, g, PAGE_SCALES)
    table = block_table + b * of_cache.table if PAGE > 0 else block_table
    low, high = 0, sizes[1]
    if BLOCK > 0:
        total = n * BLOCK
        high = total  # may exceed the number of keys: empty ranges take key numbers, too
    elif ONE_WALK:
        shift, before, after, total = walk_keys(row_ranges, 0, n, limit, table, NP, PAGE, ONE_PAGE)
    elif SPLIT:
        total = count_keys(row_ranges, n, limit, NP)
    if SPLIT:
        low, high = share_of(part, parts, total, BLOCK_L)

    acc = tl.zeros([BLOCK_H, BLOCK_DV], ACC)
    l = tl.zeros([BLOCK_H], ACC)
    m = tl.full([BLOCK_H], LOWEST, ACC)
    base = 0
    for first in range(0, n, NP):
        if ONE_WALK or BLOCK > 0:
            keys = total
        else:
            shift, before, after, keys = walk_keys(row_ranges, first, n, limit, table, NP, PAGE, ONE_PAGE)
        begin, stop = tl.maximum(low - base, 0), tl.minimum(keys, high - base)
        if BLOCK > 0:  # read ranges and pages one step ahead, so that no step waits for them
            coming, coming_valid = block_keys(row_ranges, begin + tl.arange(0, BLOCK_L), stop, limit, BLOCK)
            coming_page = page_of(coming, coming_valid, table, PAGE) if PAGE > 0 else coming
        elif PAGE > 0 and not ONE_PAGE:
            w = begin + tl.arange(0, BLOCK_L)
            coming = positions_of(w, shift, before, after)
            coming_page = page_of(coming, w < stop, table, PAGE)
        for w0 in range(begin, stop, BLOCK_L):
            w = w0 + tl.arange(0, BLOCK_L)  # [BLOCK_L] key numbers within the walk
            valid = w < stop  # [BLOCK_L]
            if BLOCK > 0:
                position, valid, page = coming, coming_valid, coming_page
                coming, coming_valid = block_keys(row_ranges, w + BLOCK_L, stop, limit, BLOCK)
                coming_page = page_of(coming, coming_valid, table, PAGE) if PAGE > 0 else coming
            elif PAGE > 0 and not ONE_PAGE:  # read pages one step ahead, so that no step waits for them
                position, page = coming, coming_page
                coming = positions_of(w + BLOCK_L, shift, before, after)
                coming_page = page_of(coming, w + BLOCK_L < stop, table, PAGE)
            else:
                position = positions_of(w, shift, before, after)
                page = position // PAGE if PAGE > 0 else position
            k_tile = load_columns(cached_pointers(k, strides.k, b, g, position, page, PAGE), valid, 0, dims.Dk, dims.BLOCK_D)
            k_factor, v_factor = page_scales(k_scale, v_scale, of_cache, g, page, valid, PAGE_SCALES)
            # [BLOCK_H, BLOCK_L]
            logits = tl.where(valid[None, :], step_logits(q_tile, k_tile, k_rate, k_factor), float("-inf"))
            v_tile = load_columns(cached_pointers(v, strides.v, b, g, position, page, PAGE), valid, 0, dims.Dv, BLOCK_DV)
            weight, shrink, v_rate = step_weights(v_factor, v_rate, PAGE_SCALES)
            acc, l, m = softmax_step(logits, v_tile.to(q_tile.dtype), acc, l, m, scale_log2, weight, shrink)
        base += keys

    o_tile, lse_rows = finish_softmax(acc * v_rate, l, m, scale_log2)  # [BLOCK_H, BLOCK_DV], [BLOCK_H]
    out = out * parts + part
    store_columns(o + out * dims.Dv, o_tile, is_head, 0, dims.Dv)
    tl.store(lse + out, lse_rows if SPLIT else lse_rows * LN_2, mask=is_head)


@triton.jit
def dq_kernel(
    q, k, v, ranges, q_pos, o, lse, do, dlse, dq, delta, strides, stride_do, sizes, n, scale, scale_log2,
    dims: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Compute dq = scale * ds k for one row's heads; store delta = sum(do * o) - dlse [B,S,G,h] for the dK/dV kernel.

    Grid: one program per row and tile of BLOCK_H heads. Same walk over keys as `forward_ranges_kernel`.
    Tiles: q, dq [BLOCK_H, BLOCK_D], do [BLOCK_H, BLOCK_DV], k [BLOCK_L, BLOCK_D], v [BLOCK_L, BLOCK_DV].
    """
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    b, g, s, head, is_head, out, limit, row_ranges, q_tile = row_heads(q, ranges, q_pos, strides, sizes, n, tl.program_id(0), dims, BLOCK_H)
    do_tile = load_columns(row_pointers(do, stride_do, b, g, s, head), is_head, 0, dims.Dv, dims.BLOCK_DV)
    delta_rows, lse2 = delta_and_lse(o, do_tile, lse, dlse, delta, out, is_head, dims)

    acc = tl.zeros([BLOCK_H, BLOCK_D], delta.dtype.element_ty)
    for first in range(0, n, NP):
        if BLOCK > 0:
            keys = n * BLOCK
        else:
            shift, before, after, keys = walk_ranges(row_ranges, first, n, limit, NP)
        for w0 in range(0, keys, BLOCK_L):
            w = w0 + tl.arange(0, BLOCK_L)
            if BLOCK > 0:
                position, valid = block_keys(row_ranges, w, keys, limit, BLOCK)
            else:
                position, valid = positions_of(w, shift, before, after), w < keys
            k_tile = load_columns(key_pointers(k, strides.k, b, g, position), valid, 0, dims.Dk, BLOCK_D)
            v_tile = load_columns(key_pointers(v, strides.v, b, g, position), valid, 0, dims.Dv, dims.BLOCK_DV)
            # [BLOCK_H, BLOCK_L]
            _, ds = p_and_ds(products(q_tile, k_tile), do_tile, v_tile, lse2, delta_rows, scale_log2, valid[None, :])
            acc = add_product(acc, ds.to(k_tile.dtype), k_tile)
    # A row without keys has p = 0, but a NaN or infinity in its q, do or dlse turns 0 * NaN into NaN: write zeros.
    saw = (lse2 != float("-inf"))[:, None]
    store_columns(dq + out * dims.Dk, tl.where(saw, acc * scale, 0.0), is_head, 0, dims.Dk)
