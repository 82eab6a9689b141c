"""`patch_model`: run the attention layers of a loaded model on nsa-sel, with nothing changed outside of the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch

from nsa_sel.compat import fla
from nsa_sel.compat.transformers import minimax_m3, qwen_qsa, register
from nsa_sel.compat.transformers.register import NAME, register_transformers
from nsa_sel.errors import ArgumentError

# Arguments and required attributes of each module whose forward is replaced. transformers 5.24 renames the cache
# argument to `cache`. Models pass all arguments by position, or these by name.
M3_ARGUMENTS = ("hidden_states", "position_embeddings", "past_key_values", "position_ids")
M3_PARTS = ("q_proj", "k_proj", "q_norm", "k_norm", "head_dim", "block_size", "topk_blocks", "local_blocks", "layer_idx")
QSA_ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs")
QSA_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "head_dim", "scaling", "attention_dropout", "layer_idx")
QSA_INDEXER_PARTS = (
    "index_qk_proj", "q_layernorm", "k_layernorm", "index_n_heads", "index_kv_heads", "index_head_dim", "compress_ratio", "block_topk",
    "layer_idx",
)  # fmt: skip

DENSE = "dense causal attention; dense=True selects blocks"


@dataclass
class Patched:
    """Record what `patch_model` changed, by module name.

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
        self.changed.clear()
        self.left.clear()

    def __str__(self) -> str:
        left = {name: f"left as it is: {why}" for name, why in self.left.items()}
        return "\n".join(f"{name or '(the module itself)'}: {rule}" for name, rule in (self.changed | left).items())


def patch_model(model: torch.nn.Module, *, dense: bool = False) -> Patched:
    """Run the layers of a model that select blocks on nsa-sel, with the model's own weights.

    Takes

    - MiniMax-M3 (`transformers.models.minimax_m3_vl`): attention over the blocks of its indexer, the indexer without a
      score for every pair of tokens, and dense attention in layers without an indexer;
    - Qwen3.8 (QSA, `transformers.models.qwen4_exp`): the attention layers with an indexer;
    - flash-linear-attention's `NativeSparseAttention` and `MoBA` layers, and their models' cache as `cache=`, as
      `patch_fla` does for all models of the process;
    - with dense=True, the dense causal attention of any model that supports `attn_implementation="nsa_sel"`, which
      then selects blocks without training (`register_transformers`, with its sizes). MiniMax-M3's stays dense.

    Prefill whole or in chunks, padded batches, `generate`, gradients. Weights, `state_dict` and the cache's layout stay
    as they are; nothing outside of the model is changed. A copy of a patched model is patched, too.

    Args:
        model: the model, or any module that holds such layers.
        dense: also change layers with dense causal attention.

    Returns:
        What was changed, with `undo()`.

    Raises:
        ArgumentError: the model has no such layer, its class differs from the one that this version knows, transformers
            is older than 5.17 (MiniMax-M3), or torch sees no GPU (flash-linear-attention).
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError("model", f"a {type(model).__name__}", "a torch.nn.Module", "load it first, for example by from_pretrained")
    patched = Patched()
    try:
        for name, module in model.named_modules():
            _patch_module(patched, name, module, dense)
        if not patched.changed:
            found = f"{type(model).__name__}, without a layer that selects blocks"
            remedy = "pass dense=True to select blocks in its dense attention, without training"
            remedy = remedy if DENSE in patched.left.values() else "docs/choosing.md lists models"
            raise ArgumentError("model", found, "a MiniMax-M3 or Qwen3.8 model, or NSA or MoBA of flash-linear-attention", remedy)
    except Exception:
        patched.undo()
        raise
    return patched


def _patch_module(patched: Patched, name: str, module: Any, dense: bool) -> None:
    """Run one module on nsa-sel if it is a layer that `patch_model` takes, and record what it is."""
    if qwen_qsa.is_attention(module):
        indexer = module.indexer
        _check_parts(module, QSA_PARTS, QSA_ARGUMENTS)
        _check_parts(indexer, QSA_INDEXER_PARTS)
        _replace_forward(patched, module, qwen_qsa.forward)
        _set_implementation(patched, module.config, qwen_qsa.NAME)
        rule = f"{indexer.block_topk} of the complete blocks of {indexer.compress_ratio} keys and the incomplete one"
        patched.changed[name] = f"{rule}, chosen by choose_blocks"
    elif minimax_m3.is_attention(module):
        indexer, patched.changed[name] = module.indexer, "dense causal attention"
        if indexer is not None:
            minimax_m3.check_transformers()
            _check_parts(indexer, M3_PARTS, M3_ARGUMENTS)
            heads, groups = (x.out_features // x_dim for x, x_dim in ((indexer.q_proj, indexer.head_dim), (module.k_proj, module.head_dim)))
            if heads != groups:
                raise ArgumentError(
                    "config.index_n_heads", heads, f"{groups}, the KV heads", "run this model with attn_implementation='sdpa'"
                )
            _replace_forward(patched, indexer, minimax_m3.choose)
            patched.changed[name] = f"{indexer.topk_blocks} of the blocks of {indexer.block_size} keys, chosen by choose_blocks"
        _set_implementation(patched, module.config, NAME)
    elif fla.is_layer(module):
        if getattr(module, "use_flash_moba", False):
            patched.left[name] = "MoBA by FlashMoBA: use_flash_moba is set"
        else:
            _replace_forward(patched, module, fla.forward_on_nsa_sel(module))
            patched.changed[name] = fla.rule_of(module)
    elif fla.drops_cache(module):
        _replace_forward(patched, module, fla.taking_cache(type(module).forward))
        patched.changed[name] = "takes its cache as cache=, too"
    elif register.is_attention(module):
        config = module.config
        register.check_model(config)
        if not getattr(module, "is_causal", True):
            patched.left[name] = "attention that is not causal"
        elif not dense:
            patched.left[name] = DENSE
        else:
            of_all_layers = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
            if getattr(module, "sliding_window", of_all_layers) is not None:
                found = f"{type(module).__name__} with a sliding window in {name}"
                raise ArgumentError("model", found, "full causal attention in all layers", register.ANOTHER)
            _set_implementation(patched, config, NAME)
            n, size = register.registered_sizes["n"], register.registered_sizes["block_size"]
            patched.changed[name] = f"{n} of the blocks of {size} keys, chosen by their mean keys; dense up to {n * size} keys"
    elif getattr(module, "layer_type", None) == "linear_attention" and hasattr(module, "linear_attn"):
        patched.left[f"{name}.linear_attn"] = "linear attention, which selects no keys"


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
    before = module.__dict__.get("forward")
    module.forward = MethodType(forward, module)  # copy.deepcopy binds it to the copy, and torch.compile shares its code between layers
    module.nsa_sel_patch = _RefusesPickle()
    undo = partial(module.__dict__.pop, "forward", None) if before is None else partial(module.__dict__.__setitem__, "forward", before)
    patched._undo += [undo, partial(module.__dict__.pop, "nsa_sel_patch", None)]


class _RefusesPickle:
    """An attribute of patched modules. A pickle would look the new forward up in the module by its name, and lose it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _RefusesPickle:
        return self

    def __reduce__(self) -> str:
        remedy = "save its state_dict, or call undo() of what patch_model returned before, and patch the model that was loaded"
        raise ArgumentError("model", "pickled with patched layers", "a model with its own code", remedy)


def _set_implementation(patched: Patched, config: Any, implementation: str) -> None:
    """Set a configuration's attention implementation, which transformers reads in each call."""
    if config._attn_implementation == implementation:
        return
    if not register.registered_sizes:  # the sizes of an earlier call of the user's stay
        register_transformers()
    qwen_qsa.register()
    patched._undo.append(partial(setattr, config, "_attn_implementation", config._attn_implementation))
    config._attn_implementation = implementation
