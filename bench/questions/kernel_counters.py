"""What holds each kernel back? Hardware counters of the kernels in docs/kernels.md, by Nsight Compute: a JSON line a kernel.

    python -m nsa_sel.bench.questions.kernel_counters --out bench/results/h200/profiles/counters.jsonl

Needs a GPU whose counters may be read, and `ncu` on the path. Clocks are left alone.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from nsa_sel.bench.core import cases, environment, store
from nsa_sel.bench.core.caches import Cache, parsed
from nsa_sel.bench.core.command_line import Only, echo, need_gpu, program
from nsa_sel.bench.core.contenders import ours
from nsa_sel.bench.core.parity import make_problem
from nsa_sel.bench.core.session import work_of
from nsa_sel.bench.questions.paged_caches import Last, cached
from nsa_sel.errors import ArgumentError

QUANTIZED = Cache(None, quantized="e4m3/head")


class Profiled(NamedTuple):
    """One kernel of one call: `kernel` as docs/kernels.md names it, `function` as the compiler does; the backend as rows name it."""

    case: str
    direction: str
    backend: str
    function: str
    kernel: str


PROFILED = (
    Profiled("real-8k-h16", "fwd", "triton-tile", "forward_kernel", "tile forward"),
    Profiled("random-32k-h16", "fwd", "triton-tile", "forward_kernel", "tile forward"),
    Profiled("random-32k-h16-192", "fwd", "triton-tile", "forward_kernel", "tile forward, keys of 192"),
    Profiled("real-8k-h16", "bwd", "triton-tile", "dq_kernel", "tile dQ"),
    Profiled("real-8k-h16", "bwd", "triton-tile", "partial_dkdv_kernel", "dK and dV"),
    Profiled("real-8k-h16", "bwd", "triton-block", "partial_dkdv_kernel", "block dK, dV and shares of dQ"),
    Profiled("random-32k-h16", "bwd", "triton-block", "partial_dkdv_kernel", "block dK, dV and shares of dQ"),
    Profiled("random-32k-h4", "bwd", "triton-block", "partial_dkdv_kernel", "block dK, dV and shares of dQ"),
    Profiled("random-32k-h16", "bwd", "cuda-block", "block_gradients", "CUDA block dK, dV and shares of dQ"),
    Profiled("random-32k-h4", "bwd", "cuda-block", "block_gradients", "CUDA block dK, dV and shares of dQ"),
    Profiled("real-8k-h16", "bwd", "cuda-block", "join_shares", "CUDA block shares of dQ of shared tiles, and sum"),
    Profiled("real-8k-h16", "fwd", "cuda-block", "join_partials", "CUDA block tiles that tokens share, and join"),
    Profiled("random-32k-h16", "fwd", "cuda-block", "block_partials", "CUDA block partials of o"),
    Profiled("random-32k-h4", "fwd", "cuda-block", "block_partials", "CUDA block partials of o"),
    Profiled("random-32k-h4", "fwd", "triton-block", "partial_kernel", "block partials of o"),
    Profiled("random-32k-h4", "fwd", "triton-block", "join_kernel", "block join"),
    Profiled("real-8k-h16", "fwd", "cupy-cuda", "forward_tiles", "CUDA tile forward"),
    Profiled("real-8k-h16", "bwd", "cupy-cuda", "dq_tiles", "CUDA tile dQ"),
    Profiled("real-8k-h16", "bwd", "cupy-cuda", "dkdv_groups", "CUDA dK and dV"),
    Profiled("real-8k-h4", "bwd", "cupy-cuda", "dkdv_groups", "CUDA dK and dV"),
    Profiled("random-32k-h16", "fwd", "cupy-cuda", "forward_tiles", "CUDA tile forward"),
    Profiled("random-32k-h4", "fwd", "cupy-cuda", "forward_tiles", "CUDA tile forward"),
    Profiled("real-8k-h1", "fwd", "cupy-cuda", "forward_blocks", "CUDA forward by blocks"),
    Profiled("real-8k-h1", "bwd", "cupy-cuda", "dq_rows", "CUDA row dQ"),
    Profiled("real-8k-h1", "bwd", "cupy-cuda", "dkdv_tiles", "CUDA row dK and dV"),
    Profiled("random-32k-h16-192", "bwd", "cupy-cuda", "dkdv_groups", "CUDA dK and dV, keys of 192"),
    Profiled("decode-B1-64k-h16", "fwd", "cupy-cuda", "forward_blocks", "CUDA forward by blocks, a cluster a row"),
    Profiled("parallel-B64-32k-G1-h16-b128", "fwd", "cupy-cuda", "forward_blocks", "CUDA forward by blocks, a cluster a row"),
    Profiled("decode-B64-32k-h16", "fwd", "cupy-cuda", "forward_blocks", "CUDA forward by blocks"),
    Profiled("decode-B64-32k-h16", "fwd", f"cupy-cuda, {QUANTIZED}", "forward_blocks", "CUDA forward by blocks, e4m3"),
    Profiled("decode-B64-32k-h16", "fwd", "triton-group", "forward_blocks_kernel", "group forward"),
    Profiled("decode-B256-16k-h16", "fwd", "cupy-cuda", "forward_blocks", "CUDA forward by blocks"),
    Profiled("decode-B256-16k-h16", "fwd", "triton-group", "forward_blocks_kernel", "group forward"),
)


class Metric(NamedTuple):
    """How a counter is named in our rows, and converted: a factor by ncu's unit, then `kind`."""

    name: str
    units: dict[str, float] = {}  # noqa: RUF012 - never written
    kind: Callable[[float], float] = float


def _two_digits(number: float) -> float:
    return round(number, 2)


METRICS = {  # as Nsight Compute names them
    "Duration": Metric("duration_us", {"ns": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}, _two_digits),
    "SM Frequency": Metric("sm_ghz", {"hz": 1e-9, "ghz": 1.0, "cycle/nsecond": 1.0}, _two_digits),
    "L2 Cache Throughput": Metric("l2_pct"),
    "DRAM Throughput": Metric("dram_pct"),
    "L2 Hit Rate": Metric("l2_hit_pct"),
    "Issue Slots Busy": Metric("issue_pct"),
    "Achieved Occupancy": Metric("occupancy_pct"),
    "Registers Per Thread": Metric("registers", kind=int),
    "Dynamic Shared Memory Per Block": Metric("shared_kbyte", {"byte/block": 1e-3, "kbyte/block": 1.0}, _two_digits),
}
SECTIONS = (
    "SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "LaunchStats", "Occupancy", "SchedulerStats", "WarpStateStats",
)  # fmt: skip


def case_of(name: str) -> cases.Case:
    """The case of the performance table that has this name, prefill or decode."""
    return next(case for case in (*cases.performance_cases(), *cases.decode_cases(), *cases.parallel_cases()) if case.case == name)


def call(case_name: str, direction: str, backend: str) -> None:
    """One call of a performance case, for the profiler to look at."""
    problem = make_problem(case_of(case_name), "cuda")
    name, cache = parsed(backend)
    contender = ours(name) if cache is None else cached(name, cache, Last())
    work_of(direction, contender.prepare(problem), problem)()
    torch.cuda.synchronize()


def counters(text: str) -> dict[str, Any]:
    """The counters of METRICS, the busiest pipeline and the main stall reason of warps, from the CSV of ncu's details page."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found: dict[str, Any] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        metric = METRICS.get(row["Metric Name"])
        if metric and metric.name not in found:
            scale = metric.units[row["Metric Unit"].lower()] if metric.units else 1.0
            found[metric.name] = metric.kind(float(row["Metric Value"].replace(",", "")) * scale)
        rule = row.get("Rule Description") or ""
        if pipe := re.search(r"([\w() -]+?) is the highest-utilized pipeline \(([\d.]+)%\)", rule):
            part = re.search(r"dominated by its (.+?) sub-pipeline", rule)
            found["busiest_pipe"], found["busiest_pipe_pct"] = (part or pipe)[1].strip(), float(pipe[2])
        if stall := re.search(r"cycles being stalled (.+?)\. .*?about ([\d.]+)%", rule, re.DOTALL):
            found["stall"], found["stall_pct"] = stall[1], float(stall[2])
    return found


def profile(profiled: Profiled) -> dict[str, Any]:
    """Run one call under ncu and read the counters of its first launch of the kernel. Raises RuntimeError with what ncu said."""
    command = ["ncu", "--csv", "--page", "details", "--clock-control", "none", "-k", f"regex:^{profiled.function}$", "-c", "1"]
    command += [word for section in SECTIONS for word in ("--section", section)]
    command += [sys.executable, "-m", "nsa_sel.bench.questions.kernel_counters", "--call", *profiled[:3]]
    run = subprocess.run(command, cwd=environment.ROOT, capture_output=True, text=True, check=False)
    found = counters(run.stdout)
    if not found:
        raise RuntimeError(f"ncu told nothing of {profiled.function}: {(run.stdout + run.stderr)[-600:]}")
    return found


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file that rows are appended to")] = Path("profiles.jsonl"),
    call_only: Annotated[
        tuple[str, str, str] | None, typer.Option("--call", help="run one case, direction and backend; no profiler")
    ] = None,
    backends: Annotated[str, typer.Option(help="only kernels of these backends, comma-separated")] = "",
    only: Only = "",
) -> None:
    """Profile every kernel of PROFILED."""
    if call_only:
        call(*call_only)
        return
    need_gpu("kernel_counters")
    if shutil.which("ncu") is None:
        raise ArgumentError("kernel_counters", "without `ncu` on the path", "Nsight Compute", "install it, or add its folder to PATH")
    facts = {**environment.stamp(), "tool": "ncu --clock-control none"}
    for profiled in PROFILED:
        if (not backends or parsed(profiled.backend)[0] in backends.split(",")) and only in profiled.case:
            row = {**profiled._asdict(), **profile(profiled), **facts}
            store.append(out, [row])
            echo(f"{row['kernel']:32} {row['case']:20} {row['duration_us']} us")


if __name__ == "__main__":
    program(main)
