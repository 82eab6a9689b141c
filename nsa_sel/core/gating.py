"""The gated sum of the layer's three branches (Eq. 5): fused on a GPU, in plain PyTorch elsewhere and where operations are traced."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from nsa_sel.core import transforms

KERNELS = "nsa_sel.backends._triton.gate"  # imported at the first sum on a GPU


def gated_sum(compressed: Tensor, selected: Tensor, window: Tensor, gates: Tensor) -> Tensor:
    """o = sum_c gates[..., c] * branch c, differentiable in all four.

    Args:
        compressed, selected, window: [B,S,G,h,Dv], of one floating dtype and device.
        gates: [B,S,G,h,3], of any floating dtype.

    Returns:
        [B,S,G,h,Dv] in the branches' dtype; sums, those of the gates' gradients included, are in float32 (float64 for float64 branches).
    """
    if transforms.traces(compressed, selected, window, gates):  # a compiler fuses it
        return plain_sum((compressed, selected, window), gates)
    o: Tensor = _GatedSum.apply(compressed, selected, window, gates)  # type: ignore[no-untyped-call]
    return o


def write_sum(branches: tuple[Tensor, Tensor, Tensor], gates: Tensor, to: Tensor) -> None:
    """Write the gated sum to `to` [B,S,G,h,Dv], a view of any strides with a contiguous last dimension; without gradients."""
    if on_gpu(gates):
        importlib.import_module(KERNELS).write_sum(branches, gates, to)
    else:
        to.copy_(plain_sum(branches, gates))


def write_branch_gradient(do: Tensor, o: Tensor, gates: Tensor, c: int, to: Tensor, dgates: Tensor) -> None:
    """Gradients of branch c alone, of the branch's output o: gate * do to `to` [B,S,G,h,Dv], and sum(do * o) to dgates[..., c]."""
    if on_gpu(gates):
        importlib.import_module(KERNELS).write_branch_gradient(do.resolve_neg(), o, gates, c, to, dgates)
        return
    wide = torch.promote_types(do.dtype, torch.float32)
    dx, dgate = _plain_branch(do.to(wide), o, gates[..., c].to(wide))
    to.copy_(dx)
    dgates[..., c].copy_(dgate)


def on_gpu(gates: Tensor) -> bool:
    """Whether the kernels run."""
    return gates.is_cuda


def plain_sum(branches: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
    wide = torch.promote_types(branches[0].dtype, torch.float32)
    total = sum(gate.unsqueeze(-1) * x.to(wide) for x, gate in zip(branches, gates.to(wide).unbind(-1), strict=True))
    return total.to(branches[0].dtype)  # type: ignore[union-attr]


def plain_backward(do: Tensor, branches: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(do.dtype, torch.float32)
    found = [_plain_branch(do.to(wide), x, gate) for x, gate in zip(branches, gates.to(wide).unbind(-1), strict=True)]
    (dx, dy, dz), dgates = zip(*found, strict=True)
    return dx, dy, dz, torch.stack(dgates, -1).to(gates.dtype)


def _plain_branch(do: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a branch's output x, in its dtype, and of its gate, from a wide do and gate."""
    return (gate.unsqueeze(-1) * do).to(x.dtype), (do * x.to(do.dtype)).sum(-1)


class _GatedSum(torch.autograd.Function):
    """Saves the branches, which their own backward passes keep anyway, and the gates."""

    @staticmethod
    def forward(ctx: Any, compressed: Tensor, selected: Tensor, window: Tensor, gates: Tensor) -> Tensor:
        ctx.save_for_backward(compressed, selected, window, gates)
        branches = compressed, selected, window
        if not on_gpu(gates):
            return plain_sum(branches, gates)
        return importlib.import_module(KERNELS).forward(branches, gates)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative("nsa_attention")
        transforms.check_gradients(do)
        *branches, gates = ctx.saved_tensors
        if not on_gpu(gates):
            return plain_backward(do, tuple(branches), gates)  # type: ignore[arg-type]
        return importlib.import_module(KERNELS).backward(do.resolve_neg(), tuple(branches), gates)  # type: ignore[no-any-return]
