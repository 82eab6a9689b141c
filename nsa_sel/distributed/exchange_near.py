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
from nsa_sel.distributed.agreement import Agreed
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


def with_neighbors(
    keys: Sequence[Tensor], values: Sequence[Tensor], reaches: Sequence[Reach], agreed: Agreed
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """For each range that this rank wants of each pair of keys and values in turn, k [B,G,wanted,Dk] and v [B,G,wanted,Dv], differentiable.

    k [B,G,held,Dk] and v [B,G,held,Dv] of a pair are of this rank's ranges in turn. One collective sends all of them. Every rank calls it,
    and runs its backward pass.
    """
    k, v, reach = torch.cat([*keys], 2), torch.cat([*values], 2), _joined(reaches)
    both = torch.cat((k, v), -1).permute(2, 0, 1, 3)
    received: Tensor = _WithNeighbors.apply(both, reach, agreed)  # type: ignore[no-untyped-call]
    near = [each.permute(1, 2, 0, 3) for each in _in_order(received, reach, dist.get_rank(agreed.group))]
    return [(each[..., : k.shape[3]], each[..., k.shape[3] :]) for each in near]


def _joined(reaches: Sequence[Reach]) -> Reach:
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


def _in_order(received: Tensor, reach: Reach, rank: int) -> list[Tensor]:
    """Of keys that came in the order of owners, those of each range that the rank wants."""
    if len(reach.wanted[rank]) == 1 and all(len(held) == 1 for held in reach.held):
        return [received]
    parts = [part for owner in range(len(reach.held)) for part in reach.parts(rank, owner)]
    pieces = sorted(zip(parts, _pieces(received, parts), strict=True), key=lambda piece: piece[0].position)
    return [torch.cat([received[:0], *(x for part, x in pieces if part.wanted == number)]) for number in range(len(reach.wanted[rank]))]


class _WithNeighbors(torch.autograd.Function):
    """Of x [held,B,G,D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reach: Reach, agreed: Agreed) -> Tensor:
        ctx.reach, ctx.agreed, ctx.held = reach, agreed, len(x)
        parts = [[x[part.begin : part.begin + part.size] for part in each] for each in _outgoing(reach, agreed.group)]
        return _exchanged(x, parts, _totals(_incoming(reach, agreed.group)), agreed.group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative("context_parallel_nsa_attention")
        reach, group = ctx.reach, ctx.agreed.group
        ctx.agreed.before_backward(dx.device)
        outgoing = _outgoing(reach, group)
        shares = [[share] for share in torch.split(dx, _totals(_incoming(reach, group)))]
        received = _exchanged(dx, shares, _totals(outgoing), group)
        total = dx.new_zeros(ctx.held, *dx.shape[1:], dtype=torch.promote_types(dx.dtype, torch.float32))
        parts = [part for each in outgoing for part in each]
        for part, share in zip(parts, _pieces(received, parts), strict=True):
            total[part.begin : part.begin + part.size] += share
        return total.to(dx.dtype), None, None


def _incoming(reach: Reach, group: dist.ProcessGroup) -> list[list[Part]]:
    """What this rank wants of each rank."""
    return [reach.parts(dist.get_rank(group), owner) for owner in range(len(reach.held))]


def _outgoing(reach: Reach, group: dist.ProcessGroup) -> list[list[Part]]:
    """What each rank wants of this rank."""
    return [reach.parts(rank, dist.get_rank(group)) for rank in range(len(reach.held))]


def _totals(parts: list[list[Part]]) -> list[int]:
    return [sum(part.size for part in each) for each in parts]


def _pieces(x: Tensor, parts: list[Part]) -> tuple[Tensor, ...]:
    """Of x, which has these parts in turn."""
    return torch.split(x, [0, *(part.size for part in parts)])[1:]


def _exchanged(x: Tensor, parts: list[list[Tensor]], sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send parts[p] of x [keys,...] to rank p; of each rank p come sizes[p] keys, in the order of ranks."""
    mine = torch.cat([x[:0], *(part for each in parts for part in each)])
    received = mine.new_empty(sum(sizes), *mine.shape[1:])
    dist.all_to_all_single(received, mine, sizes, [sum(map(len, each)) for each in parts], group=group)
    return received
