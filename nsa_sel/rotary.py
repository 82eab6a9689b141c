"""Rotary positions (RoFormer, arXiv 2104.09864): the halves of a head's dimensions are the two coordinates that rotate."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from nsa_sel.core import transforms

KERNELS = "nsa_sel.backends._triton.rotate"  # imported at the first rotation on a GPU


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """x with rotary positions: pair i of (x[..., :D/2], x[..., D/2:]) rotates by position * base^(-2i/D).

    Args:
        x: [B,S,...,D], D even.
        positions: [S] or [B,S], integers.
        base: of the angles' geometric series; functools.partial(rotate, base=5e5) is a `rotary` for `NSAttention`.

    Returns:
        As x; computed in float32 (float64 for float64), in one pass on a GPU. Autograd saves the positions alone.
    """
    if transforms.traces(x, positions):  # a compiler fuses it
        return _rotated(x, *_angles(x, positions, base), False)
    rotated: Tensor = _Rotate.apply(x, positions, base, False)  # type: ignore[no-untyped-call]
    return rotated


def _angles(x: Tensor, positions: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin [1 or B,S,D/2]."""
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    angle = positions.to(wide).unsqueeze(-1) / base ** (torch.arange(half, device=x.device, dtype=wide) / half)
    angle = angle if angle.dim() == 3 else angle.unsqueeze(0)
    return angle.cos(), angle.sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    shape = (*cos.shape[:2], *[1] * (x.dim() - 3), cos.shape[2])
    cos, sin = cos.view(shape), (-sin if back else sin).view(shape)
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def _fused(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    heads = x.unsqueeze(2) if x.dim() == 3 else x.flatten(2, -2)
    rotated: Tensor = importlib.import_module(KERNELS).rotate(heads, cos, sin, back)
    return rotated.view(x.shape)


class _Rotate(torch.autograd.Function):
    """A gradient rotates back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, base: float, back: bool) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.base, ctx.back = base, back
        return (_fused if x.is_cuda else _rotated)(x, *_angles(x, positions, base), back)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (positions,) = ctx.saved_tensors
        return _Rotate.apply(do.resolve_neg(), positions, ctx.base, not ctx.back), None, None, None  # type: ignore[no-untyped-call]
