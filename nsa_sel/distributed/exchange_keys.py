"""The exchanges of keys and values: "gather" sends all of them to every rank, "blocks" only those that a rank's rows
select.

Gradients return to the owners, which add them in the order of ranks.

"blocks": a rank attends to a compact K and V: the received blocks in the order of positions, then its own slice. If its
rows cannot select all blocks of a long slice, only the selected ones are kept, so that the slice is not copied for a
few rows. Within a whole slice, positions give the causal mask; ranges of received blocks are cut when they are mapped
to the compact K.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from nsa_sel.distributed.agreement import all_gather
from nsa_sel.selection import Selection


def gather(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return all ranks' k [B,G,keys,Dk] and v [B,G,keys,Dv] in the order of ranks, from one collective.

    The results are views [B,G,ranks*keys,D] of one tensor [ranks*keys,B,G,Dk+Dv], so that received slices need no copy.
    """
    B, G, keys, Dk = k.shape
    mine = k.new_empty(keys, B, G, Dk + v.shape[-1])
    mine[..., :Dk], mine[..., Dk:] = k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)
    every = mine.new_empty(dist.get_world_size(group) * keys, *mine.shape[1:])
    all_gather(every, mine, group=group)
    both = every.permute(1, 2, 0, 3)
    return both[..., :Dk], both[..., Dk:]


def scatter_sums(dk: Tensor, dv: Tensor, keys: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the gradients of this rank's own `keys` keys: the sum of all ranks' shares.

    It moves the bytes of a reduce_scatter, but each rank adds what it receives in float32 and in the order of ranks. So
    runs are bit-equal, and 16-bit gradients are rounded once per rank.

    Args:
        dk, dv: this rank's share [B,G,visible,Dk] and [B,G,visible,Dv], for the first `visible` keys of the sequence.
        keys: number of keys per rank.
        group: the ranks.
    """
    B, G, visible, Dk = dk.shape
    ranks = dist.get_world_size(group)
    mine = dk.new_zeros(ranks * keys, B, G, Dk + dv.shape[-1])
    mine[:visible, ..., :Dk], mine[:visible, ..., Dk:] = dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)
    parts = torch.empty_like(mine)
    dist.all_to_all_single(parts, mine, group=group)
    # [keys,B,G,Dk+Dv], added one after another
    first, *others = parts.view(ranks, keys, *mine.shape[1:])
    total = first.to(torch.promote_types(dk.dtype, torch.float32), copy=True)
    for part in others:
        total += part
    total = total.to(dk.dtype).permute(1, 2, 0, 3)
    return total[..., :Dk].contiguous(), total[..., Dk:].contiguous()


class BlockRoute(NamedTuple):
    """Number of blocks that each rank sends to each other rank: static, and equal on all ranks."""

    slots: list[list[int]]  # slots[r][p]: blocks of rank p that rank r has room for, per batch entry and group
    rank: int
    block: int  # keys of a block
    keys: int  # of a rank's slice, whole blocks
    own: int  # blocks of its own slice that a rank keeps

    @property
    def blocks(self) -> int:
        """Number of blocks of a rank's slice."""
        return self.keys // self.block

    @property
    def whole(self) -> bool:
        """True if the compact K holds the rank's whole slice."""
        return self.own == self.blocks

    @property
    def incoming(self) -> list[int]:
        """Slots that this rank receives from each rank."""
        return self.slots[self.rank]

    @property
    def outgoing(self) -> list[int]:
        """Slots that this rank sends to each rank."""
        return [row[self.rank] for row in self.slots]


class Sent(NamedTuple):
    """The blocks of a forward exchange, for the backward pass. Indices count from the slice's first block; -1 is an
    unused slot."""

    route: BlockRoute
    blocks: Tensor  # sent blocks of this rank's slice, int64 [B,G,sum(route.outgoing)]
    own: Tensor | None  # blocks of this rank's slice in the compact K, int64 [B,G,route.own]; None: all


class Chosen(NamedTuple):
    """The blocks that a rank's rows select."""

    positions: Tensor  # of the rows, [B,S]
    of_ranges: Tensor  # the block of each range, [B,S,G,n] int64; the number of blocks where no key of it is visible
    wanted: Tensor  # True where any row may read the block, [B,G,blocks] bool


def chosen(ranges: Tensor, positions: Tensor, block: int, blocks: int) -> Chosen:
    """Return the blocks of whole-block ranges [B,S,G,n,2] of rows at positions [B,S]."""
    B, S, G, n = ranges.shape[:4]
    start, end = ranges.long().unbind(-1)
    visible = (end > start) & (start >= 0) & (start <= positions[:, :, None, None]) & (start < blocks * block)
    index = torch.where(visible, start // block, blocks)
    wanted = torch.zeros(B, G, blocks + 1, dtype=torch.bool, device=ranges.device)
    wanted.scatter_(2, index.permute(0, 2, 1, 3).reshape(B, G, S * n), True)
    return Chosen(positions, index, wanted[..., :blocks])


def counted_slots(wanted: Tensor, rank: int, group: dist.ProcessGroup) -> list[list[int]]:
    """Return the fewest slots that suffice for `Chosen.wanted` of every rank. A collective; waits for the device."""
    ranks = dist.get_world_size(group)
    most = wanted.reshape(*wanted.shape[:2], ranks, -1).sum(-1).amax((0, 1))
    most[rank] = 0
    every = [torch.empty_like(most) for _ in range(ranks)]
    dist.all_gather(every, most, group=group)
    return torch.stack(every).tolist()  # type: ignore[no-any-return]


def exchange(k: Tensor, v: Tensor, wanted: Tensor, route: BlockRoute, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Sent]:
    """Return the compact k [B,G,keys,Dk] and v of this rank, of sum(route.incoming) + route.own blocks, and what was
    sent."""
    Dk, wanted = k.shape[3], wanted.expand(-1, k.shape[1], -1)  # of one group for all, if the selection has one
    # The wanted blocks of each rank's slice, ascending and padded with -1: int32 [B,G,route.blocks] per rank.
    unwanted, order = torch.sort((~_by_owner(wanted, route)).to(torch.uint8), dim=-1, stable=True)
    indices = torch.where(unwanted == 0, order, -1).int().unbind(2)
    requests = [each[..., :slots] for each, slots in zip(indices, route.incoming, strict=True)]
    requested = torch.cat(_all_to_all(requests, route.outgoing, group), 2).long()
    own = None if route.whole else indices[route.rank][..., : route.own].long()
    received = _all_to_all(list(torch.split(_gathered(k, v, requested, route), route.outgoing, 2)), route.incoming, group)
    compact = torch.cat((*received, _in_blocks(k, v, route) if own is None else _gathered(k, v, own, route)), 2).flatten(2, 3)
    return compact[..., :Dk], compact[..., Dk:], Sent(route, requested, own)


def _in_blocks(k: Tensor, v: Tensor, route: BlockRoute) -> Tensor:
    """Return the keys and values of each block, concatenated: [B,G,blocks,block,Dk+Dv]."""
    both = torch.cat((k, v), -1)
    return both.view(*both.shape[:2], both.shape[2] // route.block, route.block, both.shape[3])


def _gathered(k: Tensor, v: Tensor, blocks: Tensor, route: BlockRoute) -> Tensor:
    """Gather the blocks [B,G,slots] of a slice as [B,G,slots,block,Dk+Dv]; index -1 gives any block."""
    index = blocks.clamp(min=0)[..., None, None]
    slices = [x.view(*x.shape[:2], route.blocks, route.block, x.shape[3]) for x in (k, v)]
    return torch.cat([x.gather(2, index.expand(*blocks.shape, *x.shape[3:])) for x in slices], -1)


def return_sums(dk: Tensor, dv: Tensor, sent: Sent, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the gradients [B,G,keys,Dk] and [B,G,keys,Dv] of this rank's slice from those of every rank's compact K
    and V.

    Each rank adds what it receives in the order of ranks, in float32 or better. A part has every block at most once, so
    the order of additions is fixed.
    """
    route, Dk = sent.route, dk.shape[3]
    compact = _in_blocks(dk, dv, route)
    *parts, own = torch.split(compact, [*route.incoming, route.own], 2)
    returned = _all_to_all(list(parts), route.outgoing, group)
    added: list[tuple[Tensor, Tensor | None]] = list(zip(returned, torch.split(sent.blocks, route.outgoing, 2), strict=True))
    added[route.rank] = own, sent.own
    B, G = dk.shape[:2]
    batch = torch.arange(B * G, device=dk.device)[:, None]
    # [B*G,blocks+1,block,Dk+Dv]: index -1, the spare last block, collects what unused slots return.
    dtype = torch.promote_types(dk.dtype, torch.float32)
    total = compact.new_zeros(B * G, route.blocks + 1, *compact.shape[3:], dtype=dtype)
    for part, blocks in added:
        if blocks is None:
            total[:, :-1] += part.flatten(0, 1)
        elif part.shape[2]:
            index = batch, blocks.flatten(0, 1)
            total[index] = total[index] + part.flatten(0, 1)
    total = total[:, :-1].to(dk.dtype).reshape(B, G, route.keys, -1)
    return total[..., :Dk].contiguous(), total[..., Dk:].contiguous()


def compact_selection(selection: Selection, chosen: Chosen, route: BlockRoute, within: bool) -> tuple[Selection, Tensor | None]:
    """Return the selection in positions of the compact K, and the rows' positions [B,S] there (None: the last ones).

    within: rows are at the positions of their rank's slice, which is whole. Received blocks are then entirely before
    them, and stay whole. Otherwise each range is cut at its row's position, and the result is no longer of whole
    blocks.
    """
    positions, index, wanted = chosen
    block, blocks, received = route.block, wanted.shape[2], sum(route.incoming)
    B, S, G, n = selection.ranges.shape[:4]
    first = route.rank * route.blocks
    slot = torch.zeros(B, G, blocks + 1, dtype=torch.int64, device=wanted.device)  # index of each block in the compact K
    before = 0
    for owner, (counts, slots) in enumerate(zip(_by_owner(wanted, route).cumsum(-1).unbind(2), route.incoming, strict=True)):
        if slots or (owner == route.rank and not route.whole):
            of_owner = slice(owner * route.blocks, (owner + 1) * route.blocks)
            slot[..., of_owner] = counts + ((received if owner == route.rank else before) - 1)
        before += slots
    if route.whole:
        slot[..., first : first + route.blocks] = torch.arange(received, received + route.blocks, device=wanted.device)
    moved = slot.gather(2, index.permute(0, 2, 1, 3).reshape(B, G, S * n)).view(B, G, S, n).permute(0, 2, 1, 3) * block
    start, end = selection.ranges.long().unbind(-1)
    if not within:
        cut = torch.minimum(end, (positions + 1)[:, :, None, None])
        end = torch.where((index >= first) & (index < first + route.blocks), end, cut) if route.whole else cut
    length = torch.where(index < blocks, end - start, 0)
    ranges = torch.stack((moved, moved + length), -1).to(selection.ranges.dtype)
    if within:
        return Selection(ranges, block, selection.max_length), None
    bound = selection.length_bound(blocks * block)
    if route.whole:
        visible = (positions - route.rank * route.keys + 1).clamp(0, route.keys)
    else:
        visible = torch.full_like(positions, route.own * block)
    return Selection(ranges, None, bound), (received * block + visible - 1).clamp(min=0)


def _by_owner(wanted: Tensor, route: BlockRoute) -> Tensor:
    """View [B,G,blocks] as [B,G,ranks,route.blocks]."""
    return wanted.unflatten(2, (-1, route.blocks))  # type: ignore[no-untyped-call,no-any-return]


def _all_to_all(parts: list[Tensor], slots: list[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Send parts[p] [B,G,slots,...] to rank p; receive one with slots[p] slots from each rank p."""
    B, G, _, *rest = parts[0].shape
    numbers = [part.numel() for part in parts]
    shapes = [(B, G, number, *rest) for number in slots]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = parts[0].new_empty(sum(sizes))
    dist.all_to_all_single(received, torch.cat([part.reshape(-1) for part in parts]), sizes, numbers, group=group)
    return [flat.view(shape) for flat, shape in zip(torch.split(received, sizes), shapes, strict=True)]
