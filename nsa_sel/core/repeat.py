"""The checks and the decision of a call, or what they led to when the same facts were seen before."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa_sel.core import seen, transforms
from nsa_sel.core.arguments import check_tensors
from nsa_sel.core.begin import Decided, begin
from nsa_sel.core.call import REPEATED, Call
from nsa_sel.core.check import check_call
from nsa_sel.selection import Selection


def repeated(q: Any, k: Any, v: Any, selection: Any, scale: Any, q_pos: Any, backend: Any) -> Decided | None:
    """What `begin_or_repeat` returns for a call that was seen before, of arguments that nothing has looked at; None for any other."""
    try:
        if transforms.told_by_guards(q):
            return _recall(q, k, v, selection, scale, q_pos, transforms.needs_grad(q, k, v), backend)
    except AttributeError:  # no tensor
        pass
    return None


def begin_or_repeat(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, scale: float | None, q_pos: Tensor | None, needs_grad: bool,
    backend: str | None, counts: bool = True,
) -> Decided:  # fmt: skip
    """Check the arguments of `selection_attention` and decide, unless all facts that both read are those of an earlier call. `counts`: see
    `begin`; what a call that may not count found is not remembered."""
    found = _recall(q, k, v, selection, scale, q_pos, needs_grad, backend, counts)
    if found is not None:
        return found
    check_tensors(q=q, k=k, v=v)
    decided = begin(*check_call(q, k, v, selection, scale, q_pos), needs_grad, backend, counts=counts)
    if counts and (key := _key(q, k, selection, scale, q_pos, needs_grad, backend)) is not None:
        call = decided.call
        seen.remember(key, (decided.request, decided.decision, call.scale, decided.sharing, call.known), q, k, v, call.selection.ranges)
    return decided


def _recall(
    q: Tensor, k: Tensor, v: Tensor, selection: Any, scale: Any, q_pos: Any, needs_grad: bool, backend: Any, counts: bool = True
) -> Decided | None:
    """What an earlier call with the same facts led to, for these tensors; None if there was none, or its count of sharing is used up."""
    key = _key(q, k, selection, scale, q_pos, needs_grad, backend)
    found = None if key is None else seen.recall(key, q, k, v, selection.ranges)
    if found is None:
        return None
    (request, decision, checked_scale, sharing, known), aligned = found
    if counts and sharing is not None and not sharing.use():
        return None
    call = Call(q.unsqueeze(1) if q.dim() == 4 else q, k, v, selection, None, checked_scale, decision.settings, decision.device)
    if aligned:
        call.known = known
        known[REPEATED] = True
    return Decided(call, decision, request)


def _key(q: Tensor, k: Tensor, selection: Any, scale: Any, q_pos: Any, needs_grad: bool, backend: Any) -> tuple[Any, ...] | None:
    """What `check_call`, `request_of` and `decide` read of a call beside its tensors, and what keeps classes of tensors apart; None for a
    call that they must see each time.

    With `seen.recall` it takes half the time of checking and deciding ("repeat" in docs/performance.md).
    """
    if type(selection) is not Selection or q_pos is not None or not (scale is None or type(scale) is float):
        return None
    try:
        shapes = q.shape, k.shape
    except (AttributeError, RuntimeError):  # no tensor, or a nested one
        return None
    return *shapes, selection.block_size, selection.max_length, selection._cut_block, selection.exact(), scale, needs_grad, backend
