"""The n best blocks of rows that are too wide for registers."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor
import torch

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.ranges import EXCLUDED, FORCED, INFINITY, LARGEST, VECTOR, nth_largest, ordered
from nsa_sel.backends._triton.rows import row_position
from nsa_sel.backends._triton.tiles import tile_size


INFINITE = tl.constexpr(float("inf"))
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)


@triton.jit
def as_float32(x):
    """Return x as float32, bfloat16 by its bits: Triton's interpreter loses subnormal numbers."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def load_scores(row, stride, begin, current, blocks, first, local, CHUNK: tl.constexpr):
    """Return the scores [CHUNK] of the blocks from `begin` on: infinity for forced ones alone, others at most the largest
    finite number, NaN as it is, -inf for blocks that the row does not see."""
    i = tl.arange(0, CHUNK)
    chunk = row + (current * 0 + begin).to(tl.int64) * stride
    if (begin >= first) & (begin + CHUNK <= tl.minimum(blocks, current - local + 1)):
        x = as_float32(tl.load(chunk + i * stride))
        x = tl.minimum(x, LARGEST_FLOAT, propagate_nan=tl.PropagateNan.ALL)
    else:
        block = begin + i
        near = (block // VECTOR <= current // VECTOR) & (block < blocks)  # whole vectors keep loads wide
        x = as_float32(tl.load(chunk + i * stride, mask=near, other=0.0))
        x = tl.minimum(x, LARGEST_FLOAT, propagate_nan=tl.PropagateNan.ALL)
        x = tl.where((block < first) | (block > current - local), INFINITE, x)
        x = tl.where((block <= current) & (block < blocks), x, -INFINITE)
    return x


@triton.jit
def from_ordered(key):
    """Return the number of which `ordered` is `key`, infinity above the largest finite number."""
    magnitude = tl.minimum(tl.abs(tl.maximum(key, -LARGEST)), INFINITY)
    return tl.where(key < 0, magnitude | -0x80000000, magnitude).to(tl.float32, bitcast=True)


@triton.jit
def group_maxima(row, stride, current, blocks, first, local, CHUNK: tl.constexpr, STAGES: tl.constexpr):
    """Return the maxima [CHUNK] of the scores whose blocks are equal modulo CHUNK, in the order of `ordered`."""
    largest = tl.full([CHUNK], float("-inf"), tl.float32)
    for begin in tl.range(0, tl.minimum(current + 1, blocks), CHUNK, num_stages=STAGES):
        largest = tl.maximum(largest, load_scores(row, stride, begin, current, blocks, first, local, CHUNK))  # drops NaN
    return tl.where(largest == INFINITE, FORCED, ordered(largest))


@triton.jit
def keep_candidates(row, stride, current, blocks, first, local, least, n, names, CHUNK: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr):
    """Store the blocks whose score is at least `least`, in ascending order, of those equal to it the first n, to `names`
    [CAP]. Return how many are above `least` and how many equal it."""
    i = tl.arange(0, CHUNK)
    above, equal = current * 0, current * 0
    for begin in tl.range(0, tl.minimum(current + 1, blocks), CHUNK, num_stages=STAGES):
        x = load_scores(row, stride, begin, current, blocks, first, local, CHUNK)
        packed = (x > least).to(tl.int32) + ((x == least).to(tl.int32) << 16)
        before = tl.cumsum(packed, 0)
        equals = equal + (before >> 16)
        slot = above + (before & 0xFFFF) + tl.minimum(equals, n) - 1
        kept = ((x > least) | ((x == least) & (equals <= n))) & (slot < CAP)
        tl.store(names + slot, begin + i, mask=kept)
        total = tl.sum(packed, 0)
        above += total & 0xFFFF
        equal += total >> 16
    return above, equal


@triton.jit
def wide_rows_kernel(
    scores, q_pos, ranges, scratch, stride_scores, stride_pos, stride_ranges, start, S, G, blocks, n, first, local,
    BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr, NP: tl.constexpr, SLACK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store ranges [B,S,G,n,2] of the n best blocks by scores [B,S,G,blocks], ascending, with [0, 0) for padding.

    Grid: one program per row, late rows first.
    scratch: [programs, 2, CAP] int32.
    """
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    g = (number % G).to(tl.int64)
    s = (number // G % S).to(tl.int64)
    b = (number // G // S).to(tl.int64)
    t = row_position(q_pos, stride_pos, b, s, start)
    current = tl.where(t < 0, -1, tl.minimum(t // BLOCK_SIZE, blocks + local)).to(tl.int32)
    row = scores + b * stride_scores[0] + s * stride_scores[1] + g * stride_scores[2]
    names = scratch + number.to(tl.int64) * CAP

    largest = group_maxima(row, stride_scores[3], current, blocks, first, local, CHUNK, STAGES)
    low = bound(largest, n, SLACK)  # n scores reach it, or all that can be selected
    high = low * 0 + (LARGEST + 2)  # only forced blocks reach it
    middle, kept, reach = low, low * 0 + (CAP + 1), low * 0
    while kept > CAP:
        above, equal = keep_candidates(
            row, stride_scores[3], current, blocks, first, local, from_ordered(middle), n, names, CHUNK, CAP, STAGES
        )
        if (above + equal >= n) | (middle == low):
            low = middle
            reach = above + equal
            kept = above + tl.minimum(equal, n)
        else:
            high = middle
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
    tl.debug_barrier()
    c = tl.arange(0, CAP)
    name = tl.load(names + c, mask=c < kept, other=0)
    x = tl.load(row + name.to(tl.int64) * stride_scores[3], mask=c < kept, other=0.0)
    forced = (name < first) | (name > current - local)
    key = tl.where(c < kept, tl.where(forced, FORCED, ordered(x)), EXCLUDED)
    count = tl.minimum(reach, kept)
    wanted = tl.minimum(count, n)
    threshold = tl.sum(nth_largest(key[None, :], count + tl.zeros([1], tl.int32), n, NP), 0)
    best_above, best_equal = key > threshold, key == threshold
    missing = wanted - tl.sum(best_above.to(tl.int32), 0)
    before = tl.cumsum(best_above.to(tl.int32) + (best_equal.to(tl.int32) << 16), 0)
    equals = before >> 16
    slot = (before & 0xFFFF) + tl.minimum(equals, missing) - 1
    out = ranges + b * stride_ranges[0] + s * stride_ranges[1] + g * stride_ranges[2]
    best = best_above | (best_equal & (equals <= missing))
    named = tl.minimum(name, 0x7FFFFFFF // BLOCK_SIZE - 1) if ranges.dtype.element_ty == tl.int32 else name
    begin = named.to(ranges.dtype.element_ty) * BLOCK_SIZE
    tl.store(out + 2 * slot, begin, mask=best)
    tl.store(out + 2 * slot + 1, begin + BLOCK_SIZE, mask=best)
    j = tl.arange(0, 2 * NP)
    tl.store(out + j, tl.zeros([2 * NP], ranges.dtype.element_ty), mask=(j >= 2 * wanted) & (j < 2 * n))


@triton.jit
def bound(largest, n, SLACK: tl.constexpr):
    """Return a score that at least n of `largest` [CHUNK] reach, hardly more than n * (1 + 1 / SLACK)."""
    high = tl.max(largest, 0)
    low, reach = high * 0 + (EXCLUDED + 1), n * 0 + largest.shape[0]
    while (reach > n + n // SLACK) & (low < high):
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # rounded up
        m = tl.sum((largest >= middle).to(tl.int32), 0)
        if m >= n:
            low = middle
            reach = m
        else:
            high = middle - 1
    return low


def wide_top_n(scores: Tensor, ranges: Tensor, block_size: int, first: int, local: int, start: int, q_pos: Tensor | None = None,
    *, chunk: int = 2048, cap: int = 0, warps: int = 4, slack: int = 8, stages: int = 1, regs: int = 0) -> None:
    B, S, G, blocks = scores.shape
    n = ranges.shape[3]
    cap = cap or tile_size(2 * n, 256)
    chunk = max(chunk, tile_size(2 * n))
    scratch = torch.empty(B * S * G, cap, dtype=torch.int32, device=scores.device)
    _kernel(block_size, chunk, cap, tile_size(n, 1), slack, warps, stages, regs).launch(
        B * S * G, (scores, q_pos, ranges, scratch),
        (scores.stride(), (0, 0) if q_pos is None else q_pos.stride(), ranges.stride()[:3], start, S, G, blocks, n, first, local),
    )


@functools.lru_cache(REMEMBERED)
def _kernel(block_size, chunk, cap, slots, slack, warps, stages, regs) -> Kernel:
    return Kernel(wide_rows_kernel, BLOCK_SIZE=block_size, CHUNK=chunk, CAP=cap, NP=slots, SLACK=slack, STAGES=stages, num_warps=warps, **({'maxnreg': regs} if regs else {}))
