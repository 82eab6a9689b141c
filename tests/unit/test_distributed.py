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
from nsa_sel.core.call import Rule
from nsa_sel.distributed import (
    Exchange,
    check_ranks,
    context_parallel,
    context_parallel_attention,
    context_parallel_nsa_attention,
    exchanged_bytes,
    rows_bytes,
)  # fmt: skip
from nsa_sel.distributed.cost import Bytes, Sizes, cheapest, obstacle, planned
from nsa_sel.distributed.exchange_rows import merge_parts
from nsa_sel.distributed.layer import own_compressed_keys
from nsa_sel.distributed.slices import Cut
from nsa_sel.errors import BackendError, NsaSelError
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
    return {**clean, "NSA_SEL_CACHE": os.devnull + "/nothing", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


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
    q, k, v = make_qkv()
    with pytest.raises(NsaSelError, match="context_parallel_attention is called outside a distributed job"):
        context_parallel_attention(q, k, v, make_blocks(1, 16, 1, 16, 1, 16))
    with pytest.raises(NsaSelError, match="check_ranks is called outside a distributed job"):
        check_ranks()
    with pytest.raises(NsaSelError, match="context_parallel is called outside a distributed job"):
        context_parallel(NSAttention(8, 1, 1, 4))
    with pytest.raises(NsaSelError, match="context_parallel_nsa_attention is called outside a distributed job"):
        context_parallel_nsa_attention(*[torch.zeros(1)] * 8)


def test_compiled_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_sel.core.transforms.is_compiling", lambda: True)
    with pytest.raises(BackendError, match=r"Remedy: call it in a function under torch\.compiler\.disable"):
        context_parallel_attention(*make_qkv(), make_blocks(1, 16, 1, 16, 1, 16))
    with pytest.raises(BackendError, match=r"context_parallel_nsa_attention is called in a function that torch\.compile traces"):
        context_parallel_nsa_attention(*[torch.zeros(1)] * 8)


def test_compressed_keys_belong_to_the_slice_that_they_begin_in() -> None:
    """48 keys, of which 8 every 4 are compressed: 11, three for each slice of 12 keys, and two for the last."""

    def sizes(rule: Rule, cut: Cut) -> list[list[int]]:
        return [[*map(len, own_compressed_keys(rule, cut, rank))] for rank in range(cut.ranks)]

    assert sizes(Rule(8, 4), Cut(12, 4)) == [[3], [3], [3], [2]]
    assert sizes(Rule(8, 4), Cut(12, 2, both_ends=True)) == [[3, 2], [3, 3]]
    assert sizes(Rule(40, 4, 40), Cut(12, 4)) == [[3], [0], [0], [0]]
    assert sizes(Rule(32, 4, 32), Cut(12, 4)) == [[3], [2], [0], [0]]
    assert sizes(Rule(32, 4, 32), Cut(12, 2, both_ends=True)) == [[3, 0], [2, 0]]
    assert own_compressed_keys(Rule(8, 4), Cut(12, 2, both_ends=True), 1) == (range(3, 6), range(6, 9))
    assert sizes(Rule(), Cut(16, 1)) == [[0]]


def test_exchanged_bytes_equal_a_count_by_hand() -> None:
    """Three ranks of 4 blocks of 8 keys each, one batch entry, 2 groups, 16 + 8 numbers of 2 bytes a key: 96 bytes a key of all groups."""
    slots = [[0, 0, 0], [2, 0, 0], [3, 1, 0]]
    sizes = {"B": 1, "G": 2, "keys": 32, "Dk": 16, "Dv": 8, "element_size": 2, "block_size": 8}
    gather, blocks = exchanged_bytes(slots, **sizes, needs_grad=True)
    assert gather == (2 * 32 * 96, 2 * 32 * 96)
    assert blocks == (5 * 8 * 96 + 5 * 2 * 4, 5 * 8 * 96)  # rank 0 sends 5 blocks, and is asked for each by 4 bytes a group
    assert exchanged_bytes(slots, **sizes, needs_grad=False)[1] == (5 * 8 * 96 + 40, 0)
    assert cheapest(gather, blocks, gather)[0] == "blocks"
    assert cheapest(gather, None, gather) == ("gather", "gathering is no more bytes: 12288 gathered, 12288 by rows")
    assert cheapest(gather, blocks, Bytes(1, 2)) == ("rows", "rows are no more bytes: 12288 gathered, 7720 in blocks, 3 by rows")
    assert str(Exchange("blocks", 3, gather, blocks, Bytes(3, 4), 5, True, "why")) == (
        "blocks, 3 ranks: gathering 0.01229 MB, blocks 0.00772 MB (counted: 5 per batch entry and group), rows 7e-06 MB,"
        " to or from the busiest rank; why"
    )


def test_rows_bytes_equal_a_count_by_hand() -> None:
    """Three ranks of 2 rows, 2 groups of 3 heads, 16-bit numbers: q of 384 bytes, o of 192, lse of 48, ranges of 80 (as int64 160)."""
    sizes = {"B": 2, "S": 2, "G": 2, "h": 3, "Dk": 16, "Dv": 8, "n": 5, "element_size": 2}
    ranges, others = 2 * 2 * 5 * 2 * 4, 2 * 2  # batch entries by ranks
    forward = 384 + ranges + 192 + 48
    assert rows_bytes(3, **sizes, index_size=4, has_pos=False, needs_grad=False) == (others * forward, 0)
    backward = others * (2 * 192 + 2 * 48 + 384)
    assert rows_bytes(3, **sizes, index_size=8, has_pos=True, needs_grad=True) == (others * (forward + ranges + 16), backward)
    odd = {**sizes, "S": 1, "G": 1, "h": 1, "Dk": 3, "n": 1}  # 6, 8, 16 and 4 bytes, each filled up to 16
    assert rows_bytes(2, **odd, index_size=4, has_pos=False, needs_grad=False) == (2 * 4 * 16, 0)


def test_parts_are_merge_parts_by_their_lse() -> None:
    """Softmax over 6 keys is that over 4 and 2, and rows without keys stay empty."""
    logits, v = torch.randn(3, 6), torch.randn(6, 2)
    halves = [(logits[:, keys].softmax(-1) @ v[keys], logits[:, keys].logsumexp(-1)) for keys in (slice(4), slice(4, None))]
    o, lse = (torch.stack(parts) for parts in zip(*halves, strict=True))
    o[0, 1], lse[0, 1] = 0, float("-inf")
    o[:, 2], lse[:, 2] = 0, float("-inf")
    found, found_lse = merge_parts(o, lse)
    torch.testing.assert_close(found, torch.stack((logits[0].softmax(-1) @ v, o[1, 1], torch.zeros(2))))
    torch.testing.assert_close(found_lse, torch.stack((logits[0].logsumexp(-1), lse[1, 1], torch.tensor(float("-inf")))))


def test_static_facts_plan_the_exchange() -> None:
    """Few rows are sent; rows of a prefill and blocks across slices are not."""
    few = Sizes(2, 1, 1, 2, 4, 4096, 64, 64, 16, 64, 2, 4, False, True)
    done, slots = planned(few, "auto")
    assert (done.kind, done.counted, slots) == ("rows", False, [[0, 16], [16, 0]])
    assert planned(few, "auto") is planned(few, "auto"), "decided once a class"
    assert planned(few, "blocks")[0].why == "asked for by exchange="
    prefill = few._replace(S=4096)
    assert prefill.within
    assert (prefill.first(1), few.first(1)) == (4096, 8191)
    assert planned(prefill, "auto") == (planned(prefill, "gather")[0]._replace(why=planned(prefill, "auto")[0].why), [[0, 0], [64, 0]])
    across, slots = planned(few._replace(keys=4100), "auto")
    assert (across.kind, across.blocks, slots) == ("rows", None, None)
    assert across.why.endswith("; a rank's 4100 keys are no multiple of the block size 64")
    assert obstacle(few._replace(block_size=None)) == "the selection is not of whole blocks"
