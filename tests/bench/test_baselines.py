"""The dense baselines of the benches match the oracle."""

from __future__ import annotations

import pytest
import torch

from nsa_sel.bench.core.baselines import dense_causal_sdpa, masked_sdpa, token_mask
from nsa_sel.oracle import oracle_backward, oracle_forward
from nsa_sel.selection import Selection
from tests.helpers.cases import assert_all_close, edge_selections, make_grads, make_qkv, make_spans


@pytest.mark.parametrize("form", [torch.bool, torch.float64])
def test_masked_sdpa(form: torch.dtype) -> None:
    q, k, v = make_qkv(2, 9, 2, 3, 16, 8, S_kv=37, dtype=torch.float64, requires_grad=True)
    for ranges in edge_selections(2, 9, 2, 37).values():
        selection = Selection.from_ranges(ranges)
        do, _ = make_grads(q, v)
        o = masked_sdpa(q, k, v, selection if form == torch.bool else token_mask(selection, 37, dtype=form), scale=0.2)
        torch.testing.assert_close(o, oracle_forward(q, k, v, ranges, 0.2)[0])
        assert_all_close(torch.autograd.grad(o, (q, k, v), do), oracle_backward(q, k, v, ranges, do, scale=0.2))


def test_token_mask_at_positions() -> None:
    q, k, v = make_qkv(2, 5, 1, 2, 8, S_kv=30)
    ranges = make_spans("mixed", 2, 5, 1, 30, 20)
    q_pos = torch.tensor([29, 3, 11, 0, 15])
    o = masked_sdpa(q, k, v, token_mask(Selection.from_ranges(ranges), 30, q_pos))
    torch.testing.assert_close(o.double(), oracle_forward(q, k, v, ranges, q_pos=q_pos)[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("S", "S_kv"), [(20, 20), (7, 20), (1, 20), (1, 1)])
@pytest.mark.parametrize("h", [1, 3])
def test_dense_causal_sdpa_counts_rows_from_the_last_key(S: int, S_kv: int, h: int) -> None:
    q, k, v = make_qkv(2, S, 2, h, 8, S_kv=S_kv, dtype=torch.float64, requires_grad=True)
    everything = torch.tensor([0, S_kv]).expand(2, S, 2, 1, 2)
    do, _ = make_grads(q, v)
    o = dense_causal_sdpa(q, k, v)
    torch.testing.assert_close(o, oracle_forward(q, k, v, everything)[0])
    assert_all_close(torch.autograd.grad(o, (q, k, v), do), oracle_backward(q, k, v, everything, do))
