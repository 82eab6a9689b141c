"""Slices of the rows of one (batch entry, group) pair as calls of their own, where the lists of all rows would not fit the workspace.

The gradients of K and V then add up over the slices (dkdv.py): lists and parts are those of one slice, sums those of one pair.
"""

from __future__ import annotations

from typing import NamedTuple

from nsa_sel.backends._triton.key_to_rows import plan_bytes, room
from nsa_sel.backends._triton.merged_blocks import merges, most_tiles
from nsa_sel.core.call import Call

LEAST_ROWS = 1024  # of a slice, and what its rows are a multiple of; with fewer there are so many slices that the call is refused
_MERGED = 12  # bytes of a range of `merged`, with its bits


class Slices(NamedTuple):
    """How a pair's rows are cut."""

    rows: int  # of a slice
    parts: int  # bytes that are left for parts of dk and dv


def slices_of(call: Call, width: int) -> Slices | None:
    """Slices whose plans, float32 sums and parts fit the workspace together, where one pair's sums and parts of one per tile leave room.

    None where the plan of the whole call fits, and where slices would have fewer than LEAST_ROWS rows.
    """
    (B, S, G, h, Dk), (_, _, S_kv, Dv) = call.q.shape, call.v.shape
    entries, tiles, allowed = call.selection.n * call.reach(width) // call.tiles_of_block(width), -(-S_kv // width), room(call)
    if B * G * ((16 + _MERGED) * S * entries + 8 * tiles) <= allowed:  # whatever the plan's table takes: calls that fit anyway
        return None
    small = merges(call, width)
    entries, merged = (most_tiles(call, width), _MERGED) if small else (entries, 0)
    if plan_bytes(S, B * G, entries, tiles) + B * G * S * entries * merged <= allowed:
        return None
    accumulator = max(4, call.q.element_size())
    sums = S_kv * (Dk + Dv) * accumulator
    # The plan's lists, its table of as many numbers at most, the ranges' and the statistics' copies.
    row_bytes = (16 + merged) * entries + 2 * call.selection.ranges.element_size() * call.selection.n + 2 * accumulator * h
    most = max(allowed - 3 * sums, allowed // 4) // row_bytes // LEAST_ROWS
    if most < 1:
        return None
    multiples = -(-S // LEAST_ROWS)
    rows = -(-multiples // -(-multiples // most)) * LEAST_ROWS  # of about one size
    return Slices(rows, max(allowed - sums - rows * row_bytes, allowed // 8))
