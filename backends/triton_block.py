"""triton-block: visit every KV block once with all rows that select it. For selections whose neighbors share few
blocks.

Forward: a program holds a block's K and V, attends to it with each row on the block's list (_triton/key_to_rows.py),
and stores a partial o and log-sum-exp per (row, range). A second kernel merges each row's partials in the order of its
ranges. Backward: the same visit gives dK and dV (_triton/dkdv.py) and the partials of dQ, which are added in the order
of the ranges.
    o = sum_i w_i o_i,  w_i = 2^(lse_i - lse),  lse = log2 sum_i 2^lse_i;  dq = sum_i dq_i
Partials are the main cost: S * n * h * Dv values written and read once, in 16 bits for 16-bit inputs. They live in a
buffer within runtime.workspace_bytes; rows and groups that do not fit at once become separate units (_triton/units.py).

Within a block 0 * NaN is NaN: a NaN or infinity in a value that one of its rows sees may reach rows at earlier
positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._loads import piecewise_keys
from nsa_sel.backends._triton import arguments, large_blocks
from nsa_sel.backends._triton.dkdv import Gradients, key_value_gradients, partial_unit, sum_unit
from nsa_sel.backends._triton.kernel import cached_kernel
from nsa_sel.backends._triton.key_to_rows import KeyToRows, list_start
from nsa_sel.backends._triton.large_blocks import is_large
from nsa_sel.backends._triton.rows import load_range, row_limit
from nsa_sel.backends._triton.softmax import LN_2, LOWEST, dot, powers, reciprocal, row_delta, split_products
from nsa_sel.backends._triton.tiles import load_columns, load_kv, load_split, row_pointers, store_columns, tile_size
from nsa_sel.backends._triton.units import (
    Unit,
    highest_limit,
    list_tile,
    load_entries,
    piece_bounds,
    plan_within,
    tile_width,
    units,
    workspace_beside_plan,
)
from nsa_sel.backends.launcher.buffers import temporary
from nsa_sel.backends.launcher.passes import backward_of_any_scale, forward_of_any_scale, outputs
from nsa_sel.core.call import Call

REDUCED = 4  # (row, head) pairs per program of sum_dq_kernel and delta_kernel
JOINED = 2  # (row, head) pairs per program of join_kernel
MOST_JOINED = 4096  # elements of partials that a program of join_kernel (one warp) loads at once
MOST_CHUNK = 16  # partials per pair that it loads at once: Triton 3.6 fails to compile a sum over 32 in a loop


@triton.jit
def partial_kernel(
    q, k, v, q_pos, part_o, part_lse, entries, ends, piece_list, strides, sizes, lists, scale_log2,
    dims: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Compute partial o and base-2 lse [pairs, section, EACH, h] of every entry in one piece; EACH = n * reach.

    Grid: one program per piece of the unit's lists.
    Tiles: k and v [BLOCK_L, D], loaded once per list through pointers; q [ROWS, D], a step's ROWS (entry, head) pairs.
    Masks: rows of a list ascend, so only its first BLOCK_L rows can lie within the block and need a mask.
    """
    S, S_kv, G = sizes
    e, stop = piece_bounds(ends, lists, tl.program_id(0))
    if e < stop:
        number = tl.load(piece_list + tl.program_id(0))
        r = tl.arange(0, ROWS)  # [ROWS], hoisted out of the loop over lists
        while e < stop:
            list_begin = list_start(ends, number, lists.stretches)
            e1 = tl.minimum(list_start(ends, number + 1, lists.stretches), stop)
            if e < e1:
                bg, b, g, column = list_tile(number, lists, G, BLOCK_L)
                # Do not load keys that no row may see: they can hold NaN, and 0 * NaN is NaN.
                reachable = highest_limit(entries, q_pos, strides.pos, e, e1, b, S, S_kv, EACH)
                kv = load_kv(k, v, strides, b, g, column, column < reachable, dims)
                first_slot = ((bg - lists.first_pair) * lists.section - lists.first_row) * EACH * dims.h
                attend_list(q, kv, q_pos, part_o, part_lse, entries, e, e1, list_begin, first_slot, b, g, column, r,
                            strides, sizes, scale_log2, dims, EACH)  # fmt: skip
            e = e1
            number += 1


@triton.jit
def attend_list(
    q, kv, q_pos, part_o, part_lse, entries, e, e1, list_begin, first_slot, b, g, column, r, strides, sizes, scale_log2,
    dims: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Compute and store the partials of one block for entries [e, e1) of its list."""
    S, S_kv, _ = sizes
    h: tl.constexpr = dims.h
    ROWS: tl.constexpr = r.shape[0]
    HAS_POS: tl.constexpr = q_pos is not None
    k_tile, k_rest, v_tile = kv
    pairs = ((e1 - e) * h).to(tl.int32)
    masked = (tl.maximum(list_begin + column.shape[0] - e, 0) * h).to(tl.int32)
    coming = load_entries(entries, e, r, pairs, h)
    for p0 in range(0, pairs, ROWS):
        pair = p0 + r  # [ROWS], as all row indices below
        listed = pair < pairs
        entry = coming
        coming = load_entries(entries, e, pair + ROWS, pairs, h)
        head = pair % h
        s = (entry // EACH).to(tl.int64)
        q_tile, q_rest = load_split(row_pointers(q, strides.q, b, g, s, head), listed, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
        logits = split_products(q_tile, q_rest, k_tile, k_rest, dims.BLOCK_REST)  # [ROWS, BLOCK_L]
        if HAS_POS or p0 < masked:
            limit = row_limit(q_pos, strides.pos, b, s, S, S_kv)
            logits = tl.where(column[None, :] < limit[:, None], logits, float("-inf"))
        m = tl.maximum(tl.max(logits, 1), LOWEST)  # [ROWS]
        p = powers(logits, m, scale_log2, v_tile.dtype)  # [ROWS, BLOCK_L]
        l = tl.where(listed, tl.sum(p, 1), 1.0)
        weight = reciprocal(tl.where(l == 0, 1.0, l))  # l = 0 if all logits are -inf: then o = 0, lse = -inf
        o_tile = dot(p.to(v_tile.dtype), v_tile) * weight[:, None]  # [ROWS, BLOCK_DV]
        slot = first_slot + entry.to(tl.int64) * h + head
        store_columns(part_o + slot * dims.Dv, o_tile, listed, 0, dims.Dv)
        tl.store(part_lse + slot, m * scale_log2 + tl.log2(l), mask=listed)


@triton.jit
def unit_rows(q_pos, stride_pos, sizes, unit, EACH: tl.constexpr, dims: tl.constexpr, R: tl.constexpr):
    """Return for this program's R (row, head) pairs, each [R]: index in [B,S,G,h], row of the ranges, limit, first slot,
    existence."""
    h: tl.constexpr = dims.h
    S, S_kv, G = sizes
    i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    head = i % h
    within = i // h % unit.rows
    pair = tl.minimum(i // h // unit.rows, unit.pairs - 1)
    b, g, s = (unit.first_pair + pair) // G, (unit.first_pair + pair) % G, unit.first_row + within
    row = (b * S + s) * G + g
    limit = row_limit(q_pos, stride_pos, b, s, S, S_kv)
    return row * h + head, row // dims.SHARE, limit, (pair * unit.section + within) * EACH * h + head, i < unit.pairs * unit.rows * h


@triton.jit
def slot_used(ranges, row, i, limit, exists, N: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr):
    """Return whether slot i = range * REACH + step of the rows holds a partial, because the range reaches its step-th
    tile."""
    start, end = load_range(ranges + (row * N + i // REACH) * 2, limit, exists)
    return exists & (end > start) & ((start // WIDTH + i % REACH) * WIDTH < end)


@triton.jit
def join_kernel(
    part_o, part_lse, ranges, q_pos, o, lse, stride_pos, sizes, unit,
    dims: tl.constexpr, N: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge the partials of R (row, head) pairs into o and lse.

    Grid: one program per R pairs of the unit. Loads CHUNK partials at a time, so that many loads are in flight.
    """
    ACC: tl.constexpr = lse.dtype.element_ty
    BLOCK_DV: tl.constexpr = dims.BLOCK_DV
    out, row, limit, first_slot, exists = unit_rows(q_pos, stride_pos, sizes, unit, N * REACH, dims, R)
    column = tl.arange(0, BLOCK_DV)[None, None, :]
    m = tl.full([R], LOWEST, ACC)
    for i0 in range(0, N * REACH, CHUNK):
        _, logits = slot_logits(part_lse, ranges, row, limit, first_slot, exists, i0, dims, N, REACH, WIDTH, CHUNK)
        m = tl.maximum(m, tl.max(logits, 1))
    acc = tl.zeros([R, BLOCK_DV], ACC)
    l = tl.zeros([R], ACC)
    for i0 in range(0, N * REACH, CHUNK):
        slot, logits = slot_logits(part_lse, ranges, row, limit, first_slot, exists, i0, dims, N, REACH, WIDTH, CHUNK)
        used = logits > float("-inf")  # [R, CHUNK]; partials without keys are not loaded
        tile = tl.load(part_o + slot[:, :, None] * dims.Dv + column, mask=used[:, :, None] & (column < dims.Dv), other=0.0)
        weight = tl.exp2(logits - m[:, None])  # [R, CHUNK]
        l += tl.sum(weight, 1)
        acc += tl.sum(weight[:, :, None] * tile.to(ACC), 1)
    seen = l != 0
    o_tile = acc * reciprocal(tl.where(seen, l, 1.0))[:, None]
    store_columns(o + out * dims.Dv, o_tile, exists, 0, dims.Dv)
    tl.store(lse + out, tl.where(seen, (m + tl.log2(tl.where(seen, l, 1.0))) * LN_2, float("-inf")), mask=exists)


@triton.jit
def slot_logits(
    part_lse, ranges, row, limit, first_slot, exists, i0,
    dims: tl.constexpr, N: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the slots of partials [R, CHUNK] from i0 on, and their base-2 lse, -inf for slots without a partial."""
    i = i0 + tl.arange(0, CHUNK)[None, :]
    used = slot_used(ranges, row[:, None], i, limit[:, None], exists[:, None] & (i < N * REACH), N, REACH, WIDTH)
    slot = first_slot[:, None] + i * dims.h
    return slot, tl.load(part_lse + slot, mask=used, other=float("-inf"))


@triton.jit
def sum_dq_kernel(
    part_dq, ranges, q_pos, dq, stride_pos, sizes, unit,
    dims: tl.constexpr, N: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add the dq partials of R (row, head) pairs in the order of the ranges. Grid: one program per R pairs of the
    unit."""
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    out, row, limit, slot, exists = unit_rows(q_pos, stride_pos, sizes, unit, N * REACH, dims, R)
    acc = tl.zeros([R, BLOCK_D], ACC)
    for i in range(0, N * REACH):
        used = slot_used(ranges, row, i, limit, exists, N, REACH, WIDTH)
        acc += load_columns(part_dq + (slot + i * dims.h) * dims.Dk, used, 0, dims.Dk, BLOCK_D).to(ACC)
    store_columns(dq + out * dims.Dk, acc, exists, 0, dims.Dk)


@triton.jit
def delta_kernel(o, do, dlse, delta, stride_do, sizes, total, dims: tl.constexpr, R: tl.constexpr):
    """Compute delta = sum(do * o) - dlse [B,S,G,h]. Grid: one program per R (row, head) pairs."""
    S, _, G = sizes
    i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    exists = i < total
    row = i // dims.h
    do_rows = row_pointers(do, stride_do, row // G // S, row % G, row // G % S, i % dims.h)
    do_tile = load_columns(do_rows, exists, 0, dims.Dv, dims.BLOCK_DV)
    tl.store(delta + i, row_delta(o, do_tile, dlse, i, exists, dims, delta.dtype.element_ty), mask=exists)


@forward_of_any_scale
def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h]."""
    heads = arguments.heads(call)
    if is_large(call):
        large = _large_plan(call, heads.Dv)
        return joined_partials(call, large, functools.partial(large_blocks.visit, call, large))
    config = arguments.kernel_config(call, heads, "triton-block/forward")
    plan = _plan(call, tile_width(call, config), heads.Dv, 0)
    tiles = {"EACH": call.selection.n * plan.reach, "ROWS": config.rows, "BLOCK_L": plan.width}
    partial = cached_kernel(partial_kernel, dims=arguments.split_dims(heads), **tiles, **arguments.options(config))
    strides, sizes = arguments.strides(call), arguments.sizes(call)

    def visit(unit: Unit, part_o: Tensor, part_lse: Tensor) -> None:
        tensors = (call.q, call.k, call.v, call.q_pos, part_o, part_lse, plan.entries, plan.ends, unit.piece_list)
        numbers = (strides, sizes, unit.lists, call.scale_log2())
        arguments.announced(call, heads, "triton-block/forward", config, partial).launch(plan.pieces, tensors, numbers)

    return joined_partials(call, plan, visit)


def joined_partials(call: Call, plan: KeyToRows, visit: Callable[[Unit, Tensor, Tensor], None]) -> tuple[Tensor, Tensor]:
    """Run `visit` and the merge for every unit; return o and lse.

    visit(unit, part_o, part_lse) writes the partials of a unit's entries: part_o [pairs, section, n*reach, h, Dv], and
    base-2 part_lse [pairs, section, n*reach, h].
    """
    heads, n = arguments.heads(call), call.selection.n
    o, lse = outputs(call)
    part_lse = temporary(call, lse, plan.pairs, plan.section, n * plan.reach, heads.h)
    part_o = temporary(call, o, plan.pairs, plan.section, n * plan.reach, heads.h, heads.Dv)
    dims = arguments.dims(heads)
    chunk = min(tile_size(n * plan.reach, 1), MOST_CHUNK, max(1, MOST_JOINED // (JOINED * dims.BLOCK_DV)))
    join = cached_kernel(join_kernel, dims=dims, N=n, REACH=plan.reach, WIDTH=plan.width, R=JOINED, CHUNK=chunk, num_warps=1)
    reduced = (part_o, part_lse, call.disjoint_ranges(), call.q_pos, o, lse)
    for unit in units(call, plan):
        visit(unit, part_o, part_lse)
        join.launch(_reduce_grid(unit, heads.h, JOINED), reduced, (arguments.position_strides(call), arguments.sizes(call), unit.rows))
    return o, lse


@backward_of_any_scale
def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv from one visit of every KV block, and a sum over each row's ranges for dq."""
    heads = arguments.heads(call)
    if is_large(call):
        dq, delta = dq_of_large(call, o, lse, do, dlse)
        return dq, *key_value_gradients(call, heads, lse, do, delta, "triton-tile/dkdv")
    width = tile_width(call, arguments.kernel_config(call, heads, "triton-block/backward"))
    plan = _plan(call, width, heads.Dk, heads.Dk + heads.Dv)
    sums = Gradients(call, plan, lse)

    def visit(unit: Unit, delta: Tensor, part_dq: Tensor, dq: Tensor) -> None:
        partial_unit(call, heads, plan, unit, lse, do, delta, sums, "triton-block/backward", part_dq)
        sum_unit(call, heads, plan, unit, sums)

    return sum_of_shares(call, o, lse, do, dlse, plan, visit)[0], sums.dk, sums.dv


def dq_of_large(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return dq for blocks that are visited whole, and delta [B,S,G,h] for dk and dv."""
    plan = _large_plan(call, call.q.shape[4])

    def visit(unit: Unit, delta: Tensor, part_dq: Tensor, dq: Tensor) -> None:
        large_blocks.visit(call, plan, unit, part_dq, None, lse, do, delta)

    return sum_of_shares(call, o, lse, do, dlse, plan, visit)


def _large_plan(call: Call, D: int) -> KeyToRows:
    """Return the plan for blocks that are visited whole, with one partial [h, D] per (row, block)."""
    block = call.selection.block_size
    assert block is not None, "is_large"
    return _plan(call, block, D, 0)


def sum_of_shares(
    call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, plan: KeyToRows,
    visit: Callable[[Unit, Tensor, Tensor, Tensor], None], summed: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `visit` and the sum of dq for every unit; return dq and delta.

    visit(unit, delta, part_dq, dq) writes the shares part_dq [pairs, section, n*reach, h, Dk] of a unit's entries.
    summed: it also writes dq, so that no sum is needed.
    """
    heads, n = arguments.heads(call), call.selection.n
    dq, delta = arguments.row_gradients(call, lse)
    rows, dims = lse.numel(), arguments.dims(heads)
    delta_of = cached_kernel(delta_kernel, dims=dims, R=REDUCED, num_warps=1)
    delta_of.launch(-(-rows // REDUCED), (o, do, dlse, delta), (do.stride()[:4], arguments.sizes(call), rows))
    part_dq = temporary(call, dq, plan.pairs, plan.section, n * plan.reach, heads.h, heads.Dk)
    acc = tl.float64 if lse.dtype == torch.float64 else tl.float32
    sum_dq = cached_kernel(sum_dq_kernel, dims=dims, N=n, REACH=plan.reach, WIDTH=plan.width, R=REDUCED, ACC=acc, num_warps=1)
    reduced = (part_dq, call.disjoint_ranges(), call.q_pos, dq)
    for unit in units(call, plan):
        visit(unit, delta, part_dq, dq)
        if not summed:
            sum_dq.launch(_reduce_grid(unit, heads.h), reduced, (arguments.position_strides(call), arguments.sizes(call), unit.rows))
    return dq, delta


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Return how many keys the forward loads: each tile once per piece of its list of rows. Without `count`, return a
    bound."""
    if not count:
        return selected
    heads = arguments.heads(call)
    if is_large(call):
        large = _large_plan(call, heads.Dv)
        return piecewise_keys(call, large.width, large.section, large.pairs, large_blocks.tokens(call))
    config = call.settings.kernel("triton-block/forward" + arguments.config_suffix(heads))
    plan = _plan(call, tile_width(call, config), call.v.shape[3], 0)
    return piecewise_keys(call, plan.width, plan.section, plan.pairs, plan.piece)


def _reduce_grid(unit: Unit, h: int, reduced: int = REDUCED) -> int:
    return -(-(unit.rows.pairs * unit.rows.rows * h) // reduced)


def _plan(call: Call, width: int, D: int, gradient_columns: int) -> KeyToRows:
    """Return the plan of units whose partials [rows, n*reach, h, D] fit the workspace next to the plan.

    With gradient_columns = Dk + Dv, a quarter of the workspace is reserved for partial sums of dk and dv, and if rows
    are split into sections, room for float32 sums of one pair. Prefers all rows of few pairs over few rows of all
    pairs, because lists are longer and a group's K and V stay in the cache.
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
        section, pairs = even_section(S, fitting), 1
    return plan_within(call, width, section, pairs, parts if parts else 1 << 62)


def even_section(S: int, fitting: int) -> int:
    """Return rows per section: at most `fitting`, about equal sections, and a multiple of 1024 or a power of two (for
    stretches)."""
    if fitting < 1024:
        return 1 << (fitting.bit_length() - 1)
    even = -(-S // -(-S // fitting))
    return min(fitting // 1024, -(-even // 1024)) * 1024
