"""Register a differentiable pair of torch.library ops, for torch.compile, torch.export and dispatch modes.

Traced calls go through ops; eager calls do not, to save the dispatch. Both run the same functions. An op decides when it runs, from the
sizes at that time, so a graph holds no decision. Plans of a selection are not shared between ops: a graph's buffers are rewritten without a
new tensor version, so a cached plan could belong to older ranges.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_sel.core import transforms

_LIBRARY: Any = torch.library.Library("nsa_sel", "DEF")  # type: ignore[no-untyped-call]


def define(
    name: str, options: str, tensors: int, forward: Callable[..., Any], backward: Callable[..., Any], fake_forward: Callable[..., Any],
    fake_backward: Callable[..., Any],
) -> None:  # fmt: skip
    """Register `nsa_sel::{name}_forward(q, k, v, options, needs_grad) -> (o, lse)` and
    `nsa_sel::{name}_backward(do, dlse, q, k, v, o, lse, options) -> (dq, dk, dv)`.

    Args:
        name: of the pair.
        options: the schema of the arguments after q, k, v; its first `tensors` arguments are tensors.
        tensors: number of tensors among them.
        forward, backward: run the ops.
        fake_forward, fake_backward: return empty outputs.
    """
    _LIBRARY.define(f"{name}_forward(Tensor q, Tensor k, Tensor v, {options}, bool needs_grad) -> (Tensor o, Tensor lse)")
    _LIBRARY.define(
        f"{name}_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {options})"
        " -> (Tensor dq, Tensor dk, Tensor dv)"
    )
    forward_op, backward_op = (getattr(torch.ops.nsa_sel, f"{name}_{direction}") for direction in ("forward", "backward"))

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                o, lse = forward_op(*inputs)
            q, k, v, *others, _ = inputs
            ctx.save_for_backward(q, k, v, o, lse, *others[:tensors])
            ctx.facts, ctx.inputs = others[tensors:], len(inputs)
            ctx.set_materialize_grads(False)
            return o, lse

        @staticmethod
        def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
            if do is None and dlse is None:
                return (None,) * ctx.inputs
            return *backward_op(do, dlse, *ctx.saved_tensors, *ctx.facts), *(None,) * (ctx.inputs - 3)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return backward_op(*inputs)

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            transforms.refuse_second_derivative()

    def autocast(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
        q, k, v = transforms.in_autocast_dtype(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            return forward_op(q, k, v, *others)

    for op, real, fake, function in ((forward_op, forward, fake_forward, Forward), (backward_op, backward, fake_backward, Backward)):
        own = op.__name__
        _LIBRARY.impl(own, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"nsa_sel::{own}", fake, lib=_LIBRARY)
        _LIBRARY.impl(own, _autograd_kernel(op.default, function, real), "Autograd", with_keyset=True)
        torch.library.register_vmap(f"nsa_sel::{own}", _vmap, lib=_LIBRARY)
    for key in ("AutocastCPU", "AutocastCUDA"):
        _LIBRARY.impl(f"{name}_forward", autocast, key)


def _autograd_kernel(op: Any, function: Any, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return the op's autograd kernel. torch.library.register_autograd's costs 20 us per call, with or without gradients."""

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
    """Return True if nothing after autograd traces, fakes or records a call with these dispatch keys."""
    rest = torch._C.DispatchKeySet.from_raw_repr(keys) & torch._C._after_ADInplaceOrView_keyset
    return rest.highestPriorityTypeId() in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def _vmap(*_: Any) -> None:
    transforms.refuse_transforms("vmap")
