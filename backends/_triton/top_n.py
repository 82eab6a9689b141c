"""The n best blocks of every row by their scores, without sorting; equal to `nsa_sel.core.ranges.sorted_blocks`.

Scores are mapped to integers in the order of `sorted_blocks`: forced blocks highest, then the scores, then blocks that
cannot be selected (future blocks, NaN, -inf). Bisection finds the largest threshold that at least n of them reach, and
ends early if exactly n do. All blocks above it are selected, and the first ones of those equal to it. One prefix sum
counts both, in the two halves of an integer, which gives every selected block its index in the ascending list.

Rows of up to WIDE blocks are held in registers, few rows of up to WIDE_IF_FEW. Of wider rows (`wide_rows_kernel`) only
candidates are: a first pass takes the maxima of groups of blocks; about the n-th largest of them is a score that n
blocks reach, and hardly more; a second pass keeps those blocks.

This module imports no `Call`: `nsa_sel.core.ranges` uses it to make a `Selection`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.rows import row_position
from nsa_sel.backends._triton.tiles import tile_size
from nsa_sel.backends.launcher.buffers import unwritten

WIDE, WIDE_IF_FEW = 4096, 16384  # most blocks of a row in registers, and of at most FEW_WIDE rows, for which latency counts
FEW_WIDE = 256
MOST_CHOSEN = 4096  # largest n of wider rows, of which twice as many candidates are in registers
FEW_ROWS = 4096  # up to this many rows, each has a program of its own
PER_WARP = 1024  # most scores per warp, 32 per thread; half as many if short rows share a warp
CHUNK = 2048  # blocks of a wide row at once
CHUNK_PER_WARP = 512  # scores of a chunk per warp
LEAST_KEPT = 256  # room for candidates

BOUNDED = tl.constexpr(2048)  # widest row for which maxima of groups bound the threshold
VECTOR = tl.constexpr(8)  # scores per load
INFINITY = tl.constexpr(0x7F800000)  # the bits of a float32
LARGEST = tl.constexpr(0x7F7FFFFF)  # the bits of the largest finite float32
FORCED = tl.constexpr(0x7FFFFFFF)
EXCLUDED = tl.constexpr(-0x80000000)
INFINITE = tl.constexpr(float("inf"))
FINITE = tl.constexpr(3.4028234663852886e38)  # the largest finite float32


@triton.jit
def as_float32(x):
    """Return x as float32, bfloat16 by its bits: Triton's interpreter loses subnormal numbers."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def ordered(x):
    """Return x as int32 in float32 order: -0.0 equals 0.0, infinity equals the largest finite value, NaN and -inf are
    EXCLUDED."""
    bits = as_float32(x).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -magnitude, tl.minimum(magnitude, LARGEST))
    return tl.where((magnitude > INFINITY) | (key == -INFINITY), EXCLUDED, key)


@triton.jit
def from_ordered(key):
    """Return the number that `ordered` maps to `key`; infinity above the largest finite number, and its negative below
    all."""
    magnitude = tl.minimum(tl.abs(tl.maximum(key, -LARGEST)), INFINITY)
    return tl.where(key < 0, magnitude | -0x80000000, magnitude).to(tl.float32, bitcast=True)


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
def store_best(to, key, block, count, t, exists, n, BLOCK_SIZE: tl.constexpr, NP: tl.constexpr, INDICES: tl.constexpr, TAIL: tl.constexpr):
    """Store the n best of the blocks `block` [ROWS, WIDTH] by `key` [ROWS, WIDTH] at pointers `to` [ROWS] (rows that
    exist): their ranges, or their indices, ascending; after them [0, 0), or -1.

    count: [ROWS], number of keys above EXCLUDED.
    t: [ROWS], positions. TAIL: also store the block whose keys a row sees in part, in the last of n + 1 entries.
    """
    dtype: tl.constexpr = to.dtype.element_ty
    WORDS: tl.constexpr = 1 if INDICES else 2
    wanted = tl.minimum(count, n)
    threshold = nth_largest(key, count, n, NP)[:, None]
    above, equal = key > threshold, key == threshold
    missing = (wanted - tl.sum(above.to(tl.int32), 1))[:, None]
    before = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 1)
    equals = before >> 16
    slot = (before & 0xFFFF) + tl.minimum(equals, missing) - 1
    best = above | (equal & (equals <= missing))
    out = to[:, None]
    if INDICES:
        tl.store(out + slot, block.to(dtype) + tl.zeros_like(slot), mask=best)
    else:
        named = tl.minimum(block, 0x7FFFFFFF // BLOCK_SIZE - 1) if dtype == tl.int32 else block
        begin = named.to(dtype) * BLOCK_SIZE + tl.zeros_like(slot)
        tl.store(out + 2 * slot, begin, mask=best)
        tl.store(out + 2 * slot + 1, begin + BLOCK_SIZE, mask=best)
    j = tl.arange(0, WORDS * NP)[None, :]
    nothing = tl.full([key.shape[0], WORDS * NP], -1 if INDICES else 0, dtype)
    tl.store(out + j, nothing, mask=(j >= WORDS * wanted[:, None]) & (j < WORDS * n) & exists[:, None])
    if TAIL:
        part = (t >= 0) & ((t + 1) % BLOCK_SIZE != 0)
        if INDICES:
            tl.store(to + n, tl.where(part, t // BLOCK_SIZE, -1).to(dtype), mask=exists)
        else:
            begin = t // BLOCK_SIZE * BLOCK_SIZE
            tl.store(to + 2 * n, tl.where(part, begin, 0).to(dtype), mask=exists)
            tl.store(to + 2 * n + 1, tl.where(part, begin + BLOCK_SIZE, 0).to(dtype), mask=exists)


@triton.jit
def top_n_kernel(
    scores, q_pos, out, stride_scores, stride_pos, stride_out, start, rows, S, G, blocks, n, first, local, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, NP: tl.constexpr, INDICES: tl.constexpr, TAIL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Store ranges [B,S,G,n,2] of the n best blocks by scores [B,S,G,blocks], ascending, with [0, 0) for padding.

    INDICES, TAIL: see `store_best`.
    Grid: one program per ROWS of the B * S * G rows, groups innermost. Tile: scores [ROWS, WIDTH >= blocks], one row
    per warp if it fits.
    Loads are rounded up to whole vectors; scores of future blocks are masked.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
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
    to = out + b * stride_out[0] + s * stride_out[1] + g * stride_out[2]
    store_best(to, key, block, count, t, exists, n, BLOCK_SIZE, NP, INDICES, TAIL)


@triton.jit
def load_scores(row, stride, begin, current, blocks, first, local, CHUNK: tl.constexpr):
    """Return the scores [CHUNK] of the blocks from `begin` on: infinity for forced ones alone, others at most the largest
    finite number, NaN as it is, -inf for blocks that the row does not see."""
    i = tl.arange(0, CHUNK)
    chunk = row + (current * 0 + begin).to(tl.int64) * stride
    if (begin >= first) & (begin + CHUNK <= tl.minimum(blocks, current - local + 1)):
        x = tl.minimum(as_float32(tl.load(chunk + i * stride)), FINITE, propagate_nan=tl.PropagateNan.ALL)
    else:
        block = begin + i
        near = (block // VECTOR <= current // VECTOR) & (block < blocks)  # whole vectors keep loads wide
        x = as_float32(tl.load(chunk + i * stride, mask=near, other=0.0))
        x = tl.minimum(x, FINITE, propagate_nan=tl.PropagateNan.ALL)
        x = tl.where((block < first) | (block > current - local), INFINITE, x)
        x = tl.where((block <= current) & (block < blocks), x, -INFINITE)
    return x


@triton.jit
def group_maxima(row, stride, current, blocks, first, local, CHUNK: tl.constexpr):
    """Return the largest scores [CHUNK] of blocks that are equal modulo CHUNK, `ordered`."""
    largest = tl.full([CHUNK], float("-inf"), tl.float32)
    for begin in range(0, tl.minimum(current + 1, blocks), CHUNK):
        largest = tl.maximum(largest, load_scores(row, stride, begin, current, blocks, first, local, CHUNK))  # drops NaN
    return tl.where(largest == INFINITE, FORCED, ordered(largest))


@triton.jit
def low_bound(largest, n):
    """Return a number that at least n of `largest` [CHUNK] reach, and hardly more; one that all reach if less than n can
    be selected."""
    high = tl.max(largest, 0)
    low, reach = high * 0 + (EXCLUDED + 1), n * 0 + largest.shape[0]
    while (reach > n + n // 8) & (low < high):
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # rounded up
        reaching = tl.sum((largest >= middle).to(tl.int32), 0)
        up = reaching >= n
        low, high, reach = tl.where(up, middle, low), tl.where(up, high, middle - 1), tl.where(up, reaching, reach)
    return low


@triton.jit
def keep_candidates(
    row, stride, current, blocks, first, local, least, n, names, CHUNK: tl.constexpr, ROOM: tl.constexpr
):  # fmt: skip
    """Store the blocks whose score is at least `least`, in ascending order, of those equal to it the first n, to `names`
    [ROOM]. Return how many are above `least` and how many equal it."""
    i = tl.arange(0, CHUNK)
    above, equal = current * 0, current * 0
    for begin in range(0, tl.minimum(current + 1, blocks), CHUNK):
        x = load_scores(row, stride, begin, current, blocks, first, local, CHUNK)
        both = (x > least).to(tl.int32) + ((x == least).to(tl.int32) << 16)
        before = tl.cumsum(both, 0)
        equals = equal + (before >> 16)
        slot = above + (before & 0xFFFF) + tl.minimum(equals, n) - 1
        kept = (x > least) | ((x == least) & (equals <= n))
        tl.store(names + slot, begin + i, mask=kept & (slot < ROOM))
        total = tl.sum(both, 0)
        above += total & 0xFFFF
        equal += total >> 16
    return above, equal


@triton.jit
def wide_rows_kernel(
    scores, q_pos, out, scratch, stride_scores, stride_pos, stride_out, start, S, G, blocks, n, first, local, BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr, ROOM: tl.constexpr, NP: tl.constexpr, INDICES: tl.constexpr, TAIL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Do `top_n_kernel` for rows of any number of blocks.

    Grid: one program per row, late rows first.
    scratch: [programs, ROOM] int32, for the candidates of a row; ROOM >= 2 n.
    Candidates reach a score that n blocks reach. If they are too many, that score is raised by bisection, a pass over
    the row a step. It ends: less than n blocks are above the threshold, and n at most of those equal to it are kept.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    g = (number % G).to(tl.int64)
    s = (number // G % S).to(tl.int64)
    b = (number // G // S).to(tl.int64)
    t = row_position(q_pos, stride_pos, b, s, start)
    current = tl.where(t < 0, -1, tl.minimum(t // BLOCK_SIZE, blocks + local)).to(tl.int32)
    row = scores + b * stride_scores[0] + s * stride_scores[1] + g * stride_scores[2]
    names = scratch + number.to(tl.int64) * ROOM

    low = low_bound(group_maxima(row, stride_scores[3], current, blocks, first, local, CHUNK), n)
    high = low * 0 + (LARGEST + 2)  # only forced blocks reach it
    middle, kept = low, low * 0 + (ROOM + 1)
    while kept > ROOM:
        above, equal = keep_candidates(
            row, stride_scores[3], current, blocks, first, local, from_ordered(middle), n, names, CHUNK, ROOM
        )  # fmt: skip
        if (above + equal >= n) | (middle == low):
            low, kept = middle, above + tl.minimum(equal, n)
        else:
            high = middle
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
    tl.debug_barrier()  # candidates of all threads are stored

    i = tl.arange(0, ROOM)[None, :]  # [1, ROOM], as block and key
    block = tl.load(names + i, mask=i < kept, other=0)
    x = tl.load(row + block.to(tl.int64) * stride_scores[3], mask=i < kept, other=0.0)
    forced = (block < first) | (block > current - local)
    key = tl.where(i < kept, tl.where(forced, FORCED, ordered(x)), EXCLUDED)
    to = out + (b * stride_out[0] + s * stride_out[1] + g * stride_out[2]) + tl.arange(0, 1)
    count = kept + tl.zeros([1], tl.int32)
    store_best(to, key, block, count, t + tl.zeros([1], tl.int64), count >= 0, n, BLOCK_SIZE, NP, INDICES, TAIL)


def chooses(blocks: int, n: int) -> bool:
    """Return whether `top_n` chooses n of so many blocks."""
    return blocks <= WIDE or n <= MOST_CHOSEN


def top_n(
    scores: Tensor,
    out: Tensor,
    block_size: int,
    first: int,
    local: int,
    start: int,
    q_pos: Tensor | None = None,
    *,
    tail: bool = False,
    early: bool = False,
    rows: int | None = None,
    warps: int | None = None,
) -> None:
    """Write the best blocks of every row to `out`; results are bit-equal to `nsa_sel.core.ranges.sorted_blocks`.

    Args:
        scores: [B,S,G,blocks], float16, bfloat16 or float32, any strides.
        out: ranges [B,S,G,n,2] of `core.arguments.range_dtype(block_size)`, or block indices [B,S,G,n] int32 or int64,
            with contiguous last dimensions. `chooses(blocks, n)`.
        block_size: keys of a block.
        first, local: blocks that are always among the n; together at most n.
        start: the position of row 0 where q_pos is None; row s is at start + s.
        q_pos: [B,S] int32 or int64, positions of the rows.
        tail: `out` has room for one more block, which gets the one whose keys the row sees in part, or is empty.
        early: programmatic dependent launch.
        rows, warps: rows (of at most WIDE blocks) and warps per program; None to choose.
    """
    B, S, G, blocks = scores.shape
    indices = out.dim() == 4
    if out.numel() == 0:
        return
    width, n = tile_size(blocks), out.shape[3] - tail
    strides = scores.stride(), (0, 0) if q_pos is None else q_pos.stride(), out.stride()[:3]
    constants = {
        "BLOCK_SIZE": block_size,
        "NP": tile_size(n, 1),
        "INDICES": indices,
        "TAIL": tail,
        "EARLY": early,
        **({"launch_pdl": True} if early else {}),
    }
    if width > (WIDE_IF_FEW if B * S * G <= FEW_WIDE else WIDE):
        chunk, room = tile_size(2 * n, CHUNK), tile_size(2 * n, LEAST_KEPT)
        scratch = unwritten(scores, B * S * G, room, dtype=torch.int32)
        warps = max(1, min(16, chunk // CHUNK_PER_WARP)) if warps is None else warps
        kernel = _wide_rows_kernel(chunk, room, warps, **constants)
        kernel.launch(B * S * G, (scores, q_pos, out, scratch), (*strides, start, S, G, blocks, n, first, local))
        return
    rows = (1 if B * S * G <= FEW_ROWS else max(1, min(2, PER_WARP // 2 // width))) if rows is None else rows
    warps = max(1, min(16, rows * width // PER_WARP)) if warps is None else warps
    kernel = _top_n_kernel(rows, width, warps, **constants)
    kernel.launch(-(-B * S * G // rows), (scores, q_pos, out), (*strides, start, B * S * G, S, G, blocks, n, first, local))


@functools.lru_cache(REMEMBERED)
def _top_n_kernel(rows: int, width: int, warps: int, **constants: int) -> Kernel:
    return Kernel(top_n_kernel, ROWS=rows, WIDTH=width, num_warps=warps, **constants)


@functools.lru_cache(REMEMBERED)
def _wide_rows_kernel(chunk: int, room: int, warps: int, **constants: int) -> Kernel:
    return Kernel(wide_rows_kernel, CHUNK=chunk, ROOM=room, num_warps=warps, **constants)
