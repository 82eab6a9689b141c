"""Call the CUDA driver through ctypes, for Triton and CUDA C++ kernels: launches with packed arguments, and TMA tensor
maps.

Each thread packs kernel arguments into its own buffer. The driver copies them before a launch returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

MOST_BYTES = 4096  # largest kernel argument buffer
MOST_GRAPHS = 1024  # two for each layer of a large model; each takes memory
MAP_BYTES, MAP_ALIGNMENT = 128, 64  # size and alignment of a CUtensorMap
_GRID = struct.Struct("<7I4x")  # first part of CUlaunchConfig (cuda.h): grid, block, shared memory
_CONFIG = struct.Struct(f"<{_GRID.size}sQQI4x")  # whole CUlaunchConfig: that part, stream, attributes and their count
STREAM_OFFSET = _GRID.size  # where the stream is in a CUlaunchConfig
_NON_BLOCKING, _RELAXED = 1, 2  # CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_RELAXED
# CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION. The driver only reads it.
_EARLY = ctypes.create_string_buffer(struct.pack("<I4xI60x", 6, 1), 72)
_DRIVER_OF_EARLY_GRAPHS = 12040  # first driver whose CUDA graphs support programmatic dependent launch


class _Thread(threading.local):
    """Per-thread launch buffers, and the devices whose context the thread has bound."""

    def __init__(self) -> None:
        self.config = ctypes.create_string_buffer(_CONFIG.size)
        self.arguments = ctypes.create_string_buffer(MOST_BYTES)
        self.bound = {-1}  # -1: a CPU, which needs no context
        self.recording: Any = None  # the recorder of the running pass (_replay.py)
        self.ready: dict[tuple[int, int], Any] = {}  # prepared replays by (recording, stream)
        self.own_streams: dict[int, int] = {}  # `own_stream` per device


thread = _Thread()
hooked: Callable[[], bool] = lambda: False  # True while a profiler hooks launches (_triton/kernel.py)  # noqa: E731


class Pointers(threading.local):
    """The kernelParams array of a launch: pointers to the packed arguments, at `offsets` in the thread's buffer."""

    def __init__(self, offsets: tuple[int, ...]) -> None:
        self.offsets = offsets
        begin = ctypes.addressof(thread.arguments)
        self.list = (ctypes.c_void_p * len(offsets))(*(begin + offset for offset in offsets))
        self.address = ctypes.addressof(self.list)


@functools.cache  # loading the library takes longer than calling it
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _function(name: str, pointers: int) -> Any:
    """Return a function of the driver that takes so many pointers (or numbers of their size)."""
    function = getattr(_library(), name)
    function.argtypes = (ctypes.c_void_p,) * pointers
    return function


def launch_function() -> Any:
    """Return cuLaunchKernelEx(config, function, parameters, extra)."""
    return _function("cuLaunchKernelEx", 4)


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
    """Pack grid, block and shared memory size as `packed_config` takes them."""
    return _GRID.pack(ctas, 1, 1, threads, 1, 1, shared)


def start(
    function: int, ctas: int, threads: int, shared: int, stream: int, pointers: Pointers, *, early: bool = False
) -> int:  # fmt: skip
    """Launch `function` with the arguments in `thread.arguments`; return the driver's status (0: success).

    early: programmatic dependent launch; the kernel may start before the previous kernel of the stream ends.
    """
    at = thread
    at.config.raw = packed_config(grid(ctas, threads, shared), stream, early)
    status: int = launch_function()(ctypes.addressof(at.config), function, pointers.address, None)
    return status


def packed_config(grid_of: bytes, stream: int, early: bool) -> bytes:
    """Pack a CUlaunchConfig. grid_of: `grid`."""
    return _CONFIG.pack(grid_of, stream, ctypes.addressof(_EARLY) if early else 0, early)


class Graph:
    """An instantiated CUDA graph of launches, whose arguments are fixed. `start(handle, stream)` launches it, and returns
    the driver's status."""

    __slots__ = ("_destroy", "handle", "start")
    alive = 0  # in the process

    def __init__(self, handle: int) -> None:
        self.handle, self.start, self._destroy = handle, _function("cuGraphLaunch", 2), _function("cuGraphExecDestroy", 1)
        Graph.alive += 1

    def __del__(self) -> None:  # the driver waits for launches that still run
        self._destroy(self.handle)
        Graph.alive -= 1


def own_stream(device: int) -> int:
    """Return a stream that only this thread uses, or 0 if the driver makes none. PyTorch hands out 32 streams in turn, so
    one of them may be the stream that is being captured."""
    if device not in thread.own_streams:
        if device not in thread.bound:
            bind_context(device)
        stream = ctypes.c_void_p()
        if _function("cuStreamCreate", 2)(ctypes.addressof(stream), _NON_BLOCKING):
            return 0
        thread.own_streams[device] = stream.value or 0
    return thread.own_streams[device]


def captured(device: int, start: Callable[[int], int]) -> Graph | None:
    """Return the launches of `start(stream)`, which returns the driver's status, as a graph; None if the driver refuses,
    or if MOST_GRAPHS are alive.

    The capture runs on a stream of this thread, and minds no capture of another thread.
    """
    graph, made = ctypes.c_void_p(), ctypes.c_void_p()
    if Graph.alive >= MOST_GRAPHS:
        return None
    with relaxed():
        on = own_stream(device)
        if not on or _function("cuStreamBeginCapture_v2", 2)(on, _RELAXED):
            return None
        status = start(on)
        status = _function("cuStreamEndCapture", 2)(on, ctypes.addressof(graph)) or status
        status = status or _function("cuGraphInstantiateWithFlags", 3)(ctypes.addressof(made), graph, 0)
        if graph:
            _function("cuGraphDestroy", 1)(graph)
    return None if status or not made.value else Graph(made.value)


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Let this thread do what captures on other streams prohibit, such as waiting for a stream."""
    mode, exchange = ctypes.c_int(_RELAXED), _function("cuThreadExchangeStreamCaptureMode", 1)
    exchange(ctypes.addressof(mode))
    try:
        yield
    finally:
        exchange(ctypes.addressof(mode))


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
