"""`sliding_window_attention`: results against a plain masked softmax, its candidates, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_sel import sliding_window_attention
from nsa_sel.backends._window import chunks, plain
from nsa_sel.errors import BackendError
from tests.helpers.calls import each_of, refused
from tests.helpers.cases import assert_within_twice_baseline, gradient_terms, lse_dtype, make_grads, make_qkv

# name: B, S, S_kv, G, h, Dk, Dv, window
SHAPES = {
    "h1": (1, 150, 150, 1, 1, 16, 16, 40),
    "h3": (2, 131, 131, 2, 3, 16, 24, 37),
    "h16": (1, 97, 97, 2, 16, 24, 16, 20),
    "192-128": (1, 70, 70, 1, 2, 192, 128, 33),
    "window-1": (2, 75, 75, 1, 2, 16, 16, 1),
    "window-is-S": (1, 90, 90, 1, 2, 16, 16, 90),
    "window-over-S": (2, 90, 90, 2, 2, 16, 16, 1000),
    "chunked-prefill": (2, 45, 200, 2, 2, 16, 16, 50),
    "few-keys-before": (1, 80, 90, 1, 3, 16, 16, 30),
    "one-row": (3, 1, 85, 1, 4, 16, 16, 32),
    "one-key": (1, 1, 1, 1, 1, 16, 16, 4),
}
HALVES = (torch.float16, torch.bfloat16)
Attend = Callable[..., Any]


def inputs_of(shape: str | tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[tuple[Tensor, ...], int]:
    """q, k, v that require gradients, and the window."""
    B, S, S_kv, G, h, Dk, Dv, window = SHAPES[shape] if isinstance(shape, str) else shape
    return make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv, dtype=dtype, device=device, requires_grad=True), window


def masked_softmax(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """o and lse over all keys in the inputs' own dtype, for autograd."""
    S, S_kv = q.shape[1], k.shape[2]
    position, key = torch.arange(S_kv - S, S_kv, device=q.device)[:, None, None, None], torch.arange(S_kv, device=q.device)
    seen = (key <= position) & (position - key < window)
    logits = torch.einsum("bsghd,bgkd->bsghk", q * (q.shape[-1] ** -0.5 if scale is None else scale), k).masked_fill(~seen, -math.inf)
    return torch.einsum("bsghk,bgkd->bsghd", torch.softmax(logits, -1), v), torch.logsumexp(logits.to(lse_dtype(q)), -1)


def results(attend: Attend, inputs: tuple[Tensor, ...], window: int, with_lse: bool, **options: Any) -> tuple[Tensor, ...]:
    """o, lse with_lse, dq, dk, dv."""
    do, dlse = make_grads(inputs[0], inputs[2])
    found = attend(*inputs, window, **options)
    outputs = found[: 1 + with_lse] if isinstance(found, tuple) else (found,)
    gradients = torch.autograd.grad(outputs, inputs, (do, dlse)[: len(outputs)])
    return *(x.detach() for x in outputs), *gradients


def check(attend: Attend, inputs: tuple[Tensor, ...], window: int, with_lse: bool) -> None:
    """Results and gradients within twice the error of `masked_softmax` in the same dtype, and of its dtypes."""
    doubles = tuple(x.detach().double().requires_grad_() for x in inputs)
    exact, baseline = (results(masked_softmax, x, window, with_lse) for x in (doubles, inputs))
    got = results(attend, inputs, window, with_lse, return_lse=with_lse)
    q, k, v = (x.detach() for x in inputs)
    terms = (*(0.0,) * (1 + with_lse), *gradient_terms(q, k, v, make_grads(q, v)[0], q.shape[-1] ** -0.5))
    names = ("o", "lse", "dq", "dk", "dv") if with_lse else ("o", "dq", "dk", "dv")
    for name, mine, right, plainly, term in zip(names, got, exact, baseline, terms, strict=True):
        assert mine.dtype == plainly.dtype
        if mine.dtype == torch.float64:  # the baseline is the reference itself
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
            continue
        assert_within_twice_baseline(mine, right, plainly, name, term)


@pytest.mark.parametrize("with_lse", [False, True], ids=["o", "lse"])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_gradients(shape: str, with_lse: bool) -> None:
    check(sliding_window_attention, *inputs_of(shape), with_lse)


@pytest.mark.parametrize("with_lse", [False, True], ids=["o", "lse"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float64], ids=str)
@pytest.mark.parametrize("shape", ["h3", "chunked-prefill"])
def test_other_dtypes(shape: str, dtype: torch.dtype, with_lse: bool) -> None:
    check(sliding_window_attention, *inputs_of(shape, dtype), with_lse)


@pytest.mark.parametrize("with_lse", [False, True], ids=["o", "lse"])
def test_long_windows_of_many_heads_come_in_several_chunks(monkeypatch: pytest.MonkeyPatch, with_lse: bool) -> None:
    """Chunks shorter than the window, logits in several pieces, and K and V in a cache's layout."""
    monkeypatch.setattr(chunks, "_ROWS", 64)
    monkeypatch.setattr(plain, "_PIECE", 100_000)
    (q, k, v), window = inputs_of((2, 300, 310, 2, 2, 16, 16, 75))
    k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (k, v))

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int, **options: Any) -> Any:
        work = sliding_window_attention if options else masked_softmax
        return work(q, k.transpose(1, 2), v.transpose(1, 2), window, **options)

    got = results(attend, (q, k, v), window, with_lse, return_lse=with_lse)
    for mine, right in zip(got, results(attend, (q, k, v), window, with_lse), strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("return_lse", [False, True])
def test_decode(return_lse: bool) -> None:
    (q, k, v), window = inputs_of("one-row")
    found = sliding_window_attention(q.squeeze(1), k, v, window, return_lse=return_lse)
    whole = sliding_window_attention(q, k, v, window, return_lse=return_lse)
    pairs = zip(found, whole, strict=True) if return_lse else [(found, whole)]
    assert all(torch.equal(mine.unsqueeze(1), right) for mine, right in pairs)


def test_scale_and_autocast() -> None:
    (q, k, v), window = inputs_of("h3")
    torch.testing.assert_close(sliding_window_attention(q, k, v, window, scale=-0.3), masked_softmax(q, k, v, window, -0.3)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert sliding_window_attention(q, k, v, window).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_no_more_than_the_dtype(dtype: torch.dtype) -> None:
    """With lse, matrix products are in float32; a backward pass under autocast is that of the forward pass."""
    inputs, window = inputs_of("h3")
    inputs = tuple(x.detach().to(dtype).requires_grad_() for x in inputs)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = sliding_window_attention(*inputs, window, return_lse=True)
    right = sliding_window_attention(*inputs, window, return_lse=True)
    assert all(map(torch.equal, found, right))
    gradients = [torch.randn_like(x) for x in right]
    wanted = torch.autograd.grad(right, inputs, gradients)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, torch.autograd.grad(found, inputs, gradients), wanted))


@pytest.mark.parametrize("return_lse", [False, True])
def test_gradcheck(return_lse: bool) -> None:
    inputs, window = inputs_of((1, 38, 40, 1, 2, 3, 2, 4), torch.float64)
    assert torch.autograd.gradcheck(lambda *x: sliding_window_attention(*x, window, return_lse=return_lse), inputs, fast_mode=True)


@pytest.mark.parametrize("return_lse", [False, True])
def test_keys_outside_of_every_window_are_not_read(return_lse: bool) -> None:
    inputs, window = inputs_of("chunked-prefill")
    q, k, v = (x.detach() for x in inputs)
    S, S_kv = q.shape[1], k.shape[2]
    unseen = torch.arange(S_kv)[:, None] <= S_kv - S - window
    assert bool(unseen.any())
    poisoned = tuple(x.requires_grad_() for x in (q, k.masked_fill(unseen, math.nan), v.masked_fill(unseen, math.nan)))
    got = results(sliding_window_attention, poisoned, window, return_lse, return_lse=return_lse)
    right = results(sliding_window_attention, inputs, window, return_lse, return_lse=return_lse)
    assert all(map(torch.equal, got, right))
    assert all(int(torch.count_nonzero(x[:, :, unseen.squeeze(1)])) == 0 for x in got[-2:])


@pytest.mark.parametrize("sizes", [(0, 8, 8), (1, 0, 8), (1, 0, 0)], ids=["batch", "rows", "keys"])
def test_empty_inputs_have_zero_gradients(sizes: tuple[int, int, int]) -> None:
    inputs, _ = inputs_of((*sizes, 1, 2, 16, 24, 4))
    o, lse = sliding_window_attention(*inputs, 4, return_lse=True)
    assert (o.shape, lse.shape) == ((*sizes[:2], 1, 2, 24), (*sizes[:2], 1, 2))
    o.sum().backward()
    assert all(x.grad is not None and int(torch.count_nonzero(x.grad)) == 0 for x in inputs)


@pytest.mark.parametrize("return_lse", [False, True])
def test_bit_equal_from_run_to_run(return_lse: bool) -> None:
    inputs, window = inputs_of("h3")
    first = results(sliding_window_attention, inputs, window, return_lse, return_lse=return_lse)
    for _ in range(3):
        assert all(map(torch.equal, first, results(sliding_window_attention, inputs, window, return_lse, return_lse=return_lse)))


def test_lse_has_no_second_derivative() -> None:
    inputs, window = inputs_of("h1")
    _, lse = sliding_window_attention(*inputs, window, return_lse=True)
    with pytest.raises(BackendError, match="sliding_window_attention has no second derivative"):
        torch.autograd.grad(lse.sum(), inputs, create_graph=True)
    with pytest.raises(BackendError, match="sliding_window_attention is called inside a backward pass of batched gradients"):
        torch.autograd.grad(lse, inputs, torch.ones(2, *lse.shape), is_grads_batched=True)


def test_torch_compile_traces_a_call() -> None:
    inputs, window = inputs_of("h1")
    work = torch.compile(sliding_window_attention, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, results(work, inputs, window, False), results(sliding_window_attention, inputs, window, False)))


# Bad input

WRONG = [
    ({"q": lambda q: q[0, 0]}, ("q is of shape", "[B,S,G,h,Dk]")),
    ({"q": lambda q: [q]}, ("q is a list", "a torch.Tensor")),
    ({"q": lambda q: q[:, :, :, :, :8]}, ("k is of head dimension 16", "q's head dimension 8")),
    ({"q": lambda q: q.repeat(1, 2, 1, 1, 1)}, ("q is of S = 300 rows", "at most S_kv = 150", "pass the keys and values of every row")),
    ({"k": lambda k: k.double()}, ("k is of dtype torch.float64", "call k.to(q.dtype)")),
    ({"k": lambda k: k.transpose(1, 2)}, ("k is of shape (1, 150, 1, 16)", "k.transpose(1, 2)")),
    ({"v": lambda v: v[:, :, 1:]}, ("v is of 149 positions", "k's 150 positions")),
    ({"v": lambda v: v.to_sparse()}, ("v is of layout", "v.to_dense()")),
    ({"window": 0}, ("window is 0", "a whole number >= 1", "pass the number of keys that a row attends to")),
    ({"window": True}, ("window is True", "a whole number >= 1")),
    ({"window": 2.0}, ("window is 2.0", "a whole number >= 1")),
    ({"window": 1 << 31}, ("window is 2147483648", "< 2^31")),
    ({"scale": math.nan}, ("scale is nan", "a finite number")),
    ({"return_lse": 1}, ("return_lse is 1", "True or False")),
]  # fmt: skip


@each_of(WRONG)
def test_wrong_calls(changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    (q, k, v), window = inputs_of("h1")
    arguments = {"q": q.detach(), "k": k.detach(), "v": v.detach(), "window": window}
    refused(sliding_window_attention, arguments, changes, fragments)


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda q: f(q).sum())], ids=["vmap", "grad"])
def test_transforms_are_refused(transform: Any) -> None:
    (q, k, v), window = inputs_of("h1")
    with pytest.raises(BackendError, match="sliding_window_attention"):
        transform(lambda q: sliding_window_attention(q, k, v, window))(q.detach())


def test_faked_calls_are_refused() -> None:
    (q, k, v), window = inputs_of("h1")
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(BackendError, match="sliding_window_attention is called while PyTorch"):
        sliding_window_attention(q, k, v, window)
