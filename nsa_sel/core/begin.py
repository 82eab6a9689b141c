"""From checked arguments to a call with its decision."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nsa_sel.core.call import Call, device_info, request_of
from nsa_sel.core.decide import Count, decide, with_count
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import Request
from nsa_sel.quantize import Scales
from nsa_sel.selection import Selection


class Decided(NamedTuple):
    """A checked call, its decision, and its exact request."""

    call: Call
    decision: Decision
    request: Request
    sharing: Count | None = None  # the count that the decision depends on


def begin(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, q_pos: Tensor | None, needs_grad: bool, backend: str | None,
    lengths: Tensor | None = None, block_table: Tensor | None = None, scales: Scales | None = None, counts: bool = True,
) -> Decided:  # fmt: skip
    """Decide on arguments that `check_call` returned. `counts`: whether this call may count how much neighbors share."""
    request, device = request_of(q, k, v, selection, needs_grad, block_table, scales), device_info(q.device)
    request, count = with_count(request, device, backend, q, selection, q_pos, lengths, counts)
    decision = decide(request, device, backend)
    call = Call(q, k, v, selection, q_pos, scale, decision.settings, decision.device, lengths, block_table, scales=scales)
    return Decided(call, decision, request, count)
