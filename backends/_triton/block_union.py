"""Build the plan of triton-tile: for each tile of adjacent rows, the union of their blocks and which rows select each
block.

A tile holds TQ rows of one batch entry and group. Its list names every block once, in ascending order, with one bit for
each row that selects it. Blocks that every row of the tile sees up to their last key come first; the few blocks that
the causal clamp cuts for some row come last. One program sorts the entries of one tile, so building never synchronizes
and costs O(rows * n).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._buffers import bits_dtype, unwritten
from nsa_sel.backends._replay import kept_plan
from nsa_sel.backends._triton.arguments import position_strides, sizes
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.rows import load_range, row_limit
from nsa_sel.backends._triton.softmax import larger
from nsa_sel.backends._triton.tiles import tile_size
from nsa_sel.core.call import Call
from nsa_sel.errors import BackendError

MOST_ROWS = 64  # most rows per tile: one bit each in an int64, and six bits of the sort key
MOST_BLOCKS = 2**31 // MOST_ROWS - 1  # the other bits of the sort key hold the block


class BlockUnion(NamedTuple):
    """Block lists of all tiles. Tile (b*G + g)*tiles + i holds rows [i*TQ, (i+1)*TQ) of (b, g); its list starts at tile
    * capacity."""

    blocks: Tensor  # [B*G*tiles * capacity] int32, block numbers
    rows: Tensor  # [B*G*tiles * capacity], bit r: row i*TQ + r selects the block; smallest dtype with TQ bits
    counts: Tensor  # [B*G*tiles, 2] int32: number of blocks that are whole for every row, number of all blocks
    tiles: int  # per batch entry and group
    capacity: int  # entries per list, TQ * n
    programs: int  # B*G*tiles


@triton.jit
def union_kernel(
    ranges, q_pos, blocks, rows, counts, stride_pos, sizes, tiles,
    N: tl.constexpr, BLOCK: tl.constexpr, TQ: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Sort the (block, row) pairs of one tile and merge equal blocks into one entry with the bits of their rows.

    Grid: one program per tile of TQ rows. Locals are [ENTRIES], a power of two of at least TQ * N.
    Sort key: block * 64 + row, or NOWHERE for empty ranges, which sort to the end.
    """
    NOWHERE: tl.constexpr = 2147483647
    S, S_kv, G = sizes
    pid = tl.program_id(0)
    i = pid % tiles
    b = (pid // tiles // G).to(tl.int64)
    g = pid // tiles % G
    e = tl.arange(0, ENTRIES)
    r = e // N
    s = i * TQ + r
    listed = (r < TQ) & (s < S)
    limit = row_limit(q_pos, stride_pos, b, tl.minimum(s, S - 1), S, S_kv)
    lowest = tl.min(tl.where(listed, limit, NOWHERE), 0)
    entry = ((b * S + s) * G + g) * N + e % N
    start, end = load_range(ranges + 2 * entry, limit, listed)
    key = tl.sort(tl.where(end > start, start // BLOCK * 64 + r, NOWHERE))

    block = key >> 6
    real = key != NOWHERE
    first = real & ((e == 0) | (tl.gather(block, tl.maximum(e - 1, 0), 0) != block))
    last = real & ((e == ENTRIES - 1) | (tl.gather(block, tl.minimum(e + 1, ENTRIES - 1), 0) != block))
    # A row names a block once, so bits never carry within a run: a difference of prefix sums (modulo 2^64) is the union
    # of bits.
    bit = tl.where(real, tl.full([ENTRIES], 1, tl.int64) << (key & 63).to(tl.int64), 0)
    sums = tl.cumsum(bit, 0)
    run = tl.associative_scan(tl.where(first, e, 0), 0, larger)
    chosen = sums - tl.gather(sums - bit, run, 0)

    ordinal = tl.cumsum(first.to(tl.int32), 0) - 1
    out = pid.to(tl.int64) * (TQ * N) + ordinal
    tl.store(blocks + out, block, mask=last)
    tl.store(rows + out, chosen, mask=last)
    tl.store(counts + pid * 2, tl.sum((first & ((block + 1) * BLOCK <= lowest)).to(tl.int32), 0))
    tl.store(counts + pid * 2 + 1, tl.sum(first.to(tl.int32), 0))


def tile_bytes(call: Call, TQ: int) -> int:
    """Return the bytes of the plan for one tile of rows of all groups."""
    return call.q.shape[2] * TQ * call.selection.n * (torch.int32.itemsize + bits_dtype(TQ).itemsize)


def block_union(call: Call, TQ: int) -> BlockUnion:
    """Return the plan for tiles of TQ <= 64 rows, cached in the selection."""
    plan: BlockUnion = kept_plan(call, ("block_union",), _build, TQ).value
    return plan


def _build(call: Call, TQ: int) -> BlockUnion:
    B, S, G, n = call.selection.ranges.shape[:4]
    block, S_kv = call.selection.block_size, call.k.shape[2]
    assert block is not None, "Limits.block_aligned_only keeps other selections out"
    if -(-S_kv // block) > MOST_BLOCKS:
        raise BackendError(f"k has {-(-S_kv // block)} blocks of {block} keys; allowed: {MOST_BLOCKS}. Remedy: use a larger block.")
    tiles = -(-S // TQ)
    blocks = unwritten(call.q, B * G * tiles * TQ * n, dtype=torch.int32)
    rows = unwritten(call.q, B * G * tiles * TQ * n, dtype=bits_dtype(TQ))
    counts = unwritten(call.q, B * G * tiles, 2, dtype=torch.int32)
    tensors = (call.disjoint_ranges(), call.q_pos, blocks, rows, counts)
    _union(n, block, TQ).launch(B * G * tiles, tensors, (position_strides(call), sizes(call), tiles))
    return BlockUnion(blocks, rows, counts, tiles, TQ * n, B * G * tiles)


@functools.lru_cache(REMEMBERED)
def _union(n: int, block: int, TQ: int) -> Kernel:
    entries = tile_size(TQ * n, 1)
    return Kernel(union_kernel, N=n, BLOCK=block, TQ=TQ, ENTRIES=entries, num_warps=max(1, min(8, entries // 128)))
