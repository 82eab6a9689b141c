"""The gated sum of the layer's three branches (Eq. 5): fused on a GPU, in plain PyTorch elsewhere and where operations
are traced.

Backward, with do the gradient of o = sum_c g_c o_c, and p = exp(logits - lse), delta = sum(do * o_c) of a row of branch
    c: dv = p^T (g do) = (g p)^T do,  ds = p (g do v^T - g delta) = g p (do v^T - delta),  dg = delta
and g p = exp(logits - (lse - ln g)). So the branch's own backward pass, given do itself and lse - ln g, gives the
gradients of the gated sum, and g do, which is as large as o, is never written. For g = 0, lse - ln g is infinity and p
= 0; for g < 0 it is NaN. Kernels that have delta in memory hand it out: it is the gate's gradient, for which do and o_c
need not be read again. The larger lse - ln g is, the more its rounding, in float32, changes p: for a gate of 1e-6 by
some 1e-6 of p. bfloat16 does not show that. float32 would, and in float16 g p may be 0 where g do is not. So in other
dtypes than bfloat16 a branch gets g do, and its own lse.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends import _gate_plain
from nsa_sel.core import transforms

KERNELS = "nsa_sel.backends._triton.elementwise"  # imported at the first sum on a GPU
WITH_LSE = (torch.bfloat16,)  # dtypes of branches that take gates with lse


class Gated(NamedTuple):
    """Inputs of a branch's backward pass that make it return the gradients of the gated sum."""

    do: Tensor  # [B,S,G,h,Dv]
    lse: Any  # [B,S,G,h], None if the branch has none
    gate: Tensor | None  # [B,S,G,h], if lse is lse - ln gate; None: do is gate * do

    def whole_do(self) -> Tensor:
        """Return the gradient of the branch's output, for a backward pass without lse."""
        return self.do if self.gate is None else _gate_plain.scaled(self.do, self.gate)


def gated_sum(compressed: Tensor, selected: Tensor, window: Tensor, gates: Tensor) -> Tensor:
    """o = sum_c gates[..., c] * branch c, differentiable in all four.

    Args:
        compressed, selected, window: [B,S,G,h,Dv], of one floating dtype and device.
        gates: [B,S,G,h,3], of any floating dtype.

    Returns:
        [B,S,G,h,Dv] in the branches' dtype; sums, those of the gates' gradients included, are in float32 (float64 for
        float64 branches).
    """
    if transforms.traces(compressed, selected, window, gates):  # a compiler fuses it
        return _gate_plain.summed((compressed, selected, window), gates)
    return _GatedSum.apply(compressed, selected, window, gates)  # type: ignore[no-any-return, no-untyped-call]


def write_sum(branches: Sequence[Tensor], gates: Tensor, to: Tensor) -> None:
    """Write the gated sum to `to` [B,S,G,h,Dv], a view of any strides with a contiguous last dimension, which may be
    one of the branches; without gradients."""
    _work(gates).write_sum(branches, gates, to)


def sum_of_tokens(branches: Sequence[Tensor], gates: Tensor, is_token: Tensor) -> Tensor:
    """`gated_sum` without gradients; 0 for the rows that are no token by is_token [B,S], whatever the branches hold
    there."""
    o = torch.empty(branches[0].shape, dtype=branches[0].dtype, device=branches[0].device)
    _work(gates).write_sum(branches, gates, o, is_token)
    return o


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of up to three tensors [B,S,G,h,D], in the first one, rounded once."""
    first = parts[0]
    if len(parts) == 2:
        first.add_(parts[1])
    elif len(parts) == 3:
        write_sum(parts, torch.ones((), dtype=torch.float32, device=first.device).expand(*first.shape[:4], 3), first)
    return first


def backward(
    do: Tensor, branches: Sequence[Tensor | None], gates: Tensor, lse: Sequence[Tensor | None], dgates: Tensor
) -> list[Gated | None]:
    """Return the inputs of the branches' backward passes. Call `write_dgates` after them.

    Args:
        do: [B,S,G,h,Dv], gradient of the gated sum.
        branches: the outputs of the three branches; None for one that is left out.
        gates: [B,S,G,h,3].
        lse: [B,S,G,h] of each branch, float32 (float64 for float64 branches); None for a branch that takes gate * do.
        dgates: [B,S,G,h,3] of any strides, to which those of branches that take gate * do are written.

    Returns:
        For each branch what its backward pass takes; None for one that is left out.
    """
    raises = [x if do.dtype in WITH_LSE else None for x in lse]
    rest = [o if x is None else None for o, x in zip(branches, raises, strict=True)]
    work = _work(gates)
    raised = work.raise_lse(raises, gates) if any(x is not None for x in raises) else raises
    scaled = work.backward(do, rest, gates, dgates, True) if any(o is not None for o in rest) else rest
    inputs: list[Gated | None] = []
    for c, (x, y) in enumerate(zip(raised, scaled, strict=True)):
        inputs.append(Gated(do, x, gates[..., c]) if x is not None else None if y is None else Gated(y, lse[c], None))
    return inputs


def write_dgates(
    do: Tensor, branches: Sequence[Tensor | None], gates: Tensor, gated: Sequence[Gated | None], deltas: Sequence[Tensor | None],
    dgates: Tensor,
) -> None:  # fmt: skip
    """Write the gradients of the gates that went with lse.

    Args:
        do, branches, gates, dgates: as of `backward`.
        gated: what it has returned.
        deltas: sum(do * o_c) [B,S,G,h] where the branch's backward pass has given it, else None.
    """
    raised = [x is not None and x.gate is not None for x in gated]
    given = [delta if x else None for delta, x in zip(deltas, raised, strict=True)]
    rest = [o if x and delta is None else None for o, delta, x in zip(branches, deltas, raised, strict=True)]
    work = _work(gates)
    if any(x is not None for x in given):
        work.write_deltas(given, dgates)
    if any(o is not None for o in rest):
        work.backward(do, rest, gates, dgates, False)


def _work(gates: Tensor) -> Any:
    """Return the kernels, or the same in plain PyTorch."""
    return importlib.import_module(KERNELS) if on_gpu(gates) else _gate_plain


def on_gpu(gates: Tensor) -> bool:
    """Return True if the kernels run."""
    return gates.is_cuda


class _GatedSum(torch.autograd.Function):
    """Saves the branches, which their own backward passes keep anyway, and the gates."""

    @staticmethod
    def forward(ctx: Any, compressed: Tensor, selected: Tensor, window: Tensor, gates: Tensor) -> Tensor:
        ctx.save_for_backward(compressed, selected, window, gates)
        o = torch.empty(compressed.shape, dtype=compressed.dtype, device=compressed.device)
        write_sum((compressed, selected, window), gates, o)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative("nsa_attention")
        transforms.check_gradients(do, name="nsa_attention")
        *branches, gates = ctx.saved_tensors
        dgates = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
        inputs = backward(do.resolve_neg(), branches, gates, (None, None, None), dgates)
        return *(x.do for x in inputs if x is not None), dgates
