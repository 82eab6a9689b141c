"""The compiled path (_native): whole calls of cupy-cuda on CPU tensors, whose kernels a fake driver runs, with and without the flag."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import selection_attention
from nsa_sel.backends import _driver, _native
from nsa_sel.backends._native import extension
from nsa_sel.core import begin, memory, native, registry
from nsa_sel.errors import BackendError
from nsa_sel.selection import Selection
from nsa_sel.telemetry import events
from tests.backends import test_replay
from tests.helpers.cases import make_blocks, make_grads, make_qkv
from tests.helpers.emulate import GPU, needs_compiler
from tests.helpers.paths import ROOT

needs_ninja = pytest.mark.skipif(shutil.which("ninja") is None, reason="PyTorch builds extensions by ninja, which is not on PATH")
pytestmark = [needs_compiler, needs_ninja, pytest.mark.slow]  # PyTorch's headers take a minute to compile, once
BACKEND = "cupy-cuda"
driver = test_replay.driver  # a fixture


@pytest.fixture
def compiled(driver: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels that were started; calls of CPU tensors are those of a GPU."""
    monkeypatch.setenv("NSA_SEL_CACHE", str(ROOT / "build" / "native"))
    monkeypatch.setattr(begin, "device_info", lambda device: GPU)
    monkeypatch.setattr(registry, "missing", lambda name: ())
    extension.loaded.cache_clear()
    yield driver
    extension.loaded.cache_clear()


def inputs(seed: int) -> tuple[list[Tensor], Selection]:
    """q, k and v, which require gradients, and a new selection of blocks."""
    q, k, v = make_qkv(2, 8, 2, 3, 16, 24, S_kv=70, dtype=torch.float16, seed=seed)
    selection = Selection.from_ranges(make_blocks(2, 8, 2, 70, 3, 16, seed=seed).ranges, 16)
    return [x.requires_grad_() for x in (q, k, v)], selection


def call(seed: int, monkeypatch: pytest.MonkeyPatch, flag: str, with_dlse: bool = False) -> list[Tensor]:
    """o, maybe lse, dq, dk, dv."""
    monkeypatch.setenv("NSA_SEL_NATIVE", flag)
    tensors, selection = inputs(seed)
    do, dlse = make_grads(tensors[0], tensors[2], seed)
    found = selection_attention(*tensors, selection, backend=BACKEND, return_lse=with_dlse)
    if not with_dlse:
        return [found.detach(), *torch.autograd.grad(found, tensors, do)]
    dlse = torch.where(found[1] == float("-inf"), 0.0, dlse)
    return [*(x.detach() for x in found), *torch.autograd.grad(found, tensors, (do, dlse))]


def gradients(tensors: list[Tensor], o: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """dq, dk, dv of an o, from a contiguous gradient."""
    return torch.autograd.grad(o, tensors, torch.ones(o.shape, dtype=o.dtype), **options)


def learn(monkeypatch: pytest.MonkeyPatch, with_dlse: bool = False) -> None:
    """The class of `inputs` is learned: the next call of it runs in C++."""
    for seed in range(5):
        call(seed, monkeypatch, "1", with_dlse)


@contextlib.contextmanager
def runs(forward: int, backward: int) -> Iterator[None]:
    """So many passes inside the block run in C++."""
    before = _native.counts()
    yield
    assert tuple(b - a for a, b in zip(before, _native.counts(), strict=True)) == (forward, backward)


@pytest.mark.parametrize("with_dlse", [False, True])
def test_repeated_calls_run_in_cpp_with_the_same_bits(compiled: list[str], monkeypatch: pytest.MonkeyPatch, with_dlse: bool) -> None:
    """From the same kernels; decisions and counters are told alike."""
    ran = []
    for seed in range(8):
        wanted = call(seed, monkeypatch, "0", with_dlse)
        launched, told = sorted(compiled), events.tallies()
        compiled.clear()
        before = _native.counts()
        got = call(seed, monkeypatch, "1", with_dlse)
        ran.append(tuple(b - a for a, b in zip(before, _native.counts(), strict=True)))
        assert sorted(compiled) == launched
        compiled.clear()
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one, other)
            assert not one.isnan().any()
        now = events.tallies()
        assert {name: now[name] - told[name] for name in (("calls", BACKEND), ("backward", BACKEND))} == {
            ("calls", BACKEND): 1,
            ("backward", BACKEND): 1,
        }
        assert events.decisions()[-1].forward == BACKEND
    assert ran[0] == (0, 0)
    assert ran[-3:] == [(1, 1)] * 3


def test_a_kept_selection_builds_no_plan_again(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by Python, from the plan that C++ built."""
    learn(monkeypatch)
    tensors, selection = inputs(9)
    for flag, passes in (("1", 1), ("1", 1), ("0", 0)):
        monkeypatch.setenv("NSA_SEL_NATIVE", flag)
        compiled.clear()
        with runs(passes, passes):
            gradients(tensors, selection_attention(*tensors, selection, backend=BACKEND))
    assert compiled
    assert "sort_count.cu" not in compiled


def test_gradients_of_another_layout_run_by_python_until_they_are_learned(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    learn(monkeypatch)
    tensors, selection = inputs(9)
    ran = []
    for _ in range(5):
        o = selection_attention(*tensors, selection, backend=BACKEND)
        do = torch.ones(2, 8, 3, 2, 24, dtype=o.dtype).transpose(2, 3)
        before = _native.counts()[1]
        torch.autograd.grad(o, tensors, do)
        ran.append(_native.counts()[1] - before)
    assert ran[0] == 0
    assert ran[-1] == 1


WANTS_PYTHON = ("a hook", "a failed backend", "deterministic", "a workspace", "unaligned", "measured", "refused launches")


@pytest.mark.parametrize("what", WANTS_PYTHON)
def test_what_replays_can_not_do_runs_by_python(compiled: list[str], monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    learn(monkeypatch)
    tensors, selection = inputs(9)
    others: dict[str, Any] = {}
    do = make_grads(tensors[0], tensors[2], 9)[0]
    wanted = call(9, monkeypatch, "0")
    monkeypatch.setenv("NSA_SEL_NATIVE", "1")
    if what == "a hook":
        monkeypatch.setattr(_driver, "hooked", lambda: True)
    elif what == "a failed backend":
        monkeypatch.setattr(native, "any_failed", lambda: True)
    elif what == "deterministic":
        torch.use_deterministic_algorithms(True)
    elif what == "a workspace":
        others["workspace"] = torch.empty(1 << 20, dtype=torch.uint8)
    elif what == "unaligned":
        tensors[0] = torch.empty(tensors[0].numel() + 1, dtype=torch.float16)[1:].view_as(tensors[0]).copy_(tensors[0].detach())
        tensors[0].requires_grad_()
    elif what == "measured":
        selection.measure()
    else:
        monkeypatch.setattr(_driver, "addresses", functools.partial(_refusing, _driver.addresses()))
        extension.loaded.cache_clear()
        extension.loaded()
    try:
        with runs(0, 0):
            o = selection_attention(*tensors, selection, backend=BACKEND, **others)
            got = [o.detach(), *torch.autograd.grad(o, tensors, do)]
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


def _refusing(addresses: tuple[int, ...]) -> tuple[int, ...]:
    """Where the driver refuses launches."""
    _kept.append(ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(lambda *_: 1))
    return ctypes.cast(_kept[-1], ctypes.c_void_p).value or 0, *addresses[1:]


_kept: list[Any] = []  # C++ has no more than their address


def test_what_was_measured_since_the_forward_pass_runs_by_python(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    learn(monkeypatch)
    tensors, selection = inputs(9)
    with runs(1, 0):
        o = selection_attention(*tensors, selection, backend=BACKEND)
        selection.measure()
        gradients(tensors, o)


def test_what_a_measured_selection_does_is_not_learned_for_others(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are of one class before the forward pass."""
    monkeypatch.setenv("NSA_SEL_NATIVE", "1")
    for seed in range(7):
        tensors, selection = inputs(seed)
        o = selection_attention(*tensors, selection, backend=BACKEND)
        selection.measure()
        with runs(0, 0):
            gradients(tensors, o)
    tensors, selection = inputs(9)
    with runs(1, 0):
        gradients(tensors, selection_attention(*tensors, selection, backend=BACKEND))


def test_a_pass_is_learned_once(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    learn(monkeypatch)
    tensors, selection = inputs(9)
    monkeypatch.setattr(native, "any_failed", lambda: True)
    for _ in range(3):
        gradients(tensors, selection_attention(*tensors, selection, backend=BACKEND))
    classes = [found for entry in memory._memory.values() if isinstance(entry, tuple) for _, found in entry]
    (passes,) = [known[native.NATIVE] for *_, known in classes if native.NATIVE in known]
    assert len(passes.backward) == len(passes.numbers) == 1


def test_saved_tensors_may_come_back_in_another_layout(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    learn(monkeypatch)
    wanted = call(9, monkeypatch, "0")
    monkeypatch.setenv("NSA_SEL_NATIVE", "1")
    tensors, selection = inputs(9)
    do = make_grads(tensors[0], tensors[2], 9)[0]

    def unpack(x: Tensor) -> Tensor:
        return torch.stack((x, x), -2).select(-2, 1) if x.dim() == 5 and x.is_floating_point() else x.clone()

    for other_layout in (False, True):
        with runs(1, 1 - other_layout), torch.autograd.graph.saved_tensors_hooks(Tensor.clone, unpack if other_layout else Tensor.clone):
            o = selection_attention(*tensors, selection, backend=BACKEND)
            got = [o.detach(), *torch.autograd.grad(o, tensors, do)]
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one, other)


def test_errors_are_those_of_python(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    learn(monkeypatch)
    tensors, selection = inputs(9)

    def attend() -> Tensor:
        with runs(1, 0):
            o: Tensor = selection_attention(*tensors, selection, backend=BACKEND)
        return o

    with pytest.raises(BackendError, match="no second derivative"):
        gradients(tensors, attend(), create_graph=True)
    o = attend()
    with pytest.raises(BackendError, match="batched gradients"):
        torch.autograd.grad(o, tensors, torch.ones(2, *o.shape, dtype=o.dtype), is_grads_batched=True)
    with runs(0, 1):
        gradients(tensors, o)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(tensors, o)
    o = attend()
    selection.ranges.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(tensors, o)
    with torch.inference_mode(), runs(0, 0):
        selection_attention(*tensors, selection, backend=BACKEND)


@pytest.mark.filterwarnings("ignore")  # of dynamo's imports
def test_compiled_autograd_gets_the_node_of_python(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import compiled_autograd

    learn(monkeypatch)
    tensors, selection = inputs(9)
    with runs(1, 1):
        wanted = gradients(tensors, selection_attention(*tensors, selection, backend=BACKEND))
    with runs(0, 0), compiled_autograd._enable(torch.compile(backend="eager")):
        got = gradients(tensors, selection_attention(*tensors, selection, backend=BACKEND))
    assert all(map(torch.equal, got, wanted))


def test_a_missing_compiler_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Ninja is required to load C++ extensions")

    monkeypatch.setenv("NSA_SEL_CACHE", str(tmp_path))
    monkeypatch.setattr(extension, "_build", fail)
    monkeypatch.setattr(extension, "_module", functools.cache(extension._module.__wrapped__))
    extension.loaded.cache_clear()
    with pytest.raises(BackendError, match=r"NSA_SEL_NATIVE=1.*Ninja is required.*allowed: .*Remedy: install g\+\+ and ninja"):
        extension.loaded()
