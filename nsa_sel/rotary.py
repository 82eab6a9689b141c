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
        cos, sin = _table(positions, x.shape[-1] // 2, base, torch.promote_types(x.dtype, torch.float32))
        return _rotated(x, cos, sin, False)
    rotated: Tensor = _Rotate.apply(x, positions, base, False)  # type: ignore[no-untyped-call]
    return rotated


def _angles(x: Tensor, positions: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin [1 or B,S,D/2]."""
    return _cos_and_sin(positions, x.shape[-1] // 2, base, torch.promote_types(x.dtype, torch.float32))


def _cos_and_sin(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = positions.to(dtype).unsqueeze(-1) / base ** (torch.arange(half, device=positions.device, dtype=dtype) / half)
    angle = angle if angle.dim() == 3 else angle.unsqueeze(0)
    return angle.cos(), angle.sin()


# An op, so that a compiler makes one table for all tensors and layers. It would fuse cosines into every rotation: one for each number.
_table = torch.library.custom_op("nsa_sel::rotary_table", _cos_and_sin, mutates_args=())


@_table.register_fake
def _(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, half) if positions.dim() == 2 else (1, *positions.shape, half)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


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
