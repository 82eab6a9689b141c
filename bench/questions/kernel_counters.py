"""Hardware counters of the kernels that docs/kernels.md explains, by Nsight Compute: a JSON line a kernel.

    python -m nsa_sel.bench.questions.kernel_counters --out bench/results/h200/profiles.jsonl

Needs a GPU whose counters may be read, and `ncu` on the path. Clocks are left alone.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

import nsa_sel
from nsa_sel.bench.core import cases, environment, store
from nsa_sel.selection import Selection


class Profiled(NamedTuple):
    """One kernel of one call: `kernel` as docs/kernels.md names it, `function` as the compiler does."""

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
    Profiled("random-32k-h16-192", "bwd", "cupy-cuda", "dkdv_tiles", "CUDA row dK and dV, keys of 192"),
    Profiled("decode-B1-64k-h16", "fwd", "cupy-cuda", "forward_rows", "CUDA row forward, a cluster a row"),
    Profiled("decode-B64-32k-h16", "fwd", "cupy-cuda", "forward_blocks", "CUDA forward by blocks"),
    Profiled("decode-B64-32k-h16", "fwd", "triton-group", "forward_blocks_kernel", "group forward"),
    Profiled("decode-B256-16k-h16", "fwd", "cupy-cuda", "forward_blocks", "CUDA forward by blocks"),
    Profiled("decode-B256-16k-h16", "fwd", "triton-group", "forward_blocks_kernel", "group forward"),
)
METRICS = {  # ours: Nsight Compute's
    "duration": "Duration",
    "sm_ghz": "SM Frequency",
    "l2_pct": "L2 Cache Throughput",
    "dram_pct": "DRAM Throughput",
    "l2_hit_pct": "L2 Hit Rate",
    "issue_pct": "Issue Slots Busy",
    "occupancy_pct": "Achieved Occupancy",
    "registers": "Registers Per Thread",
    "shared": "Dynamic Shared Memory Per Block",
}
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
GIGAHERTZ = {"hz": 1e-9, "ghz": 1.0, "cycle/nsecond": 1.0}
KILOBYTES = {"byte/block": 1e-3, "Kbyte/block": 1.0}


def case_of(name: str) -> cases.Case:
    """The case of the performance table that has this name, prefill or decode."""
    return next(case for case in (*cases.performance_cases(), *cases.decode_cases()) if case.case == name)


def call(case_name: str, direction: str, backend: str) -> None:
    """One call of a performance case, for the profiler to look at."""
    case = case_of(case_name)
    q, k, v, do = cases.make_inputs(case, "cuda")
    selection = Selection(cases.make_selection(case, "cuda").ranges, case.block, disjoint=True)
    for x in (q, k, v):
        x.requires_grad_(direction == "bwd")
    o = nsa_sel.selection_attention(q, k, v, selection, backend=backend)
    if direction == "bwd":
        torch.autograd.grad(o, (q, k, v), do)
    torch.cuda.synchronize()


def counters(text: str) -> dict[str, Any]:
    """The counters of METRICS, the busiest pipeline and what warps wait for most, from the CSV of ncu's details page."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found: dict[str, Any] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        for ours, theirs in METRICS.items():
            if row["Metric Name"] == theirs and ours not in found:
                number = float(row["Metric Value"].replace(",", ""))
                if ours == "duration":
                    found["duration_us"] = round(number * MICROSECONDS[row["Metric Unit"]], 2)
                elif ours == "sm_ghz":
                    found[ours] = round(number * GIGAHERTZ[row["Metric Unit"].lower()], 2)
                elif ours == "shared":
                    found["shared_kbyte"] = round(number * KILOBYTES[row["Metric Unit"]], 2)
                else:
                    found[ours] = int(number) if ours == "registers" else number
        said = row.get("Rule Description") or ""
        if pipe := re.search(r"([\w() -]+?) is the highest-utilized pipeline \(([\d.]+)%\)", said):
            part = re.search(r"dominated by its (.+?) sub-pipeline", said)
            found["busiest_pipe"], found["busiest_pipe_pct"] = (part or pipe)[1].strip(), float(pipe[2])
        if stall := re.search(r"cycles being stalled (.+?)\. .*?about ([\d.]+)%", said, re.DOTALL):
            found["stall"], found["stall_pct"] = stall[1], float(stall[2])
    return found


def profile(profiled: Profiled) -> dict[str, Any]:
    """Run one call under ncu and read the counters of its first launch of the kernel. Raises RuntimeError with what ncu said."""
    sections = (
        "SpeedOfLight",
        "MemoryWorkloadAnalysis",
        "ComputeWorkloadAnalysis",
        "LaunchStats",
        "Occupancy",
        "SchedulerStats",
        "WarpStateStats",
    )
    command = ["ncu", "--csv", "--page", "details", "--clock-control", "none", "-k", f"regex:^{profiled.function}$", "-c", "1"]
    command += [word for section in sections for word in ("--section", section)]
    command += [sys.executable, "-m", "nsa_sel.bench.questions.kernel_counters", "--call", *profiled[:3]]
    run = subprocess.run(command, cwd=environment.ROOT, capture_output=True, text=True, check=False)
    found = counters(run.stdout)
    if not found:
        raise RuntimeError(f"ncu told nothing of {profiled.function}: {(run.stdout + run.stderr)[-600:]}")
    return found


def main(
    out: Annotated[Path, typer.Option(help="JSON lines, appended.")] = Path("profiles.jsonl"),
    call_only: Annotated[
        tuple[str, str, str] | None, typer.Option("--call", help="Run one case, direction and backend; no profiler.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="This one's kernels alone.")] = None,
    cases_from: Annotated[str, typer.Option("--cases", help="Cases alone whose names begin so.")] = "",
) -> None:
    """Profile every kernel of PROFILED."""
    if call_only:
        call(*call_only)
        return
    if shutil.which("ncu") is None or not torch.cuda.is_available():
        typer.echo("kernel_counters needs a GPU and Nsight Compute (ncu) on the path.", err=True)
        raise typer.Exit(2)
    facts = {**environment.stamp(), "tool": "ncu --clock-control none"}
    for profiled in PROFILED:
        if backend not in (None, profiled.backend) or not profiled.case.startswith(cases_from):
            continue
        row = {**profiled._asdict(), **profile(profiled), **facts}
        store.append(out, [row])
        typer.echo(f"{row['kernel']:32} {row['case']:20} {row['duration_us']} us")


if __name__ == "__main__":
    typer.run(main)
