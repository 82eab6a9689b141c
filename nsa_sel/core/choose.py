"""One call of `compressed_attention`, run as `selection_attention` is, with backends of the kind "choose"."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.core import fallback, registry, transforms
from nsa_sel.core.arguments import Bounds, range_dtype
from nsa_sel.core.call import DTYPES, device_info, is_aligned
from nsa_sel.core.check import check_scale
from nsa_sel.core.choose_call import SCRATCH, ChooseCall, PagedKeys, Rule, Sequences
from nsa_sel.core.decide import decide
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import Request
from nsa_sel.telemetry import events, target


class DecidedChoice(NamedTuple):
    """A checked call of the kind "choose", its decision, and its exact request."""

    call: ChooseCall
    decision: Decision
    request: Request


def begin(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, S_kv: int, scale: float, q_pos: Tensor | None, needs_grad: bool, backend: str | None,
    bounds: Bounds | None = None,
) -> DecidedChoice:  # fmt: skip
    """Decide on checked arguments; `bounds` of the sequences of a packed batch."""
    request = request_of(q, k, v, rule, S_kv, needs_grad)
    return decided_call(q, k, v, rule, scale, q_pos, decide(request, device_info(q.device), backend), request, bounds)


def over_pages(
    q: Tensor, k: Tensor, v: Tensor, pages: PagedKeys, rule: Rule, S_kv: int, q_pos: Tensor, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o [B,S,G,h,Dv], lse [B,S,G,h] and ranges [B,S,G,n,2] of checked rows at q_pos [B,S], without gradients; k and v as of
    `ChooseCall.pages`, with room for S_kv keys of a sequence."""
    decided = begin(q, k, v, rule, S_kv, check_scale(None, q.shape[4]), q_pos, False, backend)
    decided.call.pages = pages
    return run_forward(decided)[:3]


def decided_call(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, scale: float, q_pos: Tensor | None, decision: Decision, request: Request,
    bounds: Bounds | None = None,
) -> DecidedChoice:  # fmt: skip
    """The call of checked arguments with this decision and this exact request."""
    settings, S_kv = decision.settings, request.S_kv
    target.follow(settings)
    scratch = min(SCRATCH, settings.workspace_bytes)
    longest = S_kv if bounds is None else bounds.longest(S_kv)
    call = ChooseCall(q, k, v, rule, -(-longest // rule.block_size), S_kv - q.shape[1], scale, q_pos, scratch, settings=settings)
    call.sequences = None if bounds is None else Sequences.of(bounds, rule, q)
    return DecidedChoice(call, decision, request)


def choose(decided: DecidedChoice) -> tuple[Tensor, Tensor, Tensor]:
    """o [B,S,G,h,Dv], lse [B,S,G,h] and ranges [B,S,G,n,2]; autograd records o and lse if the request needs gradients."""
    if not decided.request.needs_grad:
        return run_forward(decided)[:3]
    o, lse, ranges = _Choose.apply(decided.call.q, decided.call.k, decided.call.v, decided)  # type: ignore[no-untyped-call]
    return o, lse, ranges


def request_of(q: Tensor, k: Tensor, v: Tensor, rule: Rule, S_kv: int, needs_grad: bool) -> Request:
    """The request of a checked call."""
    B, S, G, h, Dk = q.shape
    return Request(
        B=B, S=S, S_kv=S_kv, G=G, h=h, Dk=Dk, Dv=v.shape[3], n=rule.n, block_size=rule.block_size, max_length=S_kv, dtype=DTYPES[q.dtype],
        needs_grad=needs_grad, aligned=is_aligned(q, k, v),
        kind="choose", compress=(rule.compress_block, rule.compress_stride),
    )  # fmt: skip


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, decided: DecidedChoice) -> tuple[Tensor, Tensor, Tensor]:
        call, nothing = decided.call, q.new_empty(0)
        o, lse, ranges, ctx.decision = run_forward(decided)
        bounds = None if call.sequences is None else call.sequences.rows
        ctx.save_for_backward(q, k, v, o, lse, *transforms.versioned(call.q_pos, bounds))
        ctx.call = call.of(nothing, nothing, nothing)  # hooks on saved tensors may keep the others elsewhere
        ctx.mark_non_differentiable(ranges)
        ctx.set_materialize_grads(False)
        return o, lse, ranges

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _ranges: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative("compressed_attention")
        if do is None and dlse is None:
            return None, None, None, None
        q, k, v, o, lse = ctx.saved_tensors[:5]
        return *gradients(ctx.call.of(q, k, v), ctx.decision, o, lse, do, dlse), None


def gradients(
    call: ChooseCall, decision: Decision, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a call with outputs o and lse; do or dlse is None if o or lse is unused."""
    return gradients_and_delta(call, decision, o, lse, do, dlse)[:3]


def gradients_and_delta(
    call: ChooseCall, decision: Decision, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`gradients`, and delta = sum(do * o) - dlse [B,S,G,h] if the backend gives it."""
    transforms.check_gradients(do, dlse, name="compressed_attention")
    if call.q.numel() == 0 or call.k.numel() == 0:
        return torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v), None
    do = torch.zeros_like(o) if do is None else do.resolve_neg()
    do = do if do.stride(-1) == 1 else do.contiguous()
    dlse = None if dlse is None else dlse.resolve_neg()
    work = fallback.with_delta(registry.load_chooser, call, o, lse, do, dlse)
    found, decision = fallback.run(call, decision, "backward", work)
    events.count("backward", str(decision.backward))
    return found


def run_forward(decided: DecidedChoice) -> tuple[Tensor, Tensor, Tensor, Decision]:
    """o, lse, ranges, and the decision of the backend that ran."""
    call, decision, request = decided
    if call.q.numel() == 0:
        o = call.q.new_empty(*call.q.shape[:-1], call.v.shape[3])
        wide = torch.promote_types(call.q.dtype, torch.float32)
        ranges = o.new_empty(*o.shape[:3], call.rule.n, 2, dtype=range_dtype(call.rule.block_size))
        return o, o.new_empty(o.shape[:-1], dtype=wide), ranges, decision
    (o, lse, ranges), decision = fallback.run(call, decision, "forward", lambda name: _forward(name, call))
    events.record(decision, request)
    return o, lse, ranges, decision


def _forward(name: str, call: ChooseCall) -> tuple[Tensor, Tensor, Tensor]:
    module = registry.load_chooser(name)
    found: tuple[Tensor, Tensor, Tensor]
    found = module.paged(call) if call.pages is not None and hasattr(module, "paged") else module.forward(call.gathered())
    return found


def attend_again(decided: DecidedChoice) -> tuple[Tensor, Tensor, Decision]:
    """o and lse of a call whose blocks are known already, and the decision of the backend that ran: `run_forward`, without choosing where
    the backend can leave that out."""
    call, decision, _ = decided
    if call.q.numel() == 0:
        return *run_forward(decided)[:2], decision

    def work(name: str) -> tuple[Tensor, ...]:
        module = registry.load_chooser(name)
        return getattr(module, "attention", module.forward)(call)  # type: ignore[no-any-return]

    (o, lse, *_), decision = fallback.run(call, decision, "forward", work)
    events.record(decision, decided.request)
    return o, lse, decision
