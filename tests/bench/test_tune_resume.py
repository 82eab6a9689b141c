"""What tuning keeps, without a GPU: the journal, the user's file, and what a killed run leaves."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsa_sel.bench.tune import command, kernel_configs, resume, tuned_file
from nsa_sel.bench.tune.kernel_configs import JOURNAL, Times, tune
from nsa_sel.bench.tune.resume import ContextLost, Measurements, Run, context_loss
from nsa_sel.bench.tune.search_space import Job
from nsa_sel.bench.tune.tuned_file import beside
from nsa_sel.errors import ArgumentError, ConfigError
from nsa_sel.settings import tuned
from nsa_sel.settings.schema import KernelConfig
from nsa_sel.settings.tuned import stamp_of
from tests.helpers.paths import ROOT
from tests.helpers.policy_cases import H200
from tests.helpers.tune_cases import content, one_problem_job, some_jobs, times, write

pytestmark = pytest.mark.usefixtures("tuned_folder")
STAMP = stamp_of(H200)
RUN = Run(STAMP)


def again(job: Job, problem: str, config: KernelConfig) -> Times:
    """A measurement that earlier runs have taken."""
    pytest.fail("measured again")


def journal() -> Measurements:
    return Measurements(beside(STAMP, JOURNAL), kernel_configs.IDENTITY)


def test_runs_add_to_the_file() -> None:
    group, tile = some_jobs(), some_jobs("triton-tile")
    tune(RUN, group, times)
    tune(RUN, tile, times)
    file, _ = content(STAMP)
    measured = [(job.kernel, problem) for job in (*group, *tile) for problem in job.problems]
    assert [(result.kernel, result.problem) for result in file.results] == measured
    tuned.file_of(STAMP).write_text("{")  # made again from the journal
    tune(RUN, [*group, *tile], again)
    assert content(STAMP)[0] == file


def test_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    jobs = some_jobs()
    with monkeypatch.context() as patched:
        patched.setattr(resume.time, "monotonic", lambda: next(clock))
        report = tune(RUN._replace(deadline=40), jobs, times)
    finished = {(result.key, result.kernel) for result in report.results}
    assert 0 < len(finished) < len(jobs)
    assert report.left == len(jobs) - len(finished)
    assert f"time is up, {report.left} kernels are left" in command.Done(report, {}).text()


@pytest.mark.parametrize("tail", ['{"key": {"back', '{"state":', "\0\0\0"])
def test_a_torn_line_is_dropped_and_an_unreadable_one_passed_over(tail: str) -> None:
    job, path = one_problem_job(), beside(STAMP, JOURNAL)
    tune(RUN, [job], times)
    whole = path.read_text()
    path.write_text(whole + "no json\n" + tail)
    assert len(journal().rows) == len(whole.splitlines())
    assert path.read_text().endswith(tail)  # a process that only looks changes nothing
    tune(RUN, [job], again)
    assert path.read_text() == whole + "no json\n"
    assert journal().unreadable == 1


@pytest.mark.parametrize(("error", "skipped"), [(KeyboardInterrupt, False), (ContextLost, True)])
def test_what_the_process_dies_of_is_passed_over_and_what_was_interrupted_is_not(error: Any, skipped: bool) -> None:
    row = dict.fromkeys(kernel_configs.IDENTITY, 0)
    tuned_file.private.make_folder(beside(STAMP, JOURNAL).parent)

    def stop(row: Any) -> Any:
        raise error

    for _ in range(3):
        with pytest.raises(error):
            journal().measure(row, stop)
    found = journal().measure(row, lambda row: {"times": 1})
    assert found.get("error") == ("the process died 3 times while it was measured" if skipped else None)


@pytest.mark.parametrize(
    ("text", "kind"), [("CUDA error: an illegal memory access was encountered", ContextLost), ("out of resource", RuntimeError)]
)
def test_a_lost_context_is_told_from_other_failures(text: str, kind: type[Exception]) -> None:
    with pytest.raises(RuntimeError, match=text) as caught, context_loss("a config"):
        raise RuntimeError(text)
    assert type(caught.value) is kind


def test_one_process_at_a_time() -> None:
    code = (
        "import sys; from nsa_sel.bench.tune.tuned_file import locked; from nsa_sel.settings.tuned import stamp_of\n"
        "from tests.helpers.policy_cases import H200\n"
        "with locked(stamp_of(H200)):\n  print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ArgumentError, match=rf"running already for this GPU and environment, as process {holder.pid}; .*wait for it"):
        tune(RUN, some_jobs(), times)
    holder.kill()
    holder.wait()
    assert tune(RUN, some_jobs()[:1], times).left == 0


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEL_CACHE", os.devnull)
    with pytest.raises(ConfigError, match="set NSA_SEL_CACHE to one"):
        tune(RUN, some_jobs(), times)


def test_a_full_disk_is_one_clear_error_and_leaves_whole_rows(tuned_folder: Path) -> None:
    jobs, limits = some_jobs(), resource.getrlimit(resource.RLIMIT_FSIZE)
    words = r"the cache folder is '.*cache'; allowed: .* Remedy: .*; make room, or set NSA_SEL_CACHE"
    tune(RUN, jobs[:1], times)
    before = tuned.file_of(STAMP).read_bytes()
    for most in (len(before) - 1, beside(STAMP, JOURNAL).stat().st_size + 700):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))  # a write beyond it writes a part, then fails
        try:
            with pytest.raises(ConfigError, match=words):
                tune(RUN, jobs, times)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert beside(STAMP, JOURNAL).read_bytes().endswith(b"}\n")
        assert tuned.file_of(STAMP).read_bytes() == before
        assert {file.suffix for file in tuned_folder.iterdir()} <= {".json", ".jsonl", ".lock", ".begun"}
    report = tune(RUN, jobs, times)
    assert report.left == journal().unreadable == 0


@pytest.mark.parametrize("suffix", [".lock", ".jsonl"])
@pytest.mark.parametrize("kind", ["a FIFO", "a link"])
def test_what_is_no_file_is_never_opened_for_tuning(tuned_folder: Path, suffix: str, kind: str) -> None:
    write()
    path, elsewhere = beside(STAMP, suffix), tuned_folder.parent / "elsewhere"
    if kind == "a FIFO":
        os.mkfifo(path)
    else:
        elsewhere.write_text("of somebody else")
        path.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=r"is (a FIFO, not a regular file|a symbolic link): remove it.*set NSA_SEL_CACHE"):
        tune(RUN, [one_problem_job()], times)
    assert kind == "a FIFO" or elsewhere.read_text() == "of somebody else"


KILLED = """
import json, os, random, signal
from nsa_sel.settings import tuned
from nsa_sel.bench.tune import costs, kernel_configs, resume, thresholds, tuned_file
from nsa_sel.settings.schema import WAYS
from tests.helpers.policy_cases import H200
from tests.helpers.tune_cases import priced, sides, some_jobs, times

run, jobs = resume.Run(tuned.stamp_of(H200)), [*some_jobs(quick=False), *some_jobs("triton-tile", quick=False)]
path = tuned.file_of(run.stamp)
journal, of_costs, of_thresholds = (path.with_suffix(suffix) for suffix in (kernel_configs.JOURNAL, costs.ROWS, thresholds.ROWS))
fields = {journal: kernel_configs.IDENTITY, of_costs: resume.IDENTITY, of_thresholds: resume.IDENTITY}
asked = costs.wanted(H200, WAYS)
identity = lambda file, row: json.dumps([row.get(field) for field in fields[file]])
known = {identity(of_costs, row): priced(row) for row in asked}
costs.wanted = lambda device, ways: [row for row in asked]
resume.DEATHS = 1000  # they have a test of their own

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

os.fsync, os.replace, left = before(os.fsync), before(os.replace), 0  # 0: never

parts = [
    lambda: thresholds.measure_thresholds(run, before(sides), WAYS),
    lambda: kernel_configs.tune(run, jobs, before(times)),
    lambda: costs.measure_costs(run, H200, before(lambda row: known[identity(of_costs, row)]), WAYS),
]

def finished(file):
    lines = file.read_bytes().split(b"\\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]

random.seed(0)
kept, files = {file: [] for file in fields}, 0
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
found, report, models = (part() for part in parts)
for file in fields:
    seen = [identity(file, row) for row in finished(file)]
    rows = resume.Measurements(file, fields[file])
    assert len(seen) == len(set(seen)) == len(rows.rows) and rows.unreadable == 0, "measured twice"
assert report.left == 0 and not report.skipped
assert set(found) == set(WAYS)
assert tuned_file.written(run.stamp).costs == models and tuned_file.written(run.stamp).thresholds == found
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
