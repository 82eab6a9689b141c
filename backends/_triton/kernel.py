"""Launch compiled Triton kernels with less host time than `kernel[grid](...)`, which inspects every argument of every
launch.

Triton specializes a kernel on its constants, on the kind of each argument (`tensor_kinds`, `number_kinds`), and on the
device. The first launch of a specialization takes Triton's own path. Later ones pack addresses and numbers as the
compiled kernel expects them (launcher/packing.py) and call the driver. If a kernel cannot be launched that way, they
call the compiled kernel's `run` with addresses instead of tensors, which saves a driver query per tensor. While a
profiler (Proton) hooks launches, all launches take Triton's own path.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_sel.backends.launcher import cuda_driver
from nsa_sel.backends.launcher.cuda_driver import bind_context, start, stream_of, thread
from nsa_sel.backends.launcher.packing import Layout, encoder, layout_of

CPU = -1  # device index of CPU tensors (interpreter tests)
REMEMBERED = 256  # size of caches per class of calls, and of each kernel's cache of packed numbers (S_kv grows in decoding)
MOST_KERNELS = 4096


class Kernel:
    """A Triton function with fixed constexpr parameters, which come last, and compiler options."""

    def __init__(self, function: Any, **constants: Any) -> None:
        self.function, self.constants = function, constants
        self._compiled: dict[tuple[object, ...], tuple[CompiledKernel, tuple[object, ...], Layout | None]] = {}
        self._packed: dict[tuple[object, ...], tuple[Layout, bytes]] = {}  # with packed numbers
        self._number_kinds = functools.lru_cache(REMEMBERED)(number_kinds)

    def launch(self, grid: int, tensors: Sequence[Tensor | TensorDescriptor | None], numbers: tuple[Any, ...]) -> None:
        """Launch `function[grid,](*tensors, *numbers, **constants)` on the current device, which must hold the tensors.

        Args:
            grid: number of programs.
            tensors: tensors, TMA descriptors or None; the first is a tensor.
            numbers: ints, floats, or (nested, named) tuples of them; a parameter always takes the same type.
        """
        device = tensors[0].get_device()  # type: ignore[union-attr]
        kinds, values = tensor_kinds(tensors)
        if hooked():
            self._compile(grid, tensors, numbers, (device, *kinds, self._number_kinds(numbers)))
            return
        key = (device, numbers, *kinds)
        packed = self._packed.get(key)
        if packed is None:
            kind = (device, *kinds, self._number_kinds(numbers))
            entry = self._compiled.get(kind)
            if entry is None:
                self._compile(grid, tensors, numbers, kind)
                return
            compiled, parameters, layout = entry
            if layout is None:
                _refuse_recording()
                stream = triton.runtime.driver.active.get_current_stream(device)
                compiled.run(
                    grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *numbers, *parameters
                )  # fmt: skip
                return
            if len(self._packed) >= REMEMBERED:
                self._packed.clear()
            packed = self._packed[key] = layout, layout.packed_numbers(numbers)
        if not _started(*packed, grid, device, values):
            kind = (device, *kinds, self._number_kinds(numbers))
            self._compiled[kind] = (*self._compiled[kind][:2], None)  # retry through Triton, which raises its own error
            self._packed.clear()
            self.launch(grid, tensors, numbers)

    def loaded(self, tensors: Sequence[Tensor | TensorDescriptor | None], numbers: tuple[Any, ...]) -> bool:
        """Return whether `launch` would find its specialization loaded: a CUDA graph's capture breaks if it is not."""
        kind = (tensors[0].get_device(), *tensor_kinds(tensors)[0], self._number_kinds(numbers))  # type: ignore[union-attr]
        return kind[0] == CPU or kind in self._compiled

    def _compile(
        self, grid: int, tensors: Sequence[Tensor | TensorDescriptor | None], numbers: tuple[Any, ...], kind: tuple[object, ...]
    ) -> None:
        """Launch through Triton, which compiles if needed, and cache the compiled kernel."""
        _refuse_recording()
        compiled = self.function[(grid,)](*tensors, *numbers, **self.constants)
        if isinstance(compiled, CompiledKernel) and kind not in self._compiled:  # the interpreter returns None
            names = self.function.arg_names[len(tensors) + len(numbers) :]
            layout = layout_of(compiled, len(tensors)) if kind[0] != CPU else None
            self._compiled[kind] = compiled, tuple(self.constants[name] for name in names), layout


@functools.lru_cache(MOST_KERNELS)
def cached_kernel(function: Any, **constants: Any) -> Kernel:
    """Return the `Kernel` of a Triton function and its constants, which are hashable."""
    return Kernel(function, **constants)


def _started(layout: Layout, numbers: bytes, grid: int, device: int, values: list[Any]) -> bool:
    """Launch through the driver; return whether that succeeded. Empty grids are not launched."""
    if device not in thread.bound:
        bind_context(device)
    values = [x for x in values if x is not None]
    for i, encoded in layout.maps:
        x = values[i]
        address = x.base.data_ptr()
        values[i] = encoded(address, x.shape, x.strides)
        if thread.recording is not None:
            thread.recording.encoders[values[i]] = address, encoder(encoded, x.shape, x.strides)
        if values[i] is None:
            return False
    if grid == 0:
        return True
    layout.tensors.pack_into(thread.arguments, 0, *values, numbers)
    if thread.recording is not None:
        step = layout.function, grid, layout.threads, layout.shared, layout.early, layout.pointers, layout.tensors
        thread.recording.launch(*step, values=(*values, numbers))
        thread.recording.kernels.append(layout.compiled)
    return not start(layout.function, grid, layout.threads, layout.shared, stream_of(device), layout.pointers, early=layout.early)


def _refuse_recording() -> None:
    """Mark the pass that is being recorded as not replayable, because this launch does not go through the driver
    alone."""
    if thread.recording is not None:
        thread.recording.refused = True


def tensor_kinds(tensors: Sequence[Tensor | TensorDescriptor | None]) -> tuple[list[object], list[object]]:
    """Return what Triton specializes on for tensors, descriptors and None, and the values that `run` takes for them."""
    kinds: list[object] = []
    addresses: list[object] = []
    for x in tensors:
        if x is None:  # test this first, because isinstance(None, Tensor) calls into PyTorch
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
    """Return what Triton specializes on for numbers: a float is float32; an int of 1 becomes a constant, multiples of
    16 allow wide loads, and 64-bit ints have another type."""
    return tuple(
        number_kinds(x)
        if isinstance(x, tuple)
        else float if isinstance(x, float) else (1 if x == 1 else 16 if x % 16 == 0 else 0) + (0 if -(2**31) <= x < 2**31 else 64)
        for x in numbers
    )  # fmt: skip


def hooked() -> bool:
    """Return whether a launch hook is set (not None and not an empty chain)."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # a plain function instead of a chain
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


cuda_driver.hooked = hooked
