"""Reference of sliding windows, and checks against it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.helpers.cases import assert_within_twice_baseline, gradient_terms, lse_dtype, make_grads, make_qkv

Attend = Callable[..., Any]


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[tuple[Tensor, ...], int]:
    """Return q, k, v that require gradients, and the window, of (B, S, S_kv, G, h, Dk, Dv, window)."""
    B, S, S_kv, G, h, Dk, Dv, window = shape
    return make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv, dtype=dtype, device=device, requires_grad=True), window


def masked_softmax(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """o and lse over all keys in the inputs' own dtype, for autograd."""
    S, S_kv = q.shape[1], k.shape[2]
    position, key = torch.arange(S_kv - S, S_kv, device=q.device)[:, None, None, None], torch.arange(S_kv, device=q.device)
    seen = (key <= position) & (position - key < window)
    logits = torch.einsum("bsghd,bgkd->bsghk", q * (q.shape[-1] ** -0.5 if scale is None else scale), k).masked_fill(~seen, -math.inf)
    return torch.einsum("bsghk,bgkd->bsghd", torch.softmax(logits, -1), v), torch.logsumexp(logits.to(lse_dtype(q)), -1)


def results(attend: Attend, inputs: tuple[Tensor, ...], window: int, with_lse: bool, **options: Any) -> tuple[Tensor, ...]:
    """o, lse with_lse, dq, dk, dv."""
    do, dlse = make_grads(inputs[0], inputs[2])
    found = attend(*inputs, window, **options)
    outputs = found[: 1 + with_lse] if isinstance(found, tuple) else (found,)
    gradients = torch.autograd.grad(outputs, inputs, (do, dlse)[: len(outputs)])
    return *(x.detach() for x in outputs), *gradients


def check(attend: Attend, inputs: tuple[Tensor, ...], window: int, with_lse: bool) -> None:
    """Results and gradients within twice the error of `masked_softmax` in the same dtype, and of its dtypes."""
    doubles = tuple(x.detach().double().requires_grad_() for x in inputs)
    exact, baseline = (results(masked_softmax, x, window, with_lse) for x in (doubles, inputs))
    got = results(attend, inputs, window, with_lse, return_lse=with_lse)
    q, k, v = (x.detach() for x in inputs)
    terms = (*(0.0,) * (1 + with_lse), *gradient_terms(q, k, v, make_grads(q, v)[0], q.shape[-1] ** -0.5))
    names = ("o", "lse", "dq", "dk", "dv") if with_lse else ("o", "dq", "dk", "dv")
    for name, mine, right, plainly, term in zip(names, got, exact, baseline, terms, strict=True):
        assert mine.dtype == plainly.dtype
        if mine.dtype == torch.float64:  # the baseline is the reference itself
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
            continue
        assert_within_twice_baseline(mine, right, plainly, name, term)
