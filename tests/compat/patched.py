"""Shared by the tests of models that `patch_model` changes: padding, logits in chunks, and comparisons with the model's own code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def padded(ids: Tensor, *lengths: int, right: bool = False) -> Tensor:
    """Return the attention mask of sequences of these lengths, padded before their first token or after their last."""
    mask = torch.ones_like(ids)
    for row, length in zip(mask, lengths, strict=True):
        row[slice(length, None) if right else slice(0, len(row) - length)] = 0
    return mask


def logits(model: Any, ids: Tensor, mask: Tensor | None, cuts: tuple[int, ...]) -> Tensor:
    """Return logits [B,S,V] of `ids` in chunks that end at `cuts`, with positions as `generate` counts them."""
    past, parts = None, []
    for begin, end in zip((0, *cuts), cuts, strict=False):
        options = {}
        if mask is not None:
            options = {"attention_mask": mask[:, :end], "position_ids": (mask[:, :end].cumsum(-1) - 1).clamp(min=0)[:, begin:]}
        out = model(ids[:, begin:end], past_key_values=past, use_cache=len(cuts) > 1, **options)
        past = out.past_key_values
        parts.append(out.logits)
    return torch.cat(parts, 1)


def check_gradients(models: tuple[Any, Any], ids: Tensor, mask: Tensor | None) -> None:
    """Check that a training step gives both models the same gradients. No row of padding predicts a token."""
    labels = ids if mask is None else ids.masked_fill((mask == 0) | (mask.roll(1, 1) == 0), -100)
    for model in models:
        model.train()(ids, labels=labels, attention_mask=mask).loss.backward()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, atol=1e-6, rtol=1e-4, msg=lambda words, name=name: f"{name}: {words}")


def check_generation(models: tuple[Any, Any], ids: Tensor, mask: Tensor, new: int, **options: Any) -> None:
    """Check that both models generate the same `new` tokens."""
    tokens = []
    for model in models:
        torch.manual_seed(0)
        tokens.append(model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **options))
    assert torch.equal(*tokens)
