"""Where the time of one call goes: the GPU time of every kernel that it starts, by torch's profiler; a JSON line a call.

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

import nsa_sel
from nsa_sel.bench.core import cases, environment, store
from nsa_sel.selection import Selection

BACKENDS = ("triton-tile", "triton-block", "triton-group", "cupy-cuda")
CALLS = 5  # profiled of each, after two that are not


def kernel_times(case: cases.Case, direction: str, backend: str) -> dict[str, Any]:
    """Microseconds a call of every kernel, and how often it runs; plans are built within the call."""
    q, k, v, do = cases.make_inputs(case, "cuda")
    ranges = cases.make_selection(case, "cuda").ranges
    for x in (q, k, v):
        x.requires_grad_(direction == "bwd")
    selection = Selection(ranges, case.block, disjoint=True)
    o = nsa_sel.selection_attention(q, k, v, selection, backend=backend)

    def call() -> None:
        if direction == "bwd":
            selection.forget_plans()
            torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        else:
            nsa_sel.selection_attention(q, k, v, Selection(ranges, case.block, disjoint=True), backend=backend)

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
    out: Annotated[Path, typer.Option(help="JSON lines, appended.")] = Path("kernel_times.jsonl"),
    backend: Annotated[str | None, typer.Option(help="This one alone.")] = None,
) -> None:
    """Profile the prefill cases of the performance table, forward and backward, with each GPU backend."""
    if not torch.cuda.is_available():
        typer.echo("kernel_times needs a CUDA GPU.", err=True)
        raise typer.Exit(2)
    facts = environment.stamp()
    for case in cases.performance_cases():
        for direction in ("fwd", "bwd"):
            for name in [backend] if backend else BACKENDS:
                times = kernel_times(case, direction, name)
                row = {"case": case.case, "direction": direction, "backend": name, "kernels": times, **facts}
                store.append(out, [row])
                typer.echo(f"{case.case:20} {direction} {name:13} {times}")


if __name__ == "__main__":
    typer.run(main)
