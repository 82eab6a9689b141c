"""Context parallelism: each rank holds one slice of the sequence: its queries with their selection, and its keys and
values."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, Literal, NamedTuple, get_args, overload

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist

from nsa_sel.core import decide, run, transforms
from nsa_sel.core.arguments import check_tensors
from nsa_sel.core.call import Call, device_info, request_of
from nsa_sel.core.check import as_selection, check_call
from nsa_sel.core.decide import Decided
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import SHARING_TOKENS, DeviceInfo, Request
from nsa_sel.distributed import cost, exchange_keys, exchange_rows
from nsa_sel.distributed.agreement import compare_call, group_of
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from nsa_sel.telemetry import log


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, *, group: Any = None, scale: float | None = None,
    q_pos: Tensor | None = None, return_lse: Literal[False] = False, backend: str | None = None, exchange: cost.Choice = "auto",
    count_blocks: bool = False,
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, *, group: Any = None, scale: float | None = None,
    q_pos: Tensor | None = None, return_lse: Literal[True], backend: str | None = None, exchange: cost.Choice = "auto",
    count_blocks: bool = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | Tensor,
    *,
    group: Any = None,
    scale: float | None = None,
    q_pos: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    exchange: cost.Choice = "auto",
    count_blocks: bool = False,
) -> Any:
    """`selection_attention` of a sequence that is split into one slice per rank.

    All ranks of `group` call it, and run its backward pass, in the same order. Rank r of R holds rows [r*S, (r+1)*S)
    and keys [r*keys, (r+1)*keys) of the sequence; sizes are equal on all ranks. docs/distributed.md compares the
    exchanges, says which results are bit-equal to one device's, and what happens when ranks differ. torch.compile is
    not supported.

    Args:
        q: [B,S,G,h,Dk], or [B,G,h,Dk] for one query per rank (decode): this rank's rows.
        k: [B,G,keys,Dk]: this rank's keys.
        v: [B,G,keys,Dv]: this rank's values.
        selection: of this rank's rows, in positions of the whole sequence: a `Selection`, or ranges [B,S,G,n,2] int32
            or int64.
        group: process group or DeviceMesh of one dimension, by default all ranks.
        scale, backend: as of `selection_attention`.
        q_pos: [S] or [B,S] int32 or int64, positions of this rank's rows in the whole sequence, by default R*keys - R*S
            + r*S + s.
        return_lse: also return the log-sum-exp.
        exchange: "gather" sends all keys and values to every rank. "blocks" sends only the blocks that the rank's rows
            select; it needs whole blocks, and slices of a multiple of them. "rows" sends the queries to the ranks that
            hold the keys; each row's partial results are merged by their lse. "auto" takes the one with the fewest
            bytes by `exchanged_bytes` and `rows_bytes`; `exchanges()` records why.
        count_blocks: count the selected blocks, which waits for the device at every call. By default their number is
            bounded by static facts: rows times n, or all of a slice.

    Returns:
        o [B,S,G,h,Dv] ([B,G,h,Dv] for decode) of this rank's rows in q's dtype. With return_lse=True (o, lse): lse
        [B,S,G,h] float32 (float64 for float64 inputs).

    Raises:
        ArgumentError: bad input.
        BackendError: no backend may run the call; something traces it.
        NsaSelError: there is no distributed job; or ranks differ in sizes, arguments, flags, versions or devices at the
            first call of the group, or at any call with NSA_DEBUG_TRITON=1. It names rank and field.
    """
    check_tensors(q=q, k=k, v=v)
    transforms.check_traced("context_parallel_attention", q, k, v, compiles=False)
    q, k, v = transforms.materialized(q, k, v)
    group = group_of(group, "context_parallel_attention")
    check_exchange(exchange)
    decode = isinstance(q, Tensor) and q.dim() == 4
    q, k, v = transforms.in_autocast_dtype(q, k, v)
    part = _checked(q, k, v, selection, q_pos, scale, group)
    compare_call(group, q, "context_parallel_attention", lambda: {
        **part.sizes._asdict(), "dtype": str(q.dtype), "max_length": part.selection.max_length, "scale": part.scale, "backend": backend,
        "exchange": exchange, "count_blocks": count_blocks,
    })  # fmt: skip
    o, lse = _attend(part, exchange, count_blocks, backend)
    if decode:
        o, lse = o.squeeze(1), lse.squeeze(1)
    return (o, lse) if return_lse else o


def selected_branch(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, q_pos: Tensor | None, scale: float, group: dist.ProcessGroup,
    backend: str | None, exchange: cost.Choice,
) -> Tensor:  # fmt: skip
    """Return the o of `context_parallel_attention` as part of a layer, whose ranks have compared their calls."""
    return _attend(_checked(*transforms.materialized(q, k, v), selection, q_pos, scale, group), exchange, False, backend)[0]


def check_exchange(exchange: str) -> None:
    """Raise ArgumentError unless such an exchange exists."""
    if exchange not in get_args(cost.Choice):
        raise ArgumentError("exchange", shown(exchange), ", ".join(get_args(cost.Choice)), "pass one of these names")


class _Slice(NamedTuple):
    """Checked arguments of this rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    selection: Selection
    q_pos: Tensor | None
    scale: float
    sizes: cost.Sizes
    group: dist.ProcessGroup


def _checked(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, q_pos: Tensor | None, scale: float | None, group: dist.ProcessGroup
) -> _Slice:
    """Check this rank's slice against keys and values of the whole sequence."""
    ranks = dist.get_world_size(group)
    selection = as_selection(selection)
    q, _, _, selection, scale, q_pos = check_call(q, _repeated(k, ranks), _repeated(v, ranks), selection, scale, q_pos)
    B, S, G, h, Dk = q.shape
    sizes = cost.Sizes(
        ranks, B, S, G, h, k.shape[2], Dk, v.shape[3], selection.n, selection.block_size, q.element_size(),
        selection.ranges.element_size(), q_pos is not None, transforms.needs_grad(q, k, v),
    )  # fmt: skip
    return _Slice(q, k, v, selection, q_pos, scale, sizes, group)


def _repeated(x: Any, ranks: int) -> Any:
    """Return a view as large as all ranks' slices together, to check shapes; anything but a 4-d tensor is returned as
    it is."""
    if not isinstance(x, Tensor) or x.dim() != 4:
        return x
    if not x.shape[2]:
        raise ArgumentError("k", f"of shape {tuple(x.shape)}", "at least one key on each rank", "give every rank a slice of the sequence")
    B, G, keys, D = x.shape
    batch, group, _, number = x.stride()
    return x.as_strided((B, G, ranks * keys, D), (batch, group, 0, number))


def _attend(part: _Slice, exchange: cost.Choice, count_blocks: bool, backend: str | None) -> tuple[Tensor, Tensor]:
    """Return o and lse of this rank's rows."""
    q, k, v, selection, q_pos, scale, sizes, group = part
    device, obstacle = device_info(q.device), cost.obstacle(sizes)
    if exchange == "blocks" and obstacle is not None:
        raise ArgumentError(
            "exchange",
            f"'blocks', but {obstacle}",
            "rows, gather, auto",
            "pass exchange='rows' or 'gather', or a selection of whole blocks and slices of a multiple of them",
        )

    def choose() -> exchange_keys.Chosen:
        assert sizes.block_size is not None, "without blocks there is an obstacle"
        return exchange_keys.chosen(selection.ranges, _positions(part), sizes.block_size, sizes.ranks * sizes.keys // sizes.block_size)

    chosen: exchange_keys.Chosen | None = None
    if count_blocks and exchange in ("auto", "blocks") and obstacle is None:
        chosen = choose()
        slots: list[list[int]] | None = exchange_keys.counted_slots(chosen.wanted, part.group.rank(), group)
        done = cost.cheapest_exchange(sizes, exchange, slots, counted=True)
    else:
        done, slots = cost.planned(sizes, exchange)
    log.follow(settings_for(device))
    if done.kind == "rows":
        k, v = exchange_rows.aligned(k), exchange_rows.aligned(v)
        request = exchange_rows.request(q, k, v, selection, sizes.ranks, sizes.needs_grad)
        decision = decide.decide(request, device, backend)
        o, lse = exchange_rows.AttendRows.apply(q, k, v, selection, q_pos, scale, group, decision, request)  # type: ignore[no-untyped-call]
    else:
        # One rank's rows over the keys of all ranks, laid out as they are gathered, without what measure() counted in
        # these rows.
        both = k.new_empty(1, sizes.B, sizes.G, sizes.Dk + sizes.Dv).expand(sizes.ranks * sizes.keys, -1, -1, -1).permute(1, 2, 0, 3)
        unmeasured = Selection(selection.ranges, selection.block_size, selection.max_length)
        request = request_of(q, both[..., : sizes.Dk], both[..., sizes.Dk :], unmeasured, sizes.needs_grad)
        blocks = None
        if done.kind == "blocks" and slots is not None and sizes.block_size is not None:
            held = sizes.keys // sizes.block_size
            own = held if sizes.within else min(held, sizes.S * sizes.n)
            route = exchange_keys.BlockRoute(slots, part.group.rank(), sizes.block_size, sizes.keys, own)
            blocks = chosen or choose(), route, sizes.within
        if blocks is not None and not sizes.within:  # rows may see only the beginning of a block
            request = msgspec.structs.replace(request, block_size=None)
        elif backend is None:
            request = _with_sharing_of_rank_0(request, device, part)
        decision = decide.decide(request, device, backend)
        o, lse = _ContextParallel.apply(part, blocks, decision, request, q, k, v, q_pos)  # type: ignore[no-untyped-call]
    cost.note(done)
    return o, lse


_sharing: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, tuple[float, ...]]] = weakref.WeakKeyDictionary()


def _with_sharing_of_rank_0(request: Request, device: DeviceInfo, part: _Slice) -> Request:
    """Return the request with the share of blocks that neighboring rows have in common, as rank 0 counts it in its own
    rows.

    Rank 0 counts and broadcasts at the first call of a kind, so that all ranks take the same decisions. Waits for the
    device then.
    """
    if not decide.countable(request) or settings_for(device).count_sharing == "off":
        return request
    counts, kind = _sharing.setdefault(part.group, {}), decide.kind_of(request, device)
    if kind not in counts:
        if not decide.may_wait(part.q):
            return request
        count = torch.zeros(len(SHARING_TOKENS), dtype=torch.float64, device=part.q.device)
        if part.group.rank() == 0:
            sharing = decide.count_rows(request, part.q, part.selection, _positions(part), None)
            count.copy_(torch.tensor(sharing, dtype=torch.float64, device="cpu"))
        dist.broadcast(count, group=part.group, group_src=0)
        counts[kind] = tuple(count.tolist())
    return msgspec.structs.replace(request, sharing=counts[kind], counted=True)


def _positions(part: _Slice) -> Tensor:
    """Return the positions [B,S] of this rank's rows in the whole sequence."""
    of, first = part.sizes, part.sizes.first(part.group.rank())
    return torch.arange(first, first + of.S, device=part.q.device).expand(of.B, of.S) if part.q_pos is None else part.q_pos.long()


class _ContextParallel(torch.autograd.Function):
    """The exchanges "gather" and "blocks". The tensors of `part` are also direct arguments, which autograd needs to
    see."""

    @staticmethod
    def forward(
        ctx: Any, part: _Slice, blocks: tuple[exchange_keys.Chosen, exchange_keys.BlockRoute, bool] | None, decision: Decision,
        request: Request, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        selection, sizes, group, sent = part.selection, part.sizes, part.group, None
        if blocks is None:
            visible = sizes.ranks * sizes.keys if q_pos is not None else sizes.first(part.group.rank()) + sizes.S
            k_all, v_all = (x[:, :, :visible] for x in exchange_keys.gather(k, v, group))
        else:
            chosen, route, within = blocks
            k_all, v_all, sent = exchange_keys.exchange(k, v, chosen.wanted, route, group)
            selection, q_pos = exchange_keys.compact_selection(selection, chosen, route, within)
        device = device_info(q.device)
        call = Call(q, k_all, v_all, selection, q_pos, part.scale, settings_for(device), device)
        if call.settings.debug_triton and not call.capturing():
            selection.validate()
        o, lse, decision = run.run_forward(Decided(call, decision, request))
        ctx.save_for_backward(q, k_all, v_all, o, lse, selection.ranges, q_pos)
        ctx.facts, ctx.decision, ctx.group = (selection, part.scale, call.settings, device), decision, group
        ctx.sent, ctx.keys = sent, sizes.keys
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative()
        q, k_all, v_all, o, lse, _, q_pos = ctx.saved_tensors
        selection, scale, settings, device = ctx.facts
        if do is None and dlse is None:
            do = torch.zeros_like(o)  # the other ranks wait for this one's gradients
        dq, dk, dv = run.gradients(Call(q, k_all, v_all, selection, q_pos, scale, settings, device), ctx.decision, o, lse, do, dlse)
        if ctx.sent is None:
            dk, dv = exchange_keys.scatter_sums(dk, dv, ctx.keys, ctx.group)
        else:
            dk, dv = exchange_keys.return_sums(dk, dv, ctx.sent, ctx.group)
        return None, None, None, None, dq, dk, dv, None
