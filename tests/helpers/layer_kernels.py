"""The layer's own kernels, the gated sum and the rotation, against float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_sel import rotary
from nsa_sel.backends._triton import gate
from nsa_sel.core import gating
from tests.helpers.poison import new_memory_is_nan


def gated(dtype: torch.dtype, device: str = "cpu", Dv: int = 24) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Branches of different strides, gates in float32 (float64) that are no contiguous tensor either, and do."""
    generator = torch.Generator().manual_seed(0)
    a, b, c, do = (torch.randn(2, 37, 2, 3, Dv, generator=generator).to(device, dtype) for _ in range(4))
    c = c.permute(0, 3, 2, 1, 4).contiguous().permute(0, 3, 2, 1, 4)
    gates = torch.rand(2, 37, 3, 2, 3, generator=generator).to(device, torch.promote_types(dtype, torch.float32)).transpose(2, 3)
    return (a, b, c), gates, do


def by_autograd(branches: tuple[Tensor, ...], gates: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """o and gradients in float64."""
    leaves = [x.double().requires_grad_() for x in (*branches, gates)]
    o = leaves[0] * leaves[3][..., :1] + leaves[1] * leaves[3][..., 1:2] + leaves[2] * leaves[3][..., 2:]
    return o.detach(), *torch.autograd.grad(o, leaves, do.double())


def check_gate(dtype: torch.dtype, device: str, Dv: int) -> None:
    """The kernels and plain PyTorch give what autograd does in float64, but for the last rounding; reruns are bit-equal."""
    branches, gates, do = gated(dtype, device, Dv)
    with new_memory_is_nan():
        got = gate.forward(branches, gates), *gate.backward(do, branches, gates)
    plain = gating.plain_sum(branches, gates), *gating.plain_backward(do, branches, gates)
    for mine, other, right in zip(got, plain, by_autograd(branches, gates, do), strict=True):
        assert mine.dtype == other.dtype
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, right.to(mine.dtype), **tolerance(dtype))
        torch.testing.assert_close(other, right.to(other.dtype), **tolerance(dtype))
    assert all(map(torch.equal, (gate.forward(branches, gates), *gate.backward(do, branches, gates)), got))


def check_gate_parts(dtype: torch.dtype, device: str, Dv: int) -> None:
    """The sum, and the gradients of one branch after the other, of each group alone, written into tensors of other strides: bit-equal to
    those of all at once, by the kernels and by plain PyTorch. Strides are multiples of 16: with others the compiler stores, and so adds, in
    another order."""
    branches, gates, do = gated(dtype, device, Dv)
    kernels = gate.forward(branches, gates), *gate.backward(do, branches, gates)
    plain = gating.plain_sum(branches, gates), *gating.plain_backward(do, branches, gates)
    for module, whole in ((gate, kernels), (gating, kernels if gating.on_gpu(gates) else plain)):
        nan: Any = {"fill_value": float("nan"), "device": device}
        to = [torch.full((*do.shape[:4], Dv + 16), dtype=dtype, **nan)[..., :Dv] for _ in range(4)]
        to_gates = torch.full((3, *gates.shape[:4]), dtype=gates.dtype, **nan).movedim(0, -1)
        for g in range(do.shape[2]):
            of = slice(None), slice(None), slice(g, g + 1)
            module.write_sum(tuple(x[of] for x in branches), gates[of], to[0][of])  # type: ignore[attr-defined]
            for c, x in enumerate(branches):
                module.write_branch_gradient(do[of], x[of], gates[of], c, to[1 + c][of], to_gates[of])  # type: ignore[attr-defined]
        assert all(map(torch.equal, (*to, to_gates), whole))


def check_rotation(dtype: torch.dtype, device: str, D: int) -> None:
    """Of strided keys with positions for all, and of queries with positions for each sequence, forward and back."""
    keys = torch.randn(2, 19, 3, D + 8, generator=torch.Generator().manual_seed(0)).to(device, dtype)[..., 8:]
    queries = torch.randn(2, 19, 3, 2, D, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    each = torch.randint(0, 1000, (2, 19), generator=torch.Generator().manual_seed(2)).to(device)
    for x, positions in ((keys, each[0]), (queries, each), (keys[:, :, 0], each)):
        angles = rotary._angles(x, positions, 10000.0)
        for back in (False, True):
            with new_memory_is_nan():
                got = rotary._fused(x, *angles, back)
            wanted = rotary._rotated(x.double(), *(y.double() for y in angles), back)
            torch.testing.assert_close(got, wanted.to(dtype), **tolerance(dtype))


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """assert_close's own; tighter for float64."""
    return {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
