"""Rotary positions (RoFormer, arXiv 2104.09864): the halves of a head's dimensions are the two coordinates that rotate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_sel.core import transforms


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """x with rotary positions: pair i of (x[..., :D/2], x[..., D/2:]) rotates by position * base^(-2i/D).

    Args:
        x: [B,S,...,D], D even.
        positions: [S] or [B,S], integers.
        base: of the angles' geometric series; functools.partial(rotate, base=5e5) is a `rotary` for `NSAttention`.

    Returns:
        As x, contiguous; computed in float32 (float64 for float64).
    """
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    angle = positions.to(wide).unsqueeze(-1) / base ** (torch.arange(half, device=x.device, dtype=wide) / half)
    angle = angle.view(*([1] * (2 - positions.dim())), *positions.shape, *[1] * (x.dim() - 3), half)
    cos, sin = angle.cos(), angle.sin()
    if transforms.traces(x, positions):
        return _rotated(x, cos, sin)
    rotated: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """Saves the angles alone: a gradient rotates back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotated(do, cos, -sin), None, None
