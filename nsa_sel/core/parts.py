"""Parts of a tensor whose gradients are written into one tensor; autograd would concatenate them, slowly where they are not contiguous."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_sel.core import transforms


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
            part.zero_() if dx is None else part.copy_(dx)
            first += size
        return found, None
