"""MiniMax-M3 (MSA, arXiv 2606.13392): attention to the blocks that its indexer chose, and the indexer as
`choose_blocks` chooses.

Blocks are those of transformers' own code: blocks of cache slots, so padding before the text shifts them.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from nsa_sel.choosing import chosen_blocks
from nsa_sel.core.attend import selection_attention
from nsa_sel.core.call import Pool, Rule
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection

MODEL_TYPE = "minimax_m3_vl_text"
OLDEST = 5, 17  # of transformers; up to 5.12 all KV heads shared one choice of blocks


def check_transformers() -> None:
    """Raise ArgumentError for a transformers whose indexer chooses other blocks than this package."""
    version = metadata.version("transformers")
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        allowed = "5.17 or newer, where each KV head of MiniMax-M3 has blocks of its own"
        raise ArgumentError("transformers", version, allowed, "pip install 'transformers>=5.17'")


def is_attention(module: Any) -> bool:
    """Return whether a module is an attention layer of MiniMax-M3's text model."""
    return is_config(getattr(module, "config", None)) and hasattr(module, "indexer")


def is_config(config: Any) -> bool:
    """Return whether a configuration is that of MiniMax-M3's text model."""
    return getattr(config, "model_type", None) == MODEL_TYPE


def rows_and_padding(mask: Tensor | None, S: int, S_kv: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the slots of the rows [S], None for the last S, and the first and last keys as `attend` takes them.

    Args:
        mask: what `first_keys` returned; with two dimensions, that of a StaticCache.
        S, S_kv: rows, and slots of the cache.
    """
    if mask is None or mask.dim() != 2:
        return None, mask
    if S_kv <= S:
        raise ArgumentError("attention_mask", f"of more than the {S_kv} keys", "[B, keys]", "pass the cache of the earlier tokens")
    first = mask[0, :1]
    return first if S == 1 else first + torch.arange(S, device=mask.device), mask[1:].flatten() if len(mask) > 1 else None


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, padded: Tensor | None, block_indices: Tensor | None, scale: float | None,
    q_pos: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return o [B,S,H,D] of a layer, over the blocks of its indexer or, in layers without one, over all visible keys.

    A row that sees no key gets the mean of all values, as in the model's eager attention: rows of padding, and the
    first rows of a sequence behind a block of padding or more.

    Args:
        module: the attention layer.
        query: [B,H,S,D].
        key, value: [B,G,S_kv,D], the keys of the cache and of these rows; slot j holds key j.
        padded: the first key of each sequence, then the key after each one's last, [2 * B]; None without padding.
        block_indices: [B,G,S,n], blocks of slots, -1 is padding; None: all keys.
        scale: factor of the logits, by default 1/sqrt(D).
        q_pos: slots of the rows [S], by default the last S: a StaticCache has free slots after them.
    """
    B, G, S_kv, _ = key.shape
    begin = None if padded is None else padded.view(2, B)[0].to(key.device)
    end = None if padded is None else padded.view(2, B)[1].to(key.device)
    whole = block_indices is None or block_indices.shape[-1] * module.indexer.block_size >= S_kv  # rows select all that they see
    if whole and begin is None and q_pos is None and query.shape[2] in (1, S_kv):
        return dense(query, key, value, scale)
    q = torch.unflatten(query, 1, (G, -1)).permute(0, 3, 1, 2, 4)  # [B,S,G,h,D]
    if block_indices is None and begin is None:
        rows = torch.full((1, 1, 1, 1, 2), S_kv, dtype=torch.int32, device=key.device)
        rows[..., 0] = 0
        selection = Selection.from_ranges(rows.expand(B, q.shape[1], 1, 1, 2))
    elif block_indices is None:
        ranges = torch.stack((begin, end), -1).to(torch.int32)[:, None, None, None]  # type: ignore[arg-type]
        selection = Selection.from_ranges(ranges.expand(B, q.shape[1], 1, 1, 2))
    elif begin is None:
        selection = Selection.from_blocks(block_indices.transpose(1, 2), module.indexer.block_size, disjoint=True)
    else:
        size, blocks = module.indexer.block_size, block_indices.transpose(1, 2)  # [B,S,G,n]
        bounds = (x.view(B, 1, 1, 1) for x in (begin, end))  # type: ignore[union-attr]
        start = torch.maximum(blocks * size, next(bounds))
        stop = torch.minimum((blocks + 1) * size, next(bounds)).masked_fill(blocks < 0, 0)
        selection = Selection.from_ranges(torch.stack((start, stop), -1), disjoint=True)
    if begin is None:
        return selection_attention(q, key, value, selection, scale=scale, q_pos=q_pos).flatten(2, 3)
    o, lse = selection_attention(q, key, value, selection, scale=scale, q_pos=q_pos, return_lse=True)
    mean = value.mean(2, dtype=torch.float32).to(value.dtype)[:, None, :, None]  # [B,1,G,1,D]
    return torch.where(lse.isneginf().unsqueeze(-1), mean, o).flatten(2, 3)


def dense(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return o [B,S,H,D] of query [B,H,S,D] over all keys that a row sees, for one row or as many as keys."""
    attend, shared = torch.nn.functional.scaled_dot_product_attention, key.shape[1] != query.shape[1]
    return attend(query, key, value, is_causal=query.shape[2] > 1, scale=scale, enable_gqa=shared).transpose(1, 2)


def choose(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], past_key_values: Any, position_ids: Tensor
) -> Tensor:
    """Return block indices [B,G,S,n]: the forward of `MiniMaxM3VLIndexer` without the scores of all keys.

    A block's score is its largest logit of a key at or before position_ids; the blocks at and before the position are
    forced.
    """
    B, S, _ = hidden_states.shape
    index_k = self.k_norm(self.k_proj(hidden_states).view(B, S, 1, self.head_dim)).transpose(1, 2)
    cos, sin = (x[..., : self.head_dim] for x in position_embeddings)
    rotate = sys.modules[type(self).forward.__module__].apply_rotary_pos_emb
    index_k = rotate(index_k, index_k, cos, sin)[1]
    if past_key_values is not None:
        index_k = past_key_values.layers[self.layer_idx].update_index(index_k)
    blocks = -(-index_k.shape[2] // self.block_size)
    if blocks <= self.topk_blocks:  # all that a row sees, whatever the scores
        block = torch.arange(blocks, device=index_k.device)
        chosen = torch.where(block * self.block_size <= position_ids.unsqueeze(-1), block, -1)  # [B,S,blocks]
        return chosen.unsqueeze(1).expand(-1, self.q_proj.out_features // self.head_dim, -1, -1)
    index_q = self.q_norm(self.q_proj(hidden_states).view(B, S, -1, self.head_dim)).transpose(1, 2)
    index_q = rotate(index_q, index_q, cos, sin)[0]
    chosen = chosen_blocks(
        index_q.transpose(1, 2).unsqueeze(3),  # [B,S,G,1,D]
        index_k,  # [B,1,S_kv,D]
        Rule(1, 1, self.block_size, self.topk_blocks, 0, min(self.local_blocks, self.topk_blocks)),
        Pool(softmax=False, block_max=True),
        position_ids.contiguous(),
    )
    return chosen.transpose(1, 2)
