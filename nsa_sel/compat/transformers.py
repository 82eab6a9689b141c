"""transformers: `attn_implementation="nsa_sel"` runs a dense decoder model with block selection, without training.

A row attends to n blocks of its keys: the first, the last ones, and those whose mean key, with rotary positions, its group's heads give
the most weight (`choose_blocks`). While a sequence has no more than n blocks, that is dense attention.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from nsa_sel.choosing import choose_blocks
from nsa_sel.compression import BlockMean
from nsa_sel.core.arguments import check_positive
from nsa_sel.core.entry import selection_attention
from nsa_sel.core.indices import check_forced
from nsa_sel.errors import ArgumentError

NAME = "nsa_sel"
UNPACKED = "pass sequences as a padded batch, or one a call, or use another implementation"
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "cache")  # arguments of other implementations, None in plain models


def register_transformers(*, n: int = 16, block_size: int = 64, first: int = 1, local: int = 2) -> None:
    """Make `attn_implementation="nsa_sel"` known to transformers; called again, change its sizes.

    Models then take it in `from_pretrained(..., attn_implementation="nsa_sel")` and `model.set_attn_implementation("nsa_sel")`: decoders
    with causal attention over all keys, grouped heads or not. Prefill, whole or in chunks, and decoding over a DynamicCache; padded
    batches; gradients. Every decoding step reads all keys for their means.

    Args:
        n: blocks per row, the forced ones among them.
        block_size: keys of a block.
        first: blocks at the start of the sequence that are always chosen.
        local: last blocks, the row's own among them, that are always chosen.

    Raises:
        ArgumentError: sizes that do not fit together; at a call, what a model asks of attention that this does not have.
        ImportError: transformers is not installed, or older than 4.53.
    """
    check_positive("n", n)
    check_positive("block_size", block_size)
    check_forced(first, local, n)
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            f'register_transformers needs transformers 4.53 or newer: {error}. Remedy: pip install "transformers>=4.53".'
        ) from error

    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """o [B,S,H,D] of query [B,H,S,D], key and value [B,G,S_kv,D]; attention_mask is what `first_keys` returned."""
        check_options(module, options)
        if attention_mask is None:
            check_positions(options.get("position_ids"))
        if attention_mask is not None and attention_mask.dim() != 1:  # a mask of the user's own comes as it is
            found = f"of shape {tuple(attention_mask.shape)}"
            raise ArgumentError("attention_mask", found, "[B, keys] of 0 and 1: padding before and after", "leave it out for a causal mask")
        sizes = {"n": n, "block_size": block_size, "first": first, "local": local}
        return attend(query, key, value, attention_mask, options.get("scaling"), sizes), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, first_keys)


def attend(query: Tensor, key: Tensor, value: Tensor, first_key: Tensor | None, scale: float | None, sizes: dict[str, Any]) -> Tensor:
    """o [B,S,H,D]. first_key [B] on the CPU: where the keys of each padded sequence begin; its rows before that are zeros."""
    G, S, S_kv = key.shape[1], query.shape[2], key.shape[2]
    q = torch.unflatten(query, 1, (G, -1)).permute(0, 3, 1, 2, 4)
    if first_key is None:
        block = sizes["block_size"]
        means = BlockMean(block, block)(key.detach().transpose(1, 2))
        selection = choose_blocks(
            q, means, reduce="sum", softmax=True, compress_block=block, compress_stride=block, scale=scale, S_kv=S_kv, **sizes
        )
        o: Tensor = selection_attention(q, key, value, selection, scale=scale, q_pos=None, return_lse=False, backend=None)
        return o.flatten(2, 3)
    found = []
    for b, begin in enumerate(first_key.tolist()):  # each as it would be without padding: its blocks begin with its first key
        padding = max(0, begin - (S_kv - S))  # rows that are padding themselves
        rows = query[b : b + 1, :, padding:]
        o = attend(rows, key[b : b + 1, :, begin:], value[b : b + 1, :, begin:], None, scale, sizes)
        found.append(torch.cat((o.new_zeros(1, padding, *o.shape[2:]), o), 1))
    return torch.cat(found)


def first_keys(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, mask_function: Any = None,
    attention_mask: Tensor | None = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Where the keys of each sequence begin, [B] int64 on the CPU, or None without padding: transformers asks once per forward pass."""
    from transformers.masking_utils import causal_mask_function

    if mask_function is not None and mask_function is not causal_mask_function:
        raise ArgumentError(
            "position_ids or the mask", "of packed sequences, or not causal", f"causal attention with attn_implementation={NAME!r}",
            UNPACKED,
        )  # fmt: skip
    if int(q_offset) + q_length != kv_offset + kv_length:
        raise ArgumentError(
            "past_key_values",
            f"of {kv_length} keys for queries up to {int(q_offset) + q_length}",
            "a cache that grows",
            "use a DynamicCache",
        )
    if attention_mask is None:
        return None
    seen = attention_mask[:, -kv_length:].bool()
    begin = seen.int().argmax(1)
    ended = (~seen).int().cumsum(1) - begin[:, None] > 0  # padding after the first key
    if bool((seen & ended).any()):
        raise ArgumentError("attention_mask", "0 between keys", "0 before and after a sequence's keys", "pad at one end")
    return None if not bool(begin.any()) else begin.cpu()


_checked: weakref.ref[Tensor] | None = None  # positions that were checked last: all layers of a pass get the same tensor


def check_positions(position_ids: Tensor | None) -> None:
    """ArgumentError for packed sequences: positions that begin again. transformers notices them only without a cache.

    Of a pass over more than one token, it waits for the device once. Not under torch.compile, and not in a capture.
    """
    global _checked
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] < 3:
        return
    if _checked is not None and _checked() is position_ids:
        return
    if torch.compiler.is_compiling() or (position_ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    _checked = weakref.ref(position_ids)
    again = (position_ids[:, 1:-1] == 0) & (position_ids[:, 2:] == 1)  # padding at the end has 0 after 0, or no 0
    if bool(again.any()):
        allowed = f"positions that rise, with attn_implementation={NAME!r}"
        raise ArgumentError("position_ids", "of packed sequences", allowed, UNPACKED)


def check_options(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """ArgumentError for what a model asks of attention beside the plain causal one."""
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            remedy = "use another attn_implementation for this model"
            raise ArgumentError(name, "given", f"None with attn_implementation={NAME!r}", remedy)
    if options.get("dropout"):
        raise ArgumentError("attention_dropout", options["dropout"], "0", "set config.attention_dropout = 0, or call model.eval()")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ArgumentError("is_causal", False, "True", "use another attn_implementation for encoders")
