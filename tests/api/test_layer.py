"""NSASelection equals the plain calls; block scores follow the paper's equations."""

from __future__ import annotations

import pytest
import torch

import nsa_sel
from nsa_sel.errors import ArgumentError
from nsa_sel.layer import NSASelection, block_scores
from nsa_sel.selection import Selection
from tests.helpers.cases import make_qkv


def test_the_module_equals_the_plain_call_for_scores_and_blocks() -> None:
    q, k, v = make_qkv(B=2, S=48, G=2, S_kv=64, requires_grad=True)
    module = NSASelection(n=3, block_size=16, backend="sdpa-packed")
    scores = torch.randn(2, 48, 2, 4)
    selection = Selection.from_scores(scores, 3, 16, S_kv=64)
    wanted = nsa_sel.selection_attention(q, k, v, selection, return_lse=True, backend="sdpa-packed")
    for got in (module(q, k, v, scores, return_lse=True), module(q, k, v, block_indices=selection.block_indices, return_lse=True)):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert nsa_sel.decisions()[-1].forward == "sdpa-packed"
    module(q, k, v, scores).sum().backward()
    assert q.grad is not None
    assert list(module.parameters()) == []
    assert "n=3, block_size=16" in repr(module)


def test_positions_and_options_reach_the_call() -> None:
    q, k, v = make_qkv(S=4, S_kv=64)
    q_pos, scores = torch.tensor([3, 20, 40, 63]), torch.randn(1, 4, 1, 4)
    got = NSASelection(2, 16, first=0, local=1, scale=0.5)(q, k, v, scores, q_pos=q_pos)
    selection = Selection.from_scores(scores, 2, 16, 0, 1, q_pos=q_pos)
    assert torch.equal(got, nsa_sel.selection_attention(q, k, v, selection, scale=0.5, q_pos=q_pos))


@pytest.mark.parametrize(("block", "length", "stride"), [(64, 32, 16), (16, 16, 16), (32, 32, 8), (16, 32, 16)])
@pytest.mark.parametrize("S_kv", [192, 200])
def test_block_scores_follow_the_paper(block: int, length: int, stride: int, S_kv: int) -> None:
    """Eq. 9 key by key: every key of a compressed one adds p / stride to its block; Eq. 10 sums over heads."""
    compressed = (S_kv - length) // stride + 1
    p = torch.rand(1, 3, 2, 4, compressed, requires_grad=True)
    wanted = torch.zeros(1, 3, 2, -(-S_kv // block))
    for i in range(compressed):
        for key in range(i * stride, i * stride + length):
            wanted[..., key // block] += p[..., i].detach().sum(-1) / stride
    got = block_scores(p, block, length, stride, S_kv)
    torch.testing.assert_close(got, wanted)
    assert not got.requires_grad


def test_bad_arguments_are_refused() -> None:
    q, k, v = make_qkv(S=16)
    with pytest.raises(ArgumentError, match=r"^scores, block_indices is neither given"):
        NSASelection()(q, k, v)
    with pytest.raises(ArgumentError, match=r"^scores, block_indices is both given"):
        NSASelection()(q, k, v, torch.zeros(1), block_indices=torch.zeros(1))
    with pytest.raises(ArgumentError, match=r"^compress_block is 24; allowed: a multiple of compress_stride = 16"):
        block_scores(torch.zeros(1, 1, 1, 1, 3), 64, 24, 16, 64)
    with pytest.raises(ArgumentError, match=r"^block_size is 0; allowed: a whole number"):
        block_scores(torch.zeros(1, 1, 1, 1, 3), 0, 32, 16, 64)
    with pytest.raises(ArgumentError, match=r"^p is of shape \(1, 3\)"):
        block_scores(torch.zeros(1, 3), 64, 32, 16, 64)
    with pytest.raises(ArgumentError, match=r"^p is of shape \(1, 1, 1, 1, 9\); allowed: \[B,S,G,h,3\]"):  # not of these 64 keys
        block_scores(torch.zeros(1, 1, 1, 1, 9), 64, 32, 16, 64)
    with pytest.raises(ArgumentError, match=r"^k is a list"):
        NSASelection()(q, [k], v, torch.zeros(1, 16, 1, 1))
