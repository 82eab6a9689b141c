"""Measure the kernel configs of each job and write the winners into the user's file: `nsa-sel tune` without the GPU and the terminal.

A config is timed as its whole direction on all problems of its kernel: a real and a random one where it handles many rows. It wins if it
is faster than the committed config by the geometric mean of the ratios of medians, surely faster on at least one problem, and surely
slower on none. Surely: its 80th percentile is below the other's 20th. A second round measures both again and must agree, because the
best of many noisy times is often luck.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from nsa_sel.bench.core.store import Row, first_line
from nsa_sel.bench.tune.resume import ContextLost, Measurements, Run
from nsa_sel.bench.tune.search_space import Job
from nsa_sel.bench.tune.tuned_file import beside, locked, rewrite, written
from nsa_sel.settings import tuned
from nsa_sel.settings.flags import COMMIT_FLAG
from nsa_sel.settings.schema import KernelConfig
from nsa_sel.settings.tuned import Key, Result, Timed

TOP = 5  # configs that a result lists
JOURNAL = ".jsonl"  # suffix of the file of all measurements
IDENTITY = ("key", "kernel", "problem", "rival", "config")  # of a measurement in the journal

Round = dict[str, dict[KernelConfig, Timed]]  # by problem
Times = tuple[float, float, float]  # median, 20th and 80th percentile, ms
Measure = Callable[[Job, str, KernelConfig], Times]  # on a problem of the job; raises for configs that can't run or give wrong results


class TimeIsUp(Exception):
    """What is left is for the next run."""


class Report(NamedTuple):
    """What a run did."""

    file: Path
    results: tuple[Result, ...]  # of the finished jobs
    left: int  # jobs
    taken: int  # measurements of this run, failures included
    skipped: tuple[str, ...]  # jobs whose committed config can't be measured, and why


def _row(job: Job, problem: str, config: KernelConfig, rival: KernelConfig | None) -> Row:
    """What identifies a measurement. `rival`: in the second round, the config that is compared with the committed one."""
    values = (job.key, job.kernel, problem, rival, config)
    return {field: msgspec.to_builtins(value) for field, value in zip(IDENTITY, values, strict=True)}


class _Timer:
    """Gives times from the journal, or measures and keeps them."""

    def __init__(self, run: Run, measure: Measure, total: int) -> None:
        self.run, self.measure, self.total = run, measure, total
        self.rows = Measurements(beside(run.stamp, JOURNAL), IDENTITY)
        self.rows.mend()
        self.taken = self.passed = 0  # `passed`: measurements that the progress counts as done

    def times(self, job: Job, problem: str, config: KernelConfig, rival: KernelConfig | None = None) -> Timed | str:
        """The config's times, or why it has none. Raises TimeIsUp, or ContextLost."""
        row = _row(job, problem, config, rival)
        if row not in self.rows:
            if self.run.is_over():
                raise TimeIsUp
            self.taken += 1
            self.run.tell(job.config_id(config), self.passed / self.total)
        self.passed += rival is None
        found = self.rows.measure(row, lambda row: self._measured(row, job, problem, config))
        return Timed(config, *found["times"]) if found.get("times") else str(found["error"])

    def _measured(self, row: Row, job: Job, problem: str, config: KernelConfig) -> Row:
        try:
            return {"state": "measured", "times": self.measure(job, problem, config), "error": None}
        except Exception as error:
            failed = {"state": "failed", "times": None, "error": first_line(error)}
            if isinstance(error, ContextLost):  # the config's fault: the next run skips it
                self.rows.add({**row, **failed})
                raise
            return failed


def tune(run: Run, jobs: Sequence[Job], measure: Measure) -> Report:
    """Measure what the journal lacks, and write the user's file after every job.

    Args:
        run: of `nsa-sel tune`.
        jobs: kernels with the configs to try.
        measure: takes one measurement.

    Raises:
        ArgumentError: another process tunes.
        ConfigError: the cache folder can't be written.
        ContextLost: a config broke the CUDA context. All measurements are kept.
    """
    with locked(run.stamp):
        timer = _Timer(run, measure, sum(job.most for job in jobs) or 1)
        results: dict[tuple[Key, str], list[Result]] = {}
        for result in written(run.stamp).results:
            results.setdefault((result.key, result.kernel), []).append(result)
        done: list[Result] = []
        skipped, left, begun = [], 0, 0
        for job in jobs:
            begun += job.most
            try:
                found = _tune_kernel(job, timer.times)
            except TimeIsUp:
                left += 1
                continue
            finally:
                timer.passed = begun
            if isinstance(found, str):
                skipped.append(f"{job.config_id(job.committed)}: {found}")
                continue
            done += found
            results[job.key, job.kernel] = found
            every = tuple(result for of_kernel in results.values() for result in of_kernel)
            rewrite(run.stamp, commit=os.environ.get(COMMIT_FLAG), results=every)
    return Report(tuned.file_of(run.stamp), tuple(done), left, timer.taken, tuple(skipped))


def _tune_kernel(job: Job, times: Callable[..., Timed | str]) -> list[Result] | str:
    """The result of each problem, with the one winner; or why there is none."""
    first, failed, errors = _first_round(job, times)
    if not first:
        return "; ".join(errors)
    second: Round = {}
    winner, verdict = None, "the committed config stays: no other is surely faster"
    ahead = [config for config in job.candidates if _is_ahead(first, config, job.committed)]
    if ahead:
        best = max(ahead, key=lambda config: _gain(first, config, job.committed))
        second = _second_round(job, best, reversed(first), times)
        verdict = f"the committed config stays: {job.config_id(best)} was faster in one of two rounds"
        if _is_ahead(second, best, job.committed):
            winner = best
    results = []
    for problem, timings in first.items():
        if winner:
            verdict = _victory((first, second), problem, winner, job.committed)
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


def _first_round(job: Job, times: Callable[..., Timed | str]) -> tuple[Round, Counter[str], list[str]]:
    """The times of all configs by problem, how many failed, and the problems that the committed config fails on, which judge nothing.

    A config that fails or is surely slower on one problem can't win: it is not measured on the next.
    """
    found: Round = {}
    failed, errors, left = Counter[str](), [], list(job.candidates)
    for problem in job.problems:
        committed = times(job, problem, job.committed)
        if isinstance(committed, str):
            errors.append(f"{problem}: {committed}")
            continue
        found[problem] = {job.committed: committed}
        for config in left:
            timed = times(job, problem, config)
            if isinstance(timed, str):
                failed[problem] += 1
            else:
                found[problem][config] = timed
        left = [config for config in left if config in found[problem] and not surely_faster(committed, found[problem][config])]
    return found, failed, errors


def _second_round(job: Job, best: KernelConfig, problems: Iterator[str], times: Callable[..., Timed | str]) -> Round:
    """The times of the committed and the best config, measured again; a problem on which one fails lacks it."""
    found: Round = {}
    for problem in problems:
        again = {config: times(job, problem, config, best) for config in (job.committed, best)}
        found[problem] = {config: timed for config, timed in again.items() if not isinstance(timed, str)}
    return found


def _victory(rounds: Sequence[Round], problem: str, winner: KernelConfig, committed: KernelConfig) -> str:
    """A winner's gains in both rounds, on one problem and over all of them."""
    each = " and ".join(f"{_gain({problem: found[problem]}, winner, committed):.3g}x" for found in rounds)
    if len(rounds[0]) == 1:
        return f"{each} faster, in two rounds"
    over = " and ".join(f"{_gain(found, winner, committed):.3g}x" for found in rounds)
    return f"{each} as fast, over {len(rounds[0])} problems {over} faster, in two rounds"


def _gain(found: Round, config: KernelConfig, committed: KernelConfig) -> float:
    """How many times faster a config is than the committed one: the geometric mean over the problems."""
    return math.prod(times[committed].ms_median / times[config].ms_median for times in found.values()) ** (1 / len(found))


def _is_ahead(found: Round, config: KernelConfig, committed: KernelConfig) -> bool:
    """The rule of one round: measured on all problems, faster by the mean, surely faster on one or more, surely slower on none."""
    if not all(config in times and committed in times for times in found.values()):
        return False
    pairs = [(times[config], times[committed]) for times in found.values()]
    surely = any(surely_faster(mine, theirs) for mine, theirs in pairs)
    return surely and _gain(found, config, committed) > 1 and not any(surely_faster(theirs, mine) for mine, theirs in pairs)


def surely_faster(fast: Timed, slow: Timed) -> bool:
    """Whether one is faster and the spreads do not overlap."""
    return fast.ms_p80 < slow.ms_p20
