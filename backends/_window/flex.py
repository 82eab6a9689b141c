"""Sliding-window attention by PyTorch's FlexAttention, compiled: for tensors of a GPU.

The block mask is made from arithmetic, in time and memory of (S / 128)^2, where `create_block_mask` would fill S x S_kv.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_sel.core.call import capturing

_BLOCK = 128  # rows and keys of a block of the mask
_MOST_DIM = 256
_MOST_MASKS = 64
_ready: dict[tuple[Any, ...], Any] = {}  # what a call compiles for -> its block mask, of calls that have returned


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether such tensors go through FlexAttention; few rows are one small call of the chunks."""
    fits = all(16 <= D <= _MOST_DIM for D in (q.shape[-1], v.shape[-1]))
    return q.is_cuda and q.dtype != torch.float64 and q.shape[1] >= _BLOCK and fits


def can_run(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool) -> bool:
    """Whether a call needs no compilation that it must not make: inside of a CUDA graph's capture, or where compilers are off."""
    from torch._dynamo import config  # takes seconds, and brings Triton along

    if config.disable:
        return False
    return not capturing(q) or _key(q, k, v, window, scale, return_lse) in _ready


def attend(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """o [B,S,G,h,Dv], and lse [B,S,G,h] with return_lse; see the package. Compiles at the first call of its kind."""
    from torch._functorch import config as functorch_config

    key = _key(q, k, v, window, scale, return_lse)
    mask = _ready.get(key)
    if mask is None:
        with torch.inference_mode(False):  # autograd keeps the mask
            mask = block_mask(q.shape[1], k.shape[2], window, q.device)
    # Inductor would otherwise reuse the memory of saved tensors in backward, which then could not run twice (retain_graph=True).
    with functorch_config.patch(donated_buffer=False) if key not in _ready else contextlib.nullcontext():
        found = _compiled(*signature(q, k, v, window, scale, return_lse))(q, k, v, mask, scale, return_lse)
    if key not in _ready:
        if len(_ready) >= _MOST_MASKS:
            del _ready[next(iter(_ready))]
        _ready[key] = mask
    return found  # type: ignore[no-any-return]


def traced(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """The same in a function that torch.compile traces: part of its graph, the block mask too."""
    return _flex(q, k, v, block_mask(q.shape[1], k.shape[2], window, q.device), scale, return_lse)


def signature(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool) -> tuple[Any, ...]:
    """What a compiled function is for. The sizes B, S and S_kv are its own matter: PyTorch makes them dynamic when they change."""
    grads = (q.requires_grad, k.requires_grad, v.requires_grad) if torch.is_grad_enabled() else None
    return (q.device, q.dtype, *q.shape[2:], v.shape[-1], window, scale, return_lse, grads, torch.is_inference_mode_enabled())


def _key(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool) -> tuple[Any, ...]:
    own = signature(q, k, v, window, scale, return_lse)
    return (*own, *q.shape[:2], k.shape[2], q.stride(), k.stride(), v.stride())


@functools.cache
def _compiled(*signature: Any) -> Callable[..., Any]:
    """A compiled `_flex` of its own for each signature.

    PyTorch counts recompilations per code object, and gives up after eight; which sizes have changed it remembers by the code's name.
    """
    name = f"{_flex.__name__}_{hash(signature) & 0xFFFFFFFF:x}"
    return torch.compile(types.FunctionType(_flex.__code__.replace(co_name=name), globals(), name), fullgraph=True)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention import flex_attention as flex

    h, lse = q.shape[3], None
    q = q.flatten(2, 3).transpose(1, 2)
    if return_lse:
        wanted = {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}  # before torch 2.9
        o, aux = flex.flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=h > 1, **wanted)
        lse = (aux if isinstance(aux, Tensor) else aux.lse).transpose(1, 2).unflatten(2, (-1, h))
    else:
        o = flex.flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=h > 1)
    return o.transpose(1, 2).unflatten(2, (-1, h)), lse


def block_mask(S: int, S_kv: int, window: int, device: torch.device) -> Any:
    """The BlockMask of rows at the last S positions: blocks that some row sees, and full ones that all rows see."""
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
