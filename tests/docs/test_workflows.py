"""The CI workflows: each lane runs a make target that exists, with the versions of constraints.txt; the lanes select tests and pass."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.paths import ROOT
from tests.policies.test_lanes import LANES

MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = {file.name: yaml.safe_load(file.read_text()) for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
JOBS = [(file, name) for file, workflow in WORKFLOWS.items() for name in workflow["jobs"]]


def phony() -> set[str]:
    """The targets that the Makefile declares."""
    (line,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    return set(line.split())


def commands(job: dict[str, Any]) -> list[str]:
    """The commands that a job runs, for every choice of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    found = []
    for choice in itertools.product(*matrix.values()):
        chosen = dict(zip(matrix, choice, strict=True))
        for step in job["steps"]:
            filled = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found: str(chosen[found[1]]), step.get("run", ""))  # noqa: B023
            assert "${{" not in filled
            found += [line.strip() for line in filled.splitlines() if line.strip()]
    return found


def made(job: dict[str, Any]) -> list[str]:
    """The make targets that a job runs."""
    return [word for command in commands(job) for word in command.split()[1:] if command.startswith("make ") and "=" not in word]


def test_the_workflows_that_were_asked_for_are_there() -> None:
    assert set(WORKFLOWS) == {"ci.yml", "triton-gpu-smoke.yml"}
    assert [made(job)[0] for job in WORKFLOWS["ci.yml"]["jobs"].values()] == ["lint", "test", "package"]
    smoke = WORKFLOWS["triton-gpu-smoke.yml"]["jobs"]
    assert set(made(smoke["routing"])) == {f"lane-{lane}" for lane in LANES}
    assert smoke["parity"]["strategy"]["matrix"]["gpu"] == ["a100", "h100"]
    assert "gpu-test" in made(smoke["parity"])
    assert {"lane-sm89", "gpu-lane"} <= set(made(smoke["adr"]))


@pytest.mark.parametrize(("file", "name"), JOBS)
def test_every_lane_runs_existing_targets_alone(file: str, name: str) -> None:
    """Nothing is installed but by make, which takes the versions from constraints.txt."""
    job = WORKFLOWS[file]["jobs"][name]
    assert made(job)
    assert set(made(job)) <= phony()
    assert [command for command in commands(job) if not command.startswith("make ")] == []
    assert job["timeout-minutes"] <= 60
    assert WORKFLOWS[file]["permissions"] == {"contents": "read"}


@pytest.mark.parametrize(("file", "name"), JOBS)
def test_pull_requests_never_reach_our_own_machines(file: str, name: str) -> None:
    job = WORKFLOWS[file]["jobs"][name]
    if "self-hosted" in job["runs-on"]:
        assert "gpu" in job["runs-on"]
        assert job["if"] == "github.event_name != 'pull_request'"
    else:
        assert job["runs-on"].startswith("ubuntu-")


def test_a_submission_runs_lint_the_tests_and_their_fast_half_on_one_thread() -> None:
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in script if line.startswith("make ")] == ["make lint", "make test", "make test-one-thread"]
    (command,) = re.findall(r"^test-one-thread:.*\n\t(.*)$", MAKEFILE, flags=re.MULTILINE)
    assert command == "OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m 'not gpu and not slow' -k 'not triton'"


def test_torch_is_pinned_for_every_lane() -> None:
    """constraints.txt pins it, the target that all others stand on installs with it, and no hosted job reuses a cache of other pins."""
    (pin,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+", pin)
    installs = re.findall(r"^\t.*pip install.*$", MAKEFILE, flags=re.MULTILINE)
    assert installs
    assert all("-c constraints.txt" in line for line in installs)
    assert all(
        re.search(rf"^{target}:.*\$\(STAMP\)", MAKEFILE, flags=re.MULTILINE)
        for target in ("test", "test-one-thread", "lint", "package", "venv")
    )
    for file, name in JOBS:
        for step in WORKFLOWS[file]["jobs"][name]["steps"]:
            if step.get("uses", "").startswith("actions/setup-python"):
                assert set(step["with"]["cache-dependency-path"].split()) == {"constraints.txt", "pyproject.toml"}


def test_ci_covers_the_oldest_python() -> None:
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    versions = WORKFLOWS["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert versions[0] == oldest
    assert versions == sorted(versions, key=lambda version: int(version.split(".")[1]))


@pytest.mark.slow
@pytest.mark.parametrize("lane", LANES)
def test_a_lane_selects_tests_and_passes(lane: str) -> None:
    """As `make lane-...` runs it, with this Python in the place of `.venv`."""
    here = [f"BIN={Path(sys.executable).parent}", "--old-file=.venv/.installed"]
    done = subprocess.run(["make", f"lane-{lane}", *here], cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= 10
    assert "failed" not in done.stdout
    assert "create-venv" not in done.stdout
