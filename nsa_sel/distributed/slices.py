"""Slices of a sequence: which rank holds which, and the exchange of keys near a slice.

Rank r holds slice r, or two slices from both ends of the sequence: a row attends to the compressed keys before it, so
the last slice takes longest, and pairing the first slice with the last, the second with the last but one, and so on,
gives all ranks equal work.

One collective sends every rank the keys right before its slices, right after them, or all before them. Gradients return
to the owners, which add them in float32 and in the order of ranks, so that runs are bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from nsa_sel.core import transforms
from nsa_sel.distributed.agreement import group_of
from nsa_sel.errors import ArgumentError

Ranges = tuple[range, ...]  # of positions in the sequence


class Cut(NamedTuple):
    """Slices of `size` positions each; both_ends: rank r of R holds slice r and slice 2R - 1 - r of 2R, else slice r of
    R."""

    size: int
    ranks: int
    both_ends: bool = False

    @property
    def number(self) -> int:
        """Number of slices."""
        return self.ranks * (1 + self.both_ends)

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the indices of a rank's slices, in the order of its rows."""
        return (rank, self.number - 1 - rank) if self.both_ends else (rank,)

    def held(self, rank: int) -> Ranges:
        """Return the positions of each slice of a rank."""
        return self.near(rank)

    def near(self, rank: int, before: int = 0, after: int = 0) -> Ranges:
        """Return the positions of each slice of a rank, with up to `before` before them and `after` after them."""
        size, end = self.size, self.number * self.size
        return tuple(range(max(0, i * size - before), min(end, (i + 1) * size + after)) for i in self.of(rank))

    def in_turn(self) -> Cut:
        """Return the cut of the same sequence into one slice per rank."""
        return Cut(self.size * self.number // self.ranks, self.ranks)

    def positions(self, rank: int, device: torch.device) -> Tensor:
        """Return the positions of a rank's rows in the sequence, int64 [rows]."""
        return torch.cat([torch.arange(each.start, each.stop, device=device) for each in self.held(rank)])


def rank_rows(S: int, group: Any = None, *, both_ends: bool = False, device: torch.device | str | None = None) -> Tensor:
    """Return the rows of a sequence that this rank holds under `context_parallel`, to slice tokens and targets.

    `x[:, rank_rows(x.shape[1])]` are the rank's rows of x [B,S,...].

    Args:
        S: number of rows of the whole sequence.
        group, both_ends: as of `context_parallel`.
        device: device of the result, by default the current default device.

    Returns:
        Their positions, int64 [S / ranks], ascending.

    Raises:
        ArgumentError: S is not divisible by the number of slices, or the group is none.
        NsaSelError: there is no distributed job.
    """
    group = group_of(group, "rank_rows")
    cut = Cut(0, dist.get_world_size(group), both_ends)
    if S % cut.number:
        raise ArgumentError("S", S, f"a multiple of {cut.number}, the number of slices", "pad the sequence")
    return cut._replace(size=S // cut.number).positions(dist.get_rank(group), torch.device(device or torch.get_default_device()))


class Part(NamedTuple):
    """Keys that one rank holds and another wants."""

    wanted: int  # index of the wanted range
    position: int  # position of the first key in the sequence
    begin: int  # index of the first key in the owner's tensor
    size: int


class Reach(NamedTuple):
    """Positions of the sequence that each rank holds, and those that it wants, by rank."""

    held: tuple[Ranges, ...]
    wanted: tuple[Ranges, ...]

    @classmethod
    def of(cls, ranks: int, held: Callable[[int], Ranges], wanted: Callable[[int], Ranges]) -> Reach:
        """Return the reach of `ranks` ranks, from functions that map a rank to its ranges."""
        return cls(tuple(map(held, range(ranks))), tuple(map(wanted, range(ranks))))

    def parts(self, rank: int, owner: int) -> list[Part]:
        """Return the parts of the ranges that `owner` holds and `rank` wants."""
        parts = []
        for number, wanted in enumerate(self.wanted[rank]):
            before = 0
            for held in self.held[owner]:
                first, stop = max(wanted.start, held.start), min(wanted.stop, held.stop)
                if first < stop:
                    parts.append(Part(number, first, before + first - held.start, stop - first))
                before += len(held)
        return parts


class Route(NamedTuple):
    """Keys that one rank sends and receives. Callers cache it, because computing it is slow with many ranks."""

    outgoing: list[list[Part]]  # parts of this rank's keys that each rank wants
    sent: list[int]  # number of keys to each rank
    received: list[int]  # number of keys from each rank
    pieces: list[int]  # number of keys of each received part
    order: list[list[int]]  # for each wanted range, the indices of its received parts, by position

    @classmethod
    def of(cls, reaches: Sequence[Reach], rank: int) -> Route:
        """Return the route of a rank for several sequences, concatenated."""
        reach = joined(reaches)
        ranks = range(len(reach.held))
        outgoing, incoming = [reach.parts(each, rank) for each in ranks], [reach.parts(rank, owner) for owner in ranks]
        parts = sorted(enumerate(part for each in incoming for part in each), key=lambda piece: piece[1].position)
        order = [[index for index, part in parts if part.wanted == number] for number in range(len(reach.wanted[rank]))]
        sent, received = ([sum(part.size for part in each) for each in parts] for parts in (outgoing, incoming))
        return cls(outgoing, sent, received, [part.size for each in incoming for part in each], order)

    def in_order(self, received: Tensor) -> list[Tensor]:
        """Return the keys of each wanted range, from keys that were received in the order of owners."""
        if self.order == [[*range(len(self.pieces))]]:
            return [received]
        pieces = torch.split(received, self.pieces) if self.pieces else ()
        return [torch.cat([received[:0], *(pieces[index] for index in each)]) for each in self.order]


def with_neighbors(
    keys: Sequence[Tensor], values: Sequence[Tensor], route: Route, group: dist.ProcessGroup
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """Return the keys and values that this rank wants of all ranks. Every rank calls it, and runs its backward pass.

    Args:
        keys, values: one k [B,G,held,Dk] and v [B,G,held,Dv] per sequence, of the ranges that this rank holds. One
            collective sends all.
        route: this rank's route for these sequences.
        group: of ranks that make the same call, and the same backward pass.

    Returns:
        k [B,G,wanted,Dk] and v [B,G,wanted,Dv] of each wanted range of each sequence, differentiable.
    """
    k, v = torch.cat([*keys], 2), torch.cat([*values], 2)
    both = torch.cat((k, v), -1).permute(2, 0, 1, 3)
    received: Tensor = _WithNeighbors.apply(both, route, group)  # type: ignore[no-untyped-call]
    near = [each.permute(1, 2, 0, 3) for each in route.in_order(received)]
    return [(each[..., : k.shape[3]], each[..., k.shape[3] :]) for each in near]


def joined(reaches: Sequence[Reach]) -> Reach:
    """Return the reach of several sequences, concatenated."""
    ranks, first = len(reaches[0].held), 0
    held: list[Ranges] = [()] * ranks
    wanted: list[Ranges] = [()] * ranks
    for reach in reaches:
        for rank in range(ranks):
            held[rank] += tuple(range(first + x.start, first + x.stop) for x in reach.held[rank])
            wanted[rank] += tuple(range(first + x.start, first + x.stop) for x in reach.wanted[rank])
        first += max(x.stop for ranges in (*reach.held, *reach.wanted) for x in ranges)
    return Reach(tuple(held), tuple(wanted))


class _WithNeighbors(torch.autograd.Function):
    """Exchange x [held,B,G,D]; returns [received,B,G,D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, group: dist.ProcessGroup) -> Tensor:
        ctx.route, ctx.group, ctx.held = route, group, len(x)
        parts = [x[part.begin : part.begin + part.size] for each in route.outgoing for part in each]
        return _exchanged(torch.cat([x[:0], *parts]), route.sent, route.received, group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative("context_parallel_nsa_attention")
        route: Route = ctx.route
        received = _exchanged(dx.contiguous(), route.received, route.sent, ctx.group)
        total = dx.new_zeros(ctx.held, *dx.shape[1:], dtype=torch.promote_types(dx.dtype, torch.float32))
        begin = 0
        for part in (part for each in route.outgoing for part in each):
            total[part.begin : part.begin + part.size].add_(received[begin : begin + part.size])
            begin += part.size
        return total.to(dx.dtype), None, None


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the next sent[p] keys of x [keys,...] to each rank p. Returns received[p] keys of each rank p, in the order
    of ranks."""
    result = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x, received, sent, group=group)
    return result
