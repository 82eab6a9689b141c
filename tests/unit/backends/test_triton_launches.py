"""Check launches that go straight to a compiled Triton kernel: only where Triton would compile the same one, and with its arguments."""

from __future__ import annotations

import copy
import functools
import itertools
import struct
import types
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.tools.tensor_descriptor import TensorDescriptor

import nsa_sel
from nsa_sel.backends._triton import kernel as kernel_module
from nsa_sel.backends._triton import tiles
from nsa_sel.backends._triton.arguments import Strides
from nsa_sel.backends._triton.kernel import Kernel, number_kinds, tensor_kinds
from nsa_sel.backends._triton.tiles import CheckedDescriptor
from nsa_sel.backends.launcher import cuda_driver, packing
from nsa_sel.backends.specs import SPECS
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.gpus import forget_launches

NUMBERS = (0, 1, 2, 15, 16, 48, -1, -16, 2**31 - 1, 2**31, 2**31 + 8, -(2**31), -(2**31) - 16, 2**40)


def tensors() -> list[torch.Tensor]:
    whole = [torch.zeros(64, 32, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64)]
    return [*whole, *(x.view(-1)[1:] for x in whole), whole[0][::2]]


def test_arguments_of_one_kind_take_one_kernel() -> None:
    """Kinds are at least as fine as what the compiler looks at (its own function says what that is)."""
    makers = (TensorDescriptor, CheckedDescriptor)
    blocks = ([16, 32], [32, 32])
    descriptors = [make(x, [64, 32], [32, 1], block) for x in tensors()[:3] for block in blocks for make in makers]
    tuples = [(48, 1), (48, 2), (48, (1, 2**31)), (32, (1, 2**40)), Strides((1, 16), (3,), (), (0, 5)), Strides((1, 32), (5,), (), (16, 7))]
    arguments = [None, 0.5, 2.0, *NUMBERS, *tuples, *tensors(), *descriptors]
    kinds = [number_kinds((x,))[0] if isinstance(x, int | float | tuple) else tensor_kinds((x,))[0][0] for x in arguments]
    seen = [*zip(kinds, (native_specialize_impl(CUDABackend, x, False, True, True) for x in arguments), strict=True)]
    for (one, theirs), (other, their_other) in itertools.combinations(seen, 2):
        assert one != other or theirs == their_other
    assert len({str(theirs) for _, theirs in seen[-len(descriptors) :]}) == 6  # the compiler sees no difference between the makers


def test_checked_descriptors_pass_the_checks_they_leave_out() -> None:
    x = torch.zeros(2, 3, 64, 40, dtype=torch.bfloat16).transpose(1, 2)[..., :32]
    mine, own = tiles.descriptor(x, 1, 1, 16, 32), TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, 16, 32])
    assert (mine.base is own.base, [*mine.shape], [*mine.strides]) == (True, own.shape, own.strides)
    assert (mine.block_shape, mine.padding) == (own.block_shape, own.padding)


class Compiled(mock.Mock):
    """Stands for a compiled kernel."""

    function, packed_metadata = 7, (4, 1, 0)


class Function:
    """Stands for a kernel of two arguments and one constant: every launch through Triton makes a new compiled kernel."""

    arg_names = ("x", "n", "D")

    def __init__(self) -> None:
        self.made: list[Compiled] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self.made.append(Compiled()) or self.made[-1]


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
    function.made[0].run.assert_called_once_with(5, 1, 1, 5, 7, (4, 1, 0), None, None, None, y.data_ptr(), 48, 64)
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
    chain = copy.copy(getattr(triton.knobs.runtime, name))
    assert not kernel_module.hooked()
    fill.launch(3, (x,), (32,))
    for hook, made in ((None, 1), (lambda _: None, 2), (chain, 2)):
        monkeypatch.setattr(triton.knobs.runtime, name, hook)
        fill.launch(3, (x,), (32,))
        assert len(function.made) == made
    chain.add(print)
    fill.launch(3, (x,), (32,))
    chain.remove(print)
    fill.launch(3, (x,), (32,))
    assert len(function.made) == 3


def test_what_launches_remember_is_bounded(function: Function) -> None:
    fill, x = Kernel(function, D=64), torch.zeros(8)
    for S_kv in range(3 * kernel_module.REMEMBERED):
        fill.launch(3, (x,), (S_kv,))
    assert len(function.made) == 3  # other numbers, 1, and multiples of 16
    assert fill._number_kinds.cache_info().currsize == kernel_module.REMEMBERED


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


def test_flags_and_short_numbers_take_their_bytes() -> None:
    parameters = [(0, 8), (8, 1), (12, 4), (16, 2), (24, 8), (32, 4), (40, 8)]
    layout = packing._layout(1, 64, 0, parameters, ["*fp32", "constexpr"], ["u1", ("i32", "constexpr"), "i16", "i64", "fp32"], [])
    data = layout.tensors.pack(2**40, layout.packed_numbers((True, (-5, 1), 7, -(2**40), 0.5)))
    assert data == struct.pack("<Qb3xih6xqf4xQ", 2**40, 1, -5, 7, -(2**40), 0.5, 0)
    assert packing._layout(1, 64, 0, parameters, ["*fp32"], ["u1", "i32", "i16", "i64", "bf16"], []) is None


def test_a_launch_that_needs_more_than_arguments_has_no_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0}
    meta = {"num_ctas": 1, "num_warps": 4, "shared": 0, "tensordesc_meta": (), **plain}
    source = types.SimpleNamespace(signature={"x": "*fp32", "n": "i32"})

    def layout(**others: Any) -> Any:
        return packing.layout_of(
            types.SimpleNamespace(metadata=types.SimpleNamespace(**meta | others), src=source, function=7, run=None), 1
        )

    monkeypatch.setattr(cuda_driver, "parameters", lambda function: [(0, 8), (8, 4), (16, 8), (24, 8)])
    assert not layout().early
    assert layout(launch_pdl=True).early
    needs = {**dict.fromkeys(plain, 1), "num_ctas": 2, "shared": 10**6}
    assert not any(layout(**{name: value}) for name, value in needs.items())
    monkeypatch.setattr(cuda_driver, "parameters", lambda function: None)  # of an old driver
    assert layout() is None


BACKENDS = [spec.name for spec in SPECS if spec.framework == "triton"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("S", [1, 100])
def test_every_launch_of_a_gpu_is_packed(monkeypatch: pytest.MonkeyPatch, backend: str, S: int) -> None:
    """Forward and backward, with the bits of launches through Triton."""
    layouts, started, runs = list[Any](), list[bool](), []
    real_layout, real_started = kernel_module.layout_of, kernel_module._started
    monkeypatch.setattr(kernel_module, "layout_of", lambda *of: layouts.append(real_layout(*of)) or layouts[-1])
    monkeypatch.setattr(kernel_module, "_started", lambda *how: started.append(real_started(*how)) or started[-1])
    q, k, v = make_qkv(1, S, 2, 4, 64, 64, S_kv=256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for packed in (True, False):
        if not packed:
            assert len(started) >= 3
            assert all(started)
            assert all(layout is not None for layout in layouts)
            monkeypatch.setattr(kernel_module, "layout_of", lambda *of: None)
        forget_launches()
        for _ in range(2):
            o, lse = nsa_sel.selection_attention(q, k, v, make_blocks(1, S, 2, 256, 4, 32, device="cuda"), backend=backend, return_lse=True)
            runs.append((o.detach(), lse.detach(), *torch.autograd.grad((o, lse), (q, k, v), (torch.ones_like(o), torch.ones_like(lse)))))
    forget_launches()
    assert all(torch.equal(x, y) for run in runs for x, y in zip(runs[0], run, strict=True))
