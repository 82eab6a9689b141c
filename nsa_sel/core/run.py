"""Run a decided call: forward, gradients, the autograd Function, the fallback after a failure, and the debugging comparison."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from nsa_sel.core import pages, registry, transforms, warm
from nsa_sel.core.call import Call, device_info, request_of
from nsa_sel.core.decide import after_failure, decide, forget_decisions
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import Request
from nsa_sel.core.workspace import Workspace
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection
from nsa_sel.telemetry import events, passes

T = TypeVar("T")


class Decided(NamedTuple):
    """A checked call, its decision, and its exact request."""

    call: Call
    decision: Decision
    request: Request


def attend(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, q_pos: Tensor | None, backend: str | None,
    lengths: Tensor | None = None, block_table: Tensor | None = None, workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [B,S,G,h,Dv] and lse [B,S,G,h] of checked arguments, recorded by autograd if q, k or v require gradients."""
    decided = begin(q, k, v, selection, scale, q_pos, transforms.needs_grad(q, k, v), backend, lengths, block_table)
    if workspace is not None:
        decided.call.workspace = Workspace.of(workspace, q.device)
    if decided.request.needs_grad:
        o, lse, decision = _SelectionAttention.apply(q, k, v, decided)  # type: ignore[no-untyped-call]
    else:
        o, lse, decision = run_forward(decided.call, decided.decision)
    finish(decided.call, decision, decided.request, o)
    return o, lse


def begin(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, q_pos: Tensor | None, needs_grad: bool, backend: str | None,
    lengths: Tensor | None = None, block_table: Tensor | None = None,
) -> Decided:  # fmt: skip
    """Decide on checked arguments, and do what flags ask for before the call runs."""
    request = request_of(q, k, v, selection, needs_grad, block_table)
    decision = decide(request, device_info(q.device), backend)
    events.follow(decision.settings)
    if decision.settings.autotune in ("warmup", "warmup-tune") and warm.first_call(request, q.device, attend):
        decision = decide(request, device_info(q.device), backend)
    call = Call(q, k, v, selection, q_pos, scale, decision.settings, decision.device, lengths, block_table)
    if decision.settings.debug_triton and not call.capturing():
        selection.validate()
    return Decided(call, decision, request)


def finish(call: Call, decision: Decision, request: Request, o: Tensor) -> None:
    """Record what ran forward; with NSA_DEBUG_COMPARE compare its output."""
    events.record(decision, request)
    if call.settings.debug_compare and not call.capturing():
        _compare(call, decision, "forward", (o,))


class _SelectionAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, decided: Decided) -> tuple[Tensor, Tensor, Decision]:
        call = decided.call
        o, lse, decision = run_forward(call, decided.decision)
        # Saved so that autograd notices in-place writes to the selection and positions, too.
        index = [x for x in (call.selection.ranges, call.q_pos) if x is not None and not x.is_inference()]
        ctx.save_for_backward(q, k, v, o, lse, *index)
        ctx.call = (call.selection, call.q_pos, call.scale, call.settings, call.device, call.lengths, call.block_table, call.workspace)
        ctx.decision = decision
        ctx.set_materialize_grads(False)
        return o, lse, decision

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _decision: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative()
        q, k, v, o, lse = ctx.saved_tensors[:5]
        if do is None and dlse is None:
            return None, None, None, None
        return *gradients(Call(q, k, v, *ctx.call), ctx.decision, o, lse, do, dlse), None


def run_forward(call: Call, decision: Decision) -> tuple[Tensor, Tensor, Decision]:
    """o, lse, and the decision of the backend that ran: the decided one, or the fallback."""
    if _nothing_to_do(call):
        shape = call.q.shape[:-1]
        lse_dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        lse = torch.full(shape, float("-inf"), dtype=lse_dtype, device=call.q.device)
        return call.q.new_zeros(*shape, call.v.shape[-1]), lse, decision
    (o, lse), decision = _run(call, decision, "forward", lambda name: _forward_by(name, call))
    return o, lse, decision


def gradients(call: Call, decision: Decision, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, ...]:
    """dq, dk, dv of a call with outputs o and lse; do or dlse is None if o or lse is unused."""
    transforms.check_gradients(do, dlse)
    if _nothing_to_do(call):
        return torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v)
    do = torch.zeros_like(o) if do is None else do.resolve_neg()
    dlse = None if dlse is None else dlse.resolve_neg()
    # Kernels read rows with a contiguous last dimension; an expanded gradient (from .sum()) has stride 0 there.
    do = do if do.stride(-1) == 1 else do.contiguous()
    (dq, dk, dv), decision = _run(call, decision, "backward", lambda name: registry.load(name).backward(call, o, lse, do, dlse))
    events.count("backward", str(decision.backward))
    if call.settings.debug_compare and not call.capturing():
        _compare(call, decision, "backward", (dq, dk, dv), o, lse, do, dlse)
    return dq, dk, dv


def _forward_by(name: str, call: Call) -> tuple[Tensor, Tensor]:
    forward = registry.load(name).forward
    if call.lengths is None or registry.backends()[name].reads_caches:
        return forward(call)
    return pages.plain_forward(call, forward)


def _loaded_keys(name: str, call: Call) -> Any:
    """The backend's `loaded_keys`, or None if it gets another call, made from this one."""
    if call.lengths is None or registry.backends()[name].reads_caches:
        return getattr(registry.load(name), "loaded_keys", None)
    return None


def _nothing_to_do(call: Call) -> bool:
    if call.selection.n == 0 or call.q.numel() == 0 or call.k.numel() == 0:
        return True
    return call.block_table is not None and call.S_kv == 0


def _run(call: Call, decision: Decision, direction: str, work: Callable[[str], T]) -> tuple[T, Decision]:
    """Run the decided backend. If an automatically chosen one fails, report it and run the fallback."""
    name, fallback = decision.forward if direction == "forward" else decision.backward, registry.fallback()
    assert name is not None, "decide() refuses before any kernel"
    if decision.override is None and registry.is_broken(name, decision.request):  # it broke after autograd recorded the call
        events.count("fallbacks", name, "failed-before")
        decision, name = after_failure(decision, name), fallback
    try:
        return _on_device(call, name, direction, work), decision
    except (torch.OutOfMemoryError, ArgumentError):  # ArgumentError: the workspace is too small
        raise
    except Exception as error:
        events.count("failed", name)
        events.emit("sel.backend.failed", logging.ERROR, backend=name, direction=direction, error=repr(error), request=decision.request)
        if decision.override is not None or name == fallback or registry.is_sticky(error):
            raise
        # A warning is visible without logging; once per request class, which is not tried again.
        words = f"nsa-sel: {name} failed, {fallback} runs calls of this class from now on: {error!r}"
        warnings.warn(words, RuntimeWarning, stacklevel=2)
        registry.mark_broken(name, decision.request, error)
        forget_decisions()
        decision = after_failure(decision, name)
        events.count("fallbacks", name, type(error).__name__)
        return _on_device(call, fallback, direction, work), decision


def _on_device(call: Call, name: str, direction: str, work: Callable[[str], T]) -> T:
    """Call `work` with q's device current: backends launch and allocate there."""
    if call.q.is_cuda and call.q.get_device() != torch._C._cuda_getDevice():  # CUDA is initialized: q is there
        with torch.cuda.device(call.q.device):
            return _on_device(call, name, direction, work)
    settings, workspace = call.settings, call.workspace
    if workspace is not None:
        workspace.begin()
    if settings.debug_triton or settings.debug_timing or settings.debug_nvtx:
        result = passes.watched(call, name, direction, _loaded_keys(name, call), lambda: work(name))
    else:
        result = work(name)
    if workspace is not None:
        workspace.check(name, direction)
    return result


def _compare(call: Call, decision: Decision, direction: str, got: tuple[Tensor, ...], *given: Tensor | None) -> None:
    """Emit the event of NSA_DEBUG_COMPARE: the mean absolute error of o, or the largest of dq, dk, dv, against the fallback."""
    silent = replace(call, settings=msgspec.structs.replace(call.settings, debug_timing=False, debug_triton=False), workspace=None)
    reference = registry.fallback()
    with torch.no_grad():
        wanted = _forward_by(reference, silent) if direction == "forward" else registry.load(reference).backward(silent, *given)  # type: ignore[arg-type]
        mae = max(float((mine.detach().double() - other.double()).abs().mean()) for mine, other in zip(got, wanted, strict=False))
    backend = decision.forward if direction == "forward" else decision.backward
    events.emit("sel.compare", backend=backend, direction=direction, reference=reference, mae=mae)
