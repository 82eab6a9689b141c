"""Launch CUDA kernels on torch's current stream with raw pointers, with little host time; CUDA graphs can capture all
of it.

A kernel takes one struct by value, `Arguments`. It is packed into a buffer of the calling thread; the driver copies it
during the launch.
"""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda.compiler import Constants, architecture, constants, cubin
from nsa_sel.backends.launcher import cuda_driver
from nsa_sel.backends.launcher.cuda_driver import Pointers, thread
from nsa_sel.core.call import Call, ChooseCall, WindowCall
from nsa_sel.errors import BackendError

SYSTEM = 1024  # bytes of shared memory per CTA that the system reserves
PORTABLE_CLUSTER = 8  # largest cluster size that needs no attribute
_NON_PORTABLE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED (cuda.h)

_one_struct = Pointers((0,))


@functools.cache  # an import statement would cost 1 us or more per launch
def _interfaces() -> tuple[Any, Any]:
    """Return CuPy's modules of CUDA driver and CUDA runtime functions."""
    from cupy_backends.cuda.api import driver, runtime

    return driver, runtime


@functools.cache
def layout(maps: int, problem: bool, values: int) -> struct.Struct:
    """Return the layout of a kernel's `Arguments`: tensor maps, `Problem` (problem.cuh), and 8-byte values, without
    padding."""
    return struct.Struct("<" + maps * "128s" + problem * "29q2d" + values * "q")


@functools.cache
def function(source: str, macros: Constants, device: int, shared: int, own: bool) -> int:
    """Return the driver's handle of a file's kernel (named like the file), allowed `shared` bytes of dynamic shared
    memory.

    Compiles and loads it the first time; loaded code stays until the process ends. own: see `compiler.architecture`.
    """
    driver, runtime = _interfaces()
    major, minor = torch.cuda.get_device_capability(device)
    runtime.setDevice(device)
    module = driver.moduleLoadData(cubin(source, macros, architecture(10 * major + minor, own)))
    handle: int = driver.moduleGetFunction(module, Path(source).stem)
    if shared:  # more than 48 KiB, including static shared memory, needs the attribute
        driver.funcSetAttribute(handle, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
    if dict(macros).get("CLUSTER", 1) > PORTABLE_CLUSTER:
        driver.funcSetAttribute(handle, _NON_PORTABLE_CLUSTERS, 1)
    return handle


def start(
    source: str, macros: Constants, device: int, ctas: int, threads: int, shared: int, *values: int,
    maps: tuple[bytes, ...] = (), problem: tuple[Any, ...] = (), early: bool = False,
) -> None:  # fmt: skip
    """Launch the kernel of `source`.

    Args:
        source: file in kernels/.
        macros: its preprocessor constants.
        device: index of the GPU. Its context is bound to this thread, because autograd's threads have none.
        ctas, threads: grid and block size.
        shared: bytes of dynamic shared memory per CTA.
        values, maps, problem: its `Arguments`: maps, then problem, then values. A kernel with tensor maps is compiled
            for sm_90a.
        early: programmatic dependent launch; the kernel calls `wait_for_stream` (hardware.cuh).
    """
    driver, runtime = _interfaces()
    handle = function(source, macros, device, shared, bool(maps))
    runtime.setDevice(device)
    packed = layout(len(maps), bool(problem), len(values))
    packed.pack_into(thread.arguments, 0, *maps, *problem, *values)
    stream = cuda_driver.stream_of(device)
    early = early and cuda_driver.starts_early(device)
    if thread.recording is not None:
        thread.recording.launch(handle, ctas, threads, shared, early, _one_struct, packed, values=(*maps, *problem, *values))
    if early:
        driver.check_status(cuda_driver.start(handle, ctas, threads, shared, stream, _one_struct, early=True))
        return
    driver.launchKernel(handle, ctas, 1, 1, threads, 1, 1, shared, stream, _one_struct.address, 0)


def clear(pointer: int, size: int, device: int) -> None:
    """Zero `size` bytes at an address of `device`, on its current stream."""
    _, runtime = _interfaces()
    runtime.setDevice(device)
    runtime.memsetAsync(pointer, 0, size, cuda_driver.stream_of(device))
    if thread.recording is not None:
        thread.recording.cleared.append((pointer, size))


def macros(call: Call | ChooseCall | WindowCall, *, aligned: int = True, **others: int) -> Constants:
    """Return a kernel's macros: those that all kernels take (hardware.cuh), and others."""
    q = call.q
    return constants(BF16=int(q.dtype == torch.bfloat16), DK=q.shape[-1], DV=call.v.shape[-1], ALIGNED=int(aligned), **others)


def integer_macros(**others: int) -> Constants:
    """Return the macros of a kernel on integers only: placeholders for those that all kernels take, and others."""
    return constants(BF16=0, DK=8, DV=8, ALIGNED=1, **others)


def pointers(*tensors: Tensor | None) -> list[int]:
    """Return the tensors' addresses, 0 for None."""
    return [0 if x is None else x.data_ptr() for x in tensors]


def strided(x: Tensor) -> tuple[int, ...]:
    """Return the values of `HeadsTensor` or `KeysTensor` (problem.cuh): the address, and all strides but the last
    (1)."""
    return (x.data_ptr(), *x.stride()[:-1])


def scales(call: Call) -> list[int]:
    """Return the values of `KeyValueScales` (stored_tiles.cuh); zeros if keys and values are not quantized."""
    tensors = (None, None) if call.scales is None else (call.scales.k, call.scales.v)
    return [value for x in tensors for value in ((0, 0, 0) if x is None else (x.data_ptr(), *x.stride()))]


def page_of(call: Call) -> int | None:
    """Return PAGE of problem.cuh: keys per page, 0 for a cache without pages, None without a cache."""
    if call.lengths is None:
        return None
    return 0 if call.block_table is None else call.k.shape[2]


def joined_macros(call: Call) -> dict[str, int]:
    """Return the macros of a kernel that reads the pages of one sequence, at positions (packed.py); none without pages."""
    return {} if call.block_table is None else {"PAGE": call.k.shape[2], "JOINED": 1 + (call.scales is not None)}


def joined_factors(call: Call) -> list[int]:
    """Return the address of the factors of its pages' keys and values [pages,G,2]; 0 without scales."""
    return pointers(None if call.scales is None else call.scales.k)


def cache_macros(page: int | None, packed: bool = False) -> dict[str, int]:
    """Return the macros of a kernel that reads a cache with such pages. packed: `Call.table_rows` says whose."""
    return {} if page is None else {"PAGE": page} | ({"PACKED": 1} if packed else {})


def plan_problem(call: Call, ranges: Tensor) -> tuple[Any, ...]:
    """Return `problem` for kernels that read `ranges` alone: its groups are those of the selection."""
    return problem(call, ranges) if call.groups_per_selection == 1 else _problem(call, ranges, 0, 1)


def problem(call: Call, ranges: Tensor, indexed_block: int = 0) -> tuple[Any, ...]:
    """Return the values of `Problem` (problem.cuh), computed once per call.

    Args:
        call: the call.
        ranges: the selection's ranges, or its block indices; contiguous.
        indexed_block: keys per block if `ranges` are block indices, else 0.
    """
    if call.problem is None or call.problem[0] is not ranges:
        call.problem = ranges, _problem(call, ranges, indexed_block, call.q.shape[2])
    values: tuple[Any, ...] = call.problem[1]
    return values


def named_blocks(call: Call, most: int) -> tuple[tuple[Tensor, int], int | None]:
    """Return what a kernel with `NamedBlocks` (named_blocks.cuh) reads, for `problem`, and NAMED_WORDS.

    A row of more than 32 blocks, which may be duplicates, needs a bit for each block of a sequence, rounded up to a
    power of two, so that growing sequences share kernels. Without a block size, of many rows, and where more than
    `most` words are needed, these are disjoint ranges; NAMED_WORDS is then None.
    """
    size, n = call.selection.block_size, call.selection.n
    if size is None or not call.may_repeat():
        return call.listed(), None
    words = 0 if n <= 32 else max(64, 1 << (call.S_kv // (32 * size)).bit_length())
    return (call.listed(), words) if words <= most else ((call.disjoint_ranges(), 0), None)


def _problem(call: Call, ranges: Tensor, indexed_block: int, G: int) -> tuple[Any, ...]:
    q, q_pos, table = call.q, call.q_pos, call.block_table
    _, S, _, h, _ = q.shape
    positions: tuple[int, ...] = (0, 0, 0)
    pos_bytes = 0
    if call.lengths is not None:
        positions, pos_bytes = (call.lengths.data_ptr(), call.lengths.stride(0), 0), call.lengths.element_size()
    elif q_pos is not None:
        positions, pos_bytes = (q_pos.data_ptr(), *q_pos.stride()), q_pos.element_size()
    return (
        *strided(q), *strided(call.k), *strided(call.v), *positions, ranges.data_ptr(), pos_bytes, ranges.element_size(), indexed_block,
        S, call.S_kv, G, h, call.selection.n, *((0, 0) if table is None else (table.data_ptr(), table.stride(0))),
        0, 0, call.scale, call.scale_log2(),
    )  # fmt: skip


def aligned(*tensors: Tensor) -> bool:
    """Return whether all rows begin at multiples of 16 bytes, so that they can be copied 16 bytes at a time."""
    addresses = steps = 0  # bitwise OR: all are multiples of a power of two if the OR is
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
