"""triton-group kernels over whole blocks: one program per query row and up to BLOCK_H heads of its group, K and V
through TMA.

TMA cannot mask, so it loads whole blocks only. Of a row's disjoint blocks at most one is cut (by t or by S_kv);
pointers load that one in masked tiles of TAIL_L keys. A hole in the list (padding) loads the row's last whole block
again and is masked out, because a branch would keep the compiler from overlapping loads with arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_sel.backends._triton.group_ranges import (
    add_cached_keys,
    add_dq,
    page_scales,
    quantized_row,
    row_gradients,
    row_heads,
    step_logits,
    step_weights,
    store_rows,
)
from nsa_sel.backends._triton.rows import clamp_range, is_new, new_entries, page_of, split_blocks, table_row
from nsa_sel.backends._triton.softmax import add_product, chosen_step, p_and_ds, products
from nsa_sel.backends._triton.tiles import cached_pointers, load_columns, store_columns
from nsa_sel.backends._triton.walk import empty_sums


@triton.jit
def step_keys(row_ranges, step, limit, last_whole, BLOCK: tl.constexpr, BLOCK_L: tl.constexpr):
    """Return the first of the BLOCK_L keys that step number `step` loads, and whether its block is whole."""
    STEPS: tl.constexpr = BLOCK // BLOCK_L
    i = step // STEPS
    start, end = clamp_range(tl.load(row_ranges + 2 * i), tl.load(row_ranges + 2 * i + 1), limit)
    is_whole = end - start == BLOCK
    return tl.where(is_whole, start, last_whole) + step % STEPS * BLOCK_L, is_whole


@triton.jit
def load_step(desc, x, stride, b, g, c, page, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr):
    """Load keys (or values) [c, c + BLOCK_L) of a whole block as a tile [BLOCK_L, BLOCK_D].

    Uses TMA, or pointers if `desc` is None. page: a number for TMA (a step lies within one page), [BLOCK_L] for
    pointers.
    """
    if desc is not None:
        first = page.to(tl.int32) if PAGE > 0 else b.to(tl.int32)
        return desc.load([first, g.to(tl.int32), c % PAGE if PAGE > 0 else c, 0]).reshape(BLOCK_L, BLOCK_D)
    else:
        position = c + tl.arange(0, BLOCK_L)
        return load_columns(cached_pointers(x, stride, b, g, position, page, PAGE), None, 0, D, BLOCK_D)


@triton.jit
def forward_blocks_kernel(
    q, k_desc, v_desc, k, v, ranges, q_pos, block_table, k_scale, v_scale, o, lse, strides, of_cache, sizes, n, scale_log2,
    dims: tl.constexpr, cache: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, TAIL_L: tl.constexpr,
    NP: tl.constexpr,
):  # fmt: skip
    """Compute o = softmax(scale * q k^T) v and lse for one row's heads; every range is one block of BLOCK keys.

    Grid: one program per row and tile of BLOCK_H heads.
    Tiles: q [BLOCK_H, BLOCK_D], k [BLOCK_L, BLOCK_D], v [BLOCK_L, BLOCK_DV]; TAIL_L keys per step in the cut block.
    Products: mma.sync; wgmma, which takes 64 rows, for BLOCK_H = 64.
    TMA: k_desc and v_desc describe k, v [B,G,S_kv,D], or page pools [pages,G,PAGE,D] whose pages hold whole steps of
    BLOCK_L keys; None: pointer loads.
    cache: see group_ranges.py.
    """
    PAGE: tl.constexpr = cache.PAGE
    TMA: tl.constexpr = k_desc is not None
    STEPS: tl.constexpr = BLOCK // BLOCK_L
    # Read the next step's range, page and scales one step ahead. Otherwise every step waits for its page and its keys
    # arrive one pipeline stage late, which costs time when keys are small (8 bits).
    AHEAD: tl.constexpr = PAGE > 0 or k.dtype.element_ty != q.dtype.element_ty
    BLOCK_DV: tl.constexpr = dims.BLOCK_DV
    # is_head, out [BLOCK_H]; limit: one past the row's last visible key
    b, g, _, _, is_head, out, limit, row_ranges, q_tile = row_heads(
        q, ranges, q_pos, strides, sizes, n, tl.program_id(0), dims, BLOCK_H, cache.LENGTHS
    )

    # k_rate: a number, or [BLOCK_H, 1] of bfloat16 rows over quantized keys; v_rate: a number
    q_tile, k_rate, v_rate = quantized_row(q_tile, k, k_scale, v_scale, of_cache, g, cache.PAGE_SCALES)
    table = table_row(block_table, q_pos, strides, of_cache, b, cache.PACKED) if PAGE > 0 else block_table
    starts, listed, last_whole, cut_start, cut_end = split_blocks(row_ranges, n, limit, BLOCK, NP)  # starts [NP]
    new = new_entries(starts, NP)  # bits of one int64
    acc, l, m = empty_sums(BLOCK_H, BLOCK_DV, lse.dtype.element_ty)
    w = tl.arange(0, BLOCK_L)  # [BLOCK_L]
    steps = listed * (BLOCK // BLOCK_L)
    if AHEAD:
        coming, coming_whole = step_keys(row_ranges, 0, limit, last_whole, BLOCK, BLOCK_L)
    if PAGE > 0:
        exists = steps > 0 if TMA else w < steps * BLOCK_L  # all or nothing
        coming_page = page_of(coming if TMA else coming + w, exists, table, PAGE)  # a number, or [BLOCK_L] without TMA
        coming_k, coming_v = page_scales(k_scale, v_scale, of_cache, g, coming_page, exists, cache.PAGE_SCALES)
    for step in range(0, steps):  # num_stages pipelines the loads of k_tile and v_tile
        if AHEAD:
            c, is_whole = coming, coming_whole
            coming, coming_whole = step_keys(row_ranges, tl.minimum(step + 1, steps - 1), limit, last_whole, BLOCK, BLOCK_L)
        else:
            c, is_whole = step_keys(row_ranges, step, limit, last_whole, BLOCK, BLOCK_L)
        if cache.REPEATS:
            block_start = c - step % STEPS * BLOCK_L
            is_whole = is_whole & is_new(starts, new, step // STEPS, block_start, NP)
        page, k_factor, v_factor = c, 1.0, 1.0  # without pages, `page` is not read
        if PAGE > 0:
            page, k_factor, v_factor = coming_page, coming_k, coming_v
            coming_page = page_of(coming if TMA else coming + w, exists, table, PAGE)
        k_tile = load_step(k_desc, k, strides.k, b, g, c, page, dims.Dk, BLOCK_L, dims.BLOCK_D, PAGE)
        logits = step_logits(q_tile, k_tile, k_rate, k_factor)  # [BLOCK_H, BLOCK_L]
        v_tile = load_step(v_desc, v, strides.v, b, g, c, page, dims.Dv, BLOCK_L, BLOCK_DV, PAGE)
        weight, shrink, v_rate = step_weights(v_factor, v_rate, cache.PAGE_SCALES)
        acc, l, m = chosen_step(logits, is_whole, v_tile.to(q_tile.dtype), acc, l, m, scale_log2, weight, shrink)
        if PAGE > 0:
            coming_k, coming_v = page_scales(k_scale, v_scale, of_cache, g, coming_page, exists, cache.PAGE_SCALES)

    for c in range(cut_start, cut_end, TAIL_L):
        position = c + tl.arange(0, TAIL_L)
        valid = position < cut_end
        page = page_of(position, valid, table, PAGE) if PAGE > 0 else position
        sums, v_rate = add_cached_keys(  # two assignments, because Triton 3.6 takes no nested targets
            (acc, l, m), v_rate, q_tile, k_rate, k, v, k_scale, v_scale, strides, of_cache, b, g, position, page, valid, scale_log2,
            dims, cache,
        )  # fmt: skip
        acc, l, m = sums
    store_rows((acc, l, m), v_rate, o, lse, out, 0, 1, is_head, scale_log2, dims, False)


@triton.jit
def dq_blocks_kernel(
    q, k_desc, v_desc, k, v, ranges, q_pos, o, lse, do, dlse, dq, delta, strides, stride_do, sizes, n, scale, scale_log2,
    dims: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, TAIL_L: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Compute dq = scale * ds k for one row's heads; store delta = sum(do * o) - dlse [B,S,G,h] for the dK/dV kernel.

    Grid: one program per row and tile of BLOCK_H heads. Same walk as `forward_blocks_kernel`; whole blocks always come
    through TMA.
    Tiles: q, dq [BLOCK_H, BLOCK_D], do [BLOCK_H, BLOCK_DV], k [BLOCK_L, BLOCK_D], v [BLOCK_L, BLOCK_DV].
    """
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    b, g, is_head, out, limit, row_ranges, q_tile, do_tile, delta_rows, lse2 = row_gradients(
        q, ranges, q_pos, o, lse, do, dlse, delta, strides, stride_do, sizes, n, dims, BLOCK_H
    )  # fmt: skip
    _starts, listed, last_whole, cut_start, cut_end = split_blocks(row_ranges, n, limit, BLOCK, NP)
    acc = tl.zeros([BLOCK_H, BLOCK_D], delta.dtype.element_ty)
    for step in range(0, listed * (BLOCK // BLOCK_L)):
        c, is_whole = step_keys(row_ranges, step, limit, last_whole, BLOCK, BLOCK_L)
        k_tile = load_step(k_desc, k, strides.k, b, g, c, c, dims.Dk, BLOCK_L, BLOCK_D, 0)
        v_tile = load_step(v_desc, v, strides.v, b, g, c, c, dims.Dv, BLOCK_L, dims.BLOCK_DV, 0)
        # [BLOCK_H, BLOCK_L]
        _, ds = p_and_ds(products(q_tile, k_tile), do_tile, v_tile, lse2, delta_rows, scale_log2, is_whole)
        acc = add_product(acc, ds.to(k_tile.dtype), k_tile)

    for c in range(cut_start, cut_end, TAIL_L):
        position = c + tl.arange(0, TAIL_L)
        acc = add_dq(acc, q_tile, do_tile, lse2, delta_rows, k, v, strides, b, g, position, position < cut_end, scale_log2, dims)
    store_columns(dq + out * dims.Dk, acc * scale, is_head, 0, dims.Dk)
