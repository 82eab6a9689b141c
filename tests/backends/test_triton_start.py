"""Launches that go straight to a compiled kernel (_triton/kernel.py): only where Triton would have compiled the same one."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_sel.backends._triton import combine, tiles
from nsa_sel.backends._triton import kernel as kernel_module
from nsa_sel.backends._triton.arguments import Strides
from nsa_sel.backends._triton.kernel import Kernel, number_kinds, tensor_kinds
from nsa_sel.backends._triton.tiles import CheckedDescriptor
from nsa_sel.backends.launcher import cuda_driver
from nsa_sel.backends.specs import SPECS
from nsa_sel.core import registry
from nsa_sel.core.call import Call
from nsa_sel.core.request import DeviceInfo
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from tests.helpers.launches import forget_launches

NUMBERS = (0, 1, 2, 15, 16, 48, -1, -16, 2**31 - 1, 2**31, 2**31 + 8, -(2**31), -(2**31) - 16, 2**40)


def tensors() -> list[torch.Tensor]:
    whole = [torch.zeros(64, 32, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64)]
    return [*whole, *(x.view(-1)[1:] for x in whole), whole[0][::2]]


def kinds(x: Any) -> object:
    """What tells arguments like x apart in the cache of compiled kernels."""
    return number_kinds((x,))[0] if isinstance(x, int | float | tuple) else tensor_kinds((x,))[0][0]


def test_arguments_of_one_kind_take_one_kernel() -> None:
    """Kinds are at least as fine as what the compiler looks at (its own function says what that is)."""
    makers = (TensorDescriptor, CheckedDescriptor)
    blocks = ([16, 32], [32, 32])
    descriptors = [make(x, [64, 32], [32, 1], block) for x in tensors()[:3] for block in blocks for make in makers]
    tuples = [(48, 1), (48, 2), (48, (1, 2**31)), (32, (1, 2**40)), Strides((1, 16), (3,), (), (0, 5)), Strides((1, 32), (5,), (), (16, 7))]
    arguments = [None, 0.5, 2.0, *NUMBERS, *tuples, *tensors(), *descriptors]
    seen = [(kinds(x), native_specialize_impl(CUDABackend, x, False, True, True)) for x in arguments]
    for (one, theirs), (other, their_other) in itertools.combinations(seen, 2):
        assert one != other or theirs == their_other
    assert len({str(theirs) for _, theirs in seen[-len(descriptors) :]}) == 6  # the compiler sees no difference between the makers


def test_checked_descriptors_pass_the_checks_they_leave_out() -> None:
    x = torch.zeros(2, 3, 64, 40, dtype=torch.bfloat16).transpose(1, 2)[..., :32]
    mine, own = tiles.descriptor(x, 16, 32), TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, 16, 32])
    assert (mine.base is own.base, [*mine.shape], [*mine.strides]) == (True, own.shape, own.strides)
    assert (mine.block_shape, mine.padding) == (own.block_shape, own.padding)


class Compiled:
    """Stands for a compiled kernel: remembers what it was run with."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)


class Function:
    """Stands for a kernel of two arguments and one constant: every launch through Triton makes a new compiled kernel."""

    arg_names = ("x", "n", "D")

    def __init__(self) -> None:
        self.made: list[Compiled] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Compiled:
            self.made.append(Compiled())
            return self.made[-1]

        return launch


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Function:
    """With a driver whose current stream is number 5."""
    monkeypatch.setattr(kernel_module, "CompiledKernel", Compiled)
    driver = types.SimpleNamespace(get_current_stream=lambda device: 5)
    monkeypatch.setattr(kernel_module.triton.runtime, "driver", types.SimpleNamespace(active=driver))
    return Function()


def test_a_like_launch_skips_the_compiler(function: Function) -> None:
    x, y = torch.zeros(8), torch.ones(8)
    fill = Kernel(function, D=64, num_warps=4)
    fill.launch(3, (x,), (32,))
    fill.launch(5, (y,), (48,))
    assert len(function.made) == 1
    assert function.made[0].launches == [(5, 1, 1, 5, 7, (4, 1, 0), None, None, None, y.data_ptr(), 48, 64)]
    others: list[tuple[torch.Tensor | None, int]] = [(x, 33), (x, 1), (x, 2**31), (x[1:], 32), (x.double(), 32)]
    for tensor, number in others:
        fill.launch(3, (tensor,), (number,))
    assert len(function.made) == 1 + len(others)
    Kernel(function, D=128, num_warps=4).launch(3, (x,), (32,))
    assert len(function.made) == 2 + len(others)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_launches_are_served(function: Function, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A hook in the chain, or one that replaces the chain, gets its launches through Triton; None is no hook."""
    fill, x = Kernel(function, D=64), torch.zeros(8)
    chain = getattr(triton.knobs.runtime, name)
    assert not kernel_module.hooked()
    fill.launch(3, (x,), (32,))
    for hook in (None, lambda _: None):
        monkeypatch.setattr(triton.knobs.runtime, name, hook)
        fill.launch(3, (x,), (32,))
    assert len(function.made) == 2
    monkeypatch.setattr(triton.knobs.runtime, name, chain)
    hook = print
    chain.add(hook)
    try:
        fill.launch(3, (x,), (32,))
    finally:
        chain.remove(hook)
    assert len(function.made) == 3
    fill.launch(3, (x,), (32,))
    assert len(function.made) == 3


def test_what_launches_remember_is_bounded(function: Function) -> None:
    fill, x = Kernel(function, D=64), torch.zeros(8)
    for S_kv in range(3 * kernel_module.REMEMBERED):
        fill.launch(3, (x,), (S_kv,))
    assert len(function.made) == 3  # other numbers, 1, and multiples of 16
    assert fill._number_kinds.cache_info().currsize == kernel_module.REMEMBERED


@pytest.fixture
def no_launches() -> Iterator[None]:
    """None remembered by a backend, before and after."""
    forget_launches()
    yield
    forget_launches()


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize("name", [spec.name for spec in SPECS if spec.framework == "triton"])
@pytest.mark.parametrize("S", [1, 40])  # one row is split among programs
def test_later_calls_run_what_the_first_had_compiled(function: Function, monkeypatch: pytest.MonkeyPatch, name: str, S: int) -> None:
    """Arguments in their order, and nothing of the first call kept: forward and backward, with their plans, twice."""
    compiled: list[tuple[str, list[Any]]] = []
    run: list[tuple[str, list[Any]]] = []

    def launched(kernel: Any, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Any:
            passed = [*arguments, *(constants[name] for name in kernel.arg_names[len(arguments) :])]
            compiled.append((kernel.__name__, [*grid, *passed]))
            made = Compiled()
            made.run = lambda *arguments: run.append((kernel.__name__, [arguments[0], *arguments[9:]]))  # type: ignore[method-assign]
            return made

        return launch

    module: Any = registry.load(name)
    monkeypatch.setattr(type(combine.combine_kernel), "__getitem__", launched)
    device = DeviceInfo(kind="cuda", sm=90, sm_count=132)
    q, k, do = torch.zeros(1, S, 2, 4, 64), torch.zeros(1, 2, 256, 64), torch.zeros(1, S, 2, 4, 64)
    selection = Selection.from_blocks(torch.arange(4).expand(1, S, 2, 4), 32)
    call = Call(q, k, k.clone(), selection, None, 0.125, settings_for(device), device)
    for _ in range(2):
        selection.forget_plans()
        module.backward(call, *module.forward(call), do, None)
    names = [name for name, _ in compiled]
    assert len(run) > 1
    assert [name for name, _ in run] == names[-len(run) :]
    for (_, first), (_, later) in zip(compiled[-len(run) :], run, strict=True):
        for mine, wanted in zip(later, first, strict=True):
            if isinstance(wanted, torch.Tensor):
                assert isinstance(mine, int)
                assert (mine == wanted.data_ptr()) >= any(wanted is x for x in (q, k, call.v, selection.ranges, do))
            elif isinstance(wanted, TensorDescriptor):
                assert (mine.base is wanted.base, mine.block_shape) == (True, wanted.block_shape)
            else:
                assert mine == wanted


@pytest.mark.parametrize("current", [None, 7])
def test_a_thread_without_a_context_takes_the_one_of_the_device(monkeypatch: pytest.MonkeyPatch, current: int | None) -> None:
    """Without an operation on the device, and once. A thread keeps the context that it has."""
    asked: list[Any] = []

    def ask(name: str, *values: Any) -> int:
        asked.append(name)
        if name in answers:
            values[0]._obj.value = answers[name]
        else:
            asked.append(values[0].value)
        return 0

    answers = {"cuCtxGetCurrent": current, "cuDeviceGet": 1, "cuDevicePrimaryCtxRetain": 5}
    names = (*answers, "cuCtxSetCurrent")
    driver = types.SimpleNamespace(**{name: functools.partial(ask, name) for name in names})
    monkeypatch.setattr(cuda_driver, "_library", lambda: driver)
    monkeypatch.setattr(cuda_driver.thread, "bound", set())
    cuda_driver.bind_context(3)
    assert asked == ([*names, 5] if current is None else ["cuCtxGetCurrent"])
    assert cuda_driver.thread.bound == {3}
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda _: 201)
    with pytest.raises(RuntimeError, match="device 4: error 201"):
        cuda_driver.bind_context(4)
