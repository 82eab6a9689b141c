"""Context parallelism: each rank holds a slice of the sequence, of its queries with their selection and of its keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist
from torch.compiler import is_compiling

from nsa_sel.core import run, transforms
from nsa_sel.core.call import Call, device_info, request_of
from nsa_sel.core.check import as_selection, check_call, check_tensors
from nsa_sel.core.request import Request
from nsa_sel.distributed import cost, exchange_all, exchange_blocks, exchange_rows
from nsa_sel.distributed.agreement import Agreed, agree, begin_call, group_of
from nsa_sel.errors import ArgumentError, BackendError, shown
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from nsa_sel.telemetry import events


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
    """`selection_attention` of a sequence that is cut into one slice a rank; all ranks of `group` call it, and its backward pass.

    Rank r of R holds rows [r*S, (r+1)*S) as q [B,S,G,h,Dk] with their selection [B,S,G,n,2], whose ranges are positions in the whole
    sequence, and keys [r*keys, (r+1)*keys) as k [B,G,keys,Dk] and v [B,G,keys,Dv]: the same sizes on every rank. group: a
    process group or a DeviceMesh of one dimension, by default all ranks. q_pos [S] or [B,S]: positions of the rank's rows in the
    whole sequence, by default R*keys - R*S + r*S + s, as if the rows were its last. The other arguments and the result are those of
    `selection_attention`, for the rank's rows. Where keys and values travel, o, lse and dq are bit-equal to one device's if its backend
    sums a row alike, and dk, dv are sums over ranks; where rows do, o, lse and dq are. Such sums are in float32, and the same each time.

    exchange: "gather" brings all keys and values to every rank, "blocks" only those that its rows chose; with "rows" the queries travel
    instead, to attend where the keys are, and a row's parts of o are joined by their lse; "auto" takes what `exchanged_bytes` and
    `rows_bytes` say is least; `exchanges()` remembers why. Blocks have room for as many as static facts allow (rows times n, or
    all); with count_blocks=True they are counted, which waits for the device at every call. They need whole blocks, and slices of a
    multiple of them.

    Ranks agree before anything travels: once per class of calls rank 0 decides for all. In front of the exchange of every call and of every
    backward pass they compare 8 bytes per rank, which cover all of the above, what was agreed on and the number of the call. On a CPU ranks
    that differ all raise. On a GPU that takes one collective and four small launches, and no host waits for it: where ranks differ, a
    device-side assert ends the CUDA context of each of them before the exchange, and the next call that meets the GPU raises.

    Raises:
        ArgumentError: bad input.
        BackendError: nothing may run the call.
        NsaSelError: ranks differ in sizes, flags, versions, devices or in the order of calls (it names rank and field), a rank does not
            come, or there is no distributed job.
    """
    check_tensors(q, k, v)
    _check_eager(q, k, v)
    q, k, v = transforms.materialized(q, k, v)
    group = group_of(group, "context_parallel_attention")
    begin_call(group)
    if exchange not in get_args(cost.Choice):
        raise ArgumentError("exchange", shown(exchange), ", ".join(get_args(cost.Choice)), "pass one of these names")
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    decode = isinstance(q, Tensor) and q.dim() == 4
    q, k, v = transforms.in_autocast_dtype(q, k, v)
    selection = as_selection(selection)
    q, _, _, selection, scale, q_pos = check_call(q, _repeated(k, ranks), _repeated(v, ranks), selection, scale, q_pos)
    B, S, G, h, Dk = q.shape
    keys, block, device = k.shape[2], selection.block_size, device_info(q.device)
    needs_grad = transforms.needs_grad(q, k, v)
    of = cost.Sizes(
        ranks, B, S, G, h, keys, Dk, v.shape[3], selection.n, block, q.element_size(), selection.ranges.element_size(), q_pos is not None,
        needs_grad,
    )  # fmt: skip
    alike = {"keys": keys, "exchange": exchange, "count_blocks": count_blocks, "scale": scale, "q_pos": of.has_pos, "block_size": block}

    def agreed(request: Request, **more: Any) -> Agreed:
        return agree(request, device, group, backend, q.device, **alike, **more)

    done, route, chosen = _planned(q, k, v, selection, q_pos, of, exchange, count_blocks, agreed, group)
    events.follow(settings_for(device))
    if done.way == "rows":
        k, v = exchange_rows.aligned(k), exchange_rows.aligned(v)
        request = exchange_rows.request(q, k, v, selection, ranks, needs_grad)
        o, lse = exchange_rows.attend(q, k, v, selection, q_pos, scale, agreed(request, index_size=of.index_size), request)
    else:
        request = _request(q, k, v, selection, of)
        if route is not None and not of.within:  # what a row sees of a block may end within it
            request = msgspec.structs.replace(request, block_size=None)
        on = agreed(request)
        if route is not None and chosen is None:
            chosen = _chosen(selection, q, q_pos, of, rank)
        seen = of.first(rank) + S if q_pos is None else ranks * keys
        travels = None if chosen is None or route is None else (chosen, route, of.within)
        o, lse = _ContextParallel.apply(  # type: ignore[no-untyped-call]
            q, k, v, selection, q_pos, seen, scale, travels, on, request
        )
    cost.note(done)
    if decode:
        o, lse = o.squeeze(1), lse.squeeze(1)
    return (o, lse) if return_lse else o


def _repeated(x: Any, ranks: int) -> Any:
    """A view that is as large as all ranks' slices together, for checks of shapes; what is no slice stays as it is."""
    if not isinstance(x, Tensor) or x.dim() != 4:
        return x
    if not x.shape[2]:
        raise ArgumentError("k", f"of shape {tuple(x.shape)}", "at least one key on each rank", "give every rank a slice of the sequence")
    B, G, keys, D = x.shape
    batch, group, _, number = x.stride()
    return x.as_strided((B, G, ranks * keys, D), (batch, group, 0, number))


def _request(q: Tensor, k: Tensor, v: Tensor, selection: Selection, of: cost.Sizes) -> Request:
    """The facts that ranks have in common: a rank's rows over the keys of all, laid out as they are gathered.

    What `measure()` found of one rank's rows is not among them.
    """
    both = k.new_empty(1, of.B, of.G, of.Dk + of.Dv).expand(of.ranks * of.keys, -1, -1, -1).permute(1, 2, 0, 3)
    alike = Selection(selection.ranges, selection.block_size, selection.max_length)
    return request_of(q, both[..., : of.Dk], both[..., of.Dk :], alike, of.needs_grad)


def _check_eager(*tensors: Tensor) -> None:
    """BackendError where something traces the call: it is no op, and its collectives would be missed."""
    if is_compiling():
        raise BackendError(
            "context_parallel_attention is called in a function that torch.compile traces; allowed: eager calls. Remedy: call it in a"
            " function under torch.compiler.disable, and compile the rest."
        )
    transforms.check_traced("context_parallel_attention", *tensors)


def _planned(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, q_pos: Tensor | None, of: cost.Sizes, exchange: cost.Choice, count: bool,
    agreed: Callable[[Request], Agreed], group: dist.ProcessGroup,
) -> tuple[cost.Exchange, exchange_blocks.Route | None, exchange_blocks.Chosen | None]:  # fmt: skip
    """The exchange to be done; how blocks travel, None where they don't; which of them the rank's rows chose, if they were counted."""
    rank, obstacle = dist.get_rank(group), cost.obstacle(of)
    counts = count and exchange in ("auto", "blocks") and obstacle is None
    if counts or (exchange == "blocks" and obstacle is not None):  # what follows is a collective, or an error that all ranks raise
        agreed(_request(q, k, v, selection, of))
    if exchange == "blocks" and obstacle is not None:
        remedy = "pass exchange='rows' or 'gather', or a selection of whole blocks and slices of a multiple of them"
        raise ArgumentError("exchange", f"'blocks', but {obstacle}", "rows, gather, auto", remedy)
    chosen = None
    if counts:
        chosen = _chosen(selection, q, q_pos, of, rank)
        slots: list[list[int]] | None = exchange_blocks.counted_slots(chosen.wanted, rank, group)
        done = cost.cheapest_exchange(of, exchange, slots, counted=True)
    else:
        done, slots = cost.planned(of, exchange)
    if done.way != "blocks" or slots is None or of.block_size is None:
        return done, None, None
    blocks = of.keys // of.block_size
    own = blocks if of.within else min(blocks, of.S * of.n)
    return done, exchange_blocks.Route(slots, rank, of.block_size, of.keys, own), chosen


def _chosen(selection: Selection, q: Tensor, q_pos: Tensor | None, of: cost.Sizes, rank: int) -> exchange_blocks.Chosen:
    first = of.first(rank)
    positions = torch.arange(first, first + of.S, device=q.device).expand(of.B, of.S) if q_pos is None else q_pos.long()
    assert of.block_size is not None, "obstacle() is asked first"
    return exchange_blocks.chosen(selection.ranges, positions, of.block_size, of.ranks * of.keys // of.block_size)


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, selection: Selection, q_pos: Tensor | None, seen: int, scale: float,
        travels: tuple[exchange_blocks.Chosen, exchange_blocks.Route, bool] | None, agreed: Agreed, request: Request,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        device, group = device_info(q.device), agreed.group
        travelled = None
        if travels is None:
            k_seen, v_seen = (x[:, :, :seen] for x in exchange_all.gather(k, v, group))
        else:
            chosen, route, within = travels
            k_seen, v_seen, travelled = exchange_blocks.exchange(k, v, chosen.wanted, route, group)
            selection, q_pos = exchange_blocks.compact_selection(selection, chosen, route, within)
        call = Call(q, k_seen, v_seen, selection, q_pos, scale, settings_for(device), device)
        if call.settings.debug_triton and not call.capturing():
            selection.validate()
        o, lse, decision = run.run_forward(call, agreed.decision)
        run.finish(call, decision, request, o)
        ctx.save_for_backward(q, k_seen, v_seen, o, lse, selection.ranges, q_pos)
        ctx.facts, ctx.decision, ctx.agreed = (selection, scale, call.settings, device), decision, agreed
        ctx.travelled, ctx.keys = travelled, k.shape[2]
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative()
        q, k_seen, v_seen, o, lse, _, q_pos = ctx.saved_tensors
        selection, scale, settings, device = ctx.facts
        if do is None and dlse is None:
            do = torch.zeros_like(o)  # the other ranks wait for this one's gradients
        dq, dk, dv = run.gradients(Call(q, k_seen, v_seen, selection, q_pos, scale, settings, device), ctx.decision, o, lse, do, dlse)
        ctx.agreed.before_backward(q.device)
        if ctx.travelled is None:
            dk, dv = exchange_all.scatter_sums(dk, dv, ctx.keys, ctx.agreed.group)
        else:
            dk, dv = exchange_blocks.return_sums(dk, dv, ctx.travelled, ctx.agreed.group)
        return dq, dk, dv, *(None,) * 7
