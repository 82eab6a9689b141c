"""Check that Qwen3.8 (QSA) of transformers on nsa-sel equals its own eager code: logits, gradients, generation, chunks, padding."""

from __future__ import annotations

import copy
import inspect
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import decisions
from nsa_sel.compat import patch_model
from nsa_sel.compat.transformers import qwen_qsa
from nsa_sel.errors import ArgumentError
from tests.compat.patched import (
    DEVICES,
    check_bf16,
    check_generation,
    check_gradients,
    check_level,
    check_wrapped,
    logits,
    on,
    padded,
    take_the_lowest,
)
from tests.helpers.calls import assert_refused

transformers = pytest.importorskip("transformers", reason="pip install transformers")


pytest.importorskip("transformers.models.qwen4_exp")


QSA, LINEAR = "indexed_attention", "linear_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 80, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 4, "hc_count": 2,
    "hc_lowrank": 8, "layer_types": [QSA, LINEAR, QSA], "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8,
    "indexer_budget": 12, "indexer_compress_ratio": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
GPU_SIZES: dict[str, Any] = {  # that kernels have
    "head_dim": 64, "indexer_head_dim": 64, "hidden_size": 256,
    "rope_parameters": {**SIZES["rope_parameters"], "mrope_section": [8, 4, 4]},
}  # fmt: skip
S = 43
IDS = 3 + torch.stack([torch.randperm(75, generator=torch.Generator().manual_seed(i))[:S] for i in range(3)])
ONES = torch.ones_like(IDS)


@pytest.fixture(autouse=True)
def plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear attention without fla's kernels, and of equal scores the lower block."""
    modeling = transformers.models.qwen4_exp.modeling_qwen4_exp
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update")
    for name in names:
        function = getattr(modeling, name).__wrapped__
        taken = frozenset(inspect.signature(function).parameters)

        def run(*args: Any, function: Any = function, taken: frozenset[str] = taken, **options: Any) -> Any:
            return function(*args, **{name: value for name, value in options.items() if name in taken})

        monkeypatch.setattr(modeling, name, run)
    take_the_lowest(monkeypatch)
    monkeypatch.setenv("NSA_SEL_BACKEND", "sdpa-packed")


def pair(seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> tuple[Any, Any]:
    """Return a model with eager attention, and its patched copy."""
    torch.manual_seed(seed)
    config = transformers.models.qwen4_exp.Qwen4ExpTextConfig(**{**SIZES, **sizes}, attn_implementation="eager")
    eager = transformers.models.qwen4_exp.modeling_qwen4_exp.Qwen4ExpForCausalLM(config).eval().to(dtype)
    for layer in eager.model.layers:
        if hasattr(layer, "self_attn"):  # norms that are not those of a new model, and scores that differ
            for name in ("q_norm", "k_norm", "indexer.q_layernorm", "indexer.k_layernorm"):
                torch.nn.init.normal_(layer.self_attn.get_submodule(name).weight)
    ours = copy.deepcopy(eager)
    patch_model(ours)
    return eager, ours


def of_tokens(model: Any, mask: Tensor | None, cuts: tuple[int, ...], ids: Tensor = IDS) -> Tensor:
    """Return logits [B,S,V] in chunks that end at `cuts`; zeros in padding."""
    found = logits(model, ids, mask, cuts)
    return found if mask is None else found * mask.unsqueeze(-1)


@pytest.mark.parametrize("cuts", [(S,), (14, 15, 16, 30, S), (1, 2, 33, S)], ids=str)
@pytest.mark.parametrize(
    "mask",
    [None, padded(IDS, 40, S, 17), padded(IDS, 39, 35, S), padded(IDS, S, 9, 22, right=True)],
    ids=["no mask", "before", "whole blocks", "after"],
)
def test_logits_equal_the_models_own(mask: Tensor | None, cuts: tuple[int, ...]) -> None:
    eager, ours = pair()
    with torch.no_grad():
        torch.testing.assert_close(of_tokens(ours, mask, cuts), of_tokens(eager, mask, cuts), atol=1e-6, rtol=0)
    assert [str(decision.forward) for decision in list(decisions())[-2:]] == ["choose-torch", "sdpa-packed"]


@pytest.mark.parametrize("mask", [None, padded(IDS, 40, S, 17), padded(IDS, S, 9, 22, right=True)], ids=["no mask", "before", "after"])
def test_every_gradient_equals_the_models_own(mask: Tensor | None) -> None:
    check_gradients(pair(), IDS, mask)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampling"])
def test_generated_tokens_equal_the_models_own(options: dict[str, Any]) -> None:
    check_generation(pair(), IDS[:, :30], padded(IDS, 40, S, 17)[:, :30], 40, **options)


@pytest.mark.parametrize("shard", range(4))
def test_random_sizes_equal_the_models_own(shard: int) -> None:
    for seed in range(shard, 200, 4):
        draw = random.Random(seed)
        groups, size = draw.choice((1, 2, 4)), draw.choice((1, 2, 3, 4, 8))
        sizes = {
            "num_key_value_heads": groups, "num_attention_heads": groups * draw.choice((1, 3)), "indexer_n_heads": draw.choice((1, 3, 4)),
            "indexer_head_dim": draw.choice((8, 16)), "indexer_compress_ratio": size, "indexer_budget": size * draw.randint(1, 5),
            "num_hidden_layers": 1, "layer_types": [QSA],
        }  # fmt: skip
        ids = IDS[:2, : draw.choice((9, 21))]
        if seed % 9 == 0:  # the model's own indexer takes 0.1 ms for a row
            ids, sizes["num_hidden_layers"], sizes["layer_types"] = IDS, 2, [QSA, draw.choice((QSA, LINEAR, LINEAR))]
        rows = ids.shape[1]
        mask = draw.choice((None, padded(ids, *(draw.randint(1, rows) for _ in ids), right=draw.random() < 0.4)))
        cuts = (draw.randint(1, rows - 1), rows)
        eager, ours = pair(seed, **sizes)
        with torch.no_grad():
            got, wanted = (of_tokens(model, mask, cuts, ids) for model in (ours, eager))
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0, msg=lambda words, seed=seed: f"seed {seed}: {words}")


def test_index_keys_of_complete_blocks_are_computed_once() -> None:
    """As long as the model itself extends the cache; beams, crops and other padding compute them again."""
    _, ours = pair(layer_types=[QSA] * 3)
    norm, computed = ours.model.layers[0].self_attn.indexer.k_layernorm, []
    norm.register_forward_hook(lambda module, inputs, output: computed.append(output.shape[1]))
    past = None
    with torch.no_grad():
        for begin, end in ((0, 30), (30, 31), (31, 32), (32, S - 1)):
            past = ours(IDS[:, begin:end], past_key_values=past, use_cache=True).past_key_values
        past.crop(-1)
        whole = ours(IDS[:, S - 2 :], past_key_values=past).logits
        assert computed == [8, 1, 3, 11]  # the second step completes no block
        torch.testing.assert_close(whole, ours(IDS).logits[:, S - 2 :], atol=1e-6, rtol=0)


def test_index_keys_follow_the_padding() -> None:
    """A call that pads other slots of the cache than the one before gets what it gets without kept index keys."""
    _, ours = pair(layer_types=[QSA] * 3)
    found = []
    with torch.no_grad():
        for forgets in (False, True):
            past = ours(IDS[:, :30], use_cache=True).past_key_values
            for layer in past.layers if forgets else ():
                delattr(layer, qwen_qsa.KEPT)
            found.append(ours(IDS[:, 30:], past_key_values=past, attention_mask=padded(IDS, S - 2, S, S)).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_as_near_to_float64_as_the_models_own(autocast: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose rows choose all blocks and all experts, so that rounding changes no choice."""
    sizes = GPU_SIZES if on(device, monkeypatch) == "cuda" else {}
    all_chosen = {"indexer_budget": 64, "num_experts_per_tok": 4, "experts_implementation": "eager"}
    exact, ours = (model.to(device) for model in pair(dtype=torch.float64, **sizes, **all_chosen))
    ids = IDS.to(device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
        with torch.autocast(device, enabled=False):
            wanted = exact(ids).logits
        check_bf16(wanted, *(model.to(torch.float32 if autocast else torch.bfloat16)(ids).logits for model in (exact, ours)))


@pytest.mark.parametrize("device", DEVICES)
def test_other_blocks_are_chosen_only_where_scores_are_level(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = GPU_SIZES if on(device, monkeypatch) == "cuda" else {}
    model, ours = (model.to(device) for model in pair(dtype=torch.bfloat16, **sizes))
    eager, ours = (x.model.layers[0].self_attn.indexer for x in (model, ours))
    S, size, D = 200, 4, eager.index_head_dim
    hidden, positions = torch.randn(1, S, model.config.hidden_size, device=device).bfloat16(), torch.arange(S, device=device)
    rotary = model.model.rotary_emb(hidden, position_ids=positions.expand(3, 1, S))
    seen = positions <= positions[:, None]
    with torch.no_grad():
        theirs = eager(hidden, rotary, seen[None, None], None)[0, 0]  # [S,S]
        start, stop = qwen_qsa.choose(ours, hidden, rotary, None, None).ranges[0, :, 0].unsqueeze(1).unbind(-1)  # [S,1,n]
        mine = ((start <= positions[:, None]) & (positions[:, None] < stop)).any(-1) & seen
        q = eager.q_layernorm(eager.index_qk_proj(hidden)[..., :-D].unflatten(2, (-1, D)))
        q = transformers.models.qwen4_exp.modeling_qwen4_exp.apply_rotary_pos_emb(q, cos=rotary[0], sin=rotary[1], unsqueeze_dim=2)
        k = qwen_qsa.index_keys(eager, eager.index_qk_proj(hidden)[..., -D:], rotary, None, None)[0]
    assert torch.equal(theirs.sum(1), mine.sum(1))
    scores = (q[0].double() @ k[0, 0].double().T).relu().sum(1)  # [S,blocks]
    scores = scores.masked_fill(positions[size - 1 :: size] > positions[:, None], -torch.inf)
    blocks = (x.unflatten(1, (-1, size)).all(-1) & scores.isfinite() for x in (theirs, mine))
    assert check_level(*blocks, scores) < 0.02 * S


@pytest.mark.parametrize(("wrapper", "first"), [("deepcopy", False), ("checkpointing", False), ("DDP", True), ("FSDP2", True)])
def test_wrapped_models_train_as_the_models_own(wrapper: str, first: bool) -> None:
    check_wrapped(pair(num_hidden_layers=2, layer_types=[QSA, LINEAR])[0], IDS[:, :20], wrapper, first)


def test_a_patched_model_keeps_its_weights_and_can_be_undone() -> None:
    eager, ours = pair()
    before, patched = list(eager.state_dict()), patch_model(eager)
    assert list(eager.state_dict()) == before
    assert list(patched.changed) == ["model.layers.0.self_attn", "model.layers.2.self_attn"]
    assert list(patched.left) == ["model.layers.1.linear_attn"]
    assert "3 of the complete blocks of 4 keys and the incomplete one" in str(patched)
    eager.set_attn_implementation("sdpa")
    with pytest.raises(ArgumentError, match=r"attn_implementation is 'sdpa'; allowed: 'nsa_sel_qsa' in a patched model"):
        eager(IDS)
    patched.undo()
    assert eager.config._attn_implementation == "eager"
    assert "forward" not in eager.model.layers[0].self_attn.__dict__
    copied = copy.deepcopy(ours).model.layers[0].self_attn
    assert copied.forward.__self__ is copied
    assert copied.forward.__func__ is qwen_qsa.forward


def test_compiled_in_one_graph() -> None:
    eager, ours = pair()
    x = torch.randn(1, S, 32)
    rotary = ours.model.rotary_emb(x, position_ids=torch.arange(S).expand(3, 1, S))
    mask = torch.full((S, S), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        compiled = torch.compile(ours.model.layers[0].self_attn, backend="eager", fullgraph=True)
        wanted = eager.model.layers[0].self_attn(x, rotary, attention_mask=mask)[0]
        torch.testing.assert_close(compiled(x, rotary)[0], wanted, atol=1e-6, rtol=0)


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = pair()
    unpatched = copy.deepcopy(eager)
    unpatched.set_attn_implementation("nsa_sel")
    dropping = copy.deepcopy(ours).train()
    dropping.model.layers[0].self_attn.attention_dropout = 0.1
    packed = torch.cat((torch.arange(20), torch.arange(S - 20)))[None]
    assert_refused(
        (r"selects its own keys; .* Remedy: call nsa_sel.compat.patch_model\(model\), or run it with", lambda: unpatched(IDS)),
        (
            r"attention_mask is of shape \(3, 1, 43, 43\); allowed: \[B, keys\] of 0 and 1",
            lambda: ours(IDS, attention_mask=ONES[:, None, None].expand(-1, 1, S, -1).bool()),
        ),
        ("attention_mask is 0 between keys", lambda: ours(IDS, attention_mask=ONES.index_fill(1, torch.tensor([20]), 0))),
        ("position_ids or the mask is of packed sequences", lambda: ours(IDS[:1], position_ids=packed, use_cache=False)),
        (
            r"past_key_values or attention_mask .* a cache that grows",
            lambda: ours.generate(IDS[:, :9], cache_implementation="static", max_new_tokens=3),
        ),
        ("attention_dropout is 0.1; allowed: 0", lambda: dropping(IDS)),
    )
    attention = type(eager.model.layers[0].self_attn)
    newest = lambda self, hidden_states, position_embeddings, attention_mask, cache, **kwargs: None  # noqa: E731
    monkeypatch.setattr(attention, "forward", newest)
    patch_model(eager).undo()
    monkeypatch.setattr(attention, "forward", lambda self, hidden_states, cache: None)
    with pytest.raises(ArgumentError, match=r"with forward\(hidden_states, cache\); allowed: one with forward\(hidden_states, position_em"):
        patch_model(eager)
    monkeypatch.undo()
    del eager.model.layers[2].self_attn.indexer.k_layernorm
    with pytest.raises(ArgumentError, match=r"without k_layernorm"):
        patch_model(eager)
    assert "forward" not in eager.model.layers[0].self_attn.__dict__
