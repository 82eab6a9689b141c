"""Check `choose_blocks`, `moba_selection`, `infllm_selection` and `compressed_attention`: results, decisions, PyTorch, refusals."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_sel import (
    Selection,
    choose_blocks,
    compressed_attention,
    decisions,
    describe,
    explain_request,
    infllm_selection,
    moba_selection,
    selection_attention,
    use_backend,
)
from nsa_sel.core import registry
from nsa_sel.core.backend import Offer
from nsa_sel.core.call import ChooseCall
from nsa_sel.core.decide import forget_decisions
from nsa_sel.core.decision import Decision, Override
from nsa_sel.core.request import example_choice
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.policies import rules
from nsa_sel.policies.default import POLICY
from nsa_sel.settings.config import GPUS
from tests.helpers.calls import assert_refused, each_of, last, refused
from tests.helpers.choose import (
    SHAPES,
    SMALL,
    assert_chosen,
    best,
    check_attention,
    infllm_scores,
    make_choose_call,
    moba_scores,
    msa_scores,
)

BACKENDS = ("choose-torch", "choose-triton")
INFLLM = {"block_size": 16, "n": 3, "first": 1, "local": 1, "compress_block": 8, "compress_stride": 4}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_at(B: int, S: int, S_kv: int) -> Tensor:
    return torch.arange(S_kv - S, S_kv).expand(B, S)


# Each way as its source defines it


@pytest.mark.parametrize("backend", BACKENDS)
def test_minimax_indexer(backend: str) -> None:
    """One index head a group, one index key for all groups, chunked prefill."""
    q, k, positions = randn(2, 9, 2, 1, 16), randn(2, 1, 70, 16, seed=1), rows_at(2, 9, 70)
    selection = choose_blocks(q, k, block_size=16, n=3, backend=backend)
    scores = msa_scores(q, k, positions, 16)
    assert_chosen(selection.block_indices, scores, best(scores, positions, 16, 3, 0, 1))
    assert (selection.block_size, selection.n, selection.disjoint) == (16, 3, True)
    assert (last().forward, last().request.pool, last().request.Dv) == (backend, ("logits", "sum", "max"), 0)


def test_minimax_indexer_of_heads_that_share_a_choice() -> None:
    """In transformers' model the largest of all index heads chooses for all groups."""
    q, k, positions = randn(1, 30, 1, 4, 16), randn(1, 1, 30, 16, seed=1), rows_at(1, 30, 30)
    selection = choose_blocks(q, k, block_size=4, n=3, heads="max", scale=1.0)
    scores = msa_scores(q.transpose(2, 3), k, positions, 4).amax(2, keepdim=True)
    assert_chosen(selection.block_indices, scores, best(scores, positions, 4, 3, 0, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_moba(backend: str) -> None:
    q, k, positions = randn(1, 9, 2, 3, 16), randn(1, 2, 75, 16, seed=1), rows_at(1, 9, 75)
    selection = moba_selection(q, k, block_size=8, n=4, backend=backend)
    scores = moba_scores(q, k, positions, 8)
    assert_chosen(selection.block_indices, scores, best(scores, positions, 8, 4, 0, 1))
    decoded = moba_selection(q[:, -1], k, block_size=8, n=4, backend=backend)
    assert torch.equal(decoded.ranges[:, 0], selection.ranges[:, -1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_qsa(backend: str) -> None:
    """Qwen3.8: sums of ReLU over index heads, one index key per complete block, and the incomplete block beside the n."""
    q, k, positions = randn(2, 9, 1, 4, 16), randn(2, 1, 10, 16, seed=1), torch.tensor([[*range(34, 43)], [0, 2, 3, 4, 11, 12, 14, 41, 42]])
    rule: dict[str, Any] = {"activation": "relu", "tail": True, "local": 0, "block_size": 4, "compress_block": 4, "compress_stride": 4}
    selection = choose_blocks(q, k, n=3, **rule, q_pos=positions, S_kv=43, backend=backend)
    scores = torch.einsum("bshd,bkd->bshk", q[:, :, 0], k[:, 0]).relu().sum(2, keepdim=True)
    scores = scores.masked_fill(torch.arange(10) * 4 + 3 > positions[..., None, None], -torch.inf)
    assert_chosen(selection.block_indices[..., :3], scores, best(scores, positions, 4, 3, 0, 0))
    assert torch.equal(selection.block_indices[..., 3], torch.where((positions + 1) % 4 > 0, positions // 4, -1).unsqueeze(2))
    assert (selection.block_size, selection.n, selection.disjoint) == (4, 4, True)
    assert last().request.pool == ("relu(logits)", "sum", "max")
    implied = choose_blocks(q[:1, -1], k[:1], n=3, **rule, S_kv=43, backend=backend)
    assert torch.equal(implied.ranges, selection.ranges[:1, -1:])
    compiled = torch.compile(choose_blocks, fullgraph=True, backend="aot_eager")(q, k, n=3, **rule, q_pos=positions, S_kv=43)
    assert torch.equal(compiled.ranges, selection.ranges)


@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_infllm(backend: str, coarse: bool) -> None:
    """Heads of very different norms, so that the coarse log-sum-exp matters; the first rows see no coarse mean."""
    q, k, positions = randn(1, 20, 2, 3, 16), randn(1, 2, 100, 16, seed=1), torch.arange(20, 100, 4).expand(1, 20)
    q = q * torch.tensor([0.5, 2.0, 4.0])[:, None]
    selection = infllm_selection(q, k, **INFLLM, coarse_lse=coarse, q_pos=positions, backend=backend)
    scores = infllm_scores(q, k, positions, coarse=coarse, block=16, l=8, d=4)
    assert_chosen(selection.block_indices, scores, best(scores, positions, 16, 3, 1, 1))
    assert [decision.request.pool for decision in decisions()[-2:]][1 - coarse :] == [("lse",)] * coarse + [("weights", "sum", "max")]


def test_the_default_windows_of_infllm_are_those_of_its_source() -> None:
    """Pooling of 5 means every 4: all that touch a block."""
    q, k, positions = randn(1, 3, 1, 16, 8), randn(1, 1, 1500, 8, seed=1), torch.tensor([[1499, 777, 126]])
    scores = infllm_scores(q, k, positions, coarse=True)
    selection = infllm_selection(q, k, n=8, local=3, q_pos=positions)
    assert_chosen(selection.block_indices, scores, best(scores, positions, 64, 8, 1, 3))


def test_sums_of_weights_choose_the_blocks_of_compressed_attention() -> None:
    q, k, sizes = randn(1, 50, 2, 3, 16), randn(1, 2, 11, 16, seed=1), {"compress_block": 8, "compress_stride": 4, "block_size": 16}
    _, nsa, lse = compressed_attention(q, k, k, **sizes, n=3, first=1, local=1, return_lse=True)
    options = {**sizes, "n": 3, "first": 1, "local": 1, "softmax": True, "reduce": "sum"}
    for given in (None, lse):
        assert torch.equal(choose_blocks(q, k, **options, lse=given, S_kv=50).ranges, nsa.ranges)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_keys_with_weights_and_decode(backend: str) -> None:
    q, k = randn(1, 1, 3, 2, 16), randn(1, 1, 40, 16, seed=1)
    options: dict[str, Any] = {"block_size": 8, "n": 3, "softmax": True, "backend": backend}
    whole = choose_blocks(q, k.expand(-1, 3, -1, -1).contiguous(), **options)
    assert torch.equal(choose_blocks(q, k, **options).ranges, whole.ranges)
    lse = torch.einsum("bsghd,bkd->bsghk", q / 4, k[:, 0]).logsumexp(-1)
    assert torch.equal(choose_blocks(q[:, 0], k, **options, lse=lse[:, 0]).ranges, whole.ranges)


def test_empty_batch_and_rows() -> None:
    for B, S in ((0, 8), (1, 0)):
        q, k = torch.randn(B, S, 2, 1, 16), torch.randn(B, 1, S, 16)
        assert choose_blocks(q, k, block_size=4, n=3).ranges.shape == (B, S, 2, 3, 2)
        assert infllm_selection(q, k.expand(-1, 2, -1, -1), **INFLLM).ranges.shape == (B, S, 2, 3, 2)
        assert moba_selection(q, k.expand(-1, 2, -1, -1)).ranges.shape == (B, S, 2, 3, 2)
        call = make_choose_call((B, S, S, 1, 2, 16, 16, SMALL))
        o, selection = compressed_attention(call.q, call.k, call.v, **call.rule.options(), S_kv=S)
        assert (o.shape, selection.ranges.shape) == ((B, S, 1, 2, 16), (B, S, 1, SMALL.n, 2))


# Decisions


def choose(**options: Any) -> Selection:
    return choose_blocks(randn(1, 20, 1, 1, 16), randn(1, 1, 20, 16, seed=1), block_size=4, n=3, **options)


# PyTorch


def every_way(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    moba = moba_selection(q, k, block_size=4)
    return choose_blocks(q, k, block_size=4, n=3).ranges, moba.ranges, infllm_selection(q, k, **INFLLM).ranges


def test_one_graph_without_gradient() -> None:
    q, k = randn(1, 40, 2, 2, 16).requires_grad_(), randn(1, 2, 40, 16, seed=1)
    expected = every_way(q, k)
    assert not any(x.requires_grad for x in expected)
    found = torch.compile(every_way, fullgraph=True, backend="aot_eager")(q, k)
    assert all(map(torch.equal, found, expected))
    plain = q.detach()
    with FakeTensorMode() as mode:
        faked = every_way(mode.from_tensor(plain), mode.from_tensor(k))
    assert [x.shape for x in faked] == [x.shape for x in expected]


def test_autocast_and_transforms() -> None:
    q, k = randn(1, 20, 1, 1, 16), randn(1, 1, 20, 16, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        choose()
    assert last().request.dtype == "bfloat16"
    call = make_choose_call(WHOLE)
    compressed = lambda q: compressed_attention(q, call.k, call.v, **call.rule.options())[0]  # noqa: E731
    assert_refused(
        ("choose_blocks is called inside", lambda: torch.func.vmap(lambda x: choose_blocks(x, k, block_size=4, n=3).ranges)(q[None])),
        ("compressed_attention", lambda: torch.func.vmap(compressed)(call.q)),
        ("compressed_attention", lambda: torch.func.grad(lambda q: compressed(q).sum())(call.q)),
        error=BackendError,
    )


# Bad input


WRONG: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("choose", {"q": [1.0]}, ("q is a list", "a torch.Tensor")),
    ("choose", {"k": None}, ("k is a NoneType", "a torch.Tensor")),
    ("choose", {"q": randn(2, 16)}, ("q is of shape (2, 16)", "[B,S,G,h,Dk]")),
    ("choose", {"k": randn(1, 3, 20, 16)}, ("k is of shape (1, 3, 20, 16)", "[B=1, G=2, S_kv, D]")),
    ("choose", {"k": randn(1, 2, 20, 8)}, ("k is of head dimension 8", "q's head dimension 16")),
    ("choose", {"k": randn(1, 2, 20, 16).double()}, ("k is of dtype torch.float64", "k.to(q.dtype)")),
    ("choose", {"k": randn(1, 2, 19, 16)}, ("S_kv is 19", ">= S = 20")),
    ("choose", {"S_kv": 21}, ("k is of 20 compressed keys", "allowed: 21", "pass S_kv=")),
    ("choose", {"S_kv": 20.0}, ("S_kv is 20.0", "a whole number")),
    ("choose", {"block_size": 0}, ("block_size is 0", "a whole number >= 1")),
    ("choose", {"n": 0}, ("n is 0", "a whole number >= 1")),
    ("choose", {"n": 1, "first": 1}, ("first + local is 1 + 1", "at most n = 1")),
    ("choose", {"local": -1}, ("first + local is 0 + -1",)),
    ("choose", {"reduce": "mean"}, ("reduce is 'mean'", "'max' or 'sum'")),
    ("choose", {"heads": None}, ("heads is None", "'max' or 'sum'")),
    ("choose", {"softmax": 1}, ("softmax is 1", "True or False")),
    ("choose", {"activation": "gelu"}, ("activation is 'gelu'", "'relu' without softmax, or None")),
    ("choose", {"activation": "relu", "softmax": True}, ("activation is 'relu'", "pass softmax=False")),
    ("choose", {"tail": 1}, ("tail is 1", "True or False")),
    ("choose", {"tail": True, "local": 0}, ("tail is True", "compress_block = compress_stride = block_size")),
    ("choose", {"lse": torch.zeros(1, 20, 2, 1)}, ("lse is given", "None without softmax=True")),
    ("choose", {"lse": 3, "softmax": True}, ("lse is a int", "a torch.Tensor")),
    ("choose", {"lse": torch.zeros(1, 20, 2), "softmax": True}, ("lse is torch.float32 of shape (1, 20, 2)", "(1, 20, 2, 1)")),
    ("choose", {"compress_block": 3, "compress_stride": 2}, ("compress_block is 3", "a multiple of compress_stride = 2")),
    ("choose", {"compress_block": 8}, ("compress_block is 8", "at most block_size = 4")),
    ("choose", {"compress_stride": True}, ("compress_stride is True", "a whole number >= 1")),
    ("choose", {"scale": torch.inf}, ("scale is inf", "a finite number")),
    ("choose", {"q_pos": torch.arange(19)}, ("q_pos is of shape (19,)", "[S=20] or [B=1, S=20]")),
    ("choose", {"q_pos": torch.arange(1, 21)}, ("q_pos is from 1 to 20", "S_kv = 20")),
    ("choose", {"backend": 3}, ("backend is 3", "the name of a backend")),
    ("moba", {"k": randn(1, 1, 20, 16)}, ("k is of shape (1, 1, 20, 16)", "[B=1, G=2, S_kv, D]")),
    ("moba", {"q": [1.0]}, ("q is a list", "a torch.Tensor")),
    ("moba", {"block_size": 2.0}, ("block_size is 2.0", "a whole number >= 1")),
    ("moba", {"n": 0}, ("n is 0", "a whole number >= 1")),
    ("moba", {"q_pos": torch.arange(1, 21)}, ("q_pos is from 1 to 20", "S_kv = 20")),
    ("moba", {"backend": 3}, ("backend is 3", "the name of a backend")),
    ("infllm", {"k": randn(1, 2, 20)}, ("k is of shape (1, 2, 20)", "[B=1, G=2, S_kv, D]")),
    ("infllm", {"n": 2}, ("first + local is 1 + 33", "at most n = 2")),
    ("infllm", {"block_size": 60}, ("block_size is 60", "a multiple of compress_stride = 16")),
    ("infllm", {"compress_stride": 0}, ("compress_stride is 0", "a whole number >= 1")),
    ("infllm", {"compress_block": 128}, ("compress_block is 128", "at most block_size = 64")),
    ("infllm", {"coarse_lse": "yes"}, ("coarse_lse is 'yes'", "True or False")),
    ("infllm", {"scale": "big"}, ("scale is 'big'", "a finite number")),
    ("infllm", {"q_pos": [0]}, ("q_pos is a list", "[S] or [B,S]")),
    ("infllm", {"backend": 3}, ("backend is 3", "the name of a backend")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("way", "changes", "fragments"), WRONG, ids=[f"{way} {', '.join(changes)} {i}" for i, (way, changes, _) in enumerate(WRONG)]
)
def test_wrong_calls(way: str, changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    call, sizes = {
        "choose": (choose_blocks, {"block_size": 4, "n": 3}), "moba": (moba_selection, {"block_size": 4}), "infllm": (infllm_selection, {})
    }[way]  # fmt: skip
    refused(call, {"q": randn(1, 20, 2, 1, 16), "k": randn(1, 2, 20, 16), **sizes}, changes, fragments)


WHOLE = (1, 50, 50, 1, 1, 16, 16, SMALL)


def options_of(call: ChooseCall, shape: str) -> dict[str, Any]:
    rule = call.rule.options()
    return {**rule, "scale": call.scale, "S_kv": SHAPES[shape][2]}


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_of_compressed_attention(backend: str) -> None:
    call = make_choose_call("decode")
    q, options = call.q.squeeze(1), options_of(call, "decode")
    o, selection, lse = compressed_attention(q, call.k, call.v, **options, return_lse=True, backend=backend)
    exact = check_attention((o.unsqueeze(1), lse.unsqueeze(1)), call)
    assert_chosen(selection.block_indices, exact.importance, exact.blocks)
    assert selection.ranges.shape == (3, 1, 1, call.rule.n, 2)
    given, chosen = compressed_attention(q, call.k, call.v, **options, q_pos=torch.tensor([84]), backend=backend)
    assert torch.equal(given, o)
    assert torch.equal(chosen.ranges, selection.ranges)


def test_gradcheck() -> None:
    call = make_choose_call((1, 20, 20, 1, 2, 3, 2, SMALL), torch.float64)
    inputs = tuple(x.detach().requires_grad_() for x in (call.q, call.k, call.v))

    def work(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, _, lse = compressed_attention(q, k, v, **call.rule.options(), return_lse=True)
        return o, lse[:, 7:]

    assert torch.autograd.gradcheck(work, inputs)
    with pytest.raises(BackendError, match="second derivative"):
        torch.autograd.grad(work(*inputs)[0].sum(), inputs, create_graph=True)[0].sum().backward()


def test_positions_written_after_forward_are_noticed() -> None:
    call = make_choose_call((1, 20, 20, 1, 2, 3, 2, SMALL))
    q, q_pos = call.q.requires_grad_(), torch.arange(20)
    o, _ = compressed_attention(q, call.k, call.v, **call.rule.options(), q_pos=q_pos)
    q_pos.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_hooks_on_saved_tensors_may_free_the_inputs() -> None:
    """As torch.autograd.graph.save_on_cpu does."""
    call = make_choose_call((1, 20, 20, 1, 2, 3, 2, SMALL))
    inputs = [x.requires_grad_() + 0 for x in (call.q, call.k, call.v)]
    kept = [weakref.ref(x) for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        o, _ = compressed_attention(*inputs, **call.rule.options())
    del inputs
    assert not any(x() is not None for x in kept)
    o.sum().backward()
    assert all(x.grad is not None for x in (call.q, call.k, call.v))


# Decisions


def attend() -> None:
    q, k, v = torch.randn(1, 8, 1, 2, 16), torch.randn(1, 1, 8, 16), torch.randn(1, 1, 8, 16)
    selection_attention(q, k, v, torch.tensor([[0, 4]]).expand(1, 8, 1, 1, 2))


def compress(**options: Any) -> None:
    call = make_choose_call("h1")
    compressed_attention(call.q, call.k, call.v, **options_of(call, "h1"), **options)


@pytest.mark.parametrize(
    ("work", "compressed", "words"),
    [
        (choose, (1, 1), "scores    max over a block, sum over heads, of logits"),
        (compress, (SMALL.compress_block, SMALL.compress_stride), "choose-triton"),
    ],
)
def test_a_decision_replays_and_names_every_backend(work: Callable[[], object], compressed: tuple[int, int], words: str) -> None:
    work()
    assert (last().request.kind, last().request.compress) == ("choose", compressed)
    assert [verdict.backend for verdict in last().verdicts] == list(registry.backends("choose"))
    assert [step.partition(": ")[0] for step in last().steps] == ["choose-cuda", "choose-triton"]
    assert Decision.from_json(last().to_json()).replay() == ()
    assert words in describe(last())


def test_forcing_a_backend_concerns_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    with use_backend("sdpa-packed"):
        compress()
        assert last().override is None
        attend()
        assert last().forward == "sdpa-packed"
    with use_backend("choose-torch"):
        attend()
        assert last().override is None
        for work in (compress, choose):
            work()
            assert (last().forward, last().override) == ("choose-torch", Override("choose-torch", "use_backend"))
    monkeypatch.setenv("NSA_SEL_BACKEND", "choose-torch")
    attend()
    assert last().override is None
    monkeypatch.delenv("NSA_SEL_BACKEND")
    monkeypatch.setenv("NSA_FORCE_PARITY", "1")
    compress()
    assert last().forward == "choose-torch"
    for name, work in (("sdpa-packed", compress), ("choose-trion", compress), ("numba", choose)):
        with pytest.raises(BackendError, match="is unknown to compressed_attention and choose_blocks"):
            work(backend=name)


def test_the_fallback_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mock.Mock(side_effect=RuntimeError("no such kernel"))
    monkeypatch.setattr(registry.load_chooser("choose-triton"), "forward", broken)
    with pytest.raises(RuntimeError, match="no such kernel"):
        compress(backend="choose-triton")
    checks = tuple(check for check in POLICY.checks if check is not rules.no_triton_on_cpu)
    monkeypatch.setattr("nsa_sel.policies.default.POLICY", POLICY._replace(checks=checks))
    with pytest.warns(RuntimeWarning, match="choose-triton failed, choose-torch runs calls of this class from now on"):
        compress()
    assert (last().forward, last().override) == ("choose-torch", Override("choose-torch", "failure of choose-triton"))


@pytest.mark.parametrize(("name", "backend"), [("h200", "choose-cuda"), ("a100", "choose-triton"), ("rtx5090", "choose-triton")])
def test_on_a_gpu_triton_chooses_but_hopper_has_cuda(monkeypatch: pytest.MonkeyPatch, name: str, backend: str) -> None:
    request = example_choice(needs_grad=True)
    monkeypatch.setattr(registry, "offers", lambda request: tuple(map(Offer, registry.backends(request.kind).values())))
    forget_decisions()
    decision = explain_request(request, GPUS[name])
    assert (decision.forward, decision.backward) == (backend, backend)
    for change in ({"h": 1}, {"h": 65}, {"Dk": 80}, {"Dv": 256}, {"S": 4}, {"aligned": False}):
        assert explain_request(replace(request, **change), GPUS[name]).forward == "choose-triton"
    forget_decisions()


# Bad input


WRONG_COMPRESSED = [
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
    ({"scale": torch.nan}, ("scale is nan", "a finite number")),
    ({"S_kv": 49}, ("S_kv is 49", ">= S = 50")),
    ({"S_kv": 50.0}, ("S_kv is 50.0", ">= S = 50")),
    ({"S_kv": 60}, ("k_cmp is of 11 compressed keys", "14 = ")),
    ({"q_pos": torch.arange(49)}, ("q_pos is of shape (49,)", "[S=50] or [B=1, S=50]")),
    ({"q_pos": torch.arange(1, 51)}, ("q_pos is from 1 to 50", "S_kv = 50")),
    ({"return_lse": 1}, ("return_lse is 1", "True or False")),
    ({"backend": 3}, ("backend is 3", "the name of a backend")),
]  # fmt: skip


@each_of(WRONG_COMPRESSED)
def test_wrong_compressed_calls(changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    call = make_choose_call(WHOLE)
    arguments = {"q": call.q, "k_cmp": call.k, "v_cmp": call.v, **call.rule.options(), "S_kv": 50}
    refused(compressed_attention, arguments, changes, fragments)


def test_one_graph_with_gradients() -> None:
    """torch.compile(fullgraph, dynamic): the same o, blocks and gradients as eager, at two lengths."""

    def work(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, selection = compressed_attention(q, k, v, **SMALL.options())
        return o * 2, selection.ranges

    compiled = torch.compile(work, fullgraph=True, dynamic=True, backend="aot_eager")
    for S in (50, 39):
        call = make_choose_call((1, S, S, 1, 2, 16, 16, SMALL))
        inputs = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        outputs = [function(*inputs) for function in (work, compiled)]
        assert all(map(torch.equal, *((o, ranges, *torch.autograd.grad(o.sum(), inputs)) for o, ranges in outputs)))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck(needs_grad: bool) -> None:
    call = make_choose_call(WHOLE)
    inputs = [x.detach().requires_grad_(needs_grad) for x in (call.q, call.k, call.v)]
    torch.library.opcheck(torch.ops.nsa_sel.choose_forward.default, (*inputs, None, None, list(SMALL), 50, 0.25, None, None, needs_grad))


def test_blocks_of_packed_batches_compile_and_refuse_what_is_not_packed() -> None:
    q, k, cu = randn(20, 2, 1, 16), randn(20, 1, 16, seed=1), torch.tensor([0, 9, 9, 18])
    expected = choose_blocks(q, k, block_size=4, n=2, cu_seqlens=cu)
    compiled = torch.compile(choose_blocks, fullgraph=True, backend="aot_eager")(q, k, block_size=4, n=2, cu_seqlens=cu, max_seqlen=9)
    assert torch.equal(compiled.ranges, expected.ranges)
    for name, options in {
        "q_pos": {"q_pos": torch.arange(20)}, "tail": {"tail": True, "local": 0, "compress_block": 4, "compress_stride": 4},
        "compress_block": {"compress_block": 4, "compress_stride": 4},
        "k": {"k": randn(19, 1, 16)}, "max_seqlen": {"max_seqlen": 8}, "q": {"q": randn(1, 20, 2, 1, 16)},
    }.items():  # fmt: skip
        with pytest.raises(ArgumentError) as error:
            choose_blocks(**({"q": q, "k": k, "block_size": 4, "n": 2, "cu_seqlens": cu} | options))
        assert error.value.argument == name
