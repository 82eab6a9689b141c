"""The Triton kernels of sliding windows in the interpreter: results, what they read, the ops that torch.compile traces."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

import nsa_sel
from nsa_sel import sliding_window_attention
from nsa_sel.backends import window_triton
from nsa_sel.core import registry
from nsa_sel.core import window as window_calls
from nsa_sel.errors import BackendError
from tests.helpers.cases import make_grads
from tests.helpers.poison import new_memory_is_nan
from tests.helpers.windows import check, check_packed, inputs_of, results

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/unit/test_window.py runs the kernels")

# name: B, S, S_kv, G, h, Dk, Dv, window
SHAPES = {
    "h1": (1, 70, 70, 1, 1, 16, 16, 37),
    "h3": (2, 21, 21, 1, 3, 16, 24, 9),
    "h12-cache": (1, 9, 30, 1, 12, 24, 16, 17),
    "h16": (1, 11, 40, 2, 16, 16, 16, 20),
    "192-128": (1, 20, 20, 1, 2, 192, 128, 18),
    "window-1": (1, 19, 19, 2, 2, 16, 16, 1),
    "window-over-S": (1, 35, 35, 1, 2, 16, 16, 1000),
    "few-keys-before": (1, 18, 25, 1, 4, 16, 16, 16),
    "decode": (3, 1, 45, 1, 4, 16, 16, 33),
    "one-key": (1, 1, 1, 1, 1, 8, 8, 4),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for every program: tiles of 32 rows, but few keys, so that short windows take several steps."""
    monkeypatch.setattr(window_calls, "takes", lambda q, v, kernels: kernels.name == "Triton")
    small = {"block_l": 16, "rows": 32}
    monkeypatch.setattr(window_triton, "config_of", lambda call, kernel: replace(window_triton.CONFIGS[kernel], **small))


def outcome(inputs: tuple[Tensor, ...], window: int, **options: Any) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv, in new memory that holds NaN."""
    with new_memory_is_nan():
        return results(sliding_window_attention, inputs, window, True, return_lse=True, **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_gradients(shape: str) -> None:
    inputs, window = inputs_of(SHAPES[shape])
    check(sliding_window_attention, inputs, window, shape != "h3")


def test_float16() -> None:
    check(sliding_window_attention, *inputs_of(SHAPES["h16"], torch.float16), True)


def test_pointers_load_what_tma_does(monkeypatch: pytest.MonkeyPatch) -> None:
    config_of = window_triton.config_of
    monkeypatch.setattr(window_triton, "config_of", lambda call, kernel: replace(config_of(call, kernel), loads="pointer"))
    check(sliding_window_attention, *inputs_of((1, 11, 30, 1, 16, 16, 16, 20)), True)


def test_strides_and_a_negative_scale() -> None:
    (q, k, v), window = inputs_of(SHAPES["h3"])
    wanted = outcome((q, k, v), window, scale=0.3)
    q = q.detach().neg().permute(3, 1, 0, 2, 4).contiguous().permute(2, 1, 3, 0, 4).requires_grad_()
    k, v = (x.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).requires_grad_() for x in (k, v))
    found = outcome((q, k, v), window, scale=-0.3)
    assert all(map(torch.equal, (found[0], found[1], -found[2], *found[3:]), wanted))


def test_what_nobody_sees_is_not_read() -> None:
    """NaN in keys before all windows and after a row, in q of other rows, and in memory that no kernel wrote; reruns are bit-equal."""
    inputs, window = inputs_of((1, 12, 50, 1, 2, 16, 16, 20))
    clean = outcome(inputs, window)
    assert not any(bool(x.isnan().any()) for x in clean)
    assert all(map(torch.equal, outcome(inputs, window), clean))
    q, k, v = (x.detach() for x in inputs)
    unseen = (torch.arange(50) <= 50 - 12 - window)[:, None]
    found = outcome(tuple(x.requires_grad_() for x in (q, k.masked_fill(unseen, math.nan), v.masked_fill(unseen, math.nan))), window)
    assert all(map(torch.equal, found, clean))


def test_a_row_of_nan_stays_within_its_window() -> None:
    """dk and dv of tiles of keys that the row does not see, and all other rows, are as without it."""
    (q, k, v), window = inputs_of((1, 80, 80, 1, 2, 16, 16, 20))
    clean = outcome((q, k, v), window)
    poisoned = q.detach().clone()
    poisoned[:, 50] = math.nan
    found = outcome((poisoned.requires_grad_(), k, v), window)
    rows, keys = torch.arange(80) != 50, (torch.arange(80) < 16) | (torch.arange(80) >= 64)  # it sees 31 to 50
    assert all(torch.equal(x[:, rows], y[:, rows]) for x, y in zip(found[:3], clean[:3], strict=True))
    assert all(torch.equal(x[:, :, keys], y[:, :, keys]) for x, y in zip(found[3:], clean[3:], strict=True))


@pytest.mark.parametrize("cu_seqlens", [(0, 21, 21, 22, 45, 60), (0, 3, 37), (0,), (0, 64)], ids=str)
def test_packed_batches(cu_seqlens: tuple[int, ...]) -> None:
    check_packed(cu_seqlens, (1, 64, 64, 1, 4, 16, 24, 19), torch.float32, "cpu")


@pytest.mark.parametrize("used", [(0,), (1,)], ids=["o", "lse"])
def test_one_output_alone(used: tuple[int, ...]) -> None:
    inputs, window = inputs_of(SHAPES["decode"])
    do_dlse = make_grads(inputs[0], inputs[2])
    both = sliding_window_attention(*inputs, window, return_lse=True)
    alone = torch.autograd.grad([both[i] for i in used], inputs, [do_dlse[i] for i in used], retain_graph=True)
    zeros = [do_dlse[i] if i in used else torch.zeros_like(do_dlse[i]) for i in range(2)]
    assert all(map(torch.equal, alone, torch.autograd.grad(both, inputs, zeros)))


def test_compiled_calls_go_through_ops() -> None:
    inputs, window = inputs_of(SHAPES["decode"])
    work = torch.compile(sliding_window_attention, backend="aot_eager", fullgraph=True)
    found = results(work, inputs, window, True, return_lse=True)
    torch._dynamo.reset()  # a later test's other sizes would be traced as symbols, which takes long
    assert all(map(torch.equal, found, outcome(inputs, window)))


def test_opcheck() -> None:
    inputs, window = inputs_of((1, 5, 7, 1, 2, 16, 16, 3))
    torch.library.opcheck(torch.ops.nsa_sel.window_forward.default, (*inputs, None, window, 0.25, True, True))


def test_there_is_no_second_derivative() -> None:
    inputs, window = inputs_of(SHAPES["decode"])
    o = sliding_window_attention(*inputs, window)
    with pytest.raises(BackendError, match="sliding_window_attention has no second derivative"):
        torch.autograd.grad(o.sum(), inputs, create_graph=True)


@pytest.mark.parametrize("broken", ["forward", "backward"])
def test_chunks_run_what_kernels_fail_for(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no such kernel")

    inputs, window = inputs_of(SHAPES["decode"])
    wanted = outcome(inputs, window)
    monkeypatch.setattr(registry, "broken_windows", set())
    kernel = getattr(window_triton, broken)
    monkeypatch.setattr(window_triton, broken, fail)
    with pytest.warns(RuntimeWarning, match=r"Triton kernels of sliding_window_attention failed, .*no such kernel"):
        found = results(sliding_window_attention, inputs, window, True, return_lse=True)
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right)
    again = results(sliding_window_attention, inputs, window, True, return_lse=True)  # without a warning, which is an error
    for mine, right in zip(again, wanted, strict=True):
        torch.testing.assert_close(mine, right)
    nsa_sel.reset()
    monkeypatch.setattr(window_triton, broken, Mock(side_effect=kernel))
    results(sliding_window_attention, inputs, window, True, return_lse=True)
    getattr(window_triton, broken).assert_called()
