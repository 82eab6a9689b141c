"""The gated sum and its backward pass in plain PyTorch, with the functions of the GPUs' `_triton/elementwise.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def summed(branches: Sequence[Tensor], gates: Tensor) -> Tensor:
    """Return sum_c gates[..., c] * branch c."""
    wide = torch.promote_types(branches[0].dtype, torch.float32)
    total = sum(gate.unsqueeze(-1) * x.to(wide) for x, gate in zip(branches, gates.to(wide).unbind(-1), strict=True))
    return total.to(branches[0].dtype)  # type: ignore[union-attr]


def write_sum(branches: Sequence[Tensor], gates: Tensor, to: Tensor, is_token: Tensor | None = None) -> None:
    total = summed(branches, gates)
    to.copy_(total if is_token is None else torch.where(is_token[:, :, None, None, None], total, 0.0))


def raise_lse(lse: Sequence[Tensor | None], gates: Tensor) -> list[Tensor | None]:
    """Return lse - ln gate of every branch whose lse is not None; -inf (a row without keys) stays -inf."""
    return [None if x is None else torch.where(x == -math.inf, x, x - gates[..., c].to(x.dtype).log()) for c, x in enumerate(lse)]


def write_deltas(deltas: Sequence[Tensor | None], dgates: Tensor) -> None:
    for c, delta in enumerate(deltas):
        if delta is not None:
            dgates[..., c].copy_(delta)


def backward(do: Tensor, branches: Sequence[Tensor | None], gates: Tensor, dgates: Tensor, scales: bool) -> list[Tensor | None]:
    wide, results = torch.promote_types(do.dtype, torch.float32), list[Tensor | None]()
    for c, o in enumerate(branches):
        if o is not None:
            dgates[..., c].copy_((do.to(wide) * o.to(wide)).sum(-1))
        results.append(scaled(do, gates[..., c]) if scales and o is not None else None)
    return results


def scaled(do: Tensor, gate: Tensor) -> Tensor:
    """Return gate * do, computed in float32 or wider."""
    wide = torch.promote_types(do.dtype, torch.float32)
    return (gate.to(wide).unsqueeze(-1) * do.to(wide)).to(do.dtype)
