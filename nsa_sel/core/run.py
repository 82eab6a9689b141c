"""Run a decided call of any kind: a pass of its backend with the fallback, its outputs and gradients, the autograd
Function of both, and the ops of traced calls."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from nsa_sel.backends.launcher.cuda_driver import stream_of, thread
from nsa_sel.backends.launcher.replay import Recordings
from nsa_sel.core import registry, transforms
from nsa_sel.core.call import Call, ChooseCall, call_over_pool
from nsa_sel.core.decide import Decided, after_failure, forget_decisions, recall, remember
from nsa_sel.errors import ArgumentError, warn
from nsa_sel.settings.schema import Settings
from nsa_sel.telemetry import events, log, passes

# Given a backend's name and a call: the function of that backend to run. run_pass calls it as function(call, *given).
FunctionOf = Callable[[str, Any], Callable[..., Any]]


def attend(decided: Decided) -> Any:
    """Return the outputs of a call: o [B,S,G,h,Dv], lse [B,S,G,h], and for a ChooseCall ranges [B,S,G,n,2]; autograd
    records the call if the request needs gradients."""
    return recorded(decided) if decided.request.needs_grad else run_forward(decided)[:-1]


def recorded(decided: Decided, with_lse: bool = True) -> Any:
    """Return the outputs of a call that autograd records; lse is None unless `with_lse`, because each output costs
    microseconds."""
    call = decided.call
    outputs = _apply(call.q, call.k, call.v, decided, with_lse)
    return outputs if with_lse else (outputs, None)


_LAYOUT = "layout"  # a key of `Call.known`


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, decided: Decided, with_lse: bool) -> tuple[Tensor, ...] | Tensor:
        call, known = decided.call, decided.call.known
        *outputs, decision = run_forward(decided)
        ctx.save_for_backward(q, k, v, *outputs[:2], *call.read_again())
        if known is not None and _LAYOUT not in known:
            known[_LAYOUT] = _layout(q, k, v)
        ctx.of_call = type(call), call.others(), known, decision  # one attribute: each takes time
        if len(outputs) > 2:
            ctx.mark_non_differentiable(*outputs[2:])
        ctx.set_materialize_grads(False)
        return tuple(outputs) if with_lse else outputs[0]

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None, _: None = None) -> tuple[Tensor | None, ...]:
        kind, others, known, decision = ctx.of_call
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative(kind.function)
        if do is None and dlse is None:
            return (None,) * 5
        q, k, v, o, lse, *_ = ctx.saved_tensors
        replay = known.get("backward") if known and dlse is None and others[-1] is None else None
        failed = registry.broken and _failed(decision, "backward")
        found = None if replay is None or failed else replay(others[0], q, k, v, o, lse, do)
        if found is not None:
            events.count("backward", decision.backward)
            return *found, None, None
        call = kind(q, k, v, *others)
        if known is not None and _layout(q, k, v) == known[_LAYOUT]:  # hooks on saved tensors may return others
            call.known = known
        return *gradients(call, decision, o, lse, do, dlse), None, None


# `Function.apply` without its handling of torch.func, under which no call gets here: saves microseconds of Python.
_apply: Callable[..., Any] = super(torch.autograd.Function, _Attention).apply
# A node's `apply` is what autograd calls: it would look for a `vjp`, and then call `backward`.
_Attention._backward_cls.apply = _Attention.backward  # type: ignore[attr-defined]


def _layout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Return the facts in which tensors of the same values may differ."""
    return q.stride(), k.stride(), v.stride(), (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15


def forward_of(name: str, call: Call | ChooseCall) -> Callable[[Any], tuple[Tensor, ...]]:
    """Return the function of backend `name` that runs the forward pass of a call.

    A backend that reads no caches gets an equal call without lengths and block table, and one that reads no pages gets
    gathered keys.
    """
    if isinstance(call, ChooseCall):
        chooser = registry.load_chooser(name)
        if call.pages is None:
            return chooser.forward
        paged = getattr(chooser, "paged", None)
        return (lambda call: chooser.forward(call.gathered())) if paged is None else paged  # type: ignore[no-any-return]
    forward = registry.load(name).forward
    if call.lengths is None or registry.backends()[name].reads_caches:
        return forward

    def forward_without_lengths(call: Call) -> tuple[Tensor, Tensor]:
        B, S = call.q.shape[:2]
        if call.block_table is None:
            # One operation for one new token each: the forward pass takes only a few microseconds.
            positions = call.lengths.unsqueeze(1) - 1 if S == 1 and call.lengths is not None else call.positions().clamp_(min=-1)
            return forward(replace(call, q_pos=positions, lengths=None))
        o, lse = forward(call_over_pool(call, call.block_table))
        return o.view(B, S, *o.shape[2:]), lse.view(B, S, *lse.shape[2:])

    return forward_without_lengths


def run_forward(decided: Decided, function_of: FunctionOf = forward_of) -> Any:
    """Return the outputs of a call, followed by the decision of the backend that ran: the decided one, or the fallback."""
    call, decision = decided.call, decided.decision
    # A Shortcut, which launcher/replay.py adds.
    replay = call.known.get("forward") if call.known and call.workspace is None and function_of is forward_of else None
    failed = registry.broken and _failed(decision, "forward")
    outputs = None if replay is None or failed else replay(call.selection, call.q, call.k, call.v)
    if outputs is not None:
        events.record(decision, decided.request)
        return *outputs, decision
    if call.selects_nothing():
        outputs = call.nothing()
    else:
        outputs, decision = run_pass(call, decision, "forward", function_of)
    if decision is None:
        return *outputs, None
    recorder = thread.recording
    if recorder is not None and recorder.decided is not None:  # of a `Repeated`
        recorder.decided.append((decision, decided.request))
        path = registry.backends(decided.request.kind)[str(decision.forward)].path
        recorder.refused |= _observed(call.settings) or not path.startswith("nsa_sel.")  # others launch kernels that nobody records
        recorder.refused |= recorder.bytes > call.settings.workspace_bytes  # a replay allocates the temporaries of all parts at once
    events.record(decision, decided.request)
    if call.settings.debug_compare:
        _compare(call, decision.forward, "forward", outputs[:1], lambda name, call: forward_of(name, call)(call)[:1])
    return *outputs, decision


def backward_of(name: str, call: Call | ChooseCall) -> Callable[..., Any]:
    """Return the function of backend `name` that runs the backward pass of a call."""
    return _module_of(name, call).backward  # type: ignore[no-any-return]


def _backward_and_delta_of(name: str, call: Call | ChooseCall) -> Callable[..., Any]:
    """`backward_of`, of the function that also returns delta if the backend has it."""
    module = _module_of(name, call)
    return getattr(module, "backward_and_delta", None) or module.backward  # type: ignore[no-any-return]


def _module_of(name: str, call: Call | ChooseCall) -> Any:
    return (registry.load_chooser if isinstance(call, ChooseCall) else registry.load)(name)  # type: ignore[operator]


def gradients(call: Any, decision: Any, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of a call with outputs o and lse; do or dlse is None if o or lse is unused."""
    replay = call.known.get("backward") if call.known and dlse is None and call.workspace is None else None
    found: tuple[Tensor, Tensor, Tensor] | None = None
    if replay is not None and not (registry.broken and _failed(decision, "backward")):
        found = replay(call.selection, call.q, call.k, call.v, o, lse, do)
    if found is not None:
        events.count("backward", decision.backward)
        return found
    return _gradients(call, decision, backward_of, o, lse, do, dlse)[:3]  # type: ignore[return-value]


def gradients_and_delta(
    call: Any, decision: Any, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return `gradients`, and delta = sum(do * o) - dlse [B,S,G,h] if the backend computes it."""
    dq, dk, dv, *delta = _gradients(call, decision, _backward_and_delta_of, o, lse, do, dlse)
    return dq, dk, dv, delta[0] if delta else None


def _gradients(
    call: Any, decision: Any, function_of: FunctionOf, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, ...]:
    transforms.check_gradients(do, dlse, name=call.function)
    if call.selects_nothing() or call.k.numel() == 0:
        return torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v)
    do = torch.zeros_like(o) if do is None else do.resolve_neg() if do.is_neg() else do
    dlse = None if dlse is None else dlse.resolve_neg()
    # Kernels read rows with a contiguous last dimension; an expanded gradient (from .sum()) has stride 0 there.
    do = do if do.stride(-1) == 1 else do.contiguous()
    found, decision = run_pass(call, decision, "backward", function_of, o, lse, do, dlse)
    if decision is not None:
        events.count("backward", str(decision.backward))
        if call.settings.debug_compare:
            _compare(
                call, decision.backward, "backward", found[:3], lambda name, call: registry.load(name).backward(call, o, lse, do, dlse)
            )
    return found  # type: ignore[no-any-return]


def run_pass(call: Any, decision: Any, direction: str, function_of: FunctionOf, *given: Tensor | None) -> tuple[Any, Any]:
    """Run one pass by the decided backend; if an automatically chosen backend fails, by the fallback.

    Args:
        call: the call.
        decision: its decision; None for a call that tries its kernels in a fixed order (core/window.py).
        direction: "forward" or "backward".
        function_of: returns the function to run, which is called as function(call, *given).
        given: o, lse, do and dlse of a backward pass.

    Returns:
        The result of the function, and the decision of the backend that ran.
    """
    if decision is None:
        return call.run(direction, *given), None
    name = decision.forward if direction == "forward" else decision.backward
    assert name is not None, "decide() refuses before any kernel"
    if registry.broken and _failed(decision, direction):  # since autograd recorded the call
        events.count("fallbacks", name, "failed-before")
        return run_pass(call, after_failure(decision, name), direction, function_of, *given)
    try:
        if (
            call.workspace is None
            and not _observed(call.settings)
            and (not call.q.is_cuda or call.q.get_device() == torch._C._cuda_getDevice())  # CUDA is initialized: q is there
        ):
            return function_of(name, call)(call, *given), decision
        return _observed_pass(call, name, direction, function_of, given), decision
    except ArgumentError:  # the workspace is too small
        raise
    except torch.OutOfMemoryError as error:
        error.add_note(
            f"{name}, {direction} pass: besides its results it may take up to {call.settings.workspace_bytes} bytes"
            " (runtime.workspace_bytes). Remedy: lower that bound, or pass fewer rows at once."
        )
        raise
    except Exception as error:
        events.count("failed", name)
        events.emit("sel.backend.failed", logging.ERROR, backend=name, direction=direction, error=repr(error), request=decision.request)
        fallback = registry.fallback(decision.request.kind)
        if decision.override is not None or name == fallback or registry.is_sticky(error):
            raise
        # A warning is visible without logging; once per request class, which is not tried again.
        remedy = f"backend={name!r} raises the error with its traceback, nsa_sel.reset() lets {name} try again"
        warn(f"{name} failed, {fallback} runs calls of this class from now on: {error!r}. Remedy: {remedy}")
        registry.mark_broken(name, decision.request, error)
        forget_decisions()
        again = after_failure(decision, name)
        events.count("fallbacks", name, type(error).__name__)
        return run_pass(call, again, direction, function_of, *given)


def _failed(decision: Any, direction: str) -> bool:
    """Return True if the backend of a direction has failed for such calls in this process, and no caller forces it."""
    if decision is None or decision.override is not None:  # None: a window, whose kernels have one order
        return False
    return registry.is_broken(str(decision.forward if direction == "forward" else decision.backward), decision.request)


def _observed(settings: Settings) -> bool:
    """Return True if flags ask for records of a pass."""
    return settings.debug_log is not None or settings.debug_triton or settings.debug_timing or settings.debug_compare or settings.debug_nvtx


def _observed_pass(call: Call | ChooseCall, name: str, direction: str, function_of: FunctionOf, given: tuple[Tensor | None, ...]) -> Any:
    """Run one pass with q's device current, temporaries in the workspace, and the records that flags ask for."""
    if call.q.is_cuda and call.q.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(call.q.device):
            return _observed_pass(call, name, direction, function_of, given)
    settings, workspace = call.settings, call.workspace
    if workspace is not None:
        workspace.taken = 0
    if settings.traced or settings.debug_nvtx:
        loads = None
        if isinstance(call, Call) and (call.lengths is None or registry.backends()[name].reads_caches):
            loads = getattr(registry.load(name), "loaded_keys", None)
        result = passes.recorded(call, name, direction, loads, lambda: function_of(name, call)(call, *given))
    else:
        result = function_of(name, call)(call, *given)
    if workspace is not None:
        workspace.check(name, direction)
    return result


def _compare(
    call: Call | ChooseCall, backend: str | None, direction: str, results: tuple[Tensor, ...],
    reference: Callable[[str, Call], tuple[Tensor, ...]],
) -> None:  # fmt: skip
    """Emit the event of NSA_DEBUG_COMPARE: the largest mean absolute error of a pass against the fallback.

    reference: returns the fallback's results, given its name and the call without events and workspace.
    """
    if not isinstance(call, Call) or call.capturing():
        return
    off = {"debug_log": None, "debug_triton": False, "debug_timing": False, "debug_compare": False}
    silent = replace(call, settings=msgspec.structs.replace(call.settings, **off), workspace=None, out=(None, None))
    name = registry.fallback()
    with torch.no_grad():
        pairs = zip(results, reference(name, silent), strict=True)
        mae = max(float((mine.detach().double() - other.double()).abs().mean()) for mine, other in pairs)
    events.emit("sel.compare", backend=backend, direction=direction, reference=name, mae=mae)


# Whole calls over caches


class Repeated(NamedTuple):
    """A call whose class is told by facts and guards of its tensors. The arguments of later calls of a class need no check, and
    nothing on their path but the kernels depends on more than the class: its launches are recorded and replayed."""

    key: tuple[Any, ...]
    tensors: list[Tensor]
    addresses: list[int]
    stream: int
    classes: transforms.Classes  # of the key
    recordings: Recordings | None  # of the class

    @classmethod
    def of(cls, facts: tuple[Any, ...], *tensors: Any) -> Repeated | None:
        """Return the call with these arguments, unchecked, q first; None if it can't be replayed.

        facts: all arguments that are not tensors, numbers of exactly the types that the checks want, because 1 equals True.
        """
        given = [x for x in tensors if x is not None]
        try:
            if not _on_gpu(given[0]) or not transforms.untransformed() or log.followed is not None:
                return None
            stream, addresses = _stream_outside_capture(given[0]), [*map(Tensor.data_ptr, given)]
            shapes, low_bits = [None if x is None else x.shape for x in tensors], [address & 15 for address in addresses]
        except (AttributeError, IndexError, RuntimeError, TypeError):  # no tensor, or one without shape or memory
            return None
        if stream is None or 0 in addresses or len({*addresses}) < len(addresses):  # guards take no tensor twice
            return None
        key = (*facts, torch.is_grad_enabled(), *shapes, *low_bits)
        classes = recall(key) or ()
        return cls(key, given, addresses, stream, classes, transforms.find_class(classes, *given))

    def replay(self) -> tuple[Tensor, ...] | None:
        """Return the results of a replay, or None: the call must be checked and run."""
        made = () if self.recordings is None else (*self.recordings.made,)  # another thread may drop the oldest recordings
        decided = made[0].decided or () if made else ()
        if not made or (registry.broken and any(_failed(decision, "forward") for decision, _ in decided)):
            return None
        results: tuple[Tensor, ...] | None = self.recordings.replay(self.addresses, self.stream, {})  # type: ignore[union-attr]
        for each in () if results is None else decided:
            events.record(*each)
        return results

    def run(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return `work()`, the tensors that the checked call makes; record it if an earlier call was of its class."""
        if self.recordings is not None:
            return self.recordings.record(self.addresses, work, whole=True)  # type: ignore[no-any-return]
        results = work()
        if all(map(_on_gpu, self.tensors)):
            remember(self.key, transforms.with_class(self.classes, Recordings(), *self.tensors))
        return results


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _stream_outside_capture(q: Tensor) -> int | None:
    """Return the current stream; None if a CUDA graph captures it, or if q's device is not the current one."""
    device = q.get_device()
    if torch._C._cuda_isCurrentStreamCapturing() or device != torch._C._cuda_getDevice():
        return None
    return stream_of(device)


# Ops, through which traced calls go

_LIBRARY: Any = torch.library.Library("nsa_sel", "DEF")  # type: ignore[no-untyped-call]


def define(
    name: str, options: str, tensors: int, forward: Callable[..., Any], backward: Callable[..., Any], fake: Callable[..., Any], *,
    function: str, chooses: bool = False,
) -> None:  # fmt: skip
    """Register `nsa_sel::{name}_forward(q, k, v, options, needs_grad) -> (o, lse)` and
    `nsa_sel::{name}_backward(do, dlse, q, k, v, o, lse, options) -> (dq, dk, dv)`, a differentiable pair of
    torch.library ops.

    Traced calls (torch.compile, torch.export, dispatch modes) go through ops; eager calls do not, to save the dispatch.
    Both run the same functions. An op decides when it runs, from the sizes at that time, so a graph holds no decision.
    Plans of a selection are not shared between ops: a graph's buffers are rewritten without a new tensor version, so a
    cached plan could belong to older ranges.

    Args:
        name: of the pair.
        options: the schema of the arguments after q, k, v; its first `tensors` arguments are tensors.
        tensors: number of tensors among them.
        forward, backward: run the ops.
        fake: returns empty outputs of the forward op.
        function: the public function, for messages.
        chooses: the forward op also returns ranges, which have no gradient.
    """
    results = "Tensor o, Tensor lse, Tensor ranges" if chooses else "Tensor o, Tensor lse"
    _LIBRARY.define(f"{name}_forward(Tensor q, Tensor k, Tensor v, {options}, bool needs_grad) -> ({results})")
    _LIBRARY.define(
        f"{name}_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {options})"
        " -> (Tensor dq, Tensor dk, Tensor dv)"
    )
    forward_op, backward_op = (getattr(torch.ops.nsa_sel, f"{name}_{direction}") for direction in ("forward", "backward"))

    class _Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                outputs = forward_op(*inputs)
            q, k, v, *others, _ = inputs
            ctx.save_for_backward(q, k, v, *outputs[:2], *others[:tensors])
            ctx.facts, ctx.inputs = others[tensors:], len(inputs)
            ctx.mark_non_differentiable(*outputs[2:])
            ctx.set_materialize_grads(False)
            return outputs

        @staticmethod
        def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: None = None) -> Any:
            if do is None and dlse is None:
                return (None,) * ctx.inputs
            return *backward_op(do, dlse, *ctx.saved_tensors, *ctx.facts), *(None,) * (ctx.inputs - 3)

    class _Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return backward_op(*inputs)

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            transforms.refuse_second_derivative(function)

    def autocast(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
        q, k, v = transforms.in_autocast_dtype(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            return forward_op(q, k, v, *others)

    def fake_gradients(do: Tensor | None, dlse: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in inputs[:3])

    def vmap(*_: Any) -> None:
        transforms.refuse_transforms("vmap", function)

    for op, real, faked, differentiable in ((forward_op, forward, fake, _Forward), (backward_op, backward, fake_gradients, _Backward)):
        own = op.__name__
        _LIBRARY.impl(own, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"nsa_sel::{own}", faked, lib=_LIBRARY)
        _LIBRARY.impl(own, _autograd_kernel(op.default, differentiable, real, function), "Autograd", with_keyset=True)
        torch.library.register_vmap(f"nsa_sel::{own}", vmap, lib=_LIBRARY)
    for key in ("AutocastCPU", "AutocastCUDA"):
        _LIBRARY.impl(f"{name}_forward", autocast, key)


def _autograd_kernel(op: Any, differentiable: Any, real: Callable[..., Any], function: str) -> Callable[..., Any]:
    """Return the op's autograd kernel. torch.library.register_autograd's costs 20 us per call, with or without
    gradients."""

    def kernel(keys: Any, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            transforms.check_transforms(*inputs, name=function)
            return differentiable.apply(*inputs)
        if _runs_next(keys.raw_repr()):
            return real(*inputs)
        return op.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

    return kernel


@functools.cache
def _runs_next(keys: int) -> bool:
    """Return True if nothing after autograd traces, fakes or records a call with these dispatch keys."""
    rest = torch._C.DispatchKeySet.from_raw_repr(keys) & torch._C._after_ADInplaceOrView_keyset
    return rest.highestPriorityTypeId() in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
