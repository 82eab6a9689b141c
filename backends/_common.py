"""What GPU backends share: passes of either scale, replayed where they were seen before, and what calls of the same shapes know."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor

from nsa_sel.backends._replay import replayed
from nsa_sel.core.call import Call

Found = TypeVar("Found", bound=Callable[..., Any])


def forward_of_any_scale(forward: Found) -> Found:
    """A backend's `forward`, replayed where it was recorded. Kernels keep the largest product, which must belong to the largest logit: a
    negative scale goes to them as (-q, -scale)."""

    @functools.wraps(forward)
    def run(call: Call) -> Any:
        return replayed(call, forward) if call.scale >= 0 else forward(call.with_positive_scale())

    return cast(Found, run)


def backward_of_any_scale(backward: Found) -> Found:
    """As `forward_of_any_scale`; the gradient of -q changes its sign. dlse is contiguous."""

    @functools.wraps(backward)
    def run(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Any:
        dlse = None if dlse is None else dlse.contiguous()
        if call.scale >= 0:
            return replayed(call, backward, (o, lse, do, dlse))
        dq, *others = backward(call.with_positive_scale(), o, lse, do, dlse)
        return (-dq, *others)

    return cast(Found, run)


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
