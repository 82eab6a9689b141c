"""A few of the Triton kernels, compiled for AMD GPUs that are not here. They have run on none (docs/kernels.md says what is missing)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_kernels_of_decoding_compile_for_amd_and_fit(arch: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "tests/helpers/hip_aot.py", arch, "triton-token", "decode-h16", "triton-group", "paged-16"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [kernel["kernel"] for kernel in found] == ["forward_kernel", "combine_kernel", "forward_blocks_kernel"]
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["hsaco"] > 0, kernel
