"""Counting on a GPU: real and random selections, no wait but the one of the first call, captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel import selection_attention
from nsa_sel.bench.core.cases import make_inputs, make_selection, prefill
from nsa_sel.core.ranges import sample_rows, sampled_sharing
from nsa_sel.selection import Selection
from tests.helpers.gpus import captured, no_waiting, replayed

pytestmark = pytest.mark.gpu
Events = Callable[[str], list[dict[str, Any]]]


def fresh(kind: str, S: int = 8192, h: int = 1) -> tuple[tuple[Tensor, ...], Selection]:
    case = prefill(kind, S, h)
    return make_inputs(case, "cuda")[:3], make_selection(case, "cuda")


def compile_what_the_prior_picks(q: Tensor, k: Tensor, v: Tensor, selection: Selection) -> None:
    for name in ("triton-tile", "triton-group", "cupy-cuda"):
        if nsa_sel.explain(q, k, v, selection, backend=name).forward:
            selection_attention(q, k, v, selection, backend=name)


@pytest.mark.parametrize(("kind", "S"), [("real", 8192), ("random", 8192), ("random", 1024)])
def test_a_gpu_counts_what_a_cpu_counts(kind: str, S: int) -> None:
    selection = make_selection(prefill(kind, S, 1), "cuda")
    found = []
    for device in ("cuda", "cpu"):
        ranges, rows = selection.ranges.to(device), sample_rows(1, S, 4, 16, device)
        found.append(sampled_sharing(ranges[rows.b, rows.s, rows.g], rows.s + 1, 64))
    assert found[0] == found[1]
    assert found[0] == pytest.approx(selection.measure(S).sharing, rel=0.03)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_random_rows_get_the_backend_of_blocks_without_measure(needs_grad: bool, logged: Events) -> None:
    (q, k, v), selection = fresh("random", 32768)
    o = selection_attention(q.requires_grad_(needs_grad), k, v, selection)
    decision = nsa_sel.decisions()[-1]
    assert decision.forward in ("triton-block", "cuda-block")
    assert decision.sharing_source == "counted at the first call"
    assert len(logged("sel.sharing")) == 1
    torch.testing.assert_close(o.detach(), selection_attention(q.detach(), k, v, selection, backend="triton-group"), rtol=2e-2, atol=2e-2)
    nsa_sel.reset()
    text = fresh("real", 8192, 16)
    selection_attention(*text[0], text[1])
    assert nsa_sel.decisions()[-1].forward in ("triton-tile", "cupy-cuda")


def test_only_the_first_call_of_a_kind_waits(logged: Events) -> None:
    (q, k, v), selection = fresh("random", 32768)
    selection_attention(q, k, v, selection)
    assert len(logged("sel.sharing")) == 1
    other = Selection(selection.ranges.clone(), 64, disjoint=True)
    with no_waiting():
        selection_attention(q, k, v, other)
    assert len(logged("sel.sharing")) == 1


def test_where_waiting_is_an_error_the_prior_decides(logged: Events) -> None:
    (q, k, v), selection = fresh("random", 32768)
    selection_attention(q, k, v, selection)  # compiles the backend of random rows
    compile_what_the_prior_picks(q, k, v, selection)
    nsa_sel.reset()
    with no_waiting():
        selection_attention(q, k, v, selection)
    assert nsa_sel.decisions()[-1].sharing_source.startswith("prior")
    selection_attention(q, k, v, selection)
    assert nsa_sel.decisions()[-1].sharing_source == "counted at the first call"
    assert len(logged("sel.sharing")) == 2


@pytest.mark.parametrize("warm", [False, True])
def test_a_capture_never_counts(warm: bool, logged: Events) -> None:
    (q, k, v), selection = fresh("random", 32768)
    expected = selection_attention(q, k, v, selection)
    compile_what_the_prior_picks(q, k, v, selection)
    nsa_sel.reset()
    if warm:
        graph, outputs = captured(lambda: (selection_attention(q, k, v, selection),))
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = (selection_attention(q, k, v, selection),)
    source = nsa_sel.decisions()[-1].sharing_source
    assert source == ("counted at the first call" if warm else "prior of base.yaml")
    torch.testing.assert_close(replayed(graph, outputs)[0], expected, rtol=2e-2, atol=2e-2)
    selection_attention(q, k, v, selection)
    assert nsa_sel.decisions()[-1].sharing_source == "counted at the first call"
    assert len(logged("sel.sharing")) == 2
