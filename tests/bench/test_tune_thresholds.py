"""The thresholds that `nsa-sel tune` measures: the rule, what is kept, and what decisions make of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa_sel.bench.core.store import Row
from nsa_sel.bench.tune import tuned_file
from nsa_sel.bench.tune.resume import Run
from nsa_sel.bench.tune.thresholds import ROWS, measure_thresholds
from nsa_sel.core.decide import explain_request
from nsa_sel.settings import tuned
from nsa_sel.settings.schema import WAYS
from nsa_sel.settings.tuned import stamp_of
from tests.helpers.policy_cases import LONG, RTX4090, UNKNOWN, replace
from tests.helpers.tune_cases import json_lines, timed, write

pytestmark = pytest.mark.usefixtures("tuned_folder")
STAMP = stamp_of(UNKNOWN)
RUN = Run(STAMP)


def sides(row: Row) -> Row:
    """Triton is twice as fast from 256 keys on; backward it never is."""
    fast = row["n"] * row["block"] >= 256 and row["direction"] != "bwd"
    return timed(1.0 if row["backend"] == "triton-group" and fast else 2.0)


def test_the_rule_is_that_of_the_profiles_and_decisions_follow_it() -> None:
    request = replace(LONG, max_length=128, needs_grad=True)
    before = explain_request(request, UNKNOWN)
    assert (before.forward, before.settings.min_length("backward")) == ("triton-tile", 16)  # assumed
    found = measure_thresholds(RUN, sides, WAYS)
    assert {way: (known.verdict, known.value) for way, known in found.items()} == {
        "forward": ("measured", 256), "backward": ("undecided", None), "decode": ("measured", 256),
    }  # fmt: skip
    tuned.forget()
    after = explain_request(request, UNKNOWN)
    assert (after.settings.min_length("forward"), after.settings.min_length("backward")) == (256, 16)
    assert after.settings.sources["sel_triton_min_L"] == after.settings.tuned
    assert after.settings.fingerprint != before.settings.fingerprint
    assert ("triton-group: min-length" in before.steps, "triton-group: min-length" in after.steps) == (False, True)


def test_thresholds_and_configs_share_a_file() -> None:
    write(device=UNKNOWN)
    measure_thresholds(RUN, sides, ("forward",))
    tuned_file.rewrite(STAMP, commit="later")
    file = tuned_file.written(STAMP)
    assert (file.commit, list(file.thresholds)) == ("later", ["forward"])


@pytest.mark.parametrize("by", ["flag", "file"])
def test_flag_and_file_go_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: str) -> None:
    measure_thresholds(RUN, sides, WAYS)
    if by == "flag":
        monkeypatch.setenv("NSA_SEL_TRITON_MIN_L", "77")
    else:
        (tmp_path / "own.yaml").write_text("provenance: mine\nruntime: {sel_triton_min_L: 77}\n")
        monkeypatch.setenv("NSA_SEL_CONFIG", str(tmp_path / "own.yaml"))
    settings = explain_request(LONG, UNKNOWN).settings
    assert settings.sel_triton_min_L == 77
    assert settings.tuned is not None


def test_the_device_rule_stays() -> None:
    measure_thresholds(Run(stamp_of(RTX4090)), sides, WAYS)
    decision = explain_request(LONG, RTX4090)
    assert decision.settings.min_length("forward") == 256
    assert decision.forward == "sdpa-packed"


def test_a_case_that_fails_leaves_its_way_as_it_was() -> None:
    def broken(row: Row) -> Row:
        if (row["case"], row["backend"]) == ("threshold-decode-D64-L4096", "triton-group"):
            raise RuntimeError("out of memory")
        return sides(row)

    found = measure_thresholds(RUN, broken, WAYS)
    assert set(found) == {"forward", "backward"}
    assert [row["error"] for row in json_lines(tuned_file.beside(STAMP, ROWS)) if "error" in row] == ["RuntimeError: out of memory"]
