"""Packed batches: one call for all sequences, with and without a copy of k and v to where blocks begin, beside a call for each.

    python -m nsa_sel.bench.questions.packed_batches --out bench/results/h200/varlen.jsonl

Three ways to serve sequences of mixed lengths that lie end to end, whole calls, plans and shifted ranges built within them:
    NAME           selection_attention_varlen: bounds on the device, align=False; block_aligned where sequences begin with blocks
    NAME-each      a call of selection_attention for every sequence, its results joined: what a user does without it
    NAME-copied    selection_attention_varlen with align=True: k and v copied so that each sequence begins with a block, for the odd cases
Parity is checked in the same run, for sampled rows against the float64 oracle. Run again, it goes on where it was stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from nsa_sel import selection_attention, selection_attention_varlen
from nsa_sel.bench.core import cases
from nsa_sel.bench.core.cases import Case, packed_bounds
from nsa_sel.bench.core.command_line import echo, program, stderr_console
from nsa_sel.bench.core.contenders import PREFILL_ONLY, Contender, Ready, ours
from nsa_sel.bench.core.parity import Problem
from nsa_sel.bench.core.session import Job, able, run
from nsa_sel.bench.core.timing import Timing
from nsa_sel.bench.questions.speed import CPU_BACKENDS, device_of, table
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection

BACKENDS = ("triton-tile", "triton-block", "triton-group")
QUICK = [
    Case(f"packed-{kind}-2k-h4", "packed", 1, 2048, 2048, 2, 4, 64, 64, 8, 16, "bfloat16")
    for kind in ("whole", "odd")
]  # fmt: skip
Way = Callable[[str, Problem, list[int], int], Ready]


def in_sequences(problem: Problem, bounds: list[int]) -> Tensor:
    """The selection's ranges in positions of each row's own sequence."""
    ranges = problem.selection.ranges
    lengths = torch.tensor(bounds, device=ranges.device).diff()
    first = torch.repeat_interleave(torch.tensor(bounds[:-1], device=ranges.device), lengths).to(ranges.dtype)
    return torch.where(ranges.diff(dim=-1) > 0, ranges - first[None, :, None, None, None], 0)


def at_once(backend: str, problem: Problem, bounds: list[int], block: int, align: bool = False) -> Ready:
    """One call, bounds on the device."""
    ranges, cu = in_sequences(problem, bounds), torch.tensor(bounds, dtype=torch.int32, device=problem.q.device)
    aligned = problem.selection.block_size is not None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[0].transpose(0, 1) for x in (k, v))
        o: Tensor = selection_attention_varlen(
            q[0], k, v, Selection(ranges, block, disjoint=True), cu, backend=backend, block_aligned=aligned, align=align
        )
        return o.unsqueeze(0)

    return _packed(call)


def one_by_one(backend: str, problem: Problem, bounds: list[int], block: int) -> Ready:
    """A call for every sequence."""
    ranges = in_sequences(problem, bounds)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [
            selection_attention(q[:, a:b], k[:, :, a:b], v[:, :, a:b], Selection(ranges[:, a:b], block, disjoint=True), backend=backend)
            for a, b in pairwise(bounds)
        ]
        return torch.cat(parts, 1)

    return _packed(call)


def copied(backend: str, problem: Problem, bounds: list[int], block: int) -> Ready:
    """One call, bounds on the device, over a copy of k and v in which every sequence begins with a block."""
    return at_once(backend, problem, bounds, block, align=True)


WAYS: dict[str, Way] = {"": at_once, "-each": one_by_one, "-copied": copied}


def _packed(call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Ready:
    """k and v lie as [S,G,D], as those of a packed batch do."""
    return Ready(call, call, layout=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))


def contenders(case: Case, backends: tuple[str, ...]) -> list[Contender]:
    """Every backend in every way that it can go."""
    bounds = packed_bounds(case)
    odd = any(bound % case.block for bound in bounds[:-1])
    found = []
    for backend in backends:
        for suffix, way in WAYS.items():
            if suffix == "" and odd and backend in PREFILL_ONLY:
                continue  # refuses without a copy
            if suffix == "-copied" and not odd:
                continue

            def prepare(problem: Problem, way: Way = way, backend: str = backend) -> Ready:
                return way(backend, problem, bounds, case.block)

            found.append(ours(backend)._replace(name=backend + suffix, prepare=prepare, refuses=lambda case: None))
    return found


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file that rows are appended to; what it holds is not measured again")],
    backends: Annotated[str, typer.Option(help="backends, comma-separated; by default the fast ones of the device")] = "",
    device: Annotated[str, typer.Option(help="auto, cuda, cpu")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="two small cases instead, on any device")] = False,
) -> None:
    """Measure packed batches: all sequences in one call, one by one, and after a copy that aligns them."""
    where, console = device_of(device), stderr_console()
    if where == "cpu" and not quick:
        raise ArgumentError("--device", "cpu", "cuda for cases of 32k rows", "pass --quick, whose cases suit a CPU")
    names = tuple(backends.split(",")) if backends else BACKENDS if where == "cuda" else CPU_BACKENDS
    jobs = []
    for case in QUICK if quick else cases.packed_cases():
        case = case if where == "cuda" else case._replace(dtype="float32")
        chosen = able(contenders(case, names), where, console.print)
        jobs.append(
            Job(case, chosen, ("fwd", "fwd+bwd"), 16 if quick else 64, Timing(10 if quick else 50), {"quick": True} if quick else {})
        )
    echo(table(run(jobs, out, where, console)))


if __name__ == "__main__":
    program(main)
