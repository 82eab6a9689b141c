"""The Triton kernels of sliding windows, compiled for GPUs that are not here: shared memory fits, nothing spills on Hopper."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sm", [86, 90])
def test_windows_fit(sm: int) -> None:
    """8.6 has the least shared memory, 9.0 has TMA and WGMMA."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "tests/helpers/window_aot.py", str(sm), "h16"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in found} == {"forward_kernel", "dq_kernel", "dkdv_kernel"}
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert sm < 90 or (kernel["spilled"] == 0 and kernel["wgmma"] and kernel["tma"]), kernel
