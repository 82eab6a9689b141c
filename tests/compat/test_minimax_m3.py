"""Check that MiniMax-M3 of transformers on nsa-sel equals its own eager code: logits, gradients, generation, chunks, padding."""

from __future__ import annotations

import copy
import pickle
import random
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import decisions
from nsa_sel.compat import patch_model
from nsa_sel.compat.transformers import minimax_m3
from nsa_sel.errors import ArgumentError
from tests.compat.patched import (
    DEVICES,
    WRAPPERS,
    check_bf16,
    check_generation,
    check_gradients,
    check_level,
    check_wrapped,
    logits,
    on,
    padded,
)
from tests.helpers.calls import assert_refused, calls_of

transformers = pytest.importorskip("transformers", reason="pip install transformers")


pytest.importorskip("transformers.models.minimax_m3_vl")


SPARSE = "minimax_m3_sparse"
SIZES: dict[str, Any] = {
    "vocab_size": 80, "hidden_size": 32, "dense_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 8,
    "index_topk_blocks": 3, "layer_types": ["full_attention", SPARSE, SPARSE], "mlp_layer_types": ["dense"] * 3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256,
}  # fmt: skip
GPU_SIZES: dict[str, Any] = {  # that kernels have
    "head_dim": 64, "rotary_dim": 32, "index_head_dim": 64, "index_block_size": 64, "hidden_size": 256, "max_position_embeddings": 512,
}  # fmt: skip
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": [SPARSE], "mlp_layer_types": ["dense"]}
IDS = 3 + torch.stack([torch.randperm(75, generator=torch.Generator().manual_seed(i))[:70] for i in range(3)])  # no token twice: no ties


pytestmark = pytest.mark.usefixtures("packed_sdpa")


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
def test_logits_equal_the_models_own(mask: Tensor | None, cuts: tuple[int, ...]) -> None:
    """Logits of padding are equal, too, because the model's indexer reads its keys."""
    eager, ours = pair()
    with torch.no_grad():
        torch.testing.assert_close(logits(ours, IDS, mask, cuts), logits(eager, IDS, mask, cuts), atol=1e-6, rtol=0)
    assert [str(decision.forward) for decision in list(decisions())[-2:]] == ["choose-torch", "sdpa-packed"]


def test_every_gradient_equals_the_models_own() -> None:
    check_gradients(pair(), IDS, padded(IDS, 65, 70, 66))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampling"])
def test_generated_tokens_equal_the_models_own(options: dict[str, Any]) -> None:
    check_generation(pair(), IDS[:, :40], padded(IDS, 65, 70, 38)[:, :40], 64, **options)


@pytest.mark.parametrize("mask", [None, padded(IDS, 65, 70, 30)], ids=["no mask", "padding before"])
def test_a_static_cache_is_read_where_it_is(mask: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    read = calls_of(monkeypatch, minimax_m3, "selection_attention")
    models = pair()
    caches = [transformers.StaticCache(config=model.config, max_cache_len=83) for model in models]
    with torch.no_grad():
        wanted, got = (logits(model, IDS, mask, (20, 21, 22, 50, 70), cache) for model, cache in zip(models, caches, strict=True))
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)
    assert {k.data_ptr() for _, k, *_ in read} == {layer.keys.data_ptr() for layer in caches[1].layers}


@pytest.mark.parametrize(("compiled", "beams"), [(False, {}), (False, {"num_beams": 2}), (True, {})], ids=["greedy", "beams", "compiled"])
def test_tokens_generated_over_a_static_cache_equal_the_models_own(compiled: bool, beams: dict[str, int]) -> None:
    models = pair(**(ONE_LAYER if compiled else {}))
    if compiled:  # as transformers does on a GPU; no step may wait for it
        config = transformers.CompileConfig(backend="eager", mode=None, fullgraph=True)
        config._compile_all_devices = True
        models[1].generation_config.compile_config = config
    check_generation(models, IDS[:, :40], padded(IDS, 65, 70, 38)[:, :40], 30, cache_implementation="static", **beams)


def test_a_step_over_a_static_cache_without_padding_is_one_graph() -> None:
    """Masks, too, which `generate` makes outside of the graph."""
    eager, ours = pair(**ONE_LAYER)
    cache = transformers.StaticCache(config=ours.config, max_cache_len=83)
    with torch.no_grad():
        got = [ours(IDS[:, :67], past_key_values=cache).logits]
        step = torch.compile(ours, backend="eager", fullgraph=True)
        got += [step(IDS[:, i : i + 1], past_key_values=cache).logits for i in range(67, 70)]
        torch.testing.assert_close(torch.cat(got, 1), eager(IDS).logits, atol=1e-6, rtol=0)


@pytest.mark.gpu
def test_a_step_over_a_static_cache_is_captured_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    on("cuda", monkeypatch)
    ours = pair(dtype=torch.bfloat16, **GPU_SIZES)[1].cuda()
    ids = torch.randint(3, 80, (2, 300), device="cuda")
    cache = transformers.StaticCache(config=ours.config, max_cache_len=384)
    with torch.no_grad():
        wanted = ours(ids).logits[:, -1:]
        ours(ids[:, :298], past_key_values=cache)
        token = ids[:, 298:299].clone()
        ours(token, past_key_values=cache)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = ours(token, past_key_values=cache).logits
        token.copy_(ids[:, 299:])
        graph.replay()
    assert (got - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize(("wrapper", "first"), [(w, f) for w in WRAPPERS for f in (False, True) if w != "deepcopy" or not f])
def test_wrapped_models_train_as_the_models_own(wrapper: str, first: bool) -> None:
    check_wrapped(pair()[0], IDS[:, :40], wrapper, first)


def test_a_loaded_model_is_patched_and_saved(tmp_path: Path) -> None:
    eager, _ = pair()
    eager.save_pretrained(tmp_path / "own")
    ours = type(eager).from_pretrained(tmp_path / "own").eval()
    patched = patch_model(ours)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, eager(IDS).logits, atol=1e-6, rtol=0)
    ours.save_pretrained(tmp_path / "patched")
    patched.undo()
    again = type(eager).from_pretrained(tmp_path / "patched").eval()
    assert again.config._attn_implementation == ours.config._attn_implementation == "sdpa"
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in eager.state_dict().items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_as_near_to_float64_as_the_models_own(autocast: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the blocks that the float64 model chooses."""
    sizes = GPU_SIZES if on(device, monkeypatch) == "cuda" else {}
    exact, ours = (model.to(device) for model in pair(dtype=torch.float64, **sizes))
    ids = torch.randint(3, 80, (2, 500), device=device) if sizes else IDS
    found: list[Tensor] = []
    hooks = [layer.self_attn.indexer.register_forward_hook(lambda *call: found.append(call[-1])) for layer in exact.model.layers[1:]]
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
        with torch.autocast(device, enabled=False):
            wanted = exact(ids).logits
        for hook in hooks:
            hook.remove()
        for model in (exact, ours):
            model.to(torch.float32 if autocast else torch.bfloat16)
            for layer, blocks in zip(model.model.layers[1:], found, strict=True):
                layer.self_attn.indexer.forward = lambda *args, blocks=blocks, **options: blocks
        check_bf16(wanted, exact(ids).logits, ours(ids).logits)


@pytest.mark.parametrize("device", DEVICES)
def test_other_blocks_are_chosen_only_where_scores_are_level(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = GPU_SIZES if on(device, monkeypatch) == "cuda" else {}
    model, ours = (model.to(device) for model in pair(dtype=torch.bfloat16, **sizes))
    eager, ours = (x.model.layers[1].self_attn.indexer for x in (model, ours))
    S, size, positions = 50 * eager.block_size, eager.block_size, torch.arange(50 * eager.block_size, device=device)
    hidden = torch.randn(2, S, model.config.hidden_size, device=device).bfloat16()
    rotary = model.model.rotary_emb(hidden, position_ids=positions.expand(2, S))
    with torch.no_grad():
        blocks = [indexer(hidden, rotary, None, positions.expand(2, S)) for indexer in (eager, ours)]  # [B,G,S,n], -1 is none
        chosen = [torch.zeros(2, 2, S, 51, dtype=torch.bool, device=device).scatter_(-1, i % 51, True)[..., :-1] for i in blocks]
        heads = [getattr(eager, f"{x}_proj")(hidden).unflatten(2, (-1, eager.head_dim)) for x in "qk"]
        q, k = (norm(x).transpose(1, 2) for norm, x in zip((eager.q_norm, eager.k_norm), heads, strict=True))
        rotary = tuple(x[..., : eager.head_dim] for x in rotary)
        q, k = transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.apply_rotary_pos_emb(q, k, *rotary)
    scores = (q.double() @ k.double().transpose(2, 3)).masked_fill(positions > positions[:, None], -torch.inf)
    scores = scores.unflatten(3, (-1, size)).amax(-1)
    scores = scores.masked_fill(positions[:, None] // size == torch.arange(50, device=device), torch.inf)  # forced
    assert check_level(*chosen, scores) < 0.01 * 4 * S


@pytest.mark.parametrize("shard", range(4))
def test_random_sizes_equal_the_models_own(shard: int) -> None:
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
    with pytest.raises(ArgumentError, match=r"model is pickled with patched layers; .* Remedy: save its state_dict, or call undo\(\)"):
        pickle.dumps(eager)
    patched.undo()
    assert eager.config._attn_implementation == "eager"
    assert type(pickle.loads(pickle.dumps(eager))) is type(eager)
    assert all("forward" not in layer.self_attn.indexer.__dict__ for layer in eager.model.layers[1:])
    indexer = copy.deepcopy(ours).model.layers[1].self_attn.indexer
    assert indexer.forward.__self__ is indexer
    assert indexer.forward.__func__ is minimax_m3.choose


def test_the_attention_alone_takes_the_models_own_blocks() -> None:
    eager, _ = pair()
    with torch.no_grad():
        wanted = eager(IDS).logits
        eager.set_attn_implementation("nsa_sel")
        torch.testing.assert_close(eager(IDS).logits, wanted, atol=1e-6, rtol=0)


def test_compiled_layers_share_their_code() -> None:
    """Else torch._dynamo's limit of 8 compilations would leave the later layers of the model as they are."""
    _, ours = pair(num_hidden_layers=4, layer_types=[SPARSE] * 4, mlp_layer_types=["dense"] * 4)
    wanted = ours(IDS, use_cache=False).logits
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in ours.model.layers:
        layer.self_attn.compile(backend="eager")
    torch.testing.assert_close(ours(IDS, use_cache=False).logits, wanted, atol=1e-6, rtol=0)
    assert torch._dynamo.utils.counters["frames"]["ok"] == 1


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


def test_continuous_batching_has_no_index_keys_and_is_refused() -> None:
    eager, ours = pair(**ONE_LAYER)
    if not hasattr(eager, "generate_batch"):
        pytest.skip("transformers without continuous batching")
    for model, message in ((eager, SPARSE), (ours, "nsa_sel is not supported for continuous batching")):
        with pytest.raises(ValueError, match=message):
            model.generate_batch(IDS[:2].tolist())


def test_what_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = pair()
    static = transformers.StaticCache(config=ours.config, max_cache_len=80)
    ours(IDS[:, :30], past_key_values=static)
    slots = "position_ids is not those of the cache's slots; allowed: "
    assert_refused(
        (
            "model is Linear, without a layer that selects blocks; allowed: a MiniMax-M3 or Qwen3.8 model, or NSA",
            lambda: patch_model(torch.nn.Linear(2, 2)),
        ),
        ("model is a MiniMaxM3VLTextConfig; allowed: a torch.nn.Module", lambda: patch_model(eager.config)),
        ("config.index_n_heads is 1; allowed: 2, the KV heads", lambda: pair(index_n_heads=1)),
        (f"{slots}0 to 69", lambda: ours(IDS, position_ids=torch.arange(5, 75)[None])),
        (f"{slots}30 to 69", lambda: ours(IDS[:, 30:], past_key_values=static, position_ids=torch.arange(5, 45)[None])),
        (
            "attention_mask is of more than the 1 keys; .* pass the cache of the earlier tokens",
            lambda: ours(IDS[:, :1], attention_mask=torch.ones_like(IDS), use_cache=False),
        ),
    )
    with monkeypatch.context() as older:
        older.setattr(metadata, "version", lambda package: "5.16.1")
        assert_refused(("transformers is 5.16.1; allowed: 5.17 or newer", lambda: patch_model(eager)))
    indexer = type(eager.model.layers[1].self_attn.indexer)
    monkeypatch.setattr(indexer, "forward", lambda self, hidden_states, position_embeddings, cache, position_ids: None)  # 5.24
    patch_model(eager).undo()
    monkeypatch.setattr(indexer, "forward", lambda self, hidden_states, cache: None)
    with pytest.raises(ArgumentError, match=r"with forward\(hidden_states, cache\); allowed: one with forward\(hidden_states, pos"):
        patch_model(eager)
