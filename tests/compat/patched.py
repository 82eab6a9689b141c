"""Shared by the tests of models that `patch_model` changes: padding, logits in chunks, and comparisons with the model's own code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nsa_sel import decisions
from nsa_sel.compat import patch_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def assert_same(got: Tensor, wanted: Tensor, inputs: list[Tensor]) -> None:
    do = torch.randn(got.shape, generator=torch.Generator().manual_seed(2), dtype=got.dtype)
    torch.testing.assert_close(*((x, *torch.autograd.grad(x, inputs, do)) for x in (got, wanted)), atol=1e-12, rtol=1e-10)


def padded(ids: Tensor, *lengths: int, right: bool = False) -> Tensor:
    """Return the attention mask of sequences of these lengths, padded before their first token or after their last."""
    mask = torch.ones_like(ids)
    for row, length in zip(mask, lengths, strict=True):
        row[slice(length, None) if right else slice(0, len(row) - length)] = 0
    return mask


def logits(model: Any, ids: Tensor, mask: Tensor | None, cuts: tuple[int, ...], past: Any = None) -> Tensor:
    """Return logits [B,S,V] of `ids` in chunks that end at `cuts`, with positions as `generate` counts them, over the cache `past`."""
    parts = []
    for begin, end in zip((0, *cuts), cuts, strict=False):
        options = {}
        if mask is not None:
            options = {"attention_mask": mask[:, :end], "position_ids": (mask[:, :end].cumsum(-1) - 1).clamp(min=0)[:, begin:]}
        out = model(ids[:, begin:end], past_key_values=past, use_cache=past is not None or len(cuts) > 1, **options)
        past = out.past_key_values
        parts.append(out.logits)
    return torch.cat(parts, 1)


def on(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device; on a GPU with the backends that the policy chooses there."""
    if device == "cuda":
        monkeypatch.delenv("NSA_SEL_BACKEND")
    return device


def check_bf16(wanted: Tensor, theirs: Tensor, ours: Tensor) -> None:
    """Check that the error against float64 is at most twice that of the model's own code."""
    theirs, ours = ((x.double() - wanted).abs() for x in (theirs, ours))
    assert ours.mean() <= 2 * theirs.mean()
    assert ours.max() <= 2 * theirs.max()


def check_level(theirs: Tensor, ours: Tensor, scores: Tensor) -> int:
    """Return how many rows chose other blocks than the model, of `scores`; check that those score the same up to rounding.

    Args:
        theirs, ours: [...,blocks] bool, of the chosen blocks.
        scores: [...,blocks] float64; -inf where a block cannot be chosen, and inf where it must be.
    """
    assert torch.equal(theirs.sum(-1), ours.sum(-1))
    rows = (theirs != ours).any(-1)
    level = scores[rows].isfinite()
    worst, best = (scores[rows].masked_fill(~(x[rows] & ~y[rows] & level), z) for x, y, z in ((ours, theirs, 9e9), (theirs, ours, -9e9)))
    assert bool((best.amax(-1) - worst.amin(-1) <= 1e-5 * scores[scores.isfinite()].abs().max()).all())
    return int(rows.sum())


def assert_same_gradients(model: Any, other: Any, atol: float = 1e-6, rtol: float = 1e-4) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            got = theirs.grad.full_tensor() if isinstance(theirs.grad, DTensor) else theirs.grad
            torch.testing.assert_close(got, mine.grad, atol=atol, rtol=rtol, msg=lambda words, name=name: f"{name}: {words}")


def take_the_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Qwen3.8's own code take, of equal scores, the lower block: torch.topk promises none, and ReLU makes many zeros."""
    topk = torch.Tensor.topk

    def lowest(x: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        if dim != 0:
            return topk(x, k, dim, **options)
        return torch.return_types.topk([y[:k] for y in x.sort(dim=0, descending=True, stable=True)])

    monkeypatch.setattr(torch.Tensor, "topk", lowest)


def check_gradients(models: tuple[Any, Any], ids: Tensor, mask: Tensor | None) -> None:
    """Check that a training step gives both models the same gradients. No row of padding predicts a token."""
    labels = ids if mask is None else ids.masked_fill((mask == 0) | (mask.roll(1, 1) == 0), -100)
    for model in models:
        model.train()(ids, labels=labels, attention_mask=mask).loss.backward()
    assert_same_gradients(*models)


def check_generation(models: tuple[Any, Any], ids: Tensor, mask: Tensor, new: int, **options: Any) -> None:
    tokens = []
    for model in models:
        torch.manual_seed(0)
        tokens.append(model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **options))
    assert torch.equal(*tokens)


def check_shorter_prompt(model: Any, ids: Tensor, shorter: int, new: int) -> None:
    """Check that of two prompts, of which one is padded on the left, a model generates what it does of each alone, without a cache."""
    lengths = ids.shape[1], ids.shape[1] - shorter
    with torch.no_grad():
        found = model.generate(ids, attention_mask=padded(ids, *lengths), max_new_tokens=new, do_sample=False, pad_token_id=0)
        for row, tokens, length in zip(found, ids, lengths, strict=True):
            known = tokens[None, -length:]
            for _ in range(new):
                known = torch.cat((known, model(known, use_cache=False).logits[:, -1:].argmax(-1)), 1)
            assert torch.equal(row[-length - new :], known[0])


def sharded(model: Any) -> Any:
    """Return a model under FSDP2 on one process of the CPU, each attention layer by itself."""
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer.self_attn if hasattr(layer, "self_attn") else layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "checkpointing": checkpointed,
    "DDP": lambda model: DistributedDataParallel(model, find_unused_parameters=True),  # indexers have no gradient
    "FSDP2": sharded,
}


def check_wrapped(eager: Any, ids: Tensor, wrapper: str, first: bool) -> None:
    """Check loss and gradients of a model that is wrapped first and then patched, or the other way round."""
    ours = copy.deepcopy(eager).train()
    wanted = eager.train()(ids, labels=ids).loss
    wanted.backward()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        if not first:
            patch_model(ours)
        ours = WRAPPERS[wrapper](ours)
        if first:
            patch_model(ours)
        before = (None, *decisions())[-1]
        loss = ours(ids, labels=ids).loss
        loss.backward()
        assert decisions()[-1] is not before
        torch.testing.assert_close(loss, wanted)
        assert_same_gradients(eager, ours)
    finally:
        torch.distributed.destroy_process_group()
