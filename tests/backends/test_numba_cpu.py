"""The Numba backend against the float64 oracle: values, edges, layouts, poison, and bit-equality over runs and thread counts."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel.backends import numba_cpu
from nsa_sel.backends._numba import kernels
from nsa_sel.oracle import oracle_mask
from nsa_sel.selection import Selection
from tests.helpers.cases import (
    DISTRIBUTIONS,
    RESULTS,
    assert_within_twice_baseline,
    edge_selections,
    make_blocks,
    make_call,
    make_grads,
    make_qkv,
    make_spans,
    oracle_results,
    plain_results,
)
from tests.helpers.paths import ROOT

LIMITS = {torch.float32: 1e-6, torch.float64: 1e-14}  # mean absolute error
SHAPES = [  # B, S, G, h, Dk, Dv, S_kv
    (1, 150, 2, 4, 64, 64, 150),
    (3, 9, 2, 2, 16, 48, 70),
    (2, 40, 1, 3, 24, 8, 129),
    (1, 20, 2, 6, 7, 13, 64),
    (1, 10, 1, 12, 40, 192, 33),
    (2, 5, 3, 1, 8, 80, 200),
]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small work is divided between threads too, and torch's number of threads is restored."""
    monkeypatch.setattr(numba_cpu, "_SMALL", 0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, do: Tensor, dlse: Tensor | None = None, **how: Any
) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv by the backend's two functions."""
    call = make_call(q, k, v, selection, **how)
    o, lse = numba_cpu.forward(call)
    return o, lse, *numba_cpu.backward(call, o, lse, do, dlse)


def check(q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, do: Tensor | None = None, **how: Any) -> None:
    """All five results match the oracle up to LIMITS, with the contract's dtypes and shapes; empty rows are exact."""
    ranges = selection.ranges if isinstance(selection, Selection) else selection
    random_do, dlse = make_grads(q, v)
    do = random_do if do is None else do
    got, exact = run(q, k, v, selection, do, dlse, **how), oracle_results(q, k, v, ranges, do, dlse, **how)
    for name, mine, wanted, like in zip(RESULTS, got, exact, (q, q, q, k, v), strict=True):
        assert mine.shape == wanted.shape, name
        assert mine.dtype == like.dtype, name
        assert mine.is_contiguous(), name
        empty = wanted == -math.inf
        assert torch.equal(mine == -math.inf, empty), name
        error = float((mine.double() - wanted).masked_fill(empty, 0).abs().mean())
        assert error <= LIMITS[q.dtype], f"{name}: mean absolute error {error:.2e}"
    rows = ~oracle_mask(ranges, k.shape[2], q.shape[1], how.get("q_pos")).any(-1)
    assert all(bool((got[i][rows] == 0).all()) for i in (0, 2))


def bits(results: tuple[Tensor, ...]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in results]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_parity(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    B, S, G, h, Dk, Dv, S_kv = shape
    check(*make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv, dtype=dtype), make_spans(kind, B, S, G, S_kv, L=90))


@pytest.mark.parametrize("h", [1, 3, 4, 6, 12])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_blocks(h: int, block_size: int) -> None:
    check(*make_qkv(1, 96, 2, h, 32, S_kv=300), make_blocks(1, 96, 2, 300, 4, block_size))


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", edge_selections(1, 1, 1, 16))
def test_edges(name: str, dtype: torch.dtype) -> None:
    check(*make_qkv(3, 6, 2, 3, 8, 16, S_kv=20, dtype=dtype), edge_selections(3, 6, 2, 20)[name])


@pytest.mark.parametrize("q_pos", [None, torch.tensor([[4], [77], [129]])])
def test_decode(q_pos: Tensor | None) -> None:
    check(*make_qkv(3, 1, 2, 4, 64, 32, S_kv=130), make_spans("mixed", 3, 1, 2, 130, L=70), q_pos=q_pos)


@pytest.mark.parametrize("scale", [0.7, -0.3, 0.0])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_positions_and_scale(per_sequence: bool, scale: float) -> None:
    q_pos = torch.randint(0, 140, (2, 30) if per_sequence else (30,))
    check(*make_qkv(2, 30, 2, 2, 16, 8, S_kv=140), make_spans("mixed", 2, 30, 2, 140, L=80), scale=scale, q_pos=q_pos)


def test_positions_and_ranges_may_change_under_one_selection() -> None:
    q, k, v = make_qkv(1, 10, 1, 2, 16, S_kv=100)
    selection = Selection.from_ranges(make_spans("few", 1, 10, 1, 100, L=60))
    check(q, k, v, selection)
    check(q, k, v, selection, q_pos=torch.arange(10))
    selection.ranges.copy_(make_spans("many", 1, 10, 1, 100, L=60, seed=1)[..., : selection.n, :])
    check(q, k, v, selection)


def test_layouts() -> None:
    """A [B,S_kv,G,D] cache as its transposed view, q as a slice, an expanded gradient."""
    B, S, G, h, D, S_kv = 2, 12, 2, 4, 16, 80
    q = torch.randn(B, S, G + 1, h, D + 3)[:, :, 1:, :, 2:-1]
    k, v = (torch.randn(B, S_kv, G, D).transpose(1, 2) for _ in range(2))
    ranges = make_spans("mixed", B, S, G, S_kv, L=40)
    check(q, k, v, ranges)
    check(q, k, v, ranges.expand(B, S, G, -1, 2), do=torch.randn(D).expand(B, S, G, h, D))
    check(q, k, v, ranges.transpose(0, 1).contiguous().transpose(0, 1), do=torch.ones(()).expand(B, S, G, h, D))
    check(q[:, :1], k[:1].expand(B, -1, -1, -1), v, ranges[:, :1])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", LIMITS)
def test_poison_in_unselected_keys_changes_no_bit(dtype: torch.dtype, poison: float) -> None:
    q, k, v = make_qkv(2, 20, 2, 4, 16, 24, S_kv=150, dtype=dtype)
    ranges = make_spans("few", 2, 20, 2, 150, L=30)[:, :1].expand(2, 20, 2, -1, 2)
    unused = ~oracle_mask(ranges, 150, 20).any(1)
    do, dlse = make_grads(q, v)
    clean = run(q, k, v, ranges, do, dlse)
    k, v = (torch.where(unused.unsqueeze(-1), poison, tensor) for tensor in (k, v))
    dirty = run(q, k, v, ranges, do, dlse)
    assert bits(clean) == bits(dirty)
    assert all(bool((x[unused] == 0).all()) for x in dirty[3:])


def test_a_key_poisoned_for_later_rows_is_harmless_to_earlier_ones() -> None:
    """One tile holds keys that a row selects and keys that others select: their NaN must not reach the row."""
    q, k, v = make_qkv(1, 64, 1, 4, 16)
    ranges = torch.tensor([[0, 64]], dtype=torch.int32).expand(1, 64, 1, 1, 2)
    do, dlse = make_grads(q, v)
    clean = run(q, k, v, ranges, do, dlse)
    k[:, :, 40:], v[:, :, 40:] = math.nan, math.nan
    dirty = run(q, k, v, ranges, do, dlse)
    for name, before, after in zip(RESULTS[:3], clean, dirty, strict=False):
        assert torch.equal(before[:, :40], after[:, :40]), name
        assert bool(after[:, 40:].isnan().all()), name


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_errors_are_within_twice_the_baseline(dtype: torch.dtype, kind: str) -> None:
    q, k, v = make_qkv(1, 90, 2, 4, 64, 32, dtype=dtype)
    ranges = make_spans(kind, 1, 90, 2, 90, L=50)
    ranges[..., 0, 0] = 0
    results = (f(q, k, v, ranges, *make_grads(q, v)) for f in (run, oracle_results, plain_results))
    for name, mine, wanted, theirs in zip(RESULTS, *results, strict=True):
        assert mine.dtype == (torch.float32 if name == "lse" else dtype)
        assert_within_twice_baseline(mine, wanted, theirs, name)


def test_large_scores() -> None:
    """Logits of some hundreds, where float32 has no digits left for an absolute bound; plain torch has none either."""
    q, k, v = make_qkv(1, 70, 1, 4, 16)
    ranges = make_spans("mixed", 1, 70, 1, 70, L=40)
    ranges[..., 0, 0] = 0
    results = [f(q, k, v, ranges, *make_grads(q, v), scale=40.0) for f in (run, oracle_results, plain_results)]
    largest = float(results[1][1].abs().max())
    for name, mine, wanted, theirs in zip(RESULTS, *results, strict=True):
        # Gradients start from p = exp(s - lse), where one rounding of lse becomes a relative error.
        terms = largest * float(wanted.abs().max()) if name.startswith("d") else 0.0
        assert_within_twice_baseline(mine, wanted, theirs, name, terms=terms)


@pytest.mark.parametrize("dtype", LIMITS)
def test_bit_equal_over_runs_and_thread_counts(threads: None, dtype: torch.dtype) -> None:
    q, k, v = make_qkv(2, 130, 2, 3, 32, 16, dtype=dtype)
    ranges = make_spans("mixed", 2, 130, 2, 130, L=70)
    do, dlse = make_grads(q, v)
    results = []
    for count in (1, 1, 2, 3, 5, 2):
        torch.set_num_threads(count)
        results.append(bits(run(q, k, v, ranges, do, dlse)))
    assert all(result == results[0] for result in results)


def test_calls_from_several_python_threads(threads: None) -> None:
    torch.set_num_threads(2)
    q, k, v = make_qkv(1, 130, 2, 4, 32)
    ranges = make_spans("few", 1, 130, 2, 130, L=70)
    do, dlse = make_grads(q, v)
    alone = bits(run(q, k, v, ranges, do, dlse))
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(run, q, k, v, ranges, do, dlse) for _ in range(12)]
        assert all(bits(future.result()) == alone for future in futures)


FORK = """
import os, sys, torch
from nsa_sel.backends import numba_cpu
import nsa_sel
numba_cpu._SMALL = 0
torch.set_num_threads(2)
q, k, v = torch.randn(1, 40, 1, 4, 16), torch.randn(1, 1, 40, 16), torch.randn(1, 1, 40, 16)
ranges = torch.tensor([[0, 40]]).expand(1, 40, 1, 1, 2)
before = nsa_sel.selection_attention(q, k, v, ranges, backend="numba")
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(before, nsa_sel.selection_attention(q, k, v, ranges, backend="numba")) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, timeout=1200, check=True)


def test_without_a_gradient_of_lse() -> None:
    q, k, v = make_qkv(1, 50, 1, 4, 16)
    ranges = make_spans("few", 1, 50, 1, 50, L=20)
    do, dlse = make_grads(q, v)
    assert bits(run(q, k, v, ranges, do)) == bits(run(q, k, v, ranges, do, torch.zeros_like(dlse)))


def test_gradcheck_through_the_public_call() -> None:
    q, k, v = make_qkv(1, 5, 2, 2, 4, 3, S_kv=9, dtype=torch.float64, requires_grad=True)
    ranges = make_spans("mixed", 1, 5, 2, 9, L=6)
    ranges[:, 1] = 0
    filled = oracle_mask(ranges, 9, 5).any(-1).unsqueeze(-1)
    assert nsa_sel.explain(q, k, v, ranges, backend="numba").forward == "numba"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = nsa_sel.selection_attention(q, k, v, ranges, return_lse=True, backend="numba")
        return o, torch.where(filled, lse, 0.0)

    assert torch.autograd.gradcheck(attend, (q, k, v))


@kernels.jit
def exp2_of(x: np.ndarray, y: np.ndarray) -> None:
    for i in range(x.size):
        y[i] = kernels.exp2(x[i])


@pytest.mark.parametrize(("dtype", "wider", "lowest"), [(np.float32, np.float64, -126), (np.float64, np.longdouble, -1022)])
def test_exp2_is_accurate(dtype: type, wider: type, lowest: int) -> None:
    x = np.concatenate([np.linspace(lowest, 1, 200_000), np.linspace(-2, 2, 200_000), np.arange(lowest, 2)]).astype(dtype)
    y = np.empty_like(x)
    exp2_of(x, y)
    exact = np.exp2(x.astype(wider))
    ulps = np.abs(y.astype(wider) - exact) / np.spacing(exact.astype(dtype))
    assert ulps.max() <= 2
    whole = x == np.round(x)
    assert np.array_equal(y[whole], exact[whole])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp2_at_the_ends(dtype: type) -> None:
    x = np.array([-np.inf, np.nan, -1e30, -1100.0, 0.0, -0.0, 1.0, 100.0], dtype)
    y = np.empty_like(x)
    exp2_of(x, y)
    assert np.array_equal(y, np.array([0, np.nan, 0, 0, 1, 1, 2, 2.0**100], dtype), equal_nan=True)
