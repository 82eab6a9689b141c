"""Check what `sliding_window_attention` takes and refuses, and parts of its kernels; its results are in the contract table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_sel import sliding_window_attention
from nsa_sel.backends import window_cuda, window_triton
from nsa_sel.core import window as window_calls
from nsa_sel.errors import BackendError
from tests.helpers.calls import assert_refused, each_of, refused
from tests.helpers.cases import make_qkv
from tests.helpers.cuda import check_fit, compiled, needs_nvrtc
from tests.helpers.policy_cases import H200


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


ALL = {"forward_tiles.cu", "dq_tiles.cu", "dkdv_groups.cu"}
FITTING = {  # B, S, S_kv, G, h, Dk, Dv
    "h16": (1, 8192, 8192, 4, 16, 128, 128),
    "h8-64": (4, 8192, 8192, 2, 8, 64, 64),
    "h3": (1, 2000, 4000, 2, 3, 64, 128),
    "h48-192": (1, 500, 1100, 1, 48, 192, 128),
}
OF_TRITON = {"h8-64": {"dq_tiles.cu"}}


@needs_nvrtc
@pytest.mark.slow  # a compiler at work
@pytest.mark.parametrize("shape", ["h16", *(pytest.param(shape, marks=pytest.mark.thorough) for shape in FITTING if shape != "h16")])
def test_kernels_of_windows_fit(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    B, S, S_kv, G, h, Dk, Dv = FITTING[shape]
    q, k, v = make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv, dtype=torch.bfloat16)
    monkeypatch.setattr(window_cuda, "device_info", lambda device: H200)
    monkeypatch.setattr(window_triton, "backward", lambda *_: None)
    monkeypatch.setattr(window_triton, "dq", lambda call, o, lse, *_: (o, lse, lse))

    def run() -> None:
        o, lse = window_cuda.forward(q, k, v, 512, 0.1)
        window_cuda.backward(q, k, v, o, lse, torch.empty_like(o), None, 512, 0.1)

    kernels = compiled(monkeypatch, 90, run)
    assert check_fit(kernels, 90) == ALL - OF_TRITON.get(shape, set())


def test_triton_loads_by_pointers_what_it_does_by_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_calls, "takes", lambda q, v, kernels: kernels.name == "Triton")
    config_of, runs = window_triton.config_of, []
    for loads in ("tma", "pointer"):
        own = lambda call, kernel, loads=loads: replace(config_of(call, kernel), block_l=16, rows=32, loads=loads)  # noqa: E731
        monkeypatch.setattr(window_triton, "config_of", own)
        inputs = make_qkv(1, 11, 1, 16, 16, 16, S_kv=30, requires_grad=True)
        o = sliding_window_attention(*inputs, 20)
        runs.append((o.detach(), *torch.autograd.grad(o.sum(), inputs)))
    torch.testing.assert_close(*runs)
