"""The public call on a CPU: where it is routed and why, and equal results on every route."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel.core import registry
from nsa_sel.core.call import request_of
from nsa_sel.core.check import check_call
from nsa_sel.errors import BackendError
from tests.helpers.calls import call_forced, check, last, problem
from tests.helpers.cases import assert_gradients, make_qkv, make_spans

pytestmark = pytest.mark.usefixtures("plain_cpu")


# Routing


@pytest.mark.parametrize(
    ("flags", "source"),
    [
        ({}, None),
        ({"NSA_USE_TRITON_SEL": "0"}, None),
        ({"NSA_USE_TRITON_SEL": "1", "NSA_TRITON_SEL_FORCE": "1", "NSA_SEL_TRITON_MIN_L": "0"}, None),
        ({"NSA_SEL_TRITON_GROUP": "0", "NSA_SEL_TRITON_ALLOW_GRAD": "0", "NSA_SEL_TRITON_REQUIRE_ALIGN": "1"}, None),
        ({"NSA_SEL_TRITON_FORCE_PATH": "varlen", "NSA_SEL_TRITON_DB": "1", "NSA_SEL_TRITON_BLOCK_L": "64"}, None),
        ({"NSA_FORCE_PARITY": "1"}, "NSA_FORCE_PARITY"),
        ({"NSA_SEL_BACKEND": "sdpa-packed"}, "NSA_SEL_BACKEND"),
        ({"NSA_DEBUG_TRITON": "1", "NSA_DEBUG_TIMING": "1", "NSA_DEBUG_COMPARE": "1"}, None),
    ],
)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_cpu_calls_are_routed(monkeypatch: pytest.MonkeyPatch, flags: dict[str, str], source: str | None, needs_grad: bool) -> None:
    for flag, text in flags.items():
        monkeypatch.setenv(flag, text)
    check(*problem(requires_grad=needs_grad))
    decision = last()
    assert decision.forward == "sdpa-packed"
    assert decision.backward == ("sdpa-packed" if needs_grad else None)
    assert (decision.override and decision.override.source) == source
    refused = {verdict.backend: [reason.code for reason in verdict.forward] for verdict in decision.verdicts}
    assert "device-kind" in refused["triton-group"]
    assert "device-kind" in refused["triton-token"]


def test_use_backend_and_argument_are_recorded() -> None:
    arguments = problem()
    with nsa_sel.use_backend("sdpa-packed"):
        nsa_sel.selection_attention(*arguments)
        assert last().override.source == "use_backend"
        with ThreadPoolExecutor(1) as pool:  # in this thread alone
            assert pool.submit(nsa_sel.explain, *arguments).result().override is None
    nsa_sel.selection_attention(*arguments, backend="sdpa-packed")
    assert last().override.source == "argument"
    with pytest.raises(KeyError), nsa_sel.use_backend("numba"):
        raise KeyError
    nsa_sel.selection_attention(*arguments)
    assert last().override is None


@pytest.mark.parametrize("source", ["argument", "use_backend", "NSA_SEL_BACKEND"])
@pytest.mark.parametrize("name", ["triton-group", "triton-token"])
def test_forced_triton_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch, source: str, name: str) -> None:
    monkeypatch.setattr(registry, "load", lambda name: pytest.fail(f"{name} was loaded"))
    before = nsa_sel.decisions()
    with pytest.raises(BackendError) as caught:
        call_forced(monkeypatch, name, source)
    message = str(caught.value)
    assert f"backend '{name}', forced by {source}, refuses this call:" in message
    assert f"{name}: device-kind (unsupported): The tensors are on cpu, not on cuda" in message
    assert "TRITON_INTERPRET=1" in message
    assert caught.value.decision.forward is None
    assert nsa_sel.decisions() == before


@pytest.mark.parametrize("needs_grad", [False, True])
def test_explain_takes_the_decision_of_the_call(needs_grad: bool) -> None:
    arguments = problem(requires_grad=needs_grad)
    explained = nsa_sel.explain(*arguments)
    nsa_sel.selection_attention(*arguments)
    assert last() is explained
    with torch.no_grad():
        assert nsa_sel.explain(*arguments).backward is None


def test_explain_sees_autocast() -> None:
    arguments = problem()
    with torch.autocast("cpu", torch.bfloat16):
        explained = nsa_sel.explain(*arguments)
        nsa_sel.selection_attention(*arguments)
    assert last().request.dtype == "bfloat16"
    assert explained == last()


@pytest.mark.parametrize(("start", "row", "aligned"), [(0, 16, True), (0, 20, True), (0, 18, False), (4, 16, True), (2, 16, False)])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_request_knows_the_alignment_of_all_tensors(which: int, start: int, row: int, aligned: bool) -> None:
    """Pointers and all strides but the last are multiples of 16 bytes, four float32."""
    tensors = [*make_qkv(1, 4, 1, 2, 16, S_kv=8)]
    shape = tensors[which].shape
    wide = torch.randn(*shape[:-1], row).flatten()
    strides = torch.empty(*shape[:-1], row).stride()
    tensors[which] = torch.cat((wide, wide))[start:].as_strided(shape, strides)
    checked = check_call(*tensors, torch.zeros(1, 4, 1, 1, 2, dtype=torch.int32), None, None)
    assert request_of(*checked[:4], False).aligned == aligned


# Results


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)])
def test_gradients_of_some_inputs(wanted: tuple[int, ...]) -> None:
    *qkv, ranges = problem()
    for i in wanted:
        qkv[i].requires_grad_()
    nsa_sel.selection_attention(*qkv, ranges).square().sum().backward()
    assert [i for i in range(3) if qkv[i].grad is not None] == list(wanted)
    everything = [tensor.detach().requires_grad_() for tensor in qkv]
    nsa_sel.selection_attention(*everything, ranges).square().sum().backward()
    assert all(torch.equal(qkv[i].grad, everything[i].grad) for i in wanted)


def test_lse_alone_may_be_differentiated() -> None:
    q, k, v, ranges = problem(requires_grad=True)
    _, lse = nsa_sel.selection_attention(q, k, v, ranges, return_lse=True)
    dlse = torch.randn_like(lse)
    none = torch.zeros(*q.shape[:-1], v.shape[-1])
    assert_gradients(torch.autograd.grad(lse, (q, k, v), dlse), q, k, v, ranges, none, dlse)


@pytest.mark.parametrize("q_pos", [None, torch.tensor([[3], [39]]), torch.tensor([20])])
def test_decode_form_equals_one_row_of_prefill(q_pos: Tensor | None) -> None:
    q, k, v = make_qkv(2, 1, 3, 4, 16, 8, S_kv=40)
    ranges = make_spans("few", 2, 1, 3, 40, L=16)
    found = nsa_sel.selection_attention(q[:, 0], k, v, ranges[:, 0], q_pos=q_pos, return_lse=True)
    whole = nsa_sel.selection_attention(q, k, v, ranges, q_pos=q_pos, return_lse=True)
    assert [x.shape for x in found] == [(2, 3, 4, 8), (2, 3, 4)]
    assert all(torch.equal(x, y[:, 0]) for x, y in zip(found, whole, strict=True))
    check(q[:, 0], k, v, ranges[:, 0], q_pos=q_pos)


@pytest.mark.parametrize(("B", "S", "n"), [(0, 4, 2), (2, 0, 2), (2, 4, 0)])
def test_nothing_to_do(B: int, S: int, n: int) -> None:
    q, k, v = make_qkv(B, S, 2, 3, 16, 8, S_kv=20, requires_grad=True)
    o, lse = nsa_sel.selection_attention(q, k, v, torch.zeros(B, S, 2, n, 2, dtype=torch.int32), return_lse=True)
    assert all(map(torch.equal, (o, lse), (torch.zeros(B, S, 2, 3, 8), torch.full((B, S, 2, 3), -torch.inf))))
    assert not any(dx.any() for dx in torch.autograd.grad(o.sum(), (q, k, v)))
    assert last().forward == "sdpa-packed"


def test_inference_mode() -> None:
    q, k, v, ranges = problem()
    expected = nsa_sel.selection_attention(q, k, v, ranges)
    with torch.inference_mode():
        assert torch.equal(nsa_sel.selection_attention(q, k, v, ranges.clone()), expected)
