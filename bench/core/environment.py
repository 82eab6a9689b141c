"""What every row says of where it was measured: device, driver, versions, commit and command."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from nsa_sel.settings.flags import COMMIT_FLAG

ROOT = Path(__file__).resolve().parents[2]
STATE_SECONDS = 10.0  # age up to which a reading of clocks and temperature is used again: nvidia-smi takes up to a second
_STATE = ("sm_mhz", "memory_mhz", "temperature_c")
_last_state: tuple[float, dict[str, int | None]] = (-STATE_SECONDS, {})


def stamp(device: str = "cuda") -> dict[str, Any]:
    """Return device, driver, versions, commit and the command, free of machine paths."""
    on_gpu = device == "cuda"
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else _processor(),
        "driver": _output("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "torch": torch.__version__,
        "triton": _version("triton") if on_gpu else None,
    }
    if not on_gpu:
        facts |= {"numba": _version("numba"), "threads": torch.get_num_threads()}
    return {**facts, "commit": commit(), "command": command()}


def commit() -> str:
    """Return what NSA_SEL_COMMIT says, else the commit of this checkout; a repository around this folder is no checkout of it.

    Uncommitted changes, but for those of rows, add a hash to the commit.
    """
    told = os.environ.get(COMMIT_FLAG)
    if told:
        return told
    top, _, head = (_output("git", "rev-parse", "--show-toplevel", "--short", "HEAD") or "").partition("\n")
    if not head or Path(top) != ROOT:
        return "not a checkout"
    changes = _output("git", "diff", "HEAD", "--", ".", ":!bench/results")
    return f"{head}+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else head


def command() -> str:
    """The command line of this program, free of machine paths."""

    def bare(argument: str) -> str:
        option, equals, value = argument.rpartition("=")
        return f"{option}{equals}{Path(value).name if Path(value).is_absolute() else value}"

    program, bench = Path(sys.argv[0]), Path(__file__).resolve().parents[1]
    if program.stem in ("nsa-sel", "__main__"):
        called = "nsa-sel"
    elif program.resolve().is_relative_to(bench):
        called = f"python -m nsa_sel.bench.{'.'.join(program.resolve().relative_to(bench).with_suffix('').parts)}"
    else:
        called = f"python {program.parent.name}/{program.name}"
    return " ".join((called, *(shlex.quote(bare(argument)) for argument in sys.argv[1:])))


def example(name: str) -> Any:
    """A program of examples/, which only a checkout has, as a module."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def gpu_state(device: str = "cuda") -> dict[str, int | None]:
    """Clocks in MHz and temperature of the GPU as they are, at most `STATE_SECONDS` old; they are never set. None each on a CPU."""
    global _last_state
    if device != "cuda":
        return dict.fromkeys(_STATE)
    now = time.monotonic()
    if now - _last_state[0] >= STATE_SECONDS:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        which = f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else str(torch.cuda.current_device())
        query = "--query-gpu=clocks.sm,clocks.mem,temperature.gpu"
        numbers = (_output("nvidia-smi", "-i", which, query, "--format=csv,noheader,nounits") or "").split(",")
        found = [int(number) if number.strip().isdigit() else None for number in numbers]
        _last_state = now, dict(zip(_STATE, [*found, None, None, None], strict=False))
    return _last_state[1]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
