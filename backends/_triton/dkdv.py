"""dK and dV without atomics: a program takes one KV tile and (a part of) the list of rows that chose it, in ascending order.

dv = sum p^T do, dk = scale * sum ds^T q over the rows and all h heads of the group (steps.py). Programs that share a tile write
float32 partials, which a second kernel adds in the order of the list: the sum's order is fixed, whatever ran first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton import launch
from nsa_sel.backends._triton.inverse import inverse, items, most_items
from nsa_sel.backends._triton.steps import LOG2_E, add_product, clamp_range, products
from nsa_sel.call import Call
from nsa_sel.config import KernelConfig

ENTRIES_AN_ITEM = 1024  # rows that one program takes: long enough to amortise its tile, short enough to share hot blocks


@triton.jit
def partial_dkdv_kernel(
    q, k, v, ranges, q_pos, lse, do, delta, part_dk, part_dv, entries, entry_offsets, item_tile, item_offsets,
    stride_qb, stride_qs, stride_qg, stride_qh, stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_pb, stride_ps,
    stride_dob, stride_dos, stride_dog, stride_doh, S, S_kv, G, n, tiles, first_tile, end_tile, scale, scale_log2,
    h: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, HAS_POS: tl.constexpr, ACC: tl.constexpr, ITEM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Item number program_id of the tiles first_tile .. end_tile: its part of dk [BLOCK_L, Dk] and dv [BLOCK_L, Dv].

    A matrix-unit step takes ROWS pairs of (entry, head), so that any number of heads fills it.
    """
    slot = tl.program_id(0).to(tl.int64)
    item = tl.load(item_offsets + first_tile) + slot
    if item < tl.load(item_offsets + end_tile):
        tile = tl.load(item_tile + item)
        e0 = tl.load(entry_offsets + tile) + (item - tl.load(item_offsets + tile)) * ITEM
        e1 = tl.minimum(e0 + ITEM, tl.load(entry_offsets + tile + 1))
        bg = tile // tiles
        b, g = bg // G, bg % G
        j0 = (tile % tiles * BLOCK_L).to(tl.int32)

        column = j0 + tl.arange(0, BLOCK_L)
        d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        in_k, in_v = (column < S_kv)[:, None] & (d < Dk)[None, :], (column < S_kv)[:, None] & (dv < Dv)[None, :]
        k_tile = tl.load(k + b * stride_kb + g * stride_kg + column.to(tl.int64)[:, None] * stride_kn + d[None, :], mask=in_k, other=0.0)
        v_tile = tl.load(v + b * stride_vb + g * stride_vg + column.to(tl.int64)[:, None] * stride_vn + dv[None, :], mask=in_v, other=0.0)
        dk_acc = tl.zeros([BLOCK_L, BLOCK_D], ACC)
        dv_acc = tl.zeros([BLOCK_L, BLOCK_DV], ACC)
        pairs = ((e1 - e0) * h).to(tl.int32)
        for p0 in range(0, pairs, ROWS):
            pair = p0 + tl.arange(0, ROWS)
            listed = pair < pairs
            head = (pair % h).to(tl.int64)
            entry = tl.load(entries + e0 + pair // h, mask=listed, other=0).to(tl.int64)
            row = entry // n
            s = row // G % S
            limit = row_limits(q_pos, b, s, S, S_kv, stride_pb, stride_ps, HAS_POS)
            start = tl.load(ranges + 2 * entry, mask=listed, other=0)
            end = tl.load(ranges + 2 * entry + 1, mask=listed, other=0)
            start, end = clamp_range(start, end, limit)

            q_rows = q + b * stride_qb + g * stride_qg + s[:, None] * stride_qs + head[:, None] * stride_qh + d[None, :]
            do_rows = do + b * stride_dob + g * stride_dog + s[:, None] * stride_dos + head[:, None] * stride_doh + dv[None, :]
            q_tile = tl.load(q_rows, mask=listed[:, None] & (d < Dk)[None, :], other=0.0)
            do_tile = tl.load(do_rows, mask=listed[:, None] & (dv < Dv)[None, :], other=0.0)
            lse2 = tl.load(lse + row * h + head, mask=listed, other=0.0) * LOG2_E
            delta_rows = tl.load(delta + row * h + head, mask=listed, other=0.0)

            s2 = products(k_tile, q_tile, ACC) * scale_log2
            seen = (column[:, None] >= start[None, :]) & (column[:, None] < end[None, :])
            p = tl.where(seen, tl.exp2(s2 - lse2[None, :]), 0.0)
            dv_acc = add_product(dv_acc, p.to(do_tile.dtype), do_tile, ACC)
            dp = products(v_tile, do_tile, ACC)
            # Where nothing is seen, v may be NaN, and p * dp with it: the mask decides, not the product.
            ds = tl.where(seen, p * (dp - delta_rows[None, :]), 0.0)
            dk_acc = add_product(dk_acc, ds.to(q_tile.dtype), q_tile, ACC)

        part = slot * BLOCK_L + tl.arange(0, BLOCK_L)
        tl.store(part_dk + part[:, None] * Dk + d[None, :], dk_acc * scale, mask=(d < Dk)[None, :])
        tl.store(part_dv + part[:, None] * Dv + dv[None, :], dv_acc, mask=(dv < Dv)[None, :])


@triton.jit
def row_limits(q_pos, b, s, S, S_kv, stride_pb, stride_ps, HAS_POS: tl.constexpr):
    """`row_limit` for a vector of rows s."""
    if HAS_POS:
        limit = tl.minimum(tl.load(q_pos + b * stride_pb + s * stride_ps).to(tl.int64) + 1, S_kv)
    else:
        limit = S_kv - S + s + 1
    return tl.maximum(limit, 0)


@triton.jit
def sum_parts_kernel(
    part_dk, part_dv, dk, dv, item_offsets, S_kv, tiles, first_tile,
    Dk: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dk [B*G, S_kv, Dk] and dv [B*G, S_kv, Dv]: the parts of each tile added in order; tiles that nobody chose get zeros."""
    PIECES: tl.constexpr = BLOCK_L // ROWS
    tile = first_tile + tl.program_id(0).to(tl.int64) // PIECES
    within = tl.program_id(0) % PIECES * ROWS + tl.arange(0, ROWS)
    base = tl.load(item_offsets + first_tile)
    i0, i1 = tl.load(item_offsets + tile) - base, tl.load(item_offsets + tile + 1) - base
    d, dv_ = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    dk_acc = tl.zeros([ROWS, BLOCK_D], part_dk.dtype.element_ty)
    dv_acc = tl.zeros([ROWS, BLOCK_DV], part_dv.dtype.element_ty)
    for i in range(i0, i1):
        part = i * BLOCK_L + within
        dk_acc += tl.load(part_dk + part[:, None] * Dk + d[None, :], mask=(d < Dk)[None, :], other=0.0)
        dv_acc += tl.load(part_dv + part[:, None] * Dv + dv_[None, :], mask=(dv_ < Dv)[None, :], other=0.0)
    column = tile % tiles * BLOCK_L + within
    row = tile // tiles * S_kv + column
    inside = (column < S_kv)[:, None]
    tl.store(dk + row[:, None] * Dk + d[None, :], dk_acc.to(dk.dtype.element_ty), mask=inside & (d < Dk)[None, :])
    tl.store(dv + row[:, None] * Dv + dv_[None, :], dv_acc.to(dv.dtype.element_ty), mask=inside & (dv_ < Dv)[None, :])


def key_value_gradients(call: Call, lse: Tensor, do: Tensor, delta: Tensor, config: KernelConfig) -> tuple[Tensor, Tensor]:
    """dk [B,G,S_kv,Dk] and dv [B,G,S_kv,Dv] from lse and delta [B,S,G,h]; partials stay within the workspace bound."""
    B, S, G, h, Dk = call.q.shape
    S_kv, Dv = call.v.shape[2:]
    width = config.block_l
    plan = inverse(call, width)
    entries_each = S * call.selection.n * plan.reach
    item_bytes = width * (Dk + Dv) * lse.element_size()
    size = ENTRIES_AN_ITEM
    while size < entries_each and most_items(plan, size, 1, entries_each) * item_bytes > call.settings.workspace_bytes:
        size *= 2
    cut = items(call, plan, size)
    pair_bytes = most_items(plan, size, 1, entries_each) * item_bytes
    pairs_at_once = max(1, min(B * G, call.settings.workspace_bytes // pair_bytes))
    slots = most_items(plan, size, pairs_at_once, entries_each)
    part_dk = torch.empty(slots, width, Dk, dtype=lse.dtype, device=lse.device)
    part_dv = torch.empty(slots, width, Dv, dtype=lse.dtype, device=lse.device)
    dk = torch.empty(B, G, S_kv, Dk, dtype=call.k.dtype, device=lse.device)
    dv = torch.empty(B, G, S_kv, Dv, dtype=call.v.dtype, device=lse.device)
    block_d, block_dv = launch.tile_widths(call)
    q_pos, *position_strides = launch.position_arguments(call)
    for pair in range(0, B * G, pairs_at_once):
        pairs = min(pairs_at_once, B * G - pair)
        first_tile, end_tile = pair * plan.tiles, (pair + pairs) * plan.tiles
        partial_dkdv_kernel[(most_items(plan, size, pairs, entries_each),)](
            call.q, call.k, call.v, call.selection.ranges.contiguous(), q_pos, lse, do, delta, part_dk, part_dv,
            plan.entries, plan.offsets, cut.tile, cut.offsets,
            *call.q.stride()[:4], *call.k.stride()[:3], *call.v.stride()[:3], *position_strides, *do.stride()[:4],
            S, S_kv, G, call.selection.n, plan.tiles, first_tile, end_tile, call.scale, launch.scale_log2(call),
            **launch.facts(call), ITEM=size, ROWS=config.rows, BLOCK_L=width, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        sum_rows = min(16, width)
        sum_parts_kernel[(pairs * plan.tiles * (width // sum_rows),)](
            part_dk, part_dv, dk, dv, cut.offsets, S_kv, plan.tiles, first_tile,
            Dk=Dk, Dv=Dv, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_L=width, ROWS=sum_rows, num_warps=4,
        )  # fmt: skip
    return dk, dv
