"""The Triton kernels of a cache's new tokens, compiled for GPUs that are not here: they fit every GPU, and hardly spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("sm", "shapes"), [(90, ("one", "many")), (80, ("many-fp32",))])
def test_append_and_compression_fit(sm: int, shapes: tuple[str, ...]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "tests/helpers/cache_aot.py", str(sm), *shapes]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [kernel["kernel"] for kernel in found] == ["append_kernel", "hidden_kernel", "out_kernel"] * len(shapes)
    for kernel in found:
        assert kernel["shared"] <= 99 << 10, kernel  # of SM 8.6 and 8.9
        assert kernel["spilled"] <= 16, kernel
