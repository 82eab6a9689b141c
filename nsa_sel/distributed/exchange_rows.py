"""The exchange "rows": ranks send queries instead of keys. Each rank attends with all ranks' rows to its own slice.

Every slice gives a row partial o and lse. The row's rank merges them by their log-sum-exp, in a fixed order. In the
backward pass the row's final o and lse go to every rank, from which backends recompute the weights of keys. dk and dv
of a slice are then complete on its rank, and the partial dq are added in float32.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist

from nsa_sel.core import run, transforms
from nsa_sel.core.call import Call, device_info, request_of
from nsa_sel.core.decide import Decided
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import Request
from nsa_sel.distributed.agreement import all_gather
from nsa_sel.distributed.cost import ALIGNED, padded
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for


def aligned(x: Tensor) -> Tensor:
    """Return x, copied if its rows could be 16-byte aligned and are not, so that ranks decide by the same alignment."""
    row, *outer = (stride * x.element_size() for stride in (x.shape[-1], *x.stride()[:-1]))
    odd = functools.reduce(int.__or__, outer, x.data_ptr()) % ALIGNED
    return x.clone(memory_format=torch.contiguous_format) if odd and row % ALIGNED == 0 else x


def request(q: Tensor, k: Tensor, v: Tensor, selection: Selection, ranks: int, needs_grad: bool) -> Request:
    """Return the request of all ranks' rows over one slice, equal on all ranks; k and v are `aligned`."""
    facts = request_of(
        q, k, v, selection.part(selection.ranges, ranks * k.shape[2], k.shape[2] % (selection.block_size or 1) == 0), needs_grad
    )
    odd = any(x.shape[-1] * x.element_size() % ALIGNED for x in (k, v))
    return msgspec.structs.replace(facts, S=ranks * q.shape[1], aligned=not odd)


class AttendRows(torch.autograd.Function):
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h] of this rank's rows q [B,S,G,h,Dk] over all ranks' slices. Every rank
    applies it."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, selection: Selection, q_pos: Tensor | None, scale: float, group: dist.ProcessGroup,
        decision: Decision, request: Request,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        call = _local_call(q, k, v, selection, q_pos, scale, group)
        o, lse, decision = run.run_forward(Decided(call, decision, request))
        rows = o.shape[1] // dist.get_world_size(group), *o.shape[2:]
        received = _return_parts(packed([_by_rank(o, group), _by_rank(lse, group)]), group)
        o, lse = merge_parts(*unpacked(received, [(o.dtype, rows), (lse.dtype, rows[:-1])]))
        ctx.save_for_backward(call.q, k, v, o, lse, call.q_pos)
        ctx.decision, ctx.facts, ctx.group = decision, (call.selection, scale, call.settings, call.device), group
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative()
        q, k, v, o, lse, positions = ctx.saved_tensors
        selection, scale, settings, device = ctx.facts
        rows = *lse.shape[1:], q.shape[-1]
        do = torch.zeros_like(o) if do is None else do  # the other ranks wait for this one's
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        do, o, lse, dlse = _gather_rows([do, o, lse, dlse], ctx.group)
        call = Call(q, k, v, selection, positions, scale, settings, device)
        dq, dk, dv = run.gradients(call, ctx.decision, o.contiguous(), lse.contiguous(), do, dlse)
        shares = _return_parts(_by_rank(dq, ctx.group).contiguous(), ctx.group)
        total = shares.sum(0, dtype=torch.promote_types(dq.dtype, torch.float32)).to(dq.dtype)
        return total.view(len(total), *rows), dk, dv, *(None,) * 6


def _local_call(q: Tensor, k: Tensor, v: Tensor, selection: Selection, q_pos: Tensor | None, scale: float, group: Any) -> Call:
    """Return the call of all ranks' rows, in the order of ranks, over this rank's slice, whose first key is key 0."""
    ranks, rank, B, S, keys = dist.get_world_size(group), dist.get_rank(group), *q.shape[:2], k.shape[2]
    device = device_info(q.device)
    call = Call(q, k, v, selection, None, scale, settings_for(device), device)
    first, fits = rank * keys, ranks * keys < torch.iinfo(torch.int32).max
    parts = [q, selection.ranges if fits else selection.ranges.long()]
    call.q, ranges, *given = _gather_rows(parts if q_pos is None else [*parts, q_pos.long()], group)
    if call.settings.debug_triton and not call.capturing():
        selection.part(ranges, ranks * keys, True).validate()  # before cutting, so that it fails on all ranks or on none
    if given:
        call.q_pos = given[0] - first
    else:
        after = (ranks - rank) * keys  # one past the last row's position
        call.q_pos = torch.arange(after - ranks * S, after, device=q.device).expand(B, ranks * S)
    # Positions may be outside the slice: backends attend to no key for a row before it, and to all keys for a row after
    # it.
    ranges = (ranges.clamp(first, first + keys) - first).contiguous()
    call.selection = selection.part(ranges, ranks * keys, k.shape[2] % (selection.block_size or 1) == 0)
    return call


def merge_parts(part_o: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return o [...,D] and lse [...] from parts [parts,...,D] and [parts,...] over disjoint keys; 0 and -inf if all are
    empty."""
    lse = part_lse.logsumexp(0)  # over all parts at once, because adding pairs would round each time
    weights = (part_lse - lse.clamp(min=torch.finfo(lse.dtype).min)).exp()
    return (weights.unsqueeze(-1) * part_o).sum(0).to(part_o.dtype), lse


def _gather_rows(parts: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Gather all ranks' parts [B,ranks*S,...] from each rank's [B,S,...], in one collective."""
    mine = packed([part.contiguous().flatten(1) for part in parts])
    ranks, (B, size) = dist.get_world_size(group), mine.shape
    every = mine.new_empty(ranks * B, size)
    all_gather(every, mine, group=group)
    each = unpacked(every.view(ranks, B, size), [(part.dtype, part.shape[1:]) for part in parts])
    return [x.transpose(0, 1).flatten(1, 2) for x in each]


def _by_rank(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Split rows [B,ranks*S,...] by the rank that owns them: [ranks,B,elements]."""
    ranks, (B, rows, *rest) = dist.get_world_size(group), x.shape
    return x.reshape(B, ranks, rows // ranks * math.prod(rest)).transpose(0, 1)


def _return_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send x[p] to rank p. Entry p of the result is from rank p."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def packed(parts: list[Tensor]) -> Tensor:
    """Concatenate parts [...,elements] of any dtypes to uint8 [...,bytes], each part padded to `ALIGNED` bytes."""
    pieces: list[Tensor] = []
    for part in parts:
        piece = part.view(torch.uint8)
        size = piece.shape[-1]
        pieces.append(piece)
        if size < padded(size):
            pieces.append(piece.new_zeros(*piece.shape[:-1], padded(size) - size))
    return torch.cat(pieces, -1)


def unpacked(packets: Tensor, parts: list[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Undo `packed`: return views [...,*shape] of the packets, for each part's dtype and shape."""
    views, begin = [], 0
    for dtype, shape in parts:
        size = math.prod(shape) * dtype.itemsize
        views.append(packets[..., begin : begin + size].view(dtype).view(*packets.shape[:-1], *shape))
        begin += padded(size)
    return views
