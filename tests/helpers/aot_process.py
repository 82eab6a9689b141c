"""Run a script of tests/helpers that compiles for GPUs that are not here: in a process of its own, as these tests interpret Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.helpers.paths import ROOT

# Line numbers cost time and change no instruction.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_DISABLE_LINE_INFO": "1"}


def compiled(script: str, *arguments: str) -> list[dict[str, Any]]:
    """What the script prints: a JSON line per kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | ENVIRONMENT
    command = [sys.executable, f"tests/helpers/{script}", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]
