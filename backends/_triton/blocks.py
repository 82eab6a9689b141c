"""Sort the blocks of rows and merge equal ones: plans of triton-tile (`block_union`) and of dK/dV (`merged`).

    block_union    for each tile of TQ adjacent rows, the union of their blocks and which rows select each block. Blocks
                   that every row of the tile sees up to their last key come first; the few blocks that the causal clamp
                   cuts for some row come last.
    merged         blocks smaller than a tensor-core tile as tiles of keys with one bit per block (dkdv.py). A row that
                   selects several small blocks of a tile is then listed once for the tile, and its products are masked.
                   Otherwise each of its blocks would load the row's q and do, and multiply them by the whole tile.

One program sorts the blocks of one tile or row, so building a plan never synchronizes and costs O(rows * n).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.arguments import plan_sizes, position_strides
from nsa_sel.backends._triton.kernel import cached_kernel
from nsa_sel.backends._triton.key_to_rows import run_ends
from nsa_sel.backends._triton.rows import load_range, row_limit
from nsa_sel.backends._triton.softmax import larger
from nsa_sel.backends._triton.tiles import MIN_TILE, tile_size
from nsa_sel.backends.launcher.buffers import bits_dtype, unwritten
from nsa_sel.backends.launcher.replay import kept_plan
from nsa_sel.core.call import Call
from nsa_sel.errors import BackendError
from nsa_sel.selection import Selection

MOST_ROWS = 64  # most rows per tile: one bit each in an int64, and six bits of the sort key
MOST_BLOCKS = 2**31 // MOST_ROWS - 1  # the other bits of the sort key hold the block


class BlockUnion(NamedTuple):
    """Block lists of all tiles. Tile (b*G + g)*tiles + i holds rows [i*TQ, (i+1)*TQ) of (b, g); its list starts at tile
    * capacity. G counts the groups of the selection."""

    blocks: Tensor  # [B*G*tiles * capacity] int32, block numbers
    rows: Tensor  # [B*G*tiles * capacity], bit r: row i*TQ + r selects the block; smallest dtype with TQ bits
    counts: Tensor  # [B*G*tiles, 2] int32: number of blocks that are whole for every row, number of all blocks
    tiles: int  # per batch entry and group
    capacity: int  # entries per list, TQ * n
    programs: int  # B*G*tiles


@triton.jit
def union_of_bits(bit, first, i):
    """Return at the last element of each run of equal blocks the union of the run's bits [N]; first: `run_ends`.

    A row names a block once, so bits never carry within a run: a difference of prefix sums (modulo 2^64) is the union.
    """
    sums = tl.cumsum(bit, 0)
    run = tl.associative_scan(tl.where(first, i, 0), 0, larger)
    return sums - tl.gather(sums - bit, run, 0)


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
    first, last = run_ends(block, real, e, ENTRIES)
    chosen = union_of_bits(tl.where(real, tl.full([ENTRIES], 1, tl.int64) << (key & 63).to(tl.int64), 0), first, e)

    ordinal = tl.cumsum(first.to(tl.int32), 0) - 1
    out = pid.to(tl.int64) * (TQ * N) + ordinal
    tl.store(blocks + out, block, mask=last)
    tl.store(rows + out, chosen, mask=last)
    tl.store(counts + pid * 2, tl.sum((first & ((block + 1) * BLOCK <= lowest)).to(tl.int32), 0))
    tl.store(counts + pid * 2 + 1, tl.sum(first.to(tl.int32), 0))


def tile_bytes(call: Call, TQ: int) -> int:
    """Return the bytes of the plan for one tile of rows of all groups."""
    return call.selection.groups * TQ * call.selection.n * (torch.int32.itemsize + bits_dtype(TQ).itemsize)


def block_union(call: Call, TQ: int) -> BlockUnion:
    """Return the plan for tiles of TQ <= 64 rows, cached in the selection."""
    plan: BlockUnion = kept_plan(call, ("block_union",), _union_plan, TQ).value
    return plan


def _union_plan(call: Call, TQ: int) -> BlockUnion:
    (B, S), G, n = call.q.shape[:2], call.selection.groups, call.selection.n
    block, S_kv = call.selection.block_size, call.k.shape[2]
    assert block is not None, "Limits.block_aligned_only keeps other selections out"
    if -(-S_kv // block) > MOST_BLOCKS:
        raise BackendError(f"k has {-(-S_kv // block)} blocks of {block} keys; allowed: {MOST_BLOCKS}. Remedy: use a larger block.")
    tiles = -(-S // TQ)
    blocks = unwritten(call.q, B * G * tiles * TQ * n, dtype=torch.int32)
    rows = unwritten(call.q, B * G * tiles * TQ * n, dtype=bits_dtype(TQ))
    counts = unwritten(call.q, B * G * tiles, 2, dtype=torch.int32)
    tensors = (call.disjoint_ranges(), call.q_pos, blocks, rows, counts)
    kernel = cached_kernel(union_kernel, N=n, BLOCK=block, TQ=TQ, **_sorting(TQ * n))
    kernel.launch(B * G * tiles, tensors, (position_strides(call), plan_sizes(call), tiles))
    return BlockUnion(blocks, rows, counts, tiles, TQ * n, B * G * tiles)


def _sorting(entries: int) -> dict[str, int]:
    """Return the tile that holds the entries a program sorts, and its warps."""
    size = tile_size(entries, 1)
    return {"ENTRIES": size, "num_warps": max(1, min(8, size // 128))}


MOST_MERGED = 2048  # most ranges per row that a program sorts
MOST_BITS = 16  # most blocks per tile


@triton.jit
def merge_kernel(
    ranges, q_pos, tiles, bits, stride_pos, sizes,
    N: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Sort one row's N blocks and merge those of one tile into a range of the tile with their bits. Empty ranges pad to
    M.

    Grid: one program per row. Locals are [ENTRIES].
    Blocks before key 0 and past the row's limit are dropped. The former have no bit, and a row must not be listed for a
    tile that it does not see: its q and do may be NaN, and 0 * NaN would reach dk.
    """
    NOWHERE: tl.constexpr = 2147483647
    EACH: tl.constexpr = WIDTH // BLOCK
    S, S_kv, G = sizes
    row = tl.program_id(0).to(tl.int64)
    limit = row_limit(q_pos, stride_pos, row // G // S, row // G % S, S, S_kv)
    i = tl.arange(0, ENTRIES)
    start = tl.load(ranges + (row * N + i) * 2, mask=i < N, other=0)
    end = tl.load(ranges + (row * N + i) * 2 + 1, mask=i < N, other=0)
    key = tl.sort(tl.where((start >= 0) & (end > start) & (start < limit), start // BLOCK, NOWHERE).to(tl.int32))
    real = key != NOWHERE
    tile = key // EACH
    first, last = run_ends(tile, real, i, ENTRIES)
    chosen = union_of_bits(tl.where(real, tl.full([ENTRIES], 1, tl.int32) << (key % EACH), 0), first, i)
    out = row * M + tl.cumsum(first.to(tl.int32), 0) - 1
    tl.store(tiles + out * 2, tile * WIDTH, mask=last)
    tl.store(tiles + out * 2 + 1, (tile + 1) * WIDTH, mask=last)
    tl.store(bits + out, chosen, mask=last)
    unused = (i >= tl.sum(first.to(tl.int32), 0)) & (i < M)
    tl.store(tiles + (row * M + i) * 2, 0, mask=unused)
    tl.store(tiles + (row * M + i) * 2 + 1, 0, mask=unused)


def merged(call: Call, width: int) -> tuple[Call, Tensor | None]:
    """Return the call over tiles of `width` keys, and bits [B,S,G,n] of the blocks that each of its ranges selects, with
    the groups of the selection.

    Calls over larger blocks or over ranges are returned unchanged, with None.
    """
    if not merges(call, width):
        return call, None
    selection, bits = kept_plan(call, ("merged_blocks",), _merged_selection, width).value
    return replace(call, selection=selection), bits


def merges(call: Call, width: int) -> bool:
    """Return whether `merged` converts the call."""
    block, n = call.selection.block_size, call.selection.n
    return block is not None and block < MIN_TILE and not width % block and width // block <= MOST_BITS and n <= MOST_MERGED


def most_tiles(call: Call, width: int) -> int:
    """Return the ranges per row of the call that `merged` returns."""
    return min(call.selection.n, -(-call.k.shape[2] // width))


def _merged_selection(call: Call, width: int) -> tuple[Selection, Tensor]:
    (B, S), G, n = call.q.shape[:2], call.selection.groups, call.selection.n
    block, most = call.selection.block_size, most_tiles(call, width)
    assert block is not None, "`merges` asks"
    tiles = torch.empty(B, S, G, most, 2, dtype=torch.int32, device=call.q.device)
    bits = torch.empty(B, S, G, most, dtype=torch.int32, device=call.q.device)
    tensors = (call.disjoint_ranges(), call.q_pos, tiles, bits)
    kernel = cached_kernel(merge_kernel, N=n, M=most, BLOCK=block, WIDTH=width, **_sorting(n))
    kernel.launch(B * S * G, tensors, (position_strides(call), plan_sizes(call)))
    return Selection(tiles, width, disjoint=True), bits
