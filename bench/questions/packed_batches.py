"""Packed batches: is one call for all sequences faster than a call for each, and what does aligning them with a copy cost?

    python -m nsa_sel.bench.questions.packed_batches --out bench/results/h200/varlen.jsonl

Three ways to attend within sequences of mixed lengths that lie end to end; whole calls, plans and shifted ranges built within them:
    NAME           selection_attention_varlen: bounds on the device, align=False; block_aligned where sequences begin with blocks
    NAME-each      a call of selection_attention for every sequence, its results joined: what a user does without it
    NAME-copied    selection_attention_varlen with align=True: k and v copied so that each sequence begins with a block, for the odd cases
Parity is checked in the same run, for sampled rows against the float64 oracle. Run again, it resumes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from nsa_sel import selection_attention, selection_attention_varlen
from nsa_sel.bench.core import cases
from nsa_sel.bench.core.cases import Case, packed_bounds
from nsa_sel.bench.core.command_line import Backends, Device, Out, Quick, device_of, echo, program, stderr_console
from nsa_sel.bench.core.contenders import Contender, Ready, of_framework, ours
from nsa_sel.bench.core.parity import Problem
from nsa_sel.bench.core.session import Job, able, run
from nsa_sel.bench.core.timing import Timing
from nsa_sel.bench.questions.speed import LEFT_OUT, table, usual_backends
from nsa_sel.core import registry
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection

QUICK = [Case(f"packed-{kind}-2k-h4", "packed", 1, 2048, 2048, 2, 4, 64, 64, 8, 16, "bfloat16") for kind in ("whole", "odd")]
Way = Callable[[str, list[int], int, Problem], Ready]


def compared(device: str) -> list[str]:
    """The backends that are measured by default."""
    return [name for name in of_framework("triton") if name != LEFT_OUT] if device == "cuda" else usual_backends(device)


def in_sequences(problem: Problem, bounds: list[int]) -> Tensor:
    """The selection's ranges in positions of each row's own sequence."""
    ranges = problem.selection.ranges
    lengths = torch.tensor(bounds, device=ranges.device).diff()
    first = torch.repeat_interleave(torch.tensor(bounds[:-1], device=ranges.device), lengths).to(ranges.dtype)
    return torch.where(ranges.diff(dim=-1) > 0, ranges - first[None, :, None, None, None], 0)


def at_once(backend: str, bounds: list[int], block: int, problem: Problem, align: bool = False) -> Ready:
    """One call, bounds on the device; align: over a copy of k and v in which every sequence begins with a block."""
    ranges, cu = in_sequences(problem, bounds), torch.tensor(bounds, dtype=torch.int32, device=problem.q.device)
    aligned = problem.selection.block_size is not None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[0].transpose(0, 1) for x in (k, v))
        o: Tensor = selection_attention_varlen(
            q[0], k, v, Selection(ranges, block, disjoint=True), cu, backend=backend, block_aligned=aligned, align=align
        )
        return o.unsqueeze(0)

    return _packed(call)


def one_by_one(backend: str, bounds: list[int], block: int, problem: Problem) -> Ready:
    """A call for every sequence."""
    ranges = in_sequences(problem, bounds)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [
            selection_attention(q[:, a:b], k[:, :, a:b], v[:, :, a:b], Selection(ranges[:, a:b], block, disjoint=True), backend=backend)
            for a, b in pairwise(bounds)
        ]
        return torch.cat(parts, 1)

    return _packed(call)


WAYS: dict[str, Way] = {"": at_once, "-each": one_by_one, "-copied": partial(at_once, align=True)}


def _packed(call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Ready:
    """k and v lie as [S,G,D], as those of a packed batch do."""
    return Ready(call, call, layout=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))


def contenders(case: Case, backends: list[str]) -> list[Contender]:
    """Every backend in every way that it supports."""
    bounds = packed_bounds(case)
    odd = any(bound % case.block for bound in bounds[:-1])
    whole_blocks = [name for name, backend in registry.backends().items() if backend.limits.block_aligned_only]
    refused = {(name, "") for name in whole_blocks} if odd else {(name, "-copied") for name in backends}
    return [
        ours(backend)._replace(name=backend + suffix, prepare=partial(way, backend, bounds, case.block), refuses=lambda case: None)
        for backend in backends
        for suffix, way in WAYS.items()
        if (backend, suffix) not in refused
    ]


def main(out: Out, backends: Backends = "", device: Device = "auto", quick: Quick = False) -> None:
    """Measure packed batches: all sequences in one call, one by one, and after a copy that aligns them."""
    where, console = device_of(device), stderr_console()
    if where == "cpu" and not quick:
        raise ArgumentError("--device", "cpu", "cuda for cases of 32k rows", "pass --quick, whose cases suit a CPU")
    names = backends.split(",") if backends else compared(where)
    rows, timing, more = (16, Timing(10), {"quick": True}) if quick else (64, Timing(50), {})
    jobs = []
    for case in QUICK if quick else cases.packed_cases():
        case = case if where == "cuda" else case._replace(dtype="float32")
        jobs.append(Job(case, able(contenders(case, names), where, console.print), ("fwd", "fwd+bwd"), rows, timing, more))
    echo(table(run(jobs, out, where, console)))


if __name__ == "__main__":
    program(main)
