"""Check the calls of other libraries against references of the originals, and the intended differences."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import compat, compressed_attention, selection_attention
from nsa_sel.compat import FSA_topk_sparse_attention, parallel_nsa, topk_sparse_attention
from nsa_sel.compression import BlockMean
from nsa_sel.testing import dense_attention
from tests.compat.patched import assert_same
from tests.helpers.calls import assert_refused

PARALLEL_NSA = {
    "q": ..., "k": ..., "v": ..., "g_cmp": None, "g_slc": None, "g_swa": None, "block_indices": None, "block_counts": 16,
    "block_size": 64, "window_size": 0, "scale": None, "cu_seqlens": None,
}  # fmt: skip
COMPRESSED = {
    "q": ..., "k": ..., "v": ..., "kernel_size": ..., "kernel_stride": ..., "block_size": ..., "topk": ..., "cu_seqlens_q": ...,
    "cu_seqlens_k": ..., "max_seqlen_q": None, "max_seqlen_k": None, "sm_scale": None, "init_blocks": 1, "local_blocks": 2,
    "parallel_topk_compute": "auto",
}  # fmt: skip
TOPK = {"q": ..., "k": ..., "v": ..., "topk_idx": ..., "block_size": ..., "cu_seqlens": ..., "softmax_scale": None}


pytestmark = pytest.mark.usefixtures("packed_sdpa")


@pytest.mark.parametrize(
    ("call", "original"),
    [
        (parallel_nsa, PARALLEL_NSA),
        (topk_sparse_attention, TOPK),
        (FSA_topk_sparse_attention, TOPK),
        (compat.compressed_attention, COMPRESSED),
    ],
)
def test_signatures_are_the_originals(call: Callable[..., Tensor], original: dict[str, Any]) -> None:
    parameters = inspect.signature(call).parameters.values()
    taken = {p.name: ... if p.default is p.empty else p.default for p in parameters if p.kind is not p.KEYWORD_ONLY}
    assert list(taken.items()) == list(original.items())


# A reference, written from the originals' documented behavior. Like them it gives NaN where a row selects nothing.


def fla_reference(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, counts: Tensor | None, block_size: int, scale: float, cu_q: list[int], cu_k: list[int]
) -> Tensor:
    """For every query and head of [T,HQ,K]: a softmax over the keys of all listed blocks, with -inf for keys after the query and keys of
    negative blocks. Queries are the last of their sequence."""
    T, HQ, _ = q.shape
    out = []
    for i in range(len(cu_q) - 1):
        keys, values = k[cu_k[i] : cu_k[i + 1]], v[cu_k[i] : cu_k[i + 1]]
        past = len(keys) - (cu_q[i + 1] - cu_q[i])
        for t in range(cu_q[i], cu_q[i + 1]):
            rows = []
            for head in range(HQ):
                g = head // (HQ // k.shape[1])
                taken = indices[t, g] if counts is None else indices[t, g, : counts[t, g]]
                key = (taken[:, None] * block_size + torch.arange(block_size)).flatten()
                hidden = (key > past + t - cu_q[i]) | (key < 0)
                key = key.clamp(0, len(keys) - 1)
                p = ((keys[key, g] @ q[t, head]) * scale).masked_fill(hidden, -torch.inf).softmax(0)
                rows.append(p @ values[key, g])
            out.append(torch.stack(rows))
    return torch.stack(out)


def distinct_blocks(rows: int, H: int, S: int, blocks: int, seed: int = 0) -> Tensor:
    """[rows,H,S] of distinct blocks in any order, future ones among them, some entries -1 but never a row's first: block 0."""
    generator = torch.Generator().manual_seed(seed)
    chosen = 1 + torch.rand(rows, H, blocks - 1, generator=generator).argsort(-1)[..., : S - 1]
    chosen = torch.where(torch.rand(chosen.shape, generator=generator) < 0.3, -1, chosen)
    return torch.cat((torch.zeros(rows, H, 1, dtype=torch.int64), chosen), -1)


def normal(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("TQ", [20, 3])
def test_parallel_nsa_matches_its_reference(TQ: int) -> None:
    B, T, HQ, H, block = 2, 20, 6, 2, 4
    q, k, v, g_slc = inputs = normal((B, TQ, HQ, 8), (B, T, H, 8), (B, T, H, 5), (B, TQ, HQ))
    indices = distinct_blocks(B * TQ, H, 4, 6).view(B, TQ, H, 4)
    counts = torch.randint(1, 5, (B, TQ, H), generator=torch.Generator().manual_seed(3))
    for counted, scale in ((16, None), (counts, 0.3), (2, None)):  # a number does not shorten the lists
        got = parallel_nsa(q, k, v, None, g_slc, None, indices, counted, block, 0, scale)
        limit = counted if isinstance(counted, Tensor) else None
        each = [
            fla_reference(q[b], k[b], v[b], indices[b], None if limit is None else limit[b], block, scale or 8**-0.5, [0, TQ], [0, T])
            for b in range(B)
        ]
        assert_same(got, torch.stack(each) * g_slc[..., None], inputs)


@pytest.mark.parametrize("form", [list, torch.tensor])
def test_parallel_nsa_matches_its_reference_on_packed_sequences(form: Callable[[list[int]], Any]) -> None:
    HQ, H, block = 4, 2, 4
    cu_q, cu_k = [0, 5, 5, 6, 18], [0, 9, 9, 10, 30]
    q, k, v = inputs = normal((1, 18, HQ, 8), (1, 30, H, 8), (1, 30, H, 8))
    indices = distinct_blocks(18, H, 3, 6)
    wanted = fla_reference(q[0], k[0], v[0], indices, None, block, 8**-0.5, cu_q, cu_k)[None]
    got = parallel_nsa(q, k, v, block_indices=indices[None], block_size=block, cu_seqlens=(form(cu_q), form(cu_k)))
    assert_same(got, wanted, inputs)
    own = q, k[:, :18], v[:, :18]
    wanted = fla_reference(*(x[0] for x in own), indices, None, block, 8**-0.5, cu_q, cu_q)[None]
    assert_same(parallel_nsa(*own, block_indices=indices[None], block_size=block, cu_seqlens=form(cu_q)), wanted, inputs)


def test_topk_sparse_attention_matches_its_reference() -> None:
    cu, HQ, H, block = [0, 5, 5, 6, 23], 6, 2, 4
    q, k, v = inputs = normal((23, HQ, 8), (23, H, 8), (23, H, 8))
    topk_idx = distinct_blocks(23, H, 4, 6).transpose(0, 1).int().contiguous()
    given = topk_idx.clone()
    for scale in (None, 0.3):
        wanted = fla_reference(q, k, v, topk_idx.transpose(0, 1).long(), None, block, scale or 8**-0.5, cu, cu)
        assert_same(topk_sparse_attention(q, k, v, topk_idx, block, torch.tensor(cu).int(), scale), wanted, inputs)
    assert torch.equal(topk_idx, given)  # the original's PyTorch twin strikes out future blocks in place


def test_compressed_attention_gives_each_sequence_its_own_and_blocks_for_the_selected_branch() -> None:
    cu, HQ, H, block, sizes = [0, 5, 5, 6, 31], 6, 2, 8, (4, 2, 8, 3)
    q, k, v = inputs = normal((31, HQ, 8), (31, H, 8), (31, H, 5))
    mean = BlockMean(*sizes[:2])
    k_cmp, v_cmp = (mean(x, cu) for x in (k, v))
    o, topk_idx = compat.compressed_attention(q, k_cmp, v_cmp, *sizes, torch.tensor(cu), torch.tensor([0, 1, 1, 1, 12]), 25, 11, 0.3)
    rule = dict(zip(("compress_block", "compress_stride", "block_size", "n"), sizes, strict=True))
    wanted, chosen = [], []
    for of in (slice(a, b) for a, b in itertools.pairwise(cu)):
        keys = (mean(x[None, of]) for x in (k, v))
        each, selection = compressed_attention(q[None, of].unflatten(2, (H, -1)), *keys, scale=0.3, **rule)
        wanted.append(each.flatten(2, 3)[0])
        chosen.append(selection.block_indices[0].transpose(0, 1))
    assert_same(o, torch.cat(wanted), inputs)
    assert torch.equal(topk_idx, torch.cat(chosen, 1))
    selected = topk_sparse_attention(q, k, v, topk_idx, block, cu)
    assert torch.equal(selected, topk_sparse_attention(q, k, v, torch.cat(chosen, 1), block, cu))


def test_flash_nsa_adds_three_branches_of_each_sequence() -> None:
    cu, HQ, H, window = [0, 5, 5, 6, 31], 4, 2, 6
    q, k, v, weight = inputs = normal((31, HQ, 8), (31, H, 8), (31, H, 8), (31, HQ, 3))
    options = {"kernel_size": 4, "stride": 2, "block_size": 8, "top_n": 3, "window_size": window}
    wanted = []
    for of in (slice(a, b) for a, b in itertools.pairwise(cu) if a < b):
        rows, gates = q[None, of].unflatten(2, (H, -1)), weight[None, of].unflatten(2, (H, -1)).sigmoid()
        kt, vt = (x[None, of].transpose(1, 2) for x in (k, v))
        means = (BlockMean(4, 2)(x[None, of]) for x in (k, v))
        o_cmp, selection = compressed_attention(rows, *means, compress_block=4, compress_stride=2, block_size=8, n=3)
        t = torch.arange(rows.shape[1])
        last = torch.stack((t - window, t + 1), -1)[None, :, None, None].expand(-1, -1, H, -1, -1)
        branches = o_cmp, selection_attention(rows, kt, vt, selection), dense_attention(rows, kt, vt, last)[0]
        wanted.append(sum(o * gate.unsqueeze(-1) for o, gate in zip(branches, gates.unbind(-1), strict=True)).flatten(2, 3)[0])
    assert_same(compat.flash_nsa(q, k, v, weight, cu, **options), torch.cat(wanted), inputs)


# Intended differences


def test_rows_without_selection_give_zeros_and_not_nan() -> None:
    q, k, v = inputs = normal((1, 8, 2, 8), (1, 8, 1, 8), (1, 8, 1, 8))
    indices = torch.where(torch.arange(8)[:, None, None] < 5, torch.tensor([-1, 7]), torch.tensor([0, 1]))[None]  # nothing or the future
    assert bool(fla_reference(q[0], k[0], v[0], indices[0], None, 4, 8**-0.5, [0, 8], [0, 8])[:5].isnan().all())
    o = parallel_nsa(q, k, v, block_indices=indices, block_size=4)
    other = topk_sparse_attention(q[0], k[0], v[0], indices[0].transpose(0, 1), 4, [0, 8])
    assert int(torch.count_nonzero(o[:, :5])) == 0
    assert torch.equal(o[0], other)
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(o.sum(), inputs))


def test_groups_may_have_any_number_of_heads() -> None:
    for heads in (1, 3):  # the original: 16, 32 ...
        q, k, v = inputs = normal((1, 8, 2 * heads, 8), (1, 8, 2, 8), (1, 8, 2, 8))
        indices = distinct_blocks(8, 2, 2, 2)
        wanted = fla_reference(q[0], k[0], v[0], indices, None, 4, 8**-0.5, [0, 8], [0, 8])[None]
        assert_same(parallel_nsa(q, k, v, block_indices=indices[None], block_size=4), wanted, inputs)


def nsa(**changes: Any) -> Callable[[], Tensor]:
    q, k, v = normal((2, 8, 4, 8), (2, 8, 2, 8), (2, 8, 2, 8))
    arguments = {"q": q, "k": k, "v": v, "block_indices": torch.zeros(2, 8, 2, 1).long(), "block_size": 4, **changes}
    return lambda: parallel_nsa(**arguments)


def topk(**changes: Any) -> Callable[[], Tensor]:
    q, k, v = normal((8, 4, 8), (8, 2, 8), (8, 2, 8))
    arguments = {"q": q, "k": k, "v": v, "topk_idx": torch.zeros(2, 8, 1).int(), "block_size": 4, "cu_seqlens": [0, 8], **changes}
    return lambda: topk_sparse_attention(**arguments)


BAD = {
    "a gate of others": (nsa(g_cmp=torch.ones(2, 8, 2)), r"g_cmp is of shape \(2, 8, 2\); allowed: a tensor \(2, 8, 4\)"),
    "a window without a gate": (nsa(window_size=512), r"g_swa is None; allowed: a tensor \[B,TQ,HQ\] with a window"),
    "no window": (nsa(window_size=None), "window_size is None; allowed: a whole number of keys, or 0"),
    "no blocks": (nsa(block_indices=None), "block_indices is None; allowed: a tensor.*pass g_cmp"),
    "no counts": (nsa(block_counts=None), "block_counts is None; allowed: a number"),
    "counts of chosen blocks": (
        nsa(g_cmp=torch.ones(2, 8, 4), block_indices=None, block_counts=torch.ones(2, 8, 2).long()),
        "block_counts is a tensor; allowed: a number where blocks are chosen",
    ),
    "too few blocks": (
        nsa(g_cmp=torch.ones(2, 8, 4), block_indices=None, block_counts=2),
        "block_counts is 2; allowed: at least 3 where blocks are chosen",
    ),
    "counts of others": (nsa(block_counts=torch.ones(2, 8, 1).long()), r"block_counts is of shape \(2, 8, 1\)"),
    "heads": (nsa(q=torch.zeros(2, 8, 5, 8)), "q is of 5 heads; allowed: a multiple of k's 2 heads"),
    "groups apart": (nsa(q=torch.zeros(2, 8, 2, 2, 8)), r"q is of shape \(2, 8, 2, 2, 8\); allowed: a tensor \[B,TQ,HQ,K\]"),
    "no tensor": (nsa(k=[1]), "k is a list; allowed: a tensor"),
    "a packed batch": (nsa(cu_seqlens=[0, 8]), "q is of 2 batch entries; allowed: 1 with cu_seqlens"),
    "rows first": (topk(topk_idx=torch.zeros(8, 2, 1).int()), r"topk_idx is of shape \(8, 2, 1\); allowed: \[H=2, T=8, topk\]"),
    "no indices": (topk(topk_idx=None), "topk_idx is a NoneType"),
    "bounds": (topk(cu_seqlens=[0, 9]), "cu_seqlens_q is 9 last; allowed: at most 8"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_unsupported_arguments_are_refused_with_a_remedy(call: Callable[[], Tensor], message: str) -> None:
    assert_refused((message, call))


def test_a_gate_without_a_window_is_ignored() -> None:
    assert torch.equal(nsa()(), nsa(g_swa=torch.full((2, 8, 4), float("nan")))())
