"""The checks and the decision of a call of `compressed_attention`, or what they led to when the same facts were seen before."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa_sel.core import decide, transforms
from nsa_sel.core.arguments import check_tensors
from nsa_sel.core.check import check_choose
from nsa_sel.core.choose import DecidedChoice, begin, decided_call
from nsa_sel.core.choose_call import Rule


def begin_or_repeat(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, S_kv: int | None, scale: float | None, q_pos: Tensor | None, needs_grad: bool,
    backend: str | None,
) -> DecidedChoice:  # fmt: skip
    """Check the arguments of `compressed_attention` and decide, unless all facts that both read are those of an earlier call."""
    key = _key(q, k, v, rule, S_kv, scale, q_pos, needs_grad, backend)
    classes = decide.recall(key) or ()
    found = transforms.find_class(classes, q, k, v)
    if found is None:
        check_tensors(q=q, k_cmp=k, v_cmp=v)
        rows, S_kv, scale, q_pos = check_choose(q, k, v, rule, scale, q_pos, S_kv, fake=False)
        decided = begin(rows, k, v, rule, S_kv, scale, q_pos, needs_grad, backend)
        if key is not None:
            decide.remember(key, transforms.with_class(classes, (decided.decision, decided.request, scale), q, k, v))
        return decided
    decision, request, checked_scale = found
    return decided_call(q.unsqueeze(1) if q.dim() == 4 else q, k, v, rule, checked_scale, None, decision, request)


def _key(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, S_kv: int | None, scale: float | None, q_pos: Tensor | None, needs_grad: bool,
    backend: str | None,
) -> tuple[Any, ...] | None:  # fmt: skip
    """What `check_choose`, `request_of` and `decide` read of a call beside what guards tell of its tensors, and shapes, which keep classes
    few; None for a call that they must see each time."""
    whole = {type(number) for number in rule} == {int}  # True and 1.0 equal 1, and are refused
    if q_pos is not None or not whole or not (scale is None or type(scale) is float) or not (S_kv is None or type(S_kv) is int):
        return None
    try:
        low_bits = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
        return low_bits, q.shape, k.shape, v.shape, rule, S_kv, scale, needs_grad, backend
    except (AttributeError, RuntimeError):  # no tensor, or one without shape or memory
        return None
