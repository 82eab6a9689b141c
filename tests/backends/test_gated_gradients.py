"""Gradients of NSA's gated sum by every backend, each of which takes the gates with its lse: against float64, within twice the baseline."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa_sel import Selection, by_groups, compressed_attention, decisions, gating, use_backend
from nsa_sel.backends import window_triton
from nsa_sel.backends._triton import elementwise
from nsa_sel.core import registry
from nsa_sel.core import window as window_calls
from nsa_sel.core.call import Rule
from nsa_sel.oracle import oracle_mask
from nsa_sel.three_branches import Inputs, Options
from tests.helpers.cases import assert_within_twice_baseline, gradient_terms
from tests.helpers.poison import new_memory_is_nan

NAMES = Inputs._fields[:9]
RULE, WINDOW = Rule(8, 4, 16, 2, 1, 1), 9
BACKENDS = ["sdpa-packed", "numba", "triton-token", "triton-group", "triton-tile", "triton-block"]


def inputs_of(gates: str, dtype: torch.dtype, device: str, S: int, G: int, h: int, D: int, rule: Rule) -> Inputs:
    """Random; gates of exactly 0 and 1 and of 1e-6 among others ("mixed"), or all of them 1e-6 ("tiny")."""
    generator = torch.Generator().manual_seed(0)
    C = rule.compressed_keys(S)
    sizes = [(1, S, G, h, D), *[(1, G, C, D)] * 2, *[(1, G, S, D)] * 4, (1, S, G, h, 3), (1, S, G, h, D)]
    made = [torch.randn(size, generator=generator) for size in sizes]
    made[7] = torch.rand(sizes[7], generator=generator)
    if gates == "mixed":
        made[7] = torch.where(made[7] < 0.2, 0.0, torch.where(made[7] > 0.8, 1.0, torch.where(made[7] < 0.4, 1e-6, made[7])))
    else:
        made[7].fill_(1e-6)
    leaves = [x.to(device, dtype).requires_grad_() for x in made]
    with torch.no_grad():
        chosen = compressed_attention(leaves[8], *leaves[1:3], **rule._asdict())[1]
    return Inputs(*leaves, chosen.block_indices)


def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Attention [B,S,G,h,Dv] under keep [B,S,G,keys], in the precision of q; zeros over no keys."""
    logits = torch.einsum("bsghd,bgkd->bsghk", q, k) * scale
    p = torch.softmax(logits.masked_fill(~keep.unsqueeze(3), -math.inf), -1).masked_fill(~keep.unsqueeze(3), 0.0)
    return torch.einsum("bsghk,bgkd->bsghd", p, v)


def plain(inputs: Inputs, dtype: torch.dtype, rule: Rule, window: int, do: Tensor) -> list[Tensor]:
    """o and gradients by autograd of masked attention in `dtype`."""
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


def check(backend: str, chooser: str, inputs: Inputs, rule: Rule, window: int) -> None:
    do = torch.randn(inputs.q.shape, generator=torch.Generator().manual_seed(1)).to(inputs.q)
    options = Options(window, rule, inputs.q.shape[4] ** -0.5, backend)
    with new_memory_is_nan(), use_backend(chooser):
        o = by_groups.attention(inputs, options)
    assert [x.forward for x in decisions()[-2:]] == [chooser, backend]
    with new_memory_is_nan():
        got = [o.detach(), *torch.autograd.grad(o, inputs[:9], do)]
    exact, baseline = plain(inputs, torch.float64, rule, window, do), plain(inputs, do.dtype, rule, window, do)
    terms = terms_of(inputs, do)
    for name, mine, right, other in zip(("o", *NAMES), got, exact, baseline, strict=True):
        assert_within_twice_baseline(mine, right, other, f"{backend}: {name}", terms.get(name, 0.0))


def terms_of(inputs: Inputs, do: Tensor) -> dict[str, float]:
    """Of each gradient, how large the terms are that cancel (`gradient_terms`)."""
    found: dict[str, float] = {}
    for c in range(3):
        gated = do.float() * inputs.gates.detach()[..., c, None].float()
        for i, term in zip(inputs.fields_of(c), gradient_terms(*(x.detach().float() for x in inputs.branch(c)), gated, None), strict=True):
            found[NAMES[i]] = max(found.get(NAMES[i], 0.0), term)
    return found


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The gates and the window run as on a GPU, in the interpreter: all their kernels must."""
    monkeypatch.setattr(gating, "on_gpu", lambda gates: True)
    monkeypatch.setattr(window_calls, "takes", lambda q, v, kernels: kernels.name == "Triton")
    calls = [(elementwise, "write_sum"), (elementwise, "backward"), (window_triton, "forward"), (window_triton, "backward")]
    spies = [mock.patch.object(module, name, wraps=getattr(module, name)) for module, name in calls]
    with contextlib.ExitStack() as stack:
        ran = [stack.enter_context(spy) for spy in spies]
        yield
        assert all(each.called for each in ran)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("kernels")
def test_backends_take_gates_with_lse(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for bfloat16, whose products the interpreter gets wrong, in float32; gates of 0, 1 and 1e-6 are among others. Gradients of gates
    come from the backends that have them."""
    monkeypatch.setattr(gating, "WITH_LSE", (torch.float32,))
    chooser = "choose-triton" if backend == "triton-tile" else "choose-torch"
    with mock.patch.object(elementwise, "write_deltas", wraps=elementwise.write_deltas) as deltas:
        check(backend, chooser, inputs_of("mixed", torch.float32, "cpu", 40, 1, 2, 16, RULE), RULE, WINDOW)
    assert [x is not None for x in deltas.call_args.args[0]] == [chooser == "choose-triton", False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("kernels")
def test_tiny_gates(dtype: torch.dtype) -> None:
    """With lse, float32 would lose two digits of them, and float16 all gradients."""
    check("triton-tile", "choose-triton", inputs_of("tiny", dtype, "cpu", 40, 1, 2, 16, RULE), RULE, WINDOW)


@pytest.mark.parametrize("gates", ["mixed", "tiny"])
@pytest.mark.parametrize("backend", ["sdpa-packed", "numba"])
def test_bfloat16(backend: str, gates: str) -> None:
    check(backend, "choose-torch", inputs_of(gates, torch.bfloat16, "cpu", 40, 1, 2, 16, RULE), RULE, WINDOW)


def test_negative_gates() -> None:
    """Have gradients but in bfloat16, where those are NaN."""
    for dtype in (torch.float64, torch.bfloat16):
        inputs = inputs_of("mixed", dtype, "cpu", 40, 1, 2, 16, RULE)
        inputs = inputs._replace(gates=inputs.gates.detach().neg().requires_grad_())
        o = by_groups.attention(inputs, Options(WINDOW, RULE, 0.25, "sdpa-packed"))
        found = torch.autograd.grad(o.sum(), inputs[:9])
        assert all(bool(dx.isfinite().all()) == (dtype == torch.float64) for dx in (found[0], *found[1:5]))
        assert bool(found[7].isfinite().all())


def test_a_window_whose_kernels_fail_in_backward_takes_gates_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of("mixed", torch.float32, "cpu", 40, 1, 2, 16, RULE)
    options = Options(WINDOW, RULE, 0.25, "sdpa-packed")
    wanted = torch.autograd.grad(by_groups.attention(inputs, options).sum(), inputs[:9])
    monkeypatch.setattr(gating, "WITH_LSE", (torch.float32,))
    monkeypatch.setattr(window_calls, "takes", lambda q, v, kernels: kernels.name == "Triton")
    monkeypatch.setattr(registry, "broken_windows", set())
    monkeypatch.delattr(window_triton, "backward")
    o = by_groups.attention(inputs, options)
    with pytest.warns(RuntimeWarning, match="The Triton kernels of sliding_window_attention failed"):
        found = torch.autograd.grad(o.sum(), inputs[:9])
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.gpu
@pytest.mark.parametrize("gates", ["mixed", "tiny"])
@pytest.mark.parametrize(("backend", "chooser"), [("cupy-cuda", "choose-cuda"), ("triton-tile", "choose-triton"), ("triton-block", None)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype, backend: str, chooser: str | None, gates: str) -> None:
    inputs = inputs_of(gates, dtype, "cuda", 700, 2, 16, 64, Rule())
    check(backend, chooser or "choose-torch", inputs, Rule(), 100)
