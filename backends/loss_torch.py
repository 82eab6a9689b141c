"""loss-torch: the indexer's KL loss in plain PyTorch. The reference, which runs everywhere in bounded memory, in chunks of
rows.

16-bit inputs are computed in float32, regardless of autocast. Gradients of index keys are added chunk by chunk, in row
order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_sel.core.call import SCRATCH, IndexLossCall, positions

TEMPORARIES = 4  # tensors of all heads' logits that live at the same time


def forward(call: IndexLossCall, with_gradients: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return loss [B,S,G] and, with gradients of its sum, dq [B,S,G,Di] and dk in lse's dtype, shaped as index_k."""
    return _run(call, None, with_gradients)


def backward(call: IndexLossCall, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return dq and dk of sum(weights * loss); weights [B,S,G] in lse's dtype."""
    _, dq, dk = _run(call, weights, True)
    return dq, dk  # type: ignore[return-value]


def _run(call: IndexLossCall, weights: Tensor | None, with_gradients: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    B, S, G, h, _ = call.q.shape
    S_kv = call.k.shape[2]
    loss = call.lse.new_empty(B, S, G)
    dq, dk = (torch.empty_like(call.index_q), call.lse.new_zeros(call.index_k.shape)) if with_gradients else (None, None)
    rows = max(1, min(SCRATCH, call.settings.workspace_bytes) // (TEMPORARIES * G * h * S_kv * call.lse.element_size()))
    with torch.autocast(call.q.device.type, enabled=False):
        for b in range(B):
            for first in range(0, S, rows):
                at = slice(b, b + 1), slice(first, first + rows)
                seen = S_kv if call.q_pos is not None else S_kv - S + min(S, first + rows)
                ds = _logit_gradients(call, at, seen, loss)  # [rows,G,seen]
                if dq is None or dk is None:
                    continue
                ds = ds if weights is None else ds * weights[at][0].unsqueeze(-1)
                iq, ik = call.index_q[at][0].to(ds.dtype), call.index_k[b, :, :seen].to(ds.dtype).expand(G, -1, -1)
                # ds is 0 for keys that a row does not see, which may hold NaN.
                dq[at] = call.index_scale * torch.einsum("sgk,gkd->sgd", ds, _finite(ik))
                of_keys = call.index_scale * torch.einsum("sgk,sgd->gkd", ds, _finite(iq))
                dk[b, :, :seen] += of_keys if dk.shape[1] == G else of_keys.sum(0, keepdim=True)
    return loss, dq, dk


def _logit_gradients(call: IndexLossCall, at: tuple[slice, slice], seen: int, loss: Tensor) -> Tensor:
    """Return pi - P [rows,G,seen] for some rows of one batch entry, and write their loss."""
    wide = call.lse.dtype
    q, iq, lse = (x[at][0].to(wide) for x in (call.q, call.index_q, call.lse))
    k, ik = (x[at[0]][0, :, :seen].to(wide) for x in (call.k, call.index_k))
    mask = _mask(call, at, seen)  # [rows,G,seen]
    logits = call.scale * torch.einsum("sghd,gkd->sghk", q, k) - lse.unsqueeze(-1)
    P = logits.masked_fill_(~mask.unsqueeze(2), -torch.inf).exp_().mean(2)  # [rows,G,seen]
    index_logits = (call.index_scale * torch.einsum("sgd,gkd->sgk", iq, ik.expand(k.shape[0], -1, -1))).masked_fill_(~mask, -torch.inf)
    index_lse = index_logits.logsumexp(-1, keepdim=True).masked_fill_(~mask.any(-1, keepdim=True), 0.0)
    log_pi = index_logits - index_lse
    loss[at] = torch.where(P == 0, 0.0, P * (P.log() - log_pi)).sum(-1)
    return log_pi.exp() - P


def _mask(call: IndexLossCall, at: tuple[slice, slice], seen: int) -> Tensor:
    """Return which of the first `seen` keys some rows of one batch entry see, [rows,G,seen]: the union of their ranges up to
    their positions."""
    limit = positions(call.q, call.k.shape[2], call.q_pos, None)[at][0] + 1  # [rows]
    if call.selection is None:
        key = torch.arange(seen, device=limit.device)
        mask = key < limit[:, None]
        mask = mask if call.bounds is None else mask & (key >= call.bounds[0, at[1], None])
        return mask[:, None].expand(-1, call.q.shape[2], -1)
    ranges = call.selection.ranges[at][0].long()  # [rows,G,n,2]
    start = ranges[..., 0].clamp(0, seen)
    end = torch.minimum(ranges[..., 1], limit[:, None, None]).clamp(max=seen).maximum(start)
    steps = torch.zeros(*start.shape[:2], seen + 1, dtype=torch.int32, device=start.device)
    ones = torch.ones_like(start, dtype=torch.int32)
    steps.scatter_add_(2, start, ones).scatter_add_(2, end, -ones)
    return steps.cumsum(2)[..., :seen] > 0


def _finite(x: Tensor) -> Tensor:
    """Return x with 0 in place of NaN and infinities."""
    return torch.where(x.isfinite(), x, 0.0)
