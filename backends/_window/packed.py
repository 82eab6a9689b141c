"""Sliding windows over a packed batch, q [1,T,G,h,Dk], k and v [1,G,T,D]: which keys a row sees, and attention on any
device.

A row sees one run of keys, which ends with its own: those of its window from the first key of its sequence on. Where
the host knows the bounds, each sequence is a call of its own (chunks.py). Otherwise chunks of rows, under a mask each,
never wait for a GPU. Within such a chunk 0 * NaN is NaN: a NaN in a key or value may reach rows of adjacent sequences,
but one in padding reaches nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa_sel.backends._window import chunks
from nsa_sel.backends._window.plain import plain
from nsa_sel.core.arguments import Bounds, positions_in_sequences

_ROWS = 4096  # rows times heads of a chunk, which bound the mask


def first_keys(bounds: Bounds, q: Tensor, window: int) -> Tensor:
    """Return the first key that each row sees, [T] int64, never decreasing; T for padding rows."""
    T, cu = q.shape[1], bounds.on(q)
    begin, _ = positions_in_sequences(cu, cu, T, cu, T)
    return torch.maximum(begin[0], torch.arange(1 - window, T + 1 - window, device=q.device))


def clean(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k and v with zeros in padding, which may hold NaN, and a mask of the padding, bool [T,1,1,1].

    The mask is None if the host knows that nothing is padded.
    """
    padding = bounds.padding(q, q.shape[1])
    if padding is None:
        return q, k, v, None
    keys = padding[:, None]
    padding = padding[:, None, None, None]
    return q.masked_fill(padding, 0.0), k.masked_fill(keys, 0.0), v.masked_fill(keys, 0.0), padding


def attend(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool, bounds: Bounds
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """o [1,T,G,h,Dv], and lse [1,T,G,h] with return_lse; see the package."""
    if bounds.numbers is not None:
        return _each(q, k, v, window, scale, return_lse, bounds.numbers)
    return _masked(q, k, v, window, scale, bounds)


def _each(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool, numbers: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    lengths = [end - begin for begin, end in zip(numbers, (*numbers[1:], q.shape[1]), strict=True)]
    sequences = list(zip(torch.split(q, lengths, 1), torch.split(k, lengths, 2), torch.split(v, lengths, 2), strict=True))
    padding = sequences.pop()
    found = [chunks.attend(*own, window, scale, return_lse) for own in sequences if own[0].shape[1]]
    if padding[0].shape[1]:
        found.append(_nothing(*padding))
    o, lse = zip(*found, strict=True)
    return torch.cat(o, 1), torch.cat(lse, 1) if return_lse else None


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return o = 0, connected to all inputs for autograd, and lse = -inf."""
    o = q[..., :1].expand(*q.shape[:-1], v.shape[-1]) + (k.sum() + v.sum())
    o = o.masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0.0)
    return o, o.new_full(o.shape[:-1], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))


def _masked(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Rows of padding attend to themselves, since every row needs a key, and get zeros afterwards."""
    T, h = q.shape[1], q.shape[3]
    q, k, v, padding = clean(q, k, v, bounds)
    row = torch.arange(T, device=q.device)
    first = torch.minimum(first_keys(bounds, q, window), row)
    size, parts = max(1, min(max(window, 32), _ROWS // h)), []
    for begin in range(0, T, size):
        end, unseen = min(T, begin + size), max(0, begin - window + 1)
        rows = q[:, begin:end].transpose(1, 2).flatten(2, 3)  # [1,G,rows * h,Dk]
        keep = (row[unseen:end] >= first[begin:end, None]) & (row[unseen:end] <= row[begin:end, None])
        o, lse = plain(rows, k[:, :, unseen:end], v[:, :, unseen:end], keep.repeat_interleave(h, 0), scale)
        parts.append(tuple(torch.unflatten(x, 2, (end - begin, h)).transpose(1, 2) for x in (o, lse)))
    o, lse = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    return (o, lse) if padding is None else (o.masked_fill(padding, 0.0), lse.masked_fill(padding[..., 0], -math.inf))
