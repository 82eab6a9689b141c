"""The Numba backend beyond test_cpu_backends.py: bit-equality over runs and thread counts, threads, forks, its exponential."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from nsa_sel import Selection, selection_attention
from nsa_sel.backends import numba_cpu
from nsa_sel.backends._numba import kernels
from nsa_sel.backends._numba.vectors import load, multiply_add, store
from tests.helpers.cases import assert_forward, make_call, make_grads, make_qkv, make_spans


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


def bits(results: tuple[Tensor, ...]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in results]


def test_a_key_poisoned_for_later_rows_is_harmless_to_earlier_ones() -> None:
    """One tile holds keys that a row selects and keys that others select: their NaN must not reach the row."""
    q, k, v = make_qkv(1, 64, 1, 4, 16)
    ranges = torch.tensor([[0, 64]], dtype=torch.int32).expand(1, 64, 1, 1, 2)
    do, dlse = make_grads(q, v)
    clean = run(q, k, v, ranges, do, dlse)
    k[:, :, 40:], v[:, :, 40:] = torch.nan, torch.nan
    dirty = run(q, k, v, ranges, do, dlse)
    for before, after in zip(clean[:3], dirty[:3], strict=True):
        assert torch.equal(before[:, :40], after[:, :40])
        assert bool(after[:, 40:].isnan().all())


def test_no_key_after_the_last_one_is_read() -> None:
    """Positions may be after the last key, as those of other ranks' rows over a slice. NumPy checks indices, compiled code doesn't."""
    q, k, v = make_qkv(1, 4, 1, 2, 8, S_kv=40)
    call = make_call(q, k, v, torch.tensor([[0, 99]]).expand(1, 4, 1, 1, 2))
    call.q_pos = torch.arange(97, 101).unsqueeze(0)  # as no check passes it
    with mock.patch.object(kernels, "transpose_tiles", kernels.transpose_tiles.py_func):
        o, lse = numba_cpu.forward(call)
    assert_forward((o, lse), q, k, v, call.selection.ranges, q_pos=call.q_pos)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bit_equal_over_runs_and_thread_counts(threads: None, dtype: torch.dtype) -> None:
    q, k, v = make_qkv(2, 130, 2, 3, 32, 16, dtype=dtype)
    ranges = make_spans("mixed", 2, 130, 2, 130, L=70)
    do, dlse = make_grads(q, v)
    results = set()
    for count in (1, 1, 2, 3, 5, 2):
        torch.set_num_threads(count)
        results.add(tuple(bits(run(q, k, v, ranges, do, dlse))))
    assert len(results) == 1


def test_calls_from_several_python_threads(threads: None) -> None:
    torch.set_num_threads(2)
    q, k, v = make_qkv(1, 130, 2, 4, 32)
    ranges = make_spans("few", 1, 130, 2, 130, L=70)
    do, dlse = make_grads(q, v)
    alone = bits(run(q, k, v, ranges, do, dlse))
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda _: bits(run(q, k, v, ranges, do, dlse)), range(12))
        assert all(each == alone for each in found)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # as it is meant to be
def test_a_forked_child_has_threads_of_its_own(threads: None) -> None:
    torch.set_num_threads(2)
    q, k, v = make_qkv(1, 40, 1, 4, 16)
    ranges = torch.tensor([[0, 40]]).expand(1, 40, 1, 1, 2)
    before = selection_attention(q, k, v, ranges, backend="numba")
    child = os.fork()
    if child == 0:  # no way out but these: the child would go on with the other tests
        try:
            signal.alarm(300)  # if it waits for threads that it does not have
            same = torch.equal(before, selection_attention(q, k, v, ranges, backend="numba"))
            os._exit(0 if same and any(thread.is_alive() for thread in numba_cpu._pool()._threads) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
    ends = np.array([-np.inf, np.nan, -1e30, -1100.0, 0.0, -0.0, 1.0, 100.0], dtype)
    exp2_of(ends, y)
    assert np.array_equal(y[: len(ends)], np.array([0, np.nan, 0, 0, 1, 1, 2, 2.0**100], dtype), equal_nan=True)


def test_a_multiply_add_rounds_once() -> None:
    """LLVM's fusion of a product and a sum depends on whether code is new or from Numba's cache."""

    @numba.njit
    def run(a: Any, c: Any) -> None:
        store(c, 0, multiply_add(load(a, 0), load(a, 0), load(c, 0)))

    a, c = np.full(8, 1 + 2**-12, np.float32), np.full(8, -1 - 2**-11, np.float32)
    run(a, c)
    assert (c == 2**-24).all()


def test_kernels_compile_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only installation of a user without a home."""
    no_folder = mock.Mock(side_effect=RuntimeError("cannot cache function 'f': no locator available for file 'kernels.py'"))
    njit = numba.njit
    monkeypatch.setattr(numba, "njit", lambda **options: no_folder if options.get("cache") else njit(**options))
    kernels._warn_of_no_folder.cache_clear()
    with pytest.warns(RuntimeWarning, match="set NUMBA_CACHE_DIR to a writable folder"):
        function = kernels.jit(lambda x: x + 1)
    assert function(2) == 3
