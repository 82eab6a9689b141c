"""Parts of a tensor whose gradients are written into one tensor; autograd would concatenate them, slowly where they are not contiguous."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_sel.core import transforms

WORD = 8  # bytes of an int64


def split_columns(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """x.split(sizes, -1)."""
    if transforms.traces(x):  # a compiler fuses it
        return torch.split(x, sizes, -1)
    parts: tuple[Tensor, ...] = _Split.apply(x, sizes)  # type: ignore[no-untyped-call]
    return parts


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
        found, first = like.new_empty(ctx.shape), 0
        for size, dx in zip(ctx.sizes, gradients, strict=True):
            part = found.narrow(-1, first, size)
            if dx is None:
                part.zero_()
            elif torch.is_grad_enabled():
                part.copy_(dx)
            else:
                copy_wide(part, dx.resolve_neg())
            first += size
        return found, None


def copy_wide(to: Tensor, x: Tensor) -> None:
    """to.copy_(x), eight bytes at a time where that fits: of strided tensors PyTorch copies number by number."""
    if to.dtype == x.dtype and fits_wide(to) and fits_wide(x):
        to, x = to.view(torch.int64), x.view(torch.int64)
    to.copy_(x)


def fits_wide(x: Tensor) -> bool:
    """Whether x.view(torch.int64) is possible: rows of whole words, each of which begins at one."""
    offsets = x.storage_offset(), x.shape[-1], *x.stride()[:-1]
    return x.stride(-1) == 1 and all(offset * x.element_size() % WORD == 0 for offset in offsets)
