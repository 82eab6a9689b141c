"""Which tests run where, by NSA_TEST_TRITON_SEL, -m and what the machine has."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import USUAL, mode
from tests.helpers.files import ROOT


@pytest.mark.parametrize(
    ("markers", "wanted", "gpu", "expected"),
    [
        (USUAL, False, False, (USUAL, True)),  # make test
        (USUAL, False, True, (USUAL, True)),
        (USUAL, True, True, ("gpu", False)),  # the flag alone
        (USUAL, True, False, ("not thorough", True)),
        ("thorough", False, True, ("thorough", True)),  # make test-thorough
        ("gpu and not slow", True, True, ("gpu and not slow", False)),  # make gpu-test-full
        ("gpu", False, True, ("gpu", False)),
        ("gpu", False, False, ("gpu", True)),
        ("not gpu and not slow", False, True, ("not gpu and not slow", True)),
    ],
)
def test_what_runs_and_whether_it_is_interpreted(markers: str, wanted: bool, gpu: bool, expected: tuple[str, bool]) -> None:
    assert mode(markers, wanted, gpu) == expected


def without_a_gpu(*command: str, **flags: str) -> subprocess.CompletedProcess[str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("NSA_", "TRITON_", "PYTEST_"))}
    environment = {**clean, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **flags}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_parity_command_passes_without_a_gpu() -> None:
    """On some tests of each kind: those of the interpreter run; those of a GPU are skipped and say why."""
    files = [f"tests/test_triton_sel_parity{name}.py" for name in ("", "_blocks", "_gpu")]
    chosen = ("-k", "triton_sel_parity and (failure or reruns)", "-rs", "-p", "no:cacheprovider")
    flags = {"NSA_USE_TRITON_SEL": "1", "NSA_TEST_TRITON_SEL": "1"}
    done = without_a_gpu(sys.executable, "-m", "pytest", "-q", *chosen, *files, **flags)
    assert done.returncode == 0, done.stdout + done.stderr
    passed, skipped = (re.search(rf"(\d+) {word}", done.stdout) for word in ("passed", "skipped"))
    assert passed
    assert skipped
    assert "needs a CUDA device" in done.stdout


def test_targets_for_a_gpu_fail_without_one() -> None:
    """Instead of skipping every test, which would look like success. They share one look for a GPU."""
    targets = ("gpu-test", "gpu-test-full", "gpu-lane", "sanitize")
    done = without_a_gpu("make", "--keep-going", *targets, f"PYTHON={sys.executable}")
    assert done.returncode != 0
    assert "torch sees no CUDA device" in done.stderr
    assert re.findall(r"Target '(.*)' not remade because of errors", done.stderr) == [*targets]
    assert " skipped" not in done.stdout
