"""The Triton kernels of the gated sum, compiled for GPUs that are not here: nothing spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sm", [80, 90])
def test_gates_compile(sm: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "tests/helpers/gate_aot.py", str(sm)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [kernel["kernel"] for kernel in found] == ["gate_kernel", "raise_kernel", "delta_kernel", *["gate_backward_kernel"] * 2]
    assert all(kernel["spilled"] == 0 for kernel in found), found
