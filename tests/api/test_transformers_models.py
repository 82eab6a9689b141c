"""Every causal language model of the installed transformers, made small: equal to its own eager attention, or refused in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel.compat import register_transformers
from nsa_sel.errors import ArgumentError

transformers = pytest.importorskip("transformers", reason="pip install transformers")
auto = pytest.importorskip("transformers.models.auto.modeling_auto")

SMALL = {
    "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "is_decoder": True,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "hidden_dim", "mamba_d_ssm", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "dense_intermediate_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "first_k_dense_replace", "n_group", "topk_group", "mamba_n_groups"), 1),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mamba_d_head", "mamba_d_state"), 8),
    "num_key_value_heads": 2, "kv_lora_rank": 16, "max_position_embeddings": 128, "n_positions": 128, "mamba_n_heads": 8, "mamba_expand": 2,
    "rotary_dim": 4, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "vision_config": None,
}  # fmt: skip
EQUAL = {  # these must not be refused
    "cohere", "deepseek_v3", "ernie4_5", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "granite", "granitemoe", "helium",
    "hunyuan_v1_dense", "llama", "mixtral", "nemotron", "olmo2", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen3",
    "qwen3_moe", "smollm3", "stablelm", "starcoder2", "mistral",
}  # fmt: skip
IDS = torch.randint(3, 60, (3, 20), generator=torch.Generator().manual_seed(1))


def small_config(kind: str, unset: bool) -> Any:
    """Return the configuration of `kind` with small sizes, with `unset` also those that it does not set."""
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]().get_text_config()
    own = {name for name in dir(config) if not isinstance(getattr(type(config), name, None), property)}  # the others follow from them
    sizes = {name: size for name, size in SMALL.items() if name in own and (unset or getattr(config, name) is not None)}
    if getattr(config, "num_key_value_heads", 0) == getattr(config, "num_attention_heads", None):
        sizes["num_key_value_heads"] = 4
    if getattr(config, "sliding_window", None) is not None and kind in EQUAL:
        sizes["sliding_window"] = None
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if name in own and isinstance(types := getattr(config, name), list) and types:
            sizes[name] = [types[0], types[-1]]
    return type(config)(**sizes)


def small_model(kind: str) -> Any:
    """Return a model of `kind` with random weights, or skip where general small sizes do not fit together."""
    names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    for unset in (False, True):
        try:
            config = small_config(kind, unset)
            with torch.device("meta"):
                weights = sum(weight.numel() for weight in model_class(config).parameters())
            if weights > 3e6:
                continue
            torch.manual_seed(0)
            model = model_class(config).eval()
            model(IDS)
            return model
        except Exception as error:  # whatever a configuration or a model says of sizes
            reason = f"{type(error).__name__}: {error}"
    assert kind not in EQUAL, reason
    pytest.skip("not built")


def forwards(model: Any) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield names of ways to run IDS, and functions that return the logits of its tokens."""
    left, right, ones = torch.ones_like(IDS), torch.ones_like(IDS), torch.ones_like(IDS)
    left[0, :6], left[2, :3], right[0, 14:], right[2, 1:] = 0, 0, 0, 0

    def chunks(mask: Tensor, ahead: int) -> Tensor:
        past, logits = None, []
        for begin, end in ((0, 5), (5, 12), (12, 13), (13, 20)):
            out = model(IDS[:, begin:end], attention_mask=mask[:, : end + ahead], past_key_values=past, use_cache=True)
            past = out.past_key_values
            logits.append(out.logits)
        return torch.cat(logits, 1)[mask.bool()]

    yield "whole", lambda: model(IDS).logits
    yield "left", lambda: model(IDS, attention_mask=left).logits[left.bool()]
    yield "right", lambda: model(IDS, attention_mask=right).logits[right.bool()]
    yield "chunks", lambda: chunks(ones, 0)
    yield "left chunks", lambda: chunks(left, 0)
    yield "left chunks, the whole mask", lambda: chunks(left, 20)


@pytest.mark.parametrize("kind", sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_model_equals_eager_attention_or_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEL_BACKEND", "sdpa-packed")
    register_transformers(n=16, block_size=8)  # dense attention up to 128 keys
    model = small_model(kind)
    eager: dict[str, Tensor] = {}
    ran, refused = [], []
    for name, run in forwards(model):
        with torch.no_grad():
            model.set_attn_implementation("eager")
            try:
                eager[name] = run()
            except Exception:  # the model has no cache, or no padding
                continue
            if name.endswith("whole mask") and not torch.allclose(eager[name], eager["left chunks"], atol=1e-6):
                continue  # the model itself takes the mask's last columns: recurrent layers do
            model.set_attn_implementation("nsa_sel")
            try:
                got = run()
            except ArgumentError as error:
                refused.append(error)
                continue
        ran.append(name)
        torch.testing.assert_close(got, eager[name], atol=2e-5, rtol=2e-5, msg=lambda words, name=name: f"{name}: {words}")
    assert all("Remedy: " in str(error) for error in refused)
    assert kind not in EQUAL or (not refused and len(ran) > 2)
