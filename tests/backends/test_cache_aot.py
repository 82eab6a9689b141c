"""The Triton kernels of a cache's new tokens, compiled for a GPU that is not here: they fit every GPU, and nothing spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow


def test_append_and_compression_fit() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "tests/helpers/cache_aot.py", "90", "many"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [kernel["kernel"] for kernel in found] == ["append_kernel", "hidden_kernel", "out_kernel"]
    for kernel in found:
        assert kernel["shared"] <= 99 << 10, kernel  # of SM 8.6 and 8.9
        assert kernel["spilled"] == 0, kernel
