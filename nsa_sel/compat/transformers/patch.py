"""`patch_model`: released models of transformers that select blocks, on nsa-sel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch

from nsa_sel.compat.transformers import minimax_m3, qwen_qsa
from nsa_sel.compat.transformers.register import NAME, register_transformers
from nsa_sel.errors import ArgumentError

# Of the module whose forward is replaced: arguments, whose cache is `cache` from transformers 5.24 on, and what it must
# have. Models pass all arguments by position, or these by name.
M3_ARGUMENTS = ("hidden_states", "position_embeddings", "past_key_values", "position_ids")
M3_PARTS = ("q_proj", "k_proj", "q_norm", "k_norm", "head_dim", "block_size", "topk_blocks", "local_blocks", "layer_idx")
QSA_ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs")
QSA_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "head_dim", "scaling", "attention_dropout", "layer_idx")
QSA_INDEXER_PARTS = (
    "index_qk_proj", "q_layernorm", "k_layernorm", "index_n_heads", "index_kv_heads", "index_head_dim", "compress_ratio", "block_topk",
    "layer_idx",
)  # fmt: skip


@dataclass
class Patched:
    """What `patch_model` changed, by module name.

    Attributes:
        changed: how each layer attends now.
        left: layers that run the model's own code as before, and why.
    """

    changed: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _undo: list[Callable[[], object]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Put the model's own code back."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        return "\n".join(f"{name}: {rule}" for name, rule in (self.changed | self.left).items())


def patch_model(model: torch.nn.Module) -> Patched:
    """Run the layers of a transformers model that select blocks on nsa-sel, with the model's own weights.

    Takes MiniMax-M3 (`transformers.models.minimax_m3_vl`): attention over the blocks of its indexer, the indexer
    without a score for every pair of tokens, and dense attention in layers without an indexer. And Qwen3.8 (QSA,
    `transformers.models.qwen4_exp`): the attention layers with an indexer; its linear attention is left as it is.
    Prefill whole or in chunks, padded batches, `generate` over a DynamicCache, gradients. Weights, `state_dict` and the
    cache's layout stay as they are; nothing outside of the model is changed.

    Args:
        model: the model, or any module that holds such layers.

    Returns:
        What was changed, with `undo()`.

    Raises:
        ArgumentError: the model has no such layer, or its class differs from the one that this version knows.
    """
    is_qsa, patched = qwen_qsa.is_attention, Patched()
    layers: dict[str, Any] = {name: x for name, x in model.named_modules() if minimax_m3.is_attention(x) or is_qsa(x)}
    if not layers:
        remedy = (
            "for a dense model call register_transformers() and model.set_attn_implementation('nsa_sel'); docs/choosing.md lists models"
        )
        found = f"{type(model).__name__}, without a layer that selects blocks"
        raise ArgumentError("model", found, "a MiniMax-M3 or Qwen3.8 model", remedy)
    for module in layers.values():
        if is_qsa(module):
            _check_parts(module, QSA_PARTS, QSA_ARGUMENTS)
            _check_parts(module.indexer, QSA_INDEXER_PARTS)
        elif module.indexer is not None:
            _check_parts(module.indexer, M3_PARTS, M3_ARGUMENTS)
    register_transformers()
    qwen_qsa.register()
    configs: dict[int, tuple[Any, str]] = {}
    for name, module in layers.items():
        indexer = module.indexer
        if is_qsa(module):
            configs[id(module.config)] = module.config, qwen_qsa.NAME
            _replace_forward(patched, module, qwen_qsa.forward)
            rule = f"{indexer.block_topk} of the complete blocks of {indexer.compress_ratio} keys and the incomplete one"
            patched.changed[name] = f"{rule}, chosen by choose_blocks"
            continue
        configs[id(module.config)] = module.config, NAME
        if indexer is None:
            patched.changed[name] = "dense causal attention"
            continue
        _replace_forward(patched, indexer, minimax_m3.choose)
        patched.changed[name] = f"{indexer.topk_blocks} of the blocks of {indexer.block_size} keys, chosen by choose_blocks"
    for name, module in model.named_modules():
        if getattr(module, "layer_type", None) == "linear_attention" and hasattr(module, "linear_attn"):
            patched.left[f"{name}.linear_attn"] = "linear attention, which selects no keys"
    for config, implementation in configs.values():
        patched._undo.append(partial(setattr, config, "_attn_implementation", config._attn_implementation))
        config._attn_implementation = implementation
    return patched


def _check_parts(module: Any, parts: tuple[str, ...], arguments: tuple[str, ...] | None = None) -> None:
    """Raise ArgumentError for a module that lacks a part, or whose forward takes other arguments than these."""
    taken = tuple(inspect.signature(type(module).forward).parameters)[1:]
    lacking = [part for part in parts if not hasattr(module, part)]
    if lacking or (arguments and tuple("past_key_values" if name == "cache" else name for name in taken) != arguments):
        found = f"{type(module).__name__} with forward({', '.join(taken)})"
        found += f", without {', '.join(lacking)}" if lacking else ""
        allowed = f"one with forward({', '.join(arguments or taken)}), as in transformers up to 5.24"
        raise ArgumentError("model", found, allowed, "install such a version, or report the new one")


def _replace_forward(patched: Patched, module: Any, forward: Callable[..., Any]) -> None:
    module.forward = MethodType(forward, module)
    patched._undo.append(partial(module.__dict__.pop, "forward", None))
