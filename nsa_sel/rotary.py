"""Rotary positions (RoFormer, arXiv 2104.09864): the halves of a head's dimensions are the two coordinates that rotate."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.core import transforms
from nsa_sel.errors import ArgumentError

BASE = 10000.0
KERNELS = "nsa_sel.backends._triton.elementwise"  # imported at the first rotation on a GPU


class Angles(NamedTuple):
    """cos and sin [1 or B,S,D/2] in float32 (float64 for float64)."""

    cos: Tensor
    sin: Tensor


def rotate(x: Tensor, positions: Tensor, base: float = BASE) -> Tensor:
    """x with rotary positions: pair i of (x[..., :D/2], x[..., D/2:]) rotates by position * base^(-2i/D).

    Args:
        x: [B,S,...,D], D even.
        positions: [S] or [B,S], integers.
        base: of the angles' geometric series; functools.partial(rotate, base=5e5) is a `rotary` for `NSAttention`.

    Returns:
        As x; computed in float32 (float64 for float64), in one pass on a GPU. Autograd saves the angles alone.

    Raises:
        ArgumentError: shapes that do not fit; the kernel would read beyond the angles.
    """
    if x.dim() < 3 or x.shape[-1] % 2:
        raise ArgumentError("x", f"of shape {tuple(x.shape)}", "[B,S,...,D], D even", "add the missing axes, or pad D")
    B, S = x.shape[:2]
    if positions.shape not in ((S,), (1, S), (B, S)):
        raise ArgumentError("positions", f"of shape {tuple(positions.shape)}", f"[S={S}] or [B={B}, S={S}]", "one position per row of x")
    return rotate_by(x, angles(x, positions, base))


def angles(x: Tensor, positions: Tensor, base: float = BASE) -> Angles:
    """The angles of `rotate`, for `rotate_by` of several tensors of x's B, S, D and dtype.

    Args:
        x, positions, base: as of `rotate`.

    Returns:
        cos and sin [1,S,D/2], or [B,S,D/2] for positions [B,S].
    """
    return angles_of(positions, x.shape[-1], x.dtype, base)


def angles_of(positions: Tensor, D: int, dtype: torch.dtype, base: float) -> Angles:
    """`angles` for tensors of so many dimensions and this dtype."""
    make = _table if transforms.traces(positions) else _cos_and_sin  # a compiler makes one for all layers
    return Angles(*make(positions, D // 2, base, torch.promote_types(dtype, torch.float32)))


def rotate_by(x: Tensor, table: Angles) -> Tensor:
    """`rotate` by given angles.

    Args:
        x: [B,S,...,D], D even.
        table: of `angles`, for x's B, S, D and dtype.

    Returns:
        As x.
    """
    return kept_and_rotated(x, table)[1]


def kept_and_rotated(x: Tensor, table: Angles) -> tuple[Tensor, Tensor]:
    """x and `rotate_by`(x): one pass of the backward pass rotates the second's gradient back and adds the first's."""
    if transforms.traces(x):  # a compiler fuses it
        return x, _plain(x, None, *table, False)
    return _Rotate.apply(x, None, *table, False)  # type: ignore[no-any-return, no-untyped-call]


def base_of(rotary: Callable[..., Tensor]) -> float | None:
    """The base where a callable is `rotate`, or functools.partial(rotate, base=...); None of any other."""
    if isinstance(rotary, functools.partial):
        bases = rotary.keywords.keys() <= {"base"} and not rotary.args
        return rotary.keywords.get("base", BASE) if rotary.func is rotate and bases else None
    return BASE if rotary is rotate else None


def _cos_and_sin(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    at = positions.to(dtype).contiguous()  # the angles keep its order in memory, which kernels take to be that of rows
    angle = at.unsqueeze(-1) / base ** (torch.arange(half, device=positions.device, dtype=dtype) / half)
    angle = angle if angle.dim() == 3 else angle.unsqueeze(0)
    return angle.cos(), angle.sin()


# An op, so that a compiler makes one table for all tensors and layers. It would fuse cosines into every rotation: one
# for each number.
_table = torch.library.custom_op("nsa_sel::rotary_table", _cos_and_sin, mutates_args=())


@_table.register_fake
def _(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, half) if positions.dim() == 2 else (1, *positions.shape, half)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


def _plain(x: Tensor, plus: Tensor | None, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    shape = (*cos.shape[:2], *[1] * (x.dim() - 3), cos.shape[2])
    cos, sin = cos.view(shape), (-sin if back else sin).view(shape)
    a, b = x.to(cos.dtype).chunk(2, -1)
    rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return (rotated if plus is None else rotated + plus).to(x.dtype)


def _fused(x: Tensor, plus: Tensor | None, cos: Tensor, sin: Tensor, back: bool, to: Tensor | None = None) -> Tensor:
    """`_plain`, written to `to` [B,S,...,D] of strides that let heads be one dimension, or to a new tensor."""
    to = torch.empty(x.shape, dtype=x.dtype, device=x.device) if to is None else to
    heads, more, out = (None if y is None else _heads(y) for y in (x, plus, to))
    importlib.import_module(KERNELS).rotate(heads, more, cos, sin, back, out)
    return to


def rotated(x: Tensor, table: Angles) -> Tensor:
    """`rotate_by` of plain tensors, without autograd."""
    return (_fused if x.is_cuda else _plain)(x, None, *table, False)


def write_rotated_back(to: Tensor, do: Tensor, plus: Tensor | None, table: Angles) -> None:
    """Write do [B,S,...,D] rotated back, + plus, to a tensor of its shape, whose heads [...] must be one dimension by
    their strides."""
    if do.is_cuda:
        _fused(do, plus, *table, True, to)
    else:
        to.copy_(_plain(do, plus, *table, True))


class _Rotate(torch.autograd.Function):
    """x, and x rotated + plus. The gradient of x is of the same kind: the second's rotated back + the first's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plus: Tensor | None, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.back = back
        return x, (_fused if x.is_cuda else _plain)(x, plus, cos, sin, back)

    @staticmethod
    def backward(ctx: Any, kept: Tensor | None, do: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kept, do = (None if y is None else y.resolve_neg() for y in (kept, do))
        dx = kept if do is None else _Rotate.apply(do, kept, *ctx.saved_tensors, not ctx.back)[1]  # type: ignore[no-untyped-call]
        return dx, do if ctx.needs_input_grad[1] else None, None, None, None


def normed_and_rotated(x: Tensor, weight: Tensor, eps: float, table: Angles) -> Tensor:
    """x [B,S,...,D] / rms(x) * (1 + weight), rounded, then its first columns rotated by given angles. On a GPU."""
    return _NormedAndRotated.apply(x, weight, *table, eps)  # type: ignore[no-any-return, no-untyped-call]


class _NormedAndRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        return importlib.import_module(KERNELS).norm_rotate(_heads(x), weight, cos, sin, eps)[0].view(x.shape)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative("MSAttention")
        x, weight, cos, sin = ctx.saved_tensors
        dx, dw = importlib.import_module(KERNELS).norm_rotate(_heads(x), weight, cos, sin, ctx.eps, _heads(do.resolve_neg()))
        return dx.view(x.shape), dw.to(weight.dtype), None, None, None


def _heads(x: Tensor) -> Tensor:
    """x [B,S,...,D] as [B,S,H,D]."""
    return x.unsqueeze(2) if x.dim() == 3 else x.flatten(2, -2)
