"""Sliding-window attention by kernels, for tensors of a GPU: Hopper's of window_cuda.py, or the Triton kernels of window_triton.py.

Eager calls go through an autograd function, those that torch.compile traces through the ops `nsa_sel::window` and `window_backward`.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch import Tensor

from nsa_sel.backends._window import ops
from nsa_sel.backends.specs import ARITHMETIC_TILES
from nsa_sel.core import registry, transforms
from nsa_sel.core.call import device_info
from nsa_sel.errors import warn

CUDA, TRITON = "nsa_sel.backends.window_cuda", "nsa_sel.backends.window_triton"  # imported at the first call on a GPU
_NEEDED = "cupy-cuda"  # the backend whose packages and libraries CUDA needs, too
_NAMES = {CUDA: ("CUDA", "the Triton kernels"), TRITON: ("Triton", "chunks of rows")}  # and what runs in their place
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_DIM = 256
_OLDEST = (8, 0)  # compute capability


def takes(q: Tensor, v: Tensor) -> bool:
    """Return True if the kernels run such tensors."""
    if not q.is_cuda or q.dtype not in _DTYPES or max(q.shape[-1], v.shape[-1]) > _MOST_DIM:
        return False
    facts = torch.cuda.get_device_properties(q.device)
    return (facts.major, facts.minor) >= _OLDEST


def has_failed(q: Tensor, v: Tensor, kernels: str = TRITON) -> bool:
    """Return True if the kernels have failed for such heads in this process."""
    return bool(registry.broken_windows) and (kernels, *_heads(q, v)) in registry.broken_windows


def note_failure(q: Tensor, v: Tensor, error: Exception, kernels: str = TRITON) -> None:
    """Leave such heads to the next in line from now on; raises what that would not survive either."""
    if isinstance(error, torch.OutOfMemoryError) or registry.is_sticky(error):
        raise error
    name, other = _NAMES[kernels]
    warn(
        f"The {name} kernels of sliding_window_attention failed, {other} run such heads from now on: {error!r}."
        " Remedy: nsa_sel.reset() lets them try again"
    )
    registry.broken_windows.add((kernels, *_heads(q, v)))


def _heads(q: Tensor, v: Tensor) -> tuple[Any, ...]:
    return (q.device, q.dtype, *q.shape[3:], v.shape[-1])


def _by_cuda(q: Tensor, v: Tensor) -> bool:
    """Return True if CUDA's kernels are tried; they leave to Triton's what they do not compute."""
    return q.is_cuda and device_info(q.device).sm == ARITHMETIC_TILES.sm and not registry.missing(_NEEDED) and not has_failed(q, v, CUDA)


def _run(function: str, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Run `forward` or `backward` of the kernels."""
    with _on_device(q):
        if _by_cuda(q, v):
            try:
                found: tuple[Tensor, ...] = getattr(importlib.import_module(CUDA), function)(q, k, v, *others)
                return found
            except Exception as error:
                note_failure(q, v, error, CUDA)
        found = getattr(importlib.import_module(TRITON), function)(q, k, v, *others)
        return found


def packed_bounds(cu_seqlens: Tensor, T: int) -> Tensor:
    """Return where the sequence of each of T packed rows begins and ends, [2,T] int32, from cu_seqlens [N+1] on their device.

    T and 0 for rows after the last sequence, which see nothing.
    """
    row = torch.arange(T, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    after = torch.searchsorted(cu_seqlens, row, right=True)  # the first bound beyond the row
    last = cu_seqlens.shape[0] - 1
    begin, end = cu_seqlens[after - 1], cu_seqlens[after.clamp(max=last)]
    return torch.stack((torch.where(after > last, T, begin), torch.where(after > last, 0, end))).int()


def attend(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, bounds: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h] of checked tensors, none of them empty; differentiable in q, k and v.

    bounds: `packed_bounds` of a packed batch, B = 1 and S = S_kv = T.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if transforms.traces(q, k, v):
        found: tuple[Tensor, Tensor] = torch.ops.nsa_sel.window(q, k, v, window, scale, bounds)
        return found
    if not transforms.needs_grad(q, k, v):
        return _forward(q, k, v, window, scale, bounds)
    o, lse = _Window.apply(q, k, v, window, scale, bounds)  # type: ignore[no-untyped-call]
    return o, lse


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
        o, lse = _forward(q, k, v, window, scale, bounds)
        ctx.save_for_backward(q, k, v, o, lse, bounds)
        ctx.facts = window, scale
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative("sliding_window_attention")
        transforms.check_gradients(do, dlse, name="sliding_window_attention")
        if do is None and dlse is None:
            return (None,) * 6
        q, k, v, o, lse, bounds = ctx.saved_tensors
        window, scale = ctx.facts
        if bounds is not None:  # chunks cannot take over
            return *_backward(do, dlse, q, k, v, o, lse, window, scale, bounds)[:3], None, None, None
        found = gradients(do, dlse, q, k, v, o, lse, window, scale, None)
        return *(ops.gradients(do, dlse, q, k, v, window, scale, True, None) if found is None else found[:3]), None, None, None


def gradients(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int, scale: float,
    bounds: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:  # fmt: skip
    """Return dq, dk, dv and delta by the kernels; None if they have failed for such heads."""
    if has_failed(q, v):
        return None
    try:
        return _backward(do, dlse, q, k, v, o, lse, window, scale, bounds)
    except Exception as error:
        note_failure(q, v, error)
        return None


def _forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    o, lse = _run("forward", q, k, v, window, scale, bounds)
    return o, lse


def _backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int, scale: float,
    bounds: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk, dv, and delta = sum(do * o) - dlse [B,S,G,h]."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    do = torch.zeros_like(o) if do is None else do.resolve_neg()
    do = do if do.stride(-1) == 1 else do.contiguous()
    dlse = None if dlse is None else dlse.resolve_neg().contiguous()
    dq, dk, dv, delta = _run("backward", q, k, v, o, lse, do, dlse, window, scale, bounds)
    return dq, dk, dv, delta


def _on_device(q: Tensor) -> contextlib.AbstractContextManager[None]:
    """With q's device current: kernels launch and allocate there."""
    here = not q.is_cuda or q.get_device() == torch._C._cuda_getDevice()
    return contextlib.nullcontext() if here else torch.cuda.device(q.device)  # type: ignore[return-value]


@torch.library.custom_op("nsa_sel::window", mutates_args=())
def _op(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, window, scale, bounds)


@torch.library.custom_op("nsa_sel::window_backward", mutates_args=())
def _op_backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int, scale: float,
    bounds: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _backward(do, dlse, q, k, v, o, lse, window, scale, bounds)[:3]


@_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = q.shape[:-1]
    return q.new_empty(*rows, v.shape[-1]), q.new_empty(rows, dtype=torch.float32)


@_op_backward.register_fake
def _(do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, window, scale, bounds = inputs
    ctx.save_for_backward(q, k, v, *output, bounds)
    ctx.facts = window, scale
    ctx.set_materialize_grads(False)


def _through_op(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None and dlse is None:
        return (None,) * 6
    q, k, v, o, lse, bounds = ctx.saved_tensors
    return *torch.ops.nsa_sel.window_backward(do, dlse, q, k, v, o, lse, *ctx.facts, bounds), None, None, None


_op.register_autograd(_through_op, setup_context=_save)
