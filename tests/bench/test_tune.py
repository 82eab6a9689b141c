"""Tuning without a GPU: what is tried, what wins, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from nsa_sel.backends.specs import launch_class, tile_columns
from nsa_sel.bench.tune import tune, tune_command, tune_runner
from nsa_sel.bench.tune.tune import ContextLost, journal_of
from nsa_sel.bench.tune.tune_command import Done
from nsa_sel.bench.tune.tune_runner import WrongResult
from nsa_sel.bench.tune.tune_space import CASES, PROBLEMS, SPACES, Case, Job, jobs, launches, near
from nsa_sel.cli.app import app
from nsa_sel.core.request import DeviceInfo
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for, shipped_configs
from nsa_sel.settings.schema import KernelConfig
from nsa_sel.settings.tuned import stamp_of
from tests.helpers.policy_cases import H200, RTX4090
from tests.helpers.tune_cases import CASE, SLOW, lone, some_jobs, times

STAMP = stamp_of(H200)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("NSA_SEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tuned"


# The space


def test_every_kernel_is_tuned_and_every_name_is_known() -> None:
    committed = shipped_configs()["base.yaml"].kernels
    assert {space.kernel for space in SPACES} == {name.removesuffix("-widest").removesuffix("-wide") for name in committed}
    assert {name for space in SPACES for name in space.problems} == set(PROBLEMS)
    assert {job.kernel for job in jobs(settings_for(H200), 90, (CASE, Case(192, 128, 16, 1024), Case(256, 256, 16, 1024)))} == set(
        committed
    )
    sizes = {(128, 128): "", (160, 16): "", (192, 128): "-wide", (256, 16): "-wide", (128, 192): "-widest", (256, 256): "-widest"}
    assert {dims: launch_class(sum(tile_columns(*dims, 2)), 2) for dims in sizes} == sizes
    assert launch_class(sum(tile_columns(64, 64, 4)), 4) == "-widest"


def test_the_space_is_the_one_that_was_asked_for() -> None:
    settings = settings_for(H200)
    for space in SPACES:
        found = list(launches(space, settings.kernels[space.kernel], 90))
        assert found
        assert len(found) == len(set(found)) < 100
        assert settings.kernels[space.kernel] not in found
        for config in found:
            assert 16 <= config.block_l <= 256
            assert config.num_warps in (1, 2, 4, 8)
            assert config.num_stages in (1, 2, 3)
    ranges = next(space for space in SPACES if "real-ranges" in space.problems)
    assert {64, 128, 256} <= {config.block_l for config in launches(ranges, settings.kernels[ranges.kernel], 90)}


def test_older_gpus_have_no_bulk_copies() -> None:
    for job in jobs(settings_for(H200), 80, CASES):
        assert "forward-blocks" not in job.kernel
        assert "dq-blocks" not in job.kernel
        assert {config.loads for config in job.candidates} == {"pointer"}


def test_quick_keeps_the_neighbours_of_the_committed_launch() -> None:
    base = KernelConfig(64, 4, 2, 64)
    assert near(KernelConfig(32, 4, 2, 64), base)
    assert near(KernelConfig(64, 4, 3, 64), base)
    assert near(KernelConfig(64, 4, 2, 64, "tma"), base)
    assert not near(base, base)
    assert not near(KernelConfig(16, 4, 2, 64), base)
    assert not near(KernelConfig(32, 8, 2, 64), base)
    assert all(1 <= len(job.candidates) <= 9 for job in some_jobs())


def test_backend_and_direction_narrow_it() -> None:
    found = jobs(settings_for(H200), 90, (CASE,), "triton-tile", "backward")
    assert {(job.key.backend, job.key.way) for job in found} == {("triton-tile", "backward")}
    assert [job.kernel for job in found] == ["triton-tile/dq", "triton-tile/dkdv"]


# What wins


def tuned_with(measure: tune.Measure, job: Job | None = None) -> tuned.Result:
    return tune.run([job or lone()], STAMP, measure).results[0]


def test_the_fastest_wins_where_spreads_are_apart_in_both_rounds() -> None:
    job = lone()
    result = tuned_with(times)
    best = min(job.candidates, key=lambda config: times(job, "real-blocks", config)[0])
    assert result.winner == best == result.top[0].config
    assert result.verdict.endswith("x faster, in two rounds")
    assert [launch.ms_median for launch in result.top] == sorted(launch.ms_median for launch in result.top)
    assert len(result.top) == min(tune.TOP, 1 + len(job.candidates))
    assert (result.measured, result.failed) == (1 + len(job.candidates), 0)
    file, table = tuned.parse(tuned.file_of(STAMP).read_bytes(), "file")
    assert file.results == (result,)
    assert table.kernels == {(job.key.shape, job.key.way): {job.kernel: best}}


TWO = ("real-blocks", "random-blocks")


def judged(real: dict[KernelConfig, tune.Times], random: dict[KernelConfig, tune.Times]) -> tuple[list[tuple[str, KernelConfig]], Any]:
    """Two candidates on a real and a random problem, where the committed launch takes 10 ms: what was measured, and the results."""
    job = some_jobs()[0]
    job = job._replace(candidates=job.candidates[:2])
    assert job.problems == TWO
    seen: list[tuple[str, KernelConfig]] = []

    def measure(job: Job, problem: str, config: KernelConfig) -> tune.Times:
        seen.append((problem, config))
        return (real if problem == "real-blocks" else random).get(config, SLOW)

    return seen, tune.run([job], STAMP, measure).results


def near_ms(ms: float, by: float = 0.01) -> tune.Times:
    return ms, (1 - by) * ms, (1 + by) * ms


def test_the_best_over_both_problems_wins() -> None:
    a, b = some_jobs()[0].candidates[:2]
    seen, results = judged({a: near_ms(5), b: near_ms(6)}, {a: near_ms(9.95), b: near_ms(8)})
    assert [(result.problem, result.winner) for result in results] == [(problem, b) for problem in TWO]
    assert [result.top[0].config for result in results] == [a, b]
    assert "1.67x and 1.67x as fast, over 2 problems 1.44x and 1.44x faster, in two rounds" in results[0].verdict
    assert "1.25x and 1.25x as fast, over 2 problems 1.44x and 1.44x faster, in two rounds" in results[1].verdict
    second = seen[6:]
    assert sorted(second, key=str) == sorted([(problem, config) for problem in TWO for config in (some_jobs()[0].committed, b)], key=str)
    file, table = tuned.parse(tuned.file_of(STAMP).read_bytes(), "file")
    assert len(file.results) == 2
    assert table.kernels == {(results[0].key.shape, results[0].key.way): {results[0].kernel: b}}


def test_what_loses_on_random_blocks_does_not_win_however_fast_it_is_on_text() -> None:
    a, b = some_jobs()[0].candidates[:2]
    _, results = judged({a: near_ms(2)}, {a: near_ms(10.5)})
    assert {result.winner for result in results} == {None}
    journal_of(STAMP).unlink()
    _, results = judged({a: near_ms(2)}, {a: near_ms(10.5, 0.1)})  # slower, but within the spread
    assert {result.winner for result in results} == {a}


def test_what_is_slower_by_the_mean_does_not_win() -> None:
    """Surely faster on one problem, and perhaps slower by more on the other."""
    a = some_jobs()[0].candidates[0]
    _, results = judged({a: near_ms(9.7)}, {a: near_ms(11, 0.12)})
    assert {result.winner for result in results} == {None}


def test_what_loses_in_the_second_round_does_not_win() -> None:
    job = some_jobs()[0]
    a = job.candidates[0]
    seen: list[tuple[str, KernelConfig]] = []

    def slower_later(job: Job, problem: str, config: KernelConfig) -> tune.Times:
        seen.append((problem, config))
        if config == job.committed or problem == "random-blocks":
            return near_ms(10.5) if seen.count((problem, a)) > 1 and config == a else SLOW
        return near_ms(2)

    results = tune.run([job._replace(candidates=(a,))], STAMP, slower_later).results
    assert seen.count(("random-blocks", a)) == 2
    assert {result.winner for result in results} == {None}
    assert "was faster in one of two rounds" in results[0].verdict


def test_what_loses_on_the_first_problem_is_not_measured_on_the_second() -> None:
    a, b = some_jobs()[0].candidates[:2]
    seen, results = judged({a: near_ms(11), b: near_ms(9)}, {a: near_ms(1)})
    assert ("random-blocks", a) not in seen
    assert ("random-blocks", b) in seen
    assert [result.measured for result in results] == [3, 2]
    assert {result.winner for result in results} == {b}


def test_a_problem_that_does_not_fit_does_not_judge() -> None:
    job = some_jobs()[0]

    def small(job: Job, problem: str, config: KernelConfig) -> tune.Times:
        if problem == "random-blocks":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return times(job, problem, config)

    (result,) = tune.run([job], STAMP, small).results
    assert result.problem == "real-blocks"
    assert result.winner is not None
    assert result.verdict.endswith("not judged on random-blocks: OutOfMemoryError: CUDA out of memory")


def test_the_journal_tells_problems_apart() -> None:
    job = some_jobs()[0]
    tune.run([job], STAMP, times)
    entries = [json.loads(line) for line in journal_of(STAMP).read_text().splitlines()]
    assert {entry["problem"] for entry in entries} == set(TWO)
    only = tune.run([job._replace(problems=TWO[1:])], STAMP, times)
    assert {result.problem for result in only.results} == {"random-blocks"}
    assert [result.problem for result in tune.written(STAMP).results] == ["random-blocks"]  # no winner of another judgement stays


def test_overlapping_spreads_leave_the_committed_launch() -> None:
    result = tuned_with(lambda job, problem, config: SLOW if config == job.committed else (9.0, 8.0, 9.95))
    assert result.winner is None
    assert "no other is faster with its spread" in result.verdict
    assert tuned.parse(tuned.file_of(STAMP).read_bytes(), "file")[1].kernels == {}


def test_luck_in_one_round_is_not_enough() -> None:
    seen: list[KernelConfig] = []

    def lucky(job: Job, problem: str, config: KernelConfig) -> tune.Times:
        seen.append(config)
        return SLOW if config == job.committed or seen.count(config) > 1 else (5.0, 4.9, 5.1)

    result = tuned_with(lucky)
    assert result.winner is None
    assert "was faster in one of two rounds" in result.verdict
    assert len(seen) == len(lone().candidates) + 3


def test_a_new_rival_is_measured_beside_the_committed_launch_of_its_own_hour() -> None:
    job = lone()
    first, second = job.candidates[:2]
    hour = [1.0]

    def drifting(job: Job, problem: str, config: KernelConfig) -> tune.Times:
        ms = {first: 8.0, second: 7.0}.get(config, 10.0) * hour[0]
        return ms, 0.99 * ms, 1.01 * ms

    assert tuned_with(drifting, job._replace(candidates=(first,))).winner == first
    hour[0] = 0.5  # all is faster now, the committed launch too
    assert (
        tuned_with(lambda job, problem, config: drifting(job, problem, job.committed), job._replace(candidates=(first, second))).winner
        is None
    )


def test_what_fails_is_recorded_and_passed_over() -> None:
    job = lone()
    best = min(job.candidates, key=lambda config: times(job, "real-blocks", config)[0])

    def broken(job: Job, problem: str, config: KernelConfig) -> tune.Times:
        if config == best:
            raise RuntimeError("out of resource: shared memory\nand more")
        return times(job, problem, config)

    result = tuned_with(broken)
    assert result.winner not in (None, best)
    assert result.failed == 1
    lines = [json.loads(line) for line in journal_of(STAMP).read_text().splitlines()]
    assert [line["error"] for line in lines if line["state"] == "failed"] == ["RuntimeError: out of resource: shared memory"]


def test_a_committed_launch_that_fails_leaves_its_kernel_out() -> None:
    def broken(job: Job, problem: str, config: KernelConfig) -> tune.Times:
        raise WrongResult("this problem does not use it")

    report = tune.run(some_jobs()[:1], STAMP, broken)
    assert report.results == ()
    assert "WrongResult: this problem does not use it" in report.skipped[0]
    assert "passed over: triton-group" in tune_command.text(Done(report, {}))
    assert not tuned.file_of(STAMP).exists()


def test_a_lost_context_ends_the_run_and_the_next_one_passes_over() -> None:
    job = lone()
    fatal = job.candidates[1]

    def crash(job: Job, problem: str, config: KernelConfig) -> tune.Times:
        if config == fatal:
            raise ContextLost("an illegal memory access was encountered")
        return times(job, problem, config)

    with pytest.raises(ContextLost):
        tune.run([job], STAMP, crash)
    result = tune.run([job], STAMP, crash).results[0]
    assert result.failed == 1
    assert result.winner != fatal


# The command


def test_winners_must_beat_the_committed_launches_not_a_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "provenance: mine\nkernels: {triton-tile/dq: {loads: pointer, block_l: 16, num_warps: 1, num_stages: 1}}\n"
    )
    monkeypatch.setenv("NSA_SEL_CONFIG", str(tmp_path / "own.yaml"))
    assert settings_for(H200).kernels["triton-tile/dq"].block_l == 16
    shipped = shipped_configs()
    assert tune_command.committed_settings(H200).kernels == {**shipped["base.yaml"].kernels, **shipped["sm90_h200.yaml"].kernels}


def test_it_says_when_what_is_found_will_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(device: DeviceInfo) -> str | None:
        return tune_command.Plan(device, settings_for(device), [], 0).note

    assert note(H200) is None
    assert "ADR-2025-08-M4-02 keeps Triton off" in str(note(RTX4090))
    monkeypatch.setenv("NSA_TRITON_SEL_FORCE", "1")
    assert note(RTX4090) is None
    monkeypatch.setenv("NSA_SEL_AUTOTUNE", "off")
    assert "is ignored" in str(note(H200))


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_without_a_gpu_it_says_what_is_missing() -> None:
    result = invoke()
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert "allowed: a CUDA device. Remedy: Triton needs a GPU; --dry-run lists the work." in result.output


def test_a_dry_run_needs_no_gpu() -> None:
    result = invoke("--dry-run", "--backend", "triton-tile", "--direction", "backward", "--quick")
    assert result.exit_code == 0
    assert "triton-tile/dq:tma-L64-R64-w4-s2" in result.output
    assert "triton-tile/forward" not in result.output
    document = json.loads(invoke("--dry-run", "--json", "--L", "256", "--L", "512", "--h", "3", "--dtype", "float16").stdout)
    assert {(job["key"]["L"], job["key"]["h"], job["key"]["dtype"]) for job in document["jobs"]} == {
        (256, 4, "float16"),
        (512, 4, "float16"),
    }
    assert document["launches"] == sum(job["launches"] for job in document["jobs"])
    assert len(json.loads(invoke("--dry-run", "--json").stdout)["jobs"]) == len(CASES) * len(SPACES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", "numba"), "allowed: triton-group, triton-tile, triton-block, triton-token"),
        (("--backend", "triton-block", "--direction", "decode"), "--direction is 'decode'"),
        (("--dtype", "float64"), "--dtype is float64; allowed: float16, bfloat16, float32"),
    ],
)
def test_bad_options_are_named(arguments: tuple[str, ...], words: str) -> None:
    result = invoke("--dry-run", *arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_the_command_measures_and_its_process_uses_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune_command, "device_info", lambda device: H200)
    monkeypatch.setattr(tune_runner, "Runner", lambda device, settings, time: times)
    result = invoke("--quick", "--backend", "triton-group", "--direction", "forward")
    assert result.exit_code == 0, result.output
    assert "x faster, in two rounds" in result.output
    assert str(tuned.file_of(stamp_of(H200))) in result.output.replace("\n", "")
    assert tuned.in_force(H200) is not None
    again = json.loads(invoke("--quick", "--backend", "triton-group", "--direction", "forward", "--json").stdout)
    assert (again["taken"], again["left"]) == (0, 0)
    assert again["results"][0]["key"] == msgspec.to_builtins(some_jobs()[0].key)
