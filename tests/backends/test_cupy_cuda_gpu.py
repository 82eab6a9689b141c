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
from nsa_sel.backends.specs import HOPPER_TILES
from nsa_sel.selection import Selection
from nsa_sel.settings.flags import CACHE_FLAG
from tests.helpers.cases import assert_forward, make_blocks, make_qkv
from tests.helpers.gpus import HOPPER, needs, needs_hopper
from tests.helpers.parity import attend, check_both, check_deterministic, check_forward, check_poison
from tests.helpers.paths import ROOT
from tests.helpers.poison import check_empty_rows, check_one_row, rows_with_holes, selected, through

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


@pytest.mark.parametrize(
    ("h", "Dk", "Dv", "block"),
    [
        *((16, 128, 128, 64), (4, 128, 128, 64), (1, 128, 128, 64), (1, 192, 64, 64)),
        *((2, 64, 64, 64), (3, 128, 64, 128), (16, 192, 128, 64), (4, 192, 128, 128), (40, 192, 64, 64), (64, 64, 128, 64)),
        *((12, 256, 256, 64), (12, 256, 256, 4), (2, 64, 64, 8), (4, 128, 128, 16), (16, 128, 64, 32)),  # forward_gather.cu
    ],
)
def test_more_tiles_than_multiprocessors(h: int, Dk: int, Dv: int, block: int) -> None:
    """On Hopper CTAs are persistent, and a consumer warpgroup skips steps that only others selected."""
    S, G = 1400, 8 if h < 16 else 2
    q, k, v = make_qkv(S=S, G=G, h=h, Dk=Dk, Dv=Dv, S_kv=S + 100, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    selection = make_blocks(1, S, G, S + 100, 7, block, device="cuda")
    check_both("cupy-cuda", q, k, v, selection)
    check_deterministic("cupy-cuda", q, k, v, selection, 3)


def assert_ran(started: list[str], of_hopper: str) -> None:
    """On Hopper, the kernel that is Hopper's own."""
    assert not HOPPER or of_hopper in started


@pytest.mark.parametrize(
    ("S", "h", "Dk", "Dv", "block"),
    [(1, 16, 128, 128, 64), (1, 1, 64, 64, 64), (2, 4, 128, 64, 128), (1, 17, 128, 128, 64), (2, 64, 64, 128, 64), (1, 70, 128, 128, 192)],
)
@pytest.mark.parametrize("keys_first", [False, True])
def test_a_batch_that_decodes(started: list[str], S: int, h: int, Dk: int, Dv: int, block: int, keys_first: bool) -> None:
    """On Hopper one warp loads the keys of each row by TMA, and CTAs take several rows; or those of two tokens, of which they take both."""
    B, G, S_kv = 150, 3, 1100
    q, k, v = make_qkv(B=B, S=S, G=G, h=h, Dk=Dk, Dv=Dv, S_kv=S_kv, dtype=torch.bfloat16, device="cuda")
    if keys_first:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    selection = make_blocks(B, S, G, S_kv, 5, block, device="cuda")
    lengths = torch.randint(0, S_kv - S, (B, 1), generator=torch.Generator().manual_seed(2)) + torch.arange(S)
    for positions in (None, lengths.cuda()):
        check_forward("cupy-cuda", q, k, v, selection, q_pos=positions)
        check_poison("cupy-cuda", q, k, v, selection, q_pos=positions)
    holes = selection.ranges.clone()
    holes[::3, :, :, 1:4] = 0
    holes[7] = 0
    check_forward("cupy-cuda", q, k, v, Selection(holes, block))
    assert_ran(started, "forward_blocks.cu" if S == 1 else "forward_tiles.cu")


@pytest.mark.parametrize(("B", "h", "Dk", "Dv", "n"), [(40, 16, 128, 128, 5), (150, 20, 128, 64, 3), (150, 64, 64, 64, 40)])
def test_other_batches_that_decode(started: list[str], B: int, h: int, Dk: int, Dv: int, n: int) -> None:
    """float16, ranges of 64 bits and more of them than lanes, any scale; the same bits again."""
    G, S_kv = 2, 3000
    q, k, v = make_qkv(B=B, S=1, G=G, h=h, Dk=Dk, Dv=Dv, S_kv=S_kv, dtype=torch.float16, device="cuda")
    selection = Selection(make_blocks(B, 1, G, S_kv, n, 64, device="cuda").ranges.long(), 64)
    for scale in (None, 0.0, -0.3):
        got = attend("cupy-cuda", q, k, v, selection, scale=scale)
        assert_forward(got, q, k, v, selection.ranges, scale)
        for one, other in zip(got, attend("cupy-cuda", q, k, v, selection, scale=scale), strict=True):
            assert torch.equal(one, other)
    assert_ran(started, "forward_blocks.cu")


@pytest.mark.parametrize("every", [3, 16])
@pytest.mark.parametrize("h", [1, 2, 16, 64])
def test_what_follows_a_row_in_its_own_block(started: list[str], h: int, every: int) -> None:
    """Some rows alone chose the block that they stand in: what follows the last of them there belongs to nobody, though others see it."""
    S, S_kv = 200, 390
    q, k, v = make_qkv(S=S, G=2, h=h, Dk=64, S_kv=S_kv, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(S)
    own = torch.where(rows % every == 0, (rows + S_kv - S) // 64, -1)
    blocks = torch.stack((rows % 2, own), -1)[None, :, None].expand(1, S, 2, 2).int().cuda()
    check_poison("cupy-cuda", q, k, v, Selection.from_blocks(blocks, 64))
    assert_ran(started, "forward_tiles.cu")


@pytest.mark.parametrize(
    ("h", "Dk", "Dv", "block", "dtype"),
    [
        (1, 64, 128, 64, torch.float16),
        (2, 64, 64, 64, torch.bfloat16),
        (12, 128, 64, 128, torch.float16),
        (16, 192, 128, 64, torch.bfloat16),
        (3, 192, 64, 128, torch.float16),
        (40, 192, 128, 64, torch.float16),
        (64, 64, 128, 64, torch.float16),
        (16, 128, 128, 64, torch.bfloat16),
        (4, 64, 64, 32, torch.float16),
        (4, 256, 256, 64, torch.float16),
        (12, 256, 256, 4, torch.bfloat16),
        (16, 128, 128, 8, torch.bfloat16),
    ],
)
def test_poison_matrix_of_hopper(started: list[str], h: int, Dk: int, Dv: int, block: int, dtype: torch.dtype) -> None:
    """Rows that select nothing, whole tiles of padding among them, whatever they hold; a row that selects something spoils no other."""
    S, S_kv = 301, 1500
    q, k, v = make_qkv(B=2, S=S, G=2, h=h, Dk=Dk, Dv=Dv, S_kv=S_kv, dtype=dtype, device="cuda")
    selection, row = rows_with_holes(2, S, 2, S_kv, block, 3, device="cuda")
    run, mask = through("cupy-cuda", selection), selected(selection, q, k)
    check_empty_rows(run, q, k, v, mask)
    check_one_row(run, q, k, v, mask, row)
    ran = ("forward_tiles.cu", "dq_tiles.cu", "dkdv_groups.cu")
    gathered = HOPPER_TILES.gathers(h, Dk, Dv, block)
    for kernel in ("forward_gather.cu", "dq_gather.cu") if gathered else ran[:1] if h == 1 else ran:
        assert_ran(started, kernel)


@pytest.mark.parametrize("S", [70, 130, 700])
@pytest.mark.parametrize(
    ("h", "Dk", "Dv", "block", "n", "dtype"),
    [
        (12, 256, 256, 4, 70, torch.bfloat16),
        (12, 256, 256, 64, 7, torch.bfloat16),
        (4, 256, 256, 8, 40, torch.float16),
        (16, 256, 256, 128, 3, torch.float16),
        (16, 128, 128, 4, 90, torch.bfloat16),
        (2, 128, 64, 16, 30, torch.float16),
        (3, 192, 128, 32, 11, torch.bfloat16),
        (64, 64, 64, 4, 33, torch.float16),
    ],
)
def test_gathered_steps(started: list[str], S: int, h: int, Dk: int, Dv: int, block: int, n: int, dtype: torch.dtype) -> None:
    """Unions that fill no step, keys that end within a block, positions of any order; keys [B,S_kv,G,D]; the same bits again."""
    G, S_kv = 3, 1411
    q, k, v = make_qkv(B=2, S=S, G=G, h=h, Dk=Dk, Dv=Dv, S_kv=S_kv, dtype=dtype, device="cuda")
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    selection = make_blocks(2, S, G, S_kv, n, block, device="cuda")
    positions = torch.randint(0, S_kv, (2, S), generator=torch.Generator().manual_seed(3)).cuda()
    for q_pos in (None, positions):
        check_both("cupy-cuda", q, k, v, selection, q_pos=q_pos)
        runs = [attend("cupy-cuda", q, k, v, selection, q_pos=q_pos) for _ in range(4)]
        assert all(torch.equal(x, y) for run in runs for x, y in zip(runs[0], run, strict=True))
    check_deterministic("cupy-cuda", q, k, v, selection, 50 if S == 70 else 3)
    for kernel in ("forward_gather.cu", "dq_gather.cu"):
        assert_ran(started, kernel)


def test_poison_matrix_of_a_batch_that_decodes(started: list[str]) -> None:
    B, S_kv = 150, 1100
    q, k, v = make_qkv(B=B, S=1, G=3, h=16, Dk=128, Dv=128, S_kv=S_kv, dtype=torch.bfloat16, device="cuda")
    lengths = torch.randint(300, S_kv, (B, 1), generator=torch.Generator().manual_seed(2))
    lengths[::3] = 0
    q_pos = lengths.cuda() - 1
    selection = make_blocks(B, 1, 3, S_kv, 5, 64, device="cuda")
    run, mask = through("cupy-cuda", selection, q_pos=q_pos), selected(selection, q, k, q_pos.cpu())
    check_empty_rows(run, q, k, v, mask, dict.fromkeys(("nan", "inf", "huge"), ("all",)))
    assert_ran(started, "forward_blocks.cu")


def test_every_block_is_chosen() -> None:
    """A tile of 64 tokens with 24 ranges each: 1536 entries, of which every block has many."""
    q, k, v = make_qkv(S=200, G=2, h=2, Dk=64, Dv=64, S_kv=1500, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    check_both("cupy-cuda", q, k, v, make_blocks(1, 200, 2, 1500, 24, 64, device="cuda"))


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


def test_rows_that_no_wide_copy_can_read() -> None:
    q, k, v = (
        torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
        for x in make_qkv(S=60, G=2, h=4, Dk=64, Dv=72, dtype=torch.float16, device="cuda")
    )
    check_both("cupy-cuda", q, k, v, make_blocks(1, 60, 2, 60, 3, 16, device="cuda"))


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
