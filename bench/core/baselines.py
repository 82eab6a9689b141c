"""What a user has today, in the library's layout: dense SDPA under a per-token mask, and dense causal SDPA. Differentiable, any device."""

from __future__ import annotations

import contextlib
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nsa_sel.selection import Selection

DenseKernel = Literal["cudnn", "flash", "any"]
_KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class TokenMask(NamedTuple):
    """A selection as dense SDPA wants it. A row that selects nothing sees every key: a softmax over nothing is NaN."""

    mask: Tensor  # [B,G,S,S_kv], bool or additive (0 or -inf)
    filled: Tensor  # [B,S,G] bool: whether the row selects anything


def token_mask(selection: Selection, S_kv: int, q_pos: Tensor | None = None, dtype: torch.dtype = torch.bool) -> TokenMask:
    """The mask of `masked_sdpa` over S_kv keys for rows at q_pos [S] or [B,S] (default S_kv - S + s).

    dtype: torch.bool, or a float dtype for an additive mask, which spares SDPA the conversion in every call. Built once
    and used often: benches keep this outside their timings.
    """
    B, S, G = selection.ranges.shape[:3]
    device = selection.ranges.device
    key = torch.arange(S_kv, device=device)
    position = torch.arange(S_kv - S, S_kv, device=device) if q_pos is None else q_pos
    mask = selected(selection, key) & (key <= position.expand(B, S)[:, :, None, None])
    filled = mask.any(-1)
    mask = (mask | ~filled.unsqueeze(-1)).transpose(1, 2).contiguous()
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, float("-inf"))
    return TokenMask(mask, filled)


def selected(selection: Selection, keys: Tensor) -> Tensor:
    """Whether each row selects each of the keys [K], whatever its position: [B,S,G,K] bool."""
    found = torch.zeros(*selection.ranges.shape[:3], len(keys), dtype=torch.bool, device=keys.device)
    # Range after range: all at once would take n times the memory.
    for start, end in zip(*(x.unsqueeze(-1).unbind(-2) for x in selection.ranges.unbind(-1)), strict=True):
        found |= (keys >= start) & (keys < end)
    return found


def masked_sdpa(q: Tensor, k: Tensor, v: Tensor, selection: Selection | TokenMask, scale: float | None = None) -> Tensor:
    """o [B,S,G,h,Dv] of q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv] by dense SDPA that looks at all keys under a mask.

    A `Selection` has its mask built in this call, rows at their default positions; pass `token_mask(...)` to build it once.
    The h heads of a group share mask, keys and values without copies of them. Rows that select nothing give zeros.
    """
    if isinstance(selection, Selection):
        selection = token_mask(selection, k.shape[2])
    B, S, G, h, _ = q.shape
    # Groups as batches, so that one mask serves all heads: SDPA broadcasts it.
    heads = q.permute(0, 2, 3, 1, 4).flatten(0, 1)
    k, v = (x.flatten(0, 1).unsqueeze(1).expand(-1, h, -1, -1) for x in (k, v))
    o = scaled_dot_product_attention(heads, k, v, attn_mask=selection.mask.flatten(0, 1).unsqueeze(1), scale=scale)
    o = o.view(B, G, h, S, -1).permute(0, 3, 1, 2, 4)
    return torch.where(selection.filled[..., None, None], o, 0)


def dense_causal_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, kernel: DenseKernel = "cudnn") -> Tensor:
    """o [B,S,G,h,Dv] of q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv] by full causal attention: nothing is selected.

    Row s attends to the keys up to S_kv - S + s. Several groups of q may share those of k and v.
    kernel: which of torch's GPU kernels must run, cuDNN's, or Flash as the
    alternative where cuDNN is missing ("any" lets torch choose); torch raises when that one can't. A CPU has one kernel.
    With 1 < S < S_kv the mask is explicit, since is_causal=True would count rows from the first key, and torch chooses.
    """
    B, S, G, h, _ = q.shape
    S_kv = k.shape[2]
    mask = None
    if 1 < S < S_kv:
        mask = torch.ones(S, S_kv, dtype=torch.bool, device=q.device).tril(S_kv - S)
    forced = q.device.type == "cuda" and mask is None and kernel != "any"
    with sdpa_kernel(_KERNELS[kernel]) if forced else contextlib.nullcontext():
        heads = q.permute(0, 2, 3, 1, 4).flatten(1, 2)
        # With one query, is_causal=True would show it the first key alone.
        o = scaled_dot_product_attention(
            heads, k, v, attn_mask=mask, is_causal=S == S_kv and S > 1, scale=scale, enable_gqa=G * h > k.shape[1]
        )
    return o.view(B, G, h, S, v.shape[3]).permute(0, 3, 1, 2, 4)
