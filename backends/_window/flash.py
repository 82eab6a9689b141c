"""Sliding-window attention by the FlashAttention-2 that PyTorch brings: GPUs, 16-bit dtypes, Dk = Dv. lse has no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether such tensors fit its kernels."""
    D = q.shape[-1]
    return q.is_cuda and q.element_size() == 2 and v.shape[-1] == D and D % 8 == 0 and D <= 256


def attend(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """o [B,S,G,h,Dv], and lse [B,S,G,h] with return_lse; see the package."""
    h = q.shape[3]
    o, lse = _Flash.apply(q.flatten(2, 3), k.transpose(1, 2), v.transpose(1, 2), window, scale)  # type: ignore[no-untyped-call]
    return o.unflatten(2, (-1, h)), lse.transpose(1, 2).unflatten(2, (-1, h)) if return_lse else None


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
        lengths = (q.shape[1], k.shape[1])
        window = min(window, k.shape[1] + 1)  # its kernels take 32-bit numbers
        o, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, *lengths, 0.0, False, False, scale=scale, window_size_left=window - 1, window_size_right=0
        )
        ctx.save_for_backward(q, k, v, o, lse, seed, unused)
        ctx.window, ctx.scale = window, scale
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, seed, unused = ctx.saved_tensors
        found = _deterministic(
            torch.ops.aten._flash_attention_backward, do, q, k, v, o, lse, None, None, q.shape[1], k.shape[1], 0.0, False, seed, unused,
            scale=ctx.scale, window_size_left=ctx.window - 1, window_size_right=0,
        )  # fmt: skip
        return *found, None, None


def _deterministic(work: Any, *args: Any, **options: Any) -> Any:
    """dq is otherwise summed by atomics, in any order."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return work(*args, **options)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
