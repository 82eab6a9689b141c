"""Count the keys that kernels load, from a call's ranges, for debug events. All functions synchronize with the
device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.core.call import Call


class Lists(NamedTuple):
    """Every (tile of rows, batch entry and group, tile of keys) in which a row selects a key, in this order. Fields are
    [lists]."""

    number: Tensor  # (tile of rows * B * G + b * G + g) * tiles of keys + tile of keys
    rows: Tensor  # rows that select any of its keys, counted once per block
    keys: Tensor  # keys from the first of the tile to the last that any row selects
    selected: Tensor  # keys that the rows select, summed over rows


def lists_of(call: Call, tokens: int, width: int, order: Tensor | None = None) -> Lists:
    """Return the lists for tiles of `tokens` rows and of `width` keys; `width` divides the block size.

    order: [B,S,G], the rows' order in which tiles take adjacent rows; by default s.
    """
    start, end = call.clamped_ranges()
    B, S, G, _ = start.shape
    block = call.selection.block_size
    assert block is not None, "only backends of whole blocks tile rows"
    first = start.unsqueeze(-1) + torch.arange(0, block, width, device=start.device)
    length = torch.minimum(end.unsqueeze(-1), first + width) - first
    pair = torch.arange(B * G, device=start.device).view(B, 1, G, 1, 1)
    if order is None:
        order = torch.arange(S, device=start.device).view(1, S, 1)
    tile = (order // tokens)[..., None, None]
    number = (tile * B * G + pair) * -(-call.S_kv // width) + first // width
    real = length > 0
    number, inverse, rows = torch.unique(number[real], return_inverse=True, return_counts=True)
    zeros = torch.zeros_like(number)
    keys = zeros.scatter_reduce(0, inverse, length[real], "amax")
    return Lists(number, rows, keys, zeros.scatter_add(0, inverse, length[real]))


def union_keys(call: Call, tokens: int, order: Tensor | None = None) -> int:
    """Return how many keys tiles of `tokens` rows (see `lists_of`) load: each tile loads the union of its rows' keys
    once."""
    assert call.selection.block_size is not None, "only backends of whole blocks tile rows"
    return int(lists_of(call, tokens, call.selection.block_size, order).keys.sum())


def piecewise_keys(call: Call, width: int, section: int, pairs: int, piece: int) -> int:
    """Return how many keys tiles of `width` keys load: each once per piece of `piece` rows that its list overlaps.

    The lists of one section of rows and of `pairs` (batch entry, group) pairs are consecutive.
    """
    B, _, G = call.q.shape[:3]
    lists = lists_of(call, section, width)
    at = lists.number // -(-call.S_kv // width)
    unit = at // (B * G) * -(-B * G // pairs) + at % (B * G) // pairs
    begin = lists.rows.cumsum(0) - lists.rows
    begin -= begin[torch.searchsorted(unit, unit)]
    visits = (begin + lists.rows - 1) // piece - begin // piece + 1
    return int(torch.minimum(visits * lists.keys, lists.selected).sum())
