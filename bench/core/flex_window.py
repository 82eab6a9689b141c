"""A sliding window by PyTorch's FlexAttention, compiled: what `sliding_window_attention` is measured against."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_BLOCK = 128  # rows and keys of a block of the mask


def flex_window(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """o [B,S,G,h,Dv] of q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv] under a `window_mask`. Compiles at the first call of its kind."""
    h = q.shape[3]
    o = _compiled()(q.flatten(2, 3).transpose(1, 2), k, v, block_mask=mask, enable_gqa=h > 1)
    return torch.unflatten(o.transpose(1, 2), 2, (-1, h))


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)  # type: ignore[return-value]


def window_mask(S: int, S_kv: int, window: int, device: torch.device | str) -> Any:
    """The BlockMask of rows at the last S positions that see the last `window` keys: blocks that some row sees, and full ones that all see.

    It is made from arithmetic, in time and memory of (S / 128)^2, where `create_block_mask` would fill S x S_kv.
    """
    from torch.nn.attention.flex_attention import BlockMask

    start = S_kv - S

    def near(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row + start) & (key > row + start - window)

    row = torch.arange(0, S, _BLOCK, device=device).unsqueeze(1)
    low, high = row + start, (row + _BLOCK).clamp(max=S) - 1 + start  # first and last position of the rows
    key = torch.arange(0, S_kv, _BLOCK, device=device)
    last = key + _BLOCK - 1
    full = (last <= low) & (key > high - window)
    partial = (key <= high) & (last > low - window) & ~full
    return BlockMask.from_kv_blocks(*_listed(partial), *_listed(full), BLOCK_SIZE=_BLOCK, mask_mod=near, seq_lengths=(S, S_kv))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each block of rows has, and which, first: [1,1,rows] and [1,1,rows,keys] int32."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
