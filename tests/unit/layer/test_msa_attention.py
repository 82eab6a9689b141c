"""Check MSAttention: against transformers' layer, by training its indexer, and within PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa_sel import MSAttention
from nsa_sel.errors import ArgumentError

SIZES: dict[str, Any] = {"width": 32, "groups": 2, "heads": 2, "head_dim": 16, "index_dim": 8, "block_size": 8, "n": 3, "rotary_dim": 8}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def layer_of(**options: Any) -> MSAttention:
    torch.manual_seed(0)
    return MSAttention(**{**SIZES, **options})


def hidden(B: int = 2, S: int = 70, width: int = 32, device: str = "cpu") -> Tensor:
    return torch.randn(B, S, width, generator=torch.Generator().manual_seed(1)).to(device)


def gradients(layer: MSAttention, x: Tensor, weight: float, **options: Any) -> dict[str, Tensor | None]:
    """Return the gradients of the output's sum of squares, and of the loss times weight."""
    layer.zero_grad()
    o, loss = layer(x, with_loss=True, **options)
    (o.square().sum() + weight * loss).backward()
    return {name: None if x.grad is None else x.grad.clone() for name, x in layer.named_parameters()}


@pytest.mark.parametrize("S", [20, 70])
def test_equals_minimax_m3_with_its_weights(S: int) -> None:
    """Output and gradients of transformers' layer, also where a row has fewer blocks than n."""
    m3 = pytest.importorskip("transformers.models.minimax_m3_vl")
    kind = {"num_hidden_layers": 1, "layer_types": ["minimax_m3_sparse"], "mlp_layer_types": ["dense"]}
    indexer = {"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 8, "index_topk_blocks": 3}
    heads: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    heads["rope_parameters"] = {"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.5}
    config = m3.MiniMaxM3VLTextConfig(**kind, **indexer, **heads, attn_implementation="eager")
    modeling = m3.modeling_minimax_m3_vl
    torch.manual_seed(3)
    theirs, rotary = modeling.MiniMaxM3VLAttention(config, 0), modeling.MiniMaxM3VLRotaryEmbedding(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = layer_of(rotary_base=5e6)
    ours.load_state_dict(theirs.state_dict())
    x, positions = hidden(S=S), torch.arange(S)[None]
    mask = torch.full((S, S), -torch.inf).triu(1).expand(2, 1, S, S)
    expected = theirs(x, rotary(x, positions), mask, position_ids=positions)[0]
    o = ours(x)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    for name, parameter in theirs.named_parameters():
        if not name.startswith("indexer"):
            own = torch.autograd.grad(o.square().sum(), ours.get_parameter(name), retain_graph=True)[0]
            other = torch.autograd.grad(expected.square().sum(), parameter, retain_graph=True)[0]
            torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sparse", [True, False])
def test_the_loss_trains_the_indexer_alone(sparse: bool) -> None:
    layer, x = layer_of(), hidden()
    without, with_loss = (gradients(layer, x, weight, sparse=sparse) for weight in (0.0, 1.0))
    for name, gradient in with_loss.items():
        before = without[name]
        assert gradient is not None
        assert before is not None
        assert torch.equal(gradient, before) is not name.startswith("indexer")
    torch.testing.assert_close(layer(x, sparse=sparse), layer(x, sparse=sparse, with_loss=True)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_a_warm_up_lets_the_indexer_choose_what_attention_reads(device: str) -> None:
    """The loss falls, and the chosen blocks hold more of the attention's mass: sparse attention comes closer to dense."""
    layer = layer_of(head_dim=32, rotary_dim=0).to(device)
    for parameter in (layer.q_proj.weight, layer.k_proj.weight):
        torch.nn.init.normal_(parameter, std=0.5)
    x, losses = hidden(S=120, device=device), list[float]()

    def missed() -> float:
        with torch.no_grad():
            return float((layer(x) - layer(x, sparse=False)).square().mean())

    before, optimizer = missed(), torch.optim.Adam(layer.indexer.parameters(), 0.02)
    for _ in range(60):
        loss = layer(x, sparse=False, with_loss=True)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert missed() < before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sparse", [True, False])
def test_compile_checkpointing_and_autocast(device: str, sparse: bool) -> None:
    layer, x = layer_of().to(device), hidden(device=device)
    expected = gradients(layer, x, 1.0, sparse=sparse)
    compiled = copy.deepcopy(layer)
    compiled.compile(fullgraph=True, backend="aot_eager")
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5} if device == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(gradients(compiled, x, 1.0, sparse=sparse), expected, **near)
    layer.zero_grad()
    o, loss = checkpoint(layer, x, sparse=sparse, with_loss=True, use_reentrant=False)
    (o.square().sum() + loss).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], **near)
    with torch.autocast(device, torch.bfloat16):
        o, loss = layer(x, sparse=sparse, with_loss=True)
    assert (o.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    loss.backward()


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("groups", {"groups": 0}), ("n", {"n": -1}), ("first + local", {"local": 4}), ("rotary_dim", {"rotary_dim": 7}),
        ("rotary_dim", {"rotary_dim": 10}), ("block_size", {"block_size": 0}),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(argument: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as error:
        layer_of(**options)
    assert error.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("x", {"x": torch.randn(70, 32)}), ("x", {"x": torch.randn(1, 70, 31)}), ("positions", {"positions": torch.zeros(3).int()}),
        ("sparse", {"sparse": None}), ("with_loss", {"with_loss": 1}),
    ],
)  # fmt: skip
def test_bad_input_is_refused(argument: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as error:
        layer_of()(**{"x": hidden(), **options})
    assert error.value.argument == argument


def test_positions_rotate_and_change_nobodys_view() -> None:
    """Rotary positions are relative: a shift changes nothing."""
    layer, x = layer_of(), hidden()
    torch.testing.assert_close(layer(x, torch.arange(5, 75)), layer(x), rtol=1e-3, atol=1e-4)
    assert float((layer(x, 3 * torch.arange(70).expand(2, -1)) - layer(x)).detach().abs().max()) > 1e-3
