"""Tuning kernel configs without a GPU: what is tried, what wins, and the command."""

from __future__ import annotations

from typing import Any

import pytest

from nsa_sel.backends.specs import launch_class, tile_columns
from nsa_sel.bench.tune import kernel_configs, tuned_file
from nsa_sel.bench.tune.kernel_configs import JOURNAL, Measure, Times, tune
from nsa_sel.bench.tune.resume import ContextLost, Run
from nsa_sel.bench.tune.search_space import CASES, PROBLEMS, SPACES, TUNED, Case, Job, configs, jobs
from nsa_sel.core.registry import backends
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for, shipped_configs
from nsa_sel.settings.schema import KernelConfig
from nsa_sel.settings.tuned import stamp_of
from tests.helpers.policy_cases import H200
from tests.helpers.tune_cases import CASE, SLOW, content, fastest, json_lines, ms, one_problem_job, some_jobs, times

pytestmark = pytest.mark.usefixtures("tuned_folder")
STAMP = stamp_of(H200)
RUN = Run(STAMP)


# The search space


def test_every_kernel_is_tuned_and_every_name_exists() -> None:
    committed = shipped_configs()["base.yaml"].kernels
    assert {space.kernel for space in SPACES} == {name.removesuffix("-widest").removesuffix("-wide") for name in committed}
    assert {name for space in SPACES for name in space.problems} == set(PROBLEMS)
    every_class = (CASE, Case(192, 128, 16, 1024), Case(256, 256, 16, 1024))
    assert {job.kernel for job in jobs(settings_for(H200), 90, every_class)} == set(committed)
    assert set(TUNED) <= set(backends())
    assert [name for name, backend in backends().items() if backend.sets_min_length] == ["triton-group"]


@pytest.mark.parametrize(
    ("Dk", "Dv", "size", "expected"),
    [
        (128, 128, 2, ""), (160, 16, 2, ""), (192, 128, 2, "-wide"), (256, 16, 2, "-wide"), (128, 192, 2, "-widest"),
        (256, 256, 2, "-widest"), (64, 64, 4, "-widest"),
    ],
)  # fmt: skip
def test_wide_tiles_have_configs_of_their_own(Dk: int, Dv: int, size: int, expected: str) -> None:
    assert launch_class(sum(tile_columns(Dk, Dv, size)), size) == expected


def test_the_space_is_the_one_that_was_asked_for() -> None:
    settings = settings_for(H200)
    for space in SPACES:
        found = list(configs(space, settings.kernels[space.kernel], 90))
        assert 0 < len(found) == len(set(found)) < 100
        assert settings.kernels[space.kernel] not in found
        for config in found:
            assert 16 <= config.block_l <= 256
            assert config.num_warps in (1, 2, 4, 8)
            assert config.num_stages in (1, 2, 3)
    ranges = next(space for space in SPACES if "real-ranges" in space.problems)
    assert {64, 128, 256} <= {config.block_l for config in configs(ranges, settings.kernels[ranges.kernel], 90)}


def test_gpus_before_sm_90_get_no_tma() -> None:
    for job in jobs(settings_for(H200), 80, CASES):
        assert "forward-blocks" not in job.kernel
        assert "dq-blocks" not in job.kernel
        assert {config.loads for config in job.candidates} == {"pointer"}


# What wins


def tuned_with(measure: Measure, job: Job | None = None) -> tuned.Result:
    return tune(RUN, [job or one_problem_job()], measure).results[0]


def test_the_fastest_wins_where_spreads_are_apart_in_both_rounds() -> None:
    job = one_problem_job()
    result = tuned_with(times)
    assert result.winner == fastest(job) == result.top[0].config
    assert result.verdict.endswith("x faster, in two rounds")
    assert [timed.ms_median for timed in result.top] == sorted(timed.ms_median for timed in result.top)
    assert len(result.top) == min(kernel_configs.TOP, 1 + len(job.candidates))
    assert (result.measured, result.failed) == (1 + len(job.candidates), 0)
    file, table = content(STAMP)
    assert file.results == (result,)
    assert table.kernels == {(job.key.shape, job.key.way): {job.kernel: fastest(job)}}


JOB = some_jobs()[0]
A, B = JOB.candidates[:2]
TWO = ("real-blocks", "random-blocks")
Given = dict[KernelConfig, Times]


def judged(real: Given, random: Given) -> tuple[list[tuple[str, KernelConfig]], Any]:
    """Two candidates on a real and a random problem, where the committed config takes 10 ms: what was measured, and the results."""
    assert JOB.problems == TWO
    seen: list[tuple[str, KernelConfig]] = []

    def measure(job: Job, problem: str, config: KernelConfig) -> Times:
        seen.append((problem, config))
        return (real if problem == "real-blocks" else random).get(config, SLOW)

    return seen, tune(RUN, [JOB._replace(candidates=(A, B))], measure).results


def test_the_best_over_both_problems_wins() -> None:
    seen, results = judged({A: ms(5), B: ms(6)}, {A: ms(9.95), B: ms(8)})
    assert [(result.problem, result.winner) for result in results] == [(problem, B) for problem in TWO]
    assert [result.top[0].config for result in results] == [A, B]
    assert "1.67x and 1.67x as fast, over 2 problems 1.44x and 1.44x faster, in two rounds" in results[0].verdict
    assert "1.25x and 1.25x as fast, over 2 problems 1.44x and 1.44x faster, in two rounds" in results[1].verdict
    assert set(seen[6:]) == {(problem, config) for problem in TWO for config in (JOB.committed, B)}
    file, table = content(STAMP)
    assert len(file.results) == 2
    assert table.kernels == {(JOB.key.shape, JOB.key.way): {JOB.kernel: B}}


@pytest.mark.parametrize(
    ("real", "random", "winner"),
    [
        ({A: ms(2)}, {A: ms(10.5)}, None),  # surely slower on one problem
        ({A: ms(2)}, {A: ms(10.5, 0.1)}, A),  # slower, but within the spread
        ({A: ms(9.7)}, {A: ms(11, 0.12)}, None),  # surely faster on one problem, perhaps slower by more on the other
        ({A: ms(9, 0.105)}, {A: ms(9, 0.105)}, None),  # spreads overlap
    ],
)
def test_what_may_be_slower_by_the_mean_or_is_on_one_problem_does_not_win(real: Given, random: Given, winner: KernelConfig | None) -> None:
    _, results = judged(real, random)
    assert {result.winner for result in results} == {winner}
    assert winner or all("no other is surely faster" in result.verdict for result in results)
    assert winner or content(STAMP)[1].kernels == {}


@pytest.mark.parametrize("lost_on", TWO)
def test_what_loses_in_the_second_round_does_not_win(lost_on: str) -> None:
    seen: list[tuple[str, KernelConfig]] = []

    def lucky(job: Job, problem: str, config: KernelConfig) -> Times:
        seen.append((problem, config))
        return ms(10.5) if problem == lost_on and seen.count((problem, A)) > 1 else SLOW if config == job.committed else ms(2)

    results = tune(RUN, [JOB._replace(candidates=(A,))], lucky).results
    assert [seen.count((problem, A)) for problem in TWO] == [2, 2]
    assert {result.winner for result in results} == {None}
    assert "was faster in one of two rounds" in results[0].verdict


def failing(broken: KernelConfig | None, error: Exception) -> Measure:
    """Times of all configs but one, or of none."""

    def measure(job: Job, problem: str, config: KernelConfig) -> Times:
        if broken in (None, config):
            raise error
        return times(job, problem, config)

    return measure


def test_what_fails_is_recorded_and_passed_over() -> None:
    best = fastest(one_problem_job())
    result = tuned_with(failing(best, RuntimeError("out of resource: shared memory\nand more")))
    assert result.winner not in (None, best)
    assert result.failed == 1
    failed = [entry["error"] for entry in json_lines(tuned_file.beside(STAMP, JOURNAL)) if entry["state"] == "failed"]
    assert failed == ["RuntimeError: out of resource: shared memory"]


def test_a_lost_context_ends_the_run_and_the_next_one_passes_over() -> None:
    job = one_problem_job()
    crash = failing(job.candidates[1], ContextLost("an illegal memory access was encountered"))
    with pytest.raises(ContextLost):
        tune(RUN, [job], crash)
    result = tuned_with(crash)
    assert result.failed == 1
    assert result.winner != job.candidates[1]
