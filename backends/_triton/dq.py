"""dQ of one query row and KV group, all its heads at once, with delta for the KV side: over ranges, and over blocks by bulk copies.

The same two walks as the forward kernels of triton_group.py; steps.py has the mathematics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_sel.backends._triton.steps import (
    LOG2_E,
    add_product,
    positions_of,
    products,
    row_limit,
    split_blocks,
    walk_ranges,
    whole_block,
)


@triton.jit
def dq_kernel(
    q, k, v, ranges, q_pos, o, lse, do, dlse, dq, delta,
    stride_qb, stride_qs, stride_qg, stride_qh, stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_pb, stride_ps,
    stride_dob, stride_dos, stride_dog, stride_doh, S, S_kv, G, n, scale, scale_log2,
    h: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, HAS_POS: tl.constexpr, HAS_DLSE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """dq of one row's heads, and delta = sum(do * o) - dlse [B,S,G,h] for the KV side."""
    HEAD_TILES: tl.constexpr = (h + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    head0 = (pid % HEAD_TILES) * BLOCK_H
    pid = pid // HEAD_TILES
    s = pid % S
    b = (pid // S // G).to(tl.int64)
    g = (pid // S % G).to(tl.int64)
    row = (b * S + s) * G + g
    limit = row_limit(q_pos, b, s, S, S_kv, stride_pb, stride_ps, HAS_POS)
    row_ranges = ranges + row * n * 2

    head = head0 + tl.arange(0, BLOCK_H).to(tl.int64)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    is_head = head < h
    in_q, in_o = is_head[:, None] & (d < Dk)[None, :], is_head[:, None] & (dv < Dv)[None, :]
    q_rows = q + b * stride_qb + s.to(tl.int64) * stride_qs + g.to(tl.int64) * stride_qg + head[:, None] * stride_qh + d[None, :]
    do_rows = do + b * stride_dob + s.to(tl.int64) * stride_dos + g * stride_dog + head[:, None] * stride_doh + dv[None, :]
    q_tile = tl.load(q_rows, mask=in_q, other=0.0)
    do_tile = tl.load(do_rows, mask=in_o, other=0.0)
    out = row * h + head
    o_tile = tl.load(o + out[:, None] * Dv + dv[None, :], mask=in_o, other=0.0)
    delta_rows = tl.sum(o_tile.to(ACC) * do_tile.to(ACC), 1)
    if HAS_DLSE:
        delta_rows -= tl.load(dlse + out, mask=is_head, other=0.0)
    tl.store(delta + out, delta_rows, mask=is_head)
    lse2 = tl.load(lse + out, mask=is_head, other=0.0) * LOG2_E
    k_base = k + b * stride_kb + g * stride_kg
    v_base = v + b * stride_vb + g * stride_vg

    acc = tl.zeros([BLOCK_H, BLOCK_D], ACC)
    for first in range(0, n, NP):
        shift, before, after, keys = walk_ranges(row_ranges, first, n, limit, NP)
        for w0 in range(0, keys, BLOCK_L):
            w = w0 + tl.arange(0, BLOCK_L)
            valid = w < keys
            position = positions_of(w, shift, before, after).to(tl.int64)
            k_tile = tl.load(k_base + position[:, None] * stride_kn + d[None, :], mask=valid[:, None] & (d < Dk)[None, :], other=0.0)
            v_tile = tl.load(v_base + position[:, None] * stride_vn + dv[None, :], mask=valid[:, None] & (dv < Dv)[None, :], other=0.0)
            s2 = products(q_tile, k_tile, ACC) * scale_log2
            p = tl.where(valid[None, :], tl.exp2(s2 - lse2[:, None]), 0.0)
            dp = products(do_tile, v_tile, ACC)
            ds = p * (dp - delta_rows[:, None])
            acc = add_product(acc, ds.to(k_tile.dtype), k_tile, ACC)
    dq_rows = dq + out[:, None] * Dk + d[None, :]
    tl.store(dq_rows, (acc * scale).to(dq.dtype.element_ty), mask=in_q)


@triton.jit
def dq_blocks_kernel(
    q, k_desc, v_desc, k, v, ranges, q_pos, o, lse, do, dlse, dq, delta,
    stride_qb, stride_qs, stride_qg, stride_qh, stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_pb, stride_ps,
    stride_dob, stride_dos, stride_dog, stride_doh, S, S_kv, G, n, scale, scale_log2,
    h: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, HAS_POS: tl.constexpr, HAS_DLSE: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr,
    TAIL_L: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """`dq_kernel` where every range is one block of BLOCK keys: whole blocks by bulk copies, as in `forward_blocks_kernel`."""
    HEAD_TILES: tl.constexpr = (h + BLOCK_H - 1) // BLOCK_H
    STEPS: tl.constexpr = BLOCK // BLOCK_L
    pid = tl.program_id(0)
    head0 = (pid % HEAD_TILES) * BLOCK_H
    pid = pid // HEAD_TILES
    s = pid % S
    b = pid // S // G
    g = pid // S % G
    b64, s64, g64 = b.to(tl.int64), s.to(tl.int64), g.to(tl.int64)
    row = (b64 * S + s) * G + g
    limit = row_limit(q_pos, b64, s, S, S_kv, stride_pb, stride_ps, HAS_POS)
    row_ranges = ranges + row * n * 2

    head = head0 + tl.arange(0, BLOCK_H).to(tl.int64)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    is_head = head < h
    in_q, in_o = is_head[:, None] & (d < Dk)[None, :], is_head[:, None] & (dv < Dv)[None, :]
    q_rows = q + b64 * stride_qb + s64 * stride_qs + g64 * stride_qg + head[:, None] * stride_qh + d[None, :]
    do_rows = do + b64 * stride_dob + s64 * stride_dos + g64 * stride_dog + head[:, None] * stride_doh + dv[None, :]
    out = row * h + head
    q_tile = tl.load(q_rows, mask=in_q, other=0.0)
    do_tile = tl.load(do_rows, mask=in_o, other=0.0)
    o_tile = tl.load(o + out[:, None] * Dv + dv[None, :], mask=in_o, other=0.0)
    delta_rows = tl.sum(o_tile.to(ACC) * do_tile.to(ACC), 1)
    if HAS_DLSE:
        delta_rows -= tl.load(dlse + out, mask=is_head, other=0.0)
    tl.store(delta + out, delta_rows, mask=is_head)
    lse2 = tl.load(lse + out, mask=is_head, other=0.0) * LOG2_E

    listed, last_whole, cut_start, cut_end = split_blocks(row_ranges, n, limit, BLOCK, NP)
    acc = tl.zeros([BLOCK_H, BLOCK_D], ACC)
    for step in range(0, listed * STEPS):
        c, is_whole = whole_block(row_ranges, step // STEPS, limit, last_whole, BLOCK)
        c += step % STEPS * BLOCK_L
        k_tile = k_desc.load([b, g, c, 0]).reshape(BLOCK_L, BLOCK_D)
        v_tile = v_desc.load([b, g, c, 0]).reshape(BLOCK_L, BLOCK_DV)
        s2 = products(q_tile, k_tile, ACC) * scale_log2
        p = tl.where(is_whole, tl.exp2(s2 - lse2[:, None]), 0.0)
        dp = products(do_tile, v_tile, ACC)
        ds = p * (dp - delta_rows[:, None])
        acc = add_product(acc, ds.to(k_tile.dtype), k_tile, ACC)

    k_base = k + b64 * stride_kb + g64 * stride_kg
    v_base = v + b64 * stride_vb + g64 * stride_vg
    for c in range(cut_start, cut_end, TAIL_L):
        position = c + tl.arange(0, TAIL_L)
        valid = position < cut_end
        position = position.to(tl.int64)
        k_tile = tl.load(k_base + position[:, None] * stride_kn + d[None, :], mask=valid[:, None] & (d < Dk)[None, :], other=0.0)
        v_tile = tl.load(v_base + position[:, None] * stride_vn + dv[None, :], mask=valid[:, None] & (dv < Dv)[None, :], other=0.0)
        s2 = products(q_tile, k_tile, ACC) * scale_log2
        p = tl.where(valid[None, :], tl.exp2(s2 - lse2[:, None]), 0.0)
        dp = products(do_tile, v_tile, ACC)
        ds = p * (dp - delta_rows[:, None])
        acc = add_product(acc, ds.to(k_tile.dtype), k_tile, ACC)
    tl.store(dq + out[:, None] * Dk + d[None, :], (acc * scale).to(dq.dtype.element_ty), mask=in_q)
