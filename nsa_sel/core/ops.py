"""The torch.library ops `nsa_sel::selection_forward` and `selection_backward`, for torch.compile, torch.export and dispatch modes.

Traced calls go through them; eager calls do not, to save the dispatch. Both run the same functions of core/run.py. An op decides when it
runs, from the sizes at that time, so a graph holds no decision. Plans of a selection are not shared between ops: a graph's buffers are
rewritten without a new tensor version, so a cached plan could belong to older ranges.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_sel.core import run, transforms
from nsa_sel.core.begin import Decided
from nsa_sel.core.check import as_selection, check_call
from nsa_sel.core.decide import forced, use_no_backend
from nsa_sel.core.prepare import prepared
from nsa_sel.core.repeat import begin_or_repeat
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.selection import Selection

# Arguments of both ops: tensors as of `selection_attention` (q [B,S,G,h,Dk], ranges [B,S,G,n,2]), and the selection's static facts.
_COMMON = "Tensor ranges, Tensor? q_pos, int? block_size, int? max_length, bool disjoint, float? scale, str? backend"
_LIBRARY: Any = torch.library.Library("nsa_sel", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"selection_forward(Tensor q, Tensor k, Tensor v, {_COMMON}, bool needs_grad) -> (Tensor o, Tensor lse)")
_LIBRARY.define(
    "selection_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    f" {_COMMON}) -> (Tensor dq, Tensor dk, Tensor dv)"
)


def traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | Tensor,
    *,
    scale: float | None,
    q_pos: Tensor | None,
    return_lse: bool,
    backend: str | None,
) -> Any:
    """`selection_attention` through the op."""
    selection = as_selection(selection)
    if not (scale is None or isinstance(scale, int | float)):
        raise ArgumentError("scale", repr(scale), "a finite number, or None for 1/sqrt(Dk)", "pass a Python float")
    decode = q.dim() == 4
    if decode:
        q = q.unsqueeze(1)
    needs_grad = transforms.needs_grad(q, k, v)
    o, lse = torch.ops.nsa_sel.selection_forward(
        q, k, v, selection.ranges, q_pos, selection.block_size, selection.max_length, selection.disjoint, scale, backend, needs_grad
    )
    if decode:
        o, lse = o.squeeze(1), lse.squeeze(1)
    return (o, lse) if return_lse else o


def _begin(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, q_pos: Tensor | None, block_size: int | None, max_length: int | None,
    disjoint: bool, scale: float | None, backend: str | None, needs_grad: bool, counts: bool = True,
) -> Decided:  # fmt: skip
    """Decide on the arguments of an op."""
    selection = Selection.unread(ranges, block_size, max_length, disjoint)
    return prepared(begin_or_repeat(q, k, v, selection, scale, q_pos, needs_grad, backend, counts), backend)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, q_pos: Tensor | None, block_size: int | None, max_length: int | None,
    disjoint: bool, scale: float | None, backend: str | None, needs_grad: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if needs_grad and backend is None and (name := forced()) is not None:
        raise BackendError(
            f"use_backend({name!r}) is not supported for compiled calls, or calls of DTensors, that need gradients, because the backward"
            " pass may run outside of it; allowed: the argument backend= of selection_attention. Remedy: pass backend=, or set"
            " NSA_SEL_BACKEND."
        )
    o, lse, _ = run.run_forward(_begin(q, k, v, ranges, q_pos, block_size, max_length, disjoint, scale, backend, needs_grad))
    return o.contiguous(), lse.contiguous()  # as `_fake_forward` promises, whatever a backend of another package returns


def _backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, ranges: Tensor,
    q_pos: Tensor | None, block_size: int | None, max_length: int | None, disjoint: bool, scale: float | None, backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with contextlib.nullcontext() if forced() is None else use_no_backend():  # the forward pass had none
        # The forward pass has counted; where it could not (in a capture), both go by the prior.
        call, decision, *_ = _begin(q, k, v, ranges, q_pos, block_size, max_length, disjoint, scale, backend, True, counts=False)
    dq, dk, dv = run.gradients(call, decision, o, lse, do, dlse)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, q_pos: Tensor | None, block_size: int | None, max_length: int | None,
    disjoint: bool, scale: float | None, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_call(q, k, v, Selection.unread(ranges, block_size, max_length, disjoint), scale, q_pos, fake=True)
    rows = q.shape[:-1]
    return q.new_empty(*rows, v.shape[-1]), q.new_empty(rows, dtype=torch.promote_types(q.dtype, torch.float32))


def _fake_backward(do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            o, lse = torch.ops.nsa_sel.selection_forward(*inputs)
        q, k, v, ranges, q_pos, *facts, _ = inputs
        ctx.save_for_backward(q, k, v, o, lse, ranges, q_pos)
        ctx.facts = facts
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if do is None and dlse is None:
            return (None,) * 11
        return *torch.ops.nsa_sel.selection_backward(do, dlse, *ctx.saved_tensors, *ctx.facts), *(None,) * 8


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.nsa_sel.selection_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        transforms.refuse_second_derivative()


def _differentiable(op: Any, function: Any, real: Callable[..., Any]) -> Callable[..., Any]:
    """The op's autograd kernel. torch.library.register_autograd's costs 20 us per call, with or without gradients."""

    def kernel(keys: Any, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            transforms.check_transforms(*inputs)
            return function.apply(*inputs)
        if _runs_next(keys.raw_repr()):
            return real(*inputs)
        return op.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

    return kernel


@functools.cache
def _runs_next(keys: int) -> bool:
    """Whether nothing after autograd traces, fakes or records a call with these dispatch keys."""
    rest = torch._C.DispatchKeySet.from_raw_repr(keys) & torch._C._after_ADInplaceOrView_keyset
    return rest.highestPriorityTypeId() in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def _autocast(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
    q, k, v = transforms.in_autocast_dtype(q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        return torch.ops.nsa_sel.selection_forward(q, k, v, *others)


def _vmap(*_: Any) -> None:
    transforms.refuse_transforms("vmap")


for op, real, fake, function in (
    (torch.ops.nsa_sel.selection_forward, _forward, _fake_forward, _Forward),
    (torch.ops.nsa_sel.selection_backward, _backward, _fake_backward, _Backward),
):
    name = op.__name__
    _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nsa_sel::{name}", fake, lib=_LIBRARY)
    _LIBRARY.impl(name, _differentiable(op.default, function, real), "Autograd", with_keyset=True)
    torch.library.register_vmap(f"nsa_sel::{name}", _vmap, lib=_LIBRARY)
for key in ("AutocastCPU", "AutocastCUDA"):
    _LIBRARY.impl("selection_forward", _autocast, key)
