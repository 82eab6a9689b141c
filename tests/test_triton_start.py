"""Launches that go straight to a compiled kernel: only where the compiler would have chosen the same one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_sel.backends._triton import start
from nsa_sel.backends._triton.start import kind

NUMBERS = (0, 1, 2, 15, 16, 48, -1, -16, 2**31 - 1, 2**31, 2**31 + 8, -(2**31), -(2**31) - 16, 2**40)


def tensors() -> list[torch.Tensor]:
    whole = [torch.zeros(64, 32, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64)]
    return [*whole, *(x.view(-1)[1:] for x in whole), whole[0][::2]]


def test_arguments_of_one_kind_take_one_kernel() -> None:
    """`kind` is at least as fine as what the compiler looks at (its own function says what that is)."""
    descriptors = [TensorDescriptor(x, [64, 32], [32, 1], block) for x in tensors()[:3] for block in ([16, 32], [32, 32])]
    arguments = [None, 0.5, 2.0, *NUMBERS, *tensors(), *descriptors]
    seen = [(kind(x), native_specialize_impl(CUDABackend, x, False, True, True)) for x in arguments]
    for (one, theirs), (other, their_other) in itertools.combinations(seen, 2):
        assert one != other or theirs == their_other


class Compiled:
    """Stands for a compiled kernel: remembers what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.launches.append((grid, arguments))


class Kernel:
    """Stands for a kernel of two arguments and one constant: every launch by way of the compiler makes a new compiled kernel."""

    arg_names = ("x", "n", "D")

    def __init__(self) -> None:
        self.made: list[Compiled] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Compiled:
            self.made.append(Compiled())
            return self.made[-1]

        return launch


def test_a_like_launch_skips_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "CompiledKernel", Compiled)
    monkeypatch.setattr(start, "_compiled", {})
    kernel, x = Kernel(), torch.zeros(8)
    start.start(kernel, (3,), x, 32, D=64, num_warps=4)
    start.start(kernel, (5,), x, 48, D=64, num_warps=4)
    assert len(kernel.made) == 1
    assert kernel.made[0].launches == [((5, 1, 1), (x, 48, 64))]
    others = [((x, 33), {"D": 64, "num_warps": 4}), ((x[1:], 32), {"D": 64, "num_warps": 4}), ((x, 32), {"D": 128, "num_warps": 4}),
              ((x, 32), {"D": 64, "num_warps": 8}), ((x.double(), 32), {"D": 64, "num_warps": 4})]  # fmt: skip
    for arguments, constants in others:
        start.start(kernel, (3,), *arguments, **constants)
    assert len(kernel.made) == 1 + len(others)
    start.start(Kernel(), (3,), x, 32, D=64, num_warps=4)
    assert len(start._compiled) == 2 + len(others)
