"""Time a call by CUDA events with the L2 cache flushed, by graph replay, or by the clock, and return the spread of its
times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

GRAPH_CALLS = 20  # calls captured into one graph, which share its launch
LEAST_CALLS = 3
SLOW_CALL = 20.0  # ms; of what takes longer, LEAST_CALLS calls are timed without a warm-up
MOST_SECONDS = 10.0  # of timed calls, however many were asked for
FLUSH_BYTES = 256 << 20  # several times any L2 cache
SETTLE = 0.02  # seconds before each call on a CPU: threads of the previous call may still spin
SETTLE_GPU = 0.2  # seconds; for less than that after gigabytes were allocated, kernels that load much are slower on an H200

Work = Callable[[], Any]


class Spread(NamedTuple):
    """Times of calls in ms: median, 20th and 80th percentile, 95% confidence interval of the median, and the number of
    calls.
    """

    median: float
    p20: float
    p80: float
    ci_low: float
    ci_high: float
    calls: int

    def over(self, count: int) -> Spread:
        """Return the spread of one of `count` equal parts of each time."""
        median, p20, p80, low, high = (number / count for number in self[:5])
        return Spread(median, p20, p80, low, high, self.calls)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a row."""
        names = ("ms_median", "ms_p20", "ms_p80", "ms_ci_low", "ms_ci_high")
        return {**{name: round(number, 5) for name, number in zip(names, self[:5], strict=True)}, "calls": self.calls}


class Timing(NamedTuple):
    """Hold how long to time: calls for `rep` ms, after half as many for warm-up, or `calls` calls."""

    rep: float = 50
    calls: int | None = None
    warmup: int = 5  # calls, if `calls` is given
    streams: int = 1  # CUDA streams that each run the call at once; the time of all of them is divided by their number


def spread(times: Sequence[float]) -> Spread:
    """Return the spread of measured times. The confidence interval lies between order statistics, for any distribution."""
    found, count = np.sort(np.asarray(times, dtype=np.float64)), len(times)
    p20, median, p80 = np.quantile(found, (0.2, 0.5, 0.8)).tolist()
    half = 1.96 * math.sqrt(count) / 2
    low, high = max(0, round(count / 2 - half) - 1), min(count - 1, round(count / 2 + half))
    return Spread(median, p20, p80, float(found[low]), float(found[high]), count)


def milliseconds(work: Work, timing: Timing, device: str = "cuda") -> Spread:
    """Time `work` on a GPU, whose L2 cache is flushed before each call, or on the CPU.

    `work` must have run before: a first call compiles. Of a slow `work` only `LEAST_CALLS` are timed, or as many as
    `MOST_SECONDS` allow if a number of calls is asked for. (Triton's do_bench times one call of what takes longer than
    its `rep`.)
    """
    if timing.streams > 1:
        work = _on_streams(work, timing.streams)
    times = call_times(work, LEAST_CALLS, device)
    each = max(min(times), 1e-3)
    calls, warmup = max(LEAST_CALLS, int(timing.rep / each)), max(LEAST_CALLS, int(timing.rep / each) // 2)
    if timing.calls is not None:
        calls, warmup = min(timing.calls, int(MOST_SECONDS * 1e3 / each)), timing.warmup
    if calls > LEAST_CALLS or (device == "cuda" and each < SLOW_CALL):
        if device == "cuda":
            time.sleep(SETTLE_GPU)  # now that everything is allocated
        call_times(work, warmup, device)
        times = call_times(work, calls, device)
    return spread(times).over(timing.streams)


def replayed_milliseconds(work: Work, timing: Timing) -> Spread:
    """Time one call on a GPU by graph replay: `GRAPH_CALLS` calls captured, the replay's time divided."""
    return milliseconds(captured(work, GRAPH_CALLS)[0].replay, timing).over(GRAPH_CALLS)


def captured(work: Work, calls: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a CUDA graph that holds `calls` calls, and the result of the last one, which each replay writes again."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        for _ in range(calls):
            result = work()
    return graph, result


def call_times(work: Work, calls: int, device: str = "cuda") -> list[float]:
    """Return the milliseconds of each of `calls` calls."""
    times = []
    if device != "cuda":
        for _ in range(calls):
            time.sleep(SETTLE)
            started = time.perf_counter()
            work()
            times.append((time.perf_counter() - started) * 1e3)
        return times
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]  # type: ignore[no-untyped-call]
    for start, end in marks:
        flush.zero_()
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]


def copy_bandwidth() -> float:
    """Return the TB/s that a copy of 1 GiB reads and writes on the GPU."""
    x, y = torch.empty(2, 1 << 30, dtype=torch.uint8, device="cuda")
    return float(2 * x.numel() / milliseconds(lambda: y.copy_(x), Timing(20)).median / 1e9)


def workspace_bytes(work: Work, device: str = "cuda") -> int | None:
    """Return the peak device memory of a call beyond what it returns; None on a CPU, where the call is just made."""
    if device != "cuda":
        work()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()  # beyond what `result` keeps
    del result
    return extra


def _on_streams(work: Work, count: int) -> Work:
    """Return a function that runs `work` on each of `count` CUDA streams at once; the current stream waits for all."""
    streams = [torch.cuda.Stream() for _ in range(count)]  # type: ignore[no-untyped-call]

    def all_of_them() -> None:
        current = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                work()
        for stream in streams:
            current.wait_stream(stream)

    return all_of_them


class WrongResult(RuntimeError):
    """A call's results are wrong, whatever the mean error."""
