"""How a measurement is taken and written: medians of CUDA events, one JSON object a line, with everything needed to repeat it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nsa_sel.bench.cases import Case

ROOT = Path(__file__).resolve().parents[1]
GRAPH_CALLS = 20  # calls captured into one graph: its own launch is shared by all of them
LEAST_CALLS = 3  # timed of anything
FLUSH_BYTES = 256 << 20  # several times any L2 cache


def environment(device: str = "cuda") -> dict[str, Any]:
    """Device, driver, versions, commit (NSA_SEL_COMMIT where git is not at hand) and the command, free of machine paths."""

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    def output(*command: str) -> str | None:
        try:
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() or None
        except (OSError, subprocess.CalledProcessError):
            return None

    arguments = " ".join(shlex.quote(Path(a).name if Path(a).is_absolute() else a) for a in sys.argv[1:])
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if device == "cuda" else None,
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": os.environ.get("NSA_SEL_COMMIT") or output("git", "rev-parse", "--short", "HEAD"),
        "command": f"python -m nsa_sel.bench.{Path(sys.argv[0]).stem} {arguments}".strip(),
    }


def processor() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def row(case: Case, direction: str, backend: str, times: tuple[float, float, float], **more: Any) -> dict[str, Any]:
    """One measurement: the case, the direction (fwd, bwd, fwd+bwd, decode), median and 20th and 80th percentile in ms, and the rest."""
    median, p20, p80 = (round(time, 5) for time in times)
    return {**case._asdict(), "direction": direction, "backend": backend, "ms_median": median, "ms_p20": p20, "ms_p80": p80, **more}


def append(file: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to a JSON-lines file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        opened.writelines(json.dumps(entry) + "\n" for entry in rows)


def milliseconds(work: Callable[[], Any], rep: float = 50) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile of the time on the GPU; the L2 cache is flushed before each call.

    Calls that fill `rep` ms are timed, after half as many to warm up; of a slow `work` just `LEAST_CALLS`. `work` must have run
    before: a first call compiles. (Triton's do_bench times one call of what takes longer than `rep`, after seven others.)
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def timed(calls: int) -> list[float]:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]  # type: ignore[no-untyped-call]
        for start, end in marks:
            flush.zero_()
            start.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in marks]

    times = timed(LEAST_CALLS)
    calls = int(rep / min(times))
    if calls > LEAST_CALLS:
        timed(calls // 2)
        times = timed(calls)
    median, low, high = np.quantile(times, (0.5, 0.2, 0.8)).tolist()
    return median, low, high


def replayed_milliseconds(work: Callable[[], Any], rep: float = 50) -> tuple[float, float, float]:
    """Time of one call by graph replay: `GRAPH_CALLS` calls captured, the replay's time divided."""
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
    median, low, high = milliseconds(graph.replay, rep)
    return median / GRAPH_CALLS, low / GRAPH_CALLS, high / GRAPH_CALLS


def workspace_bytes(work: Callable[[], Any]) -> int:
    """Device memory that a call takes at its peak beyond what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak - kept
