"""`nsa_attention` on a GPU: its memory, plain and recomputed, and CUDA graphs of a whole training step."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa_sel import NSAttention, by_groups, nsa_attention
from nsa_sel.core.call import device_info
from nsa_sel.settings.config import settings_for
from tests.helpers.graphs import captured, replayed

pytestmark = pytest.mark.gpu


def layer_inputs(S: int, G: int, h: int, D: int, seed: int = 0) -> list[Tensor]:
    """q, keys and values of the three branches, gates: bfloat16, at NSA's sizes, requiring gradients."""
    C = (S - 32) // 16 + 1
    torch.manual_seed(seed)
    shapes = [(1, S, G, h, D), *[(1, G, C, D)] * 2, *[(1, G, S, D)] * 4]
    tensors = [torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    gates = torch.rand(1, S, G, h, 3, dtype=torch.bfloat16, device="cuda")
    return [x.requires_grad_() for x in (*tensors, gates)]


def beyond_inputs_and_outputs(work: Any) -> int:
    """Bytes of the peak."""
    work()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = work()
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in outputs)


def test_a_recomputed_step_fits_the_workspace_and_its_kernels_temporaries() -> None:
    """At 32k: two of the four groups at once, where the plain layer holds the three outputs of all, and dq of all, one of which stays."""
    inputs = layer_inputs(32768, 4, 16, 128)
    do, bound = torch.randn_like(inputs[0]), settings_for(device_info(inputs[0].device)).workspace_bytes

    def step(recompute: bool) -> tuple[Tensor, ...]:
        o = nsa_attention(*inputs, recompute=recompute)
        return o, *torch.autograd.grad(o, inputs, do)

    recomputed, plain = (beyond_inputs_and_outputs(lambda way=way: step(way)) for way in (True, False))
    assert recomputed <= 1.5 * bound
    assert plain >= 5 * do.nbytes  # so that this test sees what it is about
    with torch.no_grad():
        assert beyond_inputs_and_outputs(lambda: (nsa_attention(*inputs),)) <= 1.25 * bound


def test_a_recomputed_step_is_bit_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a plain one, where all groups are one unit and so take the same kernels; and from run to run in units of one group."""
    inputs = layer_inputs(2100, 2, 4, 64)
    do = torch.randn_like(inputs[0])

    def step(recompute: bool) -> tuple[Tensor, ...]:
        o = nsa_attention(*inputs, recompute=recompute)
        return o, *torch.autograd.grad(o, inputs, do)

    plain = step(False)
    for _ in range(2):
        assert all(map(torch.equal, step(True), plain))
    monkeypatch.setattr(by_groups, "settings_for", lambda device: types.SimpleNamespace(workspace_bytes=1))
    first, second = step(True), step(True)
    assert all(map(torch.equal, first, second))
    for mine, right in zip(first, plain, strict=True):
        assert float((mine - right).norm() / right.norm()) < 0.01


@pytest.mark.parametrize("recompute", [False, True])
def test_a_graph_of_a_training_step_follows_its_inputs(recompute: bool) -> None:
    """Forward and backward of the whole layer, captured once and replayed with new inputs: what an eager step gives."""
    inputs = layer_inputs(2100, 2, 4, 64)
    do = torch.randn_like(inputs[0])

    def step() -> tuple[Tensor, ...]:
        o = nsa_attention(*inputs, recompute=recompute)
        return o, *torch.autograd.grad(o, inputs, do)

    graph, outputs = captured(step)
    for seed in (1, 2):
        with torch.no_grad():
            for old, new in zip(inputs, layer_inputs(2100, 2, 4, 64, seed), strict=True):
                old.copy_(new)
            do.normal_()
        assert all(map(torch.equal, replayed(graph, outputs), step()))


def test_a_graph_of_a_forward_pass_follows_its_input() -> None:
    layer = NSAttention(128, 2, 4, 32, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, 1500, 128, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        graph, outputs = captured(lambda: (layer(x),))
        for _ in range(2):
            x.normal_()
            assert torch.equal(replayed(graph, outputs)[0], layer(x))


def test_checkpointed_layers_under_autocast_are_bit_equal() -> None:
    layers = [NSAttention(128, 2, 4, 32, device="cuda", recompute=recompute) for recompute in (False, True)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(1, 1500, 128, device="cuda", requires_grad=True)
    results = []
    for layer in layers:
        for checkpointed in (False, True):
            with torch.autocast("cuda", torch.bfloat16):
                o = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            results.append((o, *torch.autograd.grad(o.float().sum(), (x, *layer.parameters()))))
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))
