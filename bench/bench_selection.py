"""Times on this GPU: our backends, packed SDPA and dense attention (cuDNN) in one process, forward, backward, decode.

    python -m nsa_sel.bench.bench_selection --out bench/results/h200/selection.jsonl

Times are of the whole call: a fresh `Selection` each time, so that plans are built within it. Parity is checked in the same run
on outputs whose memory held NaN, for sampled rows against the float64 oracle (`mae`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import track
from tabulate import tabulate
from torch import Tensor

import nsa_sel
from nsa_sel.bench import cases, measure
from nsa_sel.bench.baselines import dense_causal_sdpa
from nsa_sel.bench.cases import Case
from nsa_sel.oracle import oracle_backward, oracle_forward
from nsa_sel.selection import Selection

DEVICE = "cuda"
DENSE = "dense-cudnn"
PACKED = "sdpa-packed"
PREFILL_ONLY = ("triton-tile", "triton-block")  # they share loads between rows, and decoding has one row a sequence
BACKENDS = (*PREFILL_ONLY, "triton-group", PACKED, DENSE)
SHOWN = ("case", "direction", "backend", "ms_median", "ms_p20", "ms_p80", "mae", "workspace_bytes")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Suite(NamedTuple):
    """One question: its cases, and how closely each is looked at."""

    cases: Callable[[], list[Case]]
    packed: bool  # whether packed SDPA takes part: up to 1.3 s a call at 32k rows
    whole: bool  # whether fwd+bwd is measured, beside fwd and bwd
    rep: float  # ms of timed calls
    rows: int  # compared with the oracle


# In this order a case that several suites share is looked at most closely by the first of them.
SUITES = {
    "performance": Suite(cases.performance_cases, packed=True, whole=True, rep=50, rows=64),
    "decode": Suite(cases.decode_cases, packed=True, whole=False, rep=50, rows=64),
    "threshold": Suite(cases.threshold_cases, packed=True, whole=False, rep=50, rows=64),
    "breakeven": Suite(cases.breakeven_cases, packed=False, whole=True, rep=50, rows=16),
    "scaling": Suite(cases.scaling_cases, packed=False, whole=False, rep=50, rows=16),
    "layers": Suite(cases.layer_cases, packed=False, whole=False, rep=20, rows=8),
}


class Job(NamedTuple):
    """One case with the suite that asks for it and the backends that it is measured with."""

    case: Case
    suite: Suite
    backends: list[str]


class Problem(NamedTuple):
    """The tensors of a case, on one device."""

    selection: Selection
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


class Sample(NamedTuple):
    """What a case should give for a few rows, in float64. `do` is 0 but in these rows, so that dk and dv are known too."""

    rows: Tensor  # [r] numbers of query rows
    entries: int  # of the batch, the first ones
    do: Tensor  # [B,S,G,h,Dv] in the inputs' dtype
    o: Tensor  # [entries,r,G,h,Dv]
    gradients: tuple[Tensor, ...]  # dq [entries,r,G,h,Dk], dk, dv [entries,G,S_kv,D]; none when decoding


def jobs(suites: str, backends: str, only: str) -> list[Job]:
    """What to measure, each case once: by suites' and backends' names, comma-separated, and a part of the cases' names."""
    names = list(SUITES) if suites == "all" else suites.split(",")
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}; allowed: all, {', '.join(SUITES)}, comma-separated")
    found: dict[str, Job] = {}
    for suite in (suite for name, suite in SUITES.items() if name in names):
        for case in suite.cases():
            takes_part = {PACKED: suite.packed, **dict.fromkeys(PREFILL_ONLY, case.S > 1)}
            wanted = [backend for backend in backends.split(",") if takes_part.get(backend, True)]
            if only in case.case and wanted:
                found.setdefault(case.case, Job(case, suite, wanted))
    return list(found.values())


def attend(backend: str, selection: Selection) -> Attend:
    """One whole call of `backend`, with plans built anew."""
    if backend == DENSE:
        return dense_causal_sdpa
    ranges, block = selection.ranges, selection.block_size

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = nsa_sel.selection_attention(q, k, v, Selection(ranges, block), backend=backend)
        return o

    return call


def sample(case: Case, problem: Problem, most: int) -> Sample:
    """The oracle's o and gradients of `most` random rows of the first batch entries: it is slow."""
    q, k, v = problem.q, problem.k, problem.v
    rows = torch.randperm(case.S, generator=torch.Generator().manual_seed(0))[:most].sort().values
    entries = min(case.B, 4)
    position, on_device = rows + case.S_kv - case.S, rows.to(q.device)
    few_q, ranges, few_do = (x[:entries, on_device] for x in (q, problem.selection.ranges, problem.do))
    do = torch.zeros_like(problem.do)
    do[:entries, on_device] = few_do
    few = few_q, k[:entries], v[:entries], ranges
    o, _ = oracle_forward(*few, q_pos=position)
    gradients = () if case.S == 1 else oracle_backward(*few, few_do, q_pos=position)
    return Sample(on_device, entries, do, o.to(q.device), tuple(x.to(q.device) for x in gradients))


def parity(call: Attend, problem: Problem, wanted: Sample) -> tuple[float, float | None]:
    """Mean absolute error of o, and the largest of those of dq, dk, dv (None when decoding); new memory is filled with NaN first.

    Errors of o and dq are over the sampled rows, those of dk and dv over the keys that these rows attend to. Everything else
    that was not written, or not to 0, raises.
    """
    q, k, v = (x.detach() for x in problem[1:4])
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    try:
        if not wanted.gradients:
            return mean_error(call(q, k, v)[: wanted.entries, wanted.rows], wanted.o), None
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = call(*leaves)
        gradients = torch.autograd.grad(o, leaves, wanted.do)
    finally:
        torch.use_deterministic_algorithms(False)
    found = [mean_error(gradients[0][: wanted.entries, wanted.rows], wanted.gradients[0])]
    for name, mine, exact in zip(("dk", "dv"), gradients[1:], wanted.gradients[1:], strict=True):
        read = (exact != 0).any(-1)
        if bool((mine[: wanted.entries][~read] != 0).any()):
            raise RuntimeError(f"{name} is not 0 at keys that no row with a gradient attends to")
        found.append(mean_error(mine[: wanted.entries][read], exact[read]))
    for name, mine in zip(("o", "dq", "dk", "dv"), (o, *gradients), strict=True):
        if not bool(mine.isfinite().all()):
            raise RuntimeError(f"{name} has values that were not written, or are not finite")
    return mean_error(o[: wanted.entries, wanted.rows], wanted.o), max(found)


def mean_error(mine: Tensor, exact: Tensor) -> float:
    """Mean absolute error."""
    return float((mine.detach().double() - exact).abs().mean())


def measured(job: Job, backend: str, problem: Problem, wanted: Sample, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of one backend on one case, each as soon as it is known."""
    case, suite, _ = job
    call = attend(backend, problem.selection)
    mae = (None, None) if backend == DENSE else parity(call, problem, wanted)

    def row(direction: str, work: Callable[[], Any], mae: float | None) -> dict[str, Any]:
        space = measure.workspace_bytes(work)  # also the call before those that are timed
        times = (measure.replayed_milliseconds if direction == "decode" else measure.milliseconds)(work, suite.rep)
        return measure.row(case, direction, backend, times, mae=mae, workspace_bytes=space, **facts)

    q, k, v = (x.detach() for x in problem[1:4])
    with torch.no_grad():
        forward = row("decode" if case.S == 1 else "fwd", lambda: call(q, k, v), mae[0])
    yield forward
    if case.S == 1:
        return
    leaves = [x.requires_grad_() for x in (q, k, v)]
    planned = Selection(problem.selection.ranges, problem.selection.block_size)
    o = call(q, k, v) if backend == DENSE else nsa_sel.selection_attention(q, k, v, planned, backend=backend)

    def backward() -> Any:
        planned.forget_plans()
        return torch.autograd.grad(o, leaves, problem.do, retain_graph=True)

    yield row("bwd", backward, mae[1])
    if not suite.whole:
        return

    def both() -> Any:
        o = call(q, k, v)
        return o.detach(), *torch.autograd.grad(o, leaves, problem.do)

    yield row("fwd+bwd", both, None if backend == DENSE else max(x for x in mae if x is not None))


def measured_rows(job: Job, facts: dict[str, Any], tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The rows of one case with all its backends; what fails is told in one line and passed over."""

    def failed(what: str, error: Exception) -> None:
        tell(f"{job.case.case} {what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")

    try:
        problem = Problem(cases.make_selection(job.case, DEVICE), *cases.make_inputs(job.case, DEVICE))
        wanted = sample(job.case, problem, job.suite.rows)
    except torch.OutOfMemoryError as error:
        failed("inputs", error)
        return
    for backend in job.backends:
        try:
            yield from measured(job, backend, problem, wanted, facts)
        except Exception as error:
            failed(backend, error)
        finally:
            torch.cuda.empty_cache()


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file that rows are appended to")],
    suite: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(SUITES)}, some of them comma-separated, or all. {PACKED} is in performance, decode and threshold alone:"
            f" it takes up to 1.3 s a call at 32k rows. {DENSE} is in all. {' and '.join(PREFILL_ONLY)} do not decode."
        ),
    ] = "all",
    backends: Annotated[str, typer.Option(help="backends, comma-separated")] = ",".join(BACKENDS),
    only: Annotated[str, typer.Option(help="only cases whose name contains this")] = "",
) -> None:
    """Measure the cases with every backend; what runs out of memory, refuses or gives wrong results is reported and passed over."""
    chosen = jobs(suite, backends, only)
    facts, table, console = measure.environment(), [], Console(stderr=True)
    for job in track(chosen, "cases", console=console):
        for row in measured_rows(job, facts, console.print):
            measure.append(out, [row])
            table.append([row[column] for column in SHOWN])
    print(tabulate(table, headers=SHOWN, tablefmt="github"))


if __name__ == "__main__":
    typer.run(main)
