"""Units: split a call's rows and (batch entry, group) pairs so that the temporaries of each unit fit the workspace.

A unit holds some rows of some pairs, with their lists from `key_to_rows`. It is one launch, whose programs take pieces
of these lists. If the lists of all rows would exceed the workspace, the rows of each pair are first split into slices
(`slices_of`): lists and partial sums belong to one slice, float32 sums to one pair.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.blocks import merges, most_tiles
from nsa_sel.backends._triton.kernel import REMEMBERED
from nsa_sel.backends._triton.key_to_rows import KeyToRows, key_to_rows, list_start, plan_bytes, room
from nsa_sel.backends._triton.rows import row_limit
from nsa_sel.backends._triton.tiles import MIN_TILE, tile_size
from nsa_sel.core.call import Call
from nsa_sel.settings.schema import KernelConfig

PROGRAMS = 512  # pieces that keep any GPU busy: three or four per multiprocessor
SHORTEST = 32  # fewest entries per piece: with fewer, loading the tile and storing partial sums dominates


class UnitLists(NamedTuple):
    """Location of a unit's lists, as kernels take it: fields of its `KeyToRows` and `Unit`."""

    tiles: int  # KV tiles per pair
    pairs_all: int  # B * G
    stretches: int
    first_list: int
    end_list: int
    piece: int
    first_pair: int
    first_row: int
    section: int


class UnitRows(NamedTuple):
    """The rows of a unit, as kernels take them."""

    rows: int
    first_pair: int
    first_row: int
    pairs: int
    section: int


class Unit(NamedTuple):
    """The pairs [first_pair, first_pair + pairs), the rows [first_row, first_row + rows) of each, and their lists."""

    rows: UnitRows
    lists: UnitLists
    piece_list: Tensor | None  # the list in which each piece begins


def units(call: Call, plan: KeyToRows) -> Iterator[Unit]:
    """Yield the units of a plan in the order in which results are summed: all sections of some pairs, then of the next
    pairs."""
    B, S, G = call.q.shape[:3]
    numbered = _numbered_units(S, B * G, plan.tiles, plan.stretches, plan.section, plan.pairs, plan.piece)
    for rows, lists, number in numbered:
        pieces = plan.piece_list
        if pieces is not None and len(numbered) > 1:
            pieces = pieces[number * plan.pieces : (number + 1) * plan.pieces]
        yield Unit(rows, lists, pieces)


@functools.lru_cache(REMEMBERED)
def _numbered_units(
    S: int, pairs_all: int, tiles: int, stretches: int, section: int, pairs: int, piece: int
) -> tuple[tuple[UnitRows, UnitLists, int], ...]:  # fmt: skip
    """Return the rows and lists of every unit, and its number in the plan's `piece_list`."""
    numbered = []
    for pair, row in itertools.product(range(0, pairs_all, pairs), range(0, S, section)):
        some, first = min(pairs, pairs_all - pair), (row // section * pairs_all + pair) * tiles
        rows = UnitRows(min(section, S - row), pair, row, some, section)
        lists = UnitLists(tiles, pairs_all, stretches, first, first + some * tiles, piece, pair, row, section)
        numbered.append((rows, lists, row // section * -(-pairs_all // pairs) + pair // pairs))
    return tuple(numbered)


@triton.jit
def piece_bounds(ends, lists, piece):
    """Return the entries [e, stop) of a piece of the unit's lists; e >= stop if the lists end before it."""
    e = list_start(ends, lists.first_list, lists.stretches) + piece.to(tl.int64) * lists.piece
    return e, tl.minimum(e + lists.piece, list_start(ends, lists.end_list, lists.stretches))


@triton.jit
def list_tile(number, lists, G, BLOCK_L: tl.constexpr):
    """Return pair b*G + g, b, g and the keys [BLOCK_L] of the tile of list `number`."""
    bg = number // lists.tiles % lists.pairs_all
    return bg, bg // G, bg % G, (number % lists.tiles * BLOCK_L).to(tl.int32) + tl.arange(0, BLOCK_L)


@triton.jit
def load_entries(entries, e, pair, pairs, h: tl.constexpr):
    """Load the entries of the (entry, head) pairs `pair` [ROWS] of a list whose entries begin at e."""
    return tl.load(entries + e + pair // h, mask=pair < pairs, other=0)


@triton.jit
def highest_limit(entries, q_pos, stride_pos, e, e1, b, S, S_kv, EACH: tl.constexpr):
    """Return one past the last key that any row of entries [e, e1) may see. With default positions, the last row sees
    the most."""
    s = tl.load(entries + e1 - 1) // EACH
    highest = row_limit(q_pos, stride_pos, b, s, S, S_kv)
    if q_pos is not None:
        for i in range(e, e1, 128):
            rows = tl.load(entries + i + tl.arange(0, 128), mask=i + tl.arange(0, 128) < e1, other=0) // EACH
            limits = row_limit(q_pos, stride_pos, b, rows, S, S_kv)
            highest = tl.maximum(highest, tl.max(tl.where(i + tl.arange(0, 128) < e1, limits, 0), 0))
    return highest


def most_partials(entries: int, pairs: int, tiles: int, piece: int) -> int:
    """Return a bound on the partial sums of a unit of `pairs` pairs with at most `entries` entries each; see
    `dkdv.part_number`."""
    return min(entries * pairs, -(-entries * pairs // piece) + pairs * tiles)


def plan_within(call: Call, width: int, section: int, pairs: int, budget: int, block: int = 1) -> KeyToRows:
    """Return the plan whose float32 partial sums fit `budget` bytes.

    Prefers pieces short enough for PROGRAMS of them and for balance; then fewer pairs per unit; then longer pieces.
    Longer pieces help only while they cause most of the partial sums, because every list has at least one. block: see
    `KeyToRows`; that many programs share a piece.
    """
    S, _, h, Dk = call.q.shape[1:]
    partial_bytes = block * width * (Dk + call.v.shape[3]) * max(4, call.q.element_size())
    longest = max(256, min(1024, 4096 // h))  # longer for fewer heads: each piece stores partial sums
    entries, blocks = min(section, S) * call.selection.n * call.reach(width) // block, -(-call.k.shape[2] // (block * width))
    pairs, piece = _pairs_and_piece(entries, blocks, pairs, partial_bytes, longest, budget, -(-PROGRAMS // block))
    return key_to_rows(call, width, section, pairs, piece, block)


@functools.lru_cache(REMEMBERED)
def _pairs_and_piece(
    entries: int, tiles: int, pairs: int, partial_bytes: int, longest: int, budget: int, pieces: int
) -> tuple[int, int]:  # fmt: skip
    """Return pairs per unit (`entries` entries each) and entries per piece, for at least `pieces` pieces; see
    `plan_within`."""
    piece = min(longest, max(SHORTEST, tile_size(-(-entries * pairs // pieces), 1)))

    def partials_bytes() -> int:
        return most_partials(entries, pairs, tiles, piece) * partial_bytes

    while partials_bytes() > budget and piece < longest:
        piece *= 2
    while partials_bytes() > budget and pairs > 1:
        pairs = -(-pairs // 2)
    while partials_bytes() > budget and entries > piece * tiles:
        piece *= 2
    return pairs, piece


def workspace_beside_plan(call: Call, width: int, block: int = 1) -> int:
    """Return the bytes of runtime.workspace_bytes left after the plan (entries, and a table at most as long) and
    delta."""
    B, S, G, h, _ = call.q.shape
    bound, capacity = call.settings.workspace_bytes, B * S * G * call.selection.n * call.reach(width) // block
    return max(bound - 8 * capacity - 4 * B * S * G * h, bound // 8)


def tile_width(call: Call, config: KernelConfig) -> int:
    """Return the keys per KV tile: the config's block_l, cut to a power of two that divides the block size if there are
    blocks."""
    block = call.selection.block_size
    return config.block_l if block is None or block % MIN_TILE else min(config.block_l, block & -block)


LEAST_ROWS = 1024  # slices have multiples of this many rows; calls that need smaller slices are refused
_MERGED_BYTES = 12  # bytes per range of `merged`, with its bits


class Slices(NamedTuple):
    """Describe how the rows of one batch entry and group are split."""

    rows: int  # rows per slice
    partial_bytes: int  # bytes left for partial sums of dk and dv


def slices_of(call: Call, width: int) -> Slices | None:
    """Return slices whose plan, float32 sums and partial sums fit the workspace together.

    None if the plan of the whole call fits, or if slices would have fewer than LEAST_ROWS rows.
    """
    (B, S, G, h, Dk), (_, _, S_kv, Dv) = call.q.shape, call.v.shape
    entries, tiles, allowed = call.selection.n * call.reach(width) // call.tiles_of_block(width), -(-S_kv // width), room(call)
    if B * G * ((16 + _MERGED_BYTES) * S * entries + 8 * tiles) <= allowed:  # fits even with the largest possible table
        return None
    small = merges(call, width)
    entries, merged = (most_tiles(call, width), _MERGED_BYTES) if small else (entries, 0)
    if plan_bytes(S, B * G, entries, tiles) + B * G * S * entries * merged <= allowed:
        return None
    accumulator = max(4, call.q.element_size())
    sums = S_kv * (Dk + Dv) * accumulator
    # Per row: the plan's lists and its table (at most as long), and copies of the ranges, lse and delta.
    row_bytes = (16 + merged) * entries + 2 * call.selection.ranges.element_size() * call.selection.n + 2 * accumulator * h
    most = max(allowed - 3 * sums, allowed // 4) // row_bytes // LEAST_ROWS
    if most < 1:
        return None
    multiples = -(-S // LEAST_ROWS)
    rows = -(-multiples // -(-multiples // most)) * LEAST_ROWS  # about equal slices
    return Slices(rows, max(allowed - sums - rows * row_bytes, allowed // 8))
