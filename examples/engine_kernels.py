"""MiniMax-M3's kernels of vLLM 0.32 and SGLang 0.5 as peers of the benches.

    nsa-sel bench --suite models --only minimax-m3 --peer vllm=engine_kernels:vllm --peer sglang=engine_kernels:sglang
    python -m nsa_sel.bench.questions.choosing_steps --models m3 --out rows.jsonl --peer vllm=engine_kernels:vllm_choose

Run in this folder, in an environment that has the engine. Engines read keys and values from caches in pages of 128: these
are made before the timed calls (docs/performance.md). All selections are of MiniMax-M3's shape, blocks of 128 keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def vllm(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int, scale: float, kept: Any) -> Tensor:
    """Return o [B,S,G,h,D] by vLLM's prefill kernel, or its decoding kernel for one row of each sequence."""
    from vllm.models.minimax_m3.common.ops.sparse_attn import minimax_m3_sparse_attn, minimax_m3_sparse_attn_decode

    (B, S, G, h, D), (cache, table, indices, lengths, starts) = q.shape, kept
    rows, o = q.reshape(B * S, G * h, D), q.new_empty(B * S, G * h, D)
    if S == 1:
        minimax_m3_sparse_attn_decode(rows, cache, indices, table, lengths, G, scale, o, S)
    else:
        minimax_m3_sparse_attn(rows, cache, indices, table, starts, lengths, lengths - S, S, G, scale, o)
    return o.view(q.shape)


def _vllm_cache(k: Tensor, v: Tensor, block_indices: Tensor, block_size: int) -> Any:
    cache = torch.cat((k, v), -1).unflatten(2, (-1, block_size)).transpose(1, 2).flatten(0, 1)  # [pages,G,128,2*D]
    table = torch.arange(len(cache), dtype=torch.int32, device=k.device).view(len(k), -1)
    return cache, table, _by_group(block_indices), _lengths(k), _starts(block_indices)


vllm.prepare = _vllm_cache  # type: ignore[attr-defined]


def sglang(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int, scale: float, kept: Any) -> Tensor:
    """Return o [B,S,G,h,D] by SGLang's prefill kernel, or its decoding kernel for one row of each sequence."""
    from sglang.kernels.ops.attention.minimax_sparse.decode.topk_sparse import flash_decode_with_gqa_share_sparse
    from sglang.kernels.ops.attention.minimax_sparse.prefill.topk_sparse import flash_prefill_with_gqa_share_sparse

    (B, S, G, h, D), (keys, values, tokens, sequences, indices, lengths, starts) = q.shape, kept
    rows = q.reshape(B * S, G * h, D)
    if S == 1:
        o = flash_decode_with_gqa_share_sparse(
            rows, None, keys, values, tokens, lengths, sequences, block_size, indices, scale, page_size=block_size
        )
    else:
        of_rows = {"cu_seqlens": starts, "seq_lens": lengths, "prefix_lens": lengths - S, "max_seqlen_q": S}
        o = flash_prefill_with_gqa_share_sparse(
            rows, keys, values, None, tokens, sequences, indices, 1, block_size,
            **of_rows, sm_scale=scale, cu_seqblocks_q=starts, max_seqblock_q=S,
        )  # fmt: skip
    return o.view(q.shape)


def _sglang_cache(k: Tensor, v: Tensor, block_indices: Tensor, block_size: int) -> Any:
    B, _, S_kv, _ = k.shape
    keys, values = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v))  # [slots,G,D]
    tokens = torch.arange(B * S_kv, dtype=torch.int32, device=k.device).view(B, S_kv)  # the slot of each token
    sequences = torch.arange(B, device=k.device)
    return keys, values, tokens, sequences, _by_group(block_indices), _lengths(k), _starts(block_indices)


sglang.prepare = _sglang_cache  # type: ignore[attr-defined]


# The indexer. A function of (q [B,S,G,1,D], pages [pages,128,1,D], lengths [B], block_table, block_size, n), which
# returns the function to time: block indices [B,S,G,n].


def vllm_choose(q: Tensor, pages: Tensor, lengths: Tensor, block_table: Tensor, block_size: int, n: int) -> Callable[[], Tensor]:
    """Return vLLM's choice of blocks: scores of all blocks, then the best ones."""
    from vllm.models.minimax_m3.common.ops.index_topk import minimax_m3_index_decode, minimax_m3_index_score, minimax_m3_index_topk

    B, S, G = q.shape[:3]
    rows, keys, most = q.flatten(0, 1).squeeze(2), pages.squeeze(2), block_table.shape[1] * block_size
    starts, before = _starts(q), lengths - S

    def choose() -> Tensor:
        if S == 1:
            indices = minimax_m3_index_decode(rows, keys, block_table, lengths, most, n, 0, 1, G, 1, 1)
        else:
            scores = minimax_m3_index_score(rows, keys, block_table, starts, lengths, before, S, most, G)
            indices = minimax_m3_index_topk(scores, starts, before, S, n, 0, 1)
        return indices.transpose(0, 1).view(B, S, G, n)  # type: ignore[no-any-return]

    return choose


def sglang_choose(q: Tensor, pages: Tensor, lengths: Tensor, block_table: Tensor, block_size: int, n: int) -> Callable[[], Tensor]:
    """Return SGLang's choice of blocks: scores of all blocks, then the best ones."""
    from sglang.kernels.ops.attention.minimax_sparse.decode.flash_with_topk_idx import flash_decode_with_topk_idx
    from sglang.kernels.ops.attention.minimax_sparse.prefill.flash_with_topk_idx import flash_prefill_with_topk_index

    B, S, G = q.shape[:3]
    rows, keys = q.flatten(0, 1).squeeze(2), pages.flatten(0, 1)  # [slots,1,D]
    slots = torch.arange(len(keys), dtype=torch.int32, device=q.device).view(-1, block_size)
    tokens, sequences = slots[block_table.long()].flatten(1), torch.arange(B, device=q.device)
    starts, before, most = _starts(q), lengths - S, tokens.shape[1]

    of_pages = {"disable_index_value": True, "page_size": block_size}

    def choose() -> Tensor:
        if S == 1:
            _, indices, _ = flash_decode_with_topk_idx(
                rows, None, keys, None, tokens, lengths, most, sequences, block_size, n, 0, 1, **of_pages
            )
        else:
            _, indices = flash_prefill_with_topk_index(
                rows, keys, None, None, tokens, sequences, starts, lengths, before, S, most, 1, block_size, n, 0, 1,
                cu_seqblocks_q=starts, max_seqblock_q=S, all_seqblock_q=B * S, **of_pages,
            )  # fmt: skip
        return indices.transpose(0, 1).view(B, S, G, n)  # type: ignore[no-any-return]

    return choose


def _by_group(block_indices: Tensor) -> Tensor:
    return block_indices.permute(2, 0, 1, 3).flatten(1, 2).int().contiguous()  # [G,rows,n], padding last


def _lengths(k: Tensor) -> Tensor:
    return torch.full((len(k),), k.shape[2], dtype=torch.int32, device=k.device)


def _starts(x: Tensor) -> Tensor:
    """Return cu_seqlens of the rows of x [B,S,...]."""
    return torch.arange(len(x) + 1, dtype=torch.int32, device=x.device) * x.shape[1]
