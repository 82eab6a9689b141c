"""The command `nsa-sel tune`, without a GPU: its plan, what it measures first and last, and what it says."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from nsa_sel import explain_request
from nsa_sel.bench.tune import command, costs
from nsa_sel.bench.tune.costs import ROWS, wanted
from nsa_sel.bench.tune.search_space import CASES, SPACES
from nsa_sel.bench.tune.tuned_file import beside
from nsa_sel.cli.app import app
from nsa_sel.core import registry
from nsa_sel.settings import tuned
from nsa_sel.settings.schema import WAYS, Way
from nsa_sel.settings.tuned import stamp_of
from tests.helpers import policy_cases
from tests.helpers.policy_cases import H200, SHORT, replace
from tests.helpers.tune_cases import fake_gpu, json_lines, some_jobs

pytestmark = pytest.mark.usefixtures("tuned_folder")
UNKNOWN = replace(policy_cases.UNKNOWN, sm_count=H200.sm_count)  # as many as the times of `priced` are for
STAMP = stamp_of(UNKNOWN)


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
    assert "x faster, in two rounds" in result.output
    assert str(tuned.file_of(stamp_of(H200))) in result.output.replace("\n", "")
    assert tuned.in_force(H200) is not None
    again = json.loads(invoke(*arguments, "--json").stdout)
    assert (again["taken"], again["left"]) == (0, 0)
    assert again["results"][0]["key"] == msgspec.to_builtins(some_jobs()[0].key)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that nobody has measured, and times for all that is measured on it."""
    fake_gpu(monkeypatch, UNKNOWN)
    monkeypatch.setattr(registry, "missing", lambda name: ())  # everything is installed


def plan(backend: str | None = None, way: Way | None = None, *, quick: bool = False, **sizes: int) -> command.Plan:
    return command.plan(backend, way, command.Sizes(**sizes), quick=quick, dry_run=False)  # type: ignore[arg-type]


def ignore(what: str, share: float) -> None:
    """Progress that nobody looks at."""


@pytest.mark.usefixtures("here")
def test_one_command_ends_with_a_profile_that_is_used() -> None:
    chosen = plan()
    assert len(chosen.costs) == len(wanted(UNKNOWN, WAYS))
    some = chosen._replace(jobs=[job for job in chosen.jobs if job.kernel == "triton-tile/forward"][:1])
    words = some.text()
    assert words.index("first the threshold") < words.index("configs to measure") < words.index("then, with the configs that won")
    assert f"{len(chosen.costs)} times of {', '.join(costs.BACKENDS)}, choose-triton, choose-torch on 54 cases" in words
    done = command.measure(some, 60, False, ignore)
    assert done.costs is not None
    assert done.costs_left == 0
    winner = done.report.results[0].winner
    assert winner is not None
    of_tuned = [row for row in json_lines(beside(STAMP, ROWS)) if winner.config_id("triton-tile/forward") in row["launches"]]
    assert {(row["Dk"], row["h"], row["direction"]) for row in of_tuned} == {(128, 16, "fwd")}, "costs are of the configs that won"
    assert explain_request(SHORT, UNKNOWN).forward == explain_request(SHORT, H200).forward
    words = done.text()
    assert "triton-tile/backward" in words
    assert "time is up" not in words
    document = json.loads(msgspec.json.encode(done.document()))
    assert set(document["costs"]["models"]) == set(done.costs.models)
