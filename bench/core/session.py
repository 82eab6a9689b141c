"""One run of a bench: each job is checked against the float64 oracle, timed, and added to a file of rows. A stopped run
continues.

A row that the file has from the same environment and commit is not measured again. A case that runs out of memory gets
a row with `error` instead of a time. Checked calls get new memory filled with NaN.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from nsa_sel.bench.core import timing
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import Attend, Contender, Problem, Ready, make_problem
from nsa_sel.bench.core.store import OUT_OF_MEMORY, Row, RowFile, first_line, stamp
from nsa_sel.bench.core.timing import Timing, WrongResult
from nsa_sel.cli.output import output_file
from nsa_sel.oracle import oracle_backward, oracle_forward
from nsa_sel.testing import new_memory_is_nan

Tell = Callable[[str], None]
# Mean error over mean magnitude: some times what rounding does, far below what a wrong key does. The tests hold every
# backend to less.
GROSS = {torch.float16: 0.05, torch.bfloat16: 0.05, torch.float32: 1e-3}


class Job(NamedTuple):
    """One case with all that is measured on it. `more`: further fields of its rows."""

    case: Case
    contenders: tuple[Contender, ...]
    directions: tuple[str, ...]  # of fwd, bwd, fwd+bwd; or decode alone
    rows: int  # compared with the oracle
    timing: Timing = Timing()
    more: dict[str, Any] = {}  # noqa: RUF012 - never written


# Parity


class Sample(NamedTuple):
    """The exact results for a few rows, in float64. `do` is 0 in all other rows, so that dk and dv are exact, too."""

    rows: Tensor  # [r] numbers of query rows
    entries: int  # of the batch, the first ones
    do: Tensor  # [B,S,G,h,Dv] in the inputs' dtype
    o: Tensor  # [entries,r,G,h,Dv]
    gradients: tuple[Tensor, ...]  # dq [entries,r,G,h,Dk], dk, dv [entries,G,S_kv,D]; none when decoding


def sample(case: Case, problem: Problem, most: int, every_key: bool = False, backward: bool = True) -> Sample:
    """Return the oracle's o and gradients of `most` random rows of the first batch entries: the oracle is slow.

    every_key: of dense causal attention, in which a row selects all keys up to its own. backward: compute gradients.
    """
    q, k, v = problem.q, problem.k, problem.v
    rows = torch.randperm(case.S, generator=torch.Generator().manual_seed(0))[:most].sort().values
    entries = min(case.B, 4)
    position, on_device = rows + case.S_kv - case.S, rows.to(q.device)
    few_q, ranges, few_do = (x[:entries, on_device] for x in (q, problem.selection.ranges, problem.do))
    if every_key:
        ranges = torch.tensor([0, case.S_kv]).expand(*ranges.shape[:3], 1, 2)
    do = torch.zeros_like(problem.do)
    do[:entries, on_device] = few_do
    few = few_q, k[:entries], v[:entries], ranges
    o, _ = oracle_forward(*few, q_pos=position)
    gradients = () if case.S == 1 or not backward else oracle_backward(*few, few_do, q_pos=position)
    return Sample(on_device, entries, do, o.to(q.device), tuple(x.to(q.device) for x in gradients))


def parity(call: Attend, problem: Problem, wanted: Sample, strict: bool = True) -> tuple[float, float | None]:
    """Check a call.

    Errors of o and dq are over the sampled rows, those of dk and dv over the keys that these rows attend to.

    Args:
        call: attention.
        problem: its inputs.
        wanted: the oracle's results.
        strict: raise for an operation of torch that is not deterministic.

    Returns:
        The mean absolute error of o, and the largest of those of dq, dk, dv (None when decoding).

    Raises:
        WrongResult: a gross error, or values that were not written, or not to 0.
    """
    q, k, v = (x.detach() for x in problem[1:4])
    leaves, gradients, errors = [x.requires_grad_(bool(wanted.gradients)) for x in (q, k, v)], tuple[Tensor, ...](), list[float]()
    with new_memory_is_nan(strict):
        o = call(*leaves)
        if wanted.gradients:
            gradients = torch.autograd.grad(o, leaves, wanted.do)
    if gradients:
        errors.append(checked_error("dq", gradients[0][: wanted.entries, wanted.rows], wanted.gradients[0]))
        for name, mine, exact in zip(("dk", "dv"), gradients[1:], wanted.gradients[1:], strict=True):
            read = (exact != 0).any(-1)
            if bool((mine[: wanted.entries][~read] != 0).any()):
                raise WrongResult(f"{name} is not 0 at keys that no row with a gradient attends to")
            errors.append(checked_error(name, mine[: wanted.entries][read], exact[read]))
    for name, mine in zip(("o", "dq", "dk", "dv"), (o, *gradients), strict=False):
        if not bool(mine.isfinite().all()):
            raise WrongResult(f"{name} has values that were not written, or are not finite")
    return checked_error("o", o[: wanted.entries, wanted.rows], wanted.o), max(errors, default=None)


def checked_error(name: str, mine: Tensor, exact: Tensor) -> float:
    """Return the mean absolute error. Raises WrongResult if it is a larger part of the mean magnitude than `GROSS`."""
    error, size = float((mine.detach().double() - exact).abs().mean()), float(exact.abs().mean())
    if not error <= GROSS[mine.dtype] * size:  # NaN is wrong, too
        raise WrongResult(f"{name} is {error:.1e} off in the mean, and {size:.1e} large: it is not the attention of this selection")
    return error


# Runs


def wanted(job: Job) -> list[Row]:
    """Return the rows of a job, without what measuring adds."""
    return [
        {**job.case._asdict(), "direction": direction, "backend": contender.name, **job.more}
        for contender in job.contenders
        for direction in job.directions
        if direction in contender.directions
    ]


def able(contenders: Iterable[Contender], device: str, tell: Tell) -> tuple[Contender, ...]:
    """Return those that run on the device; `tell` gets one line for each that does not."""
    found = []
    for contender in contenders:
        reason = contender.lacks(device)
        if reason is None:
            found.append(contender)
        else:
            tell(f"{contender.name} is left out: {reason}")
    return tuple(found)


def run(jobs: Sequence[Job], out: Path, device: str, console: Console) -> list[Row]:
    """Measure what `out` lacks, append each row at once, and return all rows of the jobs, old and new.

    A contender that refuses a case, fails or gives wrong results is reported in one line and skipped; the next run
    tries it again. Raises ArgumentError if `out` can't be written, before anything is measured.
    """
    out, facts = output_file("--out", out), stamp(device)
    done, reused, found = RowFile(out), 0, list[Row]()
    for job in track(jobs, "cases", console=console, transient=True, disable=not console.is_terminal):
        rows = [{**row, **facts} for row in wanted(job)]
        missing = [row for row in rows if row not in done]
        reused += len(rows) - len(missing)
        for row in measured_rows(job, missing, device, console.print) if missing else ():
            done.add(row)
        found += done.of(rows)
    if reused:
        console.print(f"{reused} of {len(found)} rows were in {out.name} from an earlier run in this environment at this commit")
    return found


def measured_rows(job: Job, missing: Sequence[Row], device: str, tell: Tell) -> Iterator[Row]:
    """Yield the missing rows of one case, whose inputs all contenders share."""
    left = {(row["backend"], row["direction"]): row for row in missing}

    def failed(name: str, error: Exception) -> Iterator[Row]:
        full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
        tell(f"{job.case.case} {name}: {OUT_OF_MEMORY if full else first_line(error)}")
        for key in list(left) if full else ():
            if name in ("inputs", key[0]):
                yield {**left.pop(key), "error": OUT_OF_MEMORY}

    samples: dict[bool, Sample] = {}
    try:
        problem = make_problem(job.case, device)
        for every_key in {c.every_key for c in job.contenders if c.checked}:
            samples[every_key] = sample(job.case, problem, job.rows, every_key, backward=job.directions != ("decode",))
    except Exception as error:
        yield from failed("inputs", error)
        return
    for contender in job.contenders:
        directions = [direction for direction in job.directions if (contender.name, direction) in left]
        refusal = contender.refuses(job.case)
        if refusal is not None:
            tell(f"{job.case.case} {contender.name}: {refusal}")
        elif directions:
            try:
                for direction, found in measured(job, contender, directions, problem, samples.get(contender.every_key), device, tell):
                    yield {**left.pop((contender.name, direction)), **found}
            except Exception as error:
                yield from failed(contender.name, error)
            if device == "cuda":
                gc.collect()  # an error's frames hold tensors
                torch.cuda.empty_cache()


def measured(
    job: Job, contender: Contender, directions: Sequence[str], problem: Problem, exact: Sample | None, device: str, tell: Tell
) -> Iterator[tuple[str, Row]]:
    """Yield each direction with what measuring it adds to its row, as soon as it is measured."""
    mae: tuple[float | None, float | None] = (None, None)
    more, ready = Row(), contender.prepare(problem)
    if contender.peer and "decode" not in directions and (lacking := lacks_gradients(ready.call, problem)):
        tell(f"{job.case.case} {contender.name}: its forward alone is measured: {lacking}")
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
        more["computes"] = "every key" if contender.every_key else "selection"
        started = time.perf_counter()
        contender.prepare(problem)  # the second time: the first compiles
        if device == "cuda":
            torch.cuda.synchronize()
        more["prepare_ms"] = round((time.perf_counter() - started) * 1e3, 3)
    errors = {"fwd": mae[0], "decode": mae[0], "bwd": mae[1], "fwd+bwd": max((x for x in mae if x is not None), default=None)}
    for direction in directions:
        work = work_of(direction, ready, problem)
        with torch.set_grad_enabled(direction not in ("fwd", "decode")):
            if contender.peer:
                work()  # what torch.compile does first is not its workspace
            space = timing.workspace_bytes(work, device)  # also the call before those that are timed
            if direction == "decode" and device == "cuda" and job.timing.streams == 1:
                times = timing.replayed_milliseconds(work, job.timing)
            else:
                times = timing.milliseconds(work, job.timing, device)
        yield direction, {**times.fields(), **more, "mae": errors[direction], "workspace_bytes": space}


def lacks_gradients(call: Attend, problem: Problem) -> str | None:
    """Return in one line why autograd does not go through a call to q, k and v, or None. Raises errors of memory."""
    leaves = [x.detach().requires_grad_() for x in problem[1:4]]
    try:
        torch.autograd.grad(call(*leaves), leaves, problem.do)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        return first_line(error)
    return None


def work_of(direction: str, ready: Ready, problem: Problem) -> Callable[[], Any]:
    """Return what is timed: the forward, the backward of a forward that has run, or both."""
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
