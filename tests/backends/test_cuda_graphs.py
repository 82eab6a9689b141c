"""CUDA graphs: a replay follows what was written in place since the capture, on every GPU backend, forward, backward and decode.

What is captured and compared is exercised on a CPU too, where a stand-in for the graph runs the step anew.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from nsa_sel import Selection, decisions, selection_attention
from nsa_sel.core import registry
from nsa_sel.selection import Exact, Snapshot
from tests.helpers.cases import assert_forward, make_blocks, make_grads, make_qkv
from tests.helpers.gpus import captured, needs, no_waiting, replayed

BLOCK = 32
S_KV = 200


def device_backends() -> list[Any]:
    """(device, backend): what a GPU runs, and two backends of a CPU for the tests' own sake."""
    found = [pytest.param("cpu", name) for name in ("numba", "sdpa-packed")]
    for name, backend in registry.backends().items():
        if "bfloat16" in backend.limits.dtypes.get("cuda", ()):
            found.append(pytest.param("cuda", name, marks=[pytest.mark.gpu, needs(name)]))
    return found


DEVICE_BACKENDS = device_backends()
everywhere = pytest.mark.parametrize(("device", "backend"), DEVICE_BACKENDS)
on_gpu = pytest.mark.parametrize("backend", [pytest.param(case.values[1], marks=case.marks) for case in DEVICE_BACKENDS if case.marks])


def assert_equal(got: list[Tensor], wanted: tuple[Tensor, ...]) -> None:
    for mine, other in zip(got, wanted, strict=True):
        assert not mine.isnan().any()
        assert torch.equal(mine, other)


def problem(device: str, S: int, seed: int, block: int = BLOCK) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, do of bfloat16 on a GPU and float32 on a CPU, and the block indices [1,S,2,3] of a selection."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = make_qkv(S=S, G=2, h=4, Dk=64, S_kv=S_KV, dtype=dtype, device=device, seed=seed)
    return q, k, v, make_grads(q, v, seed)[0], make_blocks(1, S, 2, S_KV, 3, block, seed=seed, device=device).block_indices


def training(backend: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, selection: Selection) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = selection_attention(*inputs, selection, return_lse=True, backend=backend)
    assert (decisions()[-1].forward, decisions()[-1].backward) == (backend, backend)
    return o, lse, *torch.autograd.grad(o, inputs, do)


@everywhere
def test_decode_over_a_cache_that_grows(device: str, backend: str) -> None:
    """One graph serves all steps of a generation: the token, its position and its selection are written in place. NaN lies beyond."""
    _, keys, values, _, _ = problem(device, 1, 0)
    k, v = keys.fill_(float("nan")), values.fill_(float("nan"))
    q, new_k, new_v, _, _ = problem(device, 6, 1)
    first = 100
    k[:, :, :first], v[:, :, :first] = (x[:, :, :first] for x in problem(device, 1, 2)[1:3])
    row, q_pos = q[:, 0].clone(), torch.zeros(1, dtype=torch.int32, device=device)
    static = Selection.from_blocks(torch.zeros(1, 1, 2, 3, dtype=torch.int32, device=device) - 1, BLOCK)

    def step() -> tuple[Tensor, ...]:
        return selection_attention(row, k, v, static, q_pos=q_pos, return_lse=True, backend=backend)  # type: ignore[no-any-return]

    graph, outputs = captured(step, device)
    for turn in range(6):
        t = first + turn
        k[:, :, t], v[:, :, t] = new_k[:, :, turn], new_v[:, :, turn]
        row.copy_(q[:, turn])
        q_pos.fill_(t)
        static.ranges.copy_(Selection.from_blocks(torch.tensor([0, turn % 2 + 1, t // BLOCK]).expand(1, 1, 2, 3), BLOCK).ranges)
        got = replayed(graph, outputs)
        assert_equal(got, step())
        ranges, known = static.ranges[:, :1], slice(t + 1)
        o, lse = (x.unsqueeze(1) for x in got)
        assert_forward((o, lse), row.unsqueeze(1), k[:, :, known], v[:, :, known], ranges)


@everywhere
def test_flags_of_debugging_read_nothing_in_a_capture(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in ("NSA_DEBUG_TRITON", "NSA_DEBUG_COMPARE", "NSA_DEBUG_TIMING"):
        monkeypatch.setenv(flag, "1")
    *tensors, blocks = problem(device, 20, 0)
    graph, outputs = captured(lambda: training(backend, *tensors, Selection.from_blocks(blocks, BLOCK)), device)
    assert_equal(replayed(graph, outputs), training(backend, *tensors, Selection.from_blocks(blocks, BLOCK)))


@on_gpu
def test_replays_allocate_nothing(backend: str) -> None:
    *tensors, blocks = problem("cuda", 100, 0)
    static = Selection.from_blocks(blocks, BLOCK)
    graph, outputs = captured(lambda: training(backend, *tensors, static), "cuda")
    first = replayed(graph, outputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for count in ("allocation.all.allocated", "allocated_bytes.all.current", "reserved_bytes.all.current", "num_alloc_retries"):
        assert after[count] == before[count], count
    assert all(map(torch.equal, first, outputs))


@on_gpu
def test_eager_calls_never_wait_for_the_device(backend: str) -> None:
    *tensors, blocks = problem("cuda", 100, 0)
    training(backend, *tensors, Selection.from_blocks(blocks, BLOCK))  # compiles
    with no_waiting():
        training(backend, *tensors, Selection.from_blocks(blocks, BLOCK))


def test_nothing_measured_is_trusted_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        selection = Selection(torch.empty(1, 4, 1, 2, 2, dtype=torch.int32, device="cuda"), max_length=50)
    selection._snapshot = Snapshot(selection.ranges._version, None, Exact(7, (1.0,), 7, (100, 20)), {})
    known = [(7, (1.0,), 20), (50, None, None)]
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        assert (selection.length_bound(100), selection.sharing, selection.total_length(100)) == known[capturing]
