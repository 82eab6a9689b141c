"""How a sequence is cut into slices, and which rank holds which: rank r holds slice r, or two slices from both ends of the sequence.

A row attends to the compressed keys before it, so the last slice takes longest. Pairing the first slice with the last, the second with
the last but one, and so on, gives all ranks equal work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from nsa_sel.distributed.agreement import group_of
from nsa_sel.errors import ArgumentError

Ranges = tuple[range, ...]  # of positions in the sequence


class Cut(NamedTuple):
    """Slices of `size` positions each; both_ends: rank r of R holds slice r and slice 2R - 1 - r of 2R, else slice r of R."""

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
