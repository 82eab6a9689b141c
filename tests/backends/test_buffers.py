"""Buffers made past PyTorch's dispatcher equal those of `new_empty`; a caller's workspace holds temporaries only."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel.backends.launcher import buffers
from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.core import registry
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection
from tests.helpers.cases import make_blocks, make_grads, make_qkv
from tests.helpers.poison import new_memory_is_nan

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
BACKENDS = ("sdpa-packed", "triton-token", "triton-group", "triton-tile", "triton-block")


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("sizes", [(2, 3, 1, 5), (7,), (2, 0, 3), (0,)])
def test_a_buffer_is_a_new_plain_tensor(device: str, inference: bool, sizes: tuple[int, ...]) -> None:
    like = torch.zeros(1, dtype=torch.bfloat16, device=device)
    with torch.inference_mode(inference):
        for dtype in (None, torch.float32):
            made, expected = unwritten(like, *sizes, dtype=dtype), like.new_empty(sizes, dtype=dtype)
            for fact in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf"):
                assert getattr(made, fact) == getattr(expected, fact)
            assert (type(made), made.stride(), made.is_inference()) == (torch.Tensor, expected.stride(), inference)
            assert inference or made._version == 0
    if made.numel() and not inference:
        weight = torch.ones(sizes, dtype=made.dtype, device=device, requires_grad=True)
        (weight * made.fill_(3)).sum().backward()
        assert torch.equal(weight.grad, made)  # autograd may save it, and take it for a result
        assert made._version == 1


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_deterministic_algorithms_fill_it_with_nan(device: str) -> None:
    """Benches and tuning rely on it to see what a kernel left unwritten."""
    with new_memory_is_nan():
        assert unwritten(torch.zeros(1, device=device), 3, 5, dtype=torch.bfloat16).isnan().all()


# The caller's workspace


def problem(device: str = "cpu", S: int = 2) -> tuple[Tensor, Tensor, Tensor, Selection]:
    """Few rows: the Triton backends split them, and packed SDPA gathers their keys."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (x.to(device, dtype).requires_grad_() for x in make_qkv(1, S, 1, 2, 16, S_kv=96))
    return q, k, v, make_blocks(1, S, 1, 96, 5, 16, device=device)


def results(backend: str, arguments: tuple[Any, ...], workspace: Tensor | None) -> tuple[Tensor, ...]:
    q, k, v, selection = arguments
    o, lse = nsa_sel.selection_attention(q, k, v, selection, return_lse=True, backend=backend, workspace=workspace)
    return o, lse, *torch.autograd.grad((o, lse), (q, k, v), make_grads(q, v))


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param("cupy-cuda", marks=pytest.mark.gpu)])
def test_a_pass_takes_its_temporaries_from_the_workspace(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if backend == "cupy-cuda" else "cpu"
    q, k, v, selection = problem(device)
    made: list[Tensor] = []
    real = buffers.unwritten
    monkeypatch.setattr(buffers, "unwritten", lambda *how, **more: made.append(real(*how, **more)) or made[-1])
    results(backend, (q, k, v, selection), torch.empty(1 << 20, dtype=torch.uint8, device=device))
    assert made == []
    results(backend, (q, k, v, selection), None)
    assert made != []


def refusal(backend: str, arguments: tuple[Any, ...], size: int) -> str | None:
    """The message for a workspace of `size` bytes; None where it is enough."""
    padded = torch.empty(size + 256, dtype=torch.uint8)  # the message assumes a start aligned to 256 bytes
    try:
        results(backend, arguments, padded[-padded.data_ptr() % 256 :][:size])
    except ArgumentError as error:
        return str(error)
    return None


@pytest.mark.parametrize("backend", BACKENDS)
def test_too_small_a_workspace_says_how_large_it_should_be(backend: str) -> None:
    arguments, size, passes = problem(), 0, []
    while (message := refusal(backend, arguments, size)) is not None:
        found = re.search(rf"workspace.*of {size} bytes.*at least (\d+) bytes for the (\w+) pass of {backend}", message)
        assert found, message
        assert int(found[1]) > size
        size = int(found[1])
        passes.append(found[2])
    assert passes in (["forward"], ["backward"], ["forward", "backward"])
    assert not registry.is_broken(backend, nsa_sel.decisions()[-1].request)


@pytest.mark.parametrize(
    ("workspace", "value"),
    [
        (1 << 20, "a int"),
        (torch.empty(64), "of dtype torch.float32"),
        (torch.empty(64, 2, dtype=torch.uint8)[:, 0], "strides (2,)"),
        (torch.empty(64, dtype=torch.uint8, device="meta"), "on meta"),
    ],
)
def test_an_invalid_workspace_is_refused(workspace: Any, value: str) -> None:
    with pytest.raises(ArgumentError, match=rf"workspace.*{re.escape(value)}"):
        nsa_sel.selection_attention(*problem(), workspace=workspace)


def test_a_workspace_is_refused_in_inference_mode_and_torch_compile() -> None:
    q, k, v, selection = problem()
    with torch.inference_mode():
        inner = torch.empty(64, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match=r"workspace.*inference_mode"):
        nsa_sel.selection_attention(q, k, v, selection, workspace=inner)

    def call(workspace: Tensor) -> Tensor:
        o: Tensor = nsa_sel.selection_attention(q, k, v, selection, workspace=workspace)
        return o

    with pytest.raises(Exception, match=r"workspace.*torch.compile"):
        torch.compile(call, backend="eager", fullgraph=True)(torch.empty(64, dtype=torch.uint8))
