"""Run a decided call: forward and gradients, and the autograd Function of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_sel.core import compare, fallback, forward, registry, transforms
from nsa_sel.core.begin import Decided
from nsa_sel.core.call import Call, Workspace
from nsa_sel.core.decision import Decision
from nsa_sel.telemetry import events


def attend(decided: Decided, workspace: Tensor | None = None, with_lse: bool = True) -> tuple[Tensor, Any]:
    """o [B,S,G,h,Dv] and lse [B,S,G,h], recorded by autograd if the request needs gradients. Then lse is None unless with_lse: every output
    takes PyTorch microseconds."""
    if workspace is not None:
        decided.call.workspace = Workspace.of(workspace, decided.call.q.device)
    if not decided.request.needs_grad:
        return run_forward(decided)[:2]
    found = _apply(decided.call.q, decided.call.k, decided.call.v, decided, with_lse)
    return found if with_lse else (found, None)


_LAYOUT = "layout"  # a key of `Call.known`


class _SelectionAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, decided: Decided, with_lse: bool) -> tuple[Tensor, Tensor] | Tensor:
        call = decided.call
        o, lse, ctx.decision = run_forward(decided)
        ctx.save_for_backward(q, k, v, o, lse, *transforms.versioned(call.selection.ranges, call.q_pos))
        known = call.known
        if _LAYOUT not in known:
            known[_LAYOUT] = _layout(q, k, v)
        ctx.others, ctx.known = call.others(), known
        ctx.set_materialize_grads(False)
        return (o, lse) if with_lse else o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative()
        if do is None and dlse is None:
            return (None,) * 5
        q, k, v, o, lse = ctx.saved_tensors[:5]
        call = Call(q, k, v, *ctx.others)
        if _layout(q, k, v) == ctx.known[_LAYOUT]:  # hooks on saved tensors may return others
            call.known = ctx.known
        return *gradients(call, ctx.decision, o, lse, do, dlse), None, None


# `Function.apply` without what it does for torch.func, which no call reaches under: some microseconds of Python.
_apply: Callable[..., Any] = super(torch.autograd.Function, _SelectionAttention).apply


def _layout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """What may differ between tensors of the same values."""
    return q.stride(), k.stride(), v.stride(), (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15


def run_forward(decided: Decided) -> tuple[Tensor, Tensor, Decision]:
    """o, lse, and the decision of the backend that ran: the decided one, or the fallback."""
    call, decision, request, _ = decided
    if call.selects_nothing():
        shape = call.q.shape[:-1]
        lse_dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        o = call.q.new_zeros(*shape, call.v.shape[-1])
        lse = torch.full(shape, float("-inf"), dtype=lse_dtype, device=call.q.device)
    else:
        (o, lse), decision = fallback.run(call, decision, "forward", lambda name: forward.forward(name, call))
    events.record(decision, request)
    if call.settings.debug_compare and not call.capturing():
        compare.compare_forward(call, decision, o, forward.forward)
    return o, lse, decision


def gradients(call: Call, decision: Decision, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, ...]:
    """dq, dk, dv of a call with outputs o and lse; do or dlse is None if o or lse is unused."""
    return gradients_and_delta(call, decision, o, lse, do, dlse, False)[:3]


def gradients_and_delta(
    call: Call, decision: Decision, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None, with_delta: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`gradients`, and delta = sum(do * o) - dlse [B,S,G,h] if it is asked for and the backend gives it."""
    transforms.check_gradients(do, dlse)
    if call.selects_nothing():
        return torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v), None
    do = torch.zeros_like(o) if do is None else do.resolve_neg() if do.is_neg() else do
    dlse = None if dlse is None else dlse.resolve_neg()
    # Kernels read rows with a contiguous last dimension; an expanded gradient (from .sum()) has stride 0 there.
    do = do if do.stride()[-1] == 1 else do.contiguous()
    given = o, lse, do, dlse
    if with_delta:
        work = fallback.with_delta(registry.load, call, *given)
    else:
        work = lambda name: (*registry.load(name).backward(call, *given), None)  # noqa: E731
    (dq, dk, dv, delta), decision = fallback.run(call, decision, "backward", work)
    events.count("backward", str(decision.backward))
    if call.settings.debug_compare and not call.capturing():
        compare.compare_backward(call, decision, (dq, dk, dv), o, lse, do, dlse)
    return dq, dk, dv, delta
