"""Invert the selection for blocks smaller than a tile of keys: list for every tile, once each, the rows that selected
any of its blocks.

A tile holds 64 / block_size blocks of similar popularity (kernels/order_blocks.cu), because a row selects few of
several adjacent blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import launch
from nsa_sel.backends.cupy_cuda.key_to_rows import LONGEST, SEGMENTS_PER_SM, KeyToRows, published, segment_length, sum_counts, with_parts
from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.backends.launcher.replay import kept_plan
from nsa_sel.core.call import Call
from nsa_sel.errors import BackendError

KEYS = 64  # of a tile
ENTRY_BYTES = 6  # a row, and its bits
CHUNK = 64  # rows of a CTA of count_rows.cu and list_rows.cu, as in block_tiles.cuh
MOST_TABLE = 1024  # tiles whose rows they find at once
SAMPLED = 8  # of so many rows one tells how popular blocks are


class BlockLists(NamedTuple):
    """`KeyToRows`, whose entries are rows, then `BlockTiles` (key_to_rows.cuh)."""

    entries: Tensor  # [capacity] int32; unwritten past the last list's end
    begins: Tensor  # [lists + 1] int64
    segments: Tensor  # [lists + 1] int64
    parts: Tensor  # [lists + 1] int64
    lists: int
    tiles: int
    reach: int
    segment: int
    chosen: Tensor  # [capacity] int16
    slots: Tensor  # [lists, blocks of a tile] int32

    def key_to_rows(self) -> KeyToRows:
        return KeyToRows(*self[:8])

    def block_tiles(self) -> tuple[Tensor, Tensor]:
        return self.chosen, self.slots


def block_lists_of(call: Call) -> BlockLists:
    """Return the lists of a call whose block size is less than 64 and divides 64."""
    B, _, G = call.q.shape[:3]
    tiles, capacity = -(-call.k.shape[2] // KEYS), _capacity(call)
    entries = capacity * call.groups_per_selection
    segment = segment_length(call, KEYS, entries, LONGEST, SEGMENTS_PER_SM, B * G * tiles, ENTRY_BYTES)
    lists: BlockLists = kept_plan(call, ("cupy-cuda block lists",), _build, capacity, segment).value
    return lists


def list_bytes(call: Call) -> tuple[int, bool]:
    """Return the bytes of the lists, and whether they fit the workspace."""
    (B, S), G = call.q.shape[:2], call.selection.groups
    counts, capacity = B * G * -(-call.k.shape[2] // KEYS) * -(-S // CHUNK), _capacity(call)
    needed = ENTRY_BYTES * capacity + 4 * counts
    return needed, needed <= max(call.settings.workspace_bytes, 1 << 20) and max(capacity, counts) < 2**31


def _capacity(call: Call) -> int:
    """Return a bound on the entries of all lists."""
    (B, S), G = call.q.shape[:2], call.selection.groups
    return B * G * S * min(call.selection.n, -(-call.k.shape[2] // KEYS))


def _build(call: Call, capacity: int, segment: int) -> BlockLists:
    q, on, size = call.q, call.q.get_device(), call.selection.block_size
    (B, S), G = call.q.shape[:2], call.selection.groups
    assert size is not None, "supports_tiles"
    tiles, blocks, chunks, sampled = (-(-x // y) for x, y in ((call.k.shape[2], KEYS), (call.k.shape[2], size), (S, CHUNK), (S, SAMPLED)))
    lists, (needed, fits) = B * G * tiles, list_bytes(call)
    if not fits:
        raise BackendError(
            f"the list of rows of every KV tile needs {needed} bytes; allowed: {call.settings.workspace_bytes} (runtime.workspace_bytes)."
            " Remedy: raise runtime.workspace_bytes."
        )
    popularity, places, slots = (unwritten(q, *x, dtype=torch.int32) for x in ((B * G, blocks), (B * G, blocks), (lists, KEYS // size)))
    entries, chosen = unwritten(q, capacity, dtype=torch.int32), unwritten(q, capacity, dtype=torch.int16)
    counts = unwritten(q, lists * chunks + published(lists), dtype=torch.int32)
    table = min(MOST_TABLE, 1 << max(6, (tiles - 1).bit_length()))  # of a few sizes: a kernel is compiled anew for each
    macros, problem = launch.integer_macros(SMALL_BLOCK=size, TABLE=table), launch.plan_problem(call, call.union_ranges())
    shared = CHUNK * (table // 2 + 1) * 4
    sampling = launch.integer_macros(SMALL_BLOCK=size, SAMPLED=SAMPLED)
    launch.clear(popularity.data_ptr(), 4 * B * G * blocks, on)
    launch.start("count_blocks.cu", sampling, on, B * G * sampled, 128, 0, blocks, sampled, popularity.data_ptr(), problem=problem)
    launch.start(
        "order_blocks.cu", sampling, on, B * G, 512, 0, popularity.data_ptr(), S, call.k.shape[2], blocks, tiles,
        *launch.pointers(places, slots),
    )  # fmt: skip
    numbers = (places.data_ptr(), blocks, tiles, chunks, counts.data_ptr())
    launch.start("count_rows.cu", macros, on, B * G * chunks, 512, shared, *numbers, published(lists) // 4, problem=problem)
    begins, segments, parts = sum_counts(counts, lists, tiles, chunks, with_parts(segment))
    launch.start(
        "list_rows.cu", macros, on, B * G * chunks, 512, shared, *numbers, *launch.pointers(begins, entries, chosen), problem=problem
    )  # fmt: skip
    return BlockLists(entries, begins, segments, parts, lists, tiles, 1, segment, chosen, slots)
