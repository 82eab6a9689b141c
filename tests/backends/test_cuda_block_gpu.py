"""cuda-block on Hopper: every head count and width of its kernels, units of rows, reruns, and NaN in keys that nobody reads."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
import torch

from nsa_sel import selection_attention
from nsa_sel.backends import cuda_block
from nsa_sel.backends.cupy_cuda import launch
from nsa_sel.settings.config import settings_for
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.checks import check_both, check_deterministic
from tests.helpers.gpus import captured, needs, needs_hopper, noted, replayed

pytestmark = [pytest.mark.gpu, needs("cuda-block"), needs_hopper]
BACKEND = "cuda-block"


@pytest.fixture(autouse=True)
def visits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels that were started: those of both passes in every test."""
    files = noted(monkeypatch)
    yield files
    assert {"block_partials.cu", "block_gradients.cu"} <= set(files)


@pytest.mark.parametrize(("n", "block"), [(70, 64), (25, 192)])
def test_rows_of_more_entries_than_a_mask_has_bits(n: int, block: int) -> None:
    """70 tiles a row, or 75: none is left out."""
    q, k, v = make_qkv(S=130, G=2, h=4, Dk=64, S_kv=9000, dtype=torch.bfloat16, device="cuda")
    check_both(BACKEND, q, k, v, make_blocks(1, 130, 2, 9000, n, block, device="cuda"))


@pytest.mark.parametrize("h", [1, 4, 16])
def test_reruns_are_bit_equal(h: int, visits: list[str]) -> None:
    q, k, v = make_qkv(S=3000, G=4, h=h, Dk=128, S_kv=3000, dtype=torch.bfloat16, device="cuda")
    check_deterministic(BACKEND, q, k, v, make_blocks(1, 3000, 4, 3000, 16, 64, device="cuda"), 10)
    assert ("join_shares.cu" in visits) == (h >= cuda_block.LEAST_HEADS)


def test_units_of_rows(monkeypatch: pytest.MonkeyPatch, visits: list[str]) -> None:
    """Sections of rows whose sums of dk and dv take turns."""
    with_workspace(monkeypatch, 20_000_000)
    q, k, v = make_qkv(S=1500, G=2, h=4, Dk=128, S_kv=1500, dtype=torch.bfloat16, device="cuda")
    check_both(BACKEND, q, k, v, make_blocks(1, 1500, 2, 1500, 8, 64, device="cuda"))
    check_deterministic(BACKEND, q, k, v, make_blocks(1, 1500, 2, 1500, 8, 64, device="cuda"), 3)
    assert visits.count("block_partials.cu") == visits.count("block_gradients.cu") > 2


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many streams each forward pass took."""
    counts, real = [], cuda_block._streams
    monkeypatch.setattr(cuda_block, "_streams", lambda like, count: (counts.append(count), real(like, count))[1])
    return counts


def with_workspace(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Units of rows that need no more bytes."""
    few = lambda device: msgspec.structs.replace(settings_for(device), workspace_bytes=size)  # noqa: E731
    monkeypatch.setattr("nsa_sel.core.decide.settings_for", few)


def test_units_on_two_streams(monkeypatch: pytest.MonkeyPatch, streams: list[int]) -> None:
    """They give the bits that they give one after another, in a CUDA graph, too."""
    q, k, v = make_qkv(S=9000, G=4, h=16, Dk=128, S_kv=9000, dtype=torch.bfloat16, device="cuda")
    selection = make_blocks(1, 9000, 4, 9000, 4, 64, device="cuda")
    check_deterministic(BACKEND, q, k, v, selection, 5)
    both = selection_attention(q, k, v, selection, backend=BACKEND, return_lse=True)
    graph = captured(lambda: selection_attention(q, k, v, selection, backend=BACKEND, return_lse=True))
    assert all(map(torch.equal, both, replayed(*graph)))
    assert set(streams) == {2}
    monkeypatch.setattr(cuda_block, "_streams", lambda _, count: [None] * count)
    assert all(map(torch.equal, both, selection_attention(q, k, v, selection, backend=BACKEND, return_lse=True)))


def test_units_on_two_streams_are_not_replayed(monkeypatch: pytest.MonkeyPatch, streams: list[int]) -> None:
    """A replay would start all kernels on one stream."""
    with_workspace(monkeypatch, 150_000_000)
    q, k, v = make_qkv(S=3000, G=4, h=16, Dk=128, S_kv=3000, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for _ in range(6):
        o = selection_attention(q, k, v, make_blocks(1, 3000, 4, 3000, 4, 64, device="cuda"), backend=BACKEND)
        o.sum().backward()
    assert streams == [2] * 6


def test_a_launch_that_fails_waits_for_the_other_stream(monkeypatch: pytest.MonkeyPatch, visits: list[str]) -> None:
    """Its kernels may still write the partials, whose memory is free when the call ends."""
    with_workspace(monkeypatch, 150_000_000)
    q, k, v = make_qkv(S=3000, G=4, h=16, Dk=128, S_kv=3000, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    selection = make_blocks(1, 3000, 4, 3000, 4, 64, device="cuda")
    o = selection_attention(q, k, v, selection, backend=BACKEND)
    o.sum().backward()
    other, start = cuda_block._stream(q.device, threading.get_ident(), 1), launch.start
    torch.cuda.synchronize()

    def fails(source: str, *rest: Any, **own: Any) -> None:
        if torch.cuda.current_stream() == other and source == "join_partials.cu":
            torch.cuda._sleep(50_000_000)
            raise RuntimeError("no such kernel")
        start(source, *rest, **own)

    monkeypatch.setattr(launch, "start", fails)
    with pytest.raises(RuntimeError, match="no such kernel"):
        selection_attention(q, k, v, selection, backend=BACKEND)
    assert not other.query()
    torch.cuda.current_stream().synchronize()
    assert other.query()
    monkeypatch.setattr(launch, "start", start)
    assert torch.equal(selection_attention(q, k, v, selection, backend=BACKEND), o)


def test_rows_and_keys_that_are_expanded() -> None:
    """TMA reads copies, which stay until the last kernel has read them."""
    q, k, v = make_qkv(B=2, S=600, G=2, h=16, Dk=128, S_kv=900, dtype=torch.bfloat16, device="cuda")
    selection = make_blocks(2, 600, 2, 900, 4, 64, device="cuda")
    check_both(BACKEND, q, k[:, :1].expand(-1, 2, -1, -1), v[:1].expand(2, -1, -1, -1), selection)
    check_both(BACKEND, q[:1].expand(2, -1, -1, -1, -1), k, v, selection)
