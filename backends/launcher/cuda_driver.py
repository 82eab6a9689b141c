"""Call the CUDA driver through ctypes, for Triton and CUDA C++ kernels: launches with packed arguments, and TMA tensor
maps.

Each thread packs kernel arguments into its own buffer. The driver copies them before a launch returns.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable
from typing import Any

import torch

MOST_BYTES = 4096  # largest kernel argument buffer
MAP_BYTES, MAP_ALIGNMENT = 128, 64  # size and alignment of a CUtensorMap
_GRID = struct.Struct("<7I4x")  # first part of CUlaunchConfig (cuda.h): grid, block, shared memory
_CONFIG = struct.Struct(f"<{_GRID.size}sQQI4x")  # whole CUlaunchConfig: that part, stream, attributes and their count
# CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION. The driver only reads it.
_EARLY = ctypes.create_string_buffer(struct.pack("<I4xI60x", 6, 1), 72)
_DRIVER_OF_EARLY_GRAPHS = 12040  # first driver whose CUDA graphs support programmatic dependent launch
_MOST_READY = 4096  # largest number of (recording, stream) entries per thread
Steps = tuple[tuple[Any, ...], ...]


class _Thread(threading.local):
    """Per-thread launch buffers, and the devices whose context the thread has bound."""

    def __init__(self) -> None:
        self.config = ctypes.create_string_buffer(_CONFIG.size)
        self.arguments = ctypes.create_string_buffer(MOST_BYTES)
        self.bound = {-1}  # -1: a CPU, which needs no context
        self.recording: Any = None  # the recorder of the running pass (_replay.py)
        self.ready: dict[tuple[int, int], Steps] = {}  # prepared launches per (recording, stream)


thread = _Thread()
hooked: Callable[[], bool] = lambda: False  # True while a profiler hooks launches (_triton/kernel.py)  # noqa: E731


class Pointers(threading.local):
    """The kernelParams array of a launch: pointers to the packed arguments, at `offsets` in the thread's buffer."""

    def __init__(self, offsets: tuple[int, ...]) -> None:
        begin = ctypes.addressof(thread.arguments)
        self.list = (ctypes.c_void_p * len(offsets))(*(begin + offset for offset in offsets))
        self.address = ctypes.addressof(self.list)


@functools.cache  # loading the library takes longer than calling it
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _launch() -> Any:
    launch = _library().cuLaunchKernelEx
    launch.argtypes = (ctypes.c_void_p,) * 4
    return launch


@functools.cache
def _fill() -> Any:
    fill = _library().cuMemsetD8Async
    fill.argtypes = (ctypes.c_void_p, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)
    return fill


@functools.cache
def starts_early(device: int) -> bool:
    """Return whether GPU and driver support programmatic dependent launch, also in CUDA graphs."""
    version = ctypes.c_int()
    known = torch.cuda.get_device_capability(device) >= (9, 0) and not _library().cuDriverGetVersion(ctypes.byref(version))
    return known and version.value >= _DRIVER_OF_EARLY_GRAPHS


def stream_of(device: int) -> int:
    """Return the handle of PyTorch's current stream on the device."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


def clear(address: int, size: int, stream: int) -> int:
    """Zero `size` bytes on the stream; return the driver's status."""
    status: int = _fill()(address, 0, size, stream)
    return status


def grid(ctas: int, threads: int, shared: int) -> bytes:
    """Pack grid, block and shared memory size as `ready` expects them."""
    return _GRID.pack(ctas, 1, 1, threads, 1, 1, shared)


def start(
    function: int, ctas: int, threads: int, shared: int, stream: int, pointers: Pointers, *, early: bool = False
) -> int:  # fmt: skip
    """Launch `function` with the arguments in `thread.arguments`; return the driver's status (0: success).

    early: programmatic dependent launch; the kernel may start before the previous kernel of the stream ends.
    """
    at = thread
    at.config.raw = _packed_config(grid(ctas, threads, shared), stream, early)
    status: int = _launch()(ctypes.addressof(at.config), function, pointers.address, None)
    return status


def _packed_config(grid_of: bytes, stream: int, early: bool) -> bytes:
    return _CONFIG.pack(grid_of, stream, ctypes.addressof(_EARLY) if early else 0, early)


def ready(number: int, device: int, steps: Steps, stream: int) -> Steps:
    """Return launches prepared for `start_all` on this thread and stream, from a cache if they were prepared before.

    Args:
        number: a unique id of `steps`.
        device, stream: the target of the launches.
        steps: per kernel the function, its `grid`, `early` and `pointers` as in `start`, the struct that packs its
            arguments, and a function that takes their values from a table.
    """
    at = thread
    prepared = at.ready.get((number, stream))
    if prepared is None:
        if device not in at.bound:
            bind_context(device)
        if len(at.ready) >= _MOST_READY:
            at.ready.clear()
        prepared = at.ready[number, stream] = tuple([_ready(at.arguments, stream, *step) for step in steps])
    return prepared


def _ready(
    packed: Any, stream: int, function: int, grid_of: bytes, early: bool, pointers: Pointers, arguments: struct.Struct, values: Any
) -> tuple[Any, ...]:
    config = ctypes.create_string_buffer(_packed_config(grid_of, stream, early))  # returned, so that it outlives its address
    return arguments.pack_into, packed, values, ctypes.addressof(config), function, pointers.address, config


def start_all(steps: Steps, table: list[Any]) -> int:
    """Launch kernels in order; return the status of the first launch that fails, or 0.

    Args:
        steps: what `ready` returned on this thread.
        table: argument values that the steps pick from.
    """
    launch = _launch()
    for pack, packed, values, config, function, pointers, _ in steps:
        pack(packed, 0, *values(table))
        status: int = launch(config, function, pointers, None)
        if status:
            return status
    return 0


def bind_context(device: int) -> None:
    """Bind the device's primary context (the one PyTorch uses) to this thread if it has none.

    Launches and tensor maps need a bound context but do not bind one. Autograd runs backward passes on its own threads,
    where nothing has bound a context yet if the first kernel was compiled on another thread.
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
    """Return offset and size of every parameter of a compiled kernel, or None with drivers older than CUDA 12.4."""
    ask = getattr(_library(), "cuFuncGetParamInfo", None)
    if ask is None:
        return None
    offset, size, result = ctypes.c_size_t(), ctypes.c_size_t(), list[tuple[int, int]]()
    while not ask(ctypes.c_void_p(function), ctypes.c_size_t(len(result)), ctypes.byref(offset), ctypes.byref(size)):
        result.append((offset.value, size.value))
    return result


def encode() -> Any:
    return _library().cuTensorMapEncodeTiled


def encoded_map(
    encode: Callable[..., int], kind: int, address: int, sizes: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...],
    swizzle: int, promotion: int,
) -> tuple[int, bytes]:  # fmt: skip
    """Encode a tensor map; return the driver's status and the map's bytes.

    Args:
        encode: cuTensorMapEncodeTiled.
        kind, swizzle, promotion: values of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion (cuda.h).
        address: base address of the tensor.
        sizes, box: sizes of the tensor and of a tile, outermost dimension first.
        steps: strides in bytes, outermost first, without the last dimension's.
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
