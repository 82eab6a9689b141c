"""The public call: check, decide, run; autograd around whichever backends the decision names."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from nsa_sel.core import dispatch, known, pages, registry
from nsa_sel.core.call import Call, check_call, check_flag, check_tensors, device_info, request_of
from nsa_sel.core.decision import Decision, Override
from nsa_sel.core.request import DeviceInfo, Request
from nsa_sel.core.workspace import Workspace
from nsa_sel.errors import ArgumentError, BackendError, shown
from nsa_sel.selection import Selection
from nsa_sel.settings import devices, tuned
from nsa_sel.settings.config import forget_settings, settings_for
from nsa_sel.settings.flags import environment
from nsa_sel.settings.schema import Settings
from nsa_sel.telemetry import events, passes

T = TypeVar("T")
FALLBACK = "sdpa-packed"
_forced: ContextVar[str | None] = ContextVar("nsa_sel_backend", default=None)
transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active  # inside torch.func: vmap, grad, jvp and their like
_len_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_NO_DISPATCH = Tensor.__torch_dispatch__
_PLAIN = (Tensor, torch.nn.Parameter)
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # of any device; asking for one by name takes longer
_memo: dict[Any, Decision] = {}
_MEMO_SIZE = 4096
# After these the CUDA context is lost: running anything else would only hide where it broke.
STICKY = ("illegal memory access", "misaligned address", "device-side assert", "unspecified launch failure", "illegal instruction")


def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | Tensor,
    *,
    scale: float | None = None,
    q_pos: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    workspace: Tensor | None = None,
) -> Any:
    """Attention of every query row to its selected keys (NSA, arXiv 2502.11089, Fig. 3 and Eq. 10-12), differentiable in q, k, v.

    q: [B,S,G,h,Dk], or [B,G,h,Dk] for one query a sequence (decode); k: [B,G,S_kv,Dk]; v: [B,G,S_kv,Dv]; all of one dtype
    (float16, bfloat16, float32, float64) and device, any strides with a contiguous last dimension. selection: a `Selection`,
    or its ranges [B,S,G,n,2] ([B,G,n,2] for decode), half-open, shared by the h heads of a group. q_pos: key
    positions of the rows, [S] or [B,S], by default S_kv - S + s. scale: of the logits, by default 1/sqrt(Dk).

    A row at position t attends to the union of [max(start, 0), min(end, t + 1, S_kv)) over its ranges; nothing beyond t is read.
    Returns o, shaped as q with Dv for Dk and in q's dtype, or (o, lse) with lse [B,S,G,h] the natural-log
    sum of exp of the scaled logits, float32 (float64 for float64 inputs). Under torch.autocast q, k, v are cast, and o has the
    dtype of autocast (float64 is left alone). A row with nothing selected gives o = 0, lse = -inf and gradients 0.

    DTensors are taken too, all on one mesh, and give o cut as q (docs/distributed.md).

    backend: a name to force; else `use_backend`, then NSA_SEL_BACKEND, then the policy. workspace: a contiguous uint8 tensor on q's
    device in which backends put temporaries, of this call's backward pass too; nothing that is returned is in it, and calls one after
    another may share it, but none that run at once, as on two streams. One that is too small is an ArgumentError that tells the size;
    `runtime.workspace_bytes` bounds most of it. Not under torch.compile, nor with DTensors. Raises ArgumentError for bad
    input and BackendError, with every reason, when the forced backend or all backends refuse; both before any kernel runs.
    """
    if type(q) is not Tensor and not is_compiling() and _is_sharded(q):
        from nsa_sel.distributed import sharding  # here, because it imports this module

        _refuse_workspace(workspace, "a call of DTensors")
        return sharding.sharded(q, k, v, selection, scale=scale, q_pos=q_pos, return_lse=return_lse, backend=backend)
    if is_compiling() or _traces(q, k, v):
        from nsa_sel.core import ops  # likewise

        _refuse_workspace(workspace, "a call that torch.compile or a dispatch mode traces")
        return ops.traced(q, k, v, selection, scale=scale, q_pos=q_pos, return_lse=return_lse, backend=backend)
    check_transforms(q, k, v)
    check_flag("return_lse", return_lse)
    decode = isinstance(q, Tensor) and q.dim() == 4
    q, k, v = map(materialized, (q, k, v))
    q, k, v = in_autocast_dtype(q, k, v)  # first: what it casts need not be of one dtype
    call, decision, request = begin(q, k, v, selection, scale, q_pos, backend)
    if workspace is not None:
        call.workspace = Workspace.of(workspace, call.q.device)
    if request.needs_grad:
        o, lse, decision = _SelectionAttention.apply(call.q, k, v, call, decision)  # type: ignore[no-untyped-call]
    else:
        o, lse, decision = run_forward(call, decision)
    finish(call, decision, request, o)
    if decode:
        o, lse = o.squeeze(1), lse.squeeze(1)
    return (o, lse) if return_lse else o


def begin(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, scale: float | None, q_pos: Tensor | None, backend: str | None
) -> tuple[Call, Decision, Request]:
    """The call for unchecked arguments, the decision that serves it, and its exact request."""
    check_tensors(q, k, v)
    needs_grad = (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
    key = None
    if isinstance(selection, Selection) and q_pos is None:
        facts = selection.n, selection.block_size, selection.max_length, selection.exact()
        key, found = known.recall(q, k, v, selection.ranges, facts, scale, needs_grad, backend, _forced.get())
        if found is not None:
            return repeat(found, q, k, v, selection, backend)
    call, decision, request = prepare(*check_call(q, k, v, selection, scale, q_pos), needs_grad, backend)
    known.remember(key, (call.scale, request, decision))
    return call, decision, request


def repeat(
    found: known.Found, q: Tensor, k: Tensor, v: Tensor, selection: Selection, backend: str | None
) -> tuple[Call, Decision, Request]:
    """As `prepare`, of a call for which all was found before."""
    scale, request, decision = found
    if q.dim() == 4:
        q = q.unsqueeze(1)
    return _ready(q, k, v, selection, scale, None, request, decision, backend)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, q_pos: Tensor | None, needs_grad: bool, backend: str | None,
    lengths: Tensor | None = None, block_table: Tensor | None = None,
) -> tuple[Call, Decision, Request]:  # fmt: skip
    """The call for checked arguments, the decision that serves it, and its exact request."""
    request = request_of(q, k, v, selection, needs_grad, block_table)
    decision = decide(request, device_info(q.device), backend)
    return _ready(q, k, v, selection, scale, q_pos, request, decision, backend, lengths, block_table)


def _ready(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, q_pos: Tensor | None, request: Request, decision: Decision,
    backend: str | None, lengths: Tensor | None = None, block_table: Tensor | None = None,
) -> tuple[Call, Decision, Request]:  # fmt: skip
    """What the flags ask for before a decided call runs, and the call."""
    events.follow(decision.settings)
    if decision.settings.autotune in ("warmup", "warmup-tune") and _warm_up(request, q.device):
        decision = decide(request, device_info(q.device), backend)
    call = Call(q, k, v, selection, q_pos, scale, decision.settings, decision.device, lengths, block_table)
    if decision.settings.debug_triton and not call.capturing():
        selection.validate()
    return call, decision, request


def finish(call: Call, decision: Decision, request: Request, o: Tensor) -> None:
    """Record what ran forward, and compare it where that is asked for."""
    events.record(decision, request)
    if call.settings.debug_compare and not call.capturing():
        _compare(call, decision, "forward", (o,))


def _refuse_workspace(workspace: Tensor | None, where: str) -> None:
    if workspace is not None:
        raise ArgumentError("workspace", f"given to {where}", "None there", "leave it out: temporaries are allocated")


def _is_sharded(q: Any) -> bool:
    """Whether q is a DTensor, which only who has imported its module can have made."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(q, module.DTensor)


def _warm_up(request: Request, device: torch.device) -> bool:
    """Compile, and tune where asked, before the first call on a device; whether that was done now."""
    from nsa_sel.settings.warmup import first_call  # stands above

    return first_call(request, device)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend for the calls inside the `with` block, of this thread or task. An argument `backend=` still wins."""
    if is_compiling():
        raise BackendError(
            "use_backend is called in a function that torch.compile traces; allowed: the argument backend= of selection_attention there."
            " Remedy: pass backend=, or set NSA_SEL_BACKEND."
        )
    if name is None:
        raise ArgumentError("name", None, "a name of a backend", "leave the `with` out to let the policy choose")
    _check_name("name", name)
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def explain(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, *, q_pos: Tensor | None = None, backend: str | None = None
) -> Decision:
    """The decision that `selection_attention` would take for these arguments; runs no kernel. Print it with `nsa_sel.describe`."""
    q, k, v = in_autocast_dtype(q, k, v)  # first: what it casts need not be of one dtype
    q, k, v, selection, _, q_pos = check_call(q, k, v, selection, None, q_pos)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return select(request_of(q, k, v, selection, needs_grad), device_info(q.device), backend)


def explain_request(request: Request, device: DeviceInfo | None = None, backend: str | None = None) -> Decision:
    """The decision for a request without tensors, on this machine's first device or on an injected one."""
    if device is None:
        device = device_info(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    return select(request, device, backend)


def select(request: Request, device: DeviceInfo, backend: str | None = None) -> Decision:
    """The remembered or fresh decision for the request's class under today's flags; `forward` is None when all refuse."""
    if backend is not None:
        _check_name("backend", backend)
    key = (request.request_class(), device, environment(), tuned.token(), backend, _forced.get())
    decision = _memo.get(key)
    if decision is None:
        settings = tuned.apply(settings_for(device), key[0], device)
        offers = registry.offers(request)
        dispatch.check_names(settings, offers)
        decision = dispatch.select(key[0], device, dispatch.load_policy("default"), settings, offers, _override(backend, settings))
        if len(_memo) >= _MEMO_SIZE:
            _memo.clear()
        _memo[(*key[:3], tuned.token(), *key[4:])] = decision  # a file may just have been read
    return decision


def decide(request: Request, device: DeviceInfo, backend: str | None = None) -> Decision:
    """`select`, or BackendError with every reason when nothing may run the request."""
    decision = select(request, device, backend)
    message = dispatch.refusal(decision)
    if message is not None:
        events.count("unserved")
        raise BackendError(message, decision)
    devices.warn_if_assumed(decision)
    return decision


def forget_decisions() -> None:
    """Decide anew from now on: configuration files, installed packages or failures may have changed."""
    _memo.clear()
    known.forget()
    forget_settings()


@contextlib.contextmanager
def use_no_backend() -> Iterator[None]:
    """Inside the `with` block no `use_backend` around it counts."""
    token = _forced.set(None)
    try:
        yield
    finally:
        _forced.reset(token)


def forced_here() -> str | None:
    """The name that `use_backend` forces on this thread or task."""
    return _forced.get()


def _traces(*tensors: Any) -> bool:
    """Whether something looks at each operation: a dispatch mode (make_fx, FakeTensorMode, a counter of FLOPs), or a tensor whose class
    does. It sees the op of nsa_sel/core/ops.py then; what a backend does past the dispatcher it would miss."""
    if _len_modes():
        return True
    return any(type(x) not in _PLAIN and isinstance(x, Tensor) and type(x).__torch_dispatch__ is not _NO_DISPATCH for x in tensors)


def check_traced(name: str, *tensors: Any) -> None:
    """BackendError where a tracer would miss all that a function without an op does (make_fx, FakeTensorMode and their tensors)."""
    check_transforms(*tensors)
    modes = torch._C._TorchDispatchModeKey.__members__.values()
    if any(torch._C._get_dispatch_mode(mode) is not None for mode in modes) or (not _len_modes() and _traces(*tensors)):
        raise BackendError(
            f"{name} is called while PyTorch traces or fakes operations (make_fx, FakeTensorMode); allowed: eager calls of plain tensors."
            " Remedy: trace selection_attention, which is an op, or keep the call out of what is traced."
        )


def check_transforms(*inputs: Any) -> None:
    """BackendError where a call is part of what the backends' kernels can't be: they take plain tensors, and see no tangents."""
    if transformed():
        refuse_transforms("a transform of torch.func (vmap, grad, vjp, jvp, jacrev or the like)")
    if forward_ad._current_level >= 0 and any(map(_has_tangent, inputs)):
        refuse_transforms("torch.autograd.forward_ad, with dual numbers")
    if torch._C._get_tracing_state() is not None:
        raise BackendError(
            "selection_attention is called inside torch.jit.trace, which would record one call's kernels as constants; allowed: eager,"
            " torch.compile and torch.export. Remedy: export the model by torch.export."
        )


def _has_tangent(x: object) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def refuse_transforms(what: str) -> NoReturn:
    """BackendError: the backends take plain tensors."""
    raise BackendError(
        f"selection_attention is called inside {what}; allowed: plain tensors. Remedy: torch.autograd.grad or .backward() for gradients,"
        " one output gradient at a time (no is_grads_batched, no vectorize); for vmap, put its dimension into the batch B of q, k, v,"
        " selection."
    )


def refuse_second_derivative() -> NoReturn:
    """BackendError: the backward passes of the backends are not differentiable."""
    raise BackendError(
        "selection_attention has no second derivative, and the backward pass was asked for one (create_graph=True);"
        " allowed: create_graph=False. Remedy: detach, or compute that term with plain PyTorch attention."
    )


def _check_name(argument: str, name: object) -> None:
    if not isinstance(name, str):
        raise ArgumentError(argument, shown(name), "a name of a backend, as text", "see nsa_sel.core.registry.backends()")


def _override(backend: str | None, settings: Settings) -> Override | None:
    if backend is not None:
        return Override(backend, "argument")
    forced = _forced.get()
    if forced is not None:
        return Override(forced, "use_backend")
    if settings.force_parity:
        return Override(FALLBACK, "NSA_FORCE_PARITY")
    if settings.backend is not None:
        return Override(settings.backend, "NSA_SEL_BACKEND")
    return None


class _SelectionAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, decision: Decision) -> tuple[Tensor, Tensor, Decision]:
        o, lse, decision = run_forward(call, decision)
        # Autograd notices when what it saved is written in place: so it is given the selection and the positions too.
        index = [x for x in (call.selection.ranges, call.q_pos) if x is not None and not x.is_inference()]
        ctx.save_for_backward(q, k, v, o, lse, *index)
        ctx.call = (call.selection, call.q_pos, call.scale, call.settings, call.device, None, None, call.workspace)  # no cache
        ctx.decision = decision
        ctx.set_materialize_grads(False)
        return o, lse, decision

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _decision: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative()
        q, k, v, o, lse = ctx.saved_tensors[:5]
        if do is None and dlse is None:
            return None, None, None, None, None
        dq, dk, dv = gradients(Call(q, k, v, *ctx.call), ctx.decision, o, lse, do, dlse)
        return dq, dk, dv, None, None


def gradients(call: Call, decision: Decision, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, ...]:
    """dq, dk, dv of a call whose forward gave o and lse; do and dlse are None where nobody uses o or lse."""
    if transformed() or any(x is not None and (is_batchedtensor(x) or is_legacy_batchedtensor(x)) for x in (do, dlse)):
        refuse_transforms("a backward pass of batched gradients (is_grads_batched=True, vectorize=True or vmap)")
    if _nothing_to_do(call):
        return torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v)
    do = torch.zeros_like(o) if do is None else do.resolve_neg()
    dlse = None if dlse is None else dlse.resolve_neg()
    # Kernels read rows of a contiguous last dimension; an expanded gradient (from .sum()) has stride 0 there.
    do = do if do.stride(-1) == 1 else do.contiguous()
    (dq, dk, dv), decision = _run(call, decision, "backward", lambda module: module.backward(call, o, lse, do, dlse))
    events.count("backward", str(decision.backward))
    if call.settings.debug_compare and not call.capturing():
        _compare(call, decision, "backward", (dq, dk, dv), o, lse, do, dlse)
    return dq, dk, dv


def run_forward(call: Call, decision: Decision) -> tuple[Tensor, Tensor, Decision]:
    """o, lse, and the decision as it stands after the decided backend, or the fallback, has run."""
    if _nothing_to_do(call):
        shape = call.q.shape[:-1]
        lse_dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        lse = torch.full(shape, float("-inf"), dtype=lse_dtype, device=call.q.device)
        return call.q.new_zeros(*shape, call.v.shape[-1]), lse, decision
    (o, lse), decision = _run(call, decision, "forward", lambda module: _forward_of(module, call))
    return o, lse, decision


def _forward_of(module: registry.BackendModule, call: Call) -> tuple[Tensor, Tensor]:
    if call.lengths is None or getattr(module, "READS_CACHES", False):
        return module.forward(call)
    return pages.plain_forward(call, module.forward)


def _nothing_to_do(call: Call) -> bool:
    if call.selection.n == 0 or call.q.numel() == 0 or call.k.numel() == 0:
        return True
    return call.block_table is not None and call.S_kv == 0


def _run(call: Call, decision: Decision, direction: str, work: Callable[[registry.BackendModule], T]) -> tuple[T, Decision]:
    """Run the decided backend; when an automatically chosen one fails, say so, and let packed SDPA do it instead."""
    name = decision.forward if direction == "forward" else decision.backward
    assert name is not None, "decide() refuses before any kernel"
    if decision.override is None and registry.is_broken(name, decision.request):  # since this graph was recorded
        events.count("fallbacks", name, "failed-before")
        decision, name = _fall_back(decision, name), FALLBACK
    try:
        return _on_device(call, name, direction, work), decision
    except (torch.OutOfMemoryError, ArgumentError):  # the second: a workspace that is too small
        raise
    except Exception as error:
        events.count("failed", name)
        events.emit("sel.backend.failed", logging.ERROR, backend=name, direction=direction, error=repr(error), request=decision.request)
        if decision.override is not None or name == FALLBACK or any(text in str(error) for text in STICKY):
            raise
        # Seen without any logging set up, and once a class of calls: it is not tried again.
        warnings.warn(f"nsa-sel: {name} failed, packed SDPA takes over for calls of this class: {error!r}", RuntimeWarning, stacklevel=2)
        registry.mark_broken(name, decision.request, error)
        forget_decisions()
        decision = _fall_back(decision, name)
        events.count("fallbacks", name, type(error).__name__)
        return _on_device(call, FALLBACK, direction, work), decision


def _on_device(call: Call, name: str, direction: str, work: Callable[[registry.BackendModule], T]) -> T:
    """Do the work with the backend's module. Backends launch, and make what they write, on the current device, which need not be q's."""
    if call.q.is_cuda and call.q.get_device() != torch._C._cuda_getDevice():  # q is there: nothing is left to initialise
        with torch.cuda.device(call.q.device):
            return _on_device(call, name, direction, work)
    module, settings, workspace = registry.load(name), call.settings, call.workspace
    if workspace is not None:
        workspace.begin()
    if settings.debug_triton or settings.debug_timing or settings.debug_nvtx:
        result = passes.watched(call, name, direction, module, lambda: work(module))
    else:
        result = work(module)
    if workspace is not None:
        workspace.check(name, direction)
    return result


def _fall_back(decision: Decision, failed: str) -> Decision:
    """The decision that serves the rest of the call after `failed` broke: packed SDPA, unless that refuses too."""
    again = dispatch.select(
        decision.request, decision.device, dispatch.load_policy(decision.policy), decision.settings,
        registry.offers(decision.request), Override(FALLBACK, f"failure of {failed}"),
    )  # fmt: skip
    message = dispatch.refusal(again)
    if message is not None:
        raise BackendError(f"{failed} failed, and the fallback refuses. {message}", again)
    return again


def materialized(x: Any) -> Any:
    """x without PyTorch's lazy negation, of which a kernel that reads memory knows nothing; x itself where there is none."""
    return x.resolve_neg() if isinstance(x, Tensor) else x


def in_autocast_dtype(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Under torch.autocast: q, k, v in its dtype, as scaled_dot_product_attention does (float64 is left alone). Nothing is checked yet."""
    if not _any_autocast():
        return q, k, v
    kind = "cuda" if getattr(q, "is_cuda", False) else "cpu"
    if not torch.is_autocast_enabled(kind):
        return q, k, v
    check_tensors(q, k, v)
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


def _compare(call: Call, decision: Decision, direction: str, got: tuple[Tensor, ...], *given: Tensor | None) -> None:
    """The event of NSA_DEBUG_COMPARE: the largest mean absolute error of o, or of dq, dk, dv, against packed SDPA. Reads the device."""
    silent = replace(call, settings=msgspec.structs.replace(call.settings, debug_timing=False, debug_triton=False), workspace=None)
    with torch.no_grad():
        reference = registry.load(FALLBACK)
        wanted = _forward_of(reference, silent) if direction == "forward" else getattr(reference, direction)(silent, *given)
        mae = max(float((mine.detach().double() - other.double()).abs().mean()) for mine, other in zip(got, wanted, strict=False))
    backend = decision.forward if direction == "forward" else decision.backward
    events.emit("sel.compare", backend=backend, direction=direction, reference=FALLBACK, mae=mae)
