"""Check CUDA kernels on a GPU, beyond the contract table: streams, devices, clusters, units, sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from nsa_sel import selection_attention, selection_attention_with_kvcache
from nsa_sel.backends.cupy_cuda import cuda_block, whole_blocks
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.flags import CACHE_FLAG
from tests.helpers.caches import LENGTHS, check, make_cache
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.checks import attend, check_both, check_deterministic
from tests.helpers.files import ROOT
from tests.helpers.gpus import captured, needs, needs_hopper, no_waiting, replayed

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
    assert all(map(torch.equal, expected, found))


def test_streams_share_a_plan() -> None:
    """Each launch has a tile counter of its own."""
    q, k, v = make_qkv(S=1400, G=2, h=16, Dk=128, Dv=128, dtype=torch.bfloat16, device="cuda")
    selection = make_blocks(1, 1400, 2, 1400, 7, 64, device="cuda")
    expected = selection_attention(q, k, v, selection, backend="cupy-cuda")
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(selection_attention(q, k, v, selection, backend="cupy-cuda"))
    torch.cuda.synchronize()
    assert all(torch.equal(o, expected) for o in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_on_every_device() -> None:
    for index in range(torch.cuda.device_count()):
        device = f"cuda:{index}"
        q, k, v = make_qkv(S=50, G=1, h=4, Dk=64, dtype=torch.bfloat16, device=device)
        check_both("cupy-cuda", q, k, v, make_blocks(1, 50, 1, 50, 2, 16, device=device))


# Caches

MANY = LENGTHS * 16  # sequences: more rows than half of the multiprocessors
ROW = (0, 1, 9, 150, 600, 2048)  # keys: none, of one step, and of fewer steps than a cluster has CTAs


def gpu_cache(page_size: int | None, **sizes: Any) -> Any:
    """NaN wherever no sequence has a key."""
    facts = {"dtype": torch.bfloat16, "device": "cuda", "Dk": 128, "Dv": 128, "h": 16, "block": 64}
    return make_cache(page_size=page_size, **{**facts, **sizes})


@pytest.mark.parametrize("S_q", [1, 4])
@pytest.mark.parametrize("page_size", [None, 16, 64])
def test_a_step_is_one_launch_that_never_waits(page_size: int | None, S_q: int, started: list[str]) -> None:
    cache = gpu_cache(page_size, lengths=MANY, S_q=S_q)
    selection_attention_with_kvcache(*cache, backend="cupy-cuda")
    started.clear()
    with no_waiting():
        selection_attention_with_kvcache(*cache, backend="cupy-cuda")
    assert len(started) == 1


@pytest.mark.parametrize("ahead", ["a kernel", "a copy", "two streams"])
@pytest.mark.parametrize("lengths", [LENGTHS, MANY])
def test_a_graph_may_have_anything_ahead_of_a_step(lengths: tuple[int, ...], ahead: str) -> None:
    """A kernel that is started early waits for what writes its queries."""
    cache = gpu_cache(64, lengths=lengths)
    wanted = check(cache, "cupy-cuda")
    q = torch.zeros_like(cache.q)
    half, rest = (x.clone() for x in (cache.q[: len(lengths) // 2], cache.q[len(lengths) // 2 :]))
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        if ahead == "two streams":
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                q[: len(half)].mul_(0).add_(half)
            q[len(half) :].mul_(0).add_(rest)
            torch.cuda.current_stream().wait_stream(side)
        else:
            for to, values in ((q[: len(half)], half), (q[len(half) :], rest)):
                to.copy_(values) if ahead == "a copy" else to.mul_(0).add_(values)
        found = selection_attention_with_kvcache(q, *cache[1:], return_lse=True, backend="cupy-cuda")
    for _ in range(3):
        q.fill_(9.0)
        graph.replay()
        assert all(map(torch.equal, found, wanted))


@needs_hopper
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
def test_a_cluster_reads_a_cache(cluster: int, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits in pages or not, of more clusters than run at once, and in a graph that starts kernels early."""
    monkeypatch.setattr(whole_blocks, "cluster_size", lambda *sizes: cluster)
    monkeypatch.setattr(whole_blocks, "next_first", lambda *sizes: first)
    whole_blocks.plan_of.cache_clear()
    sizes = {"lengths": ROW, "n": 16, "room": 2048}
    for page_size, others in ((64, {}), (None, {}), (128, {"h": 8, "block": 128, "S_q": 3}), (64, {"h": 20, "Dk": 64, "n": 3})):
        cache = gpu_cache(page_size, **{**sizes, **others})
        wanted = check(cache, "cupy-cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [selection_attention_with_kvcache(*cache, return_lse=True, backend="cupy-cuda") for _ in range(20)]
        for x in found:
            x[0].fill_(torch.nan)
        for _ in range(20):
            graph.replay()
        assert all(torch.equal(x, y) for pair in found for x, y in zip(pair, wanted, strict=True))
    check(gpu_cache(64, **{**sizes, "lengths": ROW * 30, "n": 5}), "cupy-cuda")
    whole_blocks.plan_of.cache_clear()


# cuda-block


def with_workspace(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Units of rows that need no more bytes."""
    few = lambda device: msgspec.structs.replace(settings_for(device), workspace_bytes=size)  # noqa: E731
    monkeypatch.setattr("nsa_sel.core.decide.settings_for", few)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the number of streams of each forward pass."""
    counts, real = [], cuda_block._streams
    monkeypatch.setattr(cuda_block, "_streams", lambda like, count: (counts.append(count), real(like, count))[1])
    return counts


def block_problem(S: int, G: int, h: int, **options: Any) -> tuple[Any, ...]:
    q, k, v = make_qkv(S=S, G=G, h=h, Dk=128, S_kv=S, dtype=torch.bfloat16, device="cuda", **options)
    return q, k, v, make_blocks(1, S, G, S, 4, 64, device="cuda")


@needs_hopper
def test_units_of_rows(monkeypatch: pytest.MonkeyPatch, started: list[str]) -> None:
    """Sections of rows whose sums of dk and dv take turns."""
    with_workspace(monkeypatch, 20_000_000)
    problem = block_problem(1500, 2, 4)
    check_both("cuda-block", *problem)
    check_deterministic("cuda-block", *problem, 3)
    assert started.count("block_partials.cu") == started.count("block_gradients.cu") > 2


@needs_hopper
def test_units_on_two_streams(monkeypatch: pytest.MonkeyPatch, streams: list[int]) -> None:
    """They give the bits that they give one after another, in a CUDA graph, too."""
    q, k, v, selection = block_problem(9000, 4, 16)
    check_deterministic("cuda-block", q, k, v, selection, 5)
    both = selection_attention(q, k, v, selection, backend="cuda-block", return_lse=True)
    graph = captured(lambda: selection_attention(q, k, v, selection, backend="cuda-block", return_lse=True))
    assert all(map(torch.equal, both, replayed(*graph)))
    assert set(streams) == {2}
    monkeypatch.setattr(cuda_block, "_streams", lambda _, count: [None] * count)
    assert all(map(torch.equal, both, selection_attention(q, k, v, selection, backend="cuda-block", return_lse=True)))


@needs_hopper
def test_units_on_two_streams_are_not_replayed(monkeypatch: pytest.MonkeyPatch, streams: list[int]) -> None:
    """A replay would start all kernels on one stream."""
    with_workspace(monkeypatch, 150_000_000)
    q, k, v, selection = block_problem(3000, 4, 16, requires_grad=True)
    for _ in range(6):
        o = selection_attention(q, k, v, make_blocks(1, 3000, 4, 3000, 4, 64, device="cuda"), backend="cuda-block")
        o.sum().backward()
    assert streams == [2] * 6


@needs_hopper
@pytest.mark.parametrize("backend", ["cuda-block", "cupy-cuda"])
def test_rows_and_keys_that_are_expanded(backend: str) -> None:
    """TMA reads copies, which stay until the last kernel has read them."""
    q, k, v = make_qkv(B=2, S=600, G=2, h=16, Dk=128, S_kv=900, dtype=torch.bfloat16, device="cuda")
    selection = make_blocks(2, 600, 2, 900, 4, 64, device="cuda")
    check_both(backend, q, k[:, :1].expand(-1, 2, -1, -1), v[:1].expand(2, -1, -1, -1), selection)
    check_both(backend, q[:1].expand(2, -1, -1, -1, -1), k, v, selection)


# Sanitizers


def sanitized(tool: str, arguments: tuple[str, ...], cache: Path) -> str:
    """Return the output of tests/helpers/sanitize.py; fail if the tool reports an error."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    assert sanitizer is not None, "no compute-sanitizer on the PATH; remedy: install the CUDA toolkit, with which it comes"
    # Allocate each tensor separately, so that reads past its end are reported.
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": paths, CACHE_FLAG: str(cache)}
    # Ignore statuses: cuda_driver.parameters asks until the driver reports no next one, and a failed launch raises.
    statuses = ("--report-api-errors", "no") if tool == "memcheck" else ()
    command = [sanitizer, "--tool", tool, *statuses, "--error-exitcode", "86", sys.executable, "-m", "tests.helpers.sanitize", *arguments]
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
@pytest.mark.parametrize(
    ("what", "calls"), [("cupy-cuda 4 64", 42), ("cuda-block 64 128", 28), ("units", 2), ("indices", 8), ("packed", 8)]
)
def test_memcheck_finds_nothing_in_kernels_of_hopper(what: str, calls: int, tmp_path: Path) -> None:
    """racecheck and synccheck do not support TMA; initcheck takes what it stores as never written."""
    assert f"{calls} calls" in sanitized("memcheck", tuple(what.split()), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "calls"), [("cupy-cuda", 20), ("triton-group", 20), ("layer", 6), ("choosing", 3), ("indexers", 9)])
def test_memcheck_finds_nothing_in_calls_over_caches(what: str, calls: int, tmp_path: Path) -> None:
    assert f"{calls} calls" in sanitized("memcheck", (what,), tmp_path)
