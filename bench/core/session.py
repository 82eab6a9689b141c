"""One run of a bench: its jobs are measured one after another into a file of rows. A run that was stopped resumes.

A row that the file has from the same environment and commit is not measured again. A case that runs out of memory gets a row without a
time: `error`, and `error_in`, the step that failed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nsa_sel.bench.core import environment, timing
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import Contender, Ready
from nsa_sel.bench.core.parity import Problem, Sample, WrongAnswer, WrongResult, is_causal, lacks_gradients, make_problem, parity, sample
from nsa_sel.bench.core.store import OUT_OF_MEMORY, Row, RowFile, first_line
from nsa_sel.bench.core.timing import Timing
from nsa_sel.cli.output import output_file

Tell = Callable[[str], None]


class Job(NamedTuple):
    """One case with all that is measured on it. `more`: values of all its rows beyond those of the case."""

    case: Case
    contenders: tuple[Contender, ...]
    directions: tuple[str, ...]  # of fwd, bwd, fwd+bwd; or decode alone
    rows: int  # compared with the oracle
    timing: Timing = Timing()
    more: dict[str, Any] = {}  # noqa: RUF012 - never written


def wanted(job: Job) -> list[Row]:
    """The rows of a job, without what measuring adds."""
    return [
        {**job.case._asdict(), "direction": direction, "backend": contender.name, **job.more}
        for contender in job.contenders
        for direction in job.directions
        if direction in contender.directions
    ]


def able(contenders: Iterable[Contender], device: str, tell: Tell) -> tuple[Contender, ...]:
    """Those that run on the device; one line each says why the others do not."""
    found = []
    for contender in contenders:
        reason = contender.lacks(device)
        if reason is not None:
            tell(f"{contender.name} is left out: {reason}")
        elif device in contender.forward_only:
            tell(f"{contender.name} has no backward pass on {device}: its forward alone is measured")
            found.append(contender._replace(directions=("fwd", "decode")))
        else:
            found.append(contender)
    return tuple(found)


def run(jobs: Sequence[Job], out: Path, device: str, console: Console) -> list[Row]:
    """Measure what `out` lacks, append each row at once, and return all rows of the jobs, old and new.

    What refuses a case, fails or gives wrong results is reported in one line and skipped; the next run tries it again. Raises
    ArgumentError where `out` can't be written, before anything is measured.
    """
    out = output_file("--out", out, make_folder=True)
    facts = environment.stamp(device)
    done = RowFile(out, tell=console.print)
    done.mend()
    reused, found = 0, []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("rows", total=sum(len(wanted(job)) for job in jobs))
        try:
            for job in jobs:
                progress.update(task, description=job.case.case)
                rows = [{**row, **facts} for row in wanted(job)]
                missing = [row for row in rows if row not in done]
                reused += len(rows) - len(missing)
                for row in measured_rows(job, missing, facts, device, console.print) if missing else ():
                    done.add(row)
                found += done.of(rows)
                progress.advance(task, len(rows))
        except KeyboardInterrupt:
            console.print(f"interrupted; what was measured is in {out}: run the same command again to resume")
            raise
    if reused:
        console.print(f"{reused} of {len(found)} rows were in {out.name} from an earlier run in this environment at this commit")
    return found


def measured_rows(job: Job, missing: Sequence[Row], facts: dict[str, Any], device: str, tell: Tell) -> Iterator[Row]:
    """The missing rows of one case, whose inputs all contenders share."""
    left = {(row["backend"], row["direction"]): row for row in missing}

    def failed(name: str, error: Exception, doing: str) -> Iterator[Row]:
        if not _is_out_of_memory(error):
            tell(f"{job.case.case} {name}: {first_line(error)}")
            return
        tell(f"{job.case.case} {name}: {OUT_OF_MEMORY} ({doing})")
        for key in list(left):
            if name in ("inputs", key[0]):
                yield {**left.pop(key), "error": OUT_OF_MEMORY, "error_in": doing, **facts}

    problem = None
    samples: dict[bool, Sample] = {}
    try:
        problem = make_problem(job.case, device)
        for every_key in {c.every_key for c in job.contenders if c.checked}:
            samples[every_key] = sample(job.case, problem, job.rows, every_key, backward=job.directions != ("decode",))
    except Exception as error:
        yield from failed("inputs", error, "inputs")
        return
    for contender in job.contenders:
        directions = [direction for direction in job.directions if (contender.name, direction) in left]
        refusal = contender.refuses(job.case)
        if refusal is not None:
            tell(f"{job.case.case} {contender.name}: {refusal}")
        elif directions:
            doing = ["parity"]
            try:
                for row in contender_rows(job, contender, directions, problem, samples.get(contender.every_key), device, doing, tell):
                    del left[contender.name, row["direction"]]
                    yield {**row, **facts}
            except WrongAnswer:
                raise
            except Exception as error:
                yield from failed(contender.name, error, doing[0])
            if device == "cuda":
                if any((contender.name, direction) in left for direction in directions):
                    gc.collect()  # an error's frames hold tensors
                torch.cuda.empty_cache()


def contender_rows(
    job: Job, contender: Contender, directions: Sequence[str], problem: Problem, exact: Sample | None, device: str, doing: list[str],
    tell: Tell = lambda words: None,
) -> Iterator[Row]:  # fmt: skip
    """The rows of one contender, each as soon as it is measured; doing[0] is the current step."""
    case, more, ready = job.case, dict(job.more), contender.prepare(problem)
    mae: tuple[float | None, float | None] = (None, None)
    if contender.finds_gradients and "decode" not in directions:
        lacking = lacks_gradients(ready.call, problem)
        if lacking is not None:
            tell(f"{case.case} {contender.name}: its forward alone is measured: {lacking}")
            contender, directions = contender._replace(directions=("fwd",)), [way for way in directions if way == "fwd"]
    if any(other.peer for other in job.contenders):
        more["selection"] = contender.selection
    if contender.checked and exact is not None:
        exact = exact if "bwd" in contender.directions else exact._replace(gradients=())
        try:
            mae = parity(ready.call, problem, exact, strict=not contender.peer)
        except WrongResult as error:
            if not contender.peer:
                raise
            more["wrong"] = str(error)
    if contender.peer:
        more |= {"computes": "every key" if contender.every_key else "selection", "causal": is_causal(ready.call, problem)}
        more["prepare_ms"] = round(_prepare_ms(contender, problem, device), 3)
    errors = {"fwd": mae[0], "decode": mae[0], "bwd": mae[1], "fwd+bwd": max((x for x in mae if x is not None), default=None)}
    for direction in directions:
        doing[0] = direction
        work = work_of(direction, ready, problem)
        with torch.set_grad_enabled(direction not in ("fwd", "decode")):
            if contender.peer:
                work()  # what torch.compile does first is not its workspace
            space = timing.workspace_bytes(work, device)  # also the call before those that are timed
            if direction == "decode" and device == "cuda" and job.timing.streams == 1:
                times = timing.replayed_milliseconds(work, job.timing)
            else:
                times = timing.milliseconds(work, job.timing, device)
        more |= {"mae": errors[direction], "workspace_bytes": space, **environment.gpu_state(device)}
        yield timing.row(case, direction, contender.name, times, **more)


def _prepare_ms(contender: Contender, problem: Problem, device: str) -> float:
    """What a contender makes of a selection before its calls, the second time: the first compiles."""

    def prepare() -> None:
        contender.prepare(problem)
        if device == "cuda":
            torch.cuda.synchronize()

    return timing.cpu_milliseconds(prepare)


def work_of(direction: str, ready: Ready, problem: Problem) -> Callable[[], Any]:
    """What is timed: the forward, the backward of a forward that has run, or both."""
    q, k, v = problem.q.detach(), ready.layout(problem.k.detach()), ready.layout(problem.v.detach())
    if direction in ("fwd", "decode"):
        return lambda: ready.call(q, k, v)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if direction == "bwd":
        o = ready.trained(q, k, v)

        def backward() -> Any:
            ready.forget()
            return torch.autograd.grad(o, leaves, problem.do, retain_graph=True)

        return backward

    def both() -> Any:
        o = ready.call(q, k, v)
        return o.detach(), *torch.autograd.grad(o, leaves, problem.do)

    return both


def _is_out_of_memory(error: Exception) -> bool:
    allocator = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch's, on a CPU
    return allocator or isinstance(error, (torch.OutOfMemoryError, MemoryError))
