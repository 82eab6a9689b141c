"""Positions, slots and block tables of a step, computed on the host and copied to the device in one transfer.

A slot is the index of a key in a pool: page * page_size + offset. Each pool has one extra page at the end that no row
reads. Writes of rows without a token, and of compressed keys that are not complete, go there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsa_sel.caching.sequences import CachedSequence

Index = npt.NDArray[np.int64]
ALL_KEYS = (1 << 31) - 1  # window of `MSAttention`, which has none: no page of recent keys is released


class StepSizes(NamedTuple):
    """Sizes of a step, and of the cache's pages and compressed keys."""

    B: int  # sequences
    S: int  # rows of each sequence
    table_pages: int  # entries of a sequence's block table
    pages: int  # of all keys
    recent_pages: int  # of the most recent keys
    page_size: int
    compress_block: int
    compress_stride: int
    window: int

    @property
    def new_pieces(self) -> int:
        """Maximum number of pieces of compress_stride keys that S new keys complete."""
        return -(-self.S // self.compress_stride)

    @property
    def covered_pieces(self) -> int:
        """Number of pieces that a compressed key covers."""
        return self.compress_block // self.compress_stride

    @property
    def pieces_per_page(self) -> int:
        """Number of pieces in a page."""
        return self.page_size // self.compress_stride

    @property
    def last_keys(self) -> int:
        """Number of recent keys that a sequence may need: those of the window, or those that a compressed key covers."""
        return max(self.window, self.compress_block)

    @property
    def recent_table_pages(self) -> int:
        """Number of pages that hold the recent keys of S rows."""
        return min(self.table_pages, (self.last_keys + self.S - 2) // self.page_size + 2)


class StepTensors(NamedTuple):
    """Tensors of a step on the device, or the same arrays on the host. All lie in one buffer.

    Attributes:
        position: [B,S] int64, position of each row in its sequence. 0 for a row without a token.
        slot: [B,S] int64, slot of each row's key among all keys.
        recent_slot: [B,S] int64, slot of each row's key among the recent keys.
        covered: [B,(new_pieces + covered_pieces - 1) * compress_stride] int64, slots of the recent keys to compress.
        compressed_slot: [B,new_pieces] int64, slots of the new compressed keys, counted in pieces. A key goes to its
            last piece.
        first_new: [B,2] int32: index of the first new key in `covered`, and the offset from such an index to a row of
            the step.
        lengths: [B] int32, keys of each sequence, including the new ones.
        recent_lengths: [B] int32, keys from the first page of the recent keys on. 0 for a sequence without new tokens.
        table: [B,table_pages] int32, pages of each sequence.
        recent_table: [B,recent_table_pages] int32, pages of its recent keys.
        window_ranges: [B,S,2] int32, each row's window, counted from the first page of the recent keys.
        is_token: [B,S] bool, False for rows without a token.
    """

    position: Any
    slot: Any
    recent_slot: Any
    covered: Any
    compressed_slot: Any
    first_new: Any
    lengths: Any
    recent_lengths: Any
    table: Any
    recent_table: Any
    window_ranges: Any
    is_token: Any


def shapes_of(sizes: StepSizes) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every field of `StepTensors`."""
    B, S, pieces = sizes.B, sizes.S, sizes.new_pieces
    covered = (pieces + sizes.covered_pieces - 1) * sizes.compress_stride
    wide = {"position": (B, S), "slot": (B, S), "recent_slot": (B, S), "covered": (B, covered), "compressed_slot": (B, pieces)}
    narrow = {
        "first_new": (B, 2), "lengths": (B,), "recent_lengths": (B,), "table": (B, sizes.table_pages),
        "recent_table": (B, sizes.recent_table_pages), "window_ranges": (B, S, 2),
    }  # fmt: skip
    fields = {name: (shape, torch.int64) for name, shape in wide.items()} | {name: (shape, torch.int32) for name, shape in narrow.items()}
    return fields | {"is_token": ((B, S), torch.bool)}


def allocate(sizes: StepSizes, device: torch.device, pinned: bool = False) -> tuple[Tensor, StepTensors]:
    """Return a uint8 buffer for the tensors of a step, and the tensors in it, each aligned to 16 bytes."""
    shapes = shapes_of(sizes)
    bytes_of = {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    with torch.inference_mode(False):  # an inference tensor could not be written to outside of inference mode
        whole = torch.empty(sum(-(-size // 16) for size in bytes_of.values()) * 16, dtype=torch.uint8, device=device, pin_memory=pinned)
    fields, at = {}, 0
    for name, (shape, dtype) in shapes.items():
        fields[name] = whole[at : at + bytes_of[name]].view(dtype).view(shape)
        at += -(-bytes_of[name] // 16) * 16
    return whole, StepTensors(**fields)


def fill(to: StepTensors, sizes: StepSizes, sequences: list[CachedSequence], tokens: list[int]) -> None:
    """Fill the host arrays of a step. The new tokens of a sequence are its last rows.

    Args:
        to: arrays to fill. Batch entries beyond the given sequences get no tokens.
        sizes: of the step.
        sequences: the sequences, whose lengths already include the new tokens.
        tokens: number of new tokens of each sequence.
    """
    B, S, page_size, stride = sizes.B, sizes.S, sizes.page_size, sizes.compress_stride
    length, new, base = (np.zeros(B, np.int64) for _ in range(3))
    to.table.fill(sizes.pages)
    to.recent_table.fill(sizes.recent_pages)
    for b, (sequence, count) in enumerate(zip(sequences, tokens, strict=True)):
        length[b], new[b], base[b] = sequence.length, count, sequence.recent.first * page_size
        held = sequence.all.held()
        to.table[b, : len(held)] = held
        if count:  # without new tokens it may still hold more recent keys than the table has entries
            recent = sequence.recent.held()
            to.recent_table[b, : len(recent)] = recent
    to.lengths[:], to.recent_lengths[:] = length, np.where(new, length - base, 0)

    position = length[:, None] + np.arange(-S, 0)
    exists = position >= (length - new)[:, None]
    to.position[:], to.is_token[:] = np.where(exists, position, 0), exists
    to.slot[:] = _slots(to.table, sizes.pages, position, exists, page_size)
    recent_position = position - base[:, None]
    to.recent_slot[:] = _slots(to.recent_table, sizes.recent_pages, recent_position, exists, page_size)
    low = np.maximum(position + 1 - sizes.window, 0) - base[:, None]
    to.window_ranges[:] = np.where(exists[..., None], np.stack((low, recent_position + 1), -1), 0)

    first = (length - new)[:, None] // stride
    piece = first + np.arange(sizes.new_pieces)  # pieces that may be complete now
    complete = (piece >= sizes.covered_pieces - 1) & ((piece + 1) * stride <= length[:, None])
    to.compressed_slot[:] = _slots(to.table, sizes.pages, piece, complete, sizes.pieces_per_page)
    begin = (first - sizes.covered_pieces + 1) * stride  # position of the first key of `covered`
    to.first_new[:] = np.concatenate(((length - new)[:, None] - begin, begin - length[:, None] + S), 1)
    key = begin + np.arange(to.covered.shape[1])
    present = (new[:, None] > 0) & (key >= base[:, None]) & (key < length[:, None])
    to.covered[:] = _slots(to.recent_table, sizes.recent_pages, key - base[:, None], present, page_size)


def _slots(table: npt.NDArray[np.int32], pages: int, position: Index, exists: npt.NDArray[np.bool_], page_size: int) -> Index:
    """Return the slots [B,N] of positions [B,N]. Positions that do not exist get the first slot of the extra page."""
    page, inside = np.divmod(np.where(exists, position, 0), page_size)
    return np.where(exists, np.take_along_axis(table, page, 1).astype(np.int64) * page_size + inside, pages * page_size)
