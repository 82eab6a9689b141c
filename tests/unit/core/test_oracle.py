"""Check the oracle against an independent dense attention and its autograd, both in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nsa_sel.oracle import oracle_backward, oracle_forward, oracle_mask
from tests.helpers.cases import DISTRIBUTIONS, edge_selections, make_grads, make_qkv, make_spans, plain_torch

SHAPES = [  # B, S, G, h, Dk, Dv, S_kv
    (1, 16, 1, 2, 16, 16, 16),
    (2, 5, 3, 4, 24, 16, 20),
    (2, 7, 2, 1, 8, 32, 64),
    (1, 1, 2, 3, 16, 8, 33),
]


def check(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, scale: float | None = None, q_pos: Tensor | None = None) -> None:
    """Forward and hand backward (with and without dlse) equal the dense attention's to float64 rounding."""
    o, lse = oracle_forward(q, k, v, ranges, scale, q_pos)
    expected_o, expected_lse = plain_torch(q, k, v, ranges, scale, q_pos)
    assert o.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(o, expected_o, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-13)
    do, dlse = make_grads(q, v)
    empty = expected_lse == -math.inf
    for with_dlse in (False, True):
        got = oracle_backward(q, k, v, ranges, do, dlse if with_dlse else None, scale, q_pos)
        inputs = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
        o, lse = plain_torch(*inputs, ranges, scale, q_pos)
        loss = (o * do).sum()
        if with_dlse:
            loss = loss + (lse.masked_fill(empty, 0.0) * dlse).sum()
        for name, mine, theirs in zip(("dq", "dk", "dv"), got, torch.autograd.grad(loss, inputs), strict=True):
            assert mine.dtype == torch.float64
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_the_oracle_equals_dense_attention(shape: tuple[int, ...], kind: str) -> None:
    B, S, G, h, Dk, Dv, S_kv = shape
    q, k, v = make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv, dtype=torch.float64)
    check(q, k, v, make_spans(kind, B, S, G, S_kv, L=12))


@pytest.mark.parametrize("name", edge_selections(1, 1, 1, 16))
@pytest.mark.parametrize("S", [1, 6, 16])
def test_the_oracle_equals_dense_attention_on_edge_selections(name: str, S: int) -> None:
    q, k, v = make_qkv(2, S, 2, 3, 8, 16, S_kv=16, dtype=torch.float64)
    check(q, k, v, edge_selections(2, S, 2, 16)[name])


@pytest.mark.parametrize("per_sequence", [False, True])
def test_the_oracle_accepts_positions_and_scale(per_sequence: bool) -> None:
    q, k, v = make_qkv(2, 6, 2, 2, 16, 8, S_kv=40, dtype=torch.float64)
    q_pos = torch.randint(0, 40, (2, 6) if per_sequence else (6,))
    check(q, k, v, make_spans("mixed", 2, 6, 2, 40, L=24), scale=0.7, q_pos=q_pos)


def test_overlaps_count_a_key_once() -> None:
    q, k, v = make_qkv(1, 4, 1, 2, 8, dtype=torch.float64, S_kv=16)
    overlapping = torch.tensor([[0, 6], [4, 9], [5, 6]]).expand(1, 4, 1, 3, 2)
    union = torch.tensor([[0, 9]]).expand(1, 4, 1, 1, 2)
    do, dlse = make_grads(q, v)
    assert all(map(torch.equal, oracle_forward(q, k, v, overlapping), oracle_forward(q, k, v, union)))
    assert all(map(torch.equal, oracle_backward(q, k, v, overlapping, do, dlse), oracle_backward(q, k, v, union, do, dlse)))
    check(q, k, v, overlapping)


def test_decode_equals_a_prefill_of_one_row() -> None:
    q, k, v = make_qkv(3, 1, 2, 4, 16, 8, S_kv=24)
    ranges = make_spans("few", 3, 1, 2, 24, L=10)
    do, dlse = make_grads(q, v)
    for q_pos in (None, torch.tensor([[4], [11], [23]])):
        o, lse = oracle_forward(q[:, 0], k, v, ranges[:, 0], q_pos=q_pos)
        assert o.shape == (3, 2, 4, 8)
        full_o, full_lse = oracle_forward(q, k, v, ranges, q_pos=q_pos)
        assert torch.equal(o, full_o[:, 0])
        assert torch.equal(lse, full_lse[:, 0])
        dq, dk, dv = oracle_backward(q[:, 0], k, v, ranges[:, 0], do[:, 0], dlse[:, 0], q_pos=q_pos)
        full = oracle_backward(q, k, v, ranges, do, dlse, q_pos=q_pos)
        assert torch.equal(dq, full[0][:, 0])
        assert torch.equal(dk, full[1])
        assert torch.equal(dv, full[2])
    assert torch.equal(oracle_mask(ranges[:, 0], 24, 1), oracle_mask(ranges, 24, 1))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_unselected_keys_are_never_read(poison: float) -> None:
    q, k, v = make_qkv(2, 6, 2, 2, 8, S_kv=32, dtype=torch.float64)
    ranges = make_spans("few", 2, 6, 2, 32, L=6)
    do, dlse = make_grads(q, v)
    unused = ~oracle_mask(ranges, 32, 6).any(1)  # [B,G,S_kv]: no row of the sequence selects the key
    assert bool(unused.any())
    clean = [*oracle_forward(q, k, v, ranges), *oracle_backward(q, k, v, ranges, do, dlse)]
    k, v = (torch.where(unused.unsqueeze(-1), poison, tensor) for tensor in (k, v))
    dirty = [*oracle_forward(q, k, v, ranges), *oracle_backward(q, k, v, ranges, do, dlse)]
    assert all(map(torch.equal, clean, dirty))
    assert bool((dirty[3][unused] == 0).all())
    assert bool((dirty[4][unused] == 0).all())


def test_the_mask_equals_one_by_hand() -> None:
    ranges = torch.tensor([[[[[0, 2], [3, 9]]], [[[-3, 1], [4, 2]]]]])  # two rows at positions 3 and 4
    assert oracle_mask(ranges, 5, 2)[0, :, 0].int().tolist() == [[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]]
    assert oracle_mask(ranges, 5, 2, torch.tensor([4, 0]))[0, :, 0].int().tolist() == [[1, 1, 0, 1, 1], [1, 0, 0, 0, 0]]
