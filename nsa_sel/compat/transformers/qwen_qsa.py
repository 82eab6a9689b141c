"""Qwen3.8 (QSA, transformers' Qwen4Exp): attention layers whose indexer chooses complete blocks of visible keys, by
`choose_blocks`.

A sequence's blocks begin with its first visible key, so padding before the text does not shift them. The raw index keys
stay in the model's cache; beside them, on the cache's layer, are the pooled, normed and rotated keys of complete
blocks, each computed once.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from nsa_sel.choosing import choose_blocks
from nsa_sel.compat.transformers.minimax_m3 import dense
from nsa_sel.compat.transformers.register import check_mask, check_options, first_keys
from nsa_sel.core.attend import selection_attention
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.selection import Selection

MODEL_TYPE = "qwen4_exp_text"
NAME = "nsa_sel_qsa"  # of `visible_keys`, which patched models get in place of a mask [B,1,S,S_kv]
KEPT = "nsa_sel_index_keys"  # attribute of a cache's layer: raw keys, first keys of the sequences, and index keys of their blocks


def is_attention(module: Any) -> bool:
    """Return whether a module is a QSA attention layer of Qwen4Exp's text model."""
    return getattr(getattr(module, "config", None), "model_type", None) == MODEL_TYPE and hasattr(module, "indexer")


def register() -> None:
    """Make transformers call `visible_keys` for models whose configuration has `NAME`."""
    from transformers.masking_utils import AttentionMaskInterface

    AttentionMaskInterface.register(NAME, visible_keys)


def visible_keys(**arguments: Any) -> Tensor | None:
    """Return `first_keys` for a layer that chooses keys by itself; what it refuses is refused here."""
    return first_keys(**{**arguments, "allow_is_causal_skip": True, "config": None})


def forward(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor | None = None,
    past_key_values: Any = None, cache: Any = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Run `Qwen4ExpTextAttention`: its projections, norms, cache and gate, over the keys that `choose` selects.

    Args:
        hidden_states: [B,S,hidden].
        position_embeddings: cos and sin [B,S_kv,rotary], of the cache's keys and these rows.
        attention_mask: what `visible_keys` returned.
        past_key_values, cache: the cache; from transformers 5.24 on it has the second name.

    Returns:
        The layer's output [B,S,hidden], and None for the attention weights.

    Raises:
        ArgumentError: a mask of the user's own, dropout, attention weights, or an option that this layer does not have.
    """
    if self.config._attn_implementation != NAME:
        remedy = "call undo() of what patch_model returned before another implementation is set"
        raise ArgumentError("attn_implementation", shown(self.config._attn_implementation), f"{NAME!r} in a patched model", remedy)
    (B, S, _), D, cache = hidden_states.shape, self.head_dim, past_key_values if cache is None else cache
    query, gate = self.q_proj(hidden_states).view(B, S, -1, 2 * D).chunk(2, -1)
    query = self.q_norm(query).transpose(1, 2)
    key = self.k_norm(self.k_proj(hidden_states).view(B, S, -1, D)).transpose(1, 2)
    value = self.v_proj(hidden_states).view(B, S, -1, D).transpose(1, 2)
    cos, sin = (x[:, -S:] for x in position_embeddings)
    query, key = sys.modules[type(self).forward.__module__].apply_rotary_pos_emb(query, key, cos, sin)
    check_mask(attention_mask)
    check_options(self, query, key, {"dropout": self.attention_dropout if self.training else 0.0, **options})
    selection = choose(self.indexer, hidden_states, position_embeddings, attention_mask, cache)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    if selection is None:
        o = dense(query, key, value, self.scaling)
        return self.o_proj((o.flatten(2, -2) * torch.sigmoid(gate)).flatten(2)), None
    q = query.transpose(1, 2).unflatten(2, (key.shape[1], -1))  # [B,S,G,h,D]
    o, lse = selection_attention(q, key, value, selection, scale=self.scaling, return_lse=True)
    if attention_mask is not None:  # a row that sees no key gets the mean of all values, as in the model's eager attention
        mean = value.mean(2, dtype=torch.float32).to(value.dtype)[:, None, :, None]  # [B,1,G,1,D]
        o = torch.where(lse.isneginf().unsqueeze(-1), mean, o)
    return self.o_proj((o.flatten(2, -2) * torch.sigmoid(gate)).flatten(2)), None


@torch.no_grad()
def choose(
    indexer: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], padded: Tensor | None, cache: Any
) -> Selection | None:
    """Return the selection of `Qwen4ExpTextQSAIndexer`, of one group for all KV groups. None where rows select all keys
    that they see, whatever the scores, and are one or as many as the keys, without padding.

    A row chooses `block_topk` of the complete blocks of the keys that it sees, by the sum over index heads of
    ReLU(q.k), and takes the incomplete block. Rows of padding before a sequence select nothing.

    Args:
        indexer: the layer's indexer.
        hidden_states, position_embeddings, cache: as of `forward`.
        padded: what `visible_keys` returned.
    """
    (B, S, _), size = hidden_states.shape, indexer.compress_ratio
    heads = indexer.index_qk_proj(hidden_states).view(B, S, -1, indexer.index_head_dim)
    q, raw = heads.split((indexer.index_n_heads, indexer.index_kv_heads), 2)
    k, S_kv = index_keys(indexer, raw.squeeze(2), position_embeddings, padded, cache)
    if padded is None and S in (1, S_kv) and S_kv // size <= indexer.block_topk:
        return None
    rotate = sys.modules[type(indexer).forward.__module__].apply_rotary_pos_emb
    cos, sin = (x[:, -S:] for x in position_embeddings)
    q = rotate(indexer.q_layernorm(q), cos=cos, sin=sin, unsqueeze_dim=2).unsqueeze(2)  # [B,S,1,index heads,D]
    q_pos = limit = begin = None
    if padded is not None:
        begin, end = padded.to(k.device).view(2, B, 1)
        limit = (torch.arange(S_kv - S + 1, S_kv + 1, device=k.device).minimum(end) - begin).clamp(min=0)  # keys that a row sees
        q_pos = (limit - 1).clamp(min=0)
    selection = choose_blocks(
        q, k, block_size=size, n=indexer.block_topk, local=0, activation="relu", tail=True, compress_block=size, compress_stride=size,
        q_pos=q_pos, S_kv=S_kv,
    )  # fmt: skip
    if padded is None or begin is None or limit is None:
        return selection
    whole = not bool((padded[:B] % size).any())
    return selection.shifted(begin, limit, S_kv, whole_blocks=whole, max_length=S_kv)


def index_keys(
    indexer: Any, raw: Tensor, position_embeddings: tuple[Tensor, Tensor], padded: Tensor | None, cache: Any
) -> tuple[Tensor, int]:
    """Return index keys [B,1,S_kv // block,D] of the blocks of each sequence, and S_kv. Those after its complete blocks
    are arbitrary.

    A block's key is the norm of the mean of its raw keys, rotated at the position of its first key. With a cache only
    blocks that became complete are computed, unless something else changed the cache (as beam search does) or the
    padding.

    Args:
        indexer, position_embeddings, padded, cache: as of `choose`.
        raw: [B,S,D], raw index keys of these rows.
    """
    B, size, old, kept = len(raw), indexer.compress_ratio, 0, None
    begins = [0] * B if padded is None else padded[:B].tolist()
    if cache is not None:
        layer = cache.layers[indexer.layer_idx]
        before, after, keys = getattr(layer, KEPT, (None, None, None))
        if before is not None and before is layer.indexer_keys and after == begins:
            old, kept = before.shape[1], keys
        raw = cache.update_indexer(raw, indexer.layer_idx)
    S_kv, device = raw.shape[1], raw.device
    if kept is not None and padded is None and S_kv // size == old // size:  # no block became complete
        setattr(layer, KEPT, (raw, begins, kept))
        return kept[:, None, : S_kv // size], S_kv
    begin = torch.zeros(1, 1, dtype=torch.int64, device=device) if padded is None else padded[:B].to(device)[:, None]
    block = (old - begin).clamp(min=0) // size + torch.arange((S_kv - old) // size + 1, device=device)  # [B or 1, blocks to compute]
    block = block.expand(B, -1)
    first, batch = (begin + block * size).clamp(max=S_kv - 1), torch.arange(B, device=device)[:, None]
    each = (first.unsqueeze(-1) + torch.arange(size, device=device)).clamp(max=S_kv - 1)
    k = indexer.k_layernorm(raw[batch.unsqueeze(-1), each].float().mean(2).to(raw.dtype))
    cos, sin = (x.expand(B, -1, -1)[batch, first] for x in position_embeddings)
    k = sys.modules[type(indexer).forward.__module__].apply_rotary_pos_emb(k.unsqueeze(2), cos=cos, sin=sin, unsqueeze_dim=2).squeeze(2)
    if kept is not None:
        longer = torch.nn.functional.pad(kept, (0, 0, 0, S_kv // size + 1 - kept.shape[1]))
        k = longer.scatter(1, block.unsqueeze(-1).expand_as(k), k)
    if cache is not None:
        setattr(layer, KEPT, (raw, begins, k))
    return k[:, None, : S_kv // size], S_kv
