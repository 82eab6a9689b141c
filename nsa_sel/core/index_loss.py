"""Calls of the kind "index_loss", eager and traced: the KL loss that teaches an indexer which keys the attention reads.

If all rows have the same weight in the result (`uniform`), the forward pass computes the gradients, too, so that the
products of the main attention are computed once; the backward pass scales them. Otherwise the backward pass computes the
gradients of weighted rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.core import registry, run, transforms
from nsa_sel.core.backend import LossModule
from nsa_sel.core.call import DTYPES, IndexLossCall, device_info, is_aligned
from nsa_sel.core.decide import Decided, decide
from nsa_sel.core.request import Request
from nsa_sel.selection import Selection


class Arguments(NamedTuple):
    """Checked arguments (core/check.py). Shapes are those of `IndexLossCall`."""

    q: Tensor
    k: Tensor
    lse: Tensor
    index_q: Tensor
    index_k: Tensor
    selection: Selection | None  # None: all visible keys
    q_pos: Tensor | None
    scale: float
    index_scale: float
    bounds: Tensor | None = None  # of a packed batch without a selection


def rows_loss(checked: Arguments, uniform: bool, backend: str | None) -> Tensor:
    """Return the loss [B,S,G] of every row and index head, differentiable in index_q and index_k.

    uniform: promises that the gradients of all rows' losses are equal.
    """
    needs_grad = torch.is_grad_enabled() and (checked.index_q.requires_grad or checked.index_k.requires_grad)
    if not transforms.traces(checked.q, checked.k, checked.index_q, checked.index_k):
        decided = _decided(checked, needs_grad, backend)
        if not needs_grad:
            return _forward(decided, False)[0]  # type: ignore[no-any-return]
        return _Loss.apply(checked.index_q, checked.index_k, decided, uniform)  # type: ignore[no-any-return, no-untyped-call]
    *tensors, selection, q_pos, scale, index_scale, bounds = checked
    facts = (None, None, None, False)
    if selection is not None:
        facts = selection.ranges, selection.block_size, selection.max_length, selection.disjoint  # type: ignore[assignment]
    return torch.ops.nsa_sel.indexer_loss(*tensors, q_pos, bounds, *facts, scale, index_scale, backend, needs_grad, uniform)[0]  # type: ignore[no-any-return]


def _decided(checked: Arguments, needs_grad: bool, backend: str | None) -> Decided:
    """Decide on checked arguments."""
    q, k, lse, index_q, index_k = (x.detach() for x in checked[:5])
    selection = checked.selection
    B, S, G, h, Dk = q.shape
    n, block, most = 1, None, k.shape[2]
    if selection is not None:
        n, block, most = selection.n, selection.block_size, selection.length_bound(most)
    request = Request(
        B=B, S=S, S_kv=k.shape[2], G=G, h=h, Dk=Dk, Dv=index_q.shape[3], n=n, block_size=block, max_length=most, dtype=DTYPES[q.dtype],
        needs_grad=needs_grad, aligned=is_aligned(q, k, index_q, index_k), kind="index_loss",
    )  # fmt: skip
    decision = decide(request, device_info(q.device), backend)
    call = IndexLossCall(
        q, k, lse, index_q, index_k, selection, checked.q_pos, checked.scale, checked.index_scale, decision.settings, decision.device,
        checked.bounds,
    )  # fmt: skip
    return Decided(call, decision, request)


def _forward(decided: Decided, with_gradients: bool) -> Any:
    """Return the loss, gradients of its sum (None without with_gradients), and the decision of the backend that ran."""

    def function_of(name: str, _: Any) -> Callable[[IndexLossCall], tuple[Tensor | None, ...]]:
        module: LossModule = registry.load_loss(name)
        return lambda call: module.forward(call, with_gradients)

    return run.run_forward(decided, function_of)


def _backward(call: IndexLossCall, decision: Any, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of sum(weights * loss) in the dtypes of index_q and index_k. weights: [B,S,G].

    Weights are scaled to at most 1, so that 16-bit products with them neither overflow nor vanish.
    """
    transforms.check_gradients(weights, name=call.function)
    if call.selects_nothing():
        return torch.zeros_like(call.index_q), torch.zeros_like(call.index_k)
    most = weights.abs().amax()
    weights = (weights / most.clamp(min=torch.finfo(weights.dtype).tiny)).contiguous()
    (dq, dk), decision = run.run_pass(call, decision, "backward", lambda name, _: registry.load_loss(name).backward, weights)
    return _scaled(dq, most, call.index_q.dtype), _scaled(dk, most, call.index_k.dtype)


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x * factor, rounded once: PyTorch would round a factor of no dimension to the dtype of x."""
    return (x.to(factor.dtype) * factor).to(dtype)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index_q: Tensor, index_k: Tensor, decided: Decided, uniform: bool) -> Tensor:
        call = decided.call
        loss, dq, dk, ctx.decision = _forward(decided, uniform)
        ctx.uniform, ctx.dtype = uniform, index_k.dtype
        if uniform:
            ctx.save_for_backward(dq, dk)
        else:
            ctx.call = call
            ctx.save_for_backward(*transforms.versioned(*call.tensors()))
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative(IndexLossCall.function)
        saved = ctx.saved_tensors  # PyTorch raises if one of them was written
        if ctx.uniform:
            factor = dloss.flatten()[0] if dloss.numel() else dloss.sum()
            return *(_scaled(x, factor, ctx.dtype) for x in saved), None, None
        return *_backward(ctx.call, ctx.decision, dloss), None, None


# The ops `nsa_sel::indexer_loss` and `indexer_loss_backward`, through which traced calls go.


def _unread(
    q: Tensor, k: Tensor, lse: Tensor, index_q: Tensor, index_k: Tensor, q_pos: Tensor | None, bounds: Tensor | None,
    ranges: Tensor | None, block_size: int | None, max_length: int | None, disjoint: bool, scale: float, index_scale: float,
) -> Arguments:  # fmt: skip
    selection = None if ranges is None else Selection.unread(ranges, block_size, max_length, disjoint)
    return Arguments(q, k, lse, index_q, index_k, selection, q_pos, scale, index_scale, bounds)


@torch.library.custom_op("nsa_sel::indexer_loss", mutates_args=())
def _op(
    q: Tensor, k: Tensor, lse: Tensor, index_q: Tensor, index_k: Tensor, q_pos: Tensor | None, bounds: Tensor | None,
    ranges: Tensor | None, block_size: int | None, max_length: int | None, disjoint: bool, scale: float, index_scale: float,
    backend: str | None, needs_grad: bool, uniform: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    of = _unread(q, k, lse, index_q, index_k, q_pos, bounds, ranges, block_size, max_length, disjoint, scale, index_scale)
    with_gradients = needs_grad and uniform
    loss, dq, dk, _ = _forward(_decided(of, needs_grad, backend), with_gradients)
    return loss, dq if with_gradients else q.new_empty(0), dk if with_gradients else q.new_empty(0)


@_op.register_fake
def _(
    q: Tensor, k: Tensor, lse: Tensor, index_q: Tensor, index_k: Tensor, q_pos: Tensor | None, bounds: Tensor | None,
    ranges: Tensor | None, block_size: int | None, max_length: int | None, disjoint: bool, scale: float, index_scale: float,
    backend: str | None, needs_grad: bool, uniform: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    loss = lse.new_empty(q.shape[:3])
    if not (needs_grad and uniform):
        return loss, q.new_empty(0), q.new_empty(0)
    return loss, index_q.new_empty(index_q.shape), lse.new_empty(index_k.shape)


@torch.library.custom_op("nsa_sel::indexer_loss_backward", mutates_args=())
def _op_backward(
    dloss: Tensor, q: Tensor, k: Tensor, lse: Tensor, index_q: Tensor, index_k: Tensor, q_pos: Tensor | None, bounds: Tensor | None,
    ranges: Tensor | None, block_size: int | None, max_length: int | None, disjoint: bool, scale: float, index_scale: float,
    backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of = _unread(q, k, lse, index_q, index_k, q_pos, bounds, ranges, block_size, max_length, disjoint, scale, index_scale)
    call, decision, *_ = _decided(of, True, backend)
    return _backward(call, decision, dloss)


@_op_backward.register_fake
def _(dloss: Tensor, q: Tensor, k: Tensor, lse: Tensor, index_q: Tensor, index_k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return index_q.new_empty(index_q.shape), index_k.new_empty(index_k.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *inputs_kept, _, ctx.uniform = inputs
    ctx.dtype, ctx.others = inputs[4].dtype, inputs_kept[8:]
    ctx.save_for_backward(*(output[1:] if ctx.uniform else inputs_kept[:8]))
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    nothing: tuple[None, ...] = (None,) * 11
    if torch.is_grad_enabled():
        transforms.refuse_second_derivative(IndexLossCall.function)
    if dloss is None:
        return None, None, None, None, None, *nothing
    if ctx.uniform:
        dq, dk = (_scaled(x, dloss.flatten()[0], ctx.dtype) for x in ctx.saved_tensors)
    else:
        dq, dk = torch.ops.nsa_sel.indexer_loss_backward(dloss, *ctx.saved_tensors, *ctx.others)
    return None, None, None, dq, dk, *nothing


_op.register_autograd(_gradients, setup_context=_save)
