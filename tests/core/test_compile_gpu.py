"""Compiled calls on a GPU: the ops with every backend, one graph for all lengths, and CUDA graphs that PyTorch captures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nsa_sel import Selection, decisions
from tests.contract.lanes import on_gpu
from tests.core.test_compile import ALL_CHECKS, BLOCK, assert_equal, attend, check_call_over_a_cache, check_ops, compiled, counting, results
from tests.helpers.cases import make_blocks, make_qkv

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def problem(S: int, n: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Selection]:
    """q, k, v of bfloat16 that require gradients, and n blocks per row."""
    q, k, v = make_qkv(S=S, G=2, h=4, Dk=64, dtype=torch.bfloat16, device="cuda", seed=seed, requires_grad=True)
    return q, k, v, make_blocks(1, S, 2, S, n, BLOCK, seed=seed, device="cuda")


@on_gpu
def test_the_ops_pass_opcheck(backend: str) -> None:
    check_ops(backend, *problem(64), ALL_CHECKS)


def test_a_call_over_a_cache_runs_between_graphs() -> None:
    check_call_over_a_cache("cuda")


@on_gpu
def test_one_graph_serves_every_length(backend: str) -> None:
    counter, graphs = counting()
    work = compiled(attend, counter)
    for S in (80, 128, 96):  # none is a head dim: PyTorch treats sizes that are equal in the first call as one
        given = problem(S)
        got = results(work, *given, backend=backend)
        assert (decisions()[-1].forward, decisions()[-1].request.S) == (backend, S)
        assert_equal(got, results(attend, *given, backend=backend))
    assert graphs == {"forward": 1, "backward": 1}


@on_gpu
def test_cuda_graphs_of_pytorch_are_bit_equal(backend: str) -> None:
    """PyTorch captures forward and backward, and replays them for new tensors and another selection."""
    work = torch.compile(attend, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        given = problem(96, seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        got = tuple(x.clone() for x in results(work, *given, backend=backend))
        assert_equal(got, results(attend, *given, backend=backend))
