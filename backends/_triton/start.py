"""Start kernels for less host time than `kernel[grid](...)`, which has the compiler examine every argument at every launch.

What the compiler makes depends on the constants, on the kind of each argument (`tensor_kinds`, `number_kinds`), and on the device.
A launch like an earlier one goes straight to the compiled kernel's `run`, with addresses instead of tensors, which the driver would be
asked about one by one; any other takes the compiler's own way, and so does every launch while somebody (Proton) hooks launches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

REMEMBERED = 256  # launches of one kernel, and a launch's sets of numbers: decoding brings another S_kv with every step


class Launch:
    """A kernel with its constants: the constexpr parameters, which come last, and the compiler's options."""

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel, self.constants = kernel, constants
        self._compiled: dict[tuple[object, ...], tuple[CompiledKernel, tuple[object, ...]]] = {}
        self._number_kinds = functools.lru_cache(REMEMBERED)(number_kinds)

    def start(self, grid: int, tensors: Sequence[Tensor | TensorDescriptor | None], numbers: tuple[float, ...]) -> None:
        """`kernel[grid,](*tensors, *numbers, **constants)` on the current device, where the tensors are; the first is no descriptor.

        A place among the numbers always takes the same type, int or float.
        """
        device = tensors[0].get_device()  # type: ignore[union-attr]
        kinds, addresses = tensor_kinds(tensors)
        key = (device, *kinds, self._number_kinds(numbers))
        found = self._compiled.get(key)
        if found is None or hooked():
            compiled = self.kernel[(grid,)](*tensors, *numbers, **self.constants)
            if isinstance(compiled, CompiledKernel):  # the interpreter gives nothing
                names = self.kernel.arg_names[len(tensors) + len(numbers) :]
                self._compiled[key] = compiled, tuple(self.constants[name] for name in names)
            return
        compiled, parameters = found
        stream = triton.runtime.driver.active.get_current_stream(device)
        compiled.run(
            grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *numbers, *parameters
        )  # fmt: skip


def tensor_kinds(tensors: Sequence[Tensor | TensorDescriptor | None]) -> tuple[list[object], list[object]]:
    """All that the compiler distinguishes of tensors, descriptors and None, and what `run` takes in their places."""
    kinds: list[object] = []
    addresses: list[object] = []
    for x in tensors:
        if x is None:  # first: that it is no Tensor, Python would be told by a function of PyTorch's
            kinds.append(None)
            addresses.append(None)
        elif isinstance(x, Tensor):
            address = x.data_ptr()
            kinds.append(x.dtype if address % 16 == 0 else (x.dtype, "unaligned"))
            addresses.append(address)
        else:
            kinds.append((x.base.dtype, *x.block_shape))
            addresses.append(x)
    return kinds, addresses


def number_kinds(numbers: tuple[float, ...]) -> tuple[object, ...]:
    """All that the compiler distinguishes of numbers: floats are float32 whatever their value; of ints, 1 becomes a constant, multiples
    of 16 allow wide loads, and 64-bit ones are another type."""
    return tuple(
        float if isinstance(x, float) else (1 if x == 1 else 16 if x % 16 == 0 else 0) + (0 if -(2**31) <= x < 2**31 else 64)
        for x in numbers
    )


def hooked() -> bool:
    """Whether somebody wants to be told of launches: None or an empty chain of hooks means nobody."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
