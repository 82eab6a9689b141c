"""Check the module that stands in for OpenBMB's infllm_v2 against plain float64 references of what that package's CUDA code computes."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel.compat import infllm_v2, patch_infllm_v2
from nsa_sel.errors import ArgumentError
from tests.compat.patched import assert_same

FLASH = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None}
SIGNATURES = {
    infllm_v2.infllmv2_attn_stage1: {
        **dict.fromkeys(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_v", "max_seqlen_q", "max_seqlen_k"), ...),
        **FLASH, "deterministic": False, "return_attn_probs": True, "block_table": None,
    },
    infllm_v2.infllmv2_attn_varlen_func: {
        **dict.fromkeys(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), ...),
        **FLASH, "deterministic": False, "return_attn_probs": False, "block_table": None, "topk_idx": None,
    },
    infllm_v2.infllmv2_attn_with_kvcache: {
        "q": ..., "k_cache": ..., "v_cache": ..., "k": None, "v": None, "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None,
        "cache_batch_idx": None, "cache_leftpad": None, "block_table": None, "softmax_scale": None, "causal": False,
        "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0,
        "return_softmax_lse": False, "topk_idx": None,
    },
    infllm_v2.max_pooling_1d: {
        "input": ..., "cache_len": ..., "local_blocks": ..., "init_blocks": ..., "block_size": 64, "stride": 16,
    },
    infllm_v2.max_pooling_1d_varlen: {
        "input": ..., "cu_seqlens_q": ..., "cu_seqlens_k": ..., "cache_lens": ..., "max_seqlen_q": ..., "max_seqlen_k": ...,
        "local_blocks": ..., "init_blocks": ..., "block_size": 64, "stride": 16,
    },
    infllm_v2.topk_to_uint64: {"topk_idx": ..., "max_seqlen_k": ..., "block_size": ..., "memory_buffer": None},
    infllm_v2.blockmask_to_uint64: {"blockmask": ...},
    infllm_v2.uint64_to_bool: {"uint64_array": ..., "last_dim_size": ...},
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("packed_sdpa")


@pytest.mark.parametrize("call", SIGNATURES, ids=lambda call: call.__name__)
def test_signatures_are_the_originals(call: Callable[..., Any]) -> None:
    parameters = inspect.signature(call).parameters.values()
    assert [(p.name, ... if p.default is p.empty else p.default) for p in parameters] == list(SIGNATURES[call].items())


# References, in float64 and by loops over rows.


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def means(k: Tensor, lengths: list[int], size: int, every: int) -> tuple[Tensor, Tensor]:
    """Means of `size` keys of k [T,H,D] every `every`, of each sequence apart, and their bounds: the model's CompressK."""
    found, counts = [k[:0]], []
    for x in k.split(lengths):
        starts = range(0, len(x) - size + 1, every)
        found += [x[start : start + size].mean(0, keepdim=True) for start in starts]
        counts.append(len(starts))
    return torch.cat(found), bounds(counts)


def seen_means(row: int, rows: int, count: int, every: int) -> int:
    """Return how many of `count` means a row attends to, as in the CUDA code, whose division rounds to 0."""
    return min(count, max(0, (row + 1) // every - 1 + count - int((rows - every + 1) / every)))


def stage1_of(q: Tensor, fine: Tensor, coarse: Tensor, cu: list[Tensor], width: int, scale: float, causal: bool) -> Tensor:
    q, fine, coarse = (x.double() for x in (q, fine, coarse))
    H = fine.shape[1]
    h = q.shape[1] // H
    out = torch.zeros(H, len(q), width, dtype=torch.float64)
    for n in range(len(cu[0]) - 1):
        of_rows, of_fine, of_coarse = (x[part[n] : part[n + 1]] for x, part in zip((q, fine, coarse), cu, strict=True))
        every = 16 if len(of_fine) == len(of_coarse) else 64
        for i, row in enumerate(of_rows):
            see_fine, see_coarse = len(of_fine), len(of_coarse)
            if causal:
                see_fine, see_coarse = (seen_means(i, len(of_rows), len(x), d) for x, d in ((of_fine, 16), (of_coarse, every)))
            if not see_coarse:
                continue
            for g in range(H):
                heads = row[g * h : g * h + h].T * scale
                lse = (of_coarse[:see_coarse, g] @ heads).logsumexp(0)
                out[g, int(cu[0][n]) + i, :see_fine] = (of_fine[:see_fine, g] @ heads - lse).exp().sum(1)
    return out


def pooled_of(scores: Tensor, position: int, count: int, blocks: int, local: int, first: int, size: int, every: int) -> Tensor:
    """Block scores of one row's means [C], of which `count` exist."""
    s, own = size // every, position // size
    out = torch.full((blocks,), -math.inf, dtype=scores.dtype)
    for b in range(blocks):
        if b < first or b <= own <= b + local:
            out[b] = math.inf
            continue
        for mean in range(max(0, b * s - 1), min(b * s + s, count)):
            out[b] = torch.maximum(out[b], scores[mean])
    return out


def attention_of(
    q: Tensor, k: Tensor, v: Tensor, topk_idx: Tensor | None, cu_q: Tensor, cu_k: Tensor, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Dense attention [T,nheads,D] of each sequence under a mask of the listed blocks of 64, aligned at the bottom right, and its
    log-sum-exp [T,nheads]."""
    H, h = k.shape[1], q.shape[1] // k.shape[1]
    out, lse = [], []
    for (a, b), (c, d) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        key = torch.arange(d - c)
        mask = key <= torch.arange(d - c - (b - a), d - c)[:, None]
        mask = mask.expand(H, b - a, d - c)
        if topk_idx is not None:
            mask = mask & (key[:, None] // 64 == topk_idx[:, a:b, None, :]).any(-1)
        logits = torch.einsum("qgld,kgd->glqk", q[a:b].unflatten(1, (H, h)), k[c:d]) * scale
        mask = mask.unsqueeze(1)
        logits = logits.masked_fill(~mask, -math.inf)
        p = logits.softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0)
        out.append(torch.einsum("glqk,kgd->qgld", p, v[c:d]).flatten(1, 2))
        lse.append(logits.logsumexp(-1).flatten(0, 1).T)
    return torch.cat(out), torch.cat(lse)


# Stage 1


LENGTHS = [200, 31, 128, 0, 191, 143]  # 31, 191 and 143 end one token before a mean begins; 191 before a coarse one, too


@pytest.mark.parametrize(("rows", "keys"), [(LENGTHS, LENGTHS), ([5, 1, 70], [200, 128, 191])], ids=["prefill", "chunks"])
@pytest.mark.parametrize(("H", "h", "D"), [(2, 16, 128), (1, 3, 8)])
@pytest.mark.parametrize("causal", [True, False])
def test_stage1_scores_of_packed_sequences(H: int, h: int, D: int, causal: bool, rows: list[int], keys: list[int]) -> None:
    q, k, cu = normal(sum(rows), H * h, D), normal(sum(keys), H, D, seed=1), bounds(rows)
    (fine, cu_fine), (coarse, cu_coarse) = means(k, keys, 32, 16), means(k, keys, 128, 64)
    width = int(cu_fine.diff().max())
    options: dict[str, Any] = {"max_seqlen_q": max(rows), "max_seqlen_k": width, "causal": causal, "softmax_scale": 0.2}
    for of_coarse, cu_of_coarse in ((coarse, cu_coarse), (fine, cu_fine)):  # at last as many coarse means as fine ones
        got = infllm_v2.infllmv2_attn_stage1(q, fine, of_coarse, cu, cu_fine, cu_of_coarse, **options)
        wanted = stage1_of(q, fine, of_coarse, [cu, cu_fine, cu_of_coarse], width, 0.2, causal)
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-10)
        assert float(got.sum()) > 0


def test_stage1_in_parts_and_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = normal(300, 32, 128, dtype=torch.bfloat16).requires_grad_(), normal(300, 2, 128, seed=1, dtype=torch.bfloat16)
    cu = bounds([300])
    (fine, cu_fine), (coarse, cu_coarse) = means(k, [300], 32, 16), means(k, [300], 128, 64)
    arguments = (q, fine, coarse, cu, cu_fine, cu_coarse, 300, len(fine))
    got = infllm_v2.infllmv2_attn_stage1(*arguments, causal=True)
    assert got.dtype == torch.bfloat16
    assert not got.requires_grad
    wanted = stage1_of(q.detach(), fine, coarse, [cu, cu_fine, cu_coarse], len(fine), 128**-0.5, True)
    torch.testing.assert_close(got.double(), wanted, atol=1e-6, rtol=2**-8)
    with torch.autocast("cpu", torch.bfloat16):  # it must not round the logits
        assert torch.equal(infllm_v2.infllmv2_attn_stage1(*arguments, causal=True), got)
    monkeypatch.setattr(infllm_v2, "_MOST_LOGITS", 32 * len(fine) * 7)
    torch.testing.assert_close(infllm_v2.infllmv2_attn_stage1(*arguments, causal=True), got, atol=1e-6, rtol=2**-7)


def test_a_row_sees_the_means_that_end_at_or_before_it() -> None:
    for length in (130, 191, 192):
        less = int((length + 1) % 16 == 0)  # of the original
        for count, size, every in ((length // 16 - 1, 32, 16), (length // 64 - 1, 128, 64)):
            less = int((length + 1) % every == 0)
            for row in range(length):
                ended = sum(mean * every + size - 1 <= row for mean in range(count))
                assert seen_means(row, length, count, every) == max(0, (row + 1) // every - 1 - less)
                assert less or ended == seen_means(row, length, count, every)


# Pooling


@pytest.mark.parametrize(("block_size", "stride"), [(64, 16), (32, 32), (48, 8)])
@pytest.mark.parametrize(("local", "first"), [(0, 0), (2, 1)])
def test_pooling_of_packed_sequences(block_size: int, stride: int, local: int, first: int) -> None:
    rows, counts, cached = [70, 0, 1, 33], [9, 5, 3, 0], [0, 7, 150, 64]
    scores = normal(2, sum(rows), max(counts))
    arguments = (bounds(rows), bounds(counts), torch.tensor(cached, dtype=torch.int32), 70, 9)
    got = infllm_v2.max_pooling_1d_varlen(scores, *arguments, local, first, block_size, stride)
    blocks = -(-(70 + 150) // block_size)
    assert got.shape == (2, sum(rows), blocks)
    wanted = [
        pooled_of(scores[head, start + i], before + i, count, blocks, local, first, block_size, stride)
        for head in range(2)
        for start, length, count, before in zip(bounds(rows).tolist(), rows, counts, cached, strict=False)
        for i in range(length)
    ]
    assert torch.equal(got, torch.stack(wanted).view_as(got))
    one = infllm_v2.max_pooling_1d(scores[:, :70].bfloat16(), 100, local, first, block_size, stride)
    blocks = -(-170 // block_size)
    wanted = [
        pooled_of(scores[head, i].bfloat16(), 100 + i, 9, blocks, local, first, block_size, stride) for head in range(2) for i in range(70)
    ]
    assert torch.equal(one, torch.stack(wanted).view(2, 70, blocks))


# Bits


def test_bits_of_blocks() -> None:
    topk_idx = torch.tensor([[[0, 63, 64, -1], [5, 5, 127, 130], [-1, -1, -7, 400]]], dtype=torch.int32)
    words, blocks = infllm_v2.topk_to_uint64(topk_idx, 64 * 129 - 3, 64)
    assert (blocks, words.dtype) == (129, torch.int64)
    wanted = [[[1 | 1 << 63, 1, 0], [1 << 5, 1 << 63, 1 << 2], [0, 0, 0]]]  # bits beyond the blocks fill the last word, as in the original
    assert [[[word % (1 << 64) for word in row] for row in rows] for rows in words.tolist()] == wanted
    mask = infllm_v2.uint64_to_bool(words, 129)
    assert mask.shape == (1, 3, 129)
    assert mask[0, 0].nonzero().flatten().tolist() == [0, 63, 64]
    batched, _ = infllm_v2.topk_to_uint64(topk_idx.expand(2, 1, 3, 4), 64 * 129 - 3, 64)
    assert torch.equal(batched, words.expand(2, 1, 3, 3))
    mask = normal(3, 5, 70) > 0
    packed, n = infllm_v2.blockmask_to_uint64(mask)
    assert n == 70
    assert torch.equal(infllm_v2.uint64_to_bool(packed, n), mask)


# Attention


def lists_of_blocks(H: int, T: int, n: int, blocks: int) -> Tensor:
    """[H,T,n] of blocks in any order, some twice, some padding, and a first row with nothing."""
    chosen = torch.randint(-1, blocks, (H, T, n), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    chosen[:, 0] = -1
    return chosen


@pytest.mark.parametrize(
    ("rows", "keys", "h"),
    [([130, 70, 0, 1], None, 16), ([1, 1, 1], [130, 64, 7], 16), ([9, 100, 5], [200, 100, 3], 3)],  # prefill, decoding, chunks
)
@pytest.mark.parametrize("dense", [False, True])
def test_attention_of_packed_sequences(rows: list[int], keys: list[int] | None, h: int, dense: bool) -> None:
    T, Tk = sum(rows), sum(keys or rows)
    q, k, v = (normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(((T, 2 * h, 16), (Tk, 2, 16), (Tk, 2, 16))))
    cu_q, cu_k = bounds(rows), bounds(keys or rows)
    topk_idx = None if dense else lists_of_blocks(2, T, 3, 4)
    causal = max(rows) > 1  # as the model calls it
    got = infllm_v2.infllmv2_attn_varlen_func(
        q, k, v, cu_q, cu_k, max(rows), max(keys or rows), softmax_scale=0.3, causal=causal, topk_idx=topk_idx
    )  # fmt: skip
    assert_same(got, attention_of(q, k, v, topk_idx, cu_q, cu_k, 0.3)[0], [q, k, v])


@pytest.mark.parametrize(("S", "new"), [(1, 0), (1, 1), (3, 3), (3, 1)])
@pytest.mark.parametrize("dense", [False, True])
def test_attention_over_a_cache(S: int, new: int, dense: bool) -> None:
    B, H, h, D, room = 3, 2, 16, 16, 200
    lengths = torch.tensor([150, 64, 0 if new else 2], dtype=torch.int32)
    q, k, v = normal(B, S, H * h, D), normal(B, new, H, D, seed=1), normal(B, new, H, D, seed=2)
    caches = [normal(B, room, H, D, seed=seed) for seed in (3, 4)]
    wanted = [cache.clone() for cache in caches]
    for b, length in enumerate(lengths.tolist()):
        for cache, x in zip(wanted, (k, v), strict=True):
            cache[b, length : length + new] = x[b]
    topk_idx = None if dense else lists_of_blocks(B * H, S, 3, 3).view(B, H, S, 3)
    arguments: dict[str, Any] = {"k": k, "v": v} if new else {}
    o, lse = infllm_v2.infllmv2_attn_with_kvcache(
        q, *caches, **arguments, cache_seqlens=lengths, causal=True, softmax_scale=0.3, return_softmax_lse=True, topk_idx=topk_idx
    )  # fmt: skip
    assert all(torch.equal(*pair) for pair in zip(caches, wanted, strict=True))
    for b, length in enumerate((lengths + new).tolist()):
        keys, values = (cache[b, :length] for cache in wanted)
        blocks = None if topk_idx is None else topk_idx[b]
        o_b, lse_b = attention_of(q[b], keys, values, blocks, bounds([S]), bounds([length]), 0.3)
        torch.testing.assert_close(o[b], o_b, atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(lse[b].T, lse_b, atol=1e-6, rtol=1e-6)


def test_gradients_over_a_cache() -> None:
    inputs = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(((1, 3, 32, 16), (1, 150, 2, 16), (1, 150, 2, 16)))]
    topk_idx = lists_of_blocks(2, 3, 2, 3)
    o = infllm_v2.infllmv2_attn_with_kvcache(*inputs, cache_seqlens=140, causal=True, topk_idx=topk_idx[None])
    assert isinstance(o, Tensor)
    q, k, v = (x[0] for x in inputs)
    wanted, _ = attention_of(q, k[:140], v[:140], topk_idx, bounds([3]), bounds([140]), 0.25)
    assert_same(o[0], wanted, inputs)


def test_lengths_of_a_cache_as_a_number_or_left_out() -> None:
    q, *caches = normal(2, 1, 32, 16), normal(2, 70, 2, 16, seed=1), normal(2, 70, 2, 16, seed=2)
    topk_idx = torch.tensor([[[[0]], [[1]]]] * 2, dtype=torch.int32)
    for length, as_tensor in ((66, torch.tensor([66, 66])), (None, torch.tensor([70, 70]))):
        o = infllm_v2.infllmv2_attn_with_kvcache(q, *caches, cache_seqlens=length, topk_idx=topk_idx)
        assert torch.equal(o, infllm_v2.infllmv2_attn_with_kvcache(q, *caches, cache_seqlens=as_tensor, topk_idx=topk_idx))


# The whole, as the model calls it: means, stage 1, pooling, top-k, attention


FIRST, LOCAL, N = 1, 1, 4  # init_blocks, local_blocks, and blocks of a row: so that score decides over one block of each row


def chosen_blocks(q: Tensor, k: Tensor, lengths: list[int], cached: list[int] | None) -> Tensor:
    """topk_idx [H,rows,N] of rows q, of all positions or, with `cached`, of the last one of each sequence."""
    (fine, cu_fine), (coarse, cu_coarse) = means(k, lengths, 32, 16), means(k, lengths, 128, 64)
    rows = lengths if cached is None else [1] * len(lengths)
    cache_lens = torch.tensor(cached or [0] * len(lengths), dtype=torch.int32)
    most, width = max(rows), int(cu_fine.diff().max())
    cu = bounds(rows)
    scores = infllm_v2.infllmv2_attn_stage1(
        q, fine, coarse, cu_seqlens_q=cu, cu_seqlens_k=cu_fine, cu_seqlens_v=cu_coarse, max_seqlen_q=most, max_seqlen_k=width,
        causal=cached is None,
    )  # fmt: skip
    of_blocks = infllm_v2.max_pooling_1d_varlen(
        scores, cu, cu_fine, cache_lens, most, width, local_blocks=LOCAL, init_blocks=FIRST, block_size=64, stride=16
    )
    chosen = of_blocks.topk(N, -1).indices.sort(-1).values
    own = torch.cat([torch.arange(a, a + b) for a, b in zip(cache_lens.tolist(), rows, strict=True)]) // 64
    return torch.where(chosen > own[:, None], -1, chosen).int()


def assert_best(topk_idx: Tensor, q: Tensor, k: Tensor, lengths: list[int], cached: list[int] | None, atol: float = 1e-12) -> None:
    """Check that every row chose the visible blocks of the highest scores. Neighbors often tie: a mean that touches both may be the largest
    of both, and top-k promises no order."""
    (fine, cu_fine), (coarse, cu_coarse) = means(k, lengths, 32, 16), means(k, lengths, 128, 64)
    rows = lengths if cached is None else [1] * len(lengths)
    cu = [bounds(rows), cu_fine, cu_coarse]
    scores = stage1_of(q, fine, coarse, cu, int(cu_fine.diff().max()), q.shape[-1] ** -0.5, cached is None)
    for n, length in enumerate(rows):
        for i, (g, of_head) in itertools.product(range(length), enumerate(scores)):
            position, row = i if cached is None else cached[n], int(cu[0][n]) + i
            of_blocks = pooled_of(of_head[row], position, int(cu_fine.diff()[n]), position // 64 + 1, LOCAL, FIRST, 64, 16)
            chosen = topk_idx[g, row]
            wanted = of_blocks.topk(min(N, len(of_blocks))).values
            got = of_blocks[chosen[chosen >= 0].unique()].sort(descending=True).values
            torch.testing.assert_close(got, wanted, atol=atol, rtol=0)


@pytest.mark.parametrize(("H", "h", "D"), [(2, 16, 16), (1, 16, 128)])
def test_the_whole_prefill(H: int, h: int, D: int) -> None:
    lengths = [330, 64, 319, 20]  # of which 64 and 20 have fewer tokens than a coarse mean; in the model: below dense_len
    T = sum(lengths)
    q, k, v = normal(T, H * h, D).requires_grad_(), normal(T, H, D, seed=1).requires_grad_(), normal(T, H, D, seed=2).requires_grad_()
    topk_idx = chosen_blocks(q, k, lengths, None)
    assert_best(topk_idx, q.detach(), k.detach(), lengths, None)
    cu = bounds(lengths)
    o = infllm_v2.infllmv2_attn_varlen_func(q, k, v, cu, cu, 330, 330, causal=True, topk_idx=topk_idx)
    assert_same(o, attention_of(q, k, v, topk_idx, cu, cu, D**-0.5)[0], [q, k, v])


def test_the_whole_decoding_step() -> None:
    lengths = [450, 64, 384]
    q, k, v = normal(3, 32, 16), normal(sum(lengths), 2, 16, seed=1), normal(sum(lengths), 2, 16, seed=2)
    cached = [length - 1 for length in lengths]
    topk_idx = chosen_blocks(q, k, lengths, cached)
    assert_best(topk_idx, q, k, lengths, cached)
    cu_q, cu_k = torch.arange(4, dtype=torch.int32), bounds(lengths)
    o = infllm_v2.infllmv2_attn_varlen_func(q, k, v, cu_q, cu_k, 1, 450, causal=False, topk_idx=topk_idx)
    torch.testing.assert_close(o, attention_of(q, k, v, topk_idx, cu_q, cu_k, 0.25)[0], atol=1e-12, rtol=1e-10)


def test_infllm_selection_chooses_as_well() -> None:
    q, k = normal(450, 32, 16), normal(450, 2, 16, seed=1)
    rows, keys = q.view(1, 450, 2, 16, 16), k.transpose(0, 1).unsqueeze(0)
    selection = nsa_sel.infllm_selection(rows.float(), keys.float(), n=N, first=FIRST, local=LOCAL + 1)
    assert_best(selection.block_indices[0].transpose(0, 1), q, k, [450], None, atol=1e-5)


# Refusals


Q, K, CU = torch.zeros(8, 32, 16), torch.zeros(8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
CACHE, SCORES = torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 4)
VARLEN: dict[str, Any] = {
    "q": Q,
    "k": K,
    "v": K,
    "cu_seqlens_q": CU,
    "cu_seqlens_k": CU,
    "max_seqlen_q": 8,
    "max_seqlen_k": 8,
    "causal": True,
}
STAGE1: dict[str, Any] = {**VARLEN, "cu_seqlens_v": CU}
WITH_CACHE: dict[str, Any] = {"q": torch.zeros(2, 2, 32, 16), "k_cache": CACHE, "v_cache": CACHE, "cache_seqlens": 6, "causal": True}
POOLING: dict[str, Any] = {"input": SCORES, "cache_len": 0, "local_blocks": 1, "init_blocks": 1}
POOLING_VARLEN: dict[str, Any] = {
    "input": SCORES, "cu_seqlens_q": CU, "cu_seqlens_k": torch.tensor([0, 4]), "cache_lens": torch.tensor([0]), "max_seqlen_q": 8,
    "max_seqlen_k": 4, "local_blocks": 1, "init_blocks": 1,
}  # fmt: skip
FLASH_REFUSED = {"dropout_p": 0.1, "window_size": (64, 0), "softcap": 30.0, "alibi_slopes": torch.ones(32), "block_table": CU}
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str, Any]] = [
    *((infllm_v2.infllmv2_attn_stage1, STAGE1, name, value) for name, value in FLASH_REFUSED.items()),
    *((infllm_v2.infllmv2_attn_varlen_func, VARLEN, name, value) for name, value in FLASH_REFUSED.items()),
    *((infllm_v2.infllmv2_attn_with_kvcache, WITH_CACHE, name, value) for name, value in FLASH_REFUSED.items() if name != "dropout_p"),
    (infllm_v2.infllmv2_attn_stage1, STAGE1, "causal", None),
    (infllm_v2.infllmv2_attn_stage1, STAGE1, "max_seqlen_k", 4),
    (infllm_v2.infllmv2_attn_stage1, STAGE1, "cu_seqlens_v", torch.tensor([0, 9])),
    (infllm_v2.infllmv2_attn_stage1, STAGE1, "cu_seqlens_k", torch.tensor([0, 4, 8])),
    (infllm_v2.infllmv2_attn_stage1, STAGE1, "v", K[..., :8]),
    (infllm_v2.infllmv2_attn_stage1, STAGE1, "q", Q[:, :31]),
    (infllm_v2.infllmv2_attn_varlen_func, VARLEN, "causal", False),
    (infllm_v2.infllmv2_attn_varlen_func, VARLEN, "return_attn_probs", True),
    (infllm_v2.infllmv2_attn_varlen_func, VARLEN, "topk_idx", torch.zeros(2, 7, 3, dtype=torch.int32)),
    (infllm_v2.infllmv2_attn_varlen_func, VARLEN, "topk_idx", torch.zeros(2, 8, 3)),
    (infllm_v2.infllmv2_attn_varlen_func, VARLEN, "cu_seqlens_k", torch.tensor([0, 4, 8])),
    *(
        (infllm_v2.infllmv2_attn_with_kvcache, WITH_CACHE, name, CU)
        for name in ("rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad")
    ),
    (infllm_v2.infllmv2_attn_with_kvcache, WITH_CACHE, "causal", False),
    (infllm_v2.infllmv2_attn_with_kvcache, WITH_CACHE, "cache_seqlens", 9),
    (infllm_v2.infllmv2_attn_with_kvcache, WITH_CACHE, "cache_seqlens", CU[:1]),
    (infllm_v2.infllmv2_attn_with_kvcache, WITH_CACHE, "k_cache", CACHE[:1]),
    (infllm_v2.infllmv2_attn_with_kvcache, WITH_CACHE, "v_cache", CACHE[:, :7]),
    (infllm_v2.infllmv2_attn_with_kvcache, WITH_CACHE, "k", torch.zeros(2, 2, 2, 16)),
    (infllm_v2.infllmv2_attn_with_kvcache, {**WITH_CACHE, "v": torch.zeros(2, 2, 2, 16)}, "k", torch.zeros(2, 2, 1, 16)),
    (infllm_v2.infllmv2_attn_with_kvcache, {**WITH_CACHE, "k": CACHE[:, :2], "v": CACHE[:, :2]}, "cache_seqlens", 7),
    (infllm_v2.infllmv2_attn_with_kvcache, WITH_CACHE, "topk_idx", torch.zeros(2, 2, 3, 3, dtype=torch.int32)),
    (infllm_v2.max_pooling_1d, POOLING, "input", SCORES[0]),
    (infllm_v2.max_pooling_1d, POOLING, "cache_len", torch.tensor([0])),
    (infllm_v2.max_pooling_1d, POOLING, "stride", 24),
    (infllm_v2.max_pooling_1d_varlen, POOLING_VARLEN, "input", SCORES.int()),
    (infllm_v2.max_pooling_1d_varlen, POOLING_VARLEN, "max_seqlen_k", 5),
    (infllm_v2.max_pooling_1d_varlen, POOLING_VARLEN, "cu_seqlens_q", CU - CU.clamp(max=1)),
    (infllm_v2.max_pooling_1d_varlen, POOLING_VARLEN, "cache_lens", torch.tensor([0, 0])),
    (infllm_v2.uint64_to_bool, {"uint64_array": torch.zeros(3, 2, dtype=torch.int64)}, "last_dim_size", 129),
]  # fmt: skip


def test_what_the_refused_calls_have_in_common_is_taken() -> None:
    for call, arguments in {call: arguments for call, arguments, *_ in reversed(REFUSED)}.items():
        if call is not infllm_v2.uint64_to_bool:
            call(**arguments)


@pytest.mark.parametrize(("call", "arguments", "name", "value"), REFUSED)
def test_what_is_refused_and_by_which_name(call: Callable[..., Any], arguments: dict[str, Any], name: str, value: Any) -> None:
    before = CACHE.clone()
    with pytest.raises(ArgumentError) as refused:
        call(**{**arguments, name: value})
    assert name in refused.value.argument or refused.value.argument == "sequences"
    assert "Remedy" in str(refused.value)
    assert torch.equal(CACHE, before)


# import infllm_v2


def test_remote_code_imports_the_module_while_it_is_patched() -> None:
    imports = "from infllm_v2 import " + ", ".join(call.__name__ for call in SIGNATURES)
    with pytest.raises(ModuleNotFoundError):
        exec(imports)
    undo, undo_other = patch_infllm_v2(), patch_infllm_v2()
    found: dict[str, Any] = {}
    exec(imports, found)
    assert all(found[call.__name__] is call for call in SIGNATURES)
    assert importlib.util.find_spec("infllm_v2") is not None  # how transformers looks for packages
    undo()
    undo()
    exec(imports)
    undo_other()
    with pytest.raises(ModuleNotFoundError):
        exec(imports)


def test_an_installed_infllm_v2_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "infllm_v2", types.ModuleType("infllm_v2"))
    with pytest.raises(ImportError, match=r"Remedy: pip uninstall infllm_v2"):
        patch_infllm_v2()
    undo_late = None
    monkeypatch.delitem(sys.modules, "infllm_v2")
    undo_late = patch_infllm_v2()
    other = types.ModuleType("infllm_v2")
    monkeypatch.setitem(sys.modules, "infllm_v2", other)  # another library's, since
    undo_late()
    assert sys.modules["infllm_v2"] is other
