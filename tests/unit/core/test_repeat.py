"""Check that repeated calls skip validation and dispatch, and that tracers, dispatch modes and autograd modes see the op or are refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.logging_tensor import LoggingTensorMode, capture_logs

from nsa_sel import Selection, compressed_attention, decisions, reset, selection_attention, selection_attention_with_kvcache, use_backend
from nsa_sel.core import attend, choose, run, transforms
from nsa_sel.errors import ArgumentError, BackendError, NsaSelError
from tests.helpers.calls import assert_refused, calls_of
from tests.helpers.cases import assert_forward, make_blocks, make_qkv
from tests.helpers.choose import SMALL


def selection_of(S: int = 8, n: int = 2, **options: Any) -> Selection:
    return Selection.from_ranges(torch.tensor([[0, 4], [6, 9]][:n]).expand(1, S, 1, n, 2), **options)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry per call that was checked."""
    return calls_of(monkeypatch, attend, "check_call")


@pytest.mark.parametrize("decode", [False, True])
def test_a_repeated_call_is_checked_once(checked: list[Any], decode: bool) -> None:
    q, k, v = make_qkv(1, 8, 1, 2, 16, 16, S_kv=16)
    selection = selection_of(1 if decode else 8)
    for _ in range(3):
        x, y, z = (torch.randn_like(x) for x in (q[:, -1] if decode else q, k, v))
        found = selection_attention(x, y, z, selection, return_lse=True)
        wide = tuple(part.unsqueeze(1) for part in found) if decode else found
        assert_forward(wide, x.unsqueeze(1) if decode else x, y, z, selection.ranges)
    assert len(checked) == 1
    assert len({id(decision) for decision in decisions()[-3:]}) == 1


def unaligned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    moved = torch.empty(q.numel() + 1)[1:].view_as(q)
    return moved.copy_(q), k, v


@pytest.mark.parametrize(
    "change",
    [
        lambda *qkv: tuple(x.double() for x in qkv),
        unaligned,
        lambda q, k, v: (q, k.transpose(2, 3).contiguous().transpose(2, 3)[..., :1], v[..., :1]),
        lambda q, k, v: (q, k[:, :, :14], v[:, :, :14]),
        lambda q, k, v: (q.clone().requires_grad_(), k, v),
        lambda q, k, v: (q, k, v[..., :8]),
    ],
    ids=["dtype", "alignment", "sizes that do not fit", "S_kv", "gradients", "strides"],
)
def test_other_tensors_are_checked(checked: list[Any], change: Any) -> None:
    q, k, v = make_qkv(1, 8, 1, 2, 16, 16, S_kv=16)
    selection = selection_of()
    selection_attention(q, k, v, selection)
    q, k, v = change(q, k, v)
    if k.shape[3] != q.shape[4]:
        with pytest.raises(NsaSelError):
            selection_attention(q, k, v, selection)
    else:
        found = selection_attention(q, k, v, selection, return_lse=True)
        assert_forward(tuple(x.detach() for x in found), q.detach(), k, v, selection.ranges)
    assert len(checked) == 2


@pytest.mark.parametrize("other", [selection_of(n=1), selection_of(max_length=7), selection_of().ranges], ids=["n", "max_length", "ranges"])
def test_other_selections_are_checked(checked: list[Any], other: Selection | Tensor) -> None:
    q, k, v = make_qkv(1, 8, 1, 2, 16, 16, S_kv=16)
    for selection in (selection_of(), other):
        selection_attention(q, k, v, selection)
    assert len(checked) == 2
    measured = selection_of()
    measured.measure()
    selection_attention(q, k, v, measured)
    assert len(checked) == 3
    assert decisions()[-1].request.max_length == 7


def test_other_options_are_checked(checked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv(1, 8, 1, 2, 16, 16, S_kv=16)
    selection = selection_of()
    selection_attention(q, k, v, selection, scale=1.0)
    for options in ({"scale": 2.0}, {"backend": "sdpa-packed"}, {"q_pos": torch.arange(8)}, {"q_pos": torch.arange(8)}, {"scale": 1}):
        selection_attention(q, k, v, selection, **options)  # type: ignore[arg-type]
    assert len(checked) == 6
    for bad in ({"scale": True}, {"scale": float("nan")}, {"backend": []}, {"return_lse": 1}, {"q_pos": torch.arange(7)}):
        with pytest.raises(NsaSelError):
            selection_attention(q, k, v, selection, **bad)  # type: ignore[call-overload]
    before = len(checked)
    with use_backend("sdpa-packed"):
        selection_attention(q, k, v, selection, scale=1.0)
    assert decisions()[-1].forward == "sdpa-packed"
    monkeypatch.setenv("NSA_SEL_BACKEND", "sdpa-packed")
    selection_attention(q, k, v, selection, scale=1.0)
    assert decisions()[-1].forward == "sdpa-packed"
    monkeypatch.delenv("NSA_SEL_BACKEND")
    assert len(checked) == before + 2
    reset()
    selection_attention(q, k, v, selection, scale=1.0)
    assert len(checked) == before + 3


def test_keys_that_are_their_values_repeat(checked: list[Any]) -> None:
    q, k, _ = make_qkv(1, 8, 1, 2, 16, 16, S_kv=16)
    for x in (k, k.clone(), k + 1):
        assert_forward(selection_attention(q, x, x, selection_of(), return_lse=True), q, x, x, selection_of().ranges)
    assert len(checked) == 1
    selection_attention(q, k, k.clone(), selection_of())
    assert len(checked) == 2


def test_a_backward_pass_of_other_strides_has_no_facts_of_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks on saved tensors may return copies, whose strides are not those that recordings of the class hold."""
    known: list[bool] = []
    real = run.gradients
    monkeypatch.setattr(run, "gradients", lambda call, *others: known.append(bool(call.known)) or real(call, *others))
    q, k, v = make_qkv(1, 8, 1, 2, 16, 16, S_kv=16)
    k = torch.empty(1, 1, 32, 16)[:, :, ::2].copy_(k).requires_grad_()
    grads = []
    for unpack in (lambda x: x, torch.Tensor.contiguous):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            o = selection_attention(q, k, v, selection_of())
        grads.append(torch.autograd.grad(o.sum(), k)[0])
    assert known == [True, False]
    assert torch.equal(*grads)


def test_more_classes_than_guards_tell_apart_are_checked_again(checked: list[Any]) -> None:
    """Only the strides of k differ, which are no part of the key."""
    q, k, v = make_qkv(1, 8, 1, 2, 16, 16, S_kv=16)
    spaced = [torch.empty(1, 1, 16 * step, 16)[:, :, ::step].copy_(k) for step in range(1, transforms.MOST_CLASSES + 2)]
    for x in (*spaced, *spaced[-3:]):
        selection_attention(q, x, v, selection_of())
    assert len(checked) == len(spaced)
    selection_attention(q, spaced[0], v, selection_of())
    assert len(checked) == len(spaced) + 1


def test_what_transforms_a_repeated_call_is_noticed(checked: list[Any]) -> None:
    q, k, v = make_qkv(1, 8, 1, 2, 16, 16, S_kv=16)
    selection = selection_of()
    plain = selection_attention(q, k, v, selection)
    for dtype in (torch.bfloat16, torch.float16):  # the second time with tensors that were not cast the first time
        for x in (q, q.bfloat16()):
            with torch.autocast("cpu", dtype):
                assert selection_attention(x, k, v, selection).dtype == dtype
    assert torch.equal(selection_attention(torch._neg_view(-q), k, v, selection), plain)
    assert torch.equal(selection_attention(torch.nn.Parameter(q), k, v, selection), plain)
    with torch.inference_mode():
        assert selection_attention(q, k, v, selection).is_inference()
    leaf = q.clone().requires_grad_()
    for _ in range(2):
        assert selection_attention(leaf, k, v, selection).requires_grad
        with torch.no_grad():
            assert not selection_attention(leaf, k, v, selection).requires_grad
    with LoggingTensorMode(), capture_logs() as ops:
        selection_attention(q, k, v, selection)
    assert any("nsa_sel.selection_forward" in op for op in ops)
    traced = make_fx(lambda x: selection_attention(x, k, v, selection), tracing_mode="real")(q)  # leaves no mark on tensors
    assert "nsa_sel.selection_forward.default" in {str(node.target) for node in traced.graph.nodes}
    assert_refused(
        ("is called inside", lambda: torch.func.vmap(lambda x: selection_attention(x, k, v, selection))(q.unsqueeze(0))),
        ("is called inside", lambda: torch.func.grad(lambda x: selection_attention(x, k, v, selection).sum())(q)),
        ("is called inside", lambda: torch.func.jvp(lambda x: selection_attention(x, k, v, selection), (q,), (q,))),
        ("is called inside", lambda: torch.jit.trace(lambda x: selection_attention(x, k, v, selection), q)),
        error=BackendError,
    )
    with forward_ad.dual_level(), pytest.raises(BackendError, match="dual numbers"):
        selection_attention(forward_ad.make_dual(q, q), k, v, selection)
    checked.clear()
    assert torch.equal(selection_attention(q, k, v, selection), plain)
    assert not checked


@pytest.fixture
def checked_choices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry per call of `compressed_attention` that was checked."""
    return calls_of(monkeypatch, choose, "check_choose")


def choice(S: int = 20, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return make_qkv(1, S, 1, 2, 16, 16, S_kv=SMALL.compressed_keys(20), dtype=dtype)


@pytest.mark.parametrize("decode", [False, True])
def test_a_repeated_choice_is_checked_once(checked_choices: list[Any], decode: bool) -> None:
    for _ in range(3):
        q, k, v = (torch.randn_like(x) for x in choice(1 if decode else 20))
        sizes = {**SMALL._asdict(), "S_kv": 20}
        found = compressed_attention(q[:, 0] if decode else q, k, v, **sizes, return_lse=True)
        wanted = compressed_attention(q, k, v, **sizes, return_lse=True, q_pos=torch.arange(20 - q.shape[1], 20))  # always checked
        o, lse = (x.unsqueeze(1) if decode else x for x in (found[0], found[2]))
        assert all(map(torch.equal, (o, found[1].ranges, lse), (wanted[0], wanted[1].ranges, wanted[2])))
    assert len(checked_choices) == 1 + 3
    assert len({id(decision) for decision in decisions()[-6:]}) == 1


def test_other_choices_are_checked(checked_choices: list[Any]) -> None:
    q, k, v = choice()
    sizes = SMALL._asdict()
    compressed_attention(q, k, v, **sizes)
    others: tuple[dict[str, Any], ...] = (
        {"n": 3}, {"first": 0}, {"local": 1}, {"S_kv": 21}, {"scale": 2.0}, {"scale": 1}, {"backend": "choose-torch"}, {"block_size": 12},
    )  # fmt: skip
    for options in others:
        compressed_attention(q, k, v, **{**sizes, **options})
    compressed_attention(*choice(dtype=torch.float16), **sizes)
    compressed_attention(*unaligned(q, k, v), **sizes)
    compressed_attention(q.clone().requires_grad_(), k, v, **sizes)
    assert len(checked_choices) == 1 + len(others) + 3
    sizes |= {"n": 1, "first": 0, "local": 1}
    compressed_attention(q, k, v, **sizes)
    for bad in ({"n": True}, {"n": 1.0}, {"scale": True}, {"S_kv": 20.0}, {"backend": []}, {"q_pos": torch.arange(7)}):
        with pytest.raises(NsaSelError):
            compressed_attention(q, k, v, **{**sizes, **bad})


CPU = ("sdpa-packed", "numba")
Results = tuple[Tensor, ...]


def problem() -> tuple[Tensor, Tensor, Tensor, Selection]:
    q, k, v = make_qkv(1, 4, 1, 2, 16, S_kv=32, requires_grad=True)
    return q, k, v, make_blocks(1, 4, 1, 32, 2, 16)


def results(q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, backend: str) -> Results:
    o = selection_attention(q, k, v, selection, backend=backend)
    return (o.detach(), *torch.autograd.grad(o.square().sum(), (q, k, v)))


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
        before = decisions()
        refused = ("forward_ad(?s:.*)Remedy: ", lambda: selection_attention(*dual, selection, backend=backend))
        assert_refused(refused, error=BackendError)
        assert decisions() == before
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

    before = decisions()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in tensors]
    with forward_ad.dual_level():
        assert_refused(
            ("selection_attention_with_kvcache(?s:.*)make_fx(?s:.*)Remedy: ", lambda: make_fx(call)(*tensors)),
            ("FakeTensorMode(?s:.*)Remedy: ", lambda: call(*fake)),
            ("forward_ad(?s:.*)Remedy: ", lambda: call(forward_ad.make_dual(tensors[0], tensors[0]), *tensors[1:])),
            error=BackendError,
        )
    assert decisions() == before
