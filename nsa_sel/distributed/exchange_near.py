"""Keys that a rank's rows see beside its own slice: those right before it, and right after it, of as many ranks as hold them.

One collective sends every rank what it wants, in the order of positions. Gradients return to the owners, which add them in float32 and
in the order of ranks, so that runs are bit-equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from nsa_sel.core import transforms
from nsa_sel.distributed.agreement import Agreed


class Reach(NamedTuple):
    """Which keys of the sequence a rank wants: its slice of `keys` keys, with up to `before` keys before it and `after` keys after it."""

    keys: int
    ranks: int
    before: int = 0
    after: int = 0

    def wanted(self, rank: int) -> range:
        """Their positions."""
        first = rank * self.keys
        return range(max(0, first - self.before), min(self.ranks * self.keys, first + self.keys + self.after))

    def part(self, rank: int, owner: int) -> slice:
        """Those that `owner` holds, counted from its slice's first key."""
        wanted, first = self.wanted(rank), owner * self.keys
        begin = min(max(wanted.start - first, 0), self.keys)
        return slice(begin, max(begin, min(wanted.stop - first, self.keys)))


def with_neighbors(k: Tensor, v: Tensor, reach: Reach, agreed: Agreed) -> tuple[Tensor, Tensor]:
    """k [B,G,wanted,Dk] and v [B,G,wanted,Dv] of this rank from each rank's k [B,G,keys,Dk] and v [B,G,keys,Dv], differentiable.

    Every rank calls it, and runs its backward pass. Both results are views of one tensor [wanted,B,G,Dk+Dv], as it was received.
    """
    both = torch.cat((k, v), -1).permute(2, 0, 1, 3)
    near: Tensor = _WithNeighbors.apply(both, reach, agreed)  # type: ignore[no-untyped-call]
    near = near.permute(1, 2, 0, 3)
    return near[..., : k.shape[3]], near[..., k.shape[3] :]


class _WithNeighbors(torch.autograd.Function):
    """Of x [keys,B,G,D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reach: Reach, agreed: Agreed) -> Tensor:
        ctx.reach, ctx.agreed = reach, agreed
        parts = [x[part] for part in _outgoing(reach, agreed.group)]
        return _exchanged(parts, _sizes(_incoming(reach, agreed.group)), agreed.group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative("context_parallel_nsa_attention")
        reach, group = ctx.reach, ctx.agreed.group
        ctx.agreed.before_backward(dx.device)
        outgoing = _outgoing(reach, group)
        received = _exchanged(list(torch.split(dx, _sizes(_incoming(reach, group)))), _sizes(outgoing), group)
        total = dx.new_zeros(reach.keys, *dx.shape[1:], dtype=torch.promote_types(dx.dtype, torch.float32))
        for part, share in zip(outgoing, torch.split(received, _sizes(outgoing)), strict=True):
            total[part] += share
        return total.to(dx.dtype), None, None


def _incoming(reach: Reach, group: dist.ProcessGroup) -> list[slice]:
    """What this rank wants of each rank's slice."""
    return [reach.part(dist.get_rank(group), owner) for owner in range(reach.ranks)]


def _outgoing(reach: Reach, group: dist.ProcessGroup) -> list[slice]:
    """What each rank wants of this rank's slice."""
    return [reach.part(rank, dist.get_rank(group)) for rank in range(reach.ranks)]


def _sizes(parts: list[slice]) -> list[int]:
    return [part.stop - part.start for part in parts]


def _exchanged(parts: list[Tensor], sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send parts[p] [keys,...] to rank p; of each rank p come sizes[p] keys, in the order of ranks."""
    mine = torch.cat(parts)
    received = mine.new_empty(sum(sizes), *mine.shape[1:])
    dist.all_to_all_single(received, mine, sizes, [len(part) for part in parts], group=group)
    return received
