"""Convert selections of blocks smaller than a tensor-core tile to selections of KV tiles with one bit per block, for
dkdv.py.

A row that selects several small blocks of a tile is then listed once for the tile, and its products are masked.
Otherwise each of its blocks would load the row's q and do and multiply them by the whole tile.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._replay import kept_plan
from nsa_sel.backends._triton.arguments import position_strides, sizes
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.rows import row_limit
from nsa_sel.backends._triton.softmax import larger
from nsa_sel.backends._triton.tiles import MIN_TILE, tile_size
from nsa_sel.core.call import Call
from nsa_sel.selection import Selection

SORTED = 2048  # most ranges per row that a program sorts
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
    first = real & ((i == 0) | (tl.gather(tile, tl.maximum(i - 1, 0), 0) != tile))
    last = real & ((i == ENTRIES - 1) | (tl.gather(tile, tl.minimum(i + 1, ENTRIES - 1), 0) != tile))
    # A row names a block once, so bits never carry within a run: a difference of prefix sums is the union of bits.
    bit = tl.where(real, tl.full([ENTRIES], 1, tl.int32) << (key % EACH), 0)
    sums = tl.cumsum(bit, 0)
    run = tl.associative_scan(tl.where(first, i, 0), 0, larger)
    chosen = sums - tl.gather(sums - bit, run, 0)
    out = row * M + tl.cumsum(first.to(tl.int32), 0) - 1
    tl.store(tiles + out * 2, tile * WIDTH, mask=last)
    tl.store(tiles + out * 2 + 1, (tile + 1) * WIDTH, mask=last)
    tl.store(bits + out, chosen, mask=last)
    unused = (i >= tl.sum(first.to(tl.int32), 0)) & (i < M)
    tl.store(tiles + (row * M + i) * 2, 0, mask=unused)
    tl.store(tiles + (row * M + i) * 2 + 1, 0, mask=unused)


def merged(call: Call, width: int) -> tuple[Call, Tensor | None]:
    """Return the call over tiles of `width` keys, and bits [B,S,G,n] of the blocks that each of its ranges selects.

    Calls over larger blocks or over ranges are returned unchanged, with None.
    """
    if not merges(call, width):
        return call, None
    selection, bits = kept_plan(call, ("merged_blocks",), _build, width).value
    return replace(call, selection=selection), bits


def merges(call: Call, width: int) -> bool:
    """Return whether `merged` converts the call."""
    block, n = call.selection.block_size, call.selection.n
    return block is not None and block < MIN_TILE and not width % block and width // block <= MOST_BITS and n <= SORTED


def most_tiles(call: Call, width: int) -> int:
    """Return the ranges per row of the call that `merged` returns."""
    return min(call.selection.n, -(-call.k.shape[2] // width))


def _build(call: Call, width: int) -> tuple[Selection, Tensor]:
    B, S, G, n = call.selection.ranges.shape[:4]
    block, most = call.selection.block_size, most_tiles(call, width)
    assert block is not None, "`merges` asks"
    tiles = torch.empty(B, S, G, most, 2, dtype=torch.int32, device=call.q.device)
    bits = torch.empty(B, S, G, most, dtype=torch.int32, device=call.q.device)
    tensors = (call.disjoint_ranges(), call.q_pos, tiles, bits)
    _merge(n, most, block, width).launch(B * S * G, tensors, (position_strides(call), sizes(call)))
    return Selection(tiles, width, disjoint=True), bits


@functools.lru_cache(REMEMBERED)
def _merge(n: int, most: int, block: int, width: int) -> Kernel:
    entries = tile_size(n, 1)
    return Kernel(merge_kernel, N=n, M=most, BLOCK=block, WIDTH=width, ENTRIES=entries, num_warps=max(1, min(8, entries // 128)))
