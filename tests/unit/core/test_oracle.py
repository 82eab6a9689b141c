"""Check the oracle against an independent dense attention and its autograd, both in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa_sel.oracle import oracle_mask
from nsa_sel.testing import edge_ranges, edge_rows, span_rows
from tests.helpers.cases import DISTRIBUTIONS, make_grads, make_qkv, make_spans, oracle_results, plain_results

SHAPES = [  # B, S, G, h, Dk, Dv, S_kv
    (1, 16, 1, 2, 16, 16, 16),
    (2, 5, 3, 4, 24, 16, 20),
    (2, 7, 2, 1, 8, 32, 64),
    (1, 1, 2, 3, 16, 8, 33),
]


def check(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, scale: float | None = None, q_pos: Tensor | None = None) -> None:
    """Forward and hand backward (with and without dlse) equal the dense attention's to float64 rounding."""
    do, own = make_grads(q, v)
    for dlse in (None, own):
        found = oracle_results(q, k, v, ranges, do, dlse, scale, q_pos)
        torch.testing.assert_close(found, plain_results(q, k, v, ranges, do, dlse, scale, q_pos), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_the_oracle_equals_dense_attention(shape: tuple[int, ...], kind: str) -> None:
    B, S, G, h, Dk, Dv, S_kv = shape
    q, k, v = make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv, dtype=torch.float64)
    check(q, k, v, make_spans(kind, B, S, G, S_kv, L=12))


@pytest.mark.parametrize("behavior", [*edge_rows(0, 0, 1), *span_rows(0, 0)])
@pytest.mark.parametrize("S", [1, 6, 16])
def test_the_oracle_equals_dense_attention_on_edge_rows(behavior: str, S: int) -> None:
    q, k, v = make_qkv(2, S, 2, 3, 8, 16, S_kv=16, dtype=torch.float64)
    check(q, k, v, edge_ranges(None, S, 16, ("blocks", behavior)).expand(2, -1, 2, -1, -1))


@pytest.mark.parametrize("per_sequence", [False, True])
def test_the_oracle_accepts_positions_and_scale(per_sequence: bool) -> None:
    q, k, v = make_qkv(2, 6, 2, 2, 16, 8, S_kv=40, dtype=torch.float64)
    q_pos = torch.randint(0, 40, (2, 6) if per_sequence else (6,))
    check(q, k, v, make_spans("mixed", 2, 6, 2, 40, L=24), scale=0.7, q_pos=q_pos)


def test_decode_equals_a_prefill_of_one_row() -> None:
    q, k, v = make_qkv(3, 1, 2, 4, 16, 8, S_kv=24)
    ranges = make_spans("few", 3, 1, 2, 24, L=10)
    do, dlse = make_grads(q, v)
    for q_pos in (None, torch.tensor([[4], [11], [23]])):
        found = oracle_results(q[:, 0], k, v, ranges[:, 0], do[:, 0], dlse[:, 0], q_pos=q_pos)
        assert found[0].shape == (3, 2, 4, 8)
        o, lse, dq, dk, dv = oracle_results(q, k, v, ranges, do, dlse, q_pos=q_pos)
        assert all(map(torch.equal, found, (o[:, 0], lse[:, 0], dq[:, 0], dk, dv)))
    assert torch.equal(oracle_mask(ranges[:, 0], 24, 1), oracle_mask(ranges, 24, 1))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_unselected_keys_are_never_read(poison: float) -> None:
    q, k, v = make_qkv(2, 6, 2, 2, 8, S_kv=32, dtype=torch.float64)
    ranges = make_spans("few", 2, 6, 2, 32, L=6)
    do, dlse = make_grads(q, v)
    unused = ~oracle_mask(ranges, 32, 6).any(1)  # [B,G,S_kv]: no row of the sequence selects the key
    assert bool(unused.any())
    clean = oracle_results(q, k, v, ranges, do, dlse)
    dirty = oracle_results(q, *(torch.where(unused.unsqueeze(-1), poison, x) for x in (k, v)), ranges, do, dlse)
    assert all(map(torch.equal, clean, dirty))
    assert not any(bool(x[unused].any()) for x in dirty[3:])
