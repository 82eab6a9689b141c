"""CUDA graphs of one step and their replays, a stand-in for them on a CPU, and a check that the host never waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], tuple[Tensor, ...]]


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, it is an error where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Rerun:
    """A stand-in for a graph on a CPU: a replay runs the step anew and writes into the outputs of the capture."""

    def __init__(self, step: Step, outputs: tuple[Tensor, ...]) -> None:
        self.step, self.outputs = step, outputs

    def replay(self) -> None:
        for output, new in zip(self.outputs, self.step(), strict=True):
            output.detach().copy_(new)


def captured(step: Step, device: str = "cuda") -> tuple[Any, tuple[Tensor, ...]]:
    """The graph of one step, and the tensors that its replays write. A capture raises where the host would wait for the device."""
    if device == "cpu":
        outputs = step()
        return Rerun(step, outputs), outputs
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # kernels are compiled and libraries are loaded before a capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph, outputs


def replayed(graph: Any, outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """What one replay writes, NaN or -1 where it writes nothing."""
    for output in outputs:
        output.detach().fill_(float("nan") if output.is_floating_point() else -1)
    graph.replay()
    return [output.detach().clone() for output in outputs]
