"""cupy-cuda on a GPU: streams, graphs, threads, devices, the cache of compiled kernels, and compute-sanitizer. Parity and the other
matrices are those of every backend (test_triton_sel_parity_gpu.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import nsa_sel
from nsa_sel.backends.cupy_cuda import compiler, launch
from nsa_sel.selection import Selection
from nsa_sel.settings.flags import CACHE_FLAG
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.checks import attend, check_both, check_forward
from tests.helpers.files import ROOT
from tests.helpers.gpus import needs, needs_hopper

pytestmark = [pytest.mark.gpu, needs("cupy-cuda")]


def test_on_another_stream() -> None:
    q, k, v = make_qkv(S=100, G=2, h=4, Dk=64, S_kv=200, dtype=torch.bfloat16, device="cuda")
    selection = make_blocks(1, 100, 2, 200, 3, 32, device="cuda")
    expected = attend("cupy-cuda", q, k, v, selection)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # whoever does not wait for this stream reads q before it is there
        late = q.clone()
        found = attend("cupy-cuda", late, k, v, selection)
    torch.cuda.current_stream().wait_stream(stream)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_streams_share_a_plan() -> None:
    """Each launch has a tile counter of its own."""
    q, k, v = make_qkv(S=1400, G=2, h=16, Dk=128, Dv=128, dtype=torch.bfloat16, device="cuda")
    selection = make_blocks(1, 1400, 2, 1400, 7, 64, device="cuda")
    expected = nsa_sel.selection_attention(q, k, v, selection, backend="cupy-cuda")
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(nsa_sel.selection_attention(q, k, v, selection, backend="cupy-cuda"))
    torch.cuda.synchronize()
    assert all(torch.equal(o, expected) for o in found)


def test_threads_at_once() -> None:
    """Threads pack their arguments apart."""
    cases = []
    for seed in range(8):
        q, k, v = make_qkv(S=60, G=1, h=4, Dk=64, dtype=torch.float16, device="cuda", seed=seed)
        selection = make_blocks(1, 60, 1, 60, 2, 16, seed=seed, device="cuda")
        cases.append((q, k, v, selection, attend("cupy-cuda", q, k, v, selection)[0]))
    torch.cuda.synchronize()
    same: list[bool] = []

    def work(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, selection: Selection, expected: torch.Tensor) -> None:
        for _ in range(50):
            same.append(torch.equal(nsa_sel.selection_attention(q, k, v, selection, backend="cupy-cuda"), expected))

    threads = [threading.Thread(target=work, args=case) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 400


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_on_every_device() -> None:
    for index in range(torch.cuda.device_count()):
        device = f"cuda:{index}"
        q, k, v = make_qkv(S=50, G=1, h=4, Dk=64, dtype=torch.bfloat16, device=device)
        check_both("cupy-cuda", q, k, v, make_blocks(1, 50, 1, 50, 2, 16, device=device))


def test_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kept on disk: after the process has forgotten what it loaded, nothing is compiled."""
    monkeypatch.setenv(CACHE_FLAG, str(tmp_path))
    q, k, v = make_qkv(S=20, G=1, h=4, Dk=40, dtype=torch.float16, device="cuda")
    selection = make_blocks(1, 20, 1, 20, 2, 16, device="cuda")
    launch.function.cache_clear()
    check_forward("cupy-cuda", q, k, v, selection)
    assert list((tmp_path / "cubins").glob("forward_rows-sm_*.cubin"))
    launch.function.cache_clear()

    def never(*arguments: object) -> tuple[bytes, str]:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "compile_source", never)
    check_forward("cupy-cuda", q, k, v, selection)


def sanitized(tool: str, arguments: tuple[str, ...], cache: Path) -> str:
    """What tests/helpers/sanitize.py prints, in which the tool finds nothing."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    assert sanitizer is not None, "no compute-sanitizer on the PATH; remedy: install the CUDA toolkit, with which it comes"
    # Every allocation on its own, so that reads past a tensor's end are seen.
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": paths, CACHE_FLAG: str(cache)}
    # A status is no finding: _driver.parameters asks until the driver says that there is no next one, and a launch that fails raises.
    statuses = ("--report-api-errors", "no") if tool == "memcheck" else ()
    command = [sanitizer, "--tool", tool, *statuses, "--error-exitcode", "86", sys.executable, "tests/helpers/sanitize.py", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1200)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    return run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize(("what", "calls"), [("cupy-cuda 48", 28), ("lists", 5)])
def test_the_sanitizer_finds_nothing(what: str, calls: int, tool: str, tmp_path: Path) -> None:
    assert f"{calls} calls" in sanitized(tool, tuple(what.split()), tmp_path)


@needs_hopper
@pytest.mark.slow
@pytest.mark.parametrize(("what", "calls"), [("cupy-cuda 4 64", 42), ("cuda-block 64 128", 28), ("units", 2)])
def test_memcheck_finds_nothing_in_kernels_of_hopper(what: str, calls: int, tmp_path: Path) -> None:
    """racecheck and synccheck do not support TMA; initcheck takes what it stores as never written."""
    assert f"{calls} calls" in sanitized("memcheck", tuple(what.split()), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "calls"), [("cupy-cuda", 20), ("triton-group", 20), ("layer", 6), ("choosing", 3)])
def test_memcheck_finds_nothing_in_calls_over_caches(what: str, calls: int, tmp_path: Path) -> None:
    assert f"{calls} calls" in sanitized("memcheck", (what,), tmp_path)
