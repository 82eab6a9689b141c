"""Check context parallelism: two to four processes on a CPU (gloo), two or four GPUs (NCCL), and parts of it in one process.

The checks of several ranks are in tests/helpers/distributed_checks.py: a start of that program imports torch once for all its processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsa_sel import NSAttention
from nsa_sel.distributed import (
    check_ranks,
    context_parallel,
    context_parallel_attention,
    context_parallel_nsa_attention,
)  # fmt: skip
from nsa_sel.errors import BackendError, NsaSelError
from tests.helpers.calls import assert_refused
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.files import ROOT

PROGRAM = "tests.helpers.distributed_checks"
GPUS = 4 if torch.cuda.device_count() >= 4 else 2  # as many ranks
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={GPUS}", "-m", PROGRAM]
SECONDS = 1800.0  # only against a hang, on a busy machine


def environment(**more: str) -> dict[str, str]:
    """Return the environment without flags and without Triton's interpreter, which the test process may have set."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("NSA_", "TRITON_INTERPRET"))}
    path = os.pathsep.join((str(ROOT), clean.get("PYTHONPATH", "")))
    own = {"NSA_SEL_CACHE": os.devnull + "/nothing", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": path}
    return {**clean, **own, **more}


def assert_passed(folder: Path, output: str, *words: str, number: int = 2) -> None:
    """Check that every rank of every job wrote that it passed all checks. A rank that dies in a check writes nothing."""
    from tests.helpers.distributed_checks import jobs

    for job, (ranks, checks) in jobs(list(words), number).items():
        written = {file.name: json.loads(file.read_text()) for file in (folder / job).glob("rank*.json")}
        failed = [f"{name}, {check}:\n{text}" for name, found in written.items() for check, text in found.items() if text != "passed"]
        assert not failed, "\n".join(failed)
        assert set(written) == {f"rank{rank}.json" for rank in range(ranks)}, f"of {job}, only {sorted(written)} came to an end:\n{output}"
        assert all(list(found) == [check.__name__ for check in checks] for found in written.values())


def run(command: list[str], log: Path, **more: str) -> str:
    """Run the command, kill all processes that it started, and return the end of their output."""
    with log.open("wb") as opened:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(**more), stdout=opened, stderr=opened, start_new_session=True)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return log.read_text()[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize("words", [("all", "three"), pytest.param(("four",), marks=pytest.mark.thorough)], ids="-".join)
def test_cpu_ranks_pass_all_checks(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Two ranks pass all checks, three ranks those of a shared layer; four ranks all."""
    output = run([sys.executable, "-m", PROGRAM, "cpu", str(tmp_path), *words], tmp_path / "log")
    assert_passed(tmp_path, output, *words)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("share", range(1, 8))
def test_gpus_pass_a_share_of_all_checks(tmp_path: Path, share: int) -> None:
    """Shares run at once with pytest-xdist: most of the time kernels are compiled, and the oracle computes on a CPU."""
    word = f"share{share}"
    assert_passed(tmp_path, run([*TORCHRUN, "cuda", str(tmp_path), word], tmp_path / "log"), word, number=GPUS)


# One process


def test_calls_outside_a_job_are_refused() -> None:
    words, blocks = "is called outside a distributed job", make_blocks(1, 16, 1, 16, 1, 16)
    assert_refused(
        (f"context_parallel_attention {words}", lambda: context_parallel_attention(*make_qkv(), blocks)),
        (f"check_ranks {words}", check_ranks),
        (f"context_parallel {words}", lambda: context_parallel(NSAttention(8, 1, 1, 4))),
        (f"context_parallel_nsa_attention {words}", lambda: context_parallel_nsa_attention(*[torch.zeros(1)] * 8)),
        error=NsaSelError,
    )


def test_compiled_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_sel.core.transforms.is_compiling", lambda: True)
    traced = r"context_parallel_nsa_attention is called in a function that torch\.compile traces"
    assert_refused(
        (
            r"Remedy: call it in a function under torch\.compiler\.disable",
            lambda: context_parallel_attention(*make_qkv(), make_blocks(1, 16, 1, 16, 1, 16)),
        ),
        (traced, lambda: context_parallel_nsa_attention(*[torch.zeros(1)] * 8)),
        error=BackendError,
    )
