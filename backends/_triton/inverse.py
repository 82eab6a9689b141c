"""The selection turned round: for every KV tile, the (row, range) pairs that reach into it, in ascending order of rows.

A counting sort, so that each tile's list has a fixed order and sums over it are bit-equal from run to run:
    rank    a program takes a stretch of one group's entries, sorts 256 at a time by tile, and numbers those of each tile
    count   a running sum over (tile, stretch) tells where each stretch's entries of a tile begin
    place   every entry goes to its tile's beginning plus its rank
All sizes are static bounds: building and using the plan never reads the device.

Kernels share the lists by pieces: a launch takes one unit (some rows of some groups), a program one piece of it, `piece`
consecutive entries of however many tiles. Balance needs no knowledge of the lists, and block 0, which every row chose, is many
programs' work.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton import launch
from nsa_sel.backends._triton.start import REMEMBERED, Launch
from nsa_sel.backends._triton.steps import clamp_range, larger, row_limit
from nsa_sel.core.call import Call
from nsa_sel.errors import BackendError

SORTED = 256  # entries that a program sorts at once; eight bits of its keys
MOST_TILES = 2**31 // SORTED - 1  # the other bits
STRETCHES = 4096  # programs that rank: enough for any GPU, few enough for a small table


class Inverse(NamedTuple):
    """List number (section, b*G + g, j) belongs to the keys [j*width, (j+1)*width) of that batch entry and group and to the rows s
    of that section. An entry is (s * n + range) * reach + step: row s, and the step-th tile of that range."""

    entries: Tensor  # [capacity] int32, list after list
    ends: Tensor  # [lists * stretches]: entries up to the end of each list's share of a stretch
    piece_list: Tensor  # [units * pieces]: the list in which a unit's piece begins
    width: int  # keys a tile
    tiles: int  # KV tiles of one batch entry and group
    reach: int  # the most tiles that one range may meet
    stretches: int  # of a list
    section: int  # rows of one batch entry and group in a unit
    pairs: int  # (batch entry, group) pairs in a unit
    piece: int  # entries a piece
    pieces: int  # of a unit, at most


@triton.jit
def list_start(ends, number, stretches):
    """Where list `number` begins among the entries; the next one's beginning is its end."""
    return tl.load(ends + tl.cast(number, tl.int64) * stretches - 1, mask=number > 0, other=0)


@triton.jit
def _tile_of(
    ranges, q_pos, e, bg, stride_pb, stride_ps, S, S_kv, G, N: tl.constexpr, REACH: tl.constexpr, HAS_POS: tl.constexpr, WIDTH: tl.constexpr
):
    """The KV tile of entry e of the pair bg; -1 where the range does not reach that far, or the row must not see it."""
    b = (bg // G).to(tl.int64)
    s = e // (N * REACH)
    inside = s < S
    limit = row_limit(q_pos, b, tl.minimum(s, S - 1), S, S_kv, stride_pb, stride_ps, HAS_POS)
    at = ranges + (((b * S + s) * G + bg % G) * N + e // REACH % N) * 2
    start, end = clamp_range(tl.load(at, mask=inside, other=0), tl.load(at + 1, mask=inside, other=0), limit)
    tile = (start // WIDTH + e % REACH).to(tl.int32)
    return tl.where((end > start) & (tile.to(tl.int64) * WIDTH < end), tile, -1)


@triton.jit
def rank_kernel(
    ranges, q_pos, ranks, counts, stride_pb, stride_ps, S, S_kv, G, tiles, pairs_all, section, stretch, stretches,
    N: tl.constexpr, REACH: tl.constexpr, HAS_POS: tl.constexpr, WIDTH: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Number the entries of one stretch (`stretch` rows of the pair bg) within each tile, and count them."""
    NOWHERE: tl.constexpr = 2147483647
    bg = tl.program_id(0) % pairs_all
    s0 = tl.program_id(0) // pairs_all * stretch
    first_list = _list_of(0, bg, s0, tiles, section, pairs_all)
    counts += first_list * stretches + s0 % section // stretch
    i = tl.arange(0, SORTED)
    e1 = tl.minimum(s0 + stretch, S) * (N * REACH)
    for e0 in range(s0 * (N * REACH), e1, SORTED):
        tile = _tile_of(ranges, q_pos, e0 + i, bg, stride_pb, stride_ps, S, S_kv, G, N, REACH, HAS_POS, WIDTH)
        key = tl.sort(tl.where((tile >= 0) & (e0 + i < e1), tile * SORTED + i, NOWHERE))
        tile = key // SORTED
        real = key != NOWHERE
        first = real & ((i == 0) | (tl.gather(tile, tl.maximum(i - 1, 0), 0) != tile))
        last = real & ((i == SORTED - 1) | (tl.gather(tile, tl.minimum(i + 1, SORTED - 1), 0) != tile))
        rank = i - tl.associative_scan(tl.where(first, i, 0), 0, larger)
        rank += tl.load(counts + tile.to(tl.int64) * stretches, mask=real, other=0)
        tl.debug_barrier()  # all have read the count of their tile before its last entry writes it
        tl.store(counts + tile.to(tl.int64) * stretches, rank + 1, mask=last)
        tl.store(ranks + bg.to(tl.int64) * S * (N * REACH) + e0 + key % SORTED, rank, mask=real)
        tl.debug_barrier()


@triton.jit
def _list_of(tile, bg, s, tiles, section, pairs_all):
    """The number of the list of (tile, bg) for row s: sections of rows, in each the pairs, in each the tiles."""
    return (s // section * pairs_all + bg).to(tl.int64) * tiles + tile


@triton.jit
def place_kernel(
    ranges, q_pos, ranks, ends, entries, piece_list, stride_pb, stride_ps, S, S_kv, G, tiles, pairs_all, section, stretch,
    stretches, pairs, piece, pieces, N: tl.constexpr, REACH: tl.constexpr, HAS_POS: tl.constexpr, WIDTH: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Put every entry in its list; the first entry of each piece tells in which list the piece begins."""
    bg = tl.program_id(0) % pairs_all
    e = tl.program_id(0) // pairs_all * SORTED + tl.arange(0, SORTED)
    tile = _tile_of(ranges, q_pos, e, bg, stride_pb, stride_ps, S, S_kv, G, N, REACH, HAS_POS, WIDTH)
    real = tile >= 0
    s = tl.minimum(e // (N * REACH), S - 1)
    number = _list_of(tile, bg, s, tiles, section, pairs_all)
    share = number * stretches + s % section // stretch
    at = tl.load(ends + share - 1, mask=real & (share > 0), other=0)
    at += tl.load(ranks + bg.to(tl.int64) * S * (N * REACH) + e, mask=real, other=0)
    tl.store(entries + at, e, mask=real)
    unit_pair = bg // pairs * pairs
    unit_start = list_start(ends, _list_of(0, unit_pair, s, tiles, section, pairs_all), stretches)
    within = at - unit_start
    unit = s // section * tl.cdiv(pairs_all, pairs) + bg // pairs
    tl.store(piece_list + unit.to(tl.int64) * pieces + within // piece, number, mask=real & (within % piece == 0))


def inverse(call: Call, width: int, section: int, pairs: int, piece: int) -> Inverse:
    """The plan for tiles of `width` keys, units of `section` rows of `pairs` pairs, and pieces; remembered in the selection."""
    plan: Inverse = launch.remembered(call, ("inverse", width, section, pairs, piece), lambda: _build(call, width, section, pairs, piece))
    return plan


def _build(call: Call, width: int, section: int, pairs: int, piece: int) -> Inverse:
    B, S, G, n = call.selection.ranges.shape[:4]
    tiles = -(-call.k.shape[2] // width)
    reach = call.reach(width)
    each = S * n * reach
    capacity = B * G * each
    section = min(section, S)
    sections = -(-S // section)
    # Stretches long enough for a table of counts that is no longer than the lists.
    stretch = max(SORTED // (n * reach), -(-S * B * G // STRETCHES), tiles // (n * reach))
    stretch = min(section, launch.tile(stretch, 1))
    if sections > 1:  # a stretch lies within one section
        stretch = min(stretch, section & -section)
    stretches = -(-section // stretch)
    lists = sections * B * G * tiles
    needed = 8 * (capacity + lists * stretches)
    if each > 2**31 - SORTED or needed > max(call.settings.workspace_bytes, 1 << 20):
        raise BackendError(
            f"the list of rows of every KV tile needs {needed} bytes, because any of the {n} ranges of a row may span"
            f" {reach} tiles; allowed: {call.settings.workspace_bytes} (runtime.workspace_bytes). Remedy: build the Selection from"
            " blocks, pass max_length=, call selection.measure(), or raise runtime.workspace_bytes."
        )
    if tiles >= MOST_TILES:
        raise BackendError(
            f"k has {tiles} tiles of {width} keys; allowed: fewer than {MOST_TILES}. Remedy: use a larger block, or sdpa-packed."
        )
    device, index = call.q.device, torch.int32 if capacity < 2**31 else torch.int64
    pieces = -(-section * min(pairs, B * G) * n * reach // piece)
    counts = torch.zeros(lists * stretches, dtype=torch.int32, device=device)
    ranks = torch.empty(capacity, dtype=torch.int32, device=device)
    entries = torch.empty(capacity, dtype=torch.int32, device=device)
    piece_list = torch.empty(sections * -(-B * G // pairs) * pieces, dtype=torch.int64, device=device)
    ranges, q_pos = call.selection.disjoint_ranges(), call.q_pos
    numbers = (*launch.position_strides(call), S, call.k.shape[2], G, tiles, B * G, section, stretch, stretches)
    rank, place = _launches(n, reach, q_pos is not None, width)
    rank.start(-(-S // stretch) * B * G, (ranges, q_pos, ranks, counts), numbers)
    ends = torch.cumsum(counts, 0, dtype=index)
    place.start(
        -(-each // SORTED) * B * G, (ranges, q_pos, ranks, ends, entries, piece_list), (*numbers, min(pairs, B * G), piece, pieces)
    )  # fmt: skip
    return Inverse(entries, ends, piece_list, width, tiles, reach, stretches, section, min(pairs, B * G), piece, pieces)


@functools.lru_cache(REMEMBERED)
def _launches(n: int, reach: int, has_pos: bool, width: int) -> tuple[Launch, Launch]:
    facts = {"N": n, "REACH": reach, "HAS_POS": has_pos, "WIDTH": width, "SORTED": SORTED, "num_warps": 2}
    return Launch(rank_kernel, **facts), Launch(place_kernel, **facts)
