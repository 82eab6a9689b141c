"""Packed batches: which sequence a tile of rows or of keys belongs to, and where it begins and ends, in scalars.

Tiles lie within one sequence. Those of sequence i, which begins at row cu[i], begin at tile cu[i] // TILE + i: there is room for all of
them, as each sequence wastes less than a tile, and the host knows a bound on their number, total // TILE + N + 1. A program finds its
sequence by a search among `cu`, 32 entries at a time. What follows the last sequence is one more, number N: padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

PROBES = tl.constexpr(32)  # entries that a step of the search reads: a thread of a warp each


@triton.jit
def clamped(bounds, i, origin, most):
    """bounds[i] - origin, int32, within [0, most] even where the bounds are wrong."""
    return tl.minimum(tl.maximum(tl.load(bounds + i) - origin, 0), most).to(tl.int32)


@triton.jit
def sequence_of(number, bounds, origin, most, sequences, TILE: tl.constexpr):
    """The last i in [0, sequences] whose tiles begin at or before tile `number`."""
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
    """Where sequence i begins and ends."""
    begin = clamped(bounds, i, origin, most)
    end = tl.where(i < sequences, clamped(bounds, tl.minimum(i + 1, sequences), origin, most), most)
    return begin, tl.maximum(begin, end)
