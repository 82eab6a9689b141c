"""Check `compressed_attention` against the float64 oracle, its decisions, and what it refuses."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

import nsa_sel
from nsa_sel import Selection, block_scores, compressed_attention
from nsa_sel.core import registry
from nsa_sel.core.backend import Offer, Reason
from nsa_sel.core.choose_call import ChooseCall
from nsa_sel.core.decide import forget_decisions
from nsa_sel.core.decision import Decision, Override
from nsa_sel.core.request import example_choice
from nsa_sel.errors import BackendError
from nsa_sel.policies import rules
from nsa_sel.policies.default import POLICY
from nsa_sel.settings.config import GPUS
from tests.helpers.choose_cases import SHAPES, SMALL, assert_chosen, check_attention, make_choose_call
from tests.helpers.wrong_calls import each_of, refused

WHOLE = (1, 50, 50, 1, 1, 16, 16, SMALL)
BACKENDS = ("choose-torch", "choose-triton")


def options_of(call: ChooseCall, shape: str) -> dict[str, Any]:
    rule = call.rule._asdict()
    return {**rule, "scale": call.scale, "S_kv": SHAPES[shape][2]}


def last() -> Decision:
    return nsa_sel.decisions()[-1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", ["h3", "chunked-prefill", "shorter-than-a-compressed-block", "more-than-all-blocks"])
def test_results(backend: str, shape: str) -> None:
    call = make_choose_call(shape)
    o, selection, lse = compressed_attention(call.q, call.k, call.v, **options_of(call, shape), return_lse=True, backend=backend)
    assert last().forward == backend
    exact = check_attention((o, lse), call)
    assert selection.block_size == call.rule.block_size
    assert selection.disjoint
    assert_chosen(selection.block_indices, exact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode(backend: str) -> None:
    call = make_choose_call("decode")
    q, options = call.q.squeeze(1), options_of(call, "decode")
    o, selection, lse = compressed_attention(q, call.k, call.v, **options, return_lse=True, backend=backend)
    exact = check_attention((o.unsqueeze(1), lse.unsqueeze(1)), call)
    assert_chosen(selection.block_indices, exact)
    assert selection.ranges.shape == (3, 1, 1, call.rule.n, 2)
    given, chosen = compressed_attention(q, call.k, call.v, **options, q_pos=torch.tensor([84]), backend=backend)
    assert torch.equal(given, o)
    assert torch.equal(chosen.ranges, selection.ranges)


def test_gradcheck() -> None:
    call = make_choose_call((1, 20, 20, 1, 2, 3, 2, SMALL), torch.float64)
    inputs = tuple(x.detach().requires_grad_() for x in (call.q, call.k, call.v))

    def work(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, _, lse = compressed_attention(q, k, v, **call.rule._asdict(), return_lse=True)
        return o, lse[:, 7:]

    assert torch.autograd.gradcheck(work, inputs)
    with pytest.raises(BackendError, match="second derivative"):
        torch.autograd.grad(work(*inputs)[0].sum(), inputs, create_graph=True)[0].sum().backward()


def test_positions_written_after_forward_are_noticed() -> None:
    call = make_choose_call((1, 20, 20, 1, 2, 3, 2, SMALL))
    q, q_pos = call.q.requires_grad_(), torch.arange(20)
    o, _ = compressed_attention(q, call.k, call.v, **call.rule._asdict(), q_pos=q_pos)
    q_pos.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_hooks_on_saved_tensors_may_free_the_inputs() -> None:
    """As torch.autograd.graph.save_on_cpu does."""
    call = make_choose_call((1, 20, 20, 1, 2, 3, 2, SMALL))
    inputs = [x.requires_grad_() + 0 for x in (call.q, call.k, call.v)]
    kept = [weakref.ref(x) for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        o, _ = compressed_attention(*inputs, **call.rule._asdict())
    del inputs
    assert not any(x() is not None for x in kept)
    o.sum().backward()
    assert all(x.grad is not None for x in (call.q, call.k, call.v))


def test_the_blocks_are_those_of_block_scores() -> None:
    """By another way: p of all rows in memory, `block_scores`, `Selection.from_scores`."""
    call = make_choose_call("h12", torch.float64)
    seen = torch.arange(call.k.shape[2]) < call.seen()[:, :, None, None, None]
    logits = torch.einsum("bsghd,bgkd->bsghk", call.q * call.scale, call.k).masked_fill(~seen, -math.inf)
    rule, S_kv = call.rule, SHAPES["h12"][2]
    scores = block_scores(torch.softmax(logits, -1).nan_to_num(), rule.block_size, rule.compress_block, rule.compress_stride, S_kv)
    expected = Selection.from_scores(scores, rule.n, rule.block_size, rule.first, rule.local, S_kv=S_kv)
    _, selection = compressed_attention(call.q, call.k, call.v, **options_of(call, "h12"))
    assert torch.equal(selection.ranges, expected.ranges)


def test_empty_batch_and_rows() -> None:
    for sizes in ((0, 8, 8), (1, 0, 0)):
        B, S, S_kv = sizes
        call = make_choose_call((B, S, S_kv, 1, 2, 16, 16, SMALL))
        o, selection = compressed_attention(call.q, call.k, call.v, **call.rule._asdict(), S_kv=S_kv)
        assert (o.shape, selection.ranges.shape) == ((B, S, 1, 2, 16), (B, S, 1, SMALL.n, 2))


# Decisions


def attend() -> None:
    q, k, v = torch.randn(1, 8, 1, 2, 16), torch.randn(1, 1, 8, 16), torch.randn(1, 1, 8, 16)
    nsa_sel.selection_attention(q, k, v, torch.tensor([[0, 4]]).expand(1, 8, 1, 1, 2))


def choose(**options: Any) -> None:
    call = make_choose_call("h1")
    compressed_attention(call.q, call.k, call.v, **options_of(call, "h1"), **options)


def test_a_decision_replays_and_names_every_backend() -> None:
    choose()
    assert last().request.compress == (SMALL.compress_block, SMALL.compress_stride)
    assert [verdict.backend for verdict in last().verdicts] == list(registry.backends("choose"))
    assert [step.partition(": ")[0] for step in last().steps] == ["choose-cuda", "choose-triton"]
    assert Decision.from_json(last().to_json()).replay() == ()
    assert "choose-triton" in nsa_sel.describe(last())


def test_forcing_a_backend_concerns_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    with nsa_sel.use_backend("sdpa-packed"):
        choose()
        assert last().override is None
        attend()
        assert last().forward == "sdpa-packed"
    with nsa_sel.use_backend("choose-torch"):
        attend()
        assert last().override is None
        choose()
        assert last().override is not None
    monkeypatch.setenv("NSA_SEL_BACKEND", "choose-torch")
    attend()
    assert last().override is None
    monkeypatch.delenv("NSA_SEL_BACKEND")
    monkeypatch.setenv("NSA_FORCE_PARITY", "1")
    choose()
    assert last().forward == "choose-torch"
    for name in ("sdpa-packed", "choose-trion"):
        with pytest.raises(BackendError, match="is unknown"):
            choose(backend=name)


def test_the_fallback_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: ChooseCall) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(registry.load_chooser("choose-triton"), "forward", broken)
    with pytest.raises(RuntimeError, match="no such kernel"):
        choose(backend="choose-triton")
    checks = tuple(check for check in POLICY.checks if check is not rules.no_triton_on_cpu)
    monkeypatch.setattr("nsa_sel.policies.default.POLICY", POLICY._replace(checks=checks))
    with pytest.warns(RuntimeWarning, match="choose-triton failed, choose-torch runs calls of this class from now on"):
        choose()
    assert (last().forward, last().override) == ("choose-torch", Override("choose-torch", "failure of choose-triton"))


@pytest.mark.parametrize(("name", "backend"), [("h200", "choose-cuda"), ("a100", "choose-triton"), ("rtx5090", "choose-triton")])
def test_on_a_gpu_triton_chooses_but_hopper_has_cuda(monkeypatch: pytest.MonkeyPatch, name: str, backend: str) -> None:
    request = example_choice(needs_grad=True)
    monkeypatch.setattr(registry, "offers", lambda request: tuple(map(Offer, registry.backends(request.kind).values())))
    forget_decisions()
    decision = nsa_sel.explain_request(request, GPUS[name])
    assert (decision.forward, decision.backward) == (backend, backend)
    for change in ({"h": 1}, {"h": 65}, {"Dk": 80}, {"Dv": 256}, {"S": 4}, {"aligned": False}):
        assert nsa_sel.explain_request(replace(request, **change), GPUS[name]).forward == "choose-triton"
    forget_decisions()


@pytest.mark.parametrize("name", ["h200", "a100"])
def test_without_cupy_triton_chooses(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    lacking = Reason("package-missing", "unavailable", "package cupy", None, ">= 14", "pip install 'nsa-sel[cuda13]'")
    offers = (Offer(spec, (lacking,) if spec.framework == "cupy" else ()) for spec in registry.backends("choose").values())
    monkeypatch.setattr(registry, "offers", lambda request, found=tuple(offers): found)
    forget_decisions()
    decision = nsa_sel.explain_request(example_choice(), GPUS[name])
    forget_decisions()
    assert decision.forward == "choose-triton"
    assert "nsa-sel[cuda13]" in nsa_sel.describe(decision)


def test_debug_flags_and_autocast(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv("NSA_DEBUG_TIMING", "1")
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    call = make_choose_call("h1")
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = compressed_attention(call.q, call.k, call.v, **options_of(call, "h1"))
    assert o.dtype == torch.bfloat16
    assert logged("sel.timing")[-1]["backend"] == "choose-torch"


# Bad input


WRONG = [
    ({"q": lambda q: q[0, 0]}, ("q is of shape", "[B,S,G,h,Dk]")),
    ({"q": lambda q: [q]}, ("q is a list", "a torch.Tensor")),
    ({"k_cmp": lambda k: k[:, :, :-1], "v_cmp": lambda v: v[:, :, 1:]}, ("k_cmp is of 10 compressed keys", "allowed: 11", "pass S_kv=")),
    ({"k_cmp": lambda k: k.double()}, ("k_cmp is of dtype torch.float64", "call k_cmp.to(q.dtype)")),
    ({"v_cmp": lambda v: v[:, :, 1:]}, ("v_cmp is of 10 positions", "k's 11 positions")),
    ({"compress_block": 0}, ("compress_block is 0", "a whole number >= 1")),
    ({"compress_block": 6}, ("compress_block is 6", "a multiple of compress_stride = 4")),
    ({"compress_block": 32}, ("compress_block is 32", "at most block_size = 16")),
    ({"compress_stride": True}, ("compress_stride is True", "a whole number >= 1")),
    ({"block_size": 18}, ("block_size is 18", "a multiple of compress_stride = 4")),
    ({"n": 0}, ("n is 0", "a whole number >= 1")),
    ({"n": 2}, ("first + local is 1 + 2", "at most n = 2", "raise n")),
    ({"first": -1}, ("first + local is -1 + 2",)),
    ({"scale": math.nan}, ("scale is nan", "a finite number")),
    ({"S_kv": 49}, ("S_kv is 49", ">= S = 50")),
    ({"S_kv": 50.0}, ("S_kv is 50.0", ">= S = 50")),
    ({"S_kv": 60}, ("k_cmp is of 11 compressed keys", "14 = ")),
    ({"q_pos": torch.arange(49)}, ("q_pos is of shape (49,)", "[S=50] or [B=1, S=50]")),
    ({"q_pos": torch.arange(1, 51)}, ("q_pos is from 1 to 50", "S_kv = 50")),
    ({"return_lse": 1}, ("return_lse is 1", "True or False")),
    ({"backend": 3}, ("backend is 3", "the name of a backend")),
]  # fmt: skip


@each_of(WRONG)
def test_wrong_calls(changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    call = make_choose_call(WHOLE)
    arguments = {"q": call.q, "k_cmp": call.k, "v_cmp": call.v, **call.rule._asdict(), "S_kv": 50}
    refused(compressed_attention, arguments, changes, fragments)


@pytest.mark.parametrize("transform", [lambda f: torch.func.vmap(f), lambda f: torch.func.grad(lambda q: f(q).sum())], ids=["vmap", "grad"])
def test_transforms_are_refused(transform: Any) -> None:
    call = make_choose_call(WHOLE)

    def work(q: Tensor) -> Tensor:
        return compressed_attention(q, call.k, call.v, **call.rule._asdict())[0]

    with pytest.raises(BackendError, match="compressed_attention"):
        transform(work)(call.q)


def test_one_graph_with_gradients() -> None:
    """torch.compile(fullgraph, dynamic): the same o, blocks and gradients as eager, at two lengths."""

    def work(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, selection = compressed_attention(q, k, v, **SMALL._asdict())
        return o * 2, selection.ranges

    compiled = torch.compile(work, fullgraph=True, dynamic=True, backend="aot_eager")
    for S in (50, 39):
        call = make_choose_call((1, S, S, 1, 2, 16, 16, SMALL))
        inputs = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        found = []
        for function in (work, compiled):
            o, ranges = function(*inputs)
            found.append((o, ranges, *torch.autograd.grad(o.sum(), inputs)))
        for mine, other in zip(*found, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck(needs_grad: bool) -> None:
    call = make_choose_call(WHOLE)
    inputs = [x.detach().requires_grad_(needs_grad) for x in (call.q, call.k, call.v)]
    torch.library.opcheck(torch.ops.nsa_sel.choose.default, (*inputs, list(SMALL), 50, 0.25, None, None, needs_grad))
