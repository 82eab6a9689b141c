"""Decorators of a backend's passes: negative scales, replays, and values cached per class of calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.backends.launcher.replay import replayed
from nsa_sel.core.call import Call

Function = TypeVar("Function", bound=Callable[..., Any])


def forward_of_any_scale(forward: Function) -> Function:
    """Wrap a backend's `forward`: replay it if it was recorded, and pass negative scales to it as (-q, -scale).

    Kernels track the largest product q k^T, which is the largest logit only if the scale is positive.
    """

    @functools.wraps(forward)
    def run(call: Call) -> Any:
        return replayed(call, forward) if call.scale >= 0 else forward(call.with_positive_scale())

    return cast(Function, run)


def backward_of_any_scale(backward: Function) -> Function:
    """Wrap a backend's `backward` like `forward_of_any_scale`, with dq negated for (-q, -scale). Makes dlse
    contiguous."""

    @functools.wraps(backward)
    def run(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Any:
        dlse = None if dlse is None else dlse.contiguous()
        if call.scale >= 0:
            return replayed(call, backward, (o, lse, do, dlse))
        dq, *others = backward(call.with_positive_scale(), o, lse, do, dlse)
        return -dq, *others

    return cast(Function, run)


def outputs(call: Call) -> tuple[Tensor, Tensor]:
    """Return contiguous o [B,S,G,h,Dv] at a multiple of 16 bytes and lse [B,S,G,h] for a kernel of a `Call` to write: the
    caller's, or uninitialized.

    lse is float32, or float64 for float64 inputs (only in Triton's interpreter).
    """
    q, (o, lse) = call.q, call.out
    B, S, G, h, _ = q.shape  # unpacking is twice as fast as passing a torch.Size
    if o is None or not o.is_contiguous() or o.data_ptr() % 16:
        o = unwritten(q, B, S, G, h, call.v.shape[3])
    if lse is None or not lse.is_contiguous():
        lse = unwritten(q, B, S, G, h, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return o, lse


def cached_by_class(derive: Function) -> Function:
    """Cache `derive(call, ...)` in `Call.known`, which calls of the same class share.

    The result must follow from the call's shapes, strides, alignment and settings, not from its ranges, and must not be
    None.
    """

    @functools.wraps(derive)
    def cached(call: Call, *args: Any) -> Any:
        key = (derive, *args) if args else derive
        value = call.known.get(key)
        if value is None:
            value = call.known[key] = derive(call, *args)
        return value

    return cast(Function, cached)
