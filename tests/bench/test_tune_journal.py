"""What tuning keeps, without a GPU: the journal, the file, and what a killed run leaves."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_sel.bench.tune import tune, tune_command
from nsa_sel.bench.tune.tune import Entry, Journal, journal_of
from nsa_sel.bench.tune.tune_command import Done
from nsa_sel.bench.tune.tune_space import Job
from nsa_sel.errors import ArgumentError, ConfigError
from nsa_sel.settings import tuned
from nsa_sel.settings.schema import KernelConfig
from nsa_sel.settings.tuned import TunedFile, stamp_of
from tests.helpers.paths import ROOT
from tests.helpers.policy_cases import H200
from tests.helpers.tune_cases import lone, some_jobs, times, write

STAMP = stamp_of(H200)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("NSA_SEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tuned"


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
        "import sys, time; from nsa_sel.bench.tune import tune; from nsa_sel.settings.tuned import stamp_of\n"
        "from tests.helpers.policy_cases import H200\n"
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


def test_a_full_disk_is_one_clear_error_and_leaves_whole_rows(folder: Path) -> None:
    jobs, limits = some_jobs(), resource.getrlimit(resource.RLIMIT_FSIZE)
    words = r"the cache folder is '.*cache'; allowed: .* Remedy: .*; make room, or set NSA_SEL_CACHE"
    tune.run(jobs[:1], STAMP, times)
    before = tuned.file_of(STAMP).read_bytes()
    for most in (len(before) - 1, journal_of(STAMP).stat().st_size + 700):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))  # a write beyond it writes a part, then fails
        try:
            with pytest.raises(ConfigError, match=words):
                tune.run(jobs, STAMP, times)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert journal_of(STAMP).read_bytes().endswith(b"}\n")
        assert tuned.file_of(STAMP).read_bytes() == before
        assert {file.suffix for file in folder.iterdir()} == {".json", ".jsonl", ".lock"}
    report = tune.run(jobs, STAMP, times)
    assert report.left == Journal(journal_of(STAMP)).unreadable == 0


@pytest.mark.parametrize("suffix", [".lock", ".jsonl"])
@pytest.mark.parametrize("kind", ["a FIFO", "a link"])
def test_what_is_no_file_is_never_opened_for_tuning(folder: Path, suffix: str, kind: str) -> None:
    write()
    path, elsewhere = tuned.file_of(STAMP).with_suffix(suffix), folder.parent / "elsewhere"
    if kind == "a FIFO":
        os.mkfifo(path)
    else:
        elsewhere.write_text("of somebody else")
        path.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=r"is (a FIFO, not a regular file|a symbolic link): remove it.*set NSA_SEL_CACHE"):
        tune.run([lone()], STAMP, times)
    assert kind == "a FIFO" or elsewhere.read_text() == "of somebody else"


KILLED = """
import json, os, random, signal, time
from nsa_sel.settings import tuned
from nsa_sel.bench.tune import tune, tune_costs, tune_rows, tune_thresholds
from nsa_sel.bench.tune.tune import Journal, journal_of
from nsa_sel.settings.schema import WAYS
from tests.helpers.policy_cases import H200
from tests.helpers.tune_cases import priced, some_jobs, times

stamp, jobs = tuned.stamp_of(H200), [*some_jobs(quick=False), *some_jobs("triton-tile", quick=False)]
path, journal = tuned.file_of(stamp), journal_of(stamp)
rows = [tune_costs.rows_of(stamp), tune_thresholds.rows_of(stamp)]
asked = tune_costs.wanted(H200, WAYS)
known = {tune_rows.key(row): priced(row) for row in asked}
tune_costs.wanted = lambda device, ways: [row for row in asked]
tune_rows.DEATHS = 1000  # they have a test of their own

def moment():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def before(call):
    def after_a_moment(*args, **more):
        moment()
        return call(*args, **more)
    return after_a_moment

def measured(found):
    moment()
    return found

os.fsync, os.replace, left = before(os.fsync), before(os.replace), 0  # 0: never

parts = [
    lambda: tune_thresholds.run(stamp, lambda case, way, side: measured((1.0, 0.9, 1.1) if "triton" in side else (2.0, 1.9, 2.1)), WAYS),
    lambda: tune.run(jobs, stamp, lambda job, problem, config: measured(times(job, problem, config))),
    lambda: tune_costs.run(stamp, H200, lambda row: measured(known[tune_rows.key(row)]), WAYS),
]

def finished(file):
    lines = file.read_bytes().split(b"\\n")[:-1] if file.exists() else []
    return [line for line in map(json.loads, lines) if line.get("state", "measured") == "measured"]

random.seed(0)
kept, files = {file: [] for file in (journal, *rows)}, 0
for kill in range(21):
    left = random.randrange(5, 60)
    child = os.fork()
    if child == 0:
        try:
            for part in range(3):
                parts[(part + kill) % 3]()
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "it finished before the last kill"
    left = 0
    for file in kept:
        now = finished(file)
        assert now[: len(kept[file])] == kept[file], "a finished measurement is gone"
        kept[file] = now
    if path.exists():
        files += 1
        file, _ = tuned.parse(path.read_bytes(), path.name)
        assert {(r.kernel, r.key) for r in file.results} <= {(j.kernel, j.key) for j in jobs}
killed_with = [len(found) for found in kept.values()]
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
print(json.dumps({"killed_with": killed_with, "files": files, "measured": [len(finished(file)) for file in kept],
                  "costs": len(asked), "results": len({(r.key, r.kernel) for r in report.results}), "jobs": len(jobs)}))
"""


@pytest.mark.slow
def test_killing_it_at_random_points_loses_no_finished_row_and_corrupts_no_file() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(0 < killed <= measured for killed, measured in zip(found["killed_with"], found["measured"], strict=True)), found
    assert found["killed_with"] != found["measured"]
    assert found["measured"][1] == found["costs"]
    assert found["results"] == found["jobs"]
