"""What GPU backends share: scales of either sign, what calls of the same shapes know, and plans remembered in the selection."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor

from nsa_sel.core.call import Call

Forward = Callable[[Call], tuple[Tensor, Tensor]]
Backward = Callable[[Call, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]


def forward_of_any_scale(forward: Forward) -> Forward:
    """Kernels keep the largest product, which must belong to the largest logit: a negative scale goes to them as (-q, -scale)."""

    @functools.wraps(forward)
    def run(call: Call) -> tuple[Tensor, Tensor]:
        return forward(call if call.scale >= 0 else call.with_positive_scale())

    return run


def backward_of_any_scale(backward: Backward) -> Backward:
    """As `forward_of_any_scale`; the gradient of -q changes its sign. dlse is contiguous."""

    @functools.wraps(backward)
    def run(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dlse = None if dlse is None else dlse.contiguous()
        if call.scale >= 0:
            return backward(call, o, lse, do, dlse)
        dq, dk, dv = backward(call.with_positive_scale(), o, lse, do, dlse)
        return -dq, dk, dv

    return run


Found = TypeVar("Found", bound=Callable[..., Any])


def known(find: Found) -> Found:
    """`find(call, ...)` without finding it again for calls that share `Call.known`: what it returns, never None, follows from the shapes,
    strides, alignment and settings of the call, and not from its ranges."""

    @functools.wraps(find)
    def recall(call: Call, *others: Any) -> Any:
        key = (find, *others) if others else find
        found = call.known.get(key)
        if found is None:
            found = call.known[key] = find(call, *others)
        return found

    return cast(Found, recall)


def remembered_plan(call: Call, key: tuple[object, ...], build: Callable[[], Any]) -> Any:
    """A plan kept in the selection for this key, number of keys and positions: the causal clamp depends on both.

    Inside a CUDA graph it is built every time: a replay must follow ranges that were written since the capture, and a plan that a capture
    builds holds nothing until the graph is replayed.
    """
    if call.capturing():
        return build()
    return call.selection.plan((*key, call.k.shape[2]), build, call.q_pos)
