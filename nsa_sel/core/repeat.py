"""The checks and the decision of a call, or what they led to for an earlier call whose tensors and options were alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa_sel.core import memory, seen, transforms
from nsa_sel.core.arguments import check_tensors
from nsa_sel.core.begin import Decided, begin
from nsa_sel.core.call import REPEATED, Call
from nsa_sel.core.check import check_call
from nsa_sel.selection import Selection


def repeated(q: Any, k: Any, v: Any, selection: Any, scale: Any, q_pos: Any, backend: Any) -> Decided | None:
    """What `begin_or_repeat` returns for a call that was seen before, of arguments that nothing has looked at; None for any other."""
    try:
        if not transforms.untransformed() or transforms.casts(q):
            return None
        needs_grad = transforms.needs_grad(q, k, v)
    except AttributeError:  # no tensor
        return None
    return _recall(q, k, v, selection, scale, q_pos, needs_grad, backend)


def begin_or_repeat(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, scale: float | None, q_pos: Tensor | None, needs_grad: bool,
    backend: str | None, counts: bool = True,
) -> Decided:  # fmt: skip
    """Check the arguments of `selection_attention` and decide, unless all facts that both read are those of an earlier call. `counts`: see
    `begin`; what a call that may not count found is not remembered."""
    repeats = _recall(q, k, v, selection, scale, q_pos, needs_grad, backend, counts)
    if repeats is not None:
        return repeats
    check_tensors(q=q, k=k, v=v)
    decided = begin(*check_call(q, k, v, selection, scale, q_pos), needs_grad, backend, counts=counts)
    key = _key(q, k, v, selection, scale, q_pos, needs_grad, backend) if counts else None
    if key is not None and not decided.call.selects_nothing():
        found = decided.request, decided.decision, decided.call.scale, decided.sharing, decided.call.known
        memory.remember(key, seen.added(memory.recall(key) or (), found, *_distinct(q, k, v), decided.call.selection.ranges))
    return decided


def _recall(
    q: Tensor, k: Tensor, v: Tensor, selection: Any, scale: Any, q_pos: Any, needs_grad: bool, backend: Any, counts: bool = True
) -> Decided | None:
    """What an earlier call with the same facts led to, for these tensors; None if there was none, or its count of sharing is used up."""
    key = _key(q, k, v, selection, scale, q_pos, needs_grad, backend)
    classes = memory.recall(key)
    found = None if classes is None else seen.find(classes, *_distinct(q, k, v), selection.ranges)
    if found is None:
        return None
    request, decision, checked_scale, sharing, known = found
    if counts and sharing is not None and not sharing.use():
        return None
    call = Call(q.unsqueeze(1) if q.dim() == 4 else q, k, v, selection, None, checked_scale, decision.settings, decision.device)
    if not key[0]:
        call.known = known
        known[REPEATED] = True
    return Decided(call, decision, request)


def _key(q: Tensor, k: Tensor, v: Tensor, selection: Any, scale: Any, q_pos: Any, needs_grad: bool, backend: Any) -> Any:
    """What `check_call`, `request_of` and `decide` read of a call beside what guards tell of its tensors, and shapes, which keep classes
    few; None for a call that they must see each time. First the lowest bits of the addresses of q, k and v: unless they are 0, they do
    not tell whose they are.

    With the search it takes half the time of checking and deciding (docs/performance.md, "Host overhead").
    """
    if type(selection) is not Selection or q_pos is not None or not (scale is None or type(scale) is float):
        return None
    try:
        return (
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15, q.shape, k.shape, None if v is k else v.shape,
            selection.block_size, selection.max_length, selection._cut_block, selection.exact(), scale, needs_grad, backend,
        )  # fmt: skip
    except (AttributeError, RuntimeError):  # no tensor, or one without shape or memory
        return None


def _distinct(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (q, k) if v is k else (q, k, v)
