"""transformers: `attn_implementation="nsa_sel"` runs a dense decoder model with block selection, without training.

A row attends to n blocks of its keys: the first, the last ones, and those whose mean key, with rotary positions, its
group's heads give the most weight (`choose_blocks`). While a sequence has no more than n blocks, that is dense
attention.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from nsa_sel.choosing import choose_blocks
from nsa_sel.compat.transformers import minimax_m3
from nsa_sel.compression import BlockMean
from nsa_sel.core.arguments import check_forced, check_positive
from nsa_sel.core.attend import selection_attention
from nsa_sel.errors import ArgumentError, shown

NAME = "nsa_sel"
HERE = f"with attn_implementation={NAME!r}"
ANOTHER = "use another attn_implementation for this model, for example 'sdpa'"
UNPACKED = "pass sequences as a padded batch, or one a call, or use another implementation"
# Keywords that models and trainers hand through to attention, and that do not change what it computes.
NO_EFFECT = frozenset(("cache_position", "num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict", "use_cache"))
LATENT = "run it with FlashMLA and DeepGEMM's indexer (vLLM, SGLang), or attn_implementation='eager'"
# Models that select keys themselves, by the model_type of their configuration, and who runs them.
OWN_SELECTION = {
    "axk2": LATENT, "deepseek_v32": LATENT, "deepseek_v4": LATENT, "dots3_note_text": LATENT, "glm5_next_text": LATENT,
    "glm_moe_dsa": LATENT, "hy_v4": LATENT, "hy_v4_vl_text": LATENT, "mistral_large4_text": LATENT,
    "qwen4_exp_text": "call nsa_sel.compat.patch_model(model), or run it with attn_implementation='sdpa'",
}  # fmt: skip
registered_sizes: dict[str, int] = {}  # n, block_size, first, local of the last `register_transformers`


def register_transformers(*, n: int = 16, block_size: int = 64, first: int = 1, local: int = 2) -> None:
    """Make `attn_implementation="nsa_sel"` known to transformers; called again, change its sizes.

    Models then take it in `from_pretrained(..., attn_implementation="nsa_sel")` and
    `model.set_attn_implementation("nsa_sel")`: decoders with causal attention over all keys, grouped heads or not.
    Prefill, whole or in chunks, and decoding over a DynamicCache; padded batches; gradients. Every decoding step reads
    all keys for their means.

    Args:
        n: blocks per row, the forced ones among them.
        block_size: keys of a block.
        first: blocks at the start of the sequence that are always chosen.
        local: last blocks, the row's own among them, that are always chosen.

    Raises:
        ArgumentError: sizes that do not fit together; at a call, what a model asks of attention that this does not
            have.
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
        """Return o [B,S,H,D] of query [B,H,S,D], key and value [B,G,S_kv,D]. attention_mask is what `first_keys`
        returned."""
        check_model(getattr(module, "config", None))
        check_options(module, query, key, options)
        selects, q_pos = minimax_m3.is_attention(module), None
        if selects:
            q_pos, attention_mask = minimax_m3.rows_and_padding(attention_mask, query.shape[2], key.shape[2])
        check_mask(attention_mask)
        right = check_positions(options.get("position_ids"), attention_mask, query.shape[2], key.shape[2], selects, q_pos)
        if selects:
            o = minimax_m3.attend(module, query, key, value, attention_mask, options.get("block_indices"), options.get("scaling"), q_pos)
        else:
            o = attend(query, key, value, attention_mask, options.get("scaling"), registered_sizes)
        return o if right is None else torch.where(right, o, float("nan")), None

    registered_sizes.update(n=n, block_size=block_size, first=first, local=local)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, first_keys)


def is_attention(module: Any) -> bool:
    """Return whether a module is an attention layer of transformers whose configuration sets its implementation."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names and hasattr(module, "config")


def attend(query: Tensor, key: Tensor, value: Tensor, padded: Tensor | None, scale: float | None, sizes: dict[str, Any]) -> Tensor:
    """Return o [B,S,H,D]. padded is what `first_keys` returned: rows before a sequence's first key are zeros."""
    G, S, S_kv = key.shape[1], query.shape[2], key.shape[2]
    q = torch.unflatten(query, 1, (G, -1)).permute(0, 3, 1, 2, 4)
    begins = [] if padded is None else padded.view(2, -1)[0].tolist()
    if not any(begins):  # padding after a sequence needs no care: no row before it sees it
        block = sizes["block_size"]
        means = BlockMean(block, block)(key.detach().transpose(1, 2))
        selection = choose_blocks(
            q, means, reduce="sum", softmax=True, compress_block=block, compress_stride=block, scale=scale, S_kv=S_kv, **sizes
        )
        o: Tensor = selection_attention(q, key, value, selection, scale=scale, q_pos=None, return_lse=False, backend=None)
        return o.flatten(2, 3)
    parts = []
    for b, begin in enumerate(begins):  # each as it would be without padding: its blocks begin with its first key
        skipped = min(S, max(0, begin - (S_kv - S)))  # rows that are padding themselves
        rows, keys, values = query[b : b + 1, :, skipped:], key[b : b + 1, :, begin:], value[b : b + 1, :, begin:]
        zeros = query.new_zeros(1, skipped, query.shape[1], value.shape[-1])
        parts.append(torch.cat((zeros, attend(rows, keys, values, None, scale, sizes)), 1) if skipped < S else zeros)
    return torch.cat(parts)


def first_keys(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, mask_function: Any = None,
    attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, local_size: int | None = None, config: Any = None,
    device: Any = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Return the first key of each sequence, then the key after each one's last, [2 * B] int64 on the CPU; None without
    padding.

    For MiniMax-M3 over a StaticCache: the slot of the first row, the first key, and the key after the last, [3,B] int64
    on the device; without padding [1,B], the first row's slot alone. Reading a padding mask waits for the device.

    transformers calls this in place of making a mask, once per kind of mask in each forward pass. Its arguments tell
    what the model asks of attention, so what is not there is refused before anything is computed.

    Raises:
        ArgumentError: the mask is not causal over all keys, the model reads the mask itself, or the cache or
            attention_mask does not fit.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    check_model(config)
    if local_size is not None:
        found = f"a sliding window or chunks, of {local_size} keys"
        raise ArgumentError("the model's attention", found, f"causal attention over all keys {HERE}", ANOTHER)
    if mask_function is bidirectional_mask_function:
        raise ArgumentError("is_causal", False, f"True {HERE}", "use another attn_implementation for encoders and cross attention")
    if mask_function is not None and mask_function is not causal_mask_function:
        found = "of packed sequences, or of a mask function of the model's own"
        raise ArgumentError("position_ids or the mask", found, f"one causal sequence a row {HERE}", UNPACKED)
    end, last = kv_offset + kv_length, q_offset + q_length
    static = minimax_m3.is_config(config) and kv_length > q_length and (isinstance(q_offset, Tensor) or last != end)
    if not static and int(last) != end:
        found = f"of {end} keys for queries up to {int(last)}"
        raise ArgumentError("past_key_values or attention_mask", found, "a cache that grows, and a mask of its keys", "use a DynamicCache")
    if not allow_is_causal_skip and not static:  # the model asks for a mask with columns, to change it or to choose keys by it
        raise refused_model(config, "reads the attention mask itself", ANOTHER)
    first_row = torch.zeros(1, batch_size, dtype=torch.int64, device=device) + q_offset if static else None
    if attention_mask is None:
        return first_row
    if attention_mask.is_cuda and torch.cuda.is_current_stream_capturing():
        remedy = "make masks before, by transformers' create_masks_for_generate, or leave it out if nothing is padded"
        raise ArgumentError("attention_mask", "[B, keys] while a CUDA graph is captured", "masks for the layers", remedy)
    real = attention_mask[:, kv_offset:end].bool()
    begin = real.int().argmax(1)
    ends = begin + real.sum(1)
    key = torch.arange(real.shape[1], device=real.device)
    narrow = torch.zeros_like(ends) + last > attention_mask.shape[1]
    holes = (key < ends[:, None]) & (key >= begin[:, None]) & ~real
    any_narrow, any_holes, any_padded = torch.stack([x.any() for x in (narrow, holes, begin.bool() | (ends + kv_offset < last))]).tolist()
    if any_narrow:
        found = f"of {attention_mask.shape[1]} keys where {int(last)} are there"
        raise ArgumentError("attention_mask", found, "[B, keys]: those of the cache, too", "pass 1 for each earlier token")
    if any_holes:
        raise ArgumentError("attention_mask", "0 between keys", "0 before and after a sequence's keys", "pad at one end")
    if not any_padded:
        return first_row
    return torch.cat((begin, ends)).cpu() if first_row is None else torch.cat((first_row, begin[None], ends[None]))


def check_model(config: Any) -> None:
    """Raise ArgumentError for a model that selects keys by a rule of its own."""
    remedy = OWN_SELECTION.get(getattr(config, "model_type", None) or "")
    if remedy is not None:
        raise refused_model(config, "selects its own keys", remedy)


def refused_model(config: Any, why: str, remedy: str) -> ArgumentError:
    name = type(config).__name__.removesuffix("Config")
    return ArgumentError("the model", f"{name}, which {why}", f"dense causal attention {HERE}", remedy)


def check_mask(attention_mask: Tensor | None) -> None:
    """Raise ArgumentError for anything but what `first_keys` returns: a mask of the user's own comes as it is."""
    if attention_mask is not None and attention_mask.dim() != 1:
        found = f"of shape {tuple(attention_mask.shape)}"
        raise ArgumentError("attention_mask", found, "[B, keys] of 0 and 1: padding before and after", "leave it out for a causal mask")


def check_positions(
    position_ids: Tensor | None, padded: Tensor | None, S: int, S_kv: int, slots: bool, q_pos: Tensor | None
) -> Tensor | None:  # fmt: skip
    """Raise ArgumentError for packed sequences: positions that do not rise from token to token, padding apart.

    It reads the positions in each call, so the host waits for the device. Where it cannot, under torch.compile and
    while a CUDA graph is captured, it returns whether they are right, a bool tensor []; elsewhere None. A single new
    token is not checked.

    Args:
        position_ids: [S] or [B,S]; None: nothing is checked.
        padded: what `first_keys` returned.
        S, S_kv: rows and keys.
        slots: positions must be those of the cache's slots, where nothing is padded: MiniMax-M3's masks go by both.
        q_pos: the rows' slots [S], by default the last S.
    """
    if position_ids is None or S < 2 or (slots and padded is not None):
        return None
    if position_ids.dim() > 2 or position_ids.shape[-1] != S:
        raise ArgumentError("position_ids", f"of shape {tuple(position_ids.shape)}", f"[B, {S}] {HERE}", ANOTHER)
    if slots:
        q_pos = torch.arange(S_kv - S, S_kv, device=position_ids.device) if q_pos is None else q_pos
        right = position_ids == q_pos
    else:
        right = position_ids[..., 1:] > position_ids[..., :-1]  # [B, S - 1]
        if padded is not None:
            begin, end = padded.to(right.device).view(2, -1, 1)
            key = torch.arange(S_kv - S, S_kv - 1, device=right.device)
            right = right | (key < begin) | (key + 1 >= end)
    if torch.compiler.is_compiling() or (right.is_cuda and torch.cuda.is_current_stream_capturing()):
        return right.all()
    if not bool(right.all()):
        if q_pos is not None:
            allowed = f"{int(q_pos[0])} to {int(q_pos[-1])}, the slots of the tokens in the cache"
            raise ArgumentError("position_ids", "not those of the cache's slots", allowed, f"leave position_ids out; {UNPACKED}")
        raise ArgumentError("position_ids", "of packed sequences", f"positions that rise {HERE}", UNPACKED)
    return None


def check_options(module: torch.nn.Module, query: Tensor, key: Tensor, options: dict[str, Any]) -> None:
    """Raise ArgumentError for what a model asks of attention beside causal attention over all keys."""
    if options.get("sliding_window") is not None:
        raise ArgumentError("sliding_window", options["sliding_window"], f"None {HERE}: the layer has a sliding window", ANOTHER)
    if options.get("output_attentions"):
        raise ArgumentError(
            "output_attentions",
            True,
            f"False {HERE}: no attention weights are computed",
            "use attn_implementation='eager', after undo() if the model is patched",
        )
    if options.get("dropout"):
        raise ArgumentError("attention_dropout", options["dropout"], "0", "set config.attention_dropout = 0, or call model.eval()")
    causal = getattr(module, "is_causal", True) if options.get("is_causal") is None else options["is_causal"]
    if not causal:
        raise ArgumentError("is_causal", False, "True", "use another attn_implementation for encoders")
    if "Cross" in type(module).__name__ or getattr(module, "is_cross_attention", False) or key.shape[2] < query.shape[2]:
        found = f"{type(module).__name__} of {query.shape[2]} queries over {key.shape[2]} keys, which is cross attention"
        raise ArgumentError("the layer", found, f"causal self-attention {HERE}", ANOTHER)
    read = {"scaling", "dropout", "is_causal", "position_ids", "sliding_window", "output_attentions"}
    if minimax_m3.is_attention(module):
        read.add("block_indices")
    for name, value in options.items():
        if name not in read and name not in NO_EFFECT and value is not None:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
            raise ArgumentError(name, found, f"None {HERE}, which does not have it", ANOTHER)
