"""The CI workflows run make targets that exist, with the versions of constraints.txt; the lanes select tests and pass."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.files import ROOT
from tests.policies.test_lanes import DEVICES, LANES

MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = {file.name: yaml.safe_load(file.read_text()) for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
JOBS = [(file, name) for file, workflow in WORKFLOWS.items() for name in workflow["jobs"]]


def phony() -> set[str]:
    """The targets that the Makefile declares."""
    (line,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    return set(line.split())


def made(job: dict[str, Any]) -> list[str]:
    """The make targets that a job runs, which runs nothing else: make installs the versions of constraints.txt."""
    commands = [step["run"].strip() for step in job["steps"] if "run" in step]
    assert commands
    assert all(command.startswith("make ") and "\n" not in command for command in commands)
    lanes = job.get("strategy", {}).get("matrix", {}).get("lane", [""])
    return [command.replace("${{ matrix.lane }}", lane).split()[1] for lane in lanes for command in commands]


def test_the_workflows_that_were_asked_for_are_there() -> None:
    assert set(WORKFLOWS) == {"ci.yml", "triton-gpu-smoke.yml"}
    assert [made(job)[0] for job in WORKFLOWS["ci.yml"]["jobs"].values()] == ["lint", "test", "docs", "package"]
    smoke = WORKFLOWS["triton-gpu-smoke.yml"]["jobs"]
    assert set(made(smoke["routing"])) == {f"lane-{lane}" for lane in LANES}
    assert smoke["parity"]["strategy"]["matrix"]["gpu"] == ["a100", "h100"]
    assert "gpu-test-full" in made(smoke["parity"])
    assert {"lane-sm89", "gpu-lane"} <= set(made(smoke["adr"]))


@pytest.mark.parametrize(("file", "name"), JOBS)
def test_every_job_runs_only_existing_targets(file: str, name: str) -> None:
    job = WORKFLOWS[file]["jobs"][name]
    assert set(made(job)) <= phony()
    assert job["timeout-minutes"] <= 60
    assert WORKFLOWS[file]["permissions"] == {"contents": "read"}


@pytest.mark.parametrize(("file", "name"), JOBS)
def test_pull_requests_never_run_on_self_hosted_machines(file: str, name: str) -> None:
    job = WORKFLOWS[file]["jobs"][name]
    if "self-hosted" in job["runs-on"]:
        assert "gpu" in job["runs-on"]
        assert job["if"] == "github.event_name != 'pull_request'"
    else:
        assert job["runs-on"].startswith("ubuntu-")


def make(*arguments: str) -> str:
    """What make prints, with this Python instead of `.venv`."""
    here = [f"BIN={Path(sys.executable).parent}", "--old-file=.venv/.installed"]
    done = subprocess.run(
        ["make", "--no-print-directory", *arguments, *here], cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_lane_selects_tests_and_passes() -> None:
    """One is run; the others differ by the word alone that selects tests by their ids, and these tests are part of the suite."""
    python = f"{Path(sys.executable).parent}/python"
    commands = make("--dry-run", *(f"lane-{lane}" for lane in LANES)).splitlines()
    assert commands == [f"{python} -m pytest tests/policies/test_lanes.py -k {lane}" for lane in LANES]
    passed = re.search(r"(\d+) passed", make("lane-sm80"))
    assert passed
    assert int(passed[1]) >= 10
    assert {str(device.id).partition("-")[0] for device in DEVICES} == set(LANES)
