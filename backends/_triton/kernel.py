"""Launch compiled kernels for less host time than `kernel[grid](...)`, where Triton examines every argument of every launch.

What Triton compiles depends on the constants, on the kind of each argument (`tensor_kinds`, `number_kinds`), and on the device. A launch
of a kind seen before goes straight to the compiled kernel's `run`, with addresses instead of tensors, which the driver would be asked
about one by one. Any other takes Triton's own path, and so does every launch while a profiler (Proton) hooks launches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

REMEMBERED = 256  # specializations of one kernel, and sets of numbers of one specialization: every decoding step has another S_kv


class Kernel:
    """A kernel specialized by its constexpr parameters, which come last, and by compiler options."""

    def __init__(self, function: Any, **constants: Any) -> None:
        self.function, self.constants = function, constants
        self._compiled: dict[tuple[object, ...], tuple[CompiledKernel, tuple[object, ...]]] = {}
        self._number_kinds = functools.lru_cache(REMEMBERED)(number_kinds)

    def launch(self, grid: int, tensors: Sequence[Tensor | TensorDescriptor | None], numbers: tuple[Any, ...]) -> None:
        """`function[grid,](*tensors, *numbers, **constants)` on the current device, where the tensors are; the first is no descriptor.

        Numbers are ints, floats, or (nested, named) tuples of them; a parameter always takes the same type.
        """
        device = tensors[0].get_device()  # type: ignore[union-attr]
        kinds, addresses = tensor_kinds(tensors)
        key = (device, *kinds, self._number_kinds(numbers))
        found = self._compiled.get(key)
        if found is None or hooked():
            compiled = self.function[(grid,)](*tensors, *numbers, **self.constants)
            if isinstance(compiled, CompiledKernel):  # the interpreter returns nothing
                names = self.function.arg_names[len(tensors) + len(numbers) :]
                self._compiled[key] = compiled, tuple(self.constants[name] for name in names)
            return
        compiled, parameters = found
        stream = triton.runtime.driver.active.get_current_stream(device)
        compiled.run(
            grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *numbers, *parameters
        )  # fmt: skip


def tensor_kinds(tensors: Sequence[Tensor | TensorDescriptor | None]) -> tuple[list[object], list[object]]:
    """All that Triton distinguishes of tensors, descriptors and None, and what `run` takes for them."""
    kinds: list[object] = []
    addresses: list[object] = []
    for x in tensors:
        if x is None:  # first: isinstance(None, Tensor) calls into PyTorch
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


def number_kinds(numbers: tuple[Any, ...]) -> tuple[object, ...]:
    """All that Triton distinguishes of numbers: floats are float32 whatever their value; of ints, 1 becomes a constant, multiples
    of 16 allow wide loads, and 64-bit ones are another type."""
    return tuple(
        number_kinds(x)
        if isinstance(x, tuple)
        else float if isinstance(x, float) else (1 if x == 1 else 16 if x % 16 == 0 else 0) + (0 if -(2**31) <= x < 2**31 else 64)
        for x in numbers
    )  # fmt: skip


def hooked() -> bool:
    """Whether somebody wants to be told of launches: None or an empty chain of hooks means nobody."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
