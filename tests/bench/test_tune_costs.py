"""The costs that `nsa-sel tune` measures: the suite, what is kept, the models, and what decisions make of them."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from nsa_sel.attention import explain_request
from nsa_sel.bench.core import cases
from nsa_sel.bench.core.parity import WrongResult
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.report import report
from nsa_sel.bench.tune import cost_fit, regret, tune, tune_command, tune_costs, tune_rows, tune_runner, tune_thresholds
from nsa_sel.bench.tune.derive import cost_rows
from nsa_sel.bench.tune.tune import DEATHS, ContextLost, Times
from nsa_sel.bench.tune.tune_costs import ORDER, rows_of, run, wanted
from nsa_sel.core import registry
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import DeviceInfo
from nsa_sel.settings import tuned
from nsa_sel.settings.config import WAYS, Costs, Way, settings_for, shipped_configs
from nsa_sel.settings.tuned import stamp_of
from tests.helpers.paths import ROOT
from tests.helpers.policy_cases import CPU, H100, H200, RTX4090, SHORT, UNKNOWN, replace
from tests.helpers.tune_cases import key, priced, result, times, write

STAMP = stamp_of(UNKNOWN)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("NSA_SEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "missing", lambda name: ())  # every package is there, the NVIDIA driver too
    return tmp_path / "cache" / "tuned"


def always(case: cases.Case, way: Way, side: str) -> Times:
    """Triton is always twice as fast as packed SDPA."""
    return (1.0, 0.99, 1.01) if side == "triton-group" else (2.0, 1.98, 2.02)


def lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# The suite


def test_the_suite_spans_what_the_models_need_and_is_small() -> None:
    suite = cases.cost_cases()
    assert 20 <= len(suite) <= 40
    assert len({case.case for case in suite}) == len(suite)
    prefill = [case for case in suite if case.S > 1]
    assert {case.distribution for case in prefill} == {"real", "random"}
    assert {1024, 8192, 32768} <= {case.S for case in prefill}
    assert {case.h for case in prefill} == {1, 4, 16}
    assert {case.Dk for case in prefill} == {case.Dk for case in suite if case.S == 1} == {64, 128, 192}
    asked = wanted(UNKNOWN, WAYS)
    counted = Counter(f"{row['backend']}/{cost_fit.WAYS[row['direction']]}" for row in asked)
    for name, terms in cost_fit.TERMS.items():
        assert counted[name] > len(terms), name
    assert max(row["S"] for row in asked if row["backend"] in tune_costs.SLOW) == 8192
    assert len({tune_rows.key(row) for row in asked}) == len(asked)
    assert [row["direction"] for row in asked] == sorted((row["direction"] for row in asked), key=["fwd", "decode", "bwd"].index)


def test_the_documents_count_the_suite() -> None:
    for document in ("README.md", "PRD.md"):
        assert f"{len(cases.cost_cases())} cases" in (ROOT / document).read_text()


def test_the_suite_alone_chooses_as_well_as_all_rows() -> None:
    """On the H200, over all its rows but those of single layers: how far models of the suite's sizes, of which it has most, are off."""
    rows = [row for found in cost_rows().values() for row in found if "layer" not in row["case"]]
    sizes = {case[1:] for case in cases.cost_cases()}
    some = [row for row in rows if cost_fit.case_of(row)[1:] in sizes]
    assert len(some) < 0.8 * len(rows)
    own = replace(settings_for(H200), costs=cost_fit.costs(some, ["the suite's rows"]))
    regrets = sorted(choice.regret for choice in regret.choices(rows, own, known=True))
    assert sum(found <= 0.10 for found in regrets) >= 0.95 * len(regrets)
    assert regrets[-1] <= 0.35


# What a decision makes of it


def test_a_gpu_that_nobody_has_measured_picks_by_predicted_time() -> None:
    request = replace(SHORT, needs_grad=True)
    before = explain_request(request, UNKNOWN)
    assert before.settings.sources["costs"] == "sm90_h200.yaml (assumed)"
    tune_thresholds.run(STAMP, always, WAYS)
    found = run(STAMP, UNKNOWN, priced, WAYS)
    assert found is not None
    assert {name.partition("/")[2] for name in found.models} == set(WAYS)
    assert len(found.models) == 16  # six backends forward and backward, four decode
    assert all(model.worst_error < 0.01 for name, model in found.models.items() if "token" not in name), "they fit what made the times"
    tuned.forget()
    after = explain_request(request, UNKNOWN)
    on_h200 = explain_request(request, H200)
    assert (after.forward, after.backward) == (on_h200.forward, on_h200.backward)
    random = cases.prefill("random", 32768, 1)
    assert explain_request(cost_fit.request_of(random, cost_fit.sharing_of(random), False), UNKNOWN).forward == "triton-block"
    decode = explain_request(replace(SHORT, S=1), UNKNOWN)
    assert decode.forward == min(decode.predictions, key=lambda p: p.ms).backend != "sdpa-packed"
    assert len([p for p in after.predictions if p.direction == "forward"]) == 6
    name = tuned.file_of(STAMP).name
    assert after.settings.sources["costs"] == after.settings.tuned
    assert f"({after.settings.tuned})" in after.rule
    assert name in after.rule
    assert "`nsa-sel tune` on this machine" in str(after.settings.costs and after.settings.costs.provenance)
    assert Decision.from_json(after.to_json()).replay() == ()
    assert after.settings.fingerprint != before.settings.fingerprint


@pytest.mark.parametrize(("device", "shipped"), [(H200, "sm90_h200.yaml"), (H100, "sm90_h200.yaml (assumed)")])
def test_they_go_before_a_profiles_and_leave_the_ways_that_were_not_measured(device: DeviceInfo, shipped: str) -> None:
    before = explain_request(SHORT, device).settings
    assert before.costs is not None
    assert before.sources["costs"] == shipped
    run(stamp_of(device), device, lambda row: priced(row, 3.0), ("forward",))
    tuned.forget()
    settings = explain_request(SHORT, device).settings
    assert settings.costs is not None
    assert settings.sources["costs"] == f"{settings.tuned}; backward, decode: {shipped}"
    for name, model in before.costs.models.items():
        assert (settings.costs.models[name] == model) == (not name.endswith("/forward")), name
    run(stamp_of(device), device, lambda row: priced(row, 3.0), WAYS)
    tuned.forget()
    settings = explain_request(SHORT, device).settings
    assert settings.sources["costs"] == settings.tuned
    assert explain_request(SHORT, replace(device, name="another")).settings.tuned is None


def test_a_way_that_was_not_measured_whole_does_not_displace_a_profiles() -> None:
    """Backends of one way are compared with each other: their models are all of one machine."""
    own = Costs(provenance="own", dtypes=("bfloat16",), models={"triton-tile/forward": MODEL})
    profile = Costs(
        provenance="other", dtypes=("float16", "bfloat16"), models={"triton-group/forward": MODEL, "triton-group/backward": MODEL}
    )
    merged, others = tuned._over(own, profile)
    assert (set(merged.models), merged.dtypes, others) == ({"triton-tile/forward", "triton-group/backward"}, ("bfloat16",), ["backward"])
    assert tuned._over(own, None) == (own, [])


MODEL = shipped_configs()["sm90_h200.yaml"].costs.models["triton-group/forward"]  # type: ignore[union-attr]


def test_a_file_of_the_users_goes_before_it_and_off_ignores_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(STAMP, UNKNOWN, priced, WAYS)
    costs = {"provenance": "mine", "dtypes": ["bfloat16"], "models": {"sdpa-packed/forward": msgspec.to_builtins(MODEL)}}
    (tmp_path / "own.yaml").write_text(json.dumps({"provenance": "mine", "costs": costs}))
    monkeypatch.setenv("NSA_SEL_CONFIG", str(tmp_path / "own.yaml"))
    settings = explain_request(SHORT, UNKNOWN).settings
    assert settings.costs is not None
    assert (settings.costs.provenance, settings.sources["costs"]) == ("mine", str(tmp_path / "own.yaml"))
    monkeypatch.delenv("NSA_SEL_CONFIG")
    assert explain_request(SHORT, UNKNOWN).settings.costs is not None
    monkeypatch.setenv("NSA_SEL_AUTOTUNE", "off")
    assert explain_request(SHORT, UNKNOWN).settings.sources["costs"] == "sm90_h200.yaml (assumed)"
    assert explain_request(SHORT, CPU).settings.costs is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"terms": {"guessed": 1.0}}, "guessed"), ({"host": -1.0}, "numbers >= 0"), ({"terms": {"launch": -1.0}}, "numbers")],
)
def test_models_that_are_none_are_refused(changes: dict[str, Any], words: str) -> None:
    write(device=UNKNOWN)
    model = replace(MODEL, **changes)
    tune.rewrite(STAMP, costs=Costs(provenance="x", dtypes=("bfloat16",), models={"triton-tile/forward": model}))
    tuned.forget()
    with pytest.warns(RuntimeWarning, match=rf"{words}.*remove the file and run `nsa-sel tune` again"):
        assert explain_request(SHORT, UNKNOWN).settings.tuned is None


# What is kept


def test_nothing_is_measured_twice_and_the_end_of_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(STAMP, UNKNOWN, priced, WAYS, seconds=0) is None
    forward = sum(row["direction"] == "fwd" for row in wanted(UNKNOWN, WAYS))
    clock = iter(range(10_000))
    with monkeypatch.context() as patched:
        patched.setattr(tune_rows.time, "monotonic", lambda: next(clock))
        first = run(STAMP, UNKNOWN, priced, WAYS, seconds=forward + 10)
    assert first is not None
    assert {name.partition("/")[2] for name in first.models} == {"forward"}  # the others are not whole, and have none
    assert forward < len(lines(rows_of(STAMP))) < len(wanted(UNKNOWN, WAYS))


def test_a_second_run_measures_the_rest(folder: Path) -> None:
    taken: list[Row] = []

    def until(row: Row) -> Row:
        if len(taken) == 130:
            raise KeyboardInterrupt
        taken.append(row)
        return priced(row)

    with pytest.raises(KeyboardInterrupt):
        run(STAMP, UNKNOWN, until, WAYS)
    assert not list(folder.glob("*.begun"))
    path = rows_of(STAMP)
    whole = path.read_text()
    assert whole.count("\n") == 130
    path.write_text(whole + "no json\n" + '{"case": "real')
    seen: list[Row] = []
    found = run(STAMP, UNKNOWN, lambda row: [seen.append(row), priced(row)][1], WAYS)  # type: ignore[func-returns-value]
    assert path.read_text().startswith(whole + "no json\n{")
    assert len(seen) + 130 == len(wanted(UNKNOWN, WAYS))
    assert run(STAMP, UNKNOWN, lambda row: pytest.fail("measured again"), WAYS) == found
    assert {row["device"] for row in lines_of_json(path)} == {UNKNOWN.name}


def lines_of_json(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def test_a_launch_that_changes_has_its_rows_measured_again_and_no_others() -> None:
    old = run(STAMP, UNKNOWN, priced, WAYS)
    launch = replace(settings_for(UNKNOWN).kernels["triton-tile/forward"], num_stages=1)
    found = result("triton-tile/forward", launch, key("forward", backend="triton-tile"))
    tune.rewrite(STAMP, results=(found,))
    tuned.forget()
    seen: list[Row] = []

    def again(row: Row) -> Row:
        seen.append(row)
        return priced(row, 0.5)

    assert run(STAMP, UNKNOWN, again, WAYS, seconds=0) != old  # forward is not whole now
    assert tune.written(STAMP).costs == old, "what was measured whole stays until it is whole again"
    new = run(STAMP, UNKNOWN, again, WAYS)
    assert new is not None
    assert tune.written(STAMP).costs == new
    assert {(row["backend"], row["direction"], row["Dk"], row["h"]) for row in seen} == {("triton-tile", "fwd", 128, 16)}
    assert all(launch.config_id("triton-tile/forward") in row["launches"] for row in seen)
    unchanged = [name for name in new.models if old and new.models[name] == old.models[name]]
    assert set(new.models) - set(unchanged) == {"triton-tile/forward"}


def test_what_fails_is_recorded_and_its_model_left_out() -> None:
    def broken(row: Row) -> Row:
        if row["backend"] == "triton-block" and row["direction"] == "bwd":
            raise torch.OutOfMemoryError("CUDA out of memory\nand more")
        return priced(row)

    found = run(STAMP, UNKNOWN, broken, WAYS)
    assert found is not None
    assert set(cost_fit.TERMS) - set(found.models) == {"triton-block/backward"}
    errors = [row["error"] for row in lines(rows_of(STAMP)) if "error" in row]
    assert set(errors) == {"OutOfMemoryError: CUDA out of memory"}
    assert run(STAMP, UNKNOWN, lambda row: pytest.fail("tried again"), WAYS) == found


def test_a_machine_where_one_backend_alone_runs_has_nothing_to_compare() -> None:
    def lonely(row: Row) -> Row:
        if row["backend"] != "sdpa-packed":
            raise RuntimeError("no kernel image")
        return priced(row)

    assert run(STAMP, UNKNOWN, lonely, WAYS) is None
    assert tune.written(STAMP).costs is None


def test_what_the_process_dies_of_is_passed_over() -> None:
    fatal = tune_rows.key(wanted(UNKNOWN, WAYS)[3])

    def crash(row: Row) -> Row:
        if tune_rows.key(row) == fatal:
            raise ContextLost("an illegal memory access was encountered")
        return priced(row)

    for _ in range(DEATHS):
        with pytest.raises(ContextLost):
            run(STAMP, UNKNOWN, crash, ("forward",))
    assert run(STAMP, UNKNOWN, crash, ("forward",)) is not None
    (failed,) = [row for row in lines(rows_of(STAMP)) if "error" in row]
    assert failed["error"] == f"the process died {DEATHS} times while it was measured"


# The command


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that nobody has measured, and times for all that is measured on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune_command, "device_info", lambda device: UNKNOWN)
    monkeypatch.setattr(report, "device_of", lambda name: UNKNOWN)
    monkeypatch.setattr(tune_thresholds, "Runner", lambda device, settings, time: always)
    monkeypatch.setattr(tune_runner, "Runner", lambda device, settings, time: times)
    monkeypatch.setattr(tune_costs, "Runner", lambda: priced)


@pytest.mark.usefixtures("here")
def test_one_command_ends_with_a_profile_that_is_used_and_a_report_that_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "png", lambda figure, theme, file, title: file.touch())  # drawing takes most of the time
    chosen = tune_command.plan(None, None, tune_command.Sizes(), quick=False, dry_run=False)
    assert len(chosen.costs) == len(wanted(UNKNOWN, WAYS))
    some = chosen._replace(jobs=[job for job in chosen.jobs if job.kernel == "triton-tile/forward"][:1])
    words = some.text()
    assert words.index("first the least L") < words.index("launches to measure") < words.index("then, with the launches that won")
    assert f"{len(chosen.costs)} times of {', '.join(tune_costs.BACKENDS)} on 35 cases" in words
    told: list[str] = []
    done = tune_command.measure(some, 60, False, lambda what, share: told.append(what))
    assert done.costs is not None
    assert done.costs_left == 0
    assert told[-1] == "the report"
    winner = done.report.results[0].winner
    assert winner is not None
    of_tuned = [row for row in lines(rows_of(STAMP)) if winner.config_id("triton-tile/forward") in row["launches"]]
    assert {(row["Dk"], row["h"], row["direction"]) for row in of_tuned} == {(128, 16, "fwd")}, "costs are of the launches that won"
    assert explain_request(SHORT, UNKNOWN).forward == explain_request(SHORT, H200).forward
    page = tuned.file_of(STAMP).with_suffix(".report") / report.DOCUMENT
    assert done.page == page
    text = page.read_text()
    assert UNKNOWN.name in text
    assert "In force: L = 64" in text
    assert "0 lines left out" in text
    words = tune_command.text(done)
    assert words.endswith(f"report: {page}")
    assert "triton-tile/backward" in words
    assert "time is up" not in words
    document = json.loads(msgspec.json.encode(done.document()))
    assert document["page"] == str(page)
    assert set(document["costs"]["models"]) == set(done.costs.models)
    again = tune_command.plan(None, None, tune_command.Sizes(), quick=False, dry_run=True)
    assert (again.costs_known, len(again.costs)) == (len(chosen.costs), len(chosen.costs))
    assert json.loads(msgspec.json.encode(again.document()))["costs_known"] == len(chosen.costs)


@pytest.mark.usefixtures("here")
def test_time_that_is_up_is_told_and_costs_have_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, float] = {}

    def launches(jobs: Any, stamp: Any, runner: Any, *, seconds: float, **rest: Any) -> tune.Report:
        given["launches"] = seconds
        return tune.Report(tuned.file_of(stamp), (), 5, 0, ())

    def costs(stamp: Any, device: Any, measure: Any, ways: Any, tell: Any, seconds: float) -> None:
        given["costs"] = seconds

    monkeypatch.setattr(tune_command, "run", launches)
    monkeypatch.setattr(tune_costs, "run", costs)
    monkeypatch.setattr(tune_command, "_page", lambda stamp, tell: None)
    chosen = tune_command.plan(None, None, tune_command.Sizes(), quick=False, dry_run=False)
    for minutes, kept in ((30, 10), (600, 20)):
        done = tune_command.measure(chosen, minutes, False, lambda what, share: None)
        assert given["costs"] - given["launches"] == pytest.approx(60 * kept, abs=10)
    assert f"time is up, 5 kernels and {len(chosen.costs)} times for the costs are left: run the command again" in tune_command.text(done)


@pytest.mark.usefixtures("here")
def test_without_any_time_there_is_no_report_and_it_says_so() -> None:
    chosen = tune_command.plan(None, None, tune_command.Sizes(), quick=False, dry_run=False)
    done = tune_command.measure(chosen, 0, False, lambda what, share: None)
    assert "no report: ROWS is " in tune_command.text(done)


@pytest.mark.usefixtures("here")
def test_a_quick_look_and_sizes_of_ones_own_measure_no_costs() -> None:
    assert tune_command.plan(None, None, tune_command.Sizes(), quick=True, dry_run=False).costs == ()
    assert tune_command.plan(None, None, tune_command.Sizes(h=3), quick=False, dry_run=False).costs == ()
    assert tune_command.plan("triton-tile", None, tune_command.Sizes(), quick=False, dry_run=False).costs == ()
    backward = tune_command.plan(None, "backward", tune_command.Sizes(), quick=False, dry_run=False)
    assert {row["direction"] for row in backward.costs} == {"bwd"}


# How it is measured


def test_no_flag_of_the_users_reaches_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = wanted(RTX4090, WAYS)
    monkeypatch.setenv("NSA_SEL_TRITON_BLOCK_L", "16")
    monkeypatch.setenv("NSA_SEL_AUTOTUNE", "off")
    monkeypatch.setenv("NSA_DEBUG_TIMING", "1")
    seen: list[dict[str, str]] = []

    def look(row: Row) -> Row:
        if not seen:
            seen.append({name: text for name, text in os.environ.items() if name.startswith("NSA_")})
            forced = explain_request(cost_fit.request_of(cost_fit.case_of(row), None, False), RTX4090, row["backend"])
            assert forced.forward == row["backend"]  # although a device rule keeps Triton off
        return priced(row)

    assert wanted(RTX4090, WAYS) == plain
    run(stamp_of(RTX4090), RTX4090, look, ("decode",))
    assert seen == [{"NSA_TRITON_SEL_FORCE": "1", "NSA_SEL_CACHE": os.environ["NSA_SEL_CACHE"]}]
    assert "NSA_TRITON_SEL_FORCE" not in os.environ
    assert os.environ["NSA_SEL_TRITON_BLOCK_L"] == "16"


SMALL = cases.Case("cost-small", "random", 1, 24, 256, 1, 2, 16, 16, 2, 64, "float32")


def test_a_backend_is_timed_and_held_to_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = tune_costs.Runner("cpu", rep=1)
    for case, direction in ((SMALL, "fwd"), (SMALL, "bwd"), (SMALL._replace(S=1), "decode")):
        row = measure({**case._asdict(), "direction": direction, "backend": "sdpa-packed", "launches": ""})
        assert 0 < row["ms_p20"] <= row["ms_median"] <= row["ms_p80"]
        assert (row["case"], row["direction"], row["backend"]) == (case.case, direction, "sdpa-packed")
        assert row["mae"] < 1e-5
    monkeypatch.setattr(tune_costs, "MOST_ERROR", 1e-12)
    with pytest.raises(WrongResult, match=r"the mean absolute error is .*, allowed 1e-12"):
        measure({**SMALL._asdict(), "direction": "bwd", "backend": "sdpa-packed", "launches": ""})


def test_a_lost_context_is_told_from_other_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {**SMALL._asdict(), "direction": "fwd", "backend": "sdpa-packed", "launches": ""}
    for text, kind in (("CUDA error: an illegal memory access was encountered", ContextLost), ("out of resource", RuntimeError)):

        def fail(*of: Any, text: str = text) -> Any:
            raise RuntimeError(text)

        monkeypatch.setattr(tune_costs, "make_problem", fail)
        with pytest.raises(kind, match=text) as caught:
            tune_costs.Runner("cpu")(row)
        assert type(caught.value) is kind


def test_the_order_puts_ways_that_serve_early_first() -> None:
    assert set(ORDER) == set(WAYS)
