"""What a step tells the device: positions, slots and tables of a batch, computed on the host and copied in one piece.

A slot is the number of a key among those of all pages: page * page_size + key. The page after a pool's last one takes what has no place:
rows without a token, compressed keys that do not exist yet. Nobody sees it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsa_sel.caching.sequences import Sequence

Index = npt.NDArray[np.int64]


class Sizes(NamedTuple):
    """Of a step, and of the cache's pages and compressed keys."""

    B: int  # sequences
    S: int  # rows of each
    room: int  # pages of a sequence
    pages: int
    recent_pages: int
    page_size: int
    compress_block: int
    compress_stride: int
    window: int

    @property
    def pieces(self) -> int:
        """The most pieces of compress_stride keys that S keys complete."""
        return -(-self.S // self.compress_stride)

    @property
    def reach(self) -> int:
        """Pieces that a compressed key covers."""
        return self.compress_block // self.compress_stride

    @property
    def page_pieces(self) -> int:
        """Pieces of a page."""
        return self.page_size // self.compress_stride

    @property
    def last_keys(self) -> int:
        """Keys of which a sequence may need the last ones: what a row sees in the window, or what a compressed key covers."""
        return max(self.window, self.compress_block)

    @property
    def recent_room(self) -> int:
        """Pages that hold the last keys of S rows."""
        return min(self.room, (self.last_keys + self.S - 2) // self.page_size + 2)


class Numbers(NamedTuple):
    """Tensors of a step on the device, or arrays of them on the host; all lie in one buffer.

    Attributes:
        position: [B,S] int64, of each row in its sequence; 0 for a row without a token.
        slot: [B,S] int64, where the key of each row goes.
        recent_slot: [B,S] int64, likewise among the last keys.
        covered: [B,(pieces + reach - 1) * compress_stride] int64, slots of the last keys from which compressed keys are made.
        compressed_slot: [B,pieces] int64, where these go, among the pieces of all pages: to that in which they end.
        fresh: [B,2] int32: the first of the keys of `covered` that is new, and what is to be added to a key's number to give its row.
        lengths: [B] int32, keys of each sequence, with those of the step.
        recent_lengths: [B] int32, those from the first page of the last keys on; 0 for a sequence without tokens.
        table: [B,room] int32, pages of each sequence.
        recent_table: [B,recent_room] int32, pages of its last keys.
        near: [B,S,2] int32, the range of each row in the window, counted from the first page of the last keys on.
        is_token: [B,S] bool.
    """

    position: Any
    slot: Any
    recent_slot: Any
    covered: Any
    compressed_slot: Any
    fresh: Any
    lengths: Any
    recent_lengths: Any
    table: Any
    recent_table: Any
    near: Any
    is_token: Any


def shapes_of(sizes: Sizes) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every field of `Numbers`."""
    B, S, pieces = sizes.B, sizes.S, sizes.pieces
    covered = (pieces + sizes.reach - 1) * sizes.compress_stride
    wide = {"position": (B, S), "slot": (B, S), "recent_slot": (B, S), "covered": (B, covered), "compressed_slot": (B, pieces)}
    narrow = {
        "fresh": (B, 2), "lengths": (B,), "recent_lengths": (B,), "table": (B, sizes.room), "recent_table": (B, sizes.recent_room),
        "near": (B, S, 2),
    }  # fmt: skip
    every = {name: (shape, torch.int64) for name, shape in wide.items()} | {name: (shape, torch.int32) for name, shape in narrow.items()}
    return every | {"is_token": ((B, S), torch.bool)}


def buffer(sizes: Sizes, device: torch.device, pinned: bool = False) -> tuple[Tensor, Numbers]:
    """Memory for a step's numbers, and the tensors in it, each of which begins at a multiple of 16 bytes."""
    shapes = shapes_of(sizes)
    bytes_of = {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    with torch.inference_mode(False):  # outside of the mode nothing could write to it again
        whole = torch.empty(sum(-(-size // 16) for size in bytes_of.values()) * 16, dtype=torch.uint8, device=device, pin_memory=pinned)
    fields, at = {}, 0
    for name, (shape, dtype) in shapes.items():
        fields[name] = whole[at : at + bytes_of[name]].view(dtype).view(shape)
        at += -(-bytes_of[name] // 16) * 16
    return whole, Numbers(**fields)


def write(to: Numbers, sizes: Sizes, sequences: list[Sequence], tokens: list[int]) -> None:
    """Fill arrays of the host; the sequences have grown by their tokens already. Entries of `to` beyond the sequences get no tokens.

    The new tokens of a sequence are its last rows.
    """
    B, S, page_size, stride = sizes.B, sizes.S, sizes.page_size, sizes.compress_stride
    length, new, base = (np.zeros(B, np.int64) for _ in range(3))
    to.table.fill(sizes.pages)
    to.recent_table.fill(sizes.recent_pages)
    for b, (sequence, count) in enumerate(zip(sequences, tokens, strict=True)):
        length[b], new[b], base[b] = sequence.length, count, sequence.recent.first * page_size
        held = sequence.all.held()
        to.table[b, : len(held)] = held
        if count:  # else it may still hold more of the last keys than rows of this step see
            recent = sequence.recent.held()
            to.recent_table[b, : len(recent)] = recent
    to.lengths[:], to.recent_lengths[:] = length, np.where(new, length - base, 0)

    position = length[:, None] + np.arange(-S, 0)
    exists = position >= (length - new)[:, None]
    to.position[:], to.is_token[:] = np.where(exists, position, 0), exists
    to.slot[:] = _slots(to.table, sizes.pages, position, exists, page_size)
    near = position - base[:, None]
    to.recent_slot[:] = _slots(to.recent_table, sizes.recent_pages, near, exists, page_size)
    low = np.maximum(position + 1 - sizes.window, 0) - base[:, None]
    to.near[:] = np.where(exists[..., None], np.stack((low, near + 1), -1), 0)

    first = (length - new)[:, None] // stride
    piece = first + np.arange(sizes.pieces)  # those that may be complete now
    complete = (piece >= sizes.reach - 1) & ((piece + 1) * stride <= length[:, None])
    to.compressed_slot[:] = _slots(to.table, sizes.pages, piece, complete, sizes.page_pieces)
    begin = (first - sizes.reach + 1) * stride  # the position of the first key of `covered`
    to.fresh[:] = np.concatenate(((length - new)[:, None] - begin, begin - length[:, None] + S), 1)
    key = begin + np.arange(to.covered.shape[1])
    present = (new[:, None] > 0) & (key >= base[:, None]) & (key < length[:, None])
    to.covered[:] = _slots(to.recent_table, sizes.recent_pages, key - base[:, None], present, page_size)


def _slots(table: npt.NDArray[np.int32], pages: int, position: Index, exists: npt.NDArray[np.bool_], page_size: int) -> Index:
    """[B,N] of positions [B,N]; of those that do not exist the first slot after the last page's."""
    page, inside = np.divmod(np.where(exists, position, 0), page_size)
    return np.where(exists, np.take_along_axis(table, page, 1).astype(np.int64) * page_size + inside, pages * page_size)
