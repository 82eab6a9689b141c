"""Heads as other libraries lay them out, [.., HQ, D], split into the G groups of h heads of nsa-sel."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_sel.errors import ArgumentError


def by_group(q: Tensor, k: Tensor, dims: int, q_layout: str, k_layout: str) -> Tensor:
    """A view of q with its heads as [H, HQ / H]; checks the shapes of q and k."""
    for name, x, layout in (("q", q, q_layout), ("k", k, k_layout)):
        if not isinstance(x, torch.Tensor) or x.dim() != dims:
            value = f"of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise ArgumentError(name, value, f"a tensor {layout}", "pass it as to the original")
    HQ, H = q.shape[-2], k.shape[-2]
    if not H or HQ % H:
        raise ArgumentError("q", f"of {HQ} heads", f"a multiple of k's {H} heads", "give every head of k the same number of heads of q")
    return q.view(*q.shape[:-2], H, HQ // H, q.shape[-1])


def by_group_gate(name: str, gate: Tensor, rows: Tensor) -> Tensor:
    """A view of a gate [..,HQ] of the rows [..,H,h,D], with its heads as [H, h]."""
    *leading, H, h, _ = rows.shape
    if not isinstance(gate, torch.Tensor) or gate.shape != (*leading, H * h):
        value = f"of shape {tuple(gate.shape)}" if isinstance(gate, torch.Tensor) else f"a {type(gate).__name__}"
        raise ArgumentError(name, value, f"a tensor {(*leading, H * h)}", "pass one gate per query and head")
    return gate.reshape(*leading, H, h)
