"""Windows in plain PyTorch as one call, whole or packed; torch.compile traces it as one op.

Traced, the chunks would be a graph for each length, which takes minutes to compile: how many there are depends on the
length. The ops are `nsa_sel::window_chunks` and `window_chunks_backward`; eager calls do not go through them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from nsa_sel.backends._window import chunks, packed
from nsa_sel.core.arguments import Bounds

_Key, _excluded = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard


def attend(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool, bounds: Bounds | None
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """o [B,S,G,h,Dv], and lse [B,S,G,h] with return_lse, of checked tensors none of which is empty; recorded by
    autograd."""
    if is_compiling():
        cu_seqlens = None if bounds is None else bounds.as_tensor()
        o, lse = torch.ops.nsa_sel.window_chunks(q, k, v, window, scale, return_lse, cu_seqlens)
        return o, lse if return_lse else None
    if bounds is not None:
        return packed.attend(q, k, v, window, scale, return_lse, bounds)
    return chunks.attend_seen(q, k, v, window, scale, return_lse)


def gradients(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool,
    bounds: Bounds | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return dq, dk, dv by autograd through another forward pass."""
    q, k, v = inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):  # of who calls backward; forward cast already
        results = attend(q, k, v, window, scale, return_lse, bounds)
    used = [(x, dx) for x, dx in zip(results, (do, dlse), strict=True) if x is not None and dx is not None]
    return torch.autograd.grad([x for x, _ in used], inputs, [dx for _, dx in used])


def _bounds(cu_seqlens: Tensor | None, q: Tensor) -> Bounds | None:
    return None if cu_seqlens is None else Bounds.of("cu_seqlens", cu_seqlens, q.shape[1], q)


@torch.library.custom_op("nsa_sel::window_chunks", mutates_args=())
def _op(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with torch.autocast(q.device.type, enabled=False):
        o, lse = attend(q, k, v, window, scale, return_lse, _bounds(cu_seqlens, q))
    return o.contiguous(), q.new_empty(0) if lse is None or not return_lse else lse.contiguous()


@_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = q.shape[:-1]
    lse = q.new_empty(rows, dtype=torch.promote_types(q.dtype, torch.float32)) if return_lse else q.new_empty(0)
    return q.new_empty(*rows, v.shape[-1]), lse


@torch.library.custom_op("nsa_sel::window_chunks_backward", mutates_args=())
def _op_backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    bounds = _bounds(cu_seqlens, q)
    # A custom op runs with the dispatch keys of autograd excluded.
    with _excluded(_Key.AutogradFunctionality, False), _excluded(_Key.ADInplaceOrView, False):
        dq, dk, dv = gradients(do, dlse, q, k, v, window, scale, return_lse, bounds)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_op_backward.register_fake
def _(do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, *facts, cu_seqlens = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens)
    ctx.facts = facts
    ctx.set_materialize_grads(False)


def _through_op(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None and dlse is None:
        return (None,) * 7
    *tensors, cu_seqlens = ctx.saved_tensors
    return *torch.ops.nsa_sel.window_chunks_backward(do, dlse, *tensors, *ctx.facts, cu_seqlens), *(None,) * 4


_op.register_autograd(_through_op, setup_context=_save)
