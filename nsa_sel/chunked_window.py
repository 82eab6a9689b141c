"""A sliding window by PyTorch's SDPA: chunks of `window` queries see their own keys and those of the chunk before."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, *, scale: float | None = None) -> Tensor:
    """Attention of the row at position t = S_kv - S + s to the last `window` keys up to t.

    Args:
        q: [B,S,G,h,Dk].
        k: [B,G,S_kv,Dk].
        v: [B,G,S_kv,Dv].
        window: keys that a row sees at most, its own among them.
        scale: factor of the logits, by default 1/sqrt(Dk).

    Returns:
        o [B,S,G,h,Dv].
    """
    B, S, G, h, _ = q.shape
    if q.numel() == 0:
        return q.new_empty(B, S, G, h, v.shape[3])
    S_kv = k.shape[2]
    window = min(window, S_kv)
    chunks = -(-S // window)
    missing, ahead = chunks * window - S, window - (S_kv - S)  # rows that fill the last chunk; keys before the first chunk
    q = pad(q.flatten(2, 3), (0, 0, 0, 0, 0, missing)).view(B * chunks, window, G * h, q.shape[4]).transpose(1, 2)
    k, v = (pad(x, (0, 0, ahead, missing)).unfold(2, 2 * window, window) for x in (k, v))  # [B,G,chunks,D,2w]; ahead < 0 cuts
    k, v = (x.permute(0, 2, 1, 4, 3).flatten(0, 1).repeat_interleave(h, 1) for x in (k, v))
    row, key = torch.arange(window, device=q.device)[:, None], torch.arange(2 * window, device=q.device)
    near = (key > row) & (key <= row + window)
    first = torch.arange(len(q), device=q.device)[:, None, None] % chunks == 0
    mask = near & ~(first & (key < ahead))
    o = scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1), scale=scale)
    return o.transpose(1, 2).reshape(B, chunks * window, G, h, -1)[:, :S]
