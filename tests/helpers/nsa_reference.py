"""NSA's attention written from the paper's equations (arXiv 2502.11089), row by row in plain PyTorch: slow, and differentiable.

It shares no code with nsa_sel. One key of the compressed branch stands for the keys [i d, i d + l), with l = compress_block and
d = compress_stride; l' = block_size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attention_of(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """o [h,Dv] and p [h,keys] of one row's heads q [h,Dk] over k [keys,Dk] and v [keys,Dv]; zeros over no keys."""
    if not len(k):
        return q.new_zeros(len(q), v.shape[1]), q.new_zeros(len(q), 0)
    p = torch.softmax(scale * q @ k.T, -1)
    return p @ v, p


def best_blocks(p: Tensor, t: int, l: int, d: int, block_size: int, n: int, first: int, local: int) -> list[int]:
    """The blocks of a row at position t, ascending, from p [keys] of its group's heads together (Eq. 9 and 10)."""
    current = t // block_size
    importance = [0.0] * (current + 1)
    for i, weight in enumerate(p.tolist()):
        for piece in range(i, i + l // d):  # of d keys each, of which compressed key i covers l / d
            importance[piece * d // block_size] += weight
    forced = [j for j in range(current + 1) if j < first or j > current - local]
    others = sorted((j for j in range(current + 1) if j not in forced), key=lambda j: (-importance[j], j))
    return sorted(forced + others[: n - len(forced)])


def nsa(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_slc: Tensor, v_slc: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor, *, window: int,
    compress_block: int, compress_stride: int, block_size: int, n: int, first: int, local: int, scale: float | None = None,
    q_cmp: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """o [B,S,G,h,Dv] (Eq. 5), arguments as of `nsa_sel.nsa_attention`."""
    B, S, G, _, Dk = q.shape
    S_kv = k_slc.shape[2]
    scale = Dk**-0.5 if scale is None else scale
    q_cmp = q if q_cmp is None else q_cmp
    rows = []
    for b in range(B):
        for s in range(S):
            t = S_kv - S + s
            seen = len([i for i in range(k_cmp.shape[2]) if i * compress_stride + compress_block - 1 <= t])
            for g in range(G):
                compressed, p = attention_of(q_cmp[b, s, g], k_cmp[b, g, :seen], v_cmp[b, g, :seen], scale)
                rule = compress_block, compress_stride, block_size, n, first, local
                keys = [c for j in best_blocks(p.detach().sum(0), t, *rule) for c in range(j * block_size, (j + 1) * block_size) if c <= t]
                selected, _ = attention_of(q[b, s, g], k_slc[b, g, keys], v_slc[b, g, keys], scale)
                near = slice(max(0, t - window + 1), t + 1)
                last, _ = attention_of(q[b, s, g], k_win[b, g, near], v_win[b, g, near], scale)
                g_cmp, g_slc, g_win = gates[b, s, g].split(1, -1)  # [h,1] each
                rows.append(g_cmp * compressed + g_slc * selected + g_win * last)
    return torch.stack(rows).view(B, S, G, *rows[0].shape)
