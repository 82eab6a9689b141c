"""Check what `sliding_window_attention` takes and refuses; its results are in the contract table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_sel import sliding_window_attention
from nsa_sel.errors import BackendError
from tests.helpers.calls import assert_refused, each_of, refused
from tests.helpers.cases import make_qkv


def inputs(*sizes: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v of B, S, G, h, Dk, Dv that require gradients."""
    return make_qkv(*(sizes or (1, 150, 1, 1, 16, 16)), **options, requires_grad=True)


@pytest.mark.parametrize("return_lse", [False, True])
def test_gradcheck(return_lse: bool) -> None:
    given = inputs(1, 38, 1, 2, 3, 2, S_kv=40, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *x: sliding_window_attention(*x, 4, return_lse=return_lse), given, fast_mode=True)


@pytest.mark.parametrize(("B", "S", "S_kv"), [(0, 8, 8), (1, 0, 8), (1, 0, 0)], ids=["batch", "rows", "keys"])
def test_empty_inputs_have_zero_gradients(B: int, S: int, S_kv: int) -> None:
    given = inputs(B, S, 1, 2, 16, 24, S_kv=S_kv)
    o, lse = sliding_window_attention(*given, 4, return_lse=True)
    assert (o.shape, lse.shape) == ((B, S, 1, 2, 24), (B, S, 1, 2))
    assert not any(bool(dx.any()) for dx in torch.autograd.grad(o.sum(), given))


def test_second_derivatives_transforms_and_fakes_are_refused() -> None:
    q, k, v = inputs()
    _, lse = sliding_window_attention(q, k, v, 40, return_lse=True)
    batched = torch.ones(2, *lse.shape)
    attend = lambda q: sliding_window_attention(q, k, v, 40)  # noqa: E731
    assert_refused(
        ("sliding_window_attention has no second derivative", lambda: torch.autograd.grad(lse.sum(), (q, k, v), create_graph=True)),
        (
            "sliding_window_attention is called inside a backward pass of batched gradients",
            lambda: torch.autograd.grad(lse, (q, k, v), batched, is_grads_batched=True),
        ),
        ("sliding_window_attention", lambda: torch.func.vmap(attend)(q.detach())),
        ("sliding_window_attention", lambda: torch.func.grad(lambda q: attend(q).sum())(q.detach())),
        error=BackendError,
    )
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(BackendError, match="sliding_window_attention is called while PyTorch"):
        attend(q)


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
    ({"scale": torch.nan}, ("scale is nan", "a finite number")),
    ({"return_lse": 1}, ("return_lse is 1", "True or False")),
]  # fmt: skip


@each_of(WRONG)
def test_wrong_calls(changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    q, k, v = (x.detach() for x in inputs())
    refused(sliding_window_attention, {"q": q, "k": k, "v": v, "window": 40}, changes, fragments)
