"""The n best blocks of every row, exactly as `nsa_sel.core.scores.sorted_blocks`, without sorting: scores are read once.

Scores become integers in the order of `sorted_blocks`: forced blocks highest, then the scores, lowest what cannot be selected (future
blocks, NaN, -inf). A search bit by bit finds the largest threshold that at least n of them reach; it ends early when exactly n do. Then
all above it are selected, and of those equal to it the first ones. One prefix sum counts both, in two halves of an integer, and so
gives every selected block its place in the ascending list.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.rows import row_position
from nsa_sel.backends._triton.tiles import tile_size

MOST_BLOCKS = 16384  # of a row, which one program holds in registers
PER_WARP = 1024  # scores, 32 per thread

VECTOR = tl.constexpr(8)  # scores of a load
INFINITY = tl.constexpr(0x7F800000)  # the bits of a float32
LARGEST = tl.constexpr(0x7F7FFFFF)  # of the largest finite one
FORCED = tl.constexpr(0x7FFFFFFF)
EXCLUDED = tl.constexpr(-0x80000000)


@triton.jit
def ordered(x):
    """x as int32 in the order of float32: -0.0 equals 0.0, infinity the largest finite number, NaN and -inf are EXCLUDED."""
    if x.dtype == tl.bfloat16:  # by its bits: Triton's interpreter loses subnormal numbers
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -magnitude, tl.minimum(magnitude, LARGEST))
    return tl.where((magnitude > INFINITY) | (key == -INFINITY), EXCLUDED, key)


@triton.jit
def nth_largest(key, count, n):
    """A threshold per row [ROWS] that as many keys reach as are wanted, or more only if they equal it; count: of keys above EXCLUDED."""
    positive = tl.sum((key >= 0).to(tl.int32), 1)
    done = count <= n
    threshold = tl.where(done, EXCLUDED + 1, tl.where(positive >= n, 0, EXCLUDED))
    done = done | (positive == n)
    bit = 1 << 30
    while bit > 0:
        higher = threshold + bit
        reach = tl.sum((key >= higher[:, None]).to(tl.int32), 1)
        threshold = tl.where((reach >= n) & ~done, higher, threshold)
        done = done | (reach == n)
        bit = tl.where(tl.min(done.to(tl.int32), 0) == 1, 0, bit // 2)
    return threshold


@triton.jit
def top_n_kernel(
    scores, q_pos, chosen, stride_scores, stride_pos, stride_chosen, start, rows, S, G, blocks, n, first, local,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """chosen [B,S,G,n]: ascending indices of the n best of the scores [B,S,G,blocks] of each row, -1 for padding.

    Grid: one program per ROWS of the B * S * G rows, groups first. Tile: scores [ROWS, WIDTH >= blocks], one row within a warp where it
    fits. Few scores of future blocks are read, and none of them counts.
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
    near = (block // VECTOR <= current[:, None] // VECTOR) & (block < blocks)  # so that loads stay wide
    x = tl.load(row[:, None] + block.to(tl.int64) * stride_scores[3], mask=near & exists[:, None], other=0.0)
    forced = visible & ((block < first) | (block > current[:, None] - local))
    key = tl.where(forced, FORCED, tl.where(visible, ordered(x), EXCLUDED))

    count = tl.sum((key > EXCLUDED).to(tl.int32), 1)
    wanted = tl.minimum(count, n)
    threshold = nth_largest(key, count, n)[:, None]
    above, equal = key > threshold, key == threshold
    missing = (wanted - tl.sum(above.to(tl.int32), 1))[:, None]
    before = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 1)
    equals = before >> 16
    place = (before & 0xFFFF) + tl.minimum(equals, missing) - 1
    out = (chosen + b * stride_chosen[0] + s * stride_chosen[1] + g * stride_chosen[2])[:, None]
    tl.store(out + place, block + tl.zeros_like(place), mask=above | (equal & (equals <= missing)))
    j = tl.arange(0, NP)[None, :]
    tl.store(out + j, tl.full([ROWS, NP], -1, tl.int32), mask=(j >= wanted[:, None]) & (j < n) & exists[:, None])


def top_n(
    scores: Tensor,
    chosen: Tensor,
    block_size: int,
    first: int,
    local: int,
    start: int,
    q_pos: Tensor | None = None,
    *,
    rows: int | None = None,
    warps: int | None = None,
) -> None:
    """Write the best blocks of every row to `chosen`; results are bit-equal to `nsa_sel.core.scores.sorted_blocks`.

    Args:
        scores: [B,S,G,blocks], float16, bfloat16 or float32, any strides, at most MOST_BLOCKS blocks.
        chosen: [B,S,G,n] int32, with a contiguous last dimension.
        block_size: keys of a block.
        first, local: blocks that are always among the n; together at most n.
        start: the position of row 0 where q_pos is None; row s is at start + s.
        q_pos: [B,S] int32 or int64, positions of the rows.
        rows, warps: of a program.
    """
    B, S, G, blocks = scores.shape
    if chosen.numel() == 0:
        return
    if blocks == 0:
        chosen.fill_(-1)
        return
    width = tile_size(blocks)
    rows = max(1, min(4, PER_WARP // width)) if rows is None else rows
    warps = max(1, min(16, rows * width // PER_WARP)) if warps is None else warps
    n = chosen.shape[3]
    _kernel(block_size, rows, width, tile_size(n, 1), warps).launch(
        -(-B * S * G // rows),
        (scores, q_pos, chosen),
        (
            scores.stride(), (0, 0) if q_pos is None else q_pos.stride(), chosen.stride()[:3],
            start, B * S * G, S, G, blocks, n, first, local,
        ),
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _kernel(block_size: int, rows: int, width: int, places: int, warps: int) -> Kernel:
    return Kernel(top_n_kernel, BLOCK_SIZE=block_size, ROWS=rows, WIDTH=width, NP=places, num_warps=warps)
