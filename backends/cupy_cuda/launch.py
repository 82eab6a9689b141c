"""Start CUDA kernels on torch's current stream with raw pointers: little host time, and nothing that a CUDA graph cannot capture.

A kernel takes one struct by value, `Arguments`. It is packed into a buffer of the calling thread; the driver copies it before it returns.
"""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from nsa_sel.backends import _driver
from nsa_sel.backends._driver import Pointers, thread
from nsa_sel.backends.cupy_cuda.compiler import Constants, architecture, constants, cubin
from nsa_sel.core.call import Call, WindowCall
from nsa_sel.core.choose_call import ChooseCall
from nsa_sel.errors import BackendError

PORTABLE_CLUSTER = 8  # CTAs of a cluster on any GPU that has clusters; more must be asked for
_NON_PORTABLE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED (cuda.h)

_DRIVER_OF_EARLY_GRAPHS = 12040  # the first whose CUDA graphs hold early starts
_one_struct = Pointers((0,))


@functools.cache  # an import statement would take 1 us or more of every launch
def _interfaces() -> tuple[Any, Any]:
    """CuPy's modules of the CUDA driver's functions and of the runtime's."""
    from cupy_backends.cuda.api import driver, runtime

    return driver, runtime


@functools.cache
def _starts_early(device: int) -> bool:
    """Whether GPU and driver start a kernel before the one ahead has ended."""
    _, runtime = _interfaces()
    return torch.cuda.get_device_capability(device) >= (9, 0) and runtime.driverGetVersion() >= _DRIVER_OF_EARLY_GRAPHS


@functools.cache
def layout(maps: int, problem: bool, values: int) -> struct.Struct:
    """The `Arguments` of a kernel: tensor maps, `Problem` (problem.cuh), and values of 8 bytes; nothing is padded."""
    return struct.Struct("<" + maps * "128s" + problem * "26q2d" + values * "q")


@functools.cache
def function(source: str, macros: Constants, device: int, shared: int, own: bool) -> int:
    """The kernel of a file (of the file's name) on a device, as the driver's handle, allowed `shared` bytes of dynamic shared memory.

    Compiled and loaded the first time; loaded code stays as long as the process. own: see `compiler.architecture`.
    """
    driver, runtime = _interfaces()
    major, minor = torch.cuda.get_device_capability(device)
    runtime.setDevice(device)
    module = driver.moduleLoadData(cubin(source, macros, architecture(10 * major + minor, own)))
    handle: int = driver.moduleGetFunction(module, Path(source).stem)
    if shared:  # beyond 48 KiB, static shared memory included, it must be asked for
        driver.funcSetAttribute(handle, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
    if dict(macros).get("CLUSTER", 1) > PORTABLE_CLUSTER:
        driver.funcSetAttribute(handle, _NON_PORTABLE_CLUSTERS, 1)
    return handle


def start(
    source: str, macros: Constants, device: int, ctas: int, threads: int, shared: int, *values: int,
    maps: tuple[bytes, ...] = (), problem: tuple[Any, ...] = (), early: bool = False,
) -> None:  # fmt: skip
    """Start the kernel of `source` on `device`: `ctas` CTAs of `threads` threads, `shared` bytes of dynamic shared memory each.

    maps, problem, values: its `Arguments`, in this order. A kernel with tensor maps is compiled for this GPU's own instructions.
    early: it calls `wait_for_stream` (hardware.cuh), so that it may start before the kernel ahead of it in the stream has ended.
    The device's context is made this thread's own: autograd's threads come without one.
    """
    driver, runtime = _interfaces()
    handle = function(source, macros, device, shared, bool(maps))
    runtime.setDevice(device)
    packed = layout(len(maps), bool(problem), len(values))
    packed.pack_into(thread.arguments, 0, *maps, *problem, *values)
    stream = _driver.stream_of(device)
    early = early and _starts_early(device)
    if thread.recording is not None:
        thread.recording.launch(handle, ctas, threads, shared, early, _one_struct, packed, values=(*maps, *problem, *values))
    if early:
        driver.check_status(_driver.start(handle, ctas, threads, shared, stream, _one_struct, early=True))
        return
    driver.launchKernel(handle, ctas, 1, 1, threads, 1, 1, shared, stream, _one_struct.address, 0)


def clear(pointer: int, size: int, device: int) -> None:
    """Zero `size` bytes at an address of `device`, in its current stream."""
    _, runtime = _interfaces()
    runtime.setDevice(device)
    runtime.memsetAsync(pointer, 0, size, _driver.stream_of(device))
    if thread.recording is not None:
        thread.recording.cleared.append((pointer, size))


def macros(call: Call | ChooseCall | WindowCall, *, aligned: int = True, **others: int) -> Constants:
    """The constants of a kernel: those that all take (hardware.cuh), and others."""
    q = call.q
    return constants(BF16=int(q.dtype == torch.bfloat16), DK=q.shape[-1], DV=call.v.shape[-1], ALIGNED=int(aligned), **others)


def integer_macros(**others: int) -> Constants:
    """The constants of a kernel that takes numbers of neither dtype: those that all take, whatever they are, and others."""
    return constants(BF16=0, DK=8, DV=8, ALIGNED=1, **others)


def pointers(*tensors: Tensor | None) -> list[int]:
    """Addresses; 0 for None."""
    return [0 if x is None else x.data_ptr() for x in tensors]


def strided(x: Tensor) -> tuple[int, ...]:
    """The values of `HeadsTensor` or `KeysTensor` (problem.cuh): the address and all strides but the last, which is 1."""
    return (x.data_ptr(), *x.stride()[:-1])


def scales(call: Call) -> list[int]:
    """The values of `KeyValueScales` (e4m3.cuh); none if keys and values are not quantized."""
    tensors = () if call.scales is None else (call.scales.k, call.scales.v)
    return [value for x in tensors for value in ((0, 0, 0) if x is None else (x.data_ptr(), *x.stride()))]


def page_of(call: Call) -> int | None:
    """PAGE of problem.cuh: keys of a cache's page, 0 for a cache without pages, None if there is no cache."""
    if call.lengths is None:
        return None
    return 0 if call.block_table is None else call.k.shape[2]


def cache_macros(page: int | None) -> dict[str, int]:
    """The constants of a kernel that reads a cache of such pages."""
    return {} if page is None else {"PAGE": page}


def problem(call: Call, ranges: Tensor) -> tuple[Any, ...]:
    """The values of `Problem` (problem.cuh), found once for a call; `ranges` are the selection's, contiguous."""
    if call.problem is None or call.problem[0] is not ranges:
        call.problem = ranges, _problem(call, ranges)
    found: tuple[Any, ...] = call.problem[1]
    return found


def _problem(call: Call, ranges: Tensor) -> tuple[Any, ...]:
    q, q_pos, table = call.q, call.q_pos, call.block_table
    _, S, G, h, _ = q.shape
    positions: tuple[int, ...] = (0, 0, 0)
    pos_bytes = 0
    if call.lengths is not None:
        positions, pos_bytes = (call.lengths.data_ptr(), call.lengths.stride(0), 0), call.lengths.element_size()
    elif q_pos is not None:
        positions, pos_bytes = (q_pos.data_ptr(), *q_pos.stride()), q_pos.element_size()
    return (
        *strided(q), *strided(call.k), *strided(call.v), *positions, ranges.data_ptr(), pos_bytes, ranges.element_size(),
        S, call.S_kv, G, h, call.selection.n, *((0, 0) if table is None else (table.data_ptr(), table.stride(0))),
        call.scale, call.scale_log2(),
    )  # fmt: skip


def problem_aligned(call: Call, values: tuple[Any, ...]) -> bool:
    """`aligned` of q, k and v, from the addresses and strides of `problem`, which are at hand."""
    q, a, b, c, d, k, e, f, g, v, h, i, j = values[:13]
    return ((q | k | v) % 16 == 0 == (a | b | c | d | e | f | g | h | i | j) % 8) or aligned(call.q, call.k, call.v)


def aligned(*tensors: Tensor) -> bool:
    """Whether all rows begin at multiples of 16 bytes, so that they can be copied 16 bytes at a time."""
    addresses = steps = 0  # all are multiples of a power of two if their bits together are
    for x in tensors:
        addresses |= x.data_ptr()
        for step in x.stride()[:-1]:
            steps |= step
    if addresses % 16:
        return False
    if steps % 8 == 0:
        return True
    # Strides along dimensions of one element are never used.
    return all(step % 8 == 0 for x in tensors for step, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1)


def refuse_shared_memory(needed: int, available: int) -> NoReturn:
    raise BackendError(
        f"a block needs {needed} bytes of shared memory, device.shared_memory is {available}; allowed: at most that."
        " Remedy: use sdpa-packed."
    )
