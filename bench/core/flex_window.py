"""A sliding window by PyTorch's FlexAttention, compiled: what `sliding_window_attention` is measured against."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def flex_window(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """o [B,S,G,h,Dv] of q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv] under a `window_mask`. Compiles at the first call of its kind."""
    h = q.shape[3]
    o = _compiled()(q.flatten(2, 3).transpose(1, 2), k, v, block_mask=mask, enable_gqa=h > 1)
    return torch.unflatten(o.transpose(1, 2), 2, (-1, h))


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)  # type: ignore[return-value]


def window_mask(S: int, S_kv: int, window: int, device: str) -> Any:
    """The BlockMask of rows at the last S positions that see the last `window` keys. Compiled on a GPU: S x S_kv is never in memory."""
    from torch.nn.attention.flex_attention import create_block_mask

    start = S_kv - S

    def near(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row + start) & (key > row + start - window)

    return create_block_mask(near, None, None, S, S_kv, device=device, _compile=device == "cuda")
