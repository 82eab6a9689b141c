"""Sliding-window attention on any device: each chunk of rows attends to its own slice of keys; all chunks share one
mask.

Heads are rows here: row s * h + i of a chunk is head i of query s, so that K and V are never repeated. The first rows,
whose windows begin before the first key, run chunk by chunk; all later chunks are one call on overlapping views of K
and V.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from nsa_sel.backends._window.plain import plain
from nsa_sel.core.transforms import needs_grad

_ROWS = 4096  # rows times heads of a chunk, which bound the mask


def attend_seen(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return o [B,S,G,h,Dv], and lse [B,S,G,h] with return_lse, for checked, non-empty tensors. Skips keys that no row
    sees."""
    unseen = max(0, k.shape[2] - q.shape[1] - window + 1)
    return attend(q, k[:, :, unseen:], v[:, :, unseen:], window, scale, return_lse)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Do `attend_seen` for S_kv <= S + window - 1, where every key is seen by some row."""
    S, h, start = q.shape[1], q.shape[3], k.shape[2] - q.shape[1]
    window = min(window, k.shape[2])
    size = min(max(window, 32), max(32, _ROWS // h))
    partial = min(S, max(0, window - 1 - start))  # rows with fewer than `window` keys
    first = partial + (S - partial) % size
    sizes = [size] * (first // size) + [first % size] * bool(first % size)
    *heads, rest = torch.split(q, [*sizes, S - first], 1)
    done, parts = start, []
    for rows in heads:
        begin, end = max(0, done - window + 1), done + rows.shape[1]
        parts.append(_chunk(rows, k[:, :, begin:end], v[:, :, begin:end], window, scale, return_lse))
        done = end
    if first < S:
        begin = done - window + 1
        parts.append(_chunks(rest, k[:, :, begin:], v[:, :, begin:], window, size, scale, return_lse))
    if len(parts) == 1:
        return parts[0]
    o, lse = zip(*parts, strict=True)
    return torch.cat(o, 1), torch.cat(lse, 1) if return_lse else None


def _chunk(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attend with rows q [B,rows,G,h,Dk] at the last positions of k and v."""
    rows, h = q.shape[1], q.shape[3]
    keep = _keep(rows, k.shape[2], window, h, q.device)
    o, lse = _attend(q.transpose(1, 2).flatten(2, 3), k, v, keep, scale, return_lse)
    o = torch.unflatten(o, 2, (rows, h)).transpose(1, 2)
    return o, None if lse is None else torch.unflatten(lse, 2, (rows, h)).transpose(1, 2)


def _chunks(q: Tensor, k: Tensor, v: Tensor, window: int, size: int, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attend with chunks of `size` rows and window - 1 keys before them in one call; (b, g) is its batch, chunks are
    its heads."""
    B, S, G, h, _ = q.shape
    chunks, keys = S // size, size + window - 1
    q = torch.unflatten(q, 1, (chunks, size)).permute(0, 3, 1, 2, 4, 5).flatten(3, 4).flatten(0, 1)  # [B*G,chunks,size*h,Dk]
    k, v = (x.flatten(0, 1).unfold(1, keys, size).transpose(-1, -2) for x in (k, v))  # [B*G,chunks,keys,D], overlapping
    o, lse = _attend(q, k, v, _keep(size, keys, window, h, q.device), scale, return_lse)
    o = o.reshape(B, G, chunks, size, h, -1).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)
    if lse is not None:
        lse = lse.view(B, G, chunks, size, h).permute(0, 2, 3, 1, 4).flatten(1, 2)
    return o, lse


def _keep(rows: int, keys: int, window: int, h: int, device: torch.device) -> Tensor | None:
    """Return which keys the last rows see, [rows * h, keys] bool, or None for one row, which sees them all."""
    if rows == 1:
        return None
    position = torch.arange(keys - rows, keys, device=device).repeat_interleave(h).unsqueeze(1)
    key = torch.arange(keys, device=device)
    return (key <= position) & (key > position - window)


def _attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attend with PyTorch's fused kernels, or in plain PyTorch for lse and, on a GPU, for masks, gradients and float64.

    PyTorch's fused kernels sum gradients in no fixed order on a GPU.
    """
    fused = q.is_cpu or (keep is None and not needs_grad(q, k, v) and q.dtype != torch.float64)
    if return_lse or not fused:
        return plain(q, k, v, keep, scale)
    Dk, Dv = q.shape[-1], v.shape[-1]
    if Dk != Dv:  # no fused kernel of a CPU takes that
        q, k, v = (pad(x, (0, max(Dk, Dv) - x.shape[-1])) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=scale)[..., :Dv], None
