"""The contract of `nsa_attention`, by every backend of its selected branch on every device: NSA's gated sum and its gradients.

Compared with float64 autograd of masked attention, within twice the error of the same in the inputs' dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa_sel import Selection, compressed_attention, decisions, gating, nsa_attention, use_backend
from nsa_sel.backends import window_triton
from nsa_sel.backends._triton import elementwise
from nsa_sel.core import registry
from nsa_sel.core import window as window_calls
from nsa_sel.core.call import Rule
from nsa_sel.oracle import oracle_mask
from nsa_sel.three_branches import Inputs
from tests.contract.lanes import Lane, lanes, parameters
from tests.helpers.cases import assert_within_twice_baseline, gradient_terms
from tests.helpers.checks import new_memory_is_nan
from tests.helpers.gpus import HOPPER

NAMES = Inputs._fields[:9]
LANES = lanes("cpu", "interpreter", "emulated", "cuda")
CHOOSER = {"triton-tile": "choose-triton", "cupy-cuda": "choose-cuda" if HOPPER else "choose-triton"}  # else choose-torch


def sizes_of(lane: Lane) -> tuple[int, int, int, int, Rule, int]:
    """S, G, h, D, the rule and the window."""
    if lane.device == "emulated":
        return 70, 1, 4, 64, Rule(32, 16, 64, 2, 1, 1), 20
    return (40, 1, 2, 16, Rule(8, 4, 16, 2, 1, 1), 9) if lane.device != "cuda" else (700, 2, 16, 64, Rule(), 100)


def chooser_of(lane: Lane) -> str:
    name = CHOOSER.get(lane.name, "choose-torch")
    return name if lane.device in ("interpreter", "cuda") else "choose-torch"


def inputs_of(lane: Lane, gates: str, dtype: torch.dtype) -> Inputs:
    """Random; gates of exactly 0 and 1 and of 1e-6 among others ("mixed"), or all of them 1e-6 ("tiny")."""
    S, G, h, D, rule, _ = sizes_of(lane)
    generator = torch.Generator().manual_seed(0)
    C = rule.compressed_keys(S)
    sizes = [(1, S, G, h, D), *[(1, G, C, D)] * 2, *[(1, G, S, D)] * 4, (1, S, G, h, 3), (1, S, G, h, D)]
    made = [torch.randn(size, generator=generator) for size in sizes]
    made[7] = torch.rand(sizes[7], generator=generator)
    if gates == "mixed":
        made[7] = torch.where(made[7] < 0.2, 0.0, torch.where(made[7] > 0.8, 1.0, torch.where(made[7] < 0.4, 1e-6, made[7])))
    else:
        made[7].fill_(1e-6)
    leaves = [x.to(lane.place, dtype).requires_grad_() for x in made]
    with torch.no_grad(), use_backend(chooser_of(lane)):
        chosen = compressed_attention(leaves[8], *leaves[1:3], **rule._asdict())[1]
    return Inputs(*leaves, chosen.block_indices)


def attended(lane: Lane, inputs: Inputs) -> Tensor:
    """o [B,S,G,h,D], by the lane's backend."""
    *_, rule, window = sizes_of(lane)
    return nsa_attention(*inputs[:8], q_cmp=inputs.q_cmp, window=window, backend=lane.name, **rule._asdict())


def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Attention [B,S,G,h,Dv] under keep [B,S,G,keys], in the precision of q; zeros over no keys."""
    logits = torch.einsum("bsghd,bgkd->bsghk", q, k) * scale
    p = torch.softmax(logits.masked_fill(~keep.unsqueeze(3), -torch.inf), -1).masked_fill(~keep.unsqueeze(3), 0.0)
    return torch.einsum("bsghk,bgkd->bsghd", p, v)


def plain(lane: Lane, inputs: Inputs, dtype: torch.dtype, do: Tensor) -> list[Tensor]:
    """o and gradients by autograd of masked attention in `dtype`."""
    *_, rule, window = sizes_of(lane)
    leaves = Inputs(*(x.detach().to(dtype).requires_grad_() for x in inputs[:9]), inputs.blocks)
    S, C = inputs.q.shape[1], inputs.k_cmp.shape[2]
    row, key = torch.arange(S, device=do.device)[:, None], torch.arange(S, device=do.device)
    seen = (row - rule.compress_block + 1) // rule.compress_stride >= key[:C]
    near = (key <= row) & (key > row - window)
    chosen = oracle_mask(Selection.from_blocks(inputs.blocks, rule.block_size).ranges, S, S, None).to(do.device)
    keeps = seen[None, :, None], chosen, near[None, :, None]
    scale = inputs.q.shape[4] ** -0.5
    o: Any = sum(leaves.gates[..., c, None] * masked(*leaves.branch(c), keeps[c], scale) for c in range(3))
    return [o.detach(), *torch.autograd.grad(o, leaves[:9], do.to(dtype))]


def check(lane: Lane, inputs: Inputs) -> None:
    do = torch.randn(inputs.q.shape, generator=torch.Generator().manual_seed(1)).to(inputs.q)
    with new_memory_is_nan(), use_backend(chooser_of(lane)):
        o = attended(lane, inputs)
    assert [x.forward for x in decisions()[-2:]] == [chooser_of(lane), lane.name]
    with new_memory_is_nan():
        got = [o.detach(), *torch.autograd.grad(o, inputs[:9], do)]
    terms: dict[str, float] = {}  # of each gradient, how large the terms are that cancel
    for c in range(3):
        gated = do.float() * inputs.gates.detach()[..., c, None].float()
        for i, term in zip(inputs.fields_of(c), gradient_terms(*(x.detach().float() for x in inputs.branch(c)), gated, None), strict=True):
            terms[NAMES[i]] = max(terms.get(NAMES[i], 0.0), term)
    for name, mine, right, other in zip(
        ("o", *NAMES), got, plain(lane, inputs, torch.float64, do), plain(lane, inputs, do.dtype, do), strict=True
    ):
        assert_within_twice_baseline(mine, right, other, f"{lane.name}: {name}", terms.get(name, 0.0))


@contextlib.contextmanager
def kernels_of_a_gpu(lane: Lane, patch: pytest.MonkeyPatch, with_lse: bool = True) -> Iterator[None]:
    """In the interpreter gates and windows run as on a GPU: all their kernels must. with_lse: float32 takes gates as bfloat16 does, whose
    products the interpreter gets wrong; those that give delta must hand it out."""
    if lane.device != "interpreter":
        yield
        return
    if with_lse:
        patch.setattr(gating, "WITH_LSE", (torch.float32,))
    patch.setattr(gating, "on_gpu", lambda gates: True)
    patch.setattr(window_calls, "takes", lambda q, v, kernels: kernels.name == "Triton")
    calls = [(elementwise, "write_sum"), (elementwise, "backward"), (window_triton, "forward"), (window_triton, "backward")]
    with contextlib.ExitStack() as stack:
        ran = [stack.enter_context(mock.patch.object(module, name, wraps=getattr(module, name))) for module, name in calls]
        deltas = stack.enter_context(mock.patch.object(elementwise, "write_deltas", wraps=elementwise.write_deltas))
        yield
    assert all(each.called for each in ran)
    if with_lse:
        assert [x is not None for x in deltas.call_args.args[0]] == [chooser_of(lane) == "choose-triton", False, True]


def each(whats: Any) -> Any:
    return pytest.mark.parametrize(("lane", "what"), parameters([(lane, what) for lane in LANES for what in whats(lane)]))


@each(lambda lane: ["mixed"] if lane.slow else ["mixed", "tiny"])
def test_layer_gradients_with_gates_in_lse(lane: Lane, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 takes gates with lse; float32 in the interpreter, too."""
    lane.open(monkeypatch)
    dtype = {"emulated": torch.float16, "interpreter": torch.float32}.get(lane.device, torch.bfloat16)
    with kernels_of_a_gpu(lane, monkeypatch):
        check(lane, inputs_of(lane, what, dtype))


@each(lambda lane: [torch.float16, torch.float32] if lane.name == "triton-tile" and lane.slow else [torch.float16] * (not lane.slow))
def test_layer_gradients_of_tiny_gates(lane: Lane, what: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lse, float32 would lose two digits of them, and float16 all gradients."""
    lane.open(monkeypatch)
    with kernels_of_a_gpu(lane, monkeypatch, with_lse=False):
        check(lane, inputs_of(lane, "tiny", what))


@each(lambda lane: [None] if torch.float32 in lane.dtypes and not lane.slow else [])
def test_layer_under_autocast(lane: Lane, what: None) -> None:
    """float32 computes in autocast's dtype, and its gradients are float32."""
    inputs = inputs_of(lane, "mixed", torch.float32)
    with torch.autocast(lane.place, torch.float16):
        o = attended(lane, inputs)
    cast = Inputs(*(x if name == "gates" else x.half() for name, x in zip(NAMES, inputs, strict=False)))
    assert o.dtype == torch.float16
    assert torch.equal(o, attended(lane, cast))
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(o.float().sum(), inputs[:9]))


@each(lambda lane: [torch.float64, torch.bfloat16] if lane.name == registry.fallback() and lane.device == "cpu" else [])
def test_layer_negative_gates_have_gradients_but_in_bfloat16(lane: Lane, what: torch.dtype) -> None:
    inputs = inputs_of(lane, "mixed", what)
    inputs = inputs._replace(gates=inputs.gates.detach().neg().requires_grad_())
    found = torch.autograd.grad(attended(lane, inputs).sum(), inputs[:9])
    assert all(bool(dx.isfinite().all()) == (what == torch.float64) for dx in (found[0], *found[1:5]))
    assert bool(found[7].isfinite().all())


def test_layer_whose_window_kernels_fail_in_backward_takes_gates_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = next(lane for lane in LANES if lane.name == registry.fallback())
    inputs = inputs_of(lane, "mixed", torch.float32)
    wanted = torch.autograd.grad(attended(lane, inputs).sum(), inputs[:9])
    monkeypatch.setattr(gating, "WITH_LSE", (torch.float32,))
    monkeypatch.setattr(window_calls, "takes", lambda q, v, kernels: kernels.name == "Triton")
    monkeypatch.setattr(registry, "broken", {})
    monkeypatch.delattr(window_triton, "backward")
    o = attended(lane, inputs)
    with pytest.warns(RuntimeWarning, match="The Triton kernels of sliding_window_attention failed"):
        torch.testing.assert_close(torch.autograd.grad(o.sum(), inputs[:9]), wanted)
