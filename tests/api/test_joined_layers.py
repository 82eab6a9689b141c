"""A layer's projections by one product: the same results as apart, and apart where that is not the same."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from nsa_sel import NSAttention, attention_layer
from nsa_sel.rotary import rotate
from tests.helpers.checks import new_memory_is_nan

SIZES: dict[str, Any] = {"compress_block": 8, "compress_stride": 4, "block_size": 8, "n": 3, "local": 1, "window": 6}


class Adapted(nn.Linear):
    """As adapters and quantized layers are: another class in the layer's place."""


def make(dtype: torch.dtype = torch.float64, heads: int = 2, **options: Any) -> NSAttention:
    torch.manual_seed(0)
    layer = NSAttention(10, 2, heads, 4, **{"value_dim": 6, **SIZES, **options}, dtype=dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def hidden(layer: NSAttention, S: int = 21) -> Tensor:
    x = torch.randn(2, S, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.to(layer.out.weight.dtype).requires_grad_()


def results(layer: NSAttention, **given: Any) -> tuple[Tensor, ...]:
    """o, and the gradients of x and of the parameters that have one."""
    x = hidden(layer)
    if "cu_seqlens" in given:
        x = x[:1]
    with new_memory_is_nan():
        o = layer(x, **given)
        leaves = [y for y in (x, *layer.parameters()) if y.requires_grad]
        return o.detach(), *torch.autograd.grad(o.square().sum(), leaves)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    with mock.patch.object(attention_layer, "joins", return_value=False):
        yield


@contextlib.contextmanager
def joined(times: int) -> Iterator[None]:
    """How often the projections are joined."""
    with mock.patch.object(attention_layer, "project", wraps=attention_layer.project) as project:
        yield
    assert project.call_count == times


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, {}),
        ({"bias": True, "value_dim": 4}, {}),
        ({"rotary": functools.partial(rotate, base=500.0), "compression": "mean"}, {"positions": torch.arange(42).view(2, 21)}),
        ({"value_dim": 4, "compress_block": 12, "block_size": 12}, {"cu_seqlens": [0, 9, 9, 20]}),
    ],
    ids=["default", "bias", "base", "packed"],
)
def test_joined_layers_compute_the_same(options: dict[str, Any], given: dict[str, Any]) -> None:
    layer = make(**options)
    with joined(1):
        found = results(layer, **given)
    with apart(), joined(0):
        wanted = results(layer, **given)
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)
    assert all(map(torch.equal, found, results(layer, **given)))


def test_frozen_parameters_and_inputs() -> None:
    layer = make()
    everything = dict(zip(["o", "x", *dict(layer.named_parameters())], results(layer), strict=True))
    for name in ("q.weight", "gate.bias", "compress_k.first.weight"):
        layer.get_parameter(name).requires_grad_(False)
        del everything[name]
    with joined(1):
        found = results(layer)
    assert all(map(torch.equal, found, everything.values()))
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    assert len(results(layer)) == 2
    with joined(1), torch.no_grad():
        assert torch.equal(layer(hidden(layer)), found[0])


def test_autocast_gives_float32_gradients_and_equal_reruns() -> None:
    layer = make(torch.float32, heads=4, value_dim=4)
    with joined(2), torch.autocast("cpu", torch.bfloat16):
        first, second = results(layer), results(layer)
    assert first[0].dtype == torch.bfloat16
    assert all(dx.dtype == torch.float32 for dx in first[1:])
    assert all(map(torch.equal, first, second))


def weight_norms(layer: NSAttention) -> None:
    weight_norm(layer.q)


def replaces(layer: NSAttention) -> None:
    other = Adapted(10, layer.kv.out_features, bias=False, dtype=torch.float64)
    other.load_state_dict(layer.kv.state_dict())
    layer.kv = other


def shadows(layer: NSAttention) -> None:
    layer.gate.forward = functools.partial(nn.Linear.forward, layer.gate)  # type: ignore[method-assign]


def turns_itself(layer: NSAttention) -> None:
    layer.rotary = lambda x, positions: rotate(x, positions)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.q.register_forward_hook(lambda *_: None),
        lambda layer: layer.kv.register_forward_pre_hook(lambda *_: None),
        lambda layer: layer.gate.register_full_backward_hook(lambda *_: None),
        weight_norms,
        replaces,
        shadows,
        turns_itself,
    ],
    ids=["hook", "pre-hook", "backward-hook", "parametrization", "adapter", "forward", "rotary"],
)
def test_changed_projections_are_called_one_by_one(change: Callable[[NSAttention], Any]) -> None:
    layer, plain = make(), make()
    change(layer)
    with joined(0):
        o = layer(hidden(layer))
    torch.testing.assert_close(o, plain(hidden(plain)))


def test_rows_that_kernels_cannot_read_are_not_joined() -> None:
    """Of 7 numbers of 8 bytes, where TMA takes multiples of 16."""
    layer = NSAttention(10, 1, 1, 2, 2, **SIZES, dtype=torch.float64)
    assert (layer.q.out_features + layer.kv.out_features + layer.gate.out_features) % 2
    with joined(0):
        layer(hidden(layer))
