"""`sliding_window_attention` on a GPU: its kernels, the chunks that run the rest, CUDA graphs, torch.compile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import sliding_window_attention, window_kernels
from nsa_sel.backends._window import chunks
from nsa_sel.core import registry
from tests.api.test_window import check, inputs_of, results
from tests.backends.test_window_triton import check_packed
from tests.helpers.cases import make_grads
from tests.helpers.checks import new_memory_is_nan
from tests.helpers.gpus import HOPPER, captured, no_waiting, replayed

pytestmark = pytest.mark.gpu

GPU_SHAPES = {
    "long": (1, 1024, 1024, 2, 4, 64, 64, 128),
    "h1": (2, 300, 300, 2, 1, 64, 64, 101),
    "h3": (2, 331, 331, 2, 3, 64, 64, 100),
    "h12": (1, 333, 400, 1, 12, 96, 96, 77),
    "h16-chunked-prefill": (1, 200, 900, 1, 16, 128, 128, 256),
    "h96": (1, 70, 70, 1, 96, 64, 64, 40),
    "192-128": (1, 300, 300, 1, 2, 192, 128, 70),
    "256": (1, 200, 200, 1, 4, 256, 256, 130),
    "odd-head-dim": (1, 140, 140, 1, 2, 40, 24, 33),
    "tiny-head-dim": (1, 140, 140, 1, 2, 8, 8, 33),
    "window-1": (1, 130, 130, 1, 2, 32, 32, 1),
    "window-over-S": (2, 257, 257, 1, 2, 64, 64, 5000),
    "few-rows": (2, 5, 500, 2, 4, 64, 64, 128),
    "one-row": (3, 1, 500, 2, 16, 128, 128, 128),
    "320": (1, 140, 140, 1, 2, 320, 64, 33),  # chunks
}


@pytest.fixture(autouse=True)
def nothing_has_failed() -> Any:
    """The kernels run; a failure would warn, which is an error, and leave the rest of a process to chunks."""
    yield
    assert not registry.broken_windows


@pytest.fixture(params=["cuda", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's, which take most calls on Hopper, and Triton's for all."""
    if request.param == "triton":
        monkeypatch.setattr(window_kernels, "_by_cuda", lambda q, v: False)
    elif not HOPPER or registry.missing("cupy-cuda"):
        pytest.skip("no kernels but Triton's")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_results_and_gradients(shape: str, dtype: torch.dtype) -> None:
    inputs, size = inputs_of(GPU_SHAPES[shape], dtype, "cuda")
    q, _, v = (x.detach() for x in inputs)
    assert window_kernels.takes(q, v) == (dtype != torch.float64 and shape != "320")
    with new_memory_is_nan():
        check(sliding_window_attention, inputs, size, True)
        check(sliding_window_attention, inputs, size, False)


@pytest.mark.parametrize("shape", ["long", "h3", "one-row"])
def test_chunks(shape: str) -> None:
    """What runs on GPUs that the kernels do not take."""

    def by_chunks(q: Tensor, k: Tensor, v: Tensor, window: int, return_lse: bool = False) -> Any:
        o, lse = chunks.attend_seen(q, k, v, window, q.shape[-1] ** -0.5, return_lse)
        return (o, lse) if return_lse else o

    inputs, size = inputs_of(GPU_SHAPES[shape], torch.bfloat16, "cuda")
    check(by_chunks, inputs, size, True)
    check(by_chunks, inputs, size, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decode(dtype: torch.dtype) -> None:
    inputs, size = inputs_of(GPU_SHAPES["one-row"], dtype, "cuda")
    q, k, v = (x.detach() for x in inputs)
    assert torch.equal(sliding_window_attention(q[:, 0], k, v, size), sliding_window_attention(q, k, v, size)[:, 0])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", ["long", "h3"])
def test_strides_and_a_negative_scale(shape: str) -> None:
    """A cache's layout [B,S_kv,G,D], heads that are not adjacent, and rows that TMA cannot load."""
    inputs, size = inputs_of(GPU_SHAPES[shape], torch.bfloat16, "cuda")
    wanted = results(sliding_window_attention, inputs, size, True, return_lse=True, scale=0.3)
    q, k, v = (x.detach() for x in inputs)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (k, v))
    q = q.neg().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_()
    o, lse, dq, *dkdv = results(sliding_window_attention, (q, k, v), size, True, return_lse=True, scale=-0.3)
    assert all(map(torch.equal, (o, lse, -dq, *dkdv), wanted))
    padded = torch.nn.functional.pad(q.detach(), (1, 0))[..., 1:].requires_grad_()  # rows begin at odd addresses
    check(sliding_window_attention, (padded, k, v), size, True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", ["long", "h3", "h16-chunked-prefill"])
def test_bit_equal_from_run_to_run(shape: str) -> None:
    inputs, size = inputs_of(GPU_SHAPES[shape], torch.bfloat16, "cuda")
    first = results(sliding_window_attention, inputs, size, True, return_lse=True)
    for _ in range(50):
        assert all(map(torch.equal, first, results(sliding_window_attention, inputs, size, True, return_lse=True)))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(1, 200, 990, 2, 16, 128, 128, 256), (2, 200, 990, 2, 3, 64, 64, 100)], ids=["h16", "h3"])
def test_keys_outside_of_every_window_are_not_read(shape: tuple[int, ...]) -> None:
    inputs, size = inputs_of(shape, torch.bfloat16, "cuda")
    q, k, v = (x.detach() for x in inputs)
    unseen = torch.arange(k.shape[2], device="cuda")[:, None] <= k.shape[2] - q.shape[1] - size
    poisoned = tuple(x.requires_grad_() for x in (q, k.masked_fill(unseen, math.nan), v.masked_fill(unseen, math.nan)))
    got = results(sliding_window_attention, poisoned, size, True, return_lse=True)
    assert all(map(torch.equal, got, results(sliding_window_attention, inputs, size, True, return_lse=True)))
    assert all(int(torch.count_nonzero(x[:, :, unseen.squeeze(1)])) == 0 for x in got[-2:])


@pytest.mark.parametrize("shape", [(1, 700, 700, 2, 16, 128, 128, 100), (1, 700, 700, 1, 3, 64, 64, 200)], ids=["h16", "h3"])
def test_packed_batches(shape: tuple[int, ...]) -> None:
    check_packed((0, 130, 130, 131, 400, 640), shape, torch.bfloat16, "cuda")


def test_more_than_2_31_elements() -> None:
    """The last rows of a long sequence, whose offsets pass 2^31, equal those rows alone, with the same rows in each tile."""
    S, h, D, size = (1 << 20) + 192, 16, 128, 64
    q = torch.randn(1, S, 1, h, D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    few = [x.requires_grad_() for x in (q[:, -256:].clone(), k[:, :, -512:].clone(), v[:, :, -512:].clone())]
    whole = [x.requires_grad_() for x in (q, k, v)]
    do = torch.randn(1, S, 1, h, D, device="cuda", dtype=torch.bfloat16)
    wanted = sliding_window_attention(*few, size)
    found = sliding_window_attention(*whole, size)
    assert torch.equal(found[:, -256:], wanted)
    wanted = torch.autograd.grad(wanted, few, do[:, -256:])
    found = torch.autograd.grad(found, whole, do)
    assert torch.equal(found[0][:, -256:], wanted[0])
    for mine, right in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(mine[:, :, -128:], right[:, :, -128:])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", ["long", "h3"])
def test_cuda_graphs(shape: str) -> None:
    inputs, size = inputs_of(GPU_SHAPES[shape], torch.bfloat16, "cuda")
    do, _ = make_grads(inputs[0], inputs[2])

    def step() -> tuple[Tensor, ...]:
        o = sliding_window_attention(*inputs, size)
        return o, *torch.autograd.grad(o, inputs, do)

    graph, outputs = captured(step)
    for _ in range(2):
        with torch.no_grad():
            inputs[1].normal_()
        assert all(map(torch.equal, replayed(graph, outputs), step()))


def test_the_host_never_waits() -> None:
    inputs, size = inputs_of(GPU_SHAPES["long"], torch.bfloat16, "cuda")
    results(sliding_window_attention, inputs, size, False)
    do, _ = make_grads(inputs[0], inputs[2])
    with no_waiting():
        torch.autograd.grad(sliding_window_attention(*inputs, size), inputs, do)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_torch_compile_traces_a_call(dynamic: bool) -> None:
    torch._dynamo.reset()
    inputs, size = inputs_of(GPU_SHAPES["long"], torch.bfloat16, "cuda")
    work = torch.compile(sliding_window_attention, fullgraph=True, dynamic=dynamic)
    got = results(work, inputs, size, True, return_lse=True)
    assert all(map(torch.equal, got, results(sliding_window_attention, inputs, size, True, return_lse=True)))
