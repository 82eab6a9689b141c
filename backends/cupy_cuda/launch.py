"""Start CUDA kernels on torch's current stream, with raw pointers: little host time, and nothing that a CUDA graph could not capture.

A kernel takes one structure by value, which is packed into a buffer of the calling thread; the driver copies it before it returns.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda.compiler import Constants, architecture, cubin
from nsa_sel.core.call import Call

PROBLEM = "24q2d"  # struct Problem of common.cuh
MOST_BYTES = 4096  # of a kernel's arguments


class _Buffer(threading.local):
    """Where a thread packs a kernel's arguments, and the list of one pointer that the driver takes."""

    def __init__(self) -> None:
        self.arguments = ctypes.create_string_buffer(MOST_BYTES)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))
        self.address = ctypes.addressof(self.pointers)


_buffer = _Buffer()


@functools.cache  # an import statement would take 1 us or more of every launch
def _interfaces() -> tuple[Any, Any]:
    """CuPy's modules of the CUDA driver's functions and of the runtime's."""
    from cupy_backends.cuda.api import driver, runtime

    return driver, runtime


@functools.cache
def layout(fields: str) -> struct.Struct:
    """How a kernel's `Arguments` lie in memory: their fields have 8 bytes each, so that nothing is padded."""
    return struct.Struct("<" + fields)


@functools.cache
def function(source: str, macros: Constants, device: int, shared: int, own: bool = False) -> int:
    """The kernel of a file (of the file's name) on a device, as the driver's handle, allowed `shared` bytes of dynamic shared memory.

    Compiled and loaded the first time; loaded code stays as long as the process.
    """
    driver, runtime = _interfaces()
    major, minor = torch.cuda.get_device_capability(device)
    runtime.setDevice(device)
    module = driver.moduleLoadData(cubin(source, macros, architecture(10 * major + minor, own)))
    handle: int = driver.moduleGetFunction(module, source.removesuffix(".cu"))
    if shared:  # beyond 48 KiB, of which a kernel's static shared memory is a part, it must be asked for
        driver.funcSetAttribute(handle, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
    return handle


def start(
    source: str, macros: Constants, device: int, blocks: int, threads: int, shared: int, fields: str, *values: Any, own: bool = False
) -> None:
    """Start the kernel of `source` on `device`: `blocks` blocks of `threads` threads, `shared` bytes of dynamic shared memory each.

    fields, values: its `Arguments`. The device's context is made this thread's own: autograd's threads come without one.
    """
    driver, runtime = _interfaces()
    handle = function(source, macros, device, shared, own)
    runtime.setDevice(device)
    layout(fields).pack_into(_buffer.arguments, 0, *values)
    stream = torch._C._cuda_getCurrentRawStream(device)
    driver.launchKernel(handle, blocks, 1, 1, threads, 1, 1, shared, stream, _buffer.address, 0)


def clear(pointer: int, size: int, device: int) -> None:
    """Zero `size` bytes at an address of `device`, in its current stream."""
    _, runtime = _interfaces()
    runtime.setDevice(device)
    runtime.memsetAsync(pointer, 0, size, torch._C._cuda_getCurrentRawStream(device))


def strided(x: Tensor) -> tuple[int, ...]:
    """The values of `HeadsTensor` or `KeysTensor` (problem.cuh): a pointer and all strides but the last, which is 1."""
    return (x.data_ptr(), *x.stride()[:-1])


def problem(call: Call, ranges: Tensor) -> tuple[Any, ...]:
    """The values of `Problem` (common.cuh); `ranges` are the selection's, contiguous."""
    q, k, v, q_pos = call.q, call.k, call.v, call.q_pos
    _, S, G, h, _ = q.shape
    positions = (0, 0, 0) if q_pos is None else (q_pos.data_ptr(), *q_pos.stride())
    return (
        *strided(q), *strided(k), *strided(v), *positions, ranges.data_ptr(),
        0 if q_pos is None else q_pos.element_size(), ranges.element_size(),
        S, k.shape[2], G, h, call.selection.n, call.scale, call.scale_log2(),
    )  # fmt: skip


def problem_aligned(call: Call, values: tuple[Any, ...]) -> bool:
    """`aligned` of q, k and v, from the addresses and steps of `problem`: mostly those are all that need be looked at."""
    q, a, b, c, d, k, e, f, g, v, h, i, j = values[:13]
    return ((q | k | v) % 16 == 0 == (a | b | c | d | e | f | g | h | i | j) % 8) or aligned(call.q, call.k, call.v)


def aligned(*tensors: Tensor) -> bool:
    """Whether all rows begin at multiples of 16 bytes, so that they can be copied 16 bytes at a time."""
    pointers = steps = 0  # all are multiples of a power of two where their bits together are
    for x in tensors:
        pointers |= x.data_ptr()
        for step in x.stride()[:-1]:
            steps |= step
    if pointers % 16:
        return False
    if steps % 8 == 0:
        return True
    # Steps along dimensions of one element are never taken.
    return all(step % 8 == 0 for x in tensors for step, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1)


def type_facts(call: Call, *others: Tensor) -> dict[str, int]:
    """The constants that every kernel takes; `others` are read row by row as q, k and v are."""
    return {
        "BF16": int(call.q.dtype == torch.bfloat16), "DK": call.q.shape[-1], "DV": call.v.shape[-1],
        "ALIGNED": int(aligned(call.q, call.k, call.v, *others)),
    }  # fmt: skip
