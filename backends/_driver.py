"""What Triton's kernels and those of CUDA C++ ask of the CUDA driver, through ctypes: launches with packed arguments, and tensor maps.

A thread packs a kernel's arguments into a buffer of its own; the driver copies them before a launch returns.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable
from typing import Any

import torch

MOST_BYTES = 4096  # of a kernel's arguments
MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of a CUtensorMap
_GRID = struct.Struct("<7I4x")  # the first part of CUlaunchConfig (cuda.h): grid, block, shared memory
_CONFIG = struct.Struct(f"<{_GRID.size}sQQI4x")  # the whole: that part, stream, attributes and their number
# CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION. The driver only reads it.
_EARLY = ctypes.create_string_buffer(struct.pack("<I4xI60x", 6, 1), 72)
_MOST_READY = 4096  # recordings and streams
Steps = tuple[tuple[Any, ...], ...]


class _Thread(threading.local):
    """Where a thread packs a launch, as the driver takes it, and the devices whose context it has bound."""

    def __init__(self) -> None:
        self.config = ctypes.create_string_buffer(_CONFIG.size)
        self.arguments = ctypes.create_string_buffer(MOST_BYTES)
        self.bound = {-1}  # a CPU has no context
        self.recording: Any = None  # of the pass that runs (_replay.py)
        self.ready: dict[tuple[int, int], Steps] = {}  # of recordings and streams


thread = _Thread()
hooked: Callable[[], bool] = lambda: False  # whether somebody wants launches to go another way (_triton/kernel.py)  # noqa: E731


class Pointers(threading.local):
    """The address of the driver's list of a kernel's arguments: pointers to where they are packed, at `offsets` of the thread's buffer."""

    def __init__(self, offsets: tuple[int, ...]) -> None:
        begin = ctypes.addressof(thread.arguments)
        self.list = (ctypes.c_void_p * len(offsets))(*(begin + offset for offset in offsets))
        self.address = ctypes.addressof(self.list)


@functools.cache  # finding the library takes longer than its calls
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _launch() -> Any:
    found = _library().cuLaunchKernelEx
    found.argtypes = (ctypes.c_void_p,) * 4
    return found


@functools.cache
def _fill() -> Any:
    found = _library().cuMemsetD8Async
    found.argtypes = (ctypes.c_void_p, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)
    return found


def stream_of(device: int) -> int:
    """PyTorch's current stream."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


def clear(address: int, size: int, stream: int) -> int:
    """Zero `size` bytes; the driver's status."""
    status: int = _fill()(address, 0, size, stream)
    return status


def grid(ctas: int, threads: int, shared: int) -> bytes:
    """How `ready` takes them."""
    return _GRID.pack(ctas, 1, 1, threads, 1, 1, shared)


def start(
    function: int, ctas: int, threads: int, shared: int, stream: int, pointers: Pointers, *, early: bool = False
) -> int:  # fmt: skip
    """Start `function` with the arguments in `thread.arguments`; the driver's status, 0 if it takes the launch.

    early: it may start before the kernel ahead of it in the stream has ended.
    """
    at = thread
    at.config.raw = _packed_config(grid(ctas, threads, shared), stream, early)
    status: int = _launch()(ctypes.addressof(at.config), function, pointers.address, None)
    return status


def _packed_config(grid_of: bytes, stream: int, early: bool) -> bytes:
    return _CONFIG.pack(grid_of, stream, ctypes.addressof(_EARLY) if early else 0, early)


def ready(number: int, device: int, steps: Steps, stream: int) -> Steps:
    """How this thread starts kernels in a stream of a device with `start_all`.

    Args:
        number: of the steps, no other's.
        device, stream: where.
        steps: of each kernel the function, its `grid`, early and pointers as of `start`, how its arguments are packed, and a function that
            takes them from the table.
    """
    at = thread
    found = at.ready.get((number, stream))
    if found is None:
        if device not in at.bound:
            bind_context(device)
        if len(at.ready) >= _MOST_READY:
            at.ready.clear()
        found = at.ready[number, stream] = tuple([_ready(at.arguments, stream, *step) for step in steps])
    return found


def _ready(
    packed: Any, stream: int, function: int, grid_of: bytes, early: bool, pointers: Pointers, arguments: struct.Struct, values: Any
) -> tuple[Any, ...]:
    config = ctypes.create_string_buffer(_packed_config(grid_of, stream, early))  # kept beside its address
    return arguments.pack_into, packed, values, ctypes.addressof(config), function, pointers.address, config


def start_all(steps: Steps, table: list[Any]) -> int:
    """Start kernels one after another; the status of the first launch that the driver refuses, 0 if it takes all.

    Args:
        steps: which `ready` returned to this thread.
        table: values that kernels take.
    """
    launch = _launch()
    for pack, packed, values, config, function, pointers, _ in steps:
        pack(packed, 0, *values(table))
        status: int = launch(config, function, pointers, None)
        if status:
            return status
    return 0


def bind_context(device: int) -> None:
    """Bind the context of a device to this thread, once, if it has none: launches and tensor maps need it and do not bind it.

    Autograd runs backward passes, and what they recompute, on threads of its own; where the first kernel of such a thread was compiled
    elsewhere, nothing else has bound the context yet. It is the device's primary one, which PyTorch uses.
    """
    driver, number, context = _library(), ctypes.c_int(), ctypes.c_void_p()
    status = driver.cuCtxGetCurrent(ctypes.byref(context))
    if not status and not context:
        status = (
            driver.cuDeviceGet(ctypes.byref(number), device)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
            or driver.cuCtxSetCurrent(context)
        )
    if status:
        raise RuntimeError(f"the CUDA driver binds no context of device {device}: error {status}")
    thread.bound.add(device)


def parameters(function: int) -> list[tuple[int, int]] | None:
    """Offset and size of every parameter of a kernel, as it was compiled; None from a driver before CUDA 12.4."""
    ask = getattr(_library(), "cuFuncGetParamInfo", None)
    if ask is None:
        return None
    offset, size, found = ctypes.c_size_t(), ctypes.c_size_t(), list[tuple[int, int]]()
    while not ask(ctypes.c_void_p(function), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)):
        found.append((offset.value, size.value))
    return found


def encode() -> Any:
    return _library().cuTensorMapEncodeTiled


def encoded_map(
    encode: Callable[..., int], kind: int, address: int, sizes: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...],
    swizzle: int, promotion: int,
) -> tuple[int, bytes]:  # fmt: skip
    """The driver's status and the bytes of a tensor map.

    Args:
        encode: the driver's function.
        kind, swizzle, promotion: of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion (cuda.h).
        sizes, box: of the tensor and of a tile, outermost dimension first.
        steps: strides in bytes, outermost first, without that of the last dimension.
    """
    rank = len(sizes)
    memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    begin = -ctypes.addressof(memory) % MAP_ALIGNMENT
    status = encode(
        ctypes.c_void_p(ctypes.addressof(memory) + begin), kind, ctypes.c_uint32(rank), ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes[::-1]), (ctypes.c_uint64 * (rank - 1))(*steps[::-1]), (ctypes.c_uint32 * rank)(*box[::-1]),
        (ctypes.c_uint32 * rank)(*[1] * rank), 0, swizzle, promotion, 0,
    )  # fmt: skip
    return status, memory.raw[begin : begin + MAP_BYTES]
