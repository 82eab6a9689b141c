"""The checks and the decision of a call, or what they led to when the same facts were seen before."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa_sel.core import memory
from nsa_sel.core.arguments import check_tensors
from nsa_sel.core.begin import Decided, begin
from nsa_sel.core.call import REPEATED, Call
from nsa_sel.core.check import check_call
from nsa_sel.selection import Selection


def begin_or_repeat(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, scale: float | None, q_pos: Tensor | None, needs_grad: bool,
    backend: str | None, counts: bool = True,
) -> Decided:  # fmt: skip
    """Check the arguments of `selection_attention` and decide, unless all facts that both read are those of an earlier call. `counts`: see
    `begin`; what a call that may not count found is not remembered."""
    facts = _facts(q, k, v, selection, scale, q_pos, needs_grad, backend)
    found = memory.recall(facts)
    if found is None or (counts and found[3] is not None and not found[3].use()):
        check_tensors(q=q, k=k, v=v)
        decided = begin(*check_call(q, k, v, selection, scale, q_pos), needs_grad, backend, counts=counts)
        if not counts:
            return decided
        memory.remember(facts, (decided.request, decided.decision, decided.call.scale, decided.sharing, decided.call.known))
        return decided
    assert isinstance(selection, Selection), "see _facts"
    request, decision, checked_scale, _, known = found
    q = q.unsqueeze(1) if q.dim() == 4 else q
    call = Call(q, k, v, selection, None, checked_scale, decision.settings, decision.device)
    if memory.all_aligned(facts):
        call.known = known
        known[REPEATED] = True
    return Decided(call, decision, request)


def _facts(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, scale: float | None, q_pos: Tensor | None, needs_grad: bool,
    backend: str | None,
) -> tuple[Any, ...] | None:  # fmt: skip
    """All that `check_call`, `request_of` and `decide` read of the arguments of a call, or None for one that they must see each time.

    Building this and looking it up takes half the time of checking and deciding ("repeat" in docs/performance.md).
    """
    if type(selection) is not Selection or q_pos is not None or not (scale is None or type(scale) is float):
        return None
    tensors = memory.facts_of_tensors(q, k, v)
    if tensors is None:
        return None
    return (
        *tensors, selection.ranges.shape, selection.ranges.device, selection.block_size, selection.max_length, selection._cut_block,
        selection.exact(), scale, needs_grad, backend,
    )  # fmt: skip
