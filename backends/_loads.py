"""Keys that kernels load, counted from the ranges of a call: what events of reads tell beside what the rows select.

Only for debugging: all of these read the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nsa_sel.core.call import Call


class Lists(NamedTuple):
    """Every (tile of rows, pair of batch entry and group, tile of keys) of which a row selects any key, in this order; fields [lists]."""

    number: Tensor  # (tile of rows * B * G + b * G + g) * tiles of keys + tile of keys
    rows: Tensor  # that select any of its keys, a row once for each of its blocks
    keys: Tensor  # from the first of the tile to the last that any row selects
    selected: Tensor  # keys, summed over rows


def lists_of(call: Call, tokens: int, width: int) -> Lists:
    """The lists of tiles of `tokens` adjacent rows and of `width` keys, of a call whose whole blocks are multiples of that."""
    start, end = call.clamped_ranges()
    B, S, G, _ = start.shape
    block = call.selection.block_size
    assert block is not None, "a backend of whole blocks alone joins rows"
    first = start.unsqueeze(-1) + torch.arange(0, block, width, device=start.device)
    length = torch.minimum(end.unsqueeze(-1), first + width) - first
    pair = torch.arange(B * G, device=start.device).view(B, 1, G, 1, 1)
    tile = (torch.arange(S, device=start.device) // tokens).view(1, S, 1, 1, 1)
    number = (tile * B * G + pair) * -(-call.S_kv // width) + first // width
    real = length > 0
    number, inverse, rows = torch.unique(number[real], return_inverse=True, return_counts=True)
    zeros = torch.zeros_like(number)
    keys = zeros.scatter_reduce(0, inverse, length[real], "amax")
    return Lists(number, rows, keys, zeros.scatter_add(0, inverse, length[real]))


def union_keys(call: Call, tokens: int) -> int:
    """Keys that tiles of `tokens` adjacent rows load: of each tile those that any of its rows selects, once."""
    assert call.selection.block_size is not None, "a backend of whole blocks alone joins rows"
    return int(lists_of(call, tokens, call.selection.block_size).keys.sum())


def piecewise_keys(call: Call, width: int, section: int, pairs: int, piece: int) -> int:
    """Keys that visits of tiles of `width` keys load: a tile once for each piece of `piece` rows that its list lies in. The lists of a
    section of rows and of `pairs` pairs follow one another."""
    B, _, G = call.q.shape[:3]
    lists = lists_of(call, section, width)
    at = lists.number // -(-call.S_kv // width)
    unit = at // (B * G) * -(-B * G // pairs) + at % (B * G) // pairs
    begin = lists.rows.cumsum(0) - lists.rows
    begin -= begin[torch.searchsorted(unit, unit)]
    visits = (begin + lists.rows - 1) // piece - begin // piece + 1
    return int(torch.minimum(visits * lists.keys, lists.selected).sum())
