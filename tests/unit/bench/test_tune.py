"""`nsa-sel tune` without a GPU: what is tried, what wins, thresholds, costs, what is kept, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from nsa_sel.backends.specs import launch_class, tile_columns
from nsa_sel.bench.core import cases
from nsa_sel.bench.core.contenders import SLOW as SLOW_BACKENDS
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import WrongResult
from nsa_sel.bench.tune import calls, command, cost_fit, kernel_configs, tuned_file
from nsa_sel.bench.tune.calls import ORDER, measure_costs, measure_thresholds, wanted
from nsa_sel.bench.tune.kernel_configs import Runner, Times, tune
from nsa_sel.bench.tune.search_space import CASES, PROBLEMS, SPACES, Case, Job, Problem, configs, jobs
from nsa_sel.bench.tune.tuned_file import ContextLost, Run, beside
from nsa_sel.cli.app import app
from nsa_sel.core import registry
from nsa_sel.core.decide import explain_request
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import DeviceInfo
from nsa_sel.errors import ArgumentError, ConfigError
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for, shipped_configs
from nsa_sel.settings.schema import DIRECTIONS, KernelConfig
from nsa_sel.settings.tuned import stamp_of
from tests.helpers import policy_cases
from tests.helpers.files import ROOT
from tests.helpers.policy_cases import H200, LONG, RTX4090, SHORT, replace
from tests.helpers.tune_cases import (
    CASE,
    SLOW,
    content,
    fake_gpu,
    fastest,
    json_lines,
    ms,
    one_problem_job,
    priced,
    some_jobs,
    timed,
    times,
)

pytestmark = pytest.mark.usefixtures("tuned_folder")
STAMP = stamp_of(H200)
RUN = Run(STAMP)


# The search space


def test_every_kernel_is_tuned_within_the_space_that_was_asked_for() -> None:
    committed, settings = shipped_configs()["base.yaml"].kernels, settings_for(H200)
    every_class = (CASE, Case(192, 128, 16, 1024), Case(256, 256, 16, 1024))
    assert {job.kernel for job in jobs(settings, 90, every_class)} == set(committed)
    assert {name for space in SPACES for name in space.problems} == set(PROBLEMS)
    for space in SPACES:
        found = list(configs(space, settings.kernels[space.kernel], 90))
        assert 0 < len(found) == len(set(found)) < 100
        for config in found:
            assert 16 <= config.block_l <= 256
            assert config.num_warps in (1, 2, 4, 8)
            assert config.num_stages in (1, 2, 3)
    for job in jobs(settings, 80, CASES):
        assert {config.loads for config in job.candidates} == {"pointer"}, "TMA needs SM 9.0"


@pytest.mark.parametrize(
    ("Dk", "Dv", "size", "expected"),
    [
        (128, 128, 2, ""),
        (160, 16, 2, ""),
        (192, 128, 2, "-wide"),
        (128, 192, 2, "-widest"),
        (256, 256, 2, "-widest"),
        (64, 64, 4, "-widest"),
    ],
)
def test_wide_tiles_have_configs_of_their_own(Dk: int, Dv: int, size: int, expected: str) -> None:
    assert launch_class(sum(tile_columns(Dk, Dv, size)), size) == expected


# Selection of the fastest config

JOB = some_jobs()[0]
A, B = JOB.candidates[:2]
TWO = ("real-blocks", "random-blocks")
Given = dict[KernelConfig, Times]


def test_the_fastest_wins_where_spreads_are_apart_in_both_rounds() -> None:
    job = one_problem_job()
    (result,) = tune(RUN, [job], times).results
    assert result.winner == fastest(job) == result.top[0].config
    assert result.verdict.endswith("faster on 1 problem, in two rounds")
    assert [timed.ms_median for timed in result.top] == sorted(timed.ms_median for timed in result.top)
    assert (result.measured, result.failed) == (1 + len(job.candidates), 0)
    file, table = content(STAMP)
    assert file.results == (result,)
    assert table.kernels == {(job.key.shape, job.key.direction): {job.kernel: fastest(job)}}


@pytest.mark.parametrize(
    ("real", "random", "winner"),
    [
        ({A: ms(5), B: ms(6)}, {A: ms(9.95), B: ms(8)}, B),  # the best over both problems
        ({A: ms(2)}, {A: ms(10.5)}, None),  # surely slower on one problem
        ({A: ms(2)}, {A: ms(10.5, 0.1)}, A),  # slower, but within the spread
        ({A: ms(9.7)}, {A: ms(11, 0.12)}, None),  # surely faster on one problem, perhaps slower by more on the other
        ({A: ms(9, 0.105)}, {A: ms(9, 0.105)}, None),  # spreads overlap
    ],
)
def test_a_winner_is_faster_by_the_mean_and_surely_slower_on_no_problem(real: Given, random: Given, winner: KernelConfig | None) -> None:
    def measure(job: Job, problem: str, config: KernelConfig) -> Times:
        return (real if problem == "real-blocks" else random).get(config, SLOW)

    results = tune(RUN, [JOB._replace(candidates=(A, B))], measure).results
    assert [(result.problem, result.winner) for result in results] == [(problem, winner) for problem in TWO]
    assert winner or all("no other is surely faster" in result.verdict for result in results)
    assert content(STAMP)[1].kernels == ({(JOB.key.shape, JOB.key.direction): {JOB.kernel: winner}} if winner else {})


@pytest.mark.parametrize("lost_on", TWO)
def test_a_config_that_loses_in_the_second_round_does_not_win(lost_on: str) -> None:
    seen: list[tuple[str, KernelConfig]] = []

    def lucky(job: Job, problem: str, config: KernelConfig) -> Times:
        seen.append((problem, config))
        return ms(10.5) if problem == lost_on and seen.count((problem, A)) > 1 else SLOW if config == job.committed else ms(2)

    results = tune(RUN, [JOB._replace(candidates=(A,))], lucky).results
    assert {result.winner for result in results} == {None}
    assert "was faster in one of two rounds" in results[0].verdict


@pytest.mark.parametrize("text", ["out of resource: shared memory\nand more", "CUDA error: an illegal memory access was encountered"])
def test_a_failure_is_kept_and_not_tried_again(text: str) -> None:
    """An error that breaks the CUDA context ends the run; the next one passes over it."""
    job = one_problem_job()
    best, tried = fastest(job), []

    def failing(job: Job, problem: str, config: KernelConfig) -> Times:
        if config == best:
            tried.append(config)
            raise RuntimeError(text)
        return times(job, problem, config)

    if "illegal" in text:
        with pytest.raises(ContextLost, match="run `nsa-sel tune` again"):
            tune(RUN, [job], failing)
    (result,) = tune(RUN, [job], failing).results
    assert len(tried) == result.failed == 1
    assert result.winner not in (None, best)
    errors = [row["error"] for row in json_lines(beside(STAMP, kernel_configs.ROWS)) if "error" in row]
    assert errors == [f"RuntimeError: {text.splitlines()[0]}"]


# Rows and results on disk


def again(*_: Any) -> Any:
    pytest.fail("measured again")


def test_a_stopped_run_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, listed = iter(range(1000)), some_jobs()
    with monkeypatch.context() as patched:
        patched.setattr(tuned_file.time, "monotonic", lambda: next(clock))
        report = tune(RUN._replace(deadline=40), listed, times)
    assert 0 < report.left < len(listed)
    assert f"time is up, {report.left} kernels are left" in command.Done(report, {}).text()
    path = beside(STAMP, kernel_configs.ROWS)
    path.write_text(path.read_text() + '{"key": {"back')  # as a kill leaves it
    whole = tune(RUN, listed, times)
    assert (whole.left, whole.taken) == (0, len(json_lines(path)) - report.taken)
    assert tune(RUN, listed, again).results == whole.results


def test_one_process_at_a_time() -> None:
    code = (
        "import sys; from nsa_sel.bench.tune.tuned_file import locked; from nsa_sel.settings.tuned import stamp_of\n"
        "from tests.helpers.policy_cases import H200\n"
        "with locked(stamp_of(H200)):\n  print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ArgumentError, match=r"running already for this GPU and environment; .*wait for it"):
        tune(RUN, some_jobs(), times)
    holder.kill()
    holder.wait()
    assert tune(RUN, some_jobs()[:1], times).left == 0


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEL_CACHE", os.devnull)
    with pytest.raises(ConfigError, match="set NSA_SEL_CACHE to one"):
        tune(RUN, some_jobs(), times)


# Timing of a config, in the interpreter on small problems


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, problem in PROBLEMS.items():
        monkeypatch.setitem(PROBLEMS, name, Problem(1, min(problem.S, 9), 128, 1, problem.blocks, False, problem.page))


def runner() -> Runner:
    return Runner(torch.device("cpu"), settings_for(DeviceInfo(kind="cpu", triton_interpret=True)), 0.0)


@pytest.mark.usefixtures("small", "instant")
@pytest.mark.parametrize(
    ("backend", "way"), [("triton-group", "forward"), ("triton-tile", "forward"), ("triton-tile", "backward"), ("triton-token", "decode")]
)
def test_configs_run_and_are_compared(monkeypatch: pytest.MonkeyPatch, backend: str, way: str) -> None:
    measure, case = runner(), Case(16, 16, 2, 128, "float32")
    job = jobs(settings_for(H200), 90, (case,), backend, way, quick=True)[0]  # type: ignore[arg-type]
    for config in (job.committed, job.candidates[0]):
        assert measure(job, job.problems[0], config) == (2.0, 1.0, 3.0)
    if (backend, way) == ("triton-tile", "forward"):
        module, wrong = registry.load(backend), job.candidates[0]
        real = module.forward

        def broken(call: Any) -> Any:
            o, lse = real(call)
            return (o * 1.01 if call.settings.kernels[job.kernel] == wrong else o), lse

        monkeypatch.setattr(module, "forward", broken)
        with pytest.raises(WrongResult, match=r"result 0 differs from the committed config's: largest error .*, allowed"):
            measure(job, job.problems[0], wrong)


# Thresholds

UNKNOWN = replace(policy_cases.UNKNOWN, sm_count=H200.sm_count)  # as many as the times of `priced` are for
HERE = Run(stamp_of(UNKNOWN))


def sides(row: Row) -> Row:
    """Triton is twice as fast from 256 keys on; backward it never is."""
    fast = row["n"] * row["block"] >= 256 and row["direction"] != "bwd"
    return timed(1.0 if row["backend"] == "triton-group" and fast else 2.0)


def test_thresholds_follow_the_rule_of_the_profiles_and_decisions_follow_them(monkeypatch: pytest.MonkeyPatch) -> None:
    request = replace(LONG, max_length=128, needs_grad=True)
    assert explain_request(request, UNKNOWN).settings.min_length("backward") == 16  # assumed
    found = measure_thresholds(HERE, sides, DIRECTIONS)
    assert {way: (known.verdict, known.value) for way, known in found.items()} == {
        "forward": ("measured", 256), "backward": ("undecided", None), "decode": ("measured", 256),
    }  # fmt: skip
    tuned.forget()
    after = explain_request(request, UNKNOWN)
    assert (after.settings.min_length("forward"), after.settings.min_length("backward")) == (256, 16)
    assert after.settings.sources["sel_triton_min_L"] == after.settings.tuned
    assert "triton-group: min-length" in after.steps
    monkeypatch.setenv("NSA_SEL_TRITON_MIN_L", "77")
    assert explain_request(LONG, UNKNOWN).settings.sel_triton_min_L == 77
    measure_thresholds(Run(stamp_of(RTX4090)), sides, DIRECTIONS)
    assert explain_request(LONG, RTX4090).forward == "sdpa-packed", "the device rule stays"


def test_a_case_that_fails_leaves_its_direction_as_it_was() -> None:
    def broken(row: Row) -> Row:
        if (row["case"], row["backend"]) == ("threshold-decode-D64-L4096", "triton-group"):
            raise RuntimeError("out of memory")
        return sides(row)

    assert set(measure_thresholds(HERE, broken, DIRECTIONS)) == {"forward", "backward"}
    tuned_file.rewrite(HERE.stamp, commit="later")
    file = tuned_file.written(HERE.stamp)
    assert (file.commit, set(file.thresholds)) == ("later", {"forward", "backward"})


# Costs

PHASES = {*DIRECTIONS, "tokens", "choose", "choose-backward"}


@pytest.fixture
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "missing", lambda name: ())


def phases(costs: Any) -> set[str]:
    return {name.partition("/")[2] for name in costs.models}


@pytest.mark.usefixtures("everything_is_installed")
def test_an_unmeasured_gpu_picks_by_predicted_time() -> None:
    asked = wanted(UNKNOWN, DIRECTIONS)
    assert set(ORDER) == set(DIRECTIONS)
    assert max(row["S"] for row in asked if row["backend"] in SLOW_BACKENDS) == calls.MAX_ROWS
    request = replace(SHORT, needs_grad=True)
    before = explain_request(request, UNKNOWN)
    measure_thresholds(HERE, lambda row: timed(1.0 if row["backend"] == "triton-group" else 2.0), DIRECTIONS)
    found, left = measure_costs(HERE, UNKNOWN, priced, DIRECTIONS)
    assert left == 0
    assert phases(found) == PHASES
    off = {name: model.worst_error for name, model in found.models.items() if "token" not in name and model.worst_error >= 0.01}
    assert not off, "they fit what made the times"
    tuned.forget()
    after, on_h200 = explain_request(request, UNKNOWN), explain_request(request, H200)
    assert (after.forward, after.backward) == (on_h200.forward, on_h200.backward)
    decode = explain_request(replace(SHORT, S=1), UNKNOWN)
    assert decode.forward == min(decode.predictions, key=lambda p: p.ms).backend != "sdpa-packed"
    assert after.settings.sources["costs"].startswith(f"{after.settings.tuned}; ")
    assert "`nsa-sel tune` on this machine" in str(after.settings.costs and after.settings.costs.provenance)
    assert Decision.from_json(after.to_json()).replay() == ()
    assert after.settings.fingerprint != before.settings.fingerprint
    assert measure_costs(HERE, UNKNOWN, again, DIRECTIONS) == (found, 0)


@pytest.mark.usefixtures("everything_is_installed")
def test_costs_of_one_direction_leave_the_profiles_for_the_others() -> None:
    before = explain_request(SHORT, H200).settings.costs
    measure_costs(RUN, H200, lambda row: priced(row, 3.0), ("forward",))
    tuned.forget()
    after = explain_request(SHORT, H200).settings.costs
    for name, model in before.models.items():
        assert (after.models[name] == model) == (name.partition("/")[2] not in ("forward", "choose")), name


@pytest.mark.usefixtures("everything_is_installed")
def test_a_backend_that_fails_has_no_model() -> None:
    def broken(row: Row) -> Row:
        if row["backend"] == "triton-block" and row["direction"] == "bwd":
            raise torch.OutOfMemoryError("CUDA out of memory\nand more")
        return priced(row)

    found, _ = measure_costs(HERE, UNKNOWN, broken, DIRECTIONS)
    asked = {cost_fit.model_of(row) for row in wanted(UNKNOWN, DIRECTIONS)}
    assert asked & set(cost_fit.TERMS) - set(found.models) == {"triton-block/backward"}
    errors = [row["error"] for row in json_lines(beside(HERE.stamp, calls.ROWS)) if "error" in row]
    assert set(errors) == {"OutOfMemoryError: CUDA out of memory"}


@pytest.mark.usefixtures("everything_is_installed")
def test_no_flag_of_the_users_reaches_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEL_TRITON_BLOCK_L", "16")
    monkeypatch.setenv("NSA_SEL_AUTOTUNE", "off")
    seen: list[dict[str, str]] = []

    def look(row: Row) -> Row:
        seen.append({name: text for name, text in os.environ.items() if name.startswith("NSA_")})
        return priced(row)

    measure_costs(Run(stamp_of(RTX4090)), RTX4090, look, ("decode",))
    assert seen[0] == {"NSA_TRITON_SEL_FORCE": "1", "NSA_SEL_CACHE": os.environ["NSA_SEL_CACHE"]}
    assert os.environ["NSA_SEL_TRITON_BLOCK_L"] == "16"


ATTEND = cases.Case("cost-small", "random", 1, 24, 256, 1, 2, 16, 16, 2, 64, "float32")
CHOOSE = cases.Case("choose-small", cases.CHOICE, 1, 90, 200, 2, 3, 16, 24, 3, 64, "float32")


@pytest.mark.parametrize(
    ("case", "direction", "backend"),
    [(ATTEND, "fwd", "sdpa-packed"), (ATTEND, "bwd", "sdpa-packed"), (ATTEND._replace(S=1), "decode", "sdpa-packed"),
     (CHOOSE, "fwd", "choose-torch"), (CHOOSE, "bwd", "choose-torch")],
)  # fmt: skip
def test_a_call_is_timed_and_compared(monkeypatch: pytest.MonkeyPatch, case: cases.Case, direction: str, backend: str) -> None:
    measure, row = calls.Runner("cpu", rep=1), {**case._asdict(), "direction": direction, "backend": backend, "launches": ""}
    found = measure(row)
    assert 0 < found["ms_p20"] <= found["ms_median"] <= found["ms_p80"]
    assert [found[field] for field in ("case", "direction", "backend")] == [case.case, direction, backend]
    assert found["mae"] < 1e-5
    monkeypatch.setattr(calls, "MAX_ERROR", -1.0)
    with pytest.raises(WrongResult, match=r"the mean absolute error .*, allowed -1.0"):
        measure(row)


# The command


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_a_dry_run_needs_no_gpu() -> None:
    result = invoke()
    assert result.exit_code == 2
    assert "allowed: a CUDA device. Remedy: Triton needs a GPU; --dry-run lists the work." in result.output
    result = invoke("--dry-run", "--backend", "triton-tile", "--direction", "backward", "--quick")
    assert result.exit_code == 0
    assert "triton-tile/dq:tma-L64-R64-w4-s2" in result.output
    assert "triton-tile/forward" not in result.output
    document = json.loads(invoke("--dry-run", "--json", "--L", "256", "--L", "512", "--h", "3", "--dtype", "float16").stdout)
    keys = {(job["key"]["L"], job["key"]["h"], job["key"]["dtype"]) for job in document["jobs"]}
    assert keys == {(256, 4, "float16"), (512, 4, "float16")}
    assert document["launches"] == sum(job["launches"] for job in document["jobs"])
    assert len(json.loads(invoke("--dry-run", "--json").stdout)["jobs"]) == len(CASES) * len(SPACES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", "triton_tile"), "--backend is 'triton_tile' (did you mean triton-tile?); allowed: "),
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
    fake_gpu(monkeypatch, H200)
    arguments = ("--quick", "--backend", "triton-group", "--direction", "forward")
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert "in two rounds" in result.output
    assert str(tuned.file_of(STAMP)) in result.output.replace("\n", "")
    assert tuned.in_force(H200) is not None
    again = json.loads(invoke(*arguments, "--json").stdout)
    assert (again["taken"], again["left"]) == (0, 0)
    assert again["results"][0]["key"] == msgspec.to_builtins(some_jobs()[0].key)
