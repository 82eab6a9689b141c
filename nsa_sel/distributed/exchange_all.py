"""The exchange "gather": every rank receives K and V of all ranks. Gradients return to the owners, which add them in the order of ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name, deprecated since torch 2.13


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

    It moves the bytes of a reduce_scatter, but each rank adds what it receives in float32 and in the order of ranks. So runs are bit-equal,
    and 16-bit gradients are rounded once per rank.

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
