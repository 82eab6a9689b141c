"""Where does the time of one call go? The GPU time of every kernel that it runs, by torch's profiler; a JSON line a call.

python -m nsa_sel.bench.questions.kernel_times --out bench/results/h200/profiles/kernel_times.jsonl
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.profiler import ProfilerActivity, profile

from nsa_sel.bench.core import cases, environment, store
from nsa_sel.bench.core.command_line import Backends, echo, need_gpu, program
from nsa_sel.bench.core.contenders import of_framework, ours
from nsa_sel.bench.core.parity import make_problem
from nsa_sel.bench.core.session import work_of
from nsa_sel.bench.questions.speed import LEFT_OUT

CALLS = 5  # profiled of each, after two that are not


def kernel_times(case: cases.Case, direction: str, backend: str) -> dict[str, Any]:
    """Microseconds a call of every kernel, and how often it runs; plans are built within the call."""
    problem = make_problem(case, "cuda")
    call = work_of(direction, ours(backend).prepare(problem), problem)
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in seen.events() or ():
        if event.device_type.name == "CUDA":
            found[short(event.name)].append(event.device_time_total)
    return {name: [len(times) // CALLS, round(sum(times) / CALLS, 1)] for name, times in sorted(found.items(), key=lambda i: -sum(i[1]))}


def short(name: str) -> str:
    """Our kernels keep their names; those of torch lose their templates."""
    found = re.search(r"(?:::|^)(\w+)(?:<|\(|$)", name.removeprefix("void "))
    return found[1] if found else name[:40]


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file that rows are appended to")] = Path("kernel_times.jsonl"),
    backends: Backends = "",
) -> None:
    """Profile the prefill cases of the performance table, forward and backward, with each GPU backend."""
    need_gpu("kernel_times")
    names = [name for name in (*of_framework("triton"), *of_framework("cupy")) if name != LEFT_OUT]
    facts = environment.stamp()
    for case in cases.performance_cases():
        for direction in ("fwd", "bwd"):
            for name in backends.split(",") if backends else names:
                times = kernel_times(case, direction, name)
                store.append(out, [{"case": case.case, "direction": direction, "backend": name, "kernels": times, **facts}])
                echo(f"{case.case:20} {direction} {name:13} {times}")


if __name__ == "__main__":
    program(main)
