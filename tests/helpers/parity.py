"""One forced call, checked: the decision names the backend, outputs and gradients are within twice the baseline's error."""

from __future__ import annotations

import torch
from torch import Tensor

import nsa_sel
from nsa_sel.selection import Selection
from tests.helpers.cases import assert_forward, assert_gradients, make_grads, unused_keys


def attend(
    backend: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, q_pos: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """o and lse of `backend`, forced; numbers do not prove routing, so the recorded decision must name it too."""
    o, lse = nsa_sel.selection_attention(q, k, v, selection, q_pos=q_pos, scale=scale, return_lse=True, backend=backend)
    decision = nsa_sel.decisions()[-1]
    assert decision.forward == backend
    assert decision.backward == (backend if decision.request.needs_grad else None)
    return o, lse


def check_forward(backend: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, q_pos: Tensor | None = None) -> None:
    """Forward parity with the oracle."""
    got = attend(backend, q, k, v, selection, q_pos=q_pos)
    assert_forward(got, q, k, v, selection.ranges, q_pos=q_pos)


def check_both(
    backend: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, q_pos: Tensor | None = None, with_lse: bool = True
) -> None:
    """Forward and backward parity with the oracle; unselected keys get exact zeros."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o, lse = attend(backend, q, k, v, selection, q_pos=q_pos)
    assert_forward((o, lse), q, k, v, selection.ranges, q_pos=q_pos)
    do, dlse = make_grads(q, v)
    dlse = torch.where(lse.detach() == float("-inf"), 0.0, dlse)  # the lse of an empty row is a constant
    outputs, grads = ((o, lse), (do, dlse)) if with_lse else ((o,), (do,))
    got = torch.autograd.grad(outputs, (q, k, v), grads)
    assert_gradients(got, q, k, v, selection.ranges, do, dlse if with_lse else None, q_pos=q_pos)


def check_poison(backend: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, q_pos: Tensor | None = None) -> None:
    """NaN in every key and value that no row may read changes nothing; o and gradients stay finite and equal."""
    unused = unused_keys(q, k, selection.ranges, q_pos)
    assert bool(unused.any()), "the case must leave keys unselected"
    poison = torch.where(unused.unsqueeze(-1), float("nan"), 0.0).to(k.dtype)
    clean, poisoned = (results_of(backend, q, k + x, v + x, selection, q_pos) for x in (torch.zeros_like(poison), poison))
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def check_deterministic(backend: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection, reruns: int) -> None:
    """Reruns are bit-equal, forward and backward, with plans built anew."""
    runs = [results_of(backend, q, k, v, Selection(selection.ranges, selection.block_size)) for _ in range(reruns)]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(runs[0], run, strict=True))


def results_of(backend: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection, q_pos: Tensor | None = None) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv for a gradient of o alone."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = attend(backend, *inputs, selection, q_pos=q_pos)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, inputs, make_grads(q, v)[0])
