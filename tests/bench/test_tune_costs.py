"""The costs that `nsa-sel tune` measures: the suite, what is kept, the models, and what decisions make of them."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.contenders import SLOW
from nsa_sel.bench.core.parity import WrongResult
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.tune import cost_fit, costs, resume, thresholds, tuned_file
from nsa_sel.bench.tune.cost_fit import TERMS
from nsa_sel.bench.tune.costs import ORDER, ROWS, measure_costs, wanted
from nsa_sel.bench.tune.resume import Run
from nsa_sel.bench.tune.tuned_file import beside
from nsa_sel.core import registry
from nsa_sel.core.decide import explain_request
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import DeviceInfo
from nsa_sel.settings import tuned
from nsa_sel.settings.config import shipped_configs
from nsa_sel.settings.schema import WAYS, Costs
from nsa_sel.settings.tuned import stamp_of
from tests.helpers import policy_cases
from tests.helpers.policy_cases import A100, H200, RTX4090, SHORT, replace
from tests.helpers.tune_cases import json_lines, priced, sides, write

pytestmark = pytest.mark.usefixtures("tuned_folder")
UNKNOWN = replace(policy_cases.UNKNOWN, sm_count=H200.sm_count)  # as many as the times of `priced` are for
STAMP = stamp_of(UNKNOWN)
RUN = Run(STAMP)
PHASES = {*WAYS, "tokens", "choose", "choose-backward"}
MODEL = shipped_configs()["sm90_h200.yaml"].costs.models["triton-group/forward"]  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "missing", lambda name: ())


def identity(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(field) for field in resume.IDENTITY)


def phase_of_name(model: str) -> str:
    return model.partition("/")[2]


def of_profile(shipped: str) -> str:
    """What sources say of a profile's models that the user's tuning does not replace: those of quantized caches."""
    profile = shipped_configs()["sm90_h200.yaml"].costs
    kept = sorted({phase_of_name(name) for name in profile.models} - PHASES) if profile else []
    return f"; {', '.join(kept)}: {shipped}" if kept else ""


def again(row: Row) -> Row:
    """A row that earlier runs have measured."""
    pytest.fail("measured again")


def settings(request: Any = SHORT, device: DeviceInfo = UNKNOWN) -> Any:
    """Of a decision, with the user's file as it is now."""
    tuned.forget()
    return explain_request(request, device).settings


# The suite


def test_the_suite_spans_what_the_models_need_and_is_small() -> None:
    suite = cases.cost_cases()
    assert 20 <= len(suite) <= 41
    assert len({case.case for case in suite}) == len(suite)
    prefill = [case for case in suite if not cases.decodes(case)]
    assert {case.distribution for case in prefill} == {"real", "random"}
    assert {1024, 8192, 32768} <= {case.S for case in prefill}
    assert {case.h for case in prefill} == {1, 4, 16}
    assert {case.Dk for case in prefill} == {case.Dk for case in suite if case.S == 1} == {64, 128, 192}
    asked = wanted(UNKNOWN, WAYS)
    counted = Counter(map(cost_fit.model_of, wanted(H200, WAYS)))
    for name, terms in TERMS.items():
        if name.endswith("-e4m3"):
            continue  # a GPU without rows of quantized caches goes by preference
        assert counted[name] > len(set(terms) - cost_fit.OF_CACHES), name
    elsewhere = {cost_fit.model_of(row) for row in asked} | {"choose-cuda/choose", "choose-cuda/choose-backward"}
    assert elsewhere == set(counted), "one of the kernels runs on Hopper alone"
    assert max(row["S"] for row in asked if row["backend"] in SLOW) == 8192
    assert len({identity(row) for row in asked}) == len(asked)
    assert [row["direction"] for row in asked] == sorted((row["direction"] for row in asked), key=["fwd", "decode", "bwd"].index)
    assert set(ORDER) == set(WAYS)


# What a decision makes of it


def test_a_gpu_that_nobody_has_measured_picks_by_predicted_time() -> None:
    request = replace(SHORT, needs_grad=True)
    before = explain_request(request, UNKNOWN)
    assert before.settings.sources["costs"] == "sm90_h200.yaml (assumed)"
    thresholds.measure_thresholds(RUN, sides, WAYS)
    found = measure_costs(RUN, UNKNOWN, priced, WAYS)
    assert found is not None
    assert set(map(phase_of_name, found.models)) == PHASES
    assert len(found.models) == 24  # seven backends forward and backward, four decode, two of which several tokens; two that choose
    off = {name: model.worst_error for name, model in found.models.items() if "token" not in name and model.worst_error >= 0.01}
    assert not off, "they fit what made the times"
    tuned.forget()
    after = explain_request(request, UNKNOWN)
    on_h200 = explain_request(request, H200)
    assert (after.forward, after.backward) == (on_h200.forward, on_h200.backward)
    random = cases.prefill("random", 32768, 1)
    assert explain_request(cost_fit.request_of(random, cost_fit.sharing_of(random), False), UNKNOWN).forward == "cuda-block"
    decode = explain_request(replace(SHORT, S=1), UNKNOWN)
    assert decode.forward == min(decode.predictions, key=lambda p: p.ms).backend != "sdpa-packed"
    assert len([p for p in after.predictions if p.direction == "forward"]) == 7
    name = tuned.file_of(STAMP).name
    assert after.settings.sources["costs"] == f"{after.settings.tuned}{of_profile('sm90_h200.yaml (assumed)')}"
    assert f"({after.settings.sources['costs']})" in after.rule
    assert name in after.rule
    assert "`nsa-sel tune` on this machine" in str(after.settings.costs and after.settings.costs.provenance)
    assert Decision.from_json(after.to_json()).replay() == ()
    assert after.settings.fingerprint != before.settings.fingerprint


@pytest.mark.parametrize(("device", "shipped"), [(H200, "sm90_h200.yaml"), (A100, "sm90_h200.yaml (assumed)")])
def test_they_go_before_a_profiles_and_leave_the_ways_that_were_not_measured(device: DeviceInfo, shipped: str) -> None:
    before = settings(device=device)
    assert before.sources["costs"] == shipped
    measure_costs(Run(stamp_of(device)), device, lambda row: priced(row, 3.0), ("forward",))
    after = settings(device=device)
    others = {phase_of_name(name) for name in before.costs.models} - {"forward", "choose"}
    assert after.sources["costs"] == f"{after.tuned}; {', '.join(sorted(others))}: {shipped}"
    for name, model in before.costs.models.items():
        assert (after.costs.models[name] == model) == (phase_of_name(name) in others), name
    measure_costs(Run(stamp_of(device)), device, lambda row: priced(row, 3.0), WAYS)
    after = settings(device=device)
    assert after.sources["costs"] == f"{after.tuned}{of_profile(shipped)}"
    assert settings(device=replace(device, name="another")).tuned is None


@pytest.mark.parametrize(("changes", "words"), [({"host": -1.0}, r">= 0\.0.*host"), ({"terms": {"launch": -1.0}}, r">= 0\.0.*terms")])
def test_models_that_are_none_are_refused(changes: dict[str, Any], words: str) -> None:
    write(device=UNKNOWN)
    model = replace(MODEL, **changes)
    tuned_file.rewrite(STAMP, costs=Costs(provenance="x", dtypes=("bfloat16",), models={"triton-tile/forward": model}))
    with pytest.warns(RuntimeWarning, match=rf"{words}.*remove the file and run `nsa-sel tune` again"):
        assert settings().tuned is None


# What is kept


def test_what_fails_is_recorded_and_its_model_left_out() -> None:
    def broken(row: Row) -> Row:
        if row["backend"] == "triton-block" and row["direction"] == "bwd":
            raise torch.OutOfMemoryError("CUDA out of memory\nand more")
        return priced(row)

    found = measure_costs(RUN, UNKNOWN, broken, WAYS)
    assert found is not None
    asked = {cost_fit.model_of(row) for row in wanted(UNKNOWN, WAYS)}
    assert asked & set(TERMS) - set(found.models) == {"triton-block/backward"}
    errors = [row["error"] for row in json_lines(beside(STAMP, ROWS)) if "error" in row]
    assert set(errors) == {"OutOfMemoryError: CUDA out of memory"}
    assert measure_costs(RUN, UNKNOWN, again, WAYS) == found


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
    measure_costs(Run(stamp_of(RTX4090)), RTX4090, look, ("decode",))
    assert seen == [{"NSA_TRITON_SEL_FORCE": "1", "NSA_SEL_CACHE": os.environ["NSA_SEL_CACHE"]}]
    assert "NSA_TRITON_SEL_FORCE" not in os.environ
    assert os.environ["NSA_SEL_TRITON_BLOCK_L"] == "16"


SMALL = cases.Case("cost-small", "random", 1, 24, 256, 1, 2, 16, 16, 2, 64, "float32")


def small_row(direction: str = "bwd", **changes: Any) -> Row:
    return {**SMALL._replace(**changes)._asdict(), "direction": direction, "backend": "sdpa-packed", "launches": ""}


def test_a_backend_is_timed_and_compared_with_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = costs.Runner("cpu", rep=1)
    for wanted_row in (small_row("fwd"), small_row("bwd"), small_row("decode", S=1)):
        row = measure(wanted_row)
        assert 0 < row["ms_p20"] <= row["ms_median"] <= row["ms_p80"]
        assert [row[field] for field in ("case", "direction", "backend")] == [SMALL.case, wanted_row["direction"], "sdpa-packed"]
        assert row["mae"] < 1e-5
    monkeypatch.setattr(costs, "MAX_ERROR", 1e-12)
    with pytest.raises(WrongResult, match=r"the mean absolute error is .*, allowed 1e-12"):
        measure(small_row())
