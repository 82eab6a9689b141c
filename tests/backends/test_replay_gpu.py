"""Replayed passes (_replay.py) on a GPU: the bits of passes that run as they are written, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa_sel import Selection, decisions, selection_attention
from nsa_sel.backends import _replay
from nsa_sel.core import ranges as ranges_module
from nsa_sel.core import registry
from nsa_sel.core.warm import reset
from tests.helpers.cases import assert_forward, assert_gradients, make_blocks, make_grads, make_qkv

pytestmark = pytest.mark.gpu
BACKENDS = ("triton-token", "triton-group", "triton-tile", "triton-block", "cuda-block", "cupy-cuda")
on_every_backend = pytest.mark.parametrize(
    "backend", [pytest.param(x, marks=[pytest.mark.skip(reason="missing")] if registry.missing(x) else []) for x in BACKENDS]
)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was replayed."""
    found: list[Any] = []

    def play(recording: Any, *others: Any) -> Any:
        result = real(recording, *others)
        found.append(recording)
        assert result is not None
        return result

    real = _replay._play
    monkeypatch.setattr(_replay, "_play", play)
    return found


def inputs_of(seed: int, S: int = 100, block: int = 64, S_kv: int = 400) -> Inputs:
    """q, k, v, do and block indices."""
    q, k, v = make_qkv(2, S, 2, 4, 64, S_kv=S_kv, dtype=torch.bfloat16, device="cuda", seed=seed)
    return q, k, v, make_grads(q, v, seed)[0], make_blocks(2, S, 2, S_kv, 3, block, seed=seed, device="cuda").block_indices


def step(backend: str, inputs: Inputs, block: int = 64, run: Callable[..., Any] | None = None, loss_of_lse: bool = False) -> list[Tensor]:
    """o, lse, dq, dk, dv of a new selection."""
    *leaves, do, blocks = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]

    def call(*tensors: Tensor) -> Any:
        selection = Selection.from_blocks(blocks, block)
        return selection_attention(*tensors, selection, return_lse=True, backend=backend)

    o, lse = (run or (lambda work, *tensors: work(*tensors)))(call, *leaves)
    assert (decisions()[-1].forward, decisions()[-1].backward) == (backend, backend)
    outputs, gradients = ((o, lse), (do, torch.ones_like(lse))) if loss_of_lse else ((o,), (do,))
    return [o.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, gradients)]


def as_written(work: Callable[[], Any]) -> Any:
    """What `work` returns where nothing is recorded."""
    reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_replay, "TRIES", 0)
        patch.setattr(ranges_module, "_classes", {})
        found = work()
    reset()
    return found


def assert_equal(got: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
        assert not one.isnan().any()


@on_every_backend
@pytest.mark.parametrize(("S", "block", "loss_of_lse"), [(100, 64, False), (100, 32, True), (1, 64, False), (1000, 16, False)])
def test_new_tensors_and_selections(backend: str, played: list[Any], S: int, block: int, loss_of_lse: bool) -> None:
    problems = [inputs_of(seed, S, block, max(S, 400)) for seed in range(6)]
    wanted = as_written(lambda: [step(backend, x, block, loss_of_lse=loss_of_lse) for x in problems])
    assert played == []
    for x, y in zip(problems, wanted, strict=True):
        played.clear()
        assert_equal(step(backend, x, block, loss_of_lse=loss_of_lse), y)
    assert len(played) >= 3  # forward, backward, its lists
    if S > 100:
        return  # the oracle takes long
    q, k, v, do, blocks = problems[-1]
    selection = Selection.from_blocks(blocks, block)
    assert_forward((y[0], y[1]), q, k, v, selection.ranges)
    if not loss_of_lse:
        assert_gradients(tuple(y[2:]), q, k, v, selection.ranges, do, None)


def saved_on_cpu(work: Callable[..., Any], *tensors: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return work(*tensors)


def recomputed(work: Callable[..., Any], *tensors: Tensor) -> Any:
    return checkpoint(work, *tensors, use_reentrant=False)


def in_half(work: Callable[..., Any], *tensors: Tensor) -> Any:
    with torch.autocast("cuda", torch.float16):
        return work(*tensors)


@on_every_backend
@pytest.mark.parametrize("run", [saved_on_cpu, recomputed, in_half])
def test_what_autograd_does_around_a_call(backend: str, played: list[Any], run: Callable[..., Any]) -> None:
    problems = [inputs_of(seed) for seed in range(5)]
    if run is in_half:
        problems = [(*x[:3], x[3].half(), x[4]) for x in problems]
    wanted = as_written(lambda: [step(backend, x, run=run) for x in problems])
    for x, y in zip(problems, wanted, strict=True):
        assert_equal(step(backend, x, run=run), y)
    assert played


@on_every_backend
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_gradients(backend: str, played: list[Any], mode: Any) -> None:
    def work(inputs: Inputs) -> list[Tensor]:
        q, k, v, _, blocks = inputs
        with mode():
            return list(selection_attention(q, k, v, Selection.from_blocks(blocks, 64), return_lse=True, backend=backend))

    problems = [inputs_of(seed) for seed in range(5)]
    wanted = as_written(lambda: [work(x) for x in problems])
    for x, y in zip(problems, wanted, strict=True):
        assert_equal(work(x), y)
    assert played


@on_every_backend
def test_a_kept_selection_that_is_written(backend: str, played: list[Any]) -> None:
    problems = [inputs_of(seed) for seed in range(6)]
    wanted = as_written(lambda: [step(backend, x) for x in problems])
    kept = Selection.from_blocks(problems[0][4], 64)
    for (q, k, v, do, blocks), y in zip(problems, wanted, strict=True):
        kept.ranges.copy_(Selection.from_blocks(blocks, 64).ranges)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        for _ in range(2):
            o, lse = selection_attention(*leaves, kept, return_lse=True, backend=backend)
            assert_equal([o, lse, *torch.autograd.grad(o, leaves, do)], y)
    assert played


@on_every_backend
def test_threads_with_streams_of_their_own(backend: str, played: list[Any]) -> None:
    """Nothing that a replay packs or allocates is shared: the bits of each thread are those of one alone."""
    problems = [inputs_of(seed, 400) for seed in range(4)]
    wanted = as_written(lambda: [step(backend, x) for x in problems])
    for _ in range(5):
        step(backend, problems[0])
    torch.cuda.synchronize()
    played.clear()

    def work(number: int) -> list[list[Tensor]]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(number % 2 == 0):
            found = [step(backend, problems[(number + i) % 4]) for i in range(12)]
        stream.synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        for number, found in enumerate(pool.map(work, range(4))):
            for i, got in enumerate(found):
                assert_equal(got, wanted[(number + i) % 4])
    assert len(played) > 4 * 12


@on_every_backend
def test_streams_that_share_a_selection(backend: str, played: list[Any]) -> None:
    """Neither reads a plan that another has only queued. The first calls are written as they are, the last ones replayed."""
    q, k, v, do, blocks = inputs = inputs_of(0)
    wanted = step(backend, inputs)
    late, early = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(6):
        shared, found = Selection.from_blocks(blocks, 64), []
        torch.cuda.synchronize()
        for stream in (late, early):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000 * (stream is late))  # cycles
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                o, lse = selection_attention(*leaves, shared, return_lse=True, backend=backend)
                found.append([o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)])
        torch.cuda.synchronize()
        for got in found:
            assert_equal(got, wanted)
    assert played


@on_every_backend
def test_a_capture_after_replays(backend: str, played: list[Any]) -> None:
    """A CUDA graph holds a pass that runs as it is written, and follows what is written into its inputs."""
    problems = [inputs_of(seed) for seed in range(3)]
    wanted = as_written(lambda: [step(backend, x) for x in problems])
    static = tuple(x.clone() for x in problems[0])
    kept = Selection.from_blocks(static[4], 64)

    def call() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in static[:3]]
        o, lse = selection_attention(*leaves, kept, return_lse=True, backend=backend)
        return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, static[3])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            call()
    torch.cuda.current_stream().wait_stream(side)
    assert played
    number, graph = len(played), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    assert len(played) == number
    for x, y in zip(problems, wanted, strict=True):
        for old, new in zip(static, x, strict=True):
            old.copy_(new)
        kept.ranges.copy_(Selection.from_blocks(static[4], 64).ranges)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(outputs, y)
        assert_equal(call(), y)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@on_every_backend
def test_new_memory_that_pytorch_fills(backend: str, played: list[Any], deterministic: None) -> None:
    """Passes are then not replayed, so that what no kernel writes shows as NaN."""
    inputs = inputs_of(0)
    for _ in range(4):
        step(backend, inputs)
    assert played == []


@on_every_backend
def test_an_unaligned_tensor_among_replays(backend: str, played: list[Any]) -> None:
    problems = [inputs_of(seed) for seed in range(5)]
    moved = problems[0]
    q = torch.empty(moved[0].numel() + 1, dtype=moved[0].dtype, device="cuda")[1:].view_as(moved[0]).copy_(moved[0])
    do = moved[3].new_empty(moved[3].numel() + 1)[1:].view_as(moved[3]).copy_(moved[3])
    others = [(q, *moved[1:]), (*moved[:3], do, moved[4])]
    wanted = as_written(lambda: [step(backend, x) for x in others])
    for x in problems:
        step(backend, x)
    assert played
    for x, y in zip(others, wanted, strict=True):
        assert_equal(step(backend, x), y)
