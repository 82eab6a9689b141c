"""Keys that a rank's rows see beside its own slices: those right before them, right after them, or all before them, whoever holds them.

One collective sends every rank what it wants. Gradients return to the owners, which add them in float32 and in the order of ranks, so
that runs are bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from nsa_sel.core import transforms
from nsa_sel.distributed.cut import Ranges


class Part(NamedTuple):
    """Keys that one rank holds and another wants."""

    wanted: int  # number of the wanted range
    position: int  # of the first key in the sequence
    begin: int  # the first key, counted from the owner's first one
    size: int


class Reach(NamedTuple):
    """Which positions of the sequence each rank holds, by rank, and which it wants."""

    held: tuple[Ranges, ...]
    wanted: tuple[Ranges, ...]

    @classmethod
    def of(cls, ranks: int, held: Callable[[int], Ranges], wanted: Callable[[int], Ranges]) -> Reach:
        """That of a function of the rank for each."""
        return cls(tuple(map(held, range(ranks))), tuple(map(wanted, range(ranks))))

    def parts(self, rank: int, owner: int) -> list[Part]:
        """What `rank` wants of `owner`: of each wanted range parts of the held ones."""
        found = []
        for number, wanted in enumerate(self.wanted[rank]):
            before = 0
            for held in self.held[owner]:
                first, stop = max(wanted.start, held.start), min(wanted.stop, held.stop)
                if first < stop:
                    found.append(Part(number, first, before + first - held.start, stop - first))
                before += len(held)
        return found


class Route(NamedTuple):
    """One rank's part of a reach. Callers keep it: with many ranks it takes longer to compute than to follow."""

    outgoing: list[list[Part]]  # what each rank wants of this rank
    sent: list[int]  # keys to each rank
    received: list[int]  # keys from each rank
    pieces: list[int]  # keys of each received part
    order: list[list[int]]  # of each wanted range its received parts, by position

    @classmethod
    def of(cls, reaches: Sequence[Reach], rank: int) -> Route:
        """That of several sequences, one after another."""
        reach = joined(reaches)
        ranks = range(len(reach.held))
        outgoing, incoming = [reach.parts(each, rank) for each in ranks], [reach.parts(rank, owner) for owner in ranks]
        parts = sorted(enumerate(part for each in incoming for part in each), key=lambda piece: piece[1].position)
        order = [[index for index, part in parts if part.wanted == number] for number in range(len(reach.wanted[rank]))]
        sent, received = ([sum(part.size for part in each) for each in parts] for parts in (outgoing, incoming))
        return cls(outgoing, sent, received, [part.size for each in incoming for part in each], order)

    def in_order(self, received: Tensor) -> list[Tensor]:
        """Of keys that came in the order of owners, those of each range that the rank wants."""
        if self.order == [[*range(len(self.pieces))]]:
            return [received]
        pieces = torch.split(received, self.pieces) if self.pieces else ()
        return [torch.cat([received[:0], *(pieces[index] for index in each)]) for each in self.order]


def with_neighbors(
    keys: Sequence[Tensor], values: Sequence[Tensor], route: Route, group: dist.ProcessGroup
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """The keys and values that this rank wants of other ranks and of itself. Every rank calls it, and runs its backward pass.

    Args:
        keys, values: pairs of k [B,G,held,Dk] and v [B,G,held,Dv], of this rank's ranges in turn. One collective sends all of them.
        route: of these pairs, in turn.
        group: of ranks that make the same call, and the same backward pass.

    Returns:
        For each range that the rank wants of each pair in turn k [B,G,wanted,Dk] and v [B,G,wanted,Dv], differentiable.
    """
    k, v = torch.cat([*keys], 2), torch.cat([*values], 2)
    both = torch.cat((k, v), -1).permute(2, 0, 1, 3)
    received: Tensor = _WithNeighbors.apply(both, route, group)  # type: ignore[no-untyped-call]
    near = [each.permute(1, 2, 0, 3) for each in route.in_order(received)]
    return [(each[..., : k.shape[3]], each[..., k.shape[3] :]) for each in near]


def joined(reaches: Sequence[Reach]) -> Reach:
    """That of several sequences, one after another."""
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
    """Of x [held,B,G,D]."""

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
    """Send the next sent[p] keys of x [keys,...] to each rank p; of it come received[p] keys, in the order of ranks."""
    result = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x, received, sent, group=group)
    return result
