"""The n best blocks of every row, exactly as `nsa_sel.core.ranges.sorted_blocks`, without sorting: scores are read
once.

Scores become integers in the order of `sorted_blocks`: forced blocks highest, then the scores, lowest what cannot be
selected (future blocks, NaN, -inf). Bisection finds the largest threshold that at least n of them reach; it ends early
when exactly n do. Then all above it are selected, and of those equal to it the first ones. One prefix sum counts both,
in two halves of an integer, and so gives every selected block its place in the ascending list. What is written are the
keys of the blocks, as by `core.arguments.whole_blocks`.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.rows import row_position
from nsa_sel.backends._triton.tiles import tile_size

MOST_BLOCKS = 16384  # most blocks per row, which one program holds in registers
PER_WARP = 1024  # most scores per warp, 32 per thread; half as many if short rows share a warp

BOUNDED = tl.constexpr(2048)  # widest row for which maxima of groups bound the threshold
VECTOR = tl.constexpr(8)  # scores per load
INFINITY = tl.constexpr(0x7F800000)  # the bits of a float32
LARGEST = tl.constexpr(0x7F7FFFFF)  # the bits of the largest finite float32
FORCED = tl.constexpr(0x7FFFFFFF)
EXCLUDED = tl.constexpr(-0x80000000)


@triton.jit
def ordered(x):
    """Return x as int32 in float32 order: -0.0 equals 0.0, infinity equals the largest finite value, NaN and -inf are
    EXCLUDED."""
    if x.dtype == tl.bfloat16:  # by its bits: Triton's interpreter loses subnormal numbers
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -magnitude, tl.minimum(magnitude, LARGEST))
    return tl.where((magnitude > INFINITY) | (key == -INFINITY), EXCLUDED, key)


@triton.jit
def nth_largest(key, count, n, NP: tl.constexpr):
    """Return the threshold per row [ROWS] that n keys reach; more keys reach it only if they equal it.

    count: [ROWS], number of keys above EXCLUDED.
    Bisects between two bounds, and ends early if exactly n keys reach the middle. The lower bound is the minimum over
    NP >= n groups of the groups' maxima, which at least n keys reach; few steps remain. In wider rows groups would take
    too many registers and minutes of compile time, so their bisection starts at the lowest value.
    """
    ROWS: tl.constexpr = key.shape[0]
    WIDTH: tl.constexpr = key.shape[1]
    low = count * 0 + (EXCLUDED + 1)  # n keys reach it if there are n
    if NP <= WIDTH and WIDTH <= BOUNDED:
        low = tl.maximum(low, tl.min(tl.max(key.reshape(ROWS, WIDTH // NP, NP), 1), 1))
    high = tl.max(tl.where(key == FORCED, EXCLUDED, key), 1) + 1  # only forced blocks reach it
    forced = tl.sum((key == FORCED).to(tl.int32), 1)
    low = tl.where(count <= n, EXCLUDED + 1, tl.where(forced == n, high, low))
    done = (count <= n) | (forced == n)
    while tl.min(done.to(tl.int32), 0) == 0:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        reach = tl.sum((key >= middle[:, None]).to(tl.int32), 1)
        up = reach >= n
        high = tl.where(done | up, high, middle)
        done |= middle == low
        low = tl.where(done | ~up, low, middle)
        done |= reach == n
    return low


@triton.jit
def top_n_kernel(
    scores, q_pos, ranges, stride_scores, stride_pos, stride_ranges, start, rows, S, G, blocks, n, first, local,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Store ranges [B,S,G,n,2] of the n best blocks by scores [B,S,G,blocks], ascending, with [0, 0) for padding.

    Grid: one program per ROWS of the B * S * G rows, groups innermost. Tile: scores [ROWS, WIDTH >= blocks], one row
    per warp if it fits.
    Loads are rounded up to whole vectors; scores of future blocks are masked.
    """
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = number < rows
    number = tl.minimum(number, rows - 1)
    g = (number % G).to(tl.int64)
    s = (number // G % S).to(tl.int64)
    b = (number // G // S).to(tl.int64)
    t = row_position(q_pos, stride_pos, b, s, start)
    # At most blocks + local: beyond, neither what is visible nor what is forced changes.
    current = tl.where(t < 0, -1, tl.minimum(t // BLOCK_SIZE, blocks + local)).to(tl.int32)

    block = tl.arange(0, WIDTH)[None, :]
    visible = (block <= current[:, None]) & (block < blocks) & exists[:, None]
    row = scores + b * stride_scores[0] + s * stride_scores[1] + g * stride_scores[2]
    near = (block // VECTOR <= current[:, None] // VECTOR) & (block < blocks)  # whole vectors keep loads wide
    x = tl.load(row[:, None] + block.to(tl.int64) * stride_scores[3], mask=near & exists[:, None], other=0.0)
    forced = visible & ((block < first) | (block > current[:, None] - local))
    key = tl.where(forced, FORCED, tl.where(visible, ordered(x), EXCLUDED))

    count = tl.sum((key > EXCLUDED).to(tl.int32), 1)
    wanted = tl.minimum(count, n)
    threshold = nth_largest(key, count, n, NP)[:, None]
    above, equal = key > threshold, key == threshold
    missing = (wanted - tl.sum(above.to(tl.int32), 1))[:, None]
    before = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 1)
    equals = before >> 16
    place = (before & 0xFFFF) + tl.minimum(equals, missing) - 1
    out = (ranges + b * stride_ranges[0] + s * stride_ranges[1] + g * stride_ranges[2])[:, None]
    best = above | (equal & (equals <= missing))
    named = tl.minimum(block, 0x7FFFFFFF // BLOCK_SIZE - 1) if ranges.dtype.element_ty == tl.int32 else block
    begin = named.to(ranges.dtype.element_ty) * BLOCK_SIZE + tl.zeros_like(place)
    tl.store(out + 2 * place, begin, mask=best)
    tl.store(out + 2 * place + 1, begin + BLOCK_SIZE, mask=best)
    j = tl.arange(0, 2 * NP)[None, :]
    tl.store(out + j, tl.zeros([ROWS, 2 * NP], ranges.dtype.element_ty), mask=(j >= 2 * wanted[:, None]) & (j < 2 * n) & exists[:, None])


def top_n(
    scores: Tensor,
    ranges: Tensor,
    block_size: int,
    first: int,
    local: int,
    start: int,
    q_pos: Tensor | None = None,
    *,
    rows: int | None = None,
    warps: int | None = None,
) -> None:
    """Write the best blocks of every row to `ranges`; results are bit-equal to `nsa_sel.core.ranges.sorted_blocks`.

    Args:
        scores: [B,S,G,blocks], float16, bfloat16 or float32, any strides, at most MOST_BLOCKS blocks.
        ranges: [B,S,G,n,2] of `core.arguments.range_dtype(block_size)`, with contiguous last dimensions.
        block_size: keys of a block.
        first, local: blocks that are always among the n; together at most n.
        start: the position of row 0 where q_pos is None; row s is at start + s.
        q_pos: [B,S] int32 or int64, positions of the rows.
        rows, warps: rows and warps per program; None to choose.
    """
    B, S, G, blocks = scores.shape
    if ranges.numel() == 0:
        return
    if blocks == 0:
        ranges.zero_()
        return
    width = tile_size(blocks)
    rows = max(1, min(2, PER_WARP // 2 // width)) if rows is None else rows
    warps = max(1, min(16, rows * width // PER_WARP)) if warps is None else warps
    n = ranges.shape[3]
    _kernel(block_size, rows, width, tile_size(n, 1), warps).launch(
        -(-B * S * G // rows),
        (scores, q_pos, ranges),
        (
            scores.stride(), (0, 0) if q_pos is None else q_pos.stride(), ranges.stride()[:3],
            start, B * S * G, S, G, blocks, n, first, local,
        ),
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _kernel(block_size: int, rows: int, width: int, places: int, warps: int) -> Kernel:
    return Kernel(top_n_kernel, BLOCK_SIZE=block_size, ROWS=rows, WIDTH=width, NP=places, num_warps=warps)
