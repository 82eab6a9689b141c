"""`patch_model`: run the layers of a loaded model that nsa-sel knows on nsa-sel, and say what was changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch

from nsa_sel.compat.transformers import minimax_m3
from nsa_sel.compat.transformers.register import NAME, register_transformers
from nsa_sel.errors import ArgumentError

INDEXER_ARGUMENTS = ("hidden_states", "position_embeddings", "past_key_values", "position_ids")
INDEXER_PARTS = ("q_proj", "k_proj", "q_norm", "k_norm", "head_dim", "block_size", "topk_blocks", "local_blocks", "layer_idx")


@dataclass
class Patched:
    """What `patch_model` changed, by module name.

    Attributes:
        changed: how each layer attends now.
        left: layers that stay as they were, and why.
    """

    changed: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _undo: list[Callable[[], object]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Put the model's own code back."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        lines = [f"{name}: {rule}" for name, rule in self.changed.items()]
        return "\n".join([*lines, *(f"{name}: left as it is, {why}" for name, why in self.left.items())])


def patch_model(model: torch.nn.Module) -> Patched:
    """Run the layers of a transformers model that select blocks on nsa-sel, with the model's own weights.

    Takes MiniMax-M3 (`transformers.models.minimax_m3_vl`): attention over the blocks of its indexer, the indexer without a score for
    every pair of tokens, and dense attention in layers without an indexer. Prefill whole or in chunks, padded batches, `generate`,
    gradients. Weights, `state_dict` and the cache's layout stay as they are; nothing outside of the model is changed.

    Args:
        model: the model, or any module that holds such layers.

    Returns:
        What was changed, with `undo()`.

    Raises:
        ArgumentError: the model has no such layer, or its class differs from the one that this version knows.
    """
    register_transformers()
    patched = Patched()
    configs: dict[int, Any] = {}
    for name, module in model.named_modules():
        if not minimax_m3.is_attention(module):
            continue
        configs[id(module.config)] = module.config
        if module.indexer is None:
            patched.changed[name] = "dense causal attention"
            continue
        indexer = module.indexer
        _check_indexer(indexer)
        indexer.forward = MethodType(minimax_m3.choose, indexer)
        patched._undo.append(partial(indexer.__dict__.pop, "forward", None))
        patched.changed[name] = f"{indexer.topk_blocks} of the blocks of {indexer.block_size} keys, chosen by choose_blocks"
    if not patched.changed:
        remedy = (
            "for a dense model call register_transformers() and model.set_attn_implementation('nsa_sel'); docs/choosing.md lists models"
        )
        raise ArgumentError("model", f"{type(model).__name__}, without a layer that selects blocks", "a MiniMax-M3 model", remedy)
    for config in configs.values():
        patched._undo.append(partial(setattr, config, "_attn_implementation", config._attn_implementation))
        config._attn_implementation = NAME
    return patched


def _check_indexer(indexer: Any) -> None:
    """Raise ArgumentError for an indexer with other parts or arguments than those that `minimax_m3.choose` reads."""
    parameters = tuple(inspect.signature(type(indexer).forward).parameters)[1:]
    lacking = [part for part in INDEXER_PARTS if not hasattr(indexer, part)]
    if lacking or parameters != INDEXER_ARGUMENTS:
        found = f"{type(indexer).__name__} with forward({', '.join(parameters)})" + (f", without {', '.join(lacking)}" if lacking else "")
        allowed = f"an indexer with forward({', '.join(INDEXER_ARGUMENTS)}), as in transformers 5.17 to 5.24"
        raise ArgumentError("model", found, allowed, "install a transformers version in that range, or report the new one")
