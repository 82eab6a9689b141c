"""Packed batches: find the sequence of a tile of rows or keys, and its bounds, as scalars.

A tile lies within one sequence. The tiles of sequence i, which begins at row cu[i], begin at tile number cu[i] // TILE
+ i. This leaves room for all tiles, because each sequence wastes less than one tile, and bounds their number by total
// TILE + N + 1 on the host. A program finds its sequence by searching `cu`, 32 entries at a time. Padding after the
last sequence counts as sequence N.
"""

from __future__ import annotations

import triton
import triton.language as tl

PROBES = tl.constexpr(32)  # entries per search step, one per thread of a warp


@triton.jit
def clamped(bounds, i, origin, most):
    """Return bounds[i] - origin as int32, clamped to [0, most] even if the bounds are wrong."""
    return tl.minimum(tl.maximum(tl.load(bounds + i) - origin, 0), most).to(tl.int32)


@triton.jit
def sequence_of(number, bounds, origin, most, sequences, TILE: tl.constexpr):
    """Return the last i in [0, sequences] whose tiles begin at or before tile `number`."""
    probe = tl.arange(0, PROBES)
    first = 0
    width = sequences + 1
    while width > 1:
        step = (width + PROBES - 1) // PROBES
        i = tl.minimum(first + probe * step, sequences)
        reached = (probe * step < width) & (clamped(bounds, i, origin, most) // TILE + i <= number)
        passed = tl.maximum(tl.sum(reached.to(tl.int32), 0) - 1, 0) * step
        first += passed
        width = tl.minimum(step, width - passed)
    return first


@triton.jit
def span_of(i, bounds, origin, most, sequences):
    """Return where sequence i begins and ends."""
    begin = clamped(bounds, i, origin, most)
    end = tl.where(i < sequences, clamped(bounds, tl.minimum(i + 1, sequences), origin, most), most)
    return begin, tl.maximum(begin, end)
