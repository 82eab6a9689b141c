"""The layer's own kernels, the gated sum and the rotation, against float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nsa_sel import rotary
from nsa_sel.backends import _gate_plain
from nsa_sel.backends._triton import elementwise
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


def log_sums(gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """lse of each branch [B,S,G,h]; -inf for rows without keys, whatever their gates."""
    wide = torch.promote_types(gates.dtype, torch.float32)
    made = 3 * torch.randn(3, *gates.shape[:4], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made[:, :, :3] = -math.inf
    first, second, third = made.to(gates.device, wide)
    return first, second, third


Outputs = tuple[list[Tensor], Tensor]  # of the branches; dgates


def by_module(module: Any, do: Tensor, branches: Any, gates: Tensor, lse: Any) -> Outputs:
    """What `module`, the kernels or plain PyTorch, gives the branches, and dgates."""
    dgates = torch.full(gates.shape, math.nan, dtype=gates.dtype, device=gates.device)
    if lse is None:
        return module.backward(do, branches, gates, dgates, True), dgates
    assert module.backward(do, branches, gates, dgates, False) == [None] * 3
    return module.raise_lse(lse, gates), dgates


def raised(lse: Tensor, gate: Tensor) -> Tensor:
    """lse - ln gate in float64."""
    return (lse.double() - gate.double().log()).where(lse > -math.inf, lse.double())


def check_gate(dtype: torch.dtype, device: str, Dv: int) -> None:
    """The kernels and plain PyTorch give what autograd does in float64, but for the last rounding; reruns are bit-equal. Gates of exactly 0
    and 1 and of 1e-6 are among them, and negative ones, for which lse is NaN."""
    branches, gates, do = gated(dtype, device, Dv)
    gates[:, 1], gates[:, 2], gates[:, 5], gates[:, 6] = 0.0, 1.0, 1e-6, -0.5
    lse = log_sums(gates)
    o, *scaled, dgates = by_autograd(branches, gates, do)
    for module in (elementwise, _gate_plain):
        runs = []
        for _ in range(2):
            with new_memory_is_nan():
                total = torch.full(do.shape, math.nan, dtype=dtype, device=device)
                module.write_sum(branches, gates, total)
                runs.append((total, *(by_module(module, do, branches, gates, given) for given in (None, lse))))
        (total, mine, shifted), again = runs
        for x, right in zip((total, *mine[0], mine[1], shifted[1]), (o, *scaled, dgates, dgates), strict=True):
            torch.testing.assert_close(x, right.to(x.dtype), **tolerance(dtype))
        for c, x in enumerate(shifted[0]):
            assert x.is_contiguous()
            torch.testing.assert_close(x, raised(lse[c], gates[..., c]).to(x.dtype), equal_nan=True, **tolerance(dtype))
            assert bool((x[:, 1] == torch.where(lse[c][:, 1] == -math.inf, -math.inf, math.inf)).all())
            assert torch.equal(x[:, 2], lse[c][:, 2])
        assert torch.equal(total, again[0])
        for first, second in zip((mine, shifted), again[1:], strict=True):
            assert all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(first[0], second[0], strict=True))
            assert torch.equal(first[1], second[1])


def check_deltas(dtype: torch.dtype, device: str) -> None:
    """Those of branches that are given become gates' gradients; of the others nothing is written."""
    _, gates, do = gated(dtype, device)
    first, second, _ = log_sums(gates)
    second = second.transpose(1, 3).contiguous().transpose(1, 3)
    for module in (elementwise, _gate_plain):
        dgates = torch.full((3, *gates.shape[:4]), math.nan, dtype=dtype, device=device).movedim(0, -1)
        module.write_deltas([first, None, second], dgates)
        assert torch.equal(dgates[..., 0], first.to(dtype))
        assert torch.equal(dgates[..., 2], second.to(dtype))
        assert bool(dgates[..., 1].isnan().all())


def check_gate_parts(dtype: torch.dtype, device: str, Dv: int) -> None:
    """The sum, and the gradients of one branch after the other, of each group alone, written into tensors of other strides: bit-equal to
    those of all at once, by the kernels and by plain PyTorch. Strides are multiples of 16: with others the compiler stores, and so adds, in
    another order."""
    branches, gates, do = gated(dtype, device, Dv)
    lse = log_sums(gates)
    for module in (elementwise, _gate_plain) if device == "cpu" else (elementwise,):
        whole = torch.empty_like(do)
        module.write_sum(branches, gates, whole)
        for given in (None, lse):
            outputs, dgates = by_module(module, do, branches, gates, given)
            to = torch.full((*do.shape[:4], Dv + 16), math.nan, dtype=dtype, device=device)[..., :Dv]
            to_gates = torch.full((3, *gates.shape[:4]), math.nan, dtype=gates.dtype, device=device).movedim(0, -1)
            for g in range(do.shape[2]):
                of = slice(None), slice(None), slice(g, g + 1)
                module.write_sum(tuple(x[of] for x in branches), gates[of], to[of])
                for c in range(3):
                    alone: list[Any] = [None, None, None]
                    alone[c] = branches[c][of]
                    found = module.backward(do[of], alone, gates[of], to_gates[of], given is None)
                    if given is not None:
                        found = module.raise_lse([x[of] if i == c else None for i, x in enumerate(given)], gates[of])
                    assert [x is None for x in found] == [i != c for i in range(3)]
                    assert torch.equal(found[c], outputs[c][of])  # type: ignore[arg-type]
            assert torch.equal(to, whole)
            assert torch.equal(to_gates, dgates)


def check_rotation(dtype: torch.dtype, device: str, D: int) -> None:
    """Of strided keys with positions for all, and of queries with positions for each sequence, forward and back, alone and plus another.
    Those of each sequence are of any strides, too."""
    keys = torch.randn(2, 19, 3, D + 8, generator=torch.Generator().manual_seed(0)).to(device, dtype)[..., 8:]
    queries = torch.randn(2, 19, 3, 2, D, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    each = torch.randint(0, 1000, (2, 19), generator=torch.Generator().manual_seed(2)).to(device)
    for x, positions in ((keys, each[0]), (queries, each), (queries, each.t().contiguous().t()), (keys[:, :, 0], each)):
        angles = rotary.angles(x, positions)
        for back, plus in ((False, None), (True, None), (True, x.flip(-1).transpose(0, 1).contiguous().transpose(0, 1))):
            with new_memory_is_nan():
                got = rotary._fused(x, plus, *angles, back)
            wanted = rotary._plain(x.double(), None if plus is None else plus.double(), *(y.double() for y in angles), back)
            torch.testing.assert_close(got, wanted.to(dtype), **tolerance(dtype))


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """assert_close's own; tighter for float64."""
    return {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
