"""The backends of a CPU, and each path through packed SDPA, against the float64 oracle: values, edges, layouts, poison."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from nsa_sel.backends import numba_cpu, sdpa_packed
from nsa_sel.backends._sdpa import gathered, key_tiles
from nsa_sel.core.call import Call
from nsa_sel.oracle import oracle_mask
from nsa_sel.selection import Selection
from tests.helpers.cases import (
    RESULTS,
    lse_dtype,
    make_call,
    make_grads,
    make_spans,
    oracle_results,
)

LIMITS = {torch.float32: 1e-6, torch.float64: 1e-14}  # mean absolute error; packed SDPA's is relative to results larger than 1
Run = Callable[[Call, Tensor, Tensor | None], tuple[Tensor, ...]]


def by_backend(module: Any) -> Run:
    def run(call: Call, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, ...]:
        o, lse = module.forward(call)
        return o, lse, *module.backward(call, o, lse, do, dlse)

    return run


def by_path(module: Any) -> Run:
    """A path of packed SDPA, whether or not the backend would take it."""

    def run(call: Call, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, ...]:
        o = call.q.new_zeros(*call.q.shape[:-1], call.v.shape[3])
        lse = torch.full(call.q.shape[:-1], -math.inf, dtype=lse_dtype(call.q))
        module.forward(call, *call.clamped_ranges(), o, lse)
        delta = (do.to(lse.dtype) * o).sum(-1) - (0 if dlse is None else dlse)
        return o, lse, *(x.to(call.q.dtype) for x in module.backward(call, lse, do, delta))

    return run


def by_static_buckets(call: Call, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, ...]:
    """The path of a GPU."""
    with patch.object(gathered, "buckets", lambda call, *_: gathered.static_buckets(call)):
        return by_path(gathered)(call, do, dlse)


RUNS: dict[str, Run] = {
    "numba": by_backend(numba_cpu),
    "sdpa-packed": by_backend(sdpa_packed),
    "gathered": by_path(gathered),
    "static buckets": by_static_buckets,
    "key tiles": by_path(key_tiles),
}


@pytest.fixture(params=RUNS)
def way(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def check(way: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, do: Tensor | None = None, **how: Any) -> None:
    check_call(way, make_call(q, k, v, selection, **how), do)


def check_call(way: str, call: Call, do: Tensor | None = None) -> None:
    """o, lse, dq, dk, dv match the oracle up to LIMITS, with the contract's dtypes and shapes; empty rows are exact."""
    q, k, v, ranges = call.q, call.k, call.v, call.selection.ranges
    random_do, dlse = make_grads(q, v)
    do = random_do if do is None else do
    results = RUNS[way](call, do, dlse), oracle_results(q, k, v, ranges, do, dlse, call.scale, call.q_pos)
    for name, got, exact, like in zip(RESULTS, *results, (q, q, q, k, v), strict=True):
        assert got.shape == exact.shape, name
        assert got.dtype == (lse_dtype(q) if name == "lse" else like.dtype), name
        assert got.is_contiguous(), name
        empty = exact == -math.inf
        assert torch.equal(got == -math.inf, empty), name
        error, size = (float(x.masked_fill(empty, 0).abs().mean()) for x in (got.double() - exact, exact))
        assert error <= LIMITS[q.dtype] * (1.0 if way == "numba" else max(1.0, size)), f"{name}: mean absolute error {error:.2e}"
    rows = ~oracle_mask(ranges, k.shape[2], q.shape[1], call.q_pos).any(-1)
    assert not any(results[0][i][rows].any() for i in (0, 2))


def test_layouts(way: str) -> None:
    """A [B,S_kv,G,D] cache as its transposed view, in a wider tensor, or shared by sequences or groups; views of q, do and ranges."""
    B, S, G, h, D, S_kv = 2, 12, 2, 4, 16, 80
    q = torch.randn(B, S, G + 1, h, D + 3)[:, :, 1:, :, 2:-1]
    k, v = (torch.randn(B, S_kv, G, D).transpose(1, 2) for _ in range(2))
    ranges = make_spans("mixed", B, S, G, S_kv, L=40)
    check(way, q, k, v, ranges)
    check(way, q, k, torch.randn(B, S_kv, G, 40)[..., :D].transpose(1, 2), ranges)
    check(way, q, k, v, ranges.expand(B, S, G, -1, 2), do=torch.randn(D).expand(B, S, G, h, D))
    check(way, q, k, v, ranges.transpose(0, 1).contiguous().transpose(0, 1), do=torch.ones(()).expand(B, S, G, h, D))
    check(way, q[:, :1], k[:1].expand(B, -1, -1, -1), v, ranges[:, :1])
    check(way, q, *(x[:, :1].expand(-1, G, -1, -1) for x in (k, v)), ranges)
