"""Key ranges of blocks: from block indices, without duplicates, and of the n best blocks by their scores.

PyTorch would need about twenty operations for the first two, each with the host time of a kernel launch.

`top_n` selects without sorting, with results equal to `nsa_sel.core.ranges.sorted_blocks`. Scores are read once and
mapped to integers in the order of `sorted_blocks`: forced blocks highest, then the scores, then blocks that cannot be
selected (future blocks, NaN, -inf). Bisection finds the largest threshold that at least n of them reach, and ends early
if exactly n do. All blocks above it are selected, and the first ones of those equal to it. One prefix sum counts both,
in the two halves of an integer, which gives every selected block its index in the ascending list. The kernel stores the
blocks' key ranges, like `core.arguments.whole_blocks`.

This module imports no `Call`: `nsa_sel.core.ranges` uses it to make a `Selection`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.rows import row_position
from nsa_sel.backends._triton.tiles import tile_size
from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.backends.launcher.cuda_driver import stream_of
from nsa_sel.backends.launcher.replay import Recordings

ENTRIES = 256  # entries per program: rows of few blocks share one
MOST_SORTED = 1024  # most blocks per row that a program sorts


@triton.jit
def block_ranges_kernel(
    ranges, indices, counts, unique, rows, last, BLOCK: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Store the ranges [rows, N, 2] of blocks [rows, N]: [j * BLOCK, (j + 1) * BLOCK), or [0, 0) for j < 0 and past
    counts [rows].

    Grid: one program per R rows.
    indices: the blocks, or None if `ranges` are blocks or empty already.
    unique: if not None, receives the same ranges in ascending order, with [0, 0) for duplicates, and empty ranges last.
    last: the highest block whose end fits the dtype of the ranges.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    i = tl.arange(0, NP)
    listed = (row < rows)[:, None] & (i < N)[None, :]
    at = row[:, None] * N + i[None, :]
    if indices is None:
        start = tl.maximum(tl.load(ranges + 2 * at, mask=listed, other=0), 0)
        end = tl.load(ranges + 2 * at + 1, mask=listed, other=0)
        block = tl.where(end > start, start // BLOCK, -1).to(start.dtype)
    else:
        block = tl.load(indices + at, mask=listed, other=-1).to(ranges.dtype.element_ty)
        if counts is not None:
            block = tl.where(i[None, :] < tl.load(counts + row, mask=row < rows, other=0)[:, None], block, -1)
        block = tl.minimum(tl.maximum(block, -1), last).to(ranges.dtype.element_ty)
        tl.store(ranges + 2 * at, tl.maximum(block, 0) * BLOCK, mask=listed)
        tl.store(ranges + 2 * at + 1, (block + 1) * BLOCK, mask=listed)
    if unique is not None:
        store_distinct(unique, block, at, listed, last, BLOCK, NP, R)


@triton.jit
def store_distinct(unique, block, at, listed, last, BLOCK: tl.constexpr, NP: tl.constexpr, R: tl.constexpr):
    """Store the ranges of each row's blocks [R, NP] in ascending order, with [0, 0) for duplicates and for -1."""
    i = tl.arange(0, NP)
    far = last + 1  # sorts after every block
    block = tl.sort(tl.where(block < 0, far, block).to(block.dtype), dim=1)
    before = tl.gather(block, tl.broadcast_to(tl.maximum(i - 1, 0)[None, :], [R, NP]), 1)
    new = (block != far) & ((i == 0)[None, :] | (block != before))
    tl.store(unique + 2 * at, tl.where(new, block, 0) * BLOCK, mask=listed)
    tl.store(unique + 2 * at + 1, tl.where(new, block + 1, 0) * BLOCK, mask=listed)


def block_ranges(
    indices: Tensor, counts: Tensor | None, block_size: int, dtype: torch.dtype, find_unique: bool, recordings: dict[Any, Any],
    captured: bool = False,
) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
    """Return ranges [B,S,G,n,2] from block indices, and with find_unique the ranges of distinct blocks if n is small
    enough to sort. None in a CUDA graph whose capture would have to load the kernel.

    Args:
        indices: [B,S,G,n], on the current device.
        counts: [B,S,G], or None.
        block_size: keys per block.
        dtype: dtype of the ranges.
        find_unique: whether to compute distinct ranges.
        recordings: of calls that differ only in the values of the tensors (launcher/replay.py).
        captured: whether a CUDA graph captures the call.
    """
    sorts = find_unique and indices.shape[3] <= MOST_SORTED
    tensors = indices.contiguous(), None if counts is None else counts.contiguous()
    if captured:
        made = indices.new_empty(0, dtype=dtype)
        if not _is_loaded(indices.shape, made, *tensors, made if sorts else None, block_size):
            return None
    of_class = recordings.get(sorts)
    if captured or of_class is None:  # do not record the first call: most classes occur once
        recordings.setdefault(sorts, Recordings())
        ranges = _block_ranges(*tensors, block_size, dtype, sorts)
    else:
        stream = stream_of(indices.get_device()) if indices.is_cuda else 0
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        ranges = of_class.run(addresses, stream, {}, lambda: _block_ranges(*tensors, block_size, dtype, sorts))
    return ranges[0], ranges[1] if sorts else None


def _block_ranges(indices: Tensor, counts: Tensor | None, block_size: int, dtype: torch.dtype, sorts: bool) -> tuple[Tensor, ...]:
    B, S, G, n = indices.shape
    ranges = [unwritten(indices, B, S, G, n, 2, dtype=dtype) for _ in range(1 + sorts)]
    _launch(indices.shape, ranges[0], indices, counts, ranges[1] if sorts else None, block_size)
    return tuple(ranges)


def distinct_ranges(ranges: Tensor, block_size: int, captured: bool = False) -> Tensor | None:
    """Return ranges [B,S,G,n,2] of the distinct blocks in `ranges`, whose ranges are blocks or empty; None if n is too
    large to sort, and in a CUDA graph whose capture would have to load the kernel.

    The tensors are on the current device.
    """
    shape = B, S, G, n = ranges.shape[:4]
    if n > MOST_SORTED:
        return None
    unique, ranges = unwritten(ranges, B, S, G, n, 2), ranges.contiguous()
    if captured and not _is_loaded(shape, ranges, None, None, unique, block_size):
        return None
    _launch(shape, ranges, None, None, unique, block_size)
    return unique


def _launch(shape: Sequence[int], ranges: Tensor, indices: Tensor | None, counts: Tensor | None, unique: Tensor | None, block: int) -> None:
    kernel, rows, numbers = _kernel_and_numbers(shape, ranges.dtype, block, unique is not None)
    kernel.launch(-(-rows // kernel.constants["R"]), (ranges, indices, counts, unique), numbers)


def _is_loaded(
    shape: Sequence[int], ranges: Tensor, indices: Tensor | None, counts: Tensor | None, unique: Tensor | None, block: int
) -> bool:
    kernel, _, numbers = _kernel_and_numbers(shape, ranges.dtype, block, unique is not None)
    return kernel.loaded((ranges, indices, counts, unique), numbers)


def _kernel_and_numbers(shape: Sequence[int], dtype: torch.dtype, block: int, sorts: bool) -> tuple[Kernel, int, tuple[int, int]]:
    B, S, G, n = shape
    return _block_ranges_kernel(n, block, sorts), B * S * G, (B * S * G, torch.iinfo(dtype).max // block - 1)


@functools.lru_cache(REMEMBERED)
def _block_ranges_kernel(n: int, block: int, sorts: bool) -> Kernel:
    width = tile_size(n, 1)
    warps = max(1, min(8, width // 128 if sorts else width // 256))
    return Kernel(block_ranges_kernel, BLOCK=block, N=n, NP=width, R=max(1, ENTRIES // width), num_warps=warps)


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
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS], as g, s, b, t and current
    exists = number < rows
    number = tl.minimum(number, rows - 1)
    g = (number % G).to(tl.int64)
    s = (number // G % S).to(tl.int64)
    b = (number // G // S).to(tl.int64)
    t = row_position(q_pos, stride_pos, b, s, start)
    # At most blocks + local: beyond, neither what is visible nor what is forced changes.
    current = tl.where(t < 0, -1, tl.minimum(t // BLOCK_SIZE, blocks + local)).to(tl.int32)

    block = tl.arange(0, WIDTH)[None, :]  # [1, WIDTH]; below, all but counts [ROWS] are [ROWS, WIDTH]
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
    slot = (before & 0xFFFF) + tl.minimum(equals, missing) - 1
    out = (ranges + b * stride_ranges[0] + s * stride_ranges[1] + g * stride_ranges[2])[:, None]
    best = above | (equal & (equals <= missing))
    named = tl.minimum(block, 0x7FFFFFFF // BLOCK_SIZE - 1) if ranges.dtype.element_ty == tl.int32 else block
    begin = named.to(ranges.dtype.element_ty) * BLOCK_SIZE + tl.zeros_like(slot)
    tl.store(out + 2 * slot, begin, mask=best)
    tl.store(out + 2 * slot + 1, begin + BLOCK_SIZE, mask=best)
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
    _top_n_kernel(block_size, rows, width, tile_size(n, 1), warps).launch(
        -(-B * S * G // rows),
        (scores, q_pos, ranges),
        (
            scores.stride(), (0, 0) if q_pos is None else q_pos.stride(), ranges.stride()[:3],
            start, B * S * G, S, G, blocks, n, first, local,
        ),
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _top_n_kernel(block_size: int, rows: int, width: int, slots: int, warps: int) -> Kernel:
    return Kernel(top_n_kernel, BLOCK_SIZE=block_size, ROWS=rows, WIDTH=width, NP=slots, num_warps=warps)
