"""The selection turned round: for every KV tile, the (row, range) pairs that reach into it, in ascending order of rows.

A stable sort by tile gives each tile's list in a fixed order, so that sums over it are bit-equal from run to run. All sizes are
static bounds: building and using the plan never reads the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.call import Call
from nsa_sel.errors import BackendError


class Inverse(NamedTuple):
    """entries [capacity]: row * n + i of range i, row = (b*S + s)*G + g, grouped by tile; tile (b*G + g)*tiles + j holds keys
    [j*width, (j+1)*width) of that batch entry and group, and owns entries[offsets[tile] : offsets[tile + 1]]."""

    entries: Tensor
    offsets: Tensor  # [B*G*tiles + 1]
    width: int  # keys a tile
    tiles: int  # KV tiles of one batch entry and group
    reach: int  # the most entries that one range may have


class Items(NamedTuple):
    """Each tile's list cut into items of at most `size` entries, so that a block which every row chose is shared by many programs."""

    tile: Tensor  # [most] the tile of each item
    offsets: Tensor  # [B*G*tiles + 1] items before each tile
    size: int


def inverse(call: Call, width: int) -> Inverse:
    """The plan for tiles of `width` keys, remembered in the selection."""
    plan: Inverse = _remembered(call, ("inverse", width), lambda: _build(call, width))
    return plan


def items(call: Call, plan: Inverse, size: int) -> Items:
    """The plan's lists cut into items of at most `size` entries, remembered in the selection."""
    cut: Items = _remembered(call, ("items", plan.width, size), lambda: _cut(plan, size))
    return cut


def _remembered(call: Call, key: tuple[object, ...], build: Callable[[], Any]) -> Any:
    # The lists depend on the causal clamp; only without other positions do forward, backward and other layers share it.
    if call.q_pos is not None:
        return build()
    return call.selection.plan((*key, tuple(call.k.shape[:3])), build)


def _build(call: Call, width: int) -> Inverse:
    B, S, G, n = call.selection.ranges.shape[:4]
    S_kv = call.k.shape[2]
    tiles = -(-S_kv // width)
    selection = call.selection
    block = selection.block_size
    if block is not None and (width % block == 0 or block % width == 0):
        reach = -(-block // width)  # a whole block never straddles a tile
    else:
        reach = min(tiles, -(-selection.length_bound(S_kv) // width) + 1)
    capacity = B * S * G * n * reach
    if capacity * 24 > max(call.settings.workspace_bytes, 1 << 20):
        raise BackendError(
            f"the list of rows of every KV tile needs {capacity * 24} bytes, because any of the {n} ranges of a row may span"
            f" {reach} tiles; allowed: {call.settings.workspace_bytes} (runtime.workspace_bytes). Remedy: build the Selection from"
            " blocks, pass max_length=, call selection.measure(), or raise runtime.workspace_bytes."
        )
    start, end = call.clamped_ranges()
    first = start // width
    bg = torch.arange(B, device=start.device)[:, None, None, None] * G + torch.arange(G, device=start.device)[:, None]
    nowhere = B * G * tiles
    step = torch.arange(reach, device=start.device)
    reached = first.unsqueeze(-1) + step
    inside = (end > start).unsqueeze(-1) & (reached * width < end.unsqueeze(-1))
    tile = torch.where(inside, bg.unsqueeze(-1) * tiles + reached, nowhere).flatten()
    sorted_tile, order = torch.sort(tile.int() if nowhere < 2**31 - 1 else tile, stable=True)
    offsets = torch.searchsorted(sorted_tile, torch.arange(nowhere + 1, device=tile.device, dtype=sorted_tile.dtype))
    entries = order if reach == 1 else order // reach
    return Inverse(entries.int() if capacity < 2**31 else entries, offsets, width, tiles, reach)


def most_items(plan: Inverse, size: int, pairs: int, entries_each: int) -> int:
    """A static bound on the items of `pairs` (batch entry, group) pairs that have at most `entries_each` entries."""
    return pairs * (-(-entries_each // size) + min(plan.tiles, entries_each))


def _cut(plan: Inverse, size: int) -> Items:
    counts = plan.offsets.diff()
    items_before = torch.nn.functional.pad(torch.cumsum((counts + size - 1) // size, 0), (1, 0))
    all_tiles = counts.numel()
    most = -(-plan.entries.numel() // size) + min(all_tiles, plan.entries.numel())
    numbers = torch.arange(most, device=counts.device, dtype=items_before.dtype)
    tile = torch.searchsorted(items_before, numbers, right=True) - 1
    return Items(tile.clamp(max=all_tiles - 1), items_before, size)
