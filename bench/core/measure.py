"""How a measurement is taken: calls timed by CUDA events or the clock, their spread, and everything needed to repeat it."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nsa_sel.bench.core.cases import Case
from nsa_sel.settings.flags import COMMIT_FLAG

ROOT = Path(__file__).resolve().parents[2]
GRAPH_CALLS = 20  # calls captured into one graph: its own launch is shared by all of them
LEAST_CALLS = 3  # timed of anything
MOST_SECONDS = 10.0  # of timed calls, however many were asked for
FLUSH_BYTES = 256 << 20  # several times any L2 cache
SETTLE = 0.02  # seconds before each call on a CPU: threads of the one before may still wait busily for work
RESAMPLES = 1000  # of the bootstrap
SAMPLED_AT_ONCE = 1 << 20  # times that it draws at once, which bounds its memory
STATE_SECONDS = 10.0  # that a reading of clocks and temperature serves: nvidia-smi takes up to a second


class Spread(NamedTuple):
    """Times of calls in ms: median, 20th and 80th percentile, the 95% confidence interval of the median, and of how many calls."""

    median: float
    p20: float
    p80: float
    ci_low: float
    ci_high: float
    calls: int


class Timing(NamedTuple):
    """How long something is timed: calls that fill `rep` ms, after half as many to warm up, or a number of calls."""

    rep: float = 50
    calls: int | None = None
    warmup: int = 5  # calls, where `calls` is given
    streams: int = 1  # CUDA streams that each run the call at once; the time of all of them is divided by their number


def environment(device: str = "cuda") -> dict[str, Any]:
    """Device, driver, versions, commit (NSA_SEL_COMMIT where git is not at hand) and the command, free of machine paths.

    Changes that are not committed, but for those of rows, are named by a hash behind the commit.
    """
    on_gpu = device == "cuda"
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else _processor(),
        "driver": _output("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "torch": torch.__version__,
        "triton": _version("triton") if on_gpu else None,
    }
    if not on_gpu:
        facts |= {"numba": _version("numba"), "threads": torch.get_num_threads()}
    return {**facts, "commit": os.environ.get(COMMIT_FLAG) or _commit(), "command": command()}


def row(case: Case, direction: str, backend: str, times: Spread, **more: Any) -> dict[str, Any]:
    """One measurement: the case, the direction (fwd, bwd, fwd+bwd, decode), the spread in ms, and the rest."""
    median, p20, p80, low, high = (round(number, 5) for number in times[:5])
    found = {"ms_median": median, "ms_p20": p20, "ms_p80": p80, "ms_ci_low": low, "ms_ci_high": high, "calls": times.calls}
    return {**case._asdict(), "direction": direction, "backend": backend, **found, **more}


def spread(times: Sequence[float], seed: int = 0) -> Spread:
    """The spread of measured times; its confidence interval by bootstrap: medians of samples drawn from them with replacement."""
    found = np.asarray(times, dtype=np.float64)
    generator = np.random.default_rng(seed)
    at_once = max(1, SAMPLED_AT_ONCE // len(found))
    sizes = [(min(at_once, RESAMPLES - done), len(found)) for done in range(0, RESAMPLES, at_once)]
    medians = np.concatenate([np.median(found[generator.integers(0, len(found), size)], axis=1) for size in sizes])
    p20, median, p80 = np.quantile(found, (0.2, 0.5, 0.8)).tolist()
    low, high = np.quantile(medians, (0.025, 0.975)).tolist()
    return Spread(median, p20, p80, low, high, len(found))


def milliseconds(work: Callable[[], Any], rep: float = 50, *, device: str = "cuda", timing: Timing | None = None) -> Spread:
    """How long `work` takes on a GPU, whose L2 cache is flushed before each call, or on the CPU.

    Of a slow `work` just `LEAST_CALLS` are timed, or as many as `MOST_SECONDS` allow where a number is asked for. `work` must have
    run before: a first call compiles. (Triton's do_bench times one call of what takes longer than `rep`, after seven others.)
    """
    timing = timing or Timing(rep)
    timed = _timed_on_gpu if device == "cuda" else _timed_on_cpu
    if timing.streams > 1:
        work = _on_streams(work, timing.streams)
    times = timed(work, LEAST_CALLS)
    each = max(min(times), 1e-3)
    calls, warmup = int(timing.rep / each), int(timing.rep / each) // 2
    if timing.calls is not None:
        calls, warmup = min(timing.calls, int(MOST_SECONDS * 1e3 / each)), timing.warmup
    if calls > LEAST_CALLS:
        timed(work, warmup)
        times = timed(work, calls)
    return _divided(spread(times), timing.streams)


def replayed_milliseconds(work: Callable[[], Any], rep: float = 50, *, timing: Timing | None = None) -> Spread:
    """Time of one call on a GPU by graph replay: `GRAPH_CALLS` calls captured, the replay's time divided."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            work()
    return _divided(milliseconds(graph.replay, rep, timing=timing), GRAPH_CALLS)


def cpu_milliseconds(work: Callable[[], Any]) -> float:
    """One call on the CPU, after other threads have come to rest."""
    time.sleep(SETTLE)
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def one_call(work: Callable[[], Any], device: str = "cuda") -> float:
    """Milliseconds of one call, for callers that do something between calls."""
    return (_timed_on_gpu if device == "cuda" else _timed_on_cpu)(work, 1)[0]


def workspace_bytes(work: Callable[[], Any], device: str = "cuda") -> int | None:
    """Device memory that a call takes at its peak beyond what it returns; None on a CPU, where the call is just made."""
    if device != "cuda":
        work()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak - kept


_STATE = ("sm_mhz", "memory_mhz", "temperature_c")
_last_state: tuple[float, dict[str, int | None]] = (-STATE_SECONDS, {})


def gpu_state(device: str = "cuda") -> dict[str, int | None]:
    """Clocks in MHz and temperature of the GPU as they are, at most `STATE_SECONDS` old; they are never set. None each on a CPU."""
    global _last_state
    if device != "cuda":
        return dict.fromkeys(_STATE)
    now = time.monotonic()
    if now - _last_state[0] >= STATE_SECONDS:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        which = f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else str(torch.cuda.current_device())
        query = "--query-gpu=clocks.sm,clocks.mem,temperature.gpu"
        numbers = (_output("nvidia-smi", "-i", which, query, "--format=csv,noheader,nounits") or "").split(",")
        found = [int(number) if number.strip().isdigit() else None for number in numbers]
        _last_state = now, dict(zip(_STATE, [*found, None, None, None], strict=False))
    return _last_state[1]


def _timed_on_gpu(work: Callable[[], Any], calls: int) -> list[float]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]  # type: ignore[no-untyped-call]
    for start, end in marks:
        flush.zero_()
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]


def _timed_on_cpu(work: Callable[[], Any], calls: int) -> list[float]:
    return [cpu_milliseconds(work) for _ in range(calls)]


def _on_streams(work: Callable[[], Any], count: int) -> Callable[[], None]:
    """Runs `work` on each of `count` CUDA streams at once, and has the current stream wait for all."""
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


def _divided(times: Spread, count: int) -> Spread:
    median, p20, p80, low, high = (number / count for number in times[:5])
    return Spread(median, p20, p80, low, high, times.calls)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def _commit() -> str | None:
    commit = _output("git", "rev-parse", "--short", "HEAD")
    changes = _output("git", "diff", "HEAD", "--", ".", ":!bench/results") if commit else None
    return f"{commit}+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else commit


def command() -> str:
    """The command line of this program, free of machine paths."""

    def bare(argument: str) -> str:
        option, equals, value = argument.rpartition("=")
        return f"{option}{equals}{Path(value).name if Path(value).is_absolute() else value}"

    program = Path(sys.argv[0])
    bench = Path(__file__).resolve().parents[1]
    of_bench = next(bench.rglob(program.name), None)
    module = of_bench and ".".join(of_bench.relative_to(bench).with_suffix("").parts)
    called = f"python -m nsa_sel.bench.{module}" if module else f"python {program.parent.name}/{program.name}"
    called = "nsa-sel" if program.stem in ("nsa-sel", "__main__") else called
    return " ".join((called, *(shlex.quote(bare(argument)) for argument in sys.argv[1:])))


def _processor() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
