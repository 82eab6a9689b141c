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
    DISTRIBUTIONS,
    RESULTS,
    assert_all_close,
    lse_dtype,
    make_call,
    make_grads,
    make_qkv,
    make_spans,
    oracle_results,
)
from tests.helpers.pairwise import pairwise

LIMITS = {torch.float32: 1e-6, torch.float64: 1e-14}  # mean absolute error; packed SDPA's is relative to results larger than 1
SHAPES = [  # B, S, G, h, Dk, Dv, S_kv
    (1, 150, 2, 4, 64, 64, 150),
    (3, 9, 2, 2, 16, 48, 70),
    (2, 40, 1, 3, 24, 8, 129),
    (1, 20, 2, 6, 7, 13, 64),
    (1, 10, 1, 12, 40, 192, 33),
    (2, 5, 3, 1, 8, 80, 200),
]
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
WAYS_FOR_BAD_KEYS = [way for way in RUNS if way != "key tiles"]  # which the backend takes forward only where all keys are finite


@pytest.fixture(params=RUNS)
def way(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def run(way: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, **how: Any) -> tuple[Tensor, ...]:
    return RUNS[way](make_call(q, k, v, selection, **how), *make_grads(q, v))


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


@pytest.mark.parametrize(("shape", "kind", "dtype"), pairwise(SHAPES, DISTRIBUTIONS, list(LIMITS)))
def test_spans(way: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    B, S, G, h, Dk, Dv, S_kv = shape
    check(way, *make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv, dtype=dtype), make_spans(kind, B, S, G, S_kv, L=90))


@pytest.mark.parametrize("row", [[(-(2**63), 150)], [(-(2**63), 2**63 - 1)], [(0, 70), (5, -(2**63)), (80, 2**63 - 1)]])
def test_ranges_at_the_limits_of_int64(way: str, row: list[tuple[int, int]]) -> None:
    """As they are: nothing that finds the union has clamped them."""
    selection = Selection.from_ranges(torch.tensor(row).expand(1, 20, 2, len(row), 2), disjoint=True)
    check(way, *make_qkv(1, 20, 2, 2, 16, S_kv=200), selection)


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


def assert_same(way: str, got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Bit-equal for numba. Packed SDPA takes another path where a key is not finite."""
    assert way != "numba" or all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert_all_close(got, expected)


@pytest.mark.parametrize("way", WAYS_FOR_BAD_KEYS)
@pytest.mark.parametrize(("bad", "sizes", "dtype"), pairwise([math.nan, math.inf], [(2, 16), (2, 8), (1, 16)], list(LIMITS)))
def test_keys_that_no_row_selects_may_hold_anything(way: str, bad: float, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Keys between the ranges, and keys beyond t; and rows that select nothing."""
    n, Dv = sizes
    q, k, v = make_qkv(2, 30, 1, 2, 16, Dv, S_kv=100, dtype=dtype)
    ranges = torch.tensor([[3, 9], [60, 500]][-n:], dtype=torch.int32).repeat(2, 30, 1, 1, 1)
    ranges[:, ::4] = 0
    q_pos = torch.arange(40, 70)
    expected = run(way, q, k, v, ranges, q_pos=q_pos)
    hidden = ~oracle_mask(ranges, 100, 30, q_pos).any(1)
    assert hidden.any()
    k[hidden], v[hidden] = bad, bad
    got = run(way, q, k, v, ranges, q_pos=q_pos)
    assert_same(way, got, expected)
    assert not any(x[hidden].any() for x in got[3:])


@pytest.mark.parametrize("way", WAYS_FOR_BAD_KEYS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("n", [1, 2])
def test_a_bad_key_stays_with_the_row_that_selects_it(way: str, n: int, bad: float) -> None:
    """The last row selects a bad key from the middle of the others' tile: the other rows and keys never see it."""
    q, k, v = make_qkv(1, 30, 1, 2, 16, S_kv=100)
    ranges = torch.tensor([[0, 10], [11, 64]][-n:], dtype=torch.int32).repeat(1, 30, 1, 1, 1)
    ranges[:, -1] = torch.tensor([10, 11]) * torch.eye(n, dtype=torch.int32)[:, :1]
    q_pos, keys = torch.full((30,), 99), torch.arange(100) != 10
    expected = run(way, q, k, v, ranges, q_pos=q_pos)
    k[:, :, 10] = v[:, :, 10] = bad
    got = run(way, q, k, v, ranges, q_pos=q_pos)
    assert got[0][:, -1].isnan().all() or bad == math.inf
    unspoilt = [(*(x[:, :-1] for x in found[:3]), *(x[:, :, keys] for x in found[3:])) for found in (got, expected)]
    assert_same(way, *unspoilt)


def test_without_a_gradient_of_lse(way: str) -> None:
    q, k, v = make_qkv(1, 50, 1, 4, 16)
    call = make_call(q, k, v, make_spans("few", 1, 50, 1, 50, L=20))
    do, dlse = make_grads(q, v)
    assert all(map(torch.equal, RUNS[way](call, do, None), RUNS[way](call, do, torch.zeros_like(dlse))))
