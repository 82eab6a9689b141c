"""Only the blocks that a rank's rows chose travel to it: which, how, where they lie then, and their gradients back to the owners.

A rank attends to a compact K and V: the blocks of other ranks that it was sent, in the order of positions, and behind them its own
slice, or of that too only what its rows chose, where they can't choose all of it: a long slice is not copied for a few rows. What a row
may see of a whole slice is decided by positions as ever; blocks that were picked are cut when they are mapped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from nsa_sel.selection import Selection


class Route(NamedTuple):
    """Who keeps room for how many blocks of whom: static numbers that all ranks know alike.

    slots[r][p]: blocks of rank p that rank r keeps room for, a batch entry and group; `keys`: of a rank's slice, whole blocks; own: the
    blocks of its slice that a rank may choose, or all.
    """

    slots: list[list[int]]
    rank: int
    block: int
    keys: int
    own: int

    @property
    def blocks(self) -> int:
        """Blocks of a rank's slice."""
        return self.keys // self.block

    @property
    def whole(self) -> bool:
        """Whether a rank's slice stands in its compact K as it is."""
        return self.own == self.blocks

    @property
    def incoming(self) -> list[int]:
        """Slots of this rank, by the rank that fills them."""
        return self.slots[self.rank]

    @property
    def outgoing(self) -> list[int]:
        """Slots that this rank fills, by the rank that has them."""
        return [row[self.rank] for row in self.slots]


class Travelled(NamedTuple):
    """What the backward pass must know of the forward's exchange: this rank's blocks that were sent, int64 [B,G,sum(route.outgoing)],
    and those that it picked of its own, [B,G,route.own], None where it has all; -1: none."""

    route: Route
    sent: Tensor
    picked: Tensor | None


class Chosen(NamedTuple):
    """The blocks of a rank's rows at positions [B,S]: that of each range, [B,S,G,n] int64, the number of all where a row sees nothing of
    it, and whether any row may read a block, [B,G,blocks] bool."""

    positions: Tensor
    of_ranges: Tensor
    wanted: Tensor


def chosen(ranges: Tensor, positions: Tensor, block: int, blocks: int) -> Chosen:
    """Of whole-block ranges [B,S,G,n,2], the rows at positions [B,S]."""
    B, S, G, n = ranges.shape[:4]
    start, end = ranges.long().unbind(-1)
    seen = (end > start) & (start >= 0) & (start <= positions[:, :, None, None]) & (start < blocks * block)
    index = torch.where(seen, start // block, blocks)
    wanted = torch.zeros(B, G, blocks + 1, dtype=torch.bool, device=ranges.device)
    wanted.scatter_(2, index.permute(0, 2, 1, 3).reshape(B, G, S * n), True)
    return Chosen(positions, index, wanted[..., :blocks])


def counted_slots(wanted: Tensor, rank: int, group: dist.ProcessGroup) -> list[list[int]]:
    """The least slots that will do, from `Chosen.wanted` of every rank: a collective, and it waits for the device."""
    ranks = dist.get_world_size(group)
    most = wanted.reshape(*wanted.shape[:2], ranks, -1).sum(-1).amax((0, 1))
    most[rank] = 0
    every = [torch.empty_like(most) for _ in range(ranks)]
    dist.all_gather(every, most, group=group)
    slots: list[list[int]] = torch.stack(every).tolist()
    return slots


def exchange(k: Tensor, v: Tensor, wanted: Tensor, route: Route, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Travelled]:
    """Compact k [B,G,keys,Dk] and v of this rank, of sum(route.incoming) + route.own blocks; from its slice and `Chosen.wanted`."""
    Dk = k.shape[3]
    listed = _listed(wanted, route)
    asked = [each[..., :room] for each, room in zip(listed, route.incoming, strict=True)]
    sent = torch.cat(_swapped(asked, route.outgoing, group), 2).long()
    picked = None if route.whole else listed[route.rank][..., : route.own].long()
    came = _swapped(list(torch.split(_picked(k, v, sent, route), route.outgoing, 2)), route.incoming, group)
    own = _in_blocks(k, v, route) if picked is None else _picked(k, v, picked, route)
    every = torch.cat((*came, own), 2).flatten(2, 3)
    return every[..., :Dk], every[..., Dk:], Travelled(route, sent, picked)


def _in_blocks(k: Tensor, v: Tensor, route: Route) -> Tensor:
    """[B,G,blocks,block,Dk+Dv]: the keys and values of each block, side by side."""
    both = torch.cat((k, v), -1)
    return both.view(*both.shape[:2], both.shape[2] // route.block, route.block, both.shape[3])


def _picked(k: Tensor, v: Tensor, blocks: Tensor, route: Route) -> Tensor:
    """[B,G,slots,block,Dk+Dv] of the blocks [B,G,slots] of a slice, of some block where none is named."""
    index = blocks.clamp(min=0)[..., None, None]
    slices = [x.view(*x.shape[:2], route.blocks, route.block, x.shape[3]) for x in (k, v)]
    return torch.cat([x.gather(2, index.expand(*blocks.shape, *x.shape[3:])) for x in slices], -1)


def return_sums(dk: Tensor, dv: Tensor, travelled: Travelled, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Gradients of this rank's slice from those of its compact K and V and from what the others return, in the order of ranks."""
    route, sent, picked = travelled
    Dk = dk.shape[3]
    *parts, own = torch.split(_in_blocks(dk, dv, route), [*route.incoming, route.own], 2)
    returned = _swapped(list(parts), route.outgoing, group)
    places = torch.split(_spared(sent, route), route.outgoing, 2)
    added: list[tuple[Tensor, Tensor | None]] = list(zip(returned, places, strict=True))
    added[route.rank] = own, None if picked is None else _spared(picked, route)
    of_k, of_v = ([(part[..., columns], blocks) for part, blocks in added] for columns in (slice(Dk), slice(Dk, None)))
    return _summed(of_k, route), _summed(of_v, route)


def _spared(blocks: Tensor, route: Route) -> Tensor:
    """Blocks of a slice; the one behind all where none is named."""
    return torch.where(blocks < 0, route.blocks, blocks)


def _summed(added: list[tuple[Tensor, Tensor | None]], route: Route) -> Tensor:
    """[B,G,keys,D] from what each rank adds, [B,G,slots,block,D] to its blocks [B,G,slots], None for all; in float32 or better.

    One block more takes what unused slots return. A part names no other block twice: whoever adds first, the sum is the same.
    """
    part, _ = added[0]
    B, G, _, block, D = part.shape
    total = torch.zeros(B * G, route.blocks + 1, block, D, dtype=torch.promote_types(part.dtype, torch.float32), device=part.device)
    batch = torch.arange(B * G, device=part.device)[:, None]
    for part, blocks in added:
        if blocks is None:
            total[:, :-1] += part.flatten(0, 1)
        elif part.shape[2]:
            place = batch, blocks.flatten(0, 1)
            total[place] = total[place] + part.flatten(0, 1)
    return total[:, :-1].to(part.dtype).reshape(B, G, route.keys, D)


def compact_selection(selection: Selection, chosen: Chosen, route: Route, within: bool) -> tuple[Selection, Tensor | None]:
    """The selection in places of the compact K, and the rows' places there [B,S], None for the last ones.

    within: rows stand within their rank's slice, which is there as it is. Then blocks of others are wholly before them and stay whole;
    else what a row may see of each, of those picked of its own slice too, is cut off here, and the result is no longer of whole blocks.
    """
    positions, index, wanted = chosen
    block, blocks, room = route.block, wanted.shape[2], sum(route.incoming)
    B, S, G, n = selection.ranges.shape[:4]
    first = route.rank * route.blocks
    place = torch.zeros(B, G, blocks + 1, dtype=torch.int64, device=wanted.device)
    before = 0
    for owner, (places, slots) in enumerate(zip(_by_owner(wanted, route).cumsum(-1).unbind(2), route.incoming, strict=True)):
        if slots or (owner == route.rank and not route.whole):
            own = slice(owner * route.blocks, (owner + 1) * route.blocks)
            place[..., own] = places + ((room if owner == route.rank else before) - 1)
        before += slots
    if route.whole:
        place[..., first : first + route.blocks] = torch.arange(room, room + route.blocks, device=wanted.device)
    moved = place.gather(2, index.permute(0, 2, 1, 3).reshape(B, G, S * n)).view(B, G, S, n).permute(0, 2, 1, 3) * block
    start, end = selection.ranges.long().unbind(-1)
    if not within:
        cut = torch.minimum(end, (positions + 1)[:, :, None, None])
        end = torch.where((index >= first) & (index < first + route.blocks), end, cut) if route.whole else cut
    length = torch.where(index < blocks, end - start, 0)
    ranges = torch.stack((moved, moved + length), -1).to(selection.ranges.dtype)
    if within:
        return Selection(ranges, block, selection.max_length), None
    bound = selection.length_bound(blocks * block)
    seen = (positions - route.rank * route.keys + 1).clamp(0, route.keys) if route.whole else torch.full_like(positions, route.own * block)
    return Selection(ranges, None, bound), (room * block + seen - 1).clamp(min=0)


def _by_owner(wanted: Tensor, route: Route) -> Tensor:
    """[B,G,ranks,route.blocks] of [B,G,blocks]."""
    return wanted.unflatten(2, (-1, route.blocks))  # type: ignore[no-untyped-call,no-any-return]


def _listed(wanted: Tensor, route: Route) -> tuple[Tensor, ...]:
    """For each rank [B,G,route.blocks] int32: those of its blocks that are wanted, ascending, then -1."""
    chosen = torch.sort((~_by_owner(wanted, route)).to(torch.uint8), dim=-1, stable=True)
    return torch.where(chosen.values == 0, chosen.indices, -1).int().unbind(2)


def _swapped(parts: list[Tensor], rooms: list[int], group: dist.ProcessGroup) -> list[Tensor]:
    """parts[p] [B,G,slots,...] goes to rank p; from each rank p comes one with rooms[p] slots."""
    B, G, _, *rest = parts[0].shape
    numbers = [part.numel() for part in parts]
    shapes = [(B, G, room, *rest) for room in rooms]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    came = parts[0].new_empty(sum(sizes))
    dist.all_to_all_single(came, torch.cat([part.reshape(-1) for part in parts]), sizes, numbers, group=group)
    return [flat.view(shape) for flat, shape in zip(torch.split(came, sizes), shapes, strict=True)]
