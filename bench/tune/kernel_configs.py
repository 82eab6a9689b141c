"""Measure kernel configs and write the winners into the user's file: `nsa-sel tune` without the terminal.

A config is timed as its whole direction on all problems of its kernel (a real and a random one if it handles many
rows), after its results were compared with those of the committed config. It wins if it is faster than the committed
one by the geometric mean of the ratios of medians, surely faster on at least one problem, and surely slower on none.
Surely: its 80th percentile is below the other's 20th. A second round measures both again and must agree, because the
best of many noisy times is often luck.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from nsa_sel.bench.core import cases, timing
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import WrongResult
from nsa_sel.bench.tune.search_space import BLOCK, PROBLEMS, TUNED, Case, Job, committed_settings, jobs
from nsa_sel.bench.tune.tuned_file import Measurements, Run, locked, rewrite, written
from nsa_sel.core import registry
from nsa_sel.core.call import Call, device_info
from nsa_sel.core.decide import decide
from nsa_sel.core.request import Request
from nsa_sel.selection import Selection
from nsa_sel.settings import tuned
from nsa_sel.settings.flags import COMMIT_FLAG
from nsa_sel.settings.schema import KernelConfig, Settings
from nsa_sel.settings.tuned import Result, Timed
from nsa_sel.telemetry import events
from nsa_sel.testing import new_memory_is_nan

TOP = 5  # configs that a result lists
ROWS, IDENTITY = ".jsonl", ("key", "kernel", "problem", "round", "config")  # of the file of all measurements
EVENTS = 1000  # of a call, at most
REP, QUICK_REP, QUICK_SECONDS = 20.0, 10.0, 300.0  # ms of timed calls per config; time limit of `tune_for` per backend
# Two configs sum in different orders. Allowed error, in units of eps: of the largest value, and of the mean.
ROUNDINGS = {torch.float16: (8, 4), torch.bfloat16: (8, 4), torch.float32: (64, 32), torch.float64: (64, 32)}

Round = dict[str, dict[KernelConfig, Timed]]  # by problem
Times = tuple[float, float, float]  # median, 20th and 80th percentile, ms
Measure = Callable[[Job, str, KernelConfig], Times]  # on a problem of the job; raises for configs that can't run or give wrong results


class TimeIsUp(Exception):
    """Raised when time is up. The next run continues."""


class Report(NamedTuple):
    """Summary of a run."""

    file: Path
    results: tuple[Result, ...]  # of the finished jobs
    left: int  # jobs
    taken: int  # measurements of this run, failures included
    skipped: tuple[str, ...]  # jobs whose committed config can't be measured, and why


# Selection of the fastest config


def tune(run: Run, jobs: Sequence[Job], measure: Measure) -> Report:
    """Measure what the file of rows lacks, and write the user's file after every job.

    Args:
        run: of `nsa-sel tune`.
        jobs: kernels with the configs to try.
        measure: takes one measurement.

    Raises:
        ArgumentError: another process tunes.
        ConfigError: the cache folder can't be written.
        ContextLost: a config broke the CUDA context. All measurements are kept.
    """
    done, skipped, left, taken, begun, total = list[Result](), list[str](), 0, 0, 0, sum(job.most for job in jobs) or 1
    with locked(run.stamp):
        rows = Measurements(run.stamp, ROWS, IDENTITY)

        def times(job: Job, problem: str, config: KernelConfig, round: int) -> Timed | str:
            """Return a config's times, or why it has none."""
            nonlocal taken
            values = (job.key, job.kernel, problem, round, config)
            row: Row = {field: msgspec.to_builtins(value) for field, value in zip(IDENTITY, values, strict=True)}
            if row not in rows:
                if run.is_over():
                    raise TimeIsUp
                taken += 1
                run.tell(job.config_id(config), begun / total)
            found = rows.measure(row, lambda row: {"times": measure(job, problem, config)})
            return Timed(config, *found["times"]) if "times" in found else str(found["error"])

        for job in jobs:
            try:
                found = tune_kernel(job, times)
            except TimeIsUp:
                left += 1
                continue
            finally:
                begun += job.most
            if isinstance(found, str):
                skipped.append(f"{job.config_id(job.committed)}: {found}")
                continue
            done += found
            others = [result for result in written(run.stamp).results if (result.key, result.kernel) != (job.key, job.kernel)]
            rewrite(run.stamp, commit=os.environ.get(COMMIT_FLAG), results=(*others, *found))
    return Report(tuned.file_of(run.stamp), tuple(done), left, taken, tuple(skipped))


def tune_kernel(job: Job, times: Callable[[Job, str, KernelConfig, int], Timed | str]) -> list[Result] | str:
    """Return the result of each problem, with the one winner, or why there is none.

    A config that fails or is surely slower on one problem is not measured on the next. A problem on which the committed
    config fails judges nothing.
    """
    first, second, left = Round(), Round(), list(job.candidates)
    failed, errors = Counter[str](), list[str]()
    for problem in job.problems:
        committed = times(job, problem, job.committed, 1)
        if isinstance(committed, str):
            errors.append(f"{problem}: {committed}")
            continue
        first[problem] = {job.committed: committed}
        for config in left:
            timed = times(job, problem, config, 1)
            if isinstance(timed, str):
                failed[problem] += 1
            else:
                first[problem][config] = timed
        left = [config for config in left if config in first[problem] and not surely_faster(committed, first[problem][config])]
    if not first:
        return "; ".join(errors)
    winner, verdict = None, "the committed config stays: no other is surely faster"
    ahead = [config for config in left if is_ahead(first, config, job.committed)]
    if ahead:
        best = max(ahead, key=lambda config: gain(first, config, job.committed))
        for problem in reversed(first):
            again = {config: times(job, problem, config, 2) for config in (job.committed, best)}
            second[problem] = {config: timed for config, timed in again.items() if not isinstance(timed, str)}
        verdict = f"the committed config stays: {job.config_id(best)} was faster in one of two rounds"
        if is_ahead(second, best, job.committed):
            winner = best
            gains = " and ".join(f"{gain(found, best, job.committed):.3g}x" for found in (first, second))
            verdict = f"{gains} faster on {len(first)} problem{'s' * (len(first) > 1)}, in two rounds"
    results = []
    for problem, timings in first.items():
        fastest = sorted(timings.values(), key=lambda timed: timed.ms_median)
        results.append(
            Result(
                key=job.key, kernel=job.kernel, problem=problem, committed=timings[job.committed], winner=winner,
                verdict="; ".join((verdict, *(f"not judged on {error}" for error in errors))),
                top=tuple(timed for rank, timed in enumerate(fastest) if rank < TOP or timed.config == winner),
                measured=len(timings), failed=failed[problem],
            )
        )  # fmt: skip
    return results


def gain(found: Round, config: KernelConfig, committed: KernelConfig) -> float:
    """Return how many times faster a config is than the committed one: the geometric mean over the problems."""
    return math.prod(times[committed].ms_median / times[config].ms_median for times in found.values()) ** (1 / len(found))


def is_ahead(found: Round, config: KernelConfig, committed: KernelConfig) -> bool:
    """Apply the rule of one round: measured on all problems, faster by the mean, surely faster on one or more, surely
    slower on none.
    """
    if not all(config in times and committed in times for times in found.values()):
        return False
    ahead = [surely_faster(times[config], times[committed]) for times in found.values()]
    behind = [surely_faster(times[committed], times[config]) for times in found.values()]
    return any(ahead) and gain(found, config, committed) > 1 and not any(behind)


def surely_faster(fast: Timed, slow: Timed) -> bool:
    """Return True if one is faster and the spreads do not overlap."""
    return fast.ms_p80 < slow.ms_p20


# Measuring


class Runner:
    """Time kernel configs on one device, whole calls including plans. Keeps the last problem and the committed config's
    last results.

    Args:
        device: where the kernels run.
        settings: with the committed configs.
        rep: ms of timed calls per config.
    """

    def __init__(self, device: torch.device, settings: Settings, rep: float) -> None:
        # Without the flags that override configs, which would make all candidates equal.
        self.settings = msgspec.structs.replace(settings, block_l=None, block_d=None, block_dv=None, triton_double_buffer=None)
        self.device, self.rep = device, rep
        self.prepared: tuple[tuple[Case, str], Call, Tensor] | None = None
        self.expected: tuple[object, tuple[Tensor, ...]] | None = None  # the job's committed config on a problem, and its results

    @torch.no_grad()
    def __call__(self, job: Job, problem: str, config: KernelConfig) -> Times:
        """Return the median, 20th and 80th percentile in ms.

        Raises:
            WrongResult: the config's results are not those of the committed one.
        """
        try:
            if self.prepared is None or self.prepared[0] != (job.case, problem):
                self.prepared = self.expected = None  # frees memory first
                self.prepared = (job.case, problem), *prepare(job, problem, self.device, self.settings)
            of = (job.key, job.kernel, problem)
            if self.expected is None or self.expected[0] != of:
                self.expected = of, checked_results(self._work(job, job.committed), job.config_id(job.committed))
            work = self._work(job, config)
            check_agreement(checked_results(work, job.config_id(config)), self.expected[1])
            if job.key.direction == "decode" and self.device.type == "cuda":
                return timing.replayed_milliseconds(work, timing.Timing(self.rep))[:3]
            return timing.milliseconds(work, timing.Timing(self.rep), self.device.type)[:3]
        except torch.OutOfMemoryError:
            self.prepared = self.expected = None
            torch.cuda.empty_cache()
            raise

    def _work(self, job: Job, config: KernelConfig) -> Callable[..., tuple[Tensor, ...]]:
        """Return one whole call with a config. With debug=True, events name the configs that were used."""
        assert self.prepared is not None
        module, (_, given, do) = registry.load(job.key.backend), self.prepared
        settings = msgspec.structs.replace(self.settings, kernels={**self.settings.kernels, job.kernel: config})
        forward_results = module.forward(given) if job.key.direction == "backward" else None

        def work(debug: bool = False) -> tuple[Tensor, ...]:
            old = given.selection
            selection = Selection(old.ranges, old.block_size, old.max_length, disjoint=True)  # without plans
            call = replace(given, settings=msgspec.structs.replace(settings, debug_triton=debug), selection=selection)
            return module.forward(call) if forward_results is None else module.backward(call, *forward_results, do, None)

        return work


def prepare(job: Job, name: str, device: torch.device, settings: Settings) -> tuple[Call, Tensor]:
    """Return random q, k, v with a selection of L keys per row (all keys if L is more), and the gradient of o."""
    problem, sizes = PROBLEMS[name], job.case
    n = min(max(1, sizes.L // BLOCK), problem.S_kv // BLOCK)
    kind = "real" if problem.real else "random"
    case = cases.Case("tune", kind, problem.B, problem.S, problem.S_kv, problem.G, sizes.h, sizes.Dk, sizes.Dv, n, BLOCK, sizes.dtype)
    q, k, v, do = cases.make_inputs(case, device)
    selection = cases.make_selection(case, device)
    if not problem.blocks:
        selection = Selection(selection.ranges, None, n * BLOCK, disjoint=True)
    lengths = table = None
    if problem.page:  # pages lie in memory in reverse order
        B, _, S_kv, _ = k.shape
        table = torch.arange(B * S_kv // problem.page, dtype=torch.int32, device=device).flip(0).view(B, -1)
        lengths = torch.full((B,), S_kv, dtype=torch.int32, device=device)
        pages = (torch.unflatten(x.transpose(1, 2), 1, (-1, problem.page)).flatten(0, 1) for x in (k, v))
        k, v = (x.flip(0).contiguous().transpose(1, 2) for x in pages)  # [pages,G,page,D]
    call = Call(q, k, v, selection, None, case.Dk**-0.5, settings, device_info(device))
    return replace(call, lengths=lengths, block_table=table), do


def checked_results(work: Callable[..., tuple[Tensor, ...]], config: str) -> tuple[Tensor, ...]:
    """Return the results on memory that held NaN.

    Raises WrongResult unless they are equal twice and `config` was used.
    """
    listener, level = BufferingHandler(EVENTS), events.LOGGER.level
    with new_memory_is_nan(strict=True):
        events.LOGGER.addHandler(listener)
        events.LOGGER.setLevel(logging.INFO)
        try:
            results = work(debug=True)
        finally:
            events.LOGGER.removeHandler(listener)
            events.LOGGER.setLevel(level)
        again = work()
    used = [record.__dict__["nsa_sel"]["chosen"] for record in listener.buffer if record.getMessage() == "sel.triton.kernel"]
    if config not in used:
        raise WrongResult(f"this problem does not use {config}; it used {', '.join(used)}")
    if not all(torch.equal(a, b) for a, b in zip(results, again, strict=True)):
        raise WrongResult(f"{config} does not give the same results twice")
    return results


def check_agreement(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Raise WrongResult unless both differ by at most `ROUNDINGS`, and are -inf (lse of empty rows) in the same
    elements.
    """
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        empty, (most, mean), eps = b == float("-inf"), ROUNDINGS[a.dtype], torch.finfo(a.dtype).eps
        if not torch.equal(a == float("-inf"), empty):
            raise WrongResult(f"result {number} is -inf in other elements than with the committed config")
        error, size = (torch.where(empty, 0.0, x).abs() for x in (a.float() - b.float(), b.float()))
        if not bool(error.isfinite().all()):
            raise WrongResult(f"result {number} has values that were not written, or are not finite")
        if error.max() > most * eps * size.max() or error.mean() > mean * eps * size.mean():
            words = f"largest error {float(error.max()):.3g}, mean {float(error.mean()):.3g}, allowed {most} and {mean} roundings"
            raise WrongResult(f"result {number} differs from the committed config's: {words}")


def tune_for(request: Request, device: torch.device) -> None:
    """Tune the backends that would run a request, near the committed configs; later calls of this process use the
    results.

    Args:
        request: the sizes.
        device: a CUDA device.

    Raises:
        BackendError: no backend may run the request.
        ArgumentError, ConfigError, ContextLost: as `tune`.
    """
    facts = device_info(device)
    decision, settings = decide(request, facts), committed_settings(facts)
    case = Case(request.Dk, request.Dv, request.h, request.max_length, request.dtype)
    try:
        for backend in TUNED:
            if backend in (decision.forward, decision.backward):
                found = jobs(settings, facts.sm, (case,), backend, quick=True)
                with torch.cuda.device(device):
                    runner = Runner(torch.device("cuda", torch.cuda.current_device()), settings, QUICK_REP)
                    tune(Run(tuned.stamp_of(facts), deadline=time.monotonic() + QUICK_SECONDS), found, runner)
    finally:
        tuned.forget()
