"""What tuning keeps, without a GPU: the journal, the user's file, and what a killed run leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from nsa_sel.bench.tune import command, kernel_configs, resume, tuned_file
from nsa_sel.bench.tune.kernel_configs import JOURNAL, Times, tune
from nsa_sel.bench.tune.resume import ContextLost, Measurements, Run, context_loss
from nsa_sel.bench.tune.search_space import Job
from nsa_sel.bench.tune.tuned_file import beside
from nsa_sel.errors import ArgumentError, ConfigError
from nsa_sel.settings.schema import KernelConfig
from nsa_sel.settings.tuned import stamp_of
from tests.helpers.files import ROOT
from tests.helpers.policy_cases import H200
from tests.helpers.tune_cases import one_problem_job, some_jobs, times

pytestmark = pytest.mark.usefixtures("tuned_folder")
STAMP = stamp_of(H200)
RUN = Run(STAMP)


def again(job: Job, problem: str, config: KernelConfig) -> Times:
    """A measurement that earlier runs have taken."""
    pytest.fail("measured again")


def journal() -> Measurements:
    return Measurements(beside(STAMP, JOURNAL), kernel_configs.IDENTITY)


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
