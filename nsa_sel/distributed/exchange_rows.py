"""Queries travel instead of keys: each rank attends with the rows of all to its own slice, and a row's parts are joined where it is from.

What a row sees of a slice has its own o and lse; those of all slices add up to the row's by their log-sum-exp, the same each time. The
backward pass asks every rank for its share with the row's own o and lse, from which each backend finds a key's weight: dk and dv of a
slice are then whole where the slice is, and the shares of dq are added in float32.
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
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import Request
from nsa_sel.distributed.agreement import Agreed
from nsa_sel.distributed.cost import ALIGNED, padded
from nsa_sel.distributed.exchange_all import all_gather
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for


def aligned(x: Tensor) -> Tensor:
    """k or v as it is, or a copy where 16-byte rows of it stand at odd places: all ranks decide by the same alignment."""
    row, *outer = (stride * x.element_size() for stride in (x.shape[-1], *x.stride()[:-1]))
    odd = functools.reduce(int.__or__, outer, x.data_ptr()) % ALIGNED
    return x.clone(memory_format=torch.contiguous_format) if odd and row % ALIGNED == 0 else x


def request(q: Tensor, k: Tensor, v: Tensor, selection: Selection, ranks: int, needs_grad: bool) -> Request:
    """The facts that ranks have in common: the rows of all over one slice, k and v `aligned`."""
    facts = request_of(q, k, v, selection.part(selection.ranges, ranks * k.shape[2], _whole(selection, k)), needs_grad)
    odd = any(x.shape[-1] * x.element_size() % ALIGNED for x in (k, v))
    return msgspec.structs.replace(facts, S=ranks * q.shape[1], aligned=not odd)


def _whole(selection: Selection, k: Tensor) -> bool:
    """Whether no range of whole blocks lies across two slices."""
    return k.shape[2] % (selection.block_size or 1) == 0


def attend(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, q_pos: Tensor | None, scale: float, agreed: Agreed, request: Request
) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] and lse [B,S,G,h] of this rank's rows q [B,S,G,h,Dk] over the slices k, v of all ranks; all of them call it."""
    if request.needs_grad:
        return _Visiting.apply(q, k, v, selection, q_pos, scale, agreed, request)  # type: ignore[no-any-return,no-untyped-call]
    return _forward(_call_here(q, k, v, selection, q_pos, scale, agreed.group), agreed, request)[:2]


class _Visiting(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, selection: Selection, q_pos: Tensor | None, scale: float, agreed: Agreed,
        request: Request,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        call = _call_here(q, k, v, selection, q_pos, scale, agreed.group)
        o, lse, ctx.decision = _forward(call, agreed, request)
        ctx.save_for_backward(call.q, k, v, o, lse, call.q_pos)
        ctx.facts, ctx.agreed = (call.selection, scale, call.settings, call.device), agreed
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative()
        q, k, v, o, lse, positions = ctx.saved_tensors
        selection, scale, settings, device = ctx.facts
        rows = *lse.shape[1:], q.shape[-1]
        do = torch.zeros_like(o) if do is None else do  # the other ranks wait for these
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        group = ctx.agreed.group
        ctx.agreed.before_backward(q.device)
        do, o, lse, dlse = _of_all([do, o, lse, dlse], group)
        call = Call(q, k, v, selection, positions, scale, settings, device)
        dq, dk, dv = run.gradients(call, ctx.decision, o.contiguous(), lse.contiguous(), do, dlse)
        shares = _home(_by_rank(dq, group).contiguous(), group)
        total = shares.sum(0, dtype=torch.promote_types(dq.dtype, torch.float32)).to(dq.dtype)
        return total.view(len(total), *rows), dk, dv, *(None,) * 5


def _call_here(q: Tensor, k: Tensor, v: Tensor, selection: Selection, q_pos: Tensor | None, scale: float, group: dist.ProcessGroup) -> Call:
    """The call of all ranks' rows, in the order of ranks, to this rank's slice: its first key is key 0, and it is all there is."""
    ranks, rank, B, S, keys = dist.get_world_size(group), dist.get_rank(group), *q.shape[:2], k.shape[2]
    device = device_info(q.device)
    call = Call(q, k, v, selection, None, scale, settings_for(device), device)
    first, fits = rank * keys, ranks * keys < torch.iinfo(torch.int32).max
    parts = [q, selection.ranges if fits else selection.ranges.long()]
    call.q, ranges, *given = _of_all(parts if q_pos is None else [*parts, q_pos.long()], group)
    if call.settings.debug_triton and not call.capturing():
        selection.part(ranges, ranks * keys, True).validate()  # whole, so that it fails on all ranks or on none
    if given:
        call.q_pos = given[0] - first
    else:
        after = (ranks - rank) * keys  # where the last of all rows stands, and one more
        call.q_pos = torch.arange(after - ranks * S, after, device=q.device).expand(B, ranks * S)
    # A row before this slice sees nothing of it, one behind it all: what backends make of positions outside the keys.
    ranges = (ranges.clamp(first, first + keys) - first).contiguous()
    call.selection = selection.part(ranges, ranks * keys, _whole(selection, k))
    return call


def _forward(call: Call, agreed: Agreed, request: Request) -> tuple[Tensor, Tensor, Decision]:
    """o and lse of this rank's rows, after all ranks' have met this rank's keys and its own those of all; and the decision that ran."""
    group = agreed.group
    o, lse, decision = run.run_forward(call, agreed.decision)
    run.finish(call, decision, request, o)
    rows = o.shape[1] // dist.get_world_size(group), *o.shape[2:]
    came = _home(packed([_by_rank(o, group), _by_rank(lse, group)]), group)
    part_o, part_lse = unpacked(came, [(o.dtype, rows), (lse.dtype, rows[:-1])])
    return *joined(part_o, part_lse), decision


def joined(part_o: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """o [...,D] and lse [...] of rows from their parts [parts,...,D] and [parts,...] over disjoint keys; 0 and -inf where none has any."""
    lse = part_lse.logsumexp(0)  # at once: added one after another, each part would be rounded
    weights = (part_lse - lse.clamp(min=torch.finfo(lse.dtype).min)).exp()
    return (weights.unsqueeze(-1) * part_o).sum(0).to(part_o.dtype), lse


def _of_all(parts: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Each part [B,S,...] of this rank as that of all ranks, [B,ranks*S,...]: one collective."""
    mine = packed([part.contiguous().flatten(1) for part in parts])
    ranks, (B, size) = dist.get_world_size(group), mine.shape
    every = mine.new_empty(ranks * B, size)
    all_gather(every, mine, group=group)
    each = unpacked(every.view(ranks, B, size), [(part.dtype, part.shape[1:]) for part in parts])
    return [x.transpose(0, 1).flatten(1, 2) for x in each]


def _by_rank(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows [B,ranks*S,...] by the rank that they are from: [ranks,B,numbers]."""
    ranks, (B, rows, *rest) = dist.get_world_size(group), x.shape
    return x.reshape(B, ranks, rows // ranks * math.prod(rest)).transpose(0, 1)


def _home(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x[p] goes to rank p; what came from each rank, likewise."""
    came = torch.empty_like(x)
    dist.all_to_all_single(came, x, group=group)
    return came


def packed(parts: list[Tensor]) -> Tensor:
    """[...,bytes] uint8 of parts [...,numbers] of any dtypes, side by side, each filled up to whole `ALIGNED` bytes."""
    pieces: list[Tensor] = []
    for part in parts:
        piece = part.view(torch.uint8)
        size = piece.shape[-1]
        pieces.append(piece)
        if size < padded(size):
            pieces.append(piece.new_zeros(*piece.shape[:-1], padded(size) - size))
    return torch.cat(pieces, -1)


def unpacked(packets: Tensor, parts: list[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """The parts, views [...,*shape] of such packets, from their dtypes and shapes."""
    found, begin = [], 0
    for dtype, shape in parts:
        size = math.prod(shape) * dtype.itemsize
        found.append(packets[..., begin : begin + size].view(dtype).view(*packets.shape[:-1], *shape))
        begin += padded(size)
    return found
