"""Invert the selection: list for every KV tile the (row, range) pairs that reach into it, in ascending row order.

A counting sort gives each tile's list a fixed order, so that sums over it are bit-equal from run to run:
    rank        a program sorts a stretch of one group's entries by tile, 256 at a time, and numbers the entries of each
                tile
    prefix sum  over (tile, stretch), by one program or by torch.cumsum: the first index of each stretch's entries of a
                tile
    scatter     store every entry at its tile's start plus its rank; if counts are few, each program computes the prefix
                sum itself
All sizes are static bounds, so building and using the plan never synchronizes.

Consumers take the lists in pieces: one launch takes one unit (some rows of some groups), one program takes one piece of
it: `piece` consecutive entries, which may span many tiles. So the load balance does not depend on list lengths, and the
long list of block 0, which every row selects, is spread over many programs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.arguments import position_strides, sizes
from nsa_sel.backends._triton.kernel import cached_kernel
from nsa_sel.backends._triton.rows import load_range, row_limit
from nsa_sel.backends._triton.softmax import larger
from nsa_sel.backends._triton.tiles import tile_size
from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.backends.launcher.replay import kept_plan
from nsa_sel.core.call import Call
from nsa_sel.errors import BackendError

SORTED = 256  # entries that a program sorts at once; they take eight bits of the sort key
MOST_TILES = 2**31 // SORTED - 1  # the other bits hold the tile
MOST_SUMMED = 16384  # counts that one program of `ends_kernel` sums; longer tables use torch.cumsum
FEW_COUNTS = (256, 4096)  # up to so many counts, every program of `scatter_kernel` sums them all, which saves a launch
STRETCHES = 4096  # programs of `rank_kernel`: enough for any GPU, few enough for a small table
LEAST_ROOM = 1 << 20  # bytes that a plan may take even if the workspace is smaller


class KeyToRows(NamedTuple):
    """Row lists of all KV tiles. List (section, b*G + g, j) holds the rows of that section that select keys [j*width,
    (j+1)*width).

    An entry is (s * n + range) * reach + step: row s, and the step-th tile of that range.
    """

    entries: Tensor  # [capacity] int32, list after list
    ends: Tensor  # [lists * stretches]: number of entries up to the end of each list's share of a stretch
    piece_list: Tensor | None  # [units * pieces]: the list in which each piece begins; None for cuda-block
    width: int  # keys per tile
    tiles: int  # KV tiles per batch entry and group
    reach: int  # most tiles that one range may touch
    stretches: int  # stretches per list
    section: int  # rows per batch entry and group in a unit
    pairs: int  # (batch entry, group) pairs per unit
    piece: int  # entries per piece
    pieces: int  # most pieces per unit
    block: int = 1
    # block > 1: the `block` tiles of a block share row lists. A row is filed once, under the last tile that it sees; a
    # tile's rows are those from its own list to the list of the block's last tile.


class SortSizes(NamedTuple):
    """Numbers that both sort kernels take: B*G pairs of `tiles` tiles, sections of rows, stretches of `stretch`
    rows."""

    tiles: int
    pairs_all: int
    section: int
    stretch: int
    stretches: int


@triton.jit
def list_start(ends, number, stretches):
    """Return where list `number` begins in `entries`; it ends where the next list begins."""
    return tl.load(ends + tl.cast(number, tl.int64) * stretches - 1, mask=number > 0, other=0)


@triton.jit
def run_ends(value, real, i, N: tl.constexpr):
    """Return which of the sorted `value` [N] are the first and the last of a run of equal ones.

    i: 0 to N - 1; real: [N], False for padding at the end.
    """
    first = real & ((i == 0) | (tl.gather(value, tl.maximum(i - 1, 0), 0) != value))
    last = real & ((i == N - 1) | (tl.gather(value, tl.minimum(i + 1, N - 1), 0) != value))
    return first, last


@triton.jit
def _tile_of(
    ranges, q_pos, stride_pos, sizes, e, bg, N: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr
):  # fmt: skip
    """Return the KV tile of entry e of pair bg, or -1 if the range does not reach that far or the row must not see
    it."""
    S, S_kv, G = sizes
    b = (bg // G).to(tl.int64)
    s = e // (N * REACH)
    inside = s < S
    limit = row_limit(q_pos, stride_pos, b, tl.minimum(s, S - 1), S, S_kv)
    row = ((b * S + s) * G + bg % G) // SHARE
    start, end = load_range(ranges + (row * N + e // REACH % N) * 2, limit, inside)
    last = ((end - 1) // WIDTH).to(tl.int32)
    tile = last if REACH == 1 else (start // WIDTH + e % REACH).to(tl.int32)
    return tl.where((end > start) & (tile <= last), tile, -1)


@triton.jit
def _list_of(tile, bg, s, sort):
    """Return the number of the list of (tile, bg) for row s; lists are ordered by section, then pair, then tile."""
    return (s // sort.section * sort.pairs_all + bg).to(tl.int64) * sort.tiles + tile


@triton.jit
def rank_kernel(
    ranges, q_pos, ranks, counts, stride_pos, sizes, sort,
    N: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Number the entries of one stretch of pair bg within each tile, and count them. Grid: one program per (stretch,
    bg).

    Sort key: tile * SORTED + index, or NOWHERE for entries without a tile. Locals are [SORTED].
    """
    NOWHERE: tl.constexpr = 2147483647
    S, _, _ = sizes
    bg = tl.program_id(0) % sort.pairs_all
    s0 = tl.program_id(0) // sort.pairs_all * sort.stretch
    counts += _list_of(0, bg, s0, sort) * sort.stretches + s0 % sort.section // sort.stretch
    i = tl.arange(0, SORTED)
    for cleared in range(0, sort.tiles, SORTED):
        tl.store(counts + (cleared + i).to(tl.int64) * sort.stretches, 0, mask=cleared + i < sort.tiles)
    tl.debug_barrier()
    e1 = tl.minimum(s0 + sort.stretch, S) * (N * REACH)
    for e0 in range(s0 * (N * REACH), e1, SORTED):
        tile = _tile_of(ranges, q_pos, stride_pos, sizes, e0 + i, bg, N, REACH, WIDTH, SHARE)
        key = tl.sort(tl.where((tile >= 0) & (e0 + i < e1), tile * SORTED + i, NOWHERE))
        tile = key // SORTED
        real = key != NOWHERE
        first, last = run_ends(tile, real, i, SORTED)
        rank = i - tl.associative_scan(tl.where(first, i, 0), 0, larger)
        rank += tl.load(counts + tile.to(tl.int64) * sort.stretches, mask=real, other=0)
        tl.debug_barrier()  # all threads have read their tile's count before its last entry updates it
        tl.store(counts + tile.to(tl.int64) * sort.stretches, rank + 1, mask=last)
        tl.store(ranks + bg.to(tl.int64) * S * (N * REACH) + e0 + key % SORTED, rank, mask=real)
        tl.debug_barrier()


@triton.jit
def ends_kernel(counts, ends, total, CHUNK: tl.constexpr):
    """Compute ends = cumsum(counts) in one program, which takes less host time than torch.cumsum."""
    i = tl.arange(0, CHUNK)
    before = 0
    for at in range(0, total, CHUNK):
        count = tl.load(counts + at + i, mask=at + i < total, other=0)
        tl.store(ends + at + i, before + tl.cumsum(count, 0), mask=at + i < total)
        before += tl.sum(count, 0)


@triton.jit
def _upto(ends, sums, i, exists, FEW: tl.constexpr):
    """Return the number of entries up to the end of share i, from `sums` if FEW > 0, else from `ends`; 0 if i does not
    exist."""
    if FEW > 0:
        return tl.where(exists, tl.gather(sums, tl.minimum(tl.maximum(i, 0), FEW - 1).to(tl.int32), 0), 0)
    return tl.load(ends + i, mask=exists, other=0)


@triton.jit
def scatter_kernel(
    ranges, q_pos, ranks, counts, ends, entries, piece_list, stride_pos, sizes, sort, total, pairs, piece, pieces,
    N: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, SORTED: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Store every entry in its list, and for each piece the list in which it begins.

    Grid: one program per SORTED entries of a pair bg.
    FEW: if > 0, at least the `total` number of counts: each program sums them and the first one stores `ends`. 0:
    `ends` is ready.
    """
    S, _, _ = sizes
    sums = 0
    if FEW > 0:
        share = tl.arange(0, FEW)
        sums = tl.cumsum(tl.load(counts + share, mask=share < total, other=0), 0)
        tl.store(ends + share, sums, mask=share < tl.where(tl.program_id(0) == 0, total, 0))
    bg = tl.program_id(0) % sort.pairs_all
    e = tl.program_id(0) // sort.pairs_all * SORTED + tl.arange(0, SORTED)
    tile = _tile_of(ranges, q_pos, stride_pos, sizes, e, bg, N, REACH, WIDTH, SHARE)
    real = tile >= 0
    s = tl.minimum(e // (N * REACH), S - 1)
    number = _list_of(tile, bg, s, sort)
    share = number * sort.stretches + s % sort.section // sort.stretch
    at = _upto(ends, sums, share - 1, real & (share > 0), FEW)
    at += tl.load(ranks + bg.to(tl.int64) * S * (N * REACH) + e, mask=real, other=0)
    tl.store(entries + at, e, mask=real)
    unit_pair = bg // pairs * pairs
    first = _list_of(0, unit_pair, s, sort) * sort.stretches
    within = at - _upto(ends, sums, first - 1, first > 0, FEW)
    unit = s // sort.section * tl.cdiv(sort.pairs_all, pairs) + bg // pairs
    tl.store(piece_list + unit.to(tl.int64) * pieces + within // piece, number, mask=real & (within % piece == 0))


def key_to_rows(call: Call, width: int, section: int, pairs: int, piece: int, block: int = 1) -> KeyToRows:
    """Return the plan for tiles of `width` keys, units of `section` rows of `pairs` pairs, and pieces; cached in the
    selection.

    block: see `KeyToRows`; 1 or `Call.tiles_of_block`.
    """
    numbers = (width, section, pairs, piece, call.reach(width) // block, block)
    plan: KeyToRows = kept_plan(call, ("key_to_rows",), _build, *numbers).value
    return plan


def _build(call: Call, width: int, section: int, pairs: int, piece: int, reach: int, block: int) -> KeyToRows:
    (B, S, G), n = call.q.shape[:3], call.selection.n
    tiles = -(-call.k.shape[2] // width)
    each = S * n * reach
    capacity = B * G * each
    section, pairs = min(section, S), min(pairs, B * G)
    sections = -(-S // section)
    stretch = _stretch(S * B * G, n * reach, tiles, section)
    if sections > 1:  # a stretch lies within one section
        stretch = min(stretch, section & -section)
    stretches = -(-section // stretch)
    lists = sections * B * G * tiles
    _check_size(call, 8 * (capacity + lists * stretches), each, reach, tiles, width)
    q, index = call.q, torch.int32 if capacity < 2**31 else torch.int64
    pieces = -(-section * pairs * n * reach // piece)
    # Each program of `rank_kernel` clears its own counts. A last section with fewer stretches has counts that no
    # program clears.
    counts = unwritten(q, lists * stretches, dtype=torch.int32)
    if sections > 1:
        counts.zero_()
    ranks = unwritten(q, capacity, dtype=torch.int32)
    entries = unwritten(q, capacity, dtype=torch.int32)
    piece_list = unwritten(q, sections * -(-B * G // pairs) * pieces, dtype=torch.int64)
    ranges, q_pos = call.disjoint_ranges(), call.q_pos
    numbers = (position_strides(call), sizes(call), SortSizes(tiles, B * G, section, stretch, stretches))
    total = lists * stretches
    few = next((few for few in FEW_COUNTS if total <= few), 0) if capacity < 2**31 else 0
    constants = {"N": n, "REACH": reach, "WIDTH": width, "SHARE": call.groups_per_selection, "SORTED": SORTED, "num_warps": 2}
    cached_kernel(rank_kernel, **constants).launch(-(-S // stretch) * B * G, (ranges, q_pos, ranks, counts), numbers)
    if capacity < 2**31 and total <= MOST_SUMMED:
        ends = unwritten(q, total, dtype=torch.int32)
        if not few:
            cached_kernel(ends_kernel, CHUNK=4096, num_warps=8).launch(1, (counts, ends), (total,))
    else:
        ends = torch.cumsum(counts, 0, dtype=index)
    tensors = (ranges, q_pos, ranks, counts if few else None, ends, entries, piece_list)
    scatter = cached_kernel(scatter_kernel, **constants, FEW=few)
    scatter.launch(-(-each // SORTED) * B * G, tensors, (*numbers, total, pairs, piece, pieces))
    return KeyToRows(entries, ends, piece_list, width, tiles, reach, stretches, section, pairs, piece, pieces, block)


def _stretch(rows: int, entries: int, tiles: int, section: int) -> int:
    """Return how many rows, of `entries` entries each, share one count. Counts then take no more memory than lists."""
    return min(section, tile_size(max(SORTED // entries, -(-rows // STRETCHES), tiles // entries), 1))


def plan_bytes(S: int, pairs_all: int, entries: int, tiles: int) -> int:
    """Return the bytes of the plan of S rows of `entries` entries each, in one section."""
    return 8 * pairs_all * (S * entries + tiles * -(-S // _stretch(S * pairs_all, entries, tiles, S)))


def room(call: Call) -> int:
    """Return how many bytes a plan may take."""
    return max(call.settings.workspace_bytes, LEAST_ROOM)


def _check_size(call: Call, needed: int, each: int, reach: int, tiles: int, width: int) -> None:
    """Raise BackendError if the plan exceeds the workspace or its 32-bit indices."""
    if each > 2**31 - SORTED or needed > room(call):
        raise BackendError(
            f"the list of rows of every KV tile needs {needed} bytes, because any of the {call.selection.n} ranges of a row may span"
            f" {reach} tiles; allowed: {call.settings.workspace_bytes} (runtime.workspace_bytes). Remedy: build the Selection from"
            " blocks, pass max_length=, call selection.measure(), or raise runtime.workspace_bytes."
        )
    if tiles >= MOST_TILES:
        raise BackendError(
            f"k has {tiles} tiles of {width} keys; allowed: fewer than {MOST_TILES}. Remedy: use a larger block, or sdpa-packed."
        )
