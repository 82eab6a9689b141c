"""Tuning without a GPU: what is tried, what wins, what is kept, and what a killed run leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from nsa_sel import tuned
from nsa_sel.backends.specs import launch_class, tile_columns
from nsa_sel.bench import tune, tune_command, tune_runner
from nsa_sel.bench.tune import ContextLost, Entry, Journal, journal_of
from nsa_sel.bench.tune_command import Done
from nsa_sel.bench.tune_runner import WrongResult
from nsa_sel.bench.tune_space import CASES, PROBLEMS, SPACES, Case, Job, jobs, launches, near
from nsa_sel.cli import app
from nsa_sel.config import KernelConfig, settings_for, shipped_configs
from nsa_sel.errors import ArgumentError, ConfigError
from nsa_sel.request import DeviceInfo
from nsa_sel.tuned import TunedFile, stamp_of
from tests.policy_cases import H200, RTX4090
from tests.test_layering import ROOT
from tests.tune_cases import CASE, SLOW, some_jobs, times, write

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


def lone() -> Job:
    """A kernel that one problem judges."""
    job = some_jobs()[0]
    return job._replace(problems=job.problems[:1])


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
    assert table.launches == {(job.key.shape, job.key.way): {job.kernel: best}}


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
    assert table.launches == {(results[0].key.shape, results[0].key.way): {results[0].kernel: b}}


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
    assert tuned.parse(tuned.file_of(STAMP).read_bytes(), "file")[1].launches == {}


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


# What is kept


def test_nothing_is_measured_twice() -> None:
    first = tune.run(some_jobs(), STAMP, times)
    again = tune.run(some_jobs(), STAMP, lambda job, problem, config: pytest.fail("measured again"))
    assert again.results == first.results
    assert (again.taken, again.left) == (0, 0)


def test_runs_add_to_the_file() -> None:
    group, tile = some_jobs(), some_jobs("triton-tile")
    tune.run(group, STAMP, times)
    tune.run(tile, STAMP, times)
    file, _ = tuned.parse(tuned.file_of(STAMP).read_bytes(), "file")
    assert [(result.kernel, result.problem) for result in file.results] == [
        (job.kernel, problem) for job in (*group, *tile) for problem in job.problems
    ]
    tuned.file_of(STAMP).write_text("{")  # made again from the journal
    tune.run([*group, *tile], STAMP, lambda job, problem, config: pytest.fail("measured again"))
    assert tuned.parse(tuned.file_of(STAMP).read_bytes(), "file")[0] == file


def test_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(tune.time, "monotonic", lambda: next(clock))
    found = some_jobs()
    report = tune.run(found, STAMP, times, seconds=40)
    finished = {(result.key, result.kernel) for result in report.results}
    assert 0 < len(finished) < len(found)
    assert report.left == len(found) - len(finished)
    assert f"time is up, {report.left} kernels are left" in tune_command.text(Done(report, {}))
    monkeypatch.undo()


@pytest.mark.parametrize("tail", ['{"key": {"back', '{"state":', "\0\0\0"])
def test_a_torn_line_is_dropped_and_an_unreadable_one_passed_over(tail: str) -> None:
    job = lone()
    tune.run([job], STAMP, times)
    journal = journal_of(STAMP)
    whole = journal.read_text()
    journal.write_text(whole + "no json\n" + tail)
    assert tune_command._known(H200, [job]) == 1 + len(job.candidates)
    assert journal.read_text().endswith(tail)  # whoever only looks changes nothing
    tune.run([job], STAMP, lambda job, problem, config: pytest.fail("measured again"))
    assert journal.read_text() == whole + "no json\n"
    assert Journal(journal).unreadable == 1


def test_a_launch_that_the_process_dies_of_is_passed_over_and_one_that_was_interrupted_is_not() -> None:
    job = lone()

    def stopped(job: Job, problem: str, config: KernelConfig) -> tune.Times:
        raise KeyboardInterrupt

    for _ in range(tune.DEATHS + 1):
        with pytest.raises(KeyboardInterrupt):
            tune.run([job], STAMP, stopped)
    journal = Journal(journal_of(STAMP))
    assert journal.known(job, "real-blocks", job.committed) is None
    for _ in range(tune.DEATHS):
        journal._write(Entry(key=job.key, kernel=job.kernel, problem="real-blocks", rival=None, config=job.candidates[0], state="started"))
    result = tune.run([job], STAMP, times).results[0]
    assert result.failed == 1
    assert "died 3 times" in str(Journal(journal_of(STAMP)).known(job, "real-blocks", job.candidates[0]))


def test_one_process_at_a_time() -> None:
    code = (
        "import sys, time; from nsa_sel.bench import tune; from nsa_sel.tuned import stamp_of; from tests.policy_cases import H200\n"
        "with tune.locked(stamp_of(H200)):\n  print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ArgumentError, match=rf"running already for this GPU and environment, as process {holder.pid}; .*wait for it"):
        tune.run(some_jobs(), STAMP, times)
    holder.kill()
    holder.wait()
    assert tune.run(some_jobs()[:1], STAMP, times).left == 0


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEL_CACHE", os.devnull)
    with pytest.raises(ConfigError, match="set NSA_SEL_CACHE to one"):
        tune.run(some_jobs(), STAMP, times)


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    write()
    before = tuned.file_of(STAMP).read_bytes()
    tune.write(tuned.file_of(STAMP), TunedFile(stamp=STAMP, commit="another"))
    assert tuned.file_of(STAMP).read_bytes() != before
    write()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        tune.write(tuned.file_of(STAMP), TunedFile(stamp=STAMP, commit="another"))
    assert tuned.file_of(STAMP).read_bytes() == before


KILLED = """
import json, os, random, signal, time
from nsa_sel import tuned
from nsa_sel.bench import tune, tune_costs, tune_rows, tune_thresholds
from nsa_sel.bench.tune import Journal, journal_of
from nsa_sel.config import WAYS
from tests.policy_cases import H200
from tests.tune_cases import priced, some_jobs, times

stamp, jobs = tuned.stamp_of(H200), [*some_jobs(quick=False), *some_jobs("triton-tile", quick=False)]
path, journal = tuned.file_of(stamp), journal_of(stamp)
rows = [tune_costs.rows_of(stamp), tune_thresholds.rows_of(stamp)]
asked = tune_costs.wanted(H200, WAYS)
known = {tune_rows.key(row): priced(row) for row in asked}
tune_costs.wanted = lambda device, ways: [row for row in asked]
tune_rows.DEATHS = 1000  # they have a test of their own

def slowly(found):
    time.sleep(0.002)
    return found

parts = [
    lambda: tune_thresholds.run(stamp, lambda case, way, side: slowly((1.0, 0.9, 1.1) if "triton" in side else (2.0, 1.9, 2.1)), WAYS),
    lambda: tune.run(jobs, stamp, lambda job, problem, config: slowly(times(job, problem, config))),
    lambda: tune_costs.run(stamp, H200, lambda row: slowly(known[tune_rows.key(row)]), WAYS),
]

def finished(file):
    lines = file.read_bytes().split(b"\\n")[:-1] if file.exists() else []
    return [line for line in map(json.loads, lines) if line.get("state", "measured") == "measured"]

random.seed(0)
before, files = {file: [] for file in (journal, *rows)}, 0
for kill in range(21):
    child = os.fork()
    if child == 0:
        try:
            for part in range(3):
                parts[(part + kill) % 3]()
        finally:
            os._exit(0)
    time.sleep(random.uniform(0.005, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for file in before:
        now = finished(file)
        assert now[: len(before[file])] == before[file], "a finished measurement is gone"
        before[file] = now
    if path.exists():
        files += 1
        file, _ = tuned.parse(path.read_bytes(), path.name)
        assert {(r.kernel, r.key) for r in file.results} <= {(j.kernel, j.key) for j in jobs}
killed_with = [len(found) for found in before.values()]
thresholds, report, costs = (part() for part in parts)
assert Journal(journal).unreadable == 0
seen = [json.dumps([line[f] for f in ("key", "kernel", "problem", "rival", "config")]) for line in finished(journal)]
assert len(seen) == len(set(seen)), "measured twice"
for file in rows:
    found = [tune_rows.key(row) for row in finished(file)]
    assert len(found) == len(set(found)) == len(tune_rows.read(file)), "measured twice"
assert report.left == 0 and not report.skipped
assert set(thresholds) == set(WAYS)
assert tune.written(stamp).costs == costs and tune.written(stamp).thresholds == thresholds
print(json.dumps({"killed_with": killed_with, "files": files, "measured": [len(finished(file)) for file in before],
                  "costs": len(asked), "results": len({(r.key, r.kernel) for r in report.results}), "jobs": len(jobs)}))
"""


def test_killing_it_at_random_points_loses_no_finished_row_and_corrupts_no_file() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(0 < killed <= measured for killed, measured in zip(found["killed_with"], found["measured"], strict=True)), found
    assert found["killed_with"] != found["measured"]
    assert found["measured"][1] == found["costs"]
    assert found["results"] == found["jobs"]


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


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tune_command, "run", full)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ConfigError, match="No space left on device: make room"):
        tune_command.measure(tune_command.Plan(H200, settings_for(H200), [], 0), 1, True, lambda what, done: None)


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
