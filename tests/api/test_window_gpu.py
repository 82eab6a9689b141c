"""`sliding_window_attention` on a GPU: FlexAttention and chunks, compilations, CUDA graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import sliding_window_attention, window
from nsa_sel.backends._window import chunks, flex
from tests.api.test_window import check, inputs_of, results
from tests.helpers.cases import make_grads
from tests.helpers.graphs import captured, replayed

pytestmark = pytest.mark.gpu

GPU_SHAPES = {
    "long": (1, 1024, 1024, 2, 4, 64, 64, 128),
    "h3": (2, 331, 331, 2, 3, 64, 64, 100),
    "h16-chunked-prefill": (1, 200, 900, 1, 16, 128, 128, 256),
    "192-128": (1, 300, 300, 1, 2, 192, 128, 70),
    "odd-head-dim": (1, 140, 140, 1, 2, 40, 24, 33),
    "tiny-head-dim": (1, 140, 140, 1, 2, 8, 8, 33),
    "window-1": (1, 130, 130, 1, 2, 32, 32, 1),
    "window-over-S": (2, 257, 257, 1, 2, 64, 64, 5000),
    "few-rows": (2, 5, 500, 2, 4, 64, 64, 128),
    "one-row": (3, 1, 500, 2, 16, 128, 128, 128),
}


def by_chunks(q: Tensor, k: Tensor, v: Tensor, window: int, return_lse: bool = False) -> Any:
    """The public function, were there no FlexAttention."""
    unseen = max(0, k.shape[2] - q.shape[1] - window + 1)
    o, lse = chunks.attend(q, k[:, :, unseen:], v[:, :, unseen:], window, q.shape[-1] ** -0.5, return_lse)
    return (o, lse) if return_lse else o


@pytest.mark.parametrize("with_lse", [False, True], ids=["o", "lse"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_results_and_gradients(shape: str, dtype: torch.dtype, with_lse: bool) -> None:
    inputs, size = inputs_of(GPU_SHAPES[shape], dtype, "cuda")
    check(sliding_window_attention, inputs, size, with_lse)
    assert not window._failed
    q, k, v = (x.detach() for x in inputs)
    if flex.takes(q, v):
        assert any(key[:2] == (q.device, dtype) for key in flex._ready)


@pytest.mark.parametrize("with_lse", [False, True], ids=["o", "lse"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_chunks(shape: str, dtype: torch.dtype, with_lse: bool) -> None:
    inputs, size = inputs_of(GPU_SHAPES[shape], dtype, "cuda")
    check(by_chunks, inputs, size, with_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decode(dtype: torch.dtype) -> None:
    inputs, size = inputs_of(GPU_SHAPES["one-row"], dtype, "cuda")
    q, k, v = (x.detach() for x in inputs)
    expected, _ = sliding_window_attention(q, k, v, size, return_lse=True)
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(sliding_window_attention(q[:, 0], k, v, size), expected[:, 0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("attend", [sliding_window_attention, by_chunks], ids=["flex", "chunks"])
@pytest.mark.parametrize("with_lse", [False, True], ids=["o", "lse"])
def test_bit_equal_from_run_to_run(attend: Any, with_lse: bool) -> None:
    inputs, size = inputs_of(GPU_SHAPES["long"], torch.bfloat16, "cuda")
    first = results(attend, inputs, size, with_lse, return_lse=with_lse)
    for _ in range(20):
        assert all(map(torch.equal, first, results(attend, inputs, size, with_lse, return_lse=with_lse)))


@pytest.mark.parametrize("attend", [sliding_window_attention, by_chunks], ids=["flex", "chunks"])
def test_keys_outside_of_every_window_are_not_read(attend: Any) -> None:
    inputs, size = inputs_of(GPU_SHAPES["h16-chunked-prefill"], torch.bfloat16, "cuda")
    q, k, v = (x.detach() for x in inputs)
    unseen = torch.arange(k.shape[2], device="cuda")[:, None] <= k.shape[2] - q.shape[1] - size
    poisoned = tuple(x.requires_grad_() for x in (q, k.masked_fill(unseen, math.nan), v.masked_fill(unseen, math.nan)))
    assert all(map(torch.equal, results(attend, poisoned, size, False), results(attend, inputs, size, False)))


def test_few_graphs_serve_every_length() -> None:
    torch._dynamo.reset()
    flex._compiled.cache_clear()
    flex._ready.clear()
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    for S in (256, 300, 384, 520, 777, 1024):
        inputs, size = inputs_of((1, S, S, 2, 2, 64, 64, 96), torch.bfloat16, "cuda")
        check(sliding_window_attention, inputs, size, False)
    assert stats["unique_graphs"] - before <= 3


@pytest.mark.parametrize("ready", [False, True], ids=["chunks", "flex"])
def test_cuda_graphs(monkeypatch: pytest.MonkeyPatch, ready: bool) -> None:
    """A capture compiles nothing: what has not run before goes by chunks."""
    inputs, size = inputs_of(GPU_SHAPES["long"], torch.bfloat16, "cuda")
    if not ready:
        monkeypatch.setattr(flex, "can_run", lambda *call: False)

    do, _ = make_grads(inputs[0], inputs[2])

    def step() -> tuple[Tensor, ...]:
        o = sliding_window_attention(*inputs, size)
        return o, *torch.autograd.grad(o, inputs, do)

    graph, outputs = captured(step)
    for _ in range(2):
        with torch.no_grad():
            inputs[1].normal_()
        assert all(map(torch.equal, replayed(graph, outputs), step()))


def test_torch_compile_traces_a_call() -> None:
    torch._dynamo.reset()
    inputs, size = inputs_of(GPU_SHAPES["long"], torch.bfloat16, "cuda")
    work = torch.compile(sliding_window_attention, fullgraph=True)
    check(work, inputs, size, False)
    check(work, inputs, size, True)
