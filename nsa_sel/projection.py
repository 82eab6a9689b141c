"""Queries, keys, values and gates of a layer by one product, where its three projections of x are plain linear layers.

y = x W^T + b with the rows of all weights. Backward, the gradients of all parts are written into one dy, those of what
rotates by the rotation itself, so that one product makes dx and one all weights' gradients: autograd would add three
dx, and copy the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import linear

from nsa_sel.core import transforms
from nsa_sel.core.transforms import hooked
from nsa_sel.errors import ArgumentError
from nsa_sel.rotary import Angles, rotated, write_rotated_back

ALIGNED = 16  # bytes between rows of y, of which kernels read parts: what TMA takes
ROTATING = ("q", "k_slc", "k_win")


class Heads(NamedTuple):
    """A layer's sizes."""

    heads: int  # h, of a group
    head_dim: int
    value_dim: int

    def columns(self) -> list[int]:
        """Return the widths of one KV group: k and v of each branch in turn."""
        return [self.head_dim, self.value_dim] * 3


class Parts(NamedTuple):
    """Inputs of the three branches, or their gradients: queries [B,S,G,h,D], keys and values [B,S,G,D], gates
    [B,S,G,h,3]."""

    q_cmp: Any  # q without rotary positions
    q: Any
    k_cmp: Any
    v_cmp: Any
    k_slc: Any
    v_slc: Any
    k_win: Any
    v_win: Any
    gates: Any

    def keys(self) -> tuple[Tensor, ...]:
        """Keys and values of the branches in turn."""
        return self[2:8]


def joins(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """Return True if the layers can be fused into one GEMM over x: they are not hooked, replaced or traced."""
    if not all(map(_is_plain, layers)) or forward_ad._current_level >= 0:
        return False
    weights: list[Any] = [layer.weight for layer in layers]
    dtype = weights[0].dtype
    if transforms.traces(x, *weights) or any(weight.dtype != dtype or weight.device != x.device for weight in weights):
        return False
    return _takes(x, dtype) and sum(len(weight) for weight in weights) * x.element_size() % ALIGNED == 0


def check_dtype(x: Tensor, layer: nn.Module) -> None:
    """ArgumentError for x in another dtype than the weights of a linear layer, unless autocast casts both."""
    if type(layer) is nn.Linear and not hooked(layer) and not _takes(x, layer.weight.dtype):
        raise ArgumentError(
            "x",
            x.dtype,
            f"{layer.weight.dtype}, the dtype of the layer's parameters",
            "call x.to(layer.q.weight.dtype) or layer.to(x.dtype), or run the model under torch.autocast",
        )


def _takes(x: Tensor, dtype: torch.dtype) -> bool:
    """Return True if linear layers of this dtype take x, in autocast's dtype under autocast, which casts all but
    float64."""
    return x.dtype == dtype or (torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, dtype))


def _is_plain(layer: Any) -> bool:
    """A linear layer whose parameters are no subclass: DTensors, quantized ones."""
    own = type(layer) is nn.Linear and not hooked(layer)
    return own and type(layer.weight) is nn.Parameter and type(layer.bias) in (nn.Parameter, type(None))


def project(x: Tensor, table: Angles, layers: Sequence[nn.Module], heads: Heads) -> Parts:
    """The parts of x [B,S,width], which `joins`.

    Args:
        x: in the dtype of the result.
        table: of the rotary positions.
        layers: the projections of q, of keys and values, and of the gates.
        heads: the layer's sizes.
    """
    parameters = [layer.weight for layer in layers] + [layer.bias for layer in layers]
    return Parts(*_Project.apply(x, *table, heads, *parameters))  # type: ignore[no-untyped-call]


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: Heads, *parameters: Tensor | None) -> Parts:
        weights, biases = parameters[:3], parameters[3:]
        with torch.autocast(x.device.type, enabled=False):
            bias = None if all(b is None for b in biases) else _stacked(biases, _rows(weights), x)
            y = linear(x, _stacked(weights, _rows(weights), x), bias)
        parts = _views(y, _rows(weights), heads)
        rotated_parts = {name: rotated(getattr(parts, name), Angles(cos, sin)) for name in ROTATING}
        parts = parts._replace(gates=parts.gates.sigmoid(), **rotated_parts)
        ctx.save_for_backward(x, cos, sin, parts.gates, *weights)
        ctx.heads, ctx.biases = heads, [None if b is None else b.dtype for b in biases]
        ctx.set_materialize_grads(False)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative("NSAttention")
        x, cos, sin, gates, *weights = ctx.saved_tensors
        rows, wanted = _rows(weights), ctx.needs_input_grad
        dy = x.new_empty(*x.shape[:-1], sum(rows))
        _write_gradients(_views(dy, rows, ctx.heads), Parts(*gradients), gates, Angles(cos, sin))
        of_rows = dy.flatten(0, -2)
        with torch.autocast(x.device.type, enabled=False):  # of who calls backward
            dx = (of_rows @ _stacked(weights, rows, x)).view_as(x) if wanted[0] else None
            dweight = of_rows.t() @ x.flatten(0, -2) if any(wanted[4:7]) else x.new_empty(sum(rows), 0)
        dweights = [
            part.to(w.dtype) if wants else None for part, w, wants in zip(torch.split(dweight, rows), weights, wanted[4:7], strict=True)
        ]
        dbiases = [
            part.sum(0, dtype=dtype) if wants else None
            for part, dtype, wants in zip(torch.split(of_rows, rows, 1), ctx.biases, wanted[7:], strict=True)
        ]
        return dx, None, None, None, *dweights, *dbiases


def _rows(weights: Sequence[Any]) -> list[int]:
    return [len(weight) for weight in weights]


def _stacked(parameters: Sequence[Tensor | None], rows: list[int], x: Tensor) -> Tensor:
    """Parameters of so many rows in one tensor of x's dtype; zeros for None."""
    shape = next(p.shape[1:] for p in parameters if p is not None)
    to = x.new_empty(sum(rows), *shape)
    for part, parameter in zip(torch.split(to, rows), parameters, strict=True):
        part.zero_() if parameter is None else part.copy_(parameter)
    return to


def _views(y: Tensor, rows: list[int], heads: Heads) -> Parts:
    """Parts of y [B,S,rows], or of its gradient; q twice."""
    split: Any = torch.split(y, rows, -1)
    q, kv, gates = split
    q, columns = q.unflatten(-1, (-1, heads.heads, heads.head_dim)), heads.columns()
    k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = torch.split(kv.unflatten(-1, (-1, sum(columns))), columns, -1)
    return Parts(q, q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates.unflatten(-1, (-1, heads.heads, 3)))


def _write_gradients(to: Parts, gradients: Parts, gates: Tensor, table: Angles) -> None:
    """Write gradients of the parts to views of dy; those of q and q_cmp are one."""
    given = Parts(*(None if dx is None else dx.resolve_neg() for dx in gradients))
    for name, part, dx in zip(Parts._fields, to, given, strict=True):
        if name == "q_cmp":
            continue
        kept = given.q_cmp if name == "q" else None
        if dx is None:
            part.zero_() if kept is None else copy_wide(part, kept)
        elif name in ROTATING:
            write_rotated_back(part, dx, kept, table)
        elif name == "gates":
            torch.ops.aten.sigmoid_backward.grad_input(dx, gates, grad_input=part)
        else:
            copy_wide(part, dx)


WORD = 8  # bytes of an int64


def split_columns(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """x.split(sizes, -1)."""
    if transforms.traces(x):  # a compiler fuses it
        return torch.split(x, sizes, -1)
    return _Split.apply(x, sizes)  # type: ignore[no-any-return, no-untyped-call]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.sizes = x.shape, sizes
        return torch.split(x, sizes, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:  # type: ignore[override]
        like = next((dx for dx in gradients if dx is not None), None)
        if like is None:
            return None, None
        dx_all, first = like.new_empty(ctx.shape), 0
        for size, dx in zip(ctx.sizes, gradients, strict=True):
            part = dx_all.narrow(-1, first, size)
            if dx is None:
                part.zero_()
            elif torch.is_grad_enabled():
                part.copy_(dx)
            else:
                copy_wide(part, dx.resolve_neg())
            first += size
        return dx_all, None


def copy_wide(to: Tensor, x: Tensor) -> None:
    """to.copy_(x), eight bytes at a time where that fits: of strided tensors PyTorch copies number by number."""
    if to.dtype == x.dtype and fits_wide(to) and fits_wide(x):
        to, x = to.view(torch.int64), x.view(torch.int64)
    to.copy_(x)


def fits_wide(x: Tensor) -> bool:
    """Return True if x.view(torch.int64) is valid: rows are whole words and aligned to words."""
    offsets = x.storage_offset(), x.shape[-1], *x.stride()[:-1]
    return x.stride(-1) == 1 and all(offset * x.element_size() % WORD == 0 for offset in offsets)
