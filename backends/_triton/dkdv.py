"""dK and dV without atomics: a program takes a piece of the lists of rows that chose each KV tile, in ascending order of rows.

dv = sum p^T do, dk = scale * sum ds^T q over the rows and all h heads of the group (steps.py). A piece writes what it found about a
tile as a float32 part, which a second kernel adds in the order of the pieces: the sum's order is fixed, whatever ran first.
For triton-block the same pass also writes each (row, range)'s share of dq = scale * ds k, to be added by rows (triton_block.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._buffers import temporary, unwritten
from nsa_sel.backends._triton import launch
from nsa_sel.backends._triton.inverse import Inverse, inverse, list_start
from nsa_sel.backends._triton.start import REMEMBERED, Launch
from nsa_sel.backends._triton.steps import (
    LOG2_E,
    add_product,
    clamp_range,
    load_columns,
    products,
    row_limit,
    split_products,
    store_columns,
)
from nsa_sel.core.call import Call
from nsa_sel.settings.schema import KernelConfig

PROGRAMS = 512  # pieces that keep any GPU busy: three or four a multiprocessor
SHORTEST = 32  # entries a piece: a few steps, else reading the tile and writing its parts is most of the work


@triton.jit
def partial_dkdv_kernel(
    q, k, v, ranges, q_pos, lse, do, delta, part_dk, part_dv, part_dq, entries, ends, piece_list,
    stride_qb, stride_qs, stride_qg, stride_qh, stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_pb, stride_ps,
    stride_dob, stride_dos, stride_dog, stride_doh, S, S_kv, G, tiles, pairs_all, stretches, first_list, end_list, piece,
    first_pair, first_row, section, scale, scale_log2,
    N: tl.constexpr, REACH: tl.constexpr, h: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, HAS_POS: tl.constexpr,
    ACC: tl.constexpr, WHOLE: tl.constexpr,
    WITH_DQ: tl.constexpr, BY_ENTRY: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Piece number program_id of the unit's lists first_list .. end_list: its parts of dk [BLOCK_L, Dk] and dv [BLOCK_L, Dv].

    A matrix-unit step takes ROWS pairs of (entry, head), so that any number of heads fills it. WHOLE: every entry's range
    covers its tile up to the causal clamp, so that only the first BLOCK_L rows of a list, in their order, need a mask.
    """
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
                reachable = S_kv
                if WITH_DQ:  # ds k must not meet keys that no row may see: they may hold NaN
                    reachable = highest_limit(entries, q_pos, e, e1, b, S, S_kv, stride_pb, stride_ps, N * REACH, HAS_POS)
                k_rows = k + b * stride_kb + g * stride_kg + column.to(tl.int64) * stride_kn
                v_rows = v + b * stride_vb + g * stride_vg + column.to(tl.int64) * stride_vn
                k_tile = load_columns(k_rows, column < reachable, 0, Dk, BLOCK_D)
                k_rest = load_columns(k_rows, column < reachable, BLOCK_D, Dk, BLOCK_REST) if BLOCK_REST > 0 else k_tile
                v_tile = load_columns(v_rows, column < reachable, 0, Dv, BLOCK_DV)
                dk_acc = tl.zeros([BLOCK_L, BLOCK_D], ACC)
                dk_rest = tl.zeros([BLOCK_L, BLOCK_REST], ACC) if BLOCK_REST > 0 else dk_acc
                dv_acc = tl.zeros([BLOCK_L, BLOCK_DV], ACC)
                pairs = ((e1 - e) * h).to(tl.int32)
                masked = (tl.maximum(list_begin + BLOCK_L - e, 0) * h).to(tl.int32)
                first_out = (b * S * G + g) * h
                first_slot = ((bg - first_pair) * section - first_row) * (N * REACH) * h
                # The next step's entries are fetched early: the rows' addresses wait for them.
                coming = tl.load(entries + e + r // h, mask=r < pairs, other=0)
                for p0 in range(0, pairs, ROWS):
                    pair = p0 + r
                    listed = pair < pairs
                    entry = coming
                    coming = tl.load(entries + e + (pair + ROWS) // h, mask=pair + ROWS < pairs, other=0)
                    head = pair % h
                    s = (entry // (N * REACH)).to(tl.int64)
                    q_rows = q + b * stride_qb + g * stride_qg + (s * stride_qs + head * stride_qh)
                    do_rows = do + b * stride_dob + g * stride_dog + (s * stride_dos + head * stride_doh)
                    q_tile = load_columns(q_rows, listed, 0, Dk, BLOCK_D)
                    q_rest = load_columns(q_rows, listed, BLOCK_D, Dk, BLOCK_REST) if BLOCK_REST > 0 else q_tile
                    do_tile = load_columns(do_rows, listed, 0, Dv, BLOCK_DV)
                    # A row that is not listed gets p = 0 from an infinite log-sum-exp.
                    out = first_out + s * G * h + head
                    lse2 = tl.load(lse + out, mask=listed, other=float("inf")) * LOG2_E
                    delta_rows = tl.load(delta + out, mask=listed, other=0.0)

                    s2 = split_products(q_tile, q_rest, k_tile, k_rest, BLOCK_REST, ACC) * scale_log2
                    p = tl.exp2(s2 - lse2[:, None])
                    dp = products(do_tile, v_tile, ACC)
                    ds = p * (dp - delta_rows[:, None])
                    if (not WHOLE) or HAS_POS or p0 < masked:
                        limit = row_limit(q_pos, b, s, S, S_kv, stride_pb, stride_ps, HAS_POS)
                        if WHOLE:
                            seen = listed[:, None] & (column[None, :] < limit[:, None])
                        else:
                            at = ranges + (((b * S + s) * G + g) * N + entry // REACH % N) * 2
                            start, end = clamp_range(tl.load(at, mask=listed, other=0), tl.load(at + 1, mask=listed, other=0), limit)
                            seen = (column[None, :] >= start[:, None]) & (column[None, :] < end[:, None])
                        # Where nothing is seen, k and v may be NaN, and p and ds with them: the mask decides, not the product.
                        p = tl.where(seen, p, 0.0)
                        ds = tl.where(seen, ds, 0.0)
                    p, ds = p.to(do_tile.dtype), ds.to(q_tile.dtype)
                    dv_acc = add_product(dv_acc, p.T, do_tile, ACC)
                    dk_acc = add_product(dk_acc, ds.T, q_tile, ACC)
                    if BLOCK_REST > 0:
                        dk_rest = add_product(dk_rest, ds.T, q_rest, ACC)
                    if WITH_DQ:
                        slot = first_slot + entry.to(tl.int64) * h + head
                        share = tl.dot(ds, k_tile, input_precision="ieee", out_dtype=ACC) * scale
                        store_columns(part_dq + slot * Dk, share, listed, 0, Dk)
                        if BLOCK_REST > 0:
                            share = tl.dot(ds, k_rest, input_precision="ieee", out_dtype=ACC) * scale
                            store_columns(part_dq + slot * Dk, share, listed, BLOCK_D, Dk)

                unit_begin = list_start(ends, first_list, stretches)
                part = part_number(number - first_list, tl.program_id(0), e - unit_begin, BY_ENTRY) * BLOCK_L + tl.arange(0, BLOCK_L)
                store_columns(part_dk + part * Dk, dk_acc * scale, part >= 0, 0, Dk)
                if BLOCK_REST > 0:
                    store_columns(part_dk + part * Dk, dk_rest * scale, part >= 0, BLOCK_D, Dk)
                store_columns(part_dv + part * Dv, dv_acc, part >= 0, 0, Dv)
            e = e1
            number += 1


@triton.jit
def piece_bounds(ends, first_list, end_list, stretches, piece):
    """The entries [e, stop) of this program's piece of the lists first_list .. end_list; e >= stop where the lists are shorter."""
    e = list_start(ends, first_list, stretches) + tl.program_id(0).to(tl.int64) * piece
    return e, tl.minimum(e + piece, list_start(ends, end_list, stretches))


@triton.jit
def part_number(list_in_unit, piece_in_unit, first_entry, BY_ENTRY: tl.constexpr):
    """Where a piece's part of a list is kept: at list + piece, which the next list or the next piece raises; where a unit has fewer
    entries than that would take places, at the part's first entry."""
    if BY_ENTRY:
        return first_entry
    else:
        return list_in_unit + piece_in_unit


@triton.jit
def highest_limit(entries, q_pos, e, e1, b, S, S_kv, stride_pb, stride_ps, EACH: tl.constexpr, HAS_POS: tl.constexpr):
    """One past the last key that any row of the entries [e, e1) may see; in the default positions the last row sees most."""
    s = tl.load(entries + e1 - 1) // EACH
    highest = row_limit(q_pos, b, s, S, S_kv, stride_pb, stride_ps, HAS_POS)
    if HAS_POS:
        for i in range(e, e1, 128):
            rows = tl.load(entries + i + tl.arange(0, 128), mask=i + tl.arange(0, 128) < e1, other=0) // EACH
            limits = row_limit(q_pos, b, rows, S, S_kv, stride_pb, stride_ps, HAS_POS)
            highest = tl.maximum(highest, tl.max(tl.where(i + tl.arange(0, 128) < e1, limits, 0), 0))
    return highest


@triton.jit
def sum_parts_kernel(
    part_dk, part_dv, sum_dk, sum_dv, dk, dv, ends, S_kv, tiles, pairs_all, stretches, first_list, first_pair, piece,
    Dk: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr, ROWS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, BY_ENTRY: tl.constexpr,
):  # fmt: skip
    """dk [B*G, S_kv, Dk] and dv [B*G, S_kv, Dv]: the parts of each list added in the order of the pieces; tiles that nobody chose
    get zeros. Sections of rows but the LAST add to sum_dk and sum_dv [pairs, S_kv, D] instead, of which the FIRST reads nothing."""
    PIECES: tl.constexpr = BLOCK_L // ROWS
    number = first_list + tl.program_id(0).to(tl.int64) // PIECES
    within = tl.program_id(0) % PIECES * ROWS + tl.arange(0, ROWS)
    unit_begin = list_start(ends, first_list, stretches)
    begin = list_start(ends, number, stretches) - unit_begin
    end = list_start(ends, number + 1, stretches) - unit_begin
    column = number % tiles * BLOCK_L + within
    pair = number // tiles % pairs_all
    sums_row, row = (pair - first_pair) * S_kv + column, pair * S_kv + column
    if FIRST:
        dk_acc = tl.zeros([ROWS, BLOCK_D], part_dk.dtype.element_ty)
        dv_acc = tl.zeros([ROWS, BLOCK_DV], part_dv.dtype.element_ty)
    else:
        dk_acc = load_columns(sum_dk + sums_row * Dk, column < S_kv, 0, Dk, BLOCK_D)
        dv_acc = load_columns(sum_dv + sums_row * Dv, column < S_kv, 0, Dv, BLOCK_DV)
    if begin < end:
        for i in range(begin // piece, (end - 1) // piece + 1):
            part = part_number(number - first_list, i, tl.maximum(begin, i * piece), BY_ENTRY) * BLOCK_L + within
            dk_acc += load_columns(part_dk + part * Dk, column < S_kv, 0, Dk, BLOCK_D)
            dv_acc += load_columns(part_dv + part * Dv, column < S_kv, 0, Dv, BLOCK_DV)
    if LAST:
        store_columns(dk + row * Dk, dk_acc, column < S_kv, 0, Dk)
        store_columns(dv + row * Dv, dv_acc, column < S_kv, 0, Dv)
    else:
        store_columns(sum_dk + sums_row * Dk, dk_acc, column < S_kv, 0, Dk)
        store_columns(sum_dv + sums_row * Dv, dv_acc, column < S_kv, 0, Dv)


class Unit(NamedTuple):
    """What one launch works on: `pairs` (batch entry, group) pairs from `first_pair`, the rows [first_row, first_row + rows) of each,
    and their lists."""

    first_pair: int
    pairs: int
    first_row: int
    rows: int
    first_list: int
    end_list: int
    piece_list: Tensor


def units(call: Call, plan: Inverse) -> Iterator[Unit]:
    """The units of a plan, in the order in which results are added: all sections of some pairs, then of the next."""
    B, S, G = call.q.shape[:3]
    for pair in range(0, B * G, plan.pairs):
        pairs = min(plan.pairs, B * G - pair)
        for row in range(0, S, plan.section):
            section = row // plan.section
            first = (section * B * G + pair) * plan.tiles
            number = section * -(-B * G // plan.pairs) + pair // plan.pairs
            piece_list = plan.piece_list[number * plan.pieces : (number + 1) * plan.pieces]
            yield Unit(pair, pairs, row, min(plan.section, S - row), first, first + pairs * plan.tiles, piece_list)


class Gradients:
    """dk and dv, the parts of one unit, and its pairs' float32 sums where several sections of rows add to them."""

    def __init__(self, call: Call, plan: Inverse, lse: Tensor) -> None:
        B, S, G = call.q.shape[:3]
        _, _, S_kv, Dv = call.v.shape
        Dk = call.k.shape[3]
        parts = most_parts(plan.section * call.selection.n * plan.reach, plan.pairs, plan.tiles, plan.piece)
        self.by_entry = parts < plan.pieces + plan.pairs * plan.tiles
        self.part_dk = temporary(call, lse, parts, plan.width, Dk)
        self.part_dv = temporary(call, lse, parts, plan.width, Dv)
        several = plan.section < S
        self.sum_dk = temporary(call, lse, plan.pairs, S_kv, Dk) if several else None
        self.sum_dv = temporary(call, lse, plan.pairs, S_kv, Dv) if several else None
        self.dk = unwritten(call.k, B, G, S_kv, Dk)
        self.dv = unwritten(call.v, B, G, S_kv, Dv)


def add_unit(
    call: Call, heads: launch.Heads, plan: Inverse, unit: Unit, lse: Tensor, do: Tensor, delta: Tensor, sums: Gradients,
    config: KernelConfig, part_dq: Tensor | None = None,
) -> None:  # fmt: skip
    """Add one unit's share to dk and dv; with part_dq [pairs, section, n*reach, h, Dk], write its shares of dq too."""
    B, S, G, _, _ = call.q.shape
    S_kv, block = call.k.shape[2], call.selection.block_size
    whole = block is not None and block % plan.width == 0
    partial = _partial_launch(heads, config, call.selection.n, plan.reach, plan.width, whole, part_dq is not None, sums.by_entry)
    partial.start(
        plan.pieces,
        (call.q, call.k, call.v, call.selection.disjoint_ranges(), call.q_pos, lse, do, delta, sums.part_dk, sums.part_dv, part_dq,
         plan.entries, plan.ends, unit.piece_list),
        (*launch.strides(call), *do.stride()[:4], S, S_kv, G, plan.tiles, B * G, plan.stretches, unit.first_list, unit.end_list,
         plan.piece, unit.first_pair, unit.first_row, plan.section, call.scale, call.scale_log2()),
    )  # fmt: skip
    total = _sum_launch(heads, plan.width, unit.first_row == 0, unit.first_row + unit.rows == S, sums.by_entry)
    total.start(
        (unit.end_list - unit.first_list) * (plan.width // total.constants["ROWS"]),
        (sums.part_dk, sums.part_dv, sums.sum_dk, sums.sum_dv, sums.dk, sums.dv, plan.ends),
        (S_kv, plan.tiles, B * G, plan.stretches, unit.first_list, unit.first_pair, plan.piece),
    )


@functools.lru_cache(REMEMBERED)
def _partial_launch(
    heads: launch.Heads, config: KernelConfig, n: int, reach: int, width: int, whole: bool, with_dq: bool, by_entry: bool
) -> Launch:
    return Launch(
        partial_dkdv_kernel, N=n, REACH=reach, **launch.split_facts(heads), WHOLE=whole, WITH_DQ=with_dq, BY_ENTRY=by_entry,
        ROWS=config.rows, BLOCK_L=width, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _sum_launch(heads: launch.Heads, width: int, first: bool, last: bool, by_entry: bool) -> Launch:
    block_d, block_dv = launch.tile_widths(heads)
    return Launch(
        sum_parts_kernel, Dk=heads.Dk, Dv=heads.Dv, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_L=width, ROWS=min(16, width),
        FIRST=first, LAST=last, BY_ENTRY=by_entry, num_warps=4,
    )  # fmt: skip


def most_parts(entries: int, pairs: int, tiles: int, piece: int) -> int:
    """A bound on the parts of a unit of `pairs` pairs with at most `entries` entries each; see `part_number`."""
    return min(entries * pairs, -(-entries * pairs // piece) + pairs * tiles)


def plan_within(call: Call, width: int, section: int, pairs: int, budget: int) -> Inverse:
    """The plan whose float32 parts fit `budget` bytes: pieces short enough to give PROGRAMS of them and then for balance, fewer pairs
    a unit, at last longer pieces.

    Pieces grow only while they make most of the parts: every list has one part at least, however long pieces are.
    """
    S, _, h, Dk = call.q.shape[1:]
    entries = min(section, S) * call.selection.n * call.reach(width)
    tiles = -(-call.k.shape[2] // width)
    part_bytes = width * (Dk + call.v.shape[3]) * max(4, call.q.element_size())
    longest = max(256, min(1024, 4096 // h))  # longer where a row brings fewer heads: each piece writes its parts
    piece = min(longest, max(SHORTEST, launch.tile(-(-entries * pairs // PROGRAMS), 1)))

    def parts_bytes() -> int:
        return most_parts(entries, pairs, tiles, piece) * part_bytes

    while parts_bytes() > budget and piece < longest:
        piece *= 2
    while parts_bytes() > budget and pairs > 1:
        pairs = -(-pairs // 2)
    while parts_bytes() > budget and entries > piece * tiles:
        piece *= 2
    return inverse(call, width, section, pairs, piece)


def workspace_beside_plan(call: Call, width: int) -> int:
    """Bytes that runtime.workspace_bytes leaves beside the plan (entries, and a table of at most as many numbers) and delta."""
    bound, capacity = call.settings.workspace_bytes, call.selection.ranges[..., 0].numel() * call.reach(width)
    return max(bound - 8 * capacity - 4 * call.q[..., 0].numel(), bound // 8)


def tile_width(call: Call, config: KernelConfig) -> int:
    """Keys a KV tile: what the kernel takes at once; a power of two that divides the blocks, where there are blocks."""
    block = call.selection.block_size
    return config.block_l if block is None or block % launch.MIN_TILE else min(config.block_l, block & -block)


def key_value_gradients(
    call: Call, heads: launch.Heads, lse: Tensor, do: Tensor, delta: Tensor, config: KernelConfig
) -> tuple[Tensor, Tensor]:
    """dk [B,G,S_kv,Dk] and dv [B,G,S_kv,Dv] from lse and delta [B,S,G,h]; parts stay within the workspace bound where those of one
    (batch entry, group) pair do."""
    B, S, G = call.q.shape[:3]
    width = tile_width(call, config)
    plan = plan_within(call, width, S, B * G, workspace_beside_plan(call, width))
    sums = Gradients(call, plan, lse)
    for unit in units(call, plan):
        add_unit(call, heads, plan, unit, lse, do, delta, sums, config)
    return sums.dk, sums.dv
