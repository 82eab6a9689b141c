"""Context parallelism: each rank holds a slice of the sequence, of its queries with their selection and of its keys and values."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist
from torch.compiler import is_compiling

from nsa_sel import attention, observe
from nsa_sel.call import Call, as_selection, check_call, device_info, request_of
from nsa_sel.config import settings_for
from nsa_sel.decision import Decision
from nsa_sel.distributed import cost, gathered, travelling
from nsa_sel.distributed.agreement import agree
from nsa_sel.errors import ArgumentError, BackendError, NsaSelError
from nsa_sel.request import Request
from nsa_sel.selection import Selection

Choice = Literal["auto", "gather", "blocks"]


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
    exchange: Choice = "auto",
    count_blocks: bool = False,
) -> Any:
    """`selection_attention` of a sequence that is cut into one slice a rank; all ranks of `group` call it, and its backward pass.

    Rank r of R holds rows [r*S, (r+1)*S) as q [B,S,G,h,Dk] with their selection [B,S,G,n,2], whose ranges are positions in the whole
    sequence, and keys [r*keys, (r+1)*keys) as k [B,G,keys,Dk] and v [B,G,keys,Dv]: the same sizes on every rank, keys >= S. group: a
    process group or a DeviceMesh of one dimension, by default all ranks. q_pos [S] or [B,S]: positions of the rank's rows in the
    whole sequence, by default R*keys - R*S + r*S + s, as if the rows were its last. The other arguments and the result are those of
    `selection_attention`, for the rank's rows; o, lse and dq are bit-equal to one device's where its backend sums a row
    alike, and dk, dv are sums over ranks, in float32 and in the order of ranks.

    exchange: "gather" brings all keys and values to every rank, "blocks" only those that its rows chose, and "auto" takes what
    `exchanged_bytes` says is less; `exchanges()` remembers why. Blocks have room for as many as static facts allow (rows times n, or
    all); with count_blocks=True they are counted, which waits for the device at every call. They need whole blocks, and slices of a
    multiple of them.

    Ranks agree before anything travels: once for a class of calls rank 0 decides for all. Raises ArgumentError for bad input,
    BackendError where nothing may run the call, NsaSelError naming rank and field where ranks differ in sizes, flags, versions or
    devices, or where a rank does not come.
    """
    if is_compiling():
        raise BackendError(
            "context_parallel_attention is called in a function that torch.compile traces; allowed: eager calls. Remedy: call it in a"
            " function under torch.compiler.disable, and compile the rest."
        )
    if exchange not in get_args(Choice):
        raise ArgumentError("exchange", repr(exchange), ", ".join(get_args(Choice)), "pass one of these names")
    group = _group(group)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    decode = isinstance(q, Tensor) and q.dim() == 4
    q, k, v = attention.in_autocast_dtype(q, k, v)
    selection = as_selection(selection)
    q, _, _, selection, scale, q_pos = check_call(q, _repeated(k, ranks), _repeated(v, ranks), selection, scale, q_pos)
    B, S, G = q.shape[:3]
    keys = k.shape[2]
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    request = _request(q, k, v, selection, ranks, needs_grad)
    alike = {"keys": keys, "exchange": exchange, "count_blocks": count_blocks, "scale": scale, "q_pos": q_pos is not None}
    decision = agree(request, device_info(q.device), group, backend, **alike)

    first = ranks * (keys - S) + rank * S  # position of the rank's first row
    positions = torch.arange(first, first + S, device=q.device).expand(B, S) if q_pos is None else q_pos.long()
    within = q_pos is None and keys == S
    wanted, route, done = _planned(k, request, selection, positions, exchange, count_blocks, within, group)
    if done.way == "blocks" and not within:  # what a row sees of a block may end within it
        request = msgspec.structs.replace(request, block_size=None)
        decision = agree(request, device_info(q.device), group, backend, **alike)
    cost.note(done)
    observe.follow(settings_for(device_info(q.device)).debug_log)
    travels = (wanted, route, within) if done.way == "blocks" else None
    seen = first + S if q_pos is None else ranks * keys
    o, lse = _ContextParallel.apply(  # type: ignore[no-untyped-call]
        q, k, v, selection, positions, seen, q_pos is None, scale, travels, group, decision, request
    )
    if decode:
        o, lse = o.squeeze(1), lse.squeeze(1)
    return (o, lse) if return_lse else o


def _group(group: Any) -> dist.ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()):
        raise NsaSelError(
            "context_parallel_attention is called outside a distributed job; allowed: after torch.distributed.init_process_group."
            " Remedy: launch it with torchrun and initialise, or call selection_attention."
        )
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ArgumentError("group", f"a mesh of {group.ndim} dimensions", "one dimension", "pass mesh['name of the dimension']")
        return group.get_group()  # type: ignore[no-any-return]
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError("group", f"a {type(group).__name__}", "a ProcessGroup or a DeviceMesh", "leave it out for all ranks")
    return group


def _repeated(x: Any, ranks: int) -> Any:
    """A view that is as large as all ranks' slices together, for checks of shapes; what is no slice stays as it is."""
    if not isinstance(x, Tensor) or x.dim() != 4:
        return x
    if not x.shape[2]:
        raise ArgumentError("k", f"of shape {tuple(x.shape)}", "at least one key on each rank", "give every rank a slice of the sequence")
    return x[:, :, :1].expand(-1, -1, ranks * x.shape[2], -1)


def _request(q: Tensor, k: Tensor, v: Tensor, selection: Selection, ranks: int, needs_grad: bool) -> Request:
    """The facts that ranks have in common: a rank's rows over the keys of all, laid out as they are gathered.

    What `measure()` found of one rank's rows is not among them.
    """
    B, G, keys, Dk = k.shape
    both = k.new_empty(1, B, G, Dk + v.shape[-1]).expand(ranks * keys, -1, -1, -1).permute(1, 2, 0, 3)
    alike = Selection(selection.ranges, selection.block_size, selection.max_length)
    return request_of(q, both[..., :Dk], both[..., Dk:], alike, needs_grad)


def _planned(
    k: Tensor, request: Request, selection: Selection, positions: Tensor, exchange: Choice, count: bool, within: bool,
    group: dist.ProcessGroup,
) -> tuple[Tensor | None, travelling.Route | None, cost.Exchange]:  # fmt: skip
    """Which blocks the rank's rows need and how they would travel, None where they can't or need not; and the exchange to be done."""
    ranks, rank, keys, block = dist.get_world_size(group), dist.get_rank(group), k.shape[2], request.block_size
    sizes: Any = {
        "B": request.B, "G": request.G, "keys": keys, "Dk": request.Dk, "Dv": request.Dv, "element_size": k.element_size(),
        "needs_grad": request.needs_grad,
    }  # fmt: skip
    obstacle = None
    if block is None:
        obstacle = "the selection is not of whole blocks"
    elif keys % block:
        obstacle = f"a rank's {keys} keys are no multiple of the block size {block}"
    if block is None or obstacle is not None:
        if exchange == "blocks":
            remedy = "pass exchange='gather', or a selection of whole blocks and slices of a multiple of them"
            raise ArgumentError("exchange", f"'blocks', but {obstacle}", "gather, auto", remedy)
        gather, _ = cost.exchanged_bytes([[0] * ranks] * ranks, block_size=1, **sizes)
        return None, None, cost.Exchange("gather", ranks, gather, None, 0, False, obstacle or "")
    wanted, counted = None, count and exchange != "gather"
    if counted:
        wanted = travelling.needed(selection.ranges, positions, block, ranks * keys // block)
        slots = travelling.counted_slots(wanted, rank, group)
    else:
        slots = cost.static_slots(ranks, keys // block, request.S, request.n, within)
    gather, blocks = cost.exchanged_bytes(slots, block_size=block, **sizes)
    way, why = cost.cheaper(gather, blocks)
    if exchange != "auto":
        way, why = exchange, "asked for by exchange="
    done = cost.Exchange(way, ranks, gather, blocks, max(sum(row) for row in slots), counted, why)
    if way == "gather":
        return None, None, done
    if wanted is None:
        wanted = travelling.needed(selection.ranges, positions, block, ranks * keys // block)
    own = keys // block if within else min(keys // block, request.S * request.n)
    return wanted, travelling.Route(slots, rank, block, keys, own), done


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, selection: Selection, positions: Tensor, seen: int, default: bool, scale: float,
        travels: tuple[Tensor, travelling.Route, bool] | None, group: dist.ProcessGroup, decision: Decision, request: Request,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        device = device_info(q.device)
        travelled = None
        if travels is None:
            k_seen, v_seen = (x[:, :, :seen] for x in gathered.gather(k, v, group))
            q_pos = None if default else positions
        else:
            wanted, route, within = travels
            k_seen, v_seen, travelled = travelling.exchange(k, v, wanted, route, group)
            selection, q_pos = travelling.compact_selection(selection, positions, wanted, route, within)
        call = Call(q, k_seen, v_seen, selection, q_pos, scale, settings_for(device), device)
        if call.settings.debug_triton and not call.capturing():
            selection.validate()
        o, lse, decision = attention.run_forward(call, decision)
        attention.finish(call, decision, request, o)
        ctx.save_for_backward(q, k_seen, v_seen, o, lse, selection.ranges, q_pos)
        ctx.facts, ctx.decision, ctx.group = (selection, scale, call.settings, device), decision, group
        ctx.travelled, ctx.keys = travelled, k.shape[2]
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            attention.refuse_second_derivative()
        q, k_seen, v_seen, o, lse, _, q_pos = ctx.saved_tensors
        selection, scale, settings, device = ctx.facts
        if do is None and dlse is None:
            do = torch.zeros_like(o)  # the other ranks wait for this one's gradients
        dq, dk, dv = attention.gradients(Call(q, k_seen, v_seen, selection, q_pos, scale, settings, device), ctx.decision, o, lse, do, dlse)
        if ctx.travelled is None:
            dk, dv = gathered.scatter_sums(dk, dv, ctx.keys, ctx.group)
        else:
            dk, dv = travelling.return_sums(dk, dv, ctx.travelled, ctx.group)
        return dq, dk, dv, *(None,) * 9
