"""GPUs and packages that a test needs, CUDA graphs and their stand-in on a CPU, and the kernels that a test launches."""

from __future__ import annotations

import contextlib
import fcntl
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel.core import registry

SM = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1] if torch.cuda.is_available() else 0
HOPPER = SM == 90
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of SM 9.0")


def needs(backend: str) -> pytest.MarkDecorator:
    """Skips a test where this machine lacks something for a backend, for the registry's reasons."""
    lacking = "; ".join(map(str, registry.missing(backend)))
    return pytest.mark.skipif(bool(lacking), reason=lacking)


Step = Callable[[], tuple[Tensor, ...]]
RERUNS = 50  # on a GPU, where a test asks for reruns


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, it is an error where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Inside, other processes that run tests wait: together they would not find the memory."""
    with (Path(tempfile.gettempdir()) / "nsa_sel-large-tests").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            torch.cuda.empty_cache()


def captured(step: Step, device: str = "cuda") -> tuple[Any, tuple[Tensor, ...]]:
    """The graph of one step, and the tensors that its replays write. A capture raises where the host would wait for the device.

    On a CPU a replay runs the step anew and writes into the outputs of the first run.
    """
    if device == "cpu":
        outputs = step()
        rerun = lambda: [x.detach().copy_(new) for x, new in zip(outputs, step(), strict=True)]  # noqa: E731
        return types.SimpleNamespace(replay=rerun), outputs
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # kernels are compiled and libraries are loaded before a capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph, outputs


def replayed(graph: Any, outputs: tuple[Tensor, ...], reruns: int = 1) -> list[Tensor]:
    """Return what a replay writes, NaN or -1 elsewhere. On a GPU assert that `reruns` replays are bit-equal."""
    found = []
    for _ in range(reruns if outputs[0].is_cuda else 1):
        for output in outputs:
            output.detach().fill_(float("nan") if output.is_floating_point() else -1)
        graph.replay()
        found.append([output.detach().clone() for output in outputs])
    torch.testing.assert_close(found, [found[0]] * len(found), rtol=0, atol=0, equal_nan=True)
    return found[0]


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of the CUDA kernels that are started from here on."""
    from nsa_sel.backends.cupy_cuda import launch  # imports Triton

    files, start = list[str](), launch.start
    monkeypatch.setattr(launch, "start", lambda source, *rest, **own: (files.append(source), start(source, *rest, **own)))
    return files


def forget_launches() -> None:
    """Clear the backends' caches of Triton launches."""
    for name, module in list(sys.modules.items()):
        if name.startswith("nsa_sel.backends."):
            for remembering in [value for value in vars(module).values() if hasattr(value, "cache_clear")]:
                remembering.cache_clear()
