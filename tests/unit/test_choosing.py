"""Check `choose_blocks`, `moba_selection` and `infllm_selection` against the definitions of their sources, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import nsa_sel
from nsa_sel import Selection, choose_blocks, compressed_attention, infllm_selection, moba_selection
from nsa_sel.core import registry
from nsa_sel.core.decision import Decision, Override
from nsa_sel.errors import BackendError
from tests.helpers.choosing_reference import assert_chosen, best, infllm_scores, moba_scores, msa_scores
from tests.helpers.wrong_calls import refused

BACKENDS = ("choose-torch", "choose-triton")
INFLLM = {"block_size": 16, "n": 3, "first": 1, "local": 1, "compress_block": 8, "compress_stride": 4}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_at(B: int, S: int, S_kv: int) -> Tensor:
    return torch.arange(S_kv - S, S_kv).expand(B, S)


def last() -> Decision:
    return nsa_sel.decisions()[-1]


# Each way as its source defines it


@pytest.mark.parametrize("backend", BACKENDS)
def test_minimax_indexer(backend: str) -> None:
    """One index head a group, one index key for all groups, chunked prefill."""
    q, k, positions = randn(2, 9, 2, 1, 16), randn(2, 1, 70, 16, seed=1), rows_at(2, 9, 70)
    selection = choose_blocks(q, k, block_size=16, n=3, backend=backend)
    scores = msa_scores(q, k, positions, 16)
    assert_chosen(selection.block_indices, scores, best(scores, positions, 16, 3, 0, 1))
    assert (selection.block_size, selection.n, selection.disjoint) == (16, 3, True)
    assert (last().forward, last().request.pool, last().request.Dv) == (backend, ("logits", "sum", "max"), 0)


def test_minimax_indexer_of_heads_that_share_a_choice() -> None:
    """In transformers' model the largest of all index heads chooses for all groups."""
    q, k, positions = randn(1, 30, 1, 4, 16), randn(1, 1, 30, 16, seed=1), rows_at(1, 30, 30)
    selection = choose_blocks(q, k, block_size=4, n=3, heads="max", scale=1.0)
    scores = msa_scores(q.transpose(2, 3), k, positions, 4).amax(2, keepdim=True)
    assert_chosen(selection.block_indices, scores, best(scores, positions, 4, 3, 0, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_moba(backend: str) -> None:
    q, k, positions = randn(1, 9, 2, 3, 16), randn(1, 2, 75, 16, seed=1), rows_at(1, 9, 75)
    selection = moba_selection(q, k, block_size=8, n=4, backend=backend)
    scores = moba_scores(q, k, positions, 8)
    assert_chosen(selection.block_indices, scores, best(scores, positions, 8, 4, 0, 1))
    decoded = moba_selection(q[:, -1], k, block_size=8, n=4, backend=backend)
    assert torch.equal(decoded.ranges[:, 0], selection.ranges[:, -1])


@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_infllm(backend: str, coarse: bool) -> None:
    """Heads of very different norms, so that the coarse log-sum-exp matters; the first rows see no coarse mean."""
    q, k, positions = randn(1, 20, 2, 3, 16), randn(1, 2, 100, 16, seed=1), torch.arange(20, 100, 4).expand(1, 20)
    q = q * torch.tensor([0.5, 2.0, 4.0])[:, None]
    selection = infllm_selection(q, k, **INFLLM, coarse_lse=coarse, q_pos=positions, backend=backend)
    scores = infllm_scores(q, k, positions, coarse=coarse, block=16, l=8, d=4)
    assert_chosen(selection.block_indices, scores, best(scores, positions, 16, 3, 1, 1))
    assert [decision.request.pool for decision in nsa_sel.decisions()[-2:]][1 - coarse :] == [("lse",)] * coarse + [
        ("weights", "sum", "max")
    ]


def test_the_default_windows_of_infllm_are_those_of_its_source() -> None:
    """Pooling of 5 means every 4: all that touch a block."""
    q, k, positions = randn(1, 3, 1, 16, 8), randn(1, 1, 1500, 8, seed=1), torch.tensor([[1499, 777, 126]])
    scores = infllm_scores(q, k, positions, coarse=True)
    selection = infllm_selection(q, k, n=8, local=3, q_pos=positions)
    assert_chosen(selection.block_indices, scores, best(scores, positions, 64, 8, 1, 3))


def test_sums_of_weights_choose_the_blocks_of_compressed_attention() -> None:
    q, k, sizes = randn(1, 50, 2, 3, 16), randn(1, 2, 11, 16, seed=1), {"compress_block": 8, "compress_stride": 4, "block_size": 16}
    _, nsa, lse = compressed_attention(q, k, k, **sizes, n=3, first=1, local=1, return_lse=True)
    options = {**sizes, "n": 3, "first": 1, "local": 1, "softmax": True, "reduce": "sum"}
    for given in (None, lse):
        assert torch.equal(choose_blocks(q, k, **options, lse=given, S_kv=50).ranges, nsa.ranges)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_keys_with_weights_and_decode(backend: str) -> None:
    q, k = randn(1, 1, 3, 2, 16), randn(1, 1, 40, 16, seed=1)
    options: dict[str, Any] = {"block_size": 8, "n": 3, "softmax": True, "backend": backend}
    whole = choose_blocks(q, k.expand(-1, 3, -1, -1).contiguous(), **options)
    assert torch.equal(choose_blocks(q, k, **options).ranges, whole.ranges)
    lse = torch.einsum("bsghd,bkd->bsghk", q / 4, k[:, 0]).logsumexp(-1)
    assert torch.equal(choose_blocks(q[:, 0], k, **options, lse=lse[:, 0]).ranges, whole.ranges)


def test_empty_batch_and_rows() -> None:
    for B, S in ((0, 8), (1, 0)):
        q, k = torch.randn(B, S, 2, 1, 16), torch.randn(B, 1, S, 16)
        assert choose_blocks(q, k, block_size=4, n=3).ranges.shape == (B, S, 2, 3, 2)
        assert infllm_selection(q, k.expand(-1, 2, -1, -1), **INFLLM).ranges.shape == (B, S, 2, 3, 2)
        assert moba_selection(q, k.expand(-1, 2, -1, -1)).ranges.shape == (B, S, 2, 3, 2)


# Decisions


def choose(**options: Any) -> Selection:
    return choose_blocks(randn(1, 20, 1, 1, 16), randn(1, 1, 20, 16, seed=1), block_size=4, n=3, **options)


def test_a_decision_replays_and_takes_overrides() -> None:
    choose()
    assert last().request.kind == "choose"
    assert [verdict.backend for verdict in last().verdicts] == list(registry.backends("choose"))
    assert Decision.from_json(last().to_json()).replay() == ()
    assert "scores    max over a block, sum over heads, of logits" in nsa_sel.describe(last())
    with nsa_sel.use_backend("choose-triton"):
        choose()
    assert (last().forward, last().override) == ("choose-triton", Override("choose-triton", "use_backend"))
    with pytest.raises(BackendError, match="is unknown to compressed_attention and choose_blocks"):
        choose(backend="numba")


# PyTorch


def every_way(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    moba = moba_selection(q, k, block_size=4)
    return choose_blocks(q, k, block_size=4, n=3).ranges, moba.ranges, infllm_selection(q, k, **INFLLM).ranges


def test_one_graph_without_gradient() -> None:
    q, k = randn(1, 40, 2, 2, 16).requires_grad_(), randn(1, 2, 40, 16, seed=1)
    expected = every_way(q, k)
    assert not any(x.requires_grad for x in expected)
    found = torch.compile(every_way, fullgraph=True, backend="aot_eager")(q, k)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    plain = q.detach()
    with FakeTensorMode() as mode:
        faked = every_way(mode.from_tensor(plain), mode.from_tensor(k))
    assert [x.shape for x in faked] == [x.shape for x in expected]


def test_autocast_and_transforms() -> None:
    q, k = randn(1, 20, 1, 1, 16), randn(1, 1, 20, 16, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        choose()
    assert last().request.dtype == "bfloat16"
    with pytest.raises(BackendError, match="choose_blocks is called inside"):
        torch.func.vmap(lambda x: choose_blocks(x, k, block_size=4, n=3).ranges)(q[None])


# Bad input


WRONG: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("choose", {"q": [1.0]}, ("q is a list", "a torch.Tensor")),
    ("choose", {"k": None}, ("k is a NoneType", "a torch.Tensor")),
    ("choose", {"q": randn(2, 16)}, ("q is of shape (2, 16)", "[B,S,G,h,Dk]")),
    ("choose", {"k": randn(1, 3, 20, 16)}, ("k is of shape (1, 3, 20, 16)", "[B=1, G=2, S_kv, D]")),
    ("choose", {"k": randn(1, 2, 20, 8)}, ("k is of head dimension 8", "q's head dimension 16")),
    ("choose", {"k": randn(1, 2, 20, 16).double()}, ("k is of dtype torch.float64", "k.to(q.dtype)")),
    ("choose", {"k": randn(1, 2, 19, 16)}, ("S_kv is 19", ">= S = 20")),
    ("choose", {"S_kv": 21}, ("k is of 20 compressed keys", "allowed: 21", "pass S_kv=")),
    ("choose", {"S_kv": 20.0}, ("S_kv is 20.0", "a whole number")),
    ("choose", {"block_size": 0}, ("block_size is 0", "a whole number >= 1")),
    ("choose", {"n": 0}, ("n is 0", "a whole number >= 1")),
    ("choose", {"n": 1, "first": 1}, ("first + local is 1 + 1", "at most n = 1")),
    ("choose", {"local": -1}, ("first + local is 0 + -1",)),
    ("choose", {"reduce": "mean"}, ("reduce is 'mean'", "'max' or 'sum'")),
    ("choose", {"heads": None}, ("heads is None", "'max' or 'sum'")),
    ("choose", {"softmax": 1}, ("softmax is 1", "True or False")),
    ("choose", {"lse": torch.zeros(1, 20, 2, 1)}, ("lse is given", "None without softmax=True")),
    ("choose", {"lse": 3, "softmax": True}, ("lse is a int", "a torch.Tensor")),
    ("choose", {"lse": torch.zeros(1, 20, 2), "softmax": True}, ("lse is torch.float32 of shape (1, 20, 2)", "(1, 20, 2, 1)")),
    ("choose", {"compress_block": 3, "compress_stride": 2}, ("compress_block is 3", "a multiple of compress_stride = 2")),
    ("choose", {"compress_block": 8}, ("compress_block is 8", "at most block_size = 4")),
    ("choose", {"compress_stride": True}, ("compress_stride is True", "a whole number >= 1")),
    ("choose", {"scale": math.inf}, ("scale is inf", "a finite number")),
    ("choose", {"q_pos": torch.arange(19)}, ("q_pos is of shape (19,)", "[S=20] or [B=1, S=20]")),
    ("choose", {"q_pos": torch.arange(1, 21)}, ("q_pos is from 1 to 20", "S_kv = 20")),
    ("choose", {"backend": 3}, ("backend is 3", "the name of a backend")),
    ("moba", {"k": randn(1, 1, 20, 16)}, ("k is of shape (1, 1, 20, 16)", "[B=1, G=2, S_kv, D]")),
    ("moba", {"q": [1.0]}, ("q is a list", "a torch.Tensor")),
    ("moba", {"block_size": 2.0}, ("block_size is 2.0", "a whole number >= 1")),
    ("moba", {"n": 0}, ("n is 0", "a whole number >= 1")),
    ("moba", {"q_pos": torch.arange(1, 21)}, ("q_pos is from 1 to 20", "S_kv = 20")),
    ("moba", {"backend": 3}, ("backend is 3", "the name of a backend")),
    ("infllm", {"k": randn(1, 2, 20)}, ("k is of shape (1, 2, 20)", "[B=1, G=2, S_kv, D]")),
    ("infllm", {"n": 2}, ("first + local is 1 + 33", "at most n = 2")),
    ("infllm", {"block_size": 60}, ("block_size is 60", "a multiple of compress_stride = 16")),
    ("infllm", {"compress_stride": 0}, ("compress_stride is 0", "a whole number >= 1")),
    ("infllm", {"compress_block": 128}, ("compress_block is 128", "at most block_size = 64")),
    ("infllm", {"coarse_lse": "yes"}, ("coarse_lse is 'yes'", "True or False")),
    ("infllm", {"scale": "big"}, ("scale is 'big'", "a finite number")),
    ("infllm", {"q_pos": [0]}, ("q_pos is a list", "[S] or [B,S]")),
    ("infllm", {"backend": 3}, ("backend is 3", "the name of a backend")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("way", "changes", "fragments"), WRONG, ids=[f"{way} {', '.join(changes)} {i}" for i, (way, changes, _) in enumerate(WRONG)]
)
def test_wrong_calls(way: str, changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    call = {"choose": choose_blocks, "moba": moba_selection, "infllm": infllm_selection}[way]
    sizes = {"choose": {"block_size": 4, "n": 3}, "moba": {"block_size": 4}, "infllm": {}}[way]
    refused(call, {"q": randn(1, 20, 2, 1, 16), "k": randn(1, 2, 20, 16), **sizes}, changes, fragments)
