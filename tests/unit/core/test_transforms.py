"""Check that tracers, dispatch modes and autograd modes see the op, or are refused with a remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from nsa_sel import Selection, decisions, selection_attention, selection_attention_with_kvcache
from nsa_sel.errors import ArgumentError, BackendError
from tests.helpers.cases import make_blocks, make_qkv

CPU = ("sdpa-packed", "numba")
Results = tuple[Tensor, ...]


def problem() -> tuple[Tensor, Tensor, Tensor, Selection]:
    q, k, v = make_qkv(1, 4, 1, 2, 16, S_kv=32, requires_grad=True)
    return q, k, v, make_blocks(1, 4, 1, 32, 2, 16)


def results(q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, backend: str) -> Results:
    o = selection_attention(q, k, v, selection, backend=backend)
    return (o.detach(), *torch.autograd.grad(o.square().sum(), (q, k, v)))


def assert_refused(call: Callable[[], Any], *words: str) -> None:
    before = len(decisions())
    with pytest.raises(BackendError) as caught:
        call()
    assert all(word in str(caught.value) for word in (*words, "Remedy: "))
    assert len(decisions()) == before


@pytest.mark.parametrize("backend", CPU)
def test_make_fx_records_the_attention(backend: str) -> None:
    q, k, v, selection = problem()
    q, k, v = (x.detach() for x in (q, k, v))
    graph = make_fx(lambda *x: selection_attention(*x, selection, backend=backend))(q, k, v)
    assert graph.graph.find_nodes(op="call_function", target=torch.ops.nsa_sel.selection_forward.default)
    others = [torch.randn_like(x) for x in (q, k, v)]
    assert torch.equal(graph(*others), selection_attention(*others, selection, backend=backend))


@pytest.mark.parametrize("backend", CPU)
def test_fake_tensors_give_shapes_and_run_nothing(backend: str) -> None:
    q, k, v, selection = problem()
    before = len(decisions())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        o, lse = selection_attention(*fake, selection, return_lse=True, backend=backend)
        assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:-1], torch.float32)
    o = selection_attention(*fake, mode.from_tensor(selection.ranges), backend=backend)  # outside of the mode
    assert (type(o), o.shape) == (type(fake[0]), q.shape)
    assert len(decisions()) == before


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_dual_numbers_are_refused(backend: str, which: int) -> None:
    *tensors, selection = problem()
    with forward_ad.dual_level():
        dual = [x.detach() for x in tensors]
        dual[which] = forward_ad.make_dual(dual[which], torch.ones_like(dual[which]))
        assert_refused(lambda: selection_attention(*dual, selection, backend=backend), "forward_ad")
        selection_attention(*(x.detach() for x in tensors), selection, backend=backend)  # without tangents


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("vectorized", [False, True])
def test_batched_gradients_are_refused(backend: str, vectorized: bool) -> None:
    q, k, v, selection = problem()

    def call() -> Any:
        if vectorized:
            return torch.autograd.functional.jacobian(lambda x: selection_attention(x, k, v, selection, backend=backend), q, vectorize=True)
        o = selection_attention(q, k, v, selection, backend=backend)
        return torch.autograd.grad(o, q, torch.randn(3, *o.shape), is_grads_batched=True)

    with pytest.raises(BackendError, match="batched gradients"):
        call()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nested_and_sparse_tensors_are_refused(name: str) -> None:
    q, k, v, selection = problem()
    inputs = {"q": q.detach(), "k": k.detach(), "v": v.detach()}
    x = inputs[name]
    selection_attention(**inputs, selection=selection)  # is remembered: checks of later calls begin with its guards
    with warnings.catch_warnings(action="ignore"):
        nested = [torch.nested.nested_tensor([x[0], x[0]], layout=layout) for layout in (torch.strided, torch.jagged)]
    for wrong, words in ((nested[0], "varlen"), (nested[1], "varlen"), (x.to_sparse(), "to_dense")):
        with pytest.raises(ArgumentError, match=words) as caught:
            selection_attention(**inputs | {name: wrong}, selection=selection)
        assert str(caught.value).startswith(f"{name} is ")


@pytest.mark.parametrize("backend", CPU)
def test_lazy_negation_is_resolved(backend: str) -> None:
    """x.imag of a conjugate is a view whose memory holds the negated numbers."""
    q, k, v, selection = problem()
    plain = [x.detach() for x in (q, k, v)]
    lazy = [torch._neg_view(-x) for x in plain]
    assert all(x.is_neg() for x in lazy)
    wanted = results(q, k, v, selection, backend)
    assert all(map(torch.equal, results(*(x.requires_grad_() for x in lazy), selection, backend), wanted))
    caches = [x.transpose(1, 2) for x in lazy[1:]]
    with torch.no_grad():
        o = selection_attention_with_kvcache(lazy[0], *caches, selection, torch.tensor([32]), backend=backend)
    torch.testing.assert_close(o, wanted[0])
    o = selection_attention(q, k, v, selection, backend=backend)
    do = torch.randn_like(o)
    assert all(
        map(torch.equal, torch.autograd.grad(o, (q, k, v), torch._neg_view(-do), retain_graph=True), torch.autograd.grad(o, (q, k, v), do))
    )


def test_tracing_a_call_over_a_cache_is_refused() -> None:
    q, k, v, selection = problem()
    tensors = [q.detach(), *(x.detach().transpose(1, 2) for x in (k, v))]
    lengths = torch.tensor([32])

    def call(*tensors: Tensor) -> Any:
        return selection_attention_with_kvcache(*tensors, selection, lengths)

    assert_refused(lambda: make_fx(call)(*tensors), "selection_attention_with_kvcache", "make_fx")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in tensors]
    assert_refused(lambda: call(*fake), "FakeTensorMode")
    with forward_ad.dual_level():
        assert_refused(lambda: call(forward_ad.make_dual(tensors[0], tensors[0]), *tensors[1:]), "forward_ad")
