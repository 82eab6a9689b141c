"""Masked attention with lse in plain PyTorch: differentiable, bit-equal from run to run, with bounded memory for
logits.

16-bit inputs are computed in float32, whatever autocast says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from nsa_sel.core import transforms

_PIECE = 64 << 20  # most bytes of logits at once


def plain(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return o [N,H,M,Dv] in q's dtype and lse [N,H,M] for q [N,H,M,Dk], k [N,H,L,Dk], v [N,H,L,Dv].

    keep: [M,L] bool with at least one key per row, or None.
    """
    o, lse = _Plain.apply(q, k, v, keep, scale)  # type: ignore[no-untyped-call]
    return o, lse


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        o = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.shape[:-1], dtype=_wide(q))
        with torch.autocast(q.device.type, enabled=False):
            for at in _pieces(q, k):
                logits = _logits(q[at], k[at], keep, scale)
                lse[at] = logits.logsumexp(-1)
                o[at] = ((logits - lse[at].unsqueeze(-1)).exp() @ v[at].to(lse.dtype)).to(o.dtype)
        ctx.save_for_backward(q, k, v, keep, o, lse)
        ctx.scale = scale
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        """With p = exp(logits - lse): dv = p^T do, and ds = p (do v^T - (sum(do o) - dlse)) gives dq and dk."""
        if not is_compiling():
            if torch.is_grad_enabled():
                transforms.refuse_second_derivative("sliding_window_attention")
            transforms.check_gradients(do, dlse, name="sliding_window_attention")
        q, k, v, keep, o, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            for at in _pieces(q, k):
                wide_q, wide_k, wide_v, wide_do = (x[at].to(lse.dtype) for x in (q, k, v, do))
                p = (_logits(wide_q, wide_k, keep, ctx.scale) - lse[at].unsqueeze(-1)).exp()
                dv[at] = (p.mT @ wide_do).to(dv.dtype)
                delta = (wide_do * o[at]).sum(-1) - dlse[at]
                ds = p.mul_(wide_do @ wide_v.mT - delta.unsqueeze(-1)).mul_(ctx.scale)
                dq[at] = (ds @ wide_k).to(dq.dtype)
                dk[at] = (ds.mT @ wide_q).to(dk.dtype)
        return dq, dk, dv, None, None


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _logits(q: Tensor, k: Tensor, keep: Tensor | None, scale: float) -> Tensor:
    logits = (q.to(_wide(q)) * scale) @ k.to(_wide(q)).mT
    return logits if keep is None else logits.masked_fill_(~keep, -math.inf)


def _pieces(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Parts of the first two dimensions whose logits fit a piece; one of each at least."""
    N, H, M, _ = q.shape
    fit = max(1, _PIECE // (M * k.shape[2] * _wide(q).itemsize))
    first, second = max(1, fit // H), min(fit, H)
    for a in range(0, N, first):
        for b in range(0, H, second):
            yield slice(a, a + first), slice(b, b + second)
