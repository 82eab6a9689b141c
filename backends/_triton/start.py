"""Start a kernel for less host time than `kernel[grid](...)`, which has the compiler examine every argument at every launch.

What the compiler makes depends on the constants, on the kind of each argument (`kind`), and on the device. A launch like an earlier
one goes straight to the compiled kernel; any other takes the compiler's own way.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

_compiled: dict[tuple[object, ...], tuple[CompiledKernel, tuple[object, ...]]] = {}


def kind(x: object) -> object:
    """All that the compiler distinguishes of one argument: arguments of one kind take the same compiled kernel."""
    if isinstance(x, int):  # 1 becomes a constant, multiples of 16 allow wide loads, and 64-bit numbers are another type
        return (1 if x == 1 else 16 if x % 16 == 0 else 0) + (0 if -(2**31) <= x < 2**31 else 64)
    if isinstance(x, Tensor):
        return x.dtype if x.data_ptr() % 16 == 0 else (x.dtype, "unaligned")
    if isinstance(x, TensorDescriptor):
        return x.base.dtype, *x.block_shape
    return type(x)  # None, and floats, which are float32 whatever their value


def start(kernel: Any, grid: tuple[int], *arguments: Any, **constants: Any) -> None:
    """`kernel[grid](*arguments, **constants)`; the first argument is a tensor of the device that the kernel runs on.

    `constants` are the kernel's constexpr parameters, which come last, and the compiler's options.
    """
    key = (kernel, arguments[0].get_device(), *constants, *constants.values(), *map(kind, arguments))
    found = _compiled.get(key)
    if found is not None:
        compiled, parameters = found
        compiled[(*grid, 1, 1)](*arguments, *parameters)
        return
    compiled = kernel[grid](*arguments, **constants)
    if isinstance(compiled, CompiledKernel):  # the interpreter gives nothing
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
