"""The n best blocks of rows that are too wide for registers."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor
import torch

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.ranges import EXCLUDED, FORCED, LARGEST, VECTOR, nth_largest, ordered
from nsa_sel.backends._triton.rows import row_position
from nsa_sel.backends._triton.tiles import tile_size


@triton.jit
def load_scores(row, stride, block, current, blocks, first, local):
    """Return the scores of `block` as int32 in the order of `sorted_blocks`: FORCED, `ordered` scores, EXCLUDED."""
    visible = (block <= current) & (block < blocks)
    near = (block // VECTOR <= current // VECTOR) & (block < blocks)  # whole vectors keep loads wide
    x = tl.load(row + block.to(tl.int64) * stride, mask=near, other=0.0)
    forced = (block < first) | (block > current - local)
    return tl.where(visible, tl.where(forced, FORCED, ordered(x)), EXCLUDED)


@triton.jit
def group_maxima(row, stride, current, blocks, first, local, CHUNK: tl.constexpr):
    """Return the maxima [CHUNK] of the scores whose blocks are equal modulo CHUNK, and how many blocks can be selected."""
    i = tl.arange(0, CHUNK)
    largest = tl.full([CHUNK], EXCLUDED, tl.int32)
    count = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, tl.minimum(current + 1, blocks), CHUNK):
        key = load_scores(row, stride, begin + i, current, blocks, first, local)
        largest = tl.maximum(largest, key)
        count += (key > EXCLUDED).to(tl.int32)
    return largest, tl.sum(count, 0)


@triton.jit
def keep_candidates(row, stride, current, blocks, first, local, low, n, keys, names, CHUNK: tl.constexpr, CAP: tl.constexpr):
    """Store the blocks whose score is at least `low`, in ascending order, of those equal to it the first n: their scores
    to `keys` [CAP], their numbers to `names` [CAP]. Return how many are above `low` and how many equal it."""
    i = tl.arange(0, CHUNK)
    above, equal = 0, 0
    for begin in range(0, tl.minimum(current + 1, blocks), CHUNK):
        key = load_scores(row, stride, begin + i, current, blocks, first, local)
        packed = (key > low).to(tl.int32) + ((key == low).to(tl.int32) << 16)
        before = tl.cumsum(packed, 0)
        equals = equal + (before >> 16)
        slot = above + (before & 0xFFFF) + tl.minimum(equals, n) - 1
        kept = ((key > low) | ((key == low) & (equals <= n))) & (slot < CAP)
        tl.store(keys + slot, key, mask=kept)
        tl.store(names + slot, begin + i, mask=kept)
        total = tl.sum(packed, 0)
        above += total & 0xFFFF
        equal += total >> 16
    return above, equal


@triton.jit
def wide_rows_kernel(
    scores, q_pos, ranges, scratch, stride_scores, stride_pos, stride_ranges, start, S, G, blocks, n, first, local,
    BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr, NP: tl.constexpr, SLACK: tl.constexpr,
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
    keys = scratch + number.to(tl.int64) * (2 * CAP)
    names = keys + CAP

    largest, count = group_maxima(row, stride_scores[3], current, blocks, first, local, CHUNK)
    low, high = count * 0 + (EXCLUDED + 1), count * 0 + (LARGEST + 2)  # n scores reach low; only forced ones reach high
    if count > n:
        low = bound(largest, n, SLACK)
    kept = CAP + 1
    middle = low
    while kept > CAP:
        above, equal = keep_candidates(row, stride_scores[3], current, blocks, first, local, middle, n, keys, names, CHUNK, CAP)
        if above + equal >= tl.minimum(count, n):
            low = middle
            kept = above + tl.minimum(equal, n)
        else:
            high = middle
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
    tl.debug_barrier()
    c = tl.arange(0, CAP)
    key = tl.load(keys + c, mask=c < kept, other=EXCLUDED)
    name = tl.load(names + c, mask=c < kept, other=0)
    tl.debug_barrier()
    count = tl.minimum(count, kept)
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
    *, chunk: int = 2048, cap: int = 0, warps: int = 4, slack: int = 8) -> None:
    B, S, G, blocks = scores.shape
    n = ranges.shape[3]
    cap = cap or tile_size(2 * n, 256)
    chunk = max(chunk, tile_size(2 * n))
    scratch = torch.empty(B * S * G, 2, cap, dtype=torch.int32, device=scores.device)
    _kernel(block_size, chunk, cap, tile_size(n, 1), slack, warps).launch(
        B * S * G, (scores, q_pos, ranges, scratch),
        (scores.stride(), (0, 0) if q_pos is None else q_pos.stride(), ranges.stride()[:3], start, S, G, blocks, n, first, local),
    )


@functools.lru_cache(REMEMBERED)
def _kernel(block_size, chunk, cap, slots, slack, warps) -> Kernel:
    return Kernel(wide_rows_kernel, BLOCK_SIZE=block_size, CHUNK=chunk, CAP=cap, NP=slots, SLACK=slack, num_warps=warps)
