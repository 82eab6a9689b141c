"""Decide how to split the rows of each (batch entry, group) pair into slices if the lists of all rows would exceed the
workspace.

The gradients of K and V then accumulate over the slices (dkdv.py): lists and partial sums belong to one slice, float32
sums to one pair.
"""

from __future__ import annotations

from typing import NamedTuple

from nsa_sel.backends._triton.key_to_rows import plan_bytes, room
from nsa_sel.backends._triton.merged_blocks import merges, most_tiles
from nsa_sel.core.call import Call

LEAST_ROWS = 1024  # slices have multiples of this many rows; calls that need smaller slices are refused
_MERGED = 12  # bytes per range of `merged`, with its bits


class Slices(NamedTuple):
    """Describe how the rows of one batch entry and group are split."""

    rows: int  # rows per slice
    parts: int  # bytes left for partial sums of dk and dv


def slices_of(call: Call, width: int) -> Slices | None:
    """Return slices whose plan, float32 sums and partial sums fit the workspace together.

    None if the plan of the whole call fits, or if slices would have fewer than LEAST_ROWS rows.
    """
    (B, S, G, h, Dk), (_, _, S_kv, Dv) = call.q.shape, call.v.shape
    entries, tiles, allowed = call.selection.n * call.reach(width) // call.tiles_of_block(width), -(-S_kv // width), room(call)
    if B * G * ((16 + _MERGED) * S * entries + 8 * tiles) <= allowed:  # fits even with the largest possible table
        return None
    small = merges(call, width)
    entries, merged = (most_tiles(call, width), _MERGED) if small else (entries, 0)
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
