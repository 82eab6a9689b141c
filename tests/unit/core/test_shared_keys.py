"""Check calls with more groups of q than of K and V against the oracle, without copies of K and V."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import (
    Selection,
    decisions,
    explain,
    infllm_selection,
    selection_attention,
    selection_attention_varlen,
    selection_attention_with_kvcache,
    sliding_window_attention,
)
from nsa_sel.core import run
from nsa_sel.core.shared_keys import as_rows, call_of_rows
from tests.helpers.calls import assert_refused, calls_of
from tests.helpers.cases import assert_forward, assert_gradients, make_blocks, make_grads, make_qkv
from tests.helpers.checks import check_both, check_deterministic, check_poison

CPU = ("sdpa-packed", "numba")


def shared(B: int = 1, S: int = 6, G: int = 2, r: int = 2, h: int = 2, S_kv: int = 40, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q [B,S,G*r,h,D], and k, v of G groups."""
    q, _, _ = make_qkv(B=B, S=S, G=G * r, h=h, Dk=16, S_kv=S_kv, **more)
    _, k, v = make_qkv(B=B, S=S, G=G, h=h, Dk=16, S_kv=S_kv, seed=1, **more)
    return q, k, v


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize(("B", "G", "r", "h"), [(1, 2, 2, 1), (2, 1, 4, 2), (2, 3, 2, 2)])
def test_results_and_gradients_are_those_of_the_oracle(backend: str, B: int, G: int, r: int, h: int) -> None:
    check_both(backend, *shared(B, 6, G, r, h), make_blocks(B, 6, G * r, 40, 2, 8))


@pytest.mark.parametrize("backend", CPU)
def test_positions_poison_and_reruns(backend: str) -> None:
    selection = make_blocks(1, 6, 4, 40, 2, 8)
    check_both(backend, *shared(), selection, q_pos=torch.tensor([3, 39, 0, 11, 12, 38]))
    check_poison(backend, *shared(), make_blocks(1, 6, 4, 40, 1, 4))
    check_deterministic(backend, *shared(), selection, reruns=5)


def test_backends_get_the_callers_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a copy, nor an expanded view: the same memory, shape and strides."""
    calls = calls_of(monkeypatch, run, "run_pass")
    q, k, v = shared(B=2, G=3)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)  # a [B,S_kv,G,D] cache
    selection_attention(q, k, v, make_blocks(2, 6, 6, 40, 2, 8))
    ((call, *_),) = calls
    for mine, given in ((call.k, k), (call.v, v)):
        assert (mine.data_ptr(), mine.shape, mine.stride()) == (given.data_ptr(), given.shape, given.stride())
    assert call.q.shape == (2, 12, 3, 2, 16)
    assert decisions()[-1].request.G == 3


def test_rows_are_those_of_one_head_after_another() -> None:
    """Tokens of one head are neighbors, which share more than heads of one token do; q of one token is not copied."""
    q, k, v = shared(G=1, r=4)
    decision = explain(q, k, v, make_blocks(1, 6, 4, 40, 2, 8))
    assert (decision.request.S, decision.request.G, decision.request.h) == (24, 1, 2)
    rows, _, at = call_of_rows(q, make_blocks(1, 6, 4, 40, 2, 8), None, 40, 4)
    assert torch.equal(rows[0, 6:12, 0], q[0, :, 1])
    assert at.tolist() == [[*range(34, 40)] * 4]
    token = q[:, :1].contiguous()
    assert as_rows(token, 4).data_ptr() == token.data_ptr()


def test_forward_and_backward_share_one_selection_of_rows() -> None:
    q, k, v = (x.requires_grad_() for x in shared())
    selection = make_blocks(1, 6, 4, 40, 2, 8)
    for _ in range(2):
        selection_attention(q, k, v, selection).sum().backward()
    assert [key[0] for key in selection._snapshot.plans] == ["shared_keys"]
    selection.ranges[0, 0] = 0  # drops the plan
    o, lse = selection_attention(q, k, v, selection, return_lse=True)
    assert_forward((o, lse), q, k, v, selection.ranges)


@pytest.mark.parametrize("align", [None, False])
def test_packed_batches(align: bool | None) -> None:
    cu, r = [0, 10, 26], 2
    q, k, v = (x.requires_grad_() for x in shared(S=26, S_kv=26))
    parts = [make_blocks(1, end - start, 4, end - start, 2, 4, seed=start).block_indices for start, end in pairwise(cu)]
    selection = Selection.from_blocks(torch.cat(parts, 1)[0].unsqueeze(0), 4)
    packed = (q.squeeze(0), *(x.squeeze(0).transpose(0, 1) for x in (k, v)))
    o, lse = selection_attention_varlen(*packed, selection, cu, return_lse=True, align=align)
    do, _ = make_grads(q, v)
    got = torch.autograd.grad(o, (q, k, v), do.squeeze(0))
    assert o.shape == (26, 2 * r, 2, 16)
    for (start, end), blocks in zip(pairwise(cu), parts, strict=True):
        one, grads = ((x[:, start:end], y[:, :, start:end], z[:, :, start:end]) for x, y, z in ([x.detach() for x in (q, k, v)], got))
        ranges = Selection.from_blocks(blocks, 4).ranges
        assert_forward((o[None, start:end], lse[None, start:end]), *one, ranges)
        assert_gradients(grads, *one, ranges, do[:, start:end])


@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("S", [1, 2])
def test_caches(page: int | None, S: int) -> None:
    lengths = torch.tensor([39, 17], dtype=torch.int32)
    q, k, v = shared(B=2, S=S)
    selection = make_blocks(2, S, 4, 40, 2, 8)
    caches, table = (k.transpose(1, 2), v.transpose(1, 2)), None
    if page:
        order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
        caches, table = tuple(x.unflatten(1, (5, page)).flatten(0, 1)[order] for x in caches), order.argsort().view(2, 5).int()
    o, lse = selection_attention_with_kvcache(q, *caches, selection, lengths, table, return_lse=True)
    position = lengths[:, None] - S + torch.arange(S)
    assert_forward((o, lse), q, k, v, selection.ranges, q_pos=position)


def test_a_selection_of_other_rows_is_refused() -> None:
    q, k, v = shared()
    two, three, few = make_blocks(1, 6, 2, 40, 2, 8), make_blocks(1, 6, 3, 40, 2, 8), torch.zeros(1, 6, 4, 1, 2).int()
    words = "where q has 2 groups for each of k and v, put the heads of q into 2 groups"
    assert_refused(
        ("k is of shape .* 2 groups for each of k and v, pass a selection over all 4", lambda: selection_attention(q, k, v, two)),
        (words, lambda: sliding_window_attention(q, k, v, 8)),
        (words, lambda: infllm_selection(q, k)),
        ("k is of shape", lambda: selection_attention(q[:, :, :3], k, v, three)),
        ("at most S_kv = 5 rows", lambda: selection_attention(*shared(S=6, S_kv=5), few)),
    )
