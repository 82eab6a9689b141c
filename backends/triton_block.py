"""triton-block: every KV block is visited once, with all the rows that chose it; for selections whose neighbours share little.

Forward: the program that holds a block's K and V attends to it with each row on its list (_triton/inverse.py) and writes a partial
o and log-sum-exp per (row, range); a second kernel joins each row's partials in the order of its ranges. Backward: the same pass
gives dK and dV (_triton/dkdv.py) and the partials of dQ, added in the order of the ranges.
    o = sum_i w_i o_i,  w_i = 2^(lse_i - lse),  lse = log2 sum_i 2^lse_i;  dq = sum_i dq_i
The partials are the cost: S * n * h * Dv values written and read once, 16-bit for 16-bit inputs. They live in a buffer within
runtime.workspace_bytes; units of rows and groups that do not fit take turns.

Within a block, 0 * NaN is NaN: a NaN or infinity in a value that one of its rows sees may reach the rows that stand before it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._buffers import temporary
from nsa_sel.backends._loads import piecewise_keys
from nsa_sel.backends._triton import launch
from nsa_sel.backends._triton.dkdv import (
    Gradients,
    Unit,
    add_unit,
    highest_limit,
    piece_bounds,
    plan_within,
    tile_width,
    units,
    workspace_beside_plan,
)
from nsa_sel.backends._triton.inverse import Inverse, list_start
from nsa_sel.backends._triton.start import REMEMBERED, Launch
from nsa_sel.backends._triton.steps import (
    LN_2,
    LOWEST,
    clamp_range,
    load_columns,
    powers,
    reciprocal,
    row_limit,
    split_products,
    store_columns,
)
from nsa_sel.core.call import Call
from nsa_sel.settings.schema import KernelConfig

REDUCED = 4  # (row, head) pairs that a program of the second kernels joins


@triton.jit
def partial_kernel(
    q, k, v, q_pos, part_o, part_lse, entries, ends, piece_list,
    stride_qb, stride_qs, stride_qg, stride_qh, stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_pb, stride_ps,
    S, S_kv, G, tiles, pairs_all, stretches, first_list, end_list, piece, first_pair, first_row, section, scale_log2,
    EACH: tl.constexpr, h: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, HAS_POS: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Partials [pairs, section, n*reach, h] (lse in base 2) of one piece of the unit's lists first_list .. end_list."""
    e, stop = piece_bounds(ends, first_list, end_list, stretches, piece)
    if e < stop:
        number = tl.load(piece_list + tl.program_id(0))
        r = tl.arange(0, ROWS)
        while e < stop:
            list_begin = list_start(ends, number, stretches)
            e1 = tl.minimum(list_start(ends, number + 1, stretches), stop)
            if e < e1:
                bg = number // tiles % pairs_all
                b, g = bg // G, bg % G
                column = (number % tiles * BLOCK_L).to(tl.int32) + tl.arange(0, BLOCK_L)
                # Keys that none of the rows may see may hold NaN, which 0 * v would not mask.
                reachable = highest_limit(entries, q_pos, e, e1, b, S, S_kv, stride_pb, stride_ps, EACH, HAS_POS)
                k_rows = k + b * stride_kb + g * stride_kg + column.to(tl.int64) * stride_kn
                v_rows = v + b * stride_vb + g * stride_vg + column.to(tl.int64) * stride_vn
                k_tile = load_columns(k_rows, column < reachable, 0, Dk, BLOCK_D)
                k_rest = load_columns(k_rows, column < reachable, BLOCK_D, Dk, BLOCK_REST) if BLOCK_REST > 0 else k_tile
                v_tile = load_columns(v_rows, column < reachable, 0, Dv, BLOCK_DV)
                pairs = ((e1 - e) * h).to(tl.int32)
                masked = (tl.maximum(list_begin + BLOCK_L - e, 0) * h).to(tl.int32)
                first_slot = ((bg - first_pair) * section - first_row) * EACH * h
                coming = tl.load(entries + e + r // h, mask=r < pairs, other=0)
                for p0 in range(0, pairs, ROWS):
                    pair = p0 + r
                    listed = pair < pairs
                    entry = coming
                    coming = tl.load(entries + e + (pair + ROWS) // h, mask=pair + ROWS < pairs, other=0)
                    head = pair % h
                    s = (entry // EACH).to(tl.int64)
                    q_rows = q + b * stride_qb + g * stride_qg + (s * stride_qs + head * stride_qh)
                    q_tile = load_columns(q_rows, listed, 0, Dk, BLOCK_D)
                    q_rest = load_columns(q_rows, listed, BLOCK_D, Dk, BLOCK_REST) if BLOCK_REST > 0 else q_tile
                    logits = split_products(q_tile, q_rest, k_tile, k_rest, BLOCK_REST, ACC)
                    if HAS_POS or p0 < masked:  # of the rows in order, only the first BLOCK_L can stand within the block
                        limit = row_limit(q_pos, b, s, S, S_kv, stride_pb, stride_ps, HAS_POS)
                        logits = tl.where(column[None, :] < limit[:, None], logits, float("-inf"))
                    m = tl.maximum(tl.max(logits, 1), LOWEST)
                    p = powers(logits, m, scale_log2, v_tile.dtype)
                    l = tl.where(listed, tl.sum(p, 1), 1.0)
                    weight = reciprocal(tl.where(l == 0, 1.0, l))  # l = 0 where all logits are below LOWEST: lse = -inf, o = 0
                    o_tile = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee", out_dtype=ACC) * weight[:, None]
                    slot = first_slot + entry.to(tl.int64) * h + head
                    store_columns(part_o + slot * Dv, o_tile, listed, 0, Dv)
                    tl.store(part_lse + slot, m * scale_log2 + tl.log2(l), mask=listed)
            e = e1
            number += 1


@triton.jit
def unit_rows(S, G, rows, first_pair, first_row, pairs, section, EACH: tl.constexpr, h: tl.constexpr, R: tl.constexpr):
    """The R (row, head) pairs of this program: batch entry, s, row among all, head, first slot, and whether they exist."""
    i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    head = i % h
    within = i // h % rows
    pair = tl.minimum(i // h // rows, pairs - 1)
    b, g, s = (first_pair + pair) // G, (first_pair + pair) % G, first_row + within
    return b, s, (b * S + s) * G + g, head, (pair * section + within) * EACH * h + head, i < pairs * rows * h


@triton.jit
def slot_used(ranges, row, i, limit, exists, N: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr):
    """Whether slot i = range * REACH + step of the rows holds a partial: the range reaches its step-th tile."""
    at = ranges + (row * N + i // REACH) * 2
    start, end = clamp_range(tl.load(at, mask=exists, other=0), tl.load(at + 1, mask=exists, other=0), limit)
    return (end > start) & ((start // WIDTH + i % REACH) * WIDTH < end)


@triton.jit
def join_kernel(
    part_o, part_lse, ranges, q_pos, o, lse, stride_pb, stride_ps, S, S_kv, G, rows, first_pair, first_row, pairs, section,
    N: tl.constexpr, REACH: tl.constexpr, h: tl.constexpr, Dv: tl.constexpr, HAS_POS: tl.constexpr, ACC: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_DV: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """o and lse of R (row, head) pairs from their partials, in the order of the ranges."""
    b, s, row, head, slot, exists = unit_rows(S, G, rows, first_pair, first_row, pairs, section, N * REACH, h, R)
    limit = row_limit(q_pos, b, s, S, S_kv, stride_pb, stride_ps, HAS_POS)
    dv = tl.arange(0, BLOCK_DV)
    m = tl.full([R], LOWEST, ACC)
    for i in range(0, N * REACH):
        used = exists & slot_used(ranges, row, i, limit, exists, N, REACH, WIDTH)
        m = tl.maximum(m, tl.load(part_lse + slot + i * h, mask=used, other=float("-inf")))
    acc = tl.zeros([R, BLOCK_DV], ACC)
    l = tl.zeros([R], ACC)
    for i in range(0, N * REACH):
        used = exists & slot_used(ranges, row, i, limit, exists, N, REACH, WIDTH)
        weight = tl.exp2(tl.load(part_lse + slot + i * h, mask=used, other=float("-inf")) - m)
        l += weight
        rows_o = part_o + ((slot + i * h) * Dv)[:, None] + dv[None, :]
        acc += weight[:, None] * tl.load(rows_o, mask=used[:, None] & (dv < Dv)[None, :], other=0.0).to(ACC)
    seen = l != 0
    out = row * h + head
    o_tile = acc * reciprocal(tl.where(seen, l, 1.0))[:, None]
    tl.store(o + (out * Dv)[:, None] + dv[None, :], o_tile.to(o.dtype.element_ty), mask=exists[:, None] & (dv < Dv)[None, :])
    tl.store(lse + out, tl.where(seen, (m + tl.log2(tl.where(seen, l, 1.0))) * LN_2, float("-inf")), mask=exists)


@triton.jit
def sum_dq_kernel(
    part_dq, ranges, q_pos, dq, stride_pb, stride_ps, S, S_kv, G, rows, first_pair, first_row, pairs, section,
    N: tl.constexpr, REACH: tl.constexpr, h: tl.constexpr, Dk: tl.constexpr, HAS_POS: tl.constexpr, ACC: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """dq of R (row, head) pairs: their partials added in the order of the ranges."""
    b, s, row, head, slot, exists = unit_rows(S, G, rows, first_pair, first_row, pairs, section, N * REACH, h, R)
    limit = row_limit(q_pos, b, s, S, S_kv, stride_pb, stride_ps, HAS_POS)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([R, BLOCK_D], ACC)
    for i in range(0, N * REACH):
        used = exists & slot_used(ranges, row, i, limit, exists, N, REACH, WIDTH)
        rows_dq = part_dq + ((slot + i * h) * Dk)[:, None] + d[None, :]
        acc += tl.load(rows_dq, mask=used[:, None] & (d < Dk)[None, :], other=0.0).to(ACC)
    out = ((row * h + head) * Dk)[:, None] + d[None, :]
    tl.store(dq + out, acc.to(dq.dtype.element_ty), mask=exists[:, None] & (d < Dk)[None, :])


@triton.jit
def delta_kernel(
    o, do, dlse, delta, stride_dob, stride_dos, stride_dog, stride_doh, S, G, total,
    h: tl.constexpr, Dv: tl.constexpr, HAS_DLSE: tl.constexpr, ACC: tl.constexpr, BLOCK_DV: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """delta = sum(do * o) - dlse [B,S,G,h]."""
    i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    exists = i < total
    dv = tl.arange(0, BLOCK_DV)
    inside = exists[:, None] & (dv < Dv)[None, :]
    row = i // h
    at = row // G // S * stride_dob + row // G % S * stride_dos + row % G * stride_dog + i % h * stride_doh
    o_tile = tl.load(o + i[:, None] * Dv + dv[None, :], mask=inside, other=0.0)
    do_tile = tl.load(do + at[:, None] + dv[None, :], mask=inside, other=0.0)
    rows = tl.sum(o_tile.to(ACC) * do_tile.to(ACC), 1)
    if HAS_DLSE:
        rows -= tl.load(dlse + i, mask=exists, other=0.0)
    tl.store(delta + i, rows, mask=exists)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] and lse [B,S,G,h]."""
    if call.scale < 0:  # kernels keep the largest product, which must belong to the largest logit
        return forward(call.with_positive_scale())
    heads, n = launch.heads(call), call.selection.n
    config = launch.kernel_config(call, heads, "triton-block/forward")
    o, lse = launch.outputs(call)
    plan = _plan(call, tile_width(call, config), call.v.shape[3], 0)
    B, S, G, h, _ = call.q.shape
    part_lse = temporary(call, lse, plan.pairs, plan.section, n * plan.reach, h)
    part_o = temporary(call, o, plan.pairs, plan.section, n * plan.reach, h, heads.Dv)
    partial, join = _forward_launches(heads, config, n, plan.reach, plan.width)
    for unit in units(call, plan):
        partial.start(
            plan.pieces,
            (call.q, call.k, call.v, call.q_pos, part_o, part_lse, plan.entries, plan.ends, unit.piece_list),
            (*launch.strides(call), S, call.k.shape[2], G, plan.tiles, B * G, plan.stretches, unit.first_list, unit.end_list, plan.piece,
             unit.first_pair, unit.first_row, plan.section, call.scale_log2()),
        )  # fmt: skip
        join.start(
            _reduce_grid(call, unit), (part_o, part_lse, call.selection.disjoint_ranges(), call.q_pos, o, lse),
            _reduce_numbers(call, plan, unit),
        )  # fmt: skip
    return o, lse


def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from one visit of every KV block, and a sum over each row's ranges."""
    if call.scale < 0:
        dq, dk, dv = backward(call.with_positive_scale(), o, lse, do, dlse)
        return -dq, dk, dv
    heads, n = launch.heads(call), call.selection.n
    config = launch.kernel_config(call, heads, "triton-block/backward")
    _, S, G, h, Dk = call.q.shape
    dq, delta = torch.empty_like(call.q, memory_format=torch.contiguous_format), temporary(call, lse, *lse.shape)
    dlse = None if dlse is None else dlse.contiguous()
    rows = lse.numel()
    _delta_launch(heads, dlse is not None).start(-(-rows // REDUCED), (o, do, dlse, delta), (*do.stride()[:4], S, G, rows))
    plan = _plan(call, tile_width(call, config), Dk, Dk + heads.Dv)
    part_dq = temporary(call, dq, plan.pairs, plan.section, n * plan.reach, h, Dk)
    sums = Gradients(call, plan, lse)
    sum_dq = _sum_dq_launch(heads, n, plan.reach, plan.width)
    for unit in units(call, plan):
        add_unit(call, heads, plan, unit, lse, do, delta, sums, config, part_dq)
        sum_dq.start(
            _reduce_grid(call, unit), (part_dq, call.selection.disjoint_ranges(), call.q_pos, dq), _reduce_numbers(call, plan, unit)
        )  # fmt: skip
    return dq, sums.dk, sums.dv


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Keys that the forward loads: a tile once for each piece of its list of rows; not counted, at most what the rows select."""
    if not count:
        return selected
    config = call.settings.kernel("triton-block/forward" + launch.heads_class(launch.heads(call)))
    plan = _plan(call, tile_width(call, config), call.v.shape[3], 0)
    return piecewise_keys(call, plan.width, plan.section, plan.pairs, plan.piece)


@functools.lru_cache(REMEMBERED)
def _forward_launches(heads: launch.Heads, config: KernelConfig, n: int, reach: int, width: int) -> tuple[Launch, Launch]:
    """The partials of the KV blocks, and the join of each row's."""
    facts = launch.facts(heads)
    partial = Launch(
        partial_kernel, EACH=n * reach, **launch.split_facts(heads), ROWS=config.rows, BLOCK_L=width,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    join = Launch(
        join_kernel, N=n, REACH=reach, h=heads.h, Dv=heads.Dv, HAS_POS=heads.has_pos, ACC=facts["ACC"], WIDTH=width,
        BLOCK_DV=facts["BLOCK_DV"], R=REDUCED, num_warps=1,
    )  # fmt: skip
    return partial, join


@functools.lru_cache(REMEMBERED)
def _delta_launch(heads: launch.Heads, has_dlse: bool) -> Launch:
    facts = launch.facts(heads)
    return Launch(
        delta_kernel, h=heads.h, Dv=heads.Dv, HAS_DLSE=has_dlse, ACC=facts["ACC"], BLOCK_DV=facts["BLOCK_DV"], R=REDUCED, num_warps=1
    )


@functools.lru_cache(REMEMBERED)
def _sum_dq_launch(heads: launch.Heads, n: int, reach: int, width: int) -> Launch:
    facts = launch.facts(heads)
    return Launch(
        sum_dq_kernel, N=n, REACH=reach, h=heads.h, Dk=heads.Dk, HAS_POS=heads.has_pos, ACC=facts["ACC"], WIDTH=width,
        BLOCK_D=facts["BLOCK_D"], R=REDUCED, num_warps=1,
    )  # fmt: skip


def _plan(call: Call, width: int, D: int, gradient_columns: int) -> Inverse:
    """Units whose partials [rows, n*reach, h, D] fit the workspace beside the plan; with gradient_columns = Dk + Dv, a quarter of it
    is left to the float32 parts of dk and dv, and where rows come in sections, their sums over one pair are set aside.

    All rows of few pairs rather than few rows of all: longer lists, and a group's K and V stay in the cache.
    """
    B, S, G, h, _ = call.q.shape
    block, accumulator = call.selection.block_size, max(4, call.q.element_size())
    assert block is not None, "Limits.block_aligned_only keeps other selections out"
    row_bytes = call.selection.n * (block // width) * h * (D * call.q.element_size() + accumulator)
    workspace = workspace_beside_plan(call, width)
    parts = workspace // 4 if gradient_columns else 0
    if (workspace - parts) // row_bytes >= S:
        section, pairs = S, min(B * G, (workspace - parts) // row_bytes // S)
    else:
        sums = call.k.shape[2] * gradient_columns * accumulator
        fitting = max(1, (workspace - parts - sums) // row_bytes, workspace // 8 // row_bytes)
        section, pairs = _even_section(S, fitting), 1
    return plan_within(call, width, section, pairs, parts if parts else 1 << 62)


def _even_section(S: int, fitting: int) -> int:
    """At most `fitting` rows, sections of about one size; a multiple of 1024 or a power of two, which stretches of rows divide."""
    if fitting < 1024:
        return 1 << (fitting.bit_length() - 1)
    even = -(-S // -(-S // fitting))
    return min(fitting // 1024, -(-even // 1024)) * 1024


def _reduce_grid(call: Call, unit: Unit) -> int:
    return -(-(unit.pairs * unit.rows * call.q.shape[3]) // REDUCED)


def _reduce_numbers(call: Call, plan: Inverse, unit: Unit) -> tuple[int, ...]:
    return (
        *launch.position_strides(call), call.q.shape[1], call.k.shape[2], call.q.shape[2],
        unit.rows, unit.first_pair, unit.first_row, unit.pairs, plan.section,
    )  # fmt: skip
