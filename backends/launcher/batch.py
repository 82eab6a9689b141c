"""Start the launches of a recording with little host time: packed arguments, and one CUDA graph for all of them.

The driver takes 2 to 5 us of host time for a launch, and as long for a whole graph.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

from nsa_sel.backends.launcher import cuda_driver

GRAPH_AFTER = 4  # starts with the same arguments after which a graph is made, which takes 0.1 ms


class Step(NamedTuple):
    """One recorded launch."""

    function: int
    grid: bytes  # `cuda_driver.grid`
    early: bool  # programmatic dependent launch
    offsets: tuple[int, ...]  # where each kernel parameter begins in the packed arguments of all launches


class Batch:
    """The launches of a recording, for one thread and stream."""

    __slots__ = ("_cleared", "_configs", "_device", "_graph", "_launches", "_packed", "_pointers", "_starts", "_stream", "_struct")

    def __init__(self, device: int, stream: int, steps: tuple[Step, ...], arguments: struct.Struct) -> None:
        """arguments: packs the arguments of all launches."""
        if device not in cuda_driver.thread.bound:
            cuda_driver.bind_context(device)
        self._device, self._stream, self._struct = device, stream, arguments
        self._packed = ctypes.create_string_buffer(arguments.size)
        begin = ctypes.addressof(self._packed)
        self._configs = [ctypes.create_string_buffer(cuda_driver.packed_config(step.grid, stream, step.early)) for step in steps]
        self._pointers = [(ctypes.c_void_p * len(step.offsets))(*(begin + offset for offset in step.offsets)) for step in steps]
        addresses = [map(ctypes.addressof, x) for x in (self._configs, self._pointers)]
        self._launches = [*zip(addresses[0], (step.function for step in steps), addresses[1], strict=True)]

    def pack(self, values: tuple[Any, ...], cleared: list[tuple[int, int]]) -> None:
        """Set the arguments of all launches, and addresses and sizes of the memory that is zeroed before them."""
        self._struct.pack_into(self._packed, 0, *values)
        self._cleared, self._starts = cleared, 0
        self._graph: cuda_driver.Graph | None = None

    def start(self) -> int:
        """Start the launches in order; return the driver's status of the first one that fails, or 0."""
        graph = self._graph
        if graph is not None:
            status: int = graph.start(graph.handle, self._stream)
            return status
        self._starts += 1
        if self._starts == GRAPH_AFTER and self._device >= 0 and len(self._launches) > 1:
            self._graph = cuda_driver.captured(self._device, self._start_on)
        return self._start_each(self._stream)

    def _start_each(self, stream: int) -> int:
        launch, status = cuda_driver.launch_function(), 0
        for address, size in self._cleared:
            status = cuda_driver.clear(address, size, stream)
            if status:
                return status
        for config, function, pointers in self._launches:
            status = launch(config, function, pointers, None)
            if status:
                break
        return status

    def _start_on(self, stream: int) -> int:
        """Start the launches on another stream."""
        for config in self._configs:
            struct.pack_into("<Q", config, cuda_driver.STREAM_OFFSET, stream)
        try:
            return self._start_each(stream)
        finally:
            for config in self._configs:
                struct.pack_into("<Q", config, cuda_driver.STREAM_OFFSET, self._stream)
