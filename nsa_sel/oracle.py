"""The float64 reference: plain loops that share no code with any backend. For tests; slow."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run on one thread: the tensors of a row are small, and waking other threads costs up to milliseconds per row."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def oracle_mask(ranges: Tensor, S_kv: int, S: int, q_pos: Tensor | None = None) -> Tensor:
    """Which keys every row attends to: at position t, the union of [max(start,0), min(end,t+1,S_kv)) over its ranges.

    Args:
        ranges: [B,S,G,n,2], or [B,G,n,2] for decode; any integer dtype; half-open.
        S_kv: keys of a sequence.
        S: rows of a sequence.
        q_pos: [S] or [B,S], positions of the rows, by default S_kv - S + s.

    Returns:
        [B,S,G,S_kv] bool on the CPU.
    """
    ranges = ranges.unsqueeze(1) if ranges.dim() == 4 else ranges
    mask = torch.zeros(*ranges.shape[:3], S_kv, dtype=torch.bool, device="cpu")
    for b, s, g, keys in _rows(ranges, S_kv, S, q_pos):
        mask[b, s, g, keys] = True
    return mask


@_one_thread()
def oracle_forward(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, scale: float | None = None, q_pos: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The forward pass in float64. With a row's keys J (NSA, arXiv 2502.11089, Eq. 10, over selected keys only):

        s_j = scale q.k_j     lse = log sum_{j in J} exp(s_j)     p_j = exp(s_j - lse)     o = sum_{j in J} p_j v_j

    and o = 0, lse = -inf where J is empty. Keys and values outside J are not read. A key in two ranges counts once.

    Args:
        q: [B,S,G,h,Dk], or [B,G,h,Dk] for decode; any float dtype and device, k and v likewise. k and v may have G / r
            groups: groups g*r to g*r + r - 1 of q read KV group g.
        k: [B,G,S_kv,Dk].
        v: [B,G,S_kv,Dv].
        ranges: [B,S,G,n,2], or [B,G,n,2] for decode; any integer dtype; half-open.
        scale: factor of the logits, by default 1/sqrt(Dk).
        q_pos: [S] or [B,S], positions of the rows, by default S_kv - S + s.

    Returns:
        o [B,S,G,h,Dv] and lse [B,S,G,h] (natural logarithm), without S for decode; float64 on the CPU.
    """
    if q.dim() == 4:
        o, lse = oracle_forward(q.unsqueeze(1), k, v, ranges, scale, q_pos)
        return o.squeeze(1), lse.squeeze(1)
    q, k, v = (tensor.detach().cpu() for tensor in (q, k, v))
    B, S, G, h, Dk = q.shape
    S_kv, Dv = v.shape[2:]
    scale = 1.0 / math.sqrt(Dk) if scale is None else scale
    o = torch.zeros(B, S, G, h, Dv, dtype=torch.float64, device="cpu")
    lse = torch.full((B, S, G, h), -math.inf, dtype=torch.float64, device="cpu")
    for b, s, g, keys in _rows(ranges, S_kv, S, q_pos):
        kv = g * k.shape[1] // G
        scores = scale * (q[b, s, g].double() @ k[b, kv, keys].double().T)
        lse[b, s, g] = scores.logsumexp(-1)
        p = torch.exp(scores - lse[b, s, g, :, None])
        o[b, s, g] = p @ v[b, kv, keys].double()
    return o, lse


@_one_thread()
def oracle_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    scale: float | None = None,
    q_pos: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of sum(o * do) + sum(lse * dlse) in float64, derived by hand; J, s, p, o, lse as in
    `oracle_forward`:

        dlse/ds_j = exp(s_j) / sum_i exp(s_i) = p_j
        dp_i/ds_j = p_i (delta_ij - p_j)                          since p_i = exp(s_i - lse)
        o = sum_i p_i v_i, so with g_i = do.v_i:   d(do.o)/ds_j = p_j (g_j - sum_i p_i g_i) = p_j (g_j - do.o)
        ds_j = p_j (g_j - do.o) + dlse p_j = p_j (g_j - D),  D = do.o - dlse
        dv_j += p_j do     dq = scale sum_j ds_j k_j     dk_j += scale ds_j q

    dk_j and dv_j sum over all rows and heads that attend to key j. An empty J contributes nothing.

    Args:
        do: [B,S,G,h,Dv], or [B,G,h,Dv] for decode: the gradient of o.
        dlse: [B,S,G,h], or [B,G,h] for decode: the gradient of lse, None for zeros.
        q, k, v, ranges, scale, q_pos: as of `oracle_forward`.

    Returns:
        dq, dk, dv with the shapes of q, k, v; float64 on the CPU.
    """
    if q.dim() == 4:
        dlse = dlse if dlse is None else dlse.unsqueeze(1)
        dq, dk, dv = oracle_backward(q.unsqueeze(1), k, v, ranges, do.unsqueeze(1), dlse, scale, q_pos)
        return dq.squeeze(1), dk, dv
    q, k, v, do = (tensor.detach().cpu() for tensor in (q, k, v, do))
    dlse = torch.zeros(do.shape[:-1], device="cpu") if dlse is None else dlse.detach().cpu()
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    dq, dk, dv = (torch.zeros(tensor.shape, dtype=torch.float64, device="cpu") for tensor in (q, k, v))
    for b, s, g, keys in _rows(ranges, k.shape[2], q.shape[1], q_pos):
        kv = g * k.shape[1] // q.shape[2]
        q_row, k_row, v_row, do_row = q[b, s, g].double(), k[b, kv, keys].double(), v[b, kv, keys].double(), do[b, s, g].double()
        p = torch.softmax(scale * (q_row @ k_row.T), -1)
        o_row = p @ v_row
        D = (do_row * o_row).sum(-1) - dlse[b, s, g].double()
        ds = p * (do_row @ v_row.T - D[:, None])
        dq[b, s, g] = scale * (ds @ k_row)
        dk[b, kv, keys] += scale * (ds.T @ q_row)  # keys are unique, so += loses nothing
        dv[b, kv, keys] += p.T @ do_row
    return dq, dk, dv


def _rows(ranges: Tensor, S_kv: int, S: int, q_pos: Tensor | None) -> Iterator[tuple[int, int, int, Tensor]]:
    """b, s, g and the ascending keys of every row with at least one key."""
    rows = (ranges.unsqueeze(1) if ranges.dim() == 4 else ranges).tolist()
    for b, of_sequence in enumerate(rows):
        positions = range(S_kv - S, S_kv) if q_pos is None else (q_pos[b] if q_pos.dim() == 2 else q_pos).tolist()
        for s, of_query in enumerate(of_sequence):
            limit = min(positions[s] + 1, S_kv)
            for g, of_group in enumerate(of_query):
                selected = torch.zeros(max(limit, 0), dtype=torch.bool, device="cpu")
                for start, end in of_group:
                    selected[max(start, 0) : max(min(end, limit), 0)] = True
                keys = selected.nonzero().squeeze(-1)
                if len(keys):
                    yield b, s, g, keys
