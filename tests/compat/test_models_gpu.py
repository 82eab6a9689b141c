"""Check on a GPU that released models on nsa-sel equal their own eager code, through the kernels that users get."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from nsa_sel import decisions
from nsa_sel.errors import ArgumentError
from tests.compat.patched import assert_same_gradients, logits, padded, take_the_lowest

M3: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 128, "num_attention_heads": 8, "head_dim": 64, "rotary_dim": 32, "index_head_dim": 64,
    "index_block_size": 16,    "index_topk_blocks": 4, "max_position_embeddings": 512,
}  # fmt: skip
QSA: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 128, "num_attention_heads": 8, "head_dim": 64, "indexer_head_dim": 64, "indexer_budget": 64,
    "max_position_embeddings": 512,    "num_hidden_layers": 2, "layer_types": ["indexed_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5]},
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "sizes"), [("minimax_m3", M3), ("qwen_qsa", QSA)], ids=["minimax-m3", "qwen3.8"])
def test_a_model_equals_its_own_code(model: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits whole, padded and in chunks, every gradient, and generated tokens; float32.

    No token comes twice, so MiniMax-M3 has no ties. Qwen3.8's ReLU makes zeros, of which its code is made to take the
    lowest.
    """
    take_the_lowest(monkeypatch)
    try:
        eager, ours = (x.cuda() for x in importlib.import_module(f"tests.compat.test_{model}").pair(**sizes))
    except ArgumentError as error:
        pytest.skip(f"this transformers has another version of the model: {error}")
    ids = 3 + torch.stack([torch.randperm(390, generator=torch.Generator().manual_seed(i))[:300] for i in range(3)]).cuda()
    with torch.no_grad():
        for mask, cuts in ((None, (300,)), (padded(ids, 300, 150, 221), (300,)), (padded(ids, 300, 150, 221), (100, 101, 102, 299, 300))):
            real = 1 if mask is None else mask.unsqueeze(-1)
            torch.testing.assert_close(logits(ours, ids, mask, cuts) * real, logits(eager, ids, mask, cuts) * real, atol=1e-5, rtol=0)
            ran = [str(decision.forward) for decision in list(decisions())[-2:]]
            assert ran[0] == "choose-triton"
            assert ran[1] != "sdpa-packed"
        tokens = [x.generate(ids[:, :200], max_new_tokens=16, min_new_tokens=16, do_sample=False) for x in (eager, ours)]
    assert torch.equal(*tokens)
    for x in (eager, ours):
        x.train()(ids, labels=ids).loss.backward()
    assert_same_gradients(eager, ours, 1e-5, 1e-3)
