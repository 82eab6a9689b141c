"""The exchange "gather": K and V of all ranks on every rank; their gradients return to the owners, summed in the order of ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name, deprecated since torch 2.13


def gather(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """All ranks' k [B,G,keys,Dk] and v [B,G,keys,Dv] in the order of ranks: views [B,G,ranks*keys,D] of one tensor, from one collective.

    That tensor is [ranks*keys,B,G,Dk+Dv], so that the received slices need no copy.
    """
    B, G, keys, Dk = k.shape
    mine = k.new_empty(keys, B, G, Dk + v.shape[-1])
    mine[..., :Dk], mine[..., Dk:] = k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)
    every = mine.new_empty(dist.get_world_size(group) * keys, *mine.shape[1:])
    all_gather(every, mine, group=group)
    both = every.permute(1, 2, 0, 3)
    return both[..., :Dk], both[..., Dk:]


def scatter_sums(dk: Tensor, dv: Tensor, keys: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Gradients of this rank's own `keys` keys from its share for the first `seen` keys, dk [B,G,seen,Dk] and dv [B,G,seen,Dv].

    A reduce_scatter with the same bytes as one, except that each rank adds what it receives, in float32 and in the order of ranks: runs
    are bit-equal, and 16-bit gradients are rounded once per rank.
    """
    B, G, seen, Dk = dk.shape
    ranks = dist.get_world_size(group)
    mine = dk.new_zeros(ranks * keys, B, G, Dk + dv.shape[-1])
    mine[:seen, ..., :Dk], mine[:seen, ..., Dk:] = dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)
    parts = torch.empty_like(mine)
    dist.all_to_all_single(parts, mine, group=group)
    total = added(list(parts.view(ranks, keys, *mine.shape[1:]))).to(dk.dtype).permute(1, 2, 0, 3)
    return total[..., :Dk].contiguous(), total[..., Dk:].contiguous()


def added(parts: list[Tensor]) -> Tensor:
    """Their sum, one after another, in float32 or better."""
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total
