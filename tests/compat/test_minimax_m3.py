"""Check that MiniMax-M3 of transformers on nsa-sel equals its own eager code: logits, gradients, generation, chunks, padding."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import decisions
from nsa_sel.compat import patch_model
from nsa_sel.compat.transformers import minimax_m3
from nsa_sel.errors import ArgumentError
from tests.compat.patched import check_generation, check_gradients, logits, padded

transformers = pytest.importorskip("transformers", reason="pip install transformers")


pytest.importorskip("transformers.models.minimax_m3_vl")


SPARSE = "minimax_m3_sparse"
SIZES: dict[str, Any] = {
    "vocab_size": 80, "hidden_size": 32, "dense_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 8,
    "index_topk_blocks": 3, "layer_types": ["full_attention", SPARSE, SPARSE], "mlp_layer_types": ["dense"] * 3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256,
}  # fmt: skip
IDS = 3 + torch.stack([torch.randperm(75, generator=torch.Generator().manual_seed(i))[:70] for i in range(3)])  # no token twice: no ties


def pair(seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> tuple[Any, Any]:
    """Return a model with eager attention, and its patched copy."""
    torch.manual_seed(seed)
    config = transformers.models.minimax_m3_vl.MiniMaxM3VLTextConfig(**{**SIZES, **sizes}, attn_implementation="eager")
    eager = transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLForCausalLM(config).eval().to(dtype)
    ours = copy.deepcopy(eager)
    patch_model(ours)
    return eager, ours


@pytest.mark.parametrize("cuts", [(70,), (20, 21, 22, 50, 70), (1, 2, 52, 70)], ids=str)
@pytest.mark.parametrize(
    "mask", [None, padded(IDS, 65, 70, 30), padded(IDS, 70, 9, 41, right=True)], ids=["no mask", "padding before", "padding after"]
)
def test_logits_equal_the_models_own(mask: Tensor | None, cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of padding, too: the model's indexer reads its keys."""
    monkeypatch.setenv("NSA_SEL_BACKEND", "sdpa-packed")
    eager, ours = pair()
    with torch.no_grad():
        torch.testing.assert_close(logits(ours, IDS, mask, cuts), logits(eager, IDS, mask, cuts), atol=1e-6, rtol=0)
    assert [str(decision.forward) for decision in list(decisions())[-2:]] == ["choose-torch", "sdpa-packed"]


def test_every_gradient_equals_the_models_own() -> None:
    check_gradients(pair(), IDS, padded(IDS, 65, 70, 66))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampling"])
def test_generated_tokens_equal_the_models_own(options: dict[str, Any]) -> None:
    check_generation(pair(), IDS[:, :40], padded(IDS, 65, 70, 38)[:, :40], 64, **options)


@pytest.mark.parametrize("shard", range(4))
def test_random_sizes_equal_the_models_own(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEL_BACKEND", "sdpa-packed")
    for seed in range(shard, 200, 4):
        draw = random.Random(seed)
        groups, index_dim, layers = draw.choice((1, 2, 4)), draw.choice((8, 16)), draw.choice((1, 2))
        sizes = {
            "num_key_value_heads": groups, "index_n_heads": groups, "num_attention_heads": groups * draw.choice((1, 3, 4)),
            "index_head_dim": index_dim, "index_block_size": draw.choice((4, 8, 16)), "index_topk_blocks": draw.randint(2, 6),
            "index_local_blocks": draw.randint(0, 2), "num_hidden_layers": layers, "mlp_layer_types": ["dense"] * layers,
            "layer_types": [draw.choice(("full_attention", SPARSE)) for _ in range(layers - 1)] + [SPARSE],
        }  # fmt: skip
        mask = draw.choice((None, padded(IDS, *(draw.randint(1, 70) for _ in range(3)), right=draw.random() < 0.5)))
        cut = draw.randint(1, 69)
        eager, ours = pair(seed, **sizes)
        with torch.no_grad():
            got, wanted = (logits(model, IDS, mask, (cut, 70)) for model in (ours, eager))
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0, msg=lambda words, seed=seed: f"seed {seed}: {words}")


def test_a_patched_model_keeps_its_weights_and_can_be_undone() -> None:
    eager, ours = pair()
    before = list(eager.state_dict())
    patched = patch_model(eager)
    assert list(eager.state_dict()) == before
    assert list(patched.changed) == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert "3 of the blocks of 8 keys" in str(patched)
    assert eager.config._attn_implementation == "nsa_sel"
    patched.undo()
    assert eager.config._attn_implementation == "eager"
    assert all("forward" not in layer.self_attn.indexer.__dict__ for layer in eager.model.layers[1:])
    copied = copy.deepcopy(ours)
    assert copied.model.layers[1].self_attn.indexer.forward.__self__ is copied.model.layers[1].self_attn.indexer
    assert copied.model.layers[1].self_attn.indexer.forward.__func__ is minimax_m3.choose


def test_the_attention_alone_takes_the_models_own_blocks() -> None:
    eager, _ = pair()
    with torch.no_grad():
        wanted = eager(IDS).logits
        eager.set_attn_implementation("nsa_sel")
        torch.testing.assert_close(eager(IDS).logits, wanted, atol=1e-6, rtol=0)


def test_compiled_in_one_graph() -> None:
    eager, ours = pair()
    layer = ours.model.layers[1]
    x = torch.randn(1, 70, 32)
    rotary = ours.model.rotary_emb(x, position_ids=torch.arange(70)[None])
    call = {"position_embeddings": rotary, "attention_mask": None, "position_ids": torch.arange(70)[None]}
    with torch.no_grad():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, **call), eager.model.layers[1](x, **call), atol=1e-6, rtol=0)
        shifted = compiled(x, **{**call, "position_ids": torch.arange(5, 75)[None]})  # not the cache's slots: nothing can be raised
        assert bool(shifted.isnan().all())


def test_what_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ArgumentError, match=r"model is Linear, without a layer that selects blocks; allowed: a MiniMax-M3 or Qwen3.8 model"
    ):
        patch_model(torch.nn.Linear(2, 2))
    eager, ours = pair()
    with pytest.raises(ArgumentError, match=r"position_ids is not those of the cache's slots; allowed: 0 to 69"):
        ours(IDS, position_ids=torch.arange(5, 75)[None])
    indexer = type(eager.model.layers[1].self_attn.indexer)
    monkeypatch.setattr(indexer, "forward", lambda self, hidden_states, position_embeddings, cache, position_ids: None)  # 5.24
    patch_model(eager).undo()
    monkeypatch.setattr(indexer, "forward", lambda self, hidden_states, cache: None)
    with pytest.raises(ArgumentError, match=r"with forward\(hidden_states, cache\); allowed: one with forward\(hidden_states, pos"):
        patch_model(eager)
