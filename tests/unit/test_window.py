"""Check what `sliding_window_attention` takes and refuses, its chunks, and compiled calls; its results are in the contract table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_sel import sliding_window_attention
from nsa_sel.backends._window import chunks, plain
from nsa_sel.backends.specs import WINDOWS
from nsa_sel.core import registry
from nsa_sel.core import window as window_calls
from nsa_sel.errors import BackendError
from tests.helpers.calls import each_of, refused
from tests.helpers.gpus import HOPPER
from tests.helpers.windows import inputs_of, masked_softmax, results

# name: B, S, S_kv, G, h, Dk, Dv, window
CPU_SHAPES = {
    "h1": (1, 150, 150, 1, 1, 16, 16, 40),
    "h3": (2, 131, 131, 2, 3, 16, 24, 37),
    "one-row": (3, 1, 85, 1, 4, 16, 16, 32),
}
GPU_SHAPES = {
    "long": (1, 1024, 1024, 2, 4, 64, 64, 128),
    "h1": (2, 300, 300, 2, 1, 64, 64, 101),
    "h3": (2, 331, 331, 2, 3, 64, 64, 100),
    "one-row": (3, 1, 500, 2, 16, 128, 128, 128),
}
SHAPES = {"cpu": CPU_SHAPES, "cuda": GPU_SHAPES, "triton": GPU_SHAPES}
gpu = pytest.mark.gpu


def cells(cpu: tuple[str, ...], on_gpu: tuple[str, ...]) -> Any:
    """Return the mark that runs a test `(device, shape)` with these shapes; on a GPU with CUDA kernels and with those of Triton."""
    found = [pytest.param("cpu", name) for name in cpu]
    found += [pytest.param(kernels, name, marks=gpu) for kernels in ("cuda", "triton") for name in on_gpu]
    return pytest.mark.parametrize(("device", "shape"), found, indirect=["device"])


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device. On a GPU, CUDA kernels take most calls on Hopper; Triton kernels can take all."""
    if request.param == "triton":
        monkeypatch.setattr(window_calls, "WINDOWS", WINDOWS[1:])
    elif request.param == "cuda" and (not HOPPER or registry.missing("cupy-cuda")):
        pytest.skip("no kernels but Triton's")
    return "cpu" if request.param == "cpu" else "cuda"


@pytest.fixture(autouse=True)
def nothing_has_failed() -> Any:
    """Check that the kernels run: a failure warns, and leaves the rest of the process to the chunks."""
    yield
    assert {name for name, _ in registry.broken}.isdisjoint(kernels.path for kernels in WINDOWS)


def made(device: str, shape: str, dtype: torch.dtype | None = None) -> tuple[tuple[Tensor, ...], int]:
    """Return q, k, v, in bfloat16 on a GPU and float32 on a CPU, and the window."""
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    return inputs_of(SHAPES[device][shape], dtype, device)


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
@cells(("one-row",), ("one-row",))
def test_decode(device: str, shape: str, return_lse: bool) -> None:
    (q, k, v), window = made(device, shape)
    found = sliding_window_attention(q.squeeze(1), k, v, window, return_lse=return_lse)
    whole = sliding_window_attention(q, k, v, window, return_lse=return_lse)
    pairs = zip(found, whole, strict=True) if return_lse else [(found, whole)]
    assert all(torch.equal(mine.unsqueeze(1), right) for mine, right in pairs)


@pytest.mark.parametrize("return_lse", [False, True])
def test_gradcheck(return_lse: bool) -> None:
    inputs, window = inputs_of((1, 38, 40, 1, 2, 3, 2, 4), torch.float64)
    assert torch.autograd.gradcheck(lambda *x: sliding_window_attention(*x, window, return_lse=return_lse), inputs, fast_mode=True)


@pytest.mark.parametrize("sizes", [(0, 8, 8), (1, 0, 8), (1, 0, 0)], ids=["batch", "rows", "keys"])
def test_empty_inputs_have_zero_gradients(sizes: tuple[int, int, int]) -> None:
    inputs, _ = inputs_of((*sizes, 1, 2, 16, 24, 4))
    o, lse = sliding_window_attention(*inputs, 4, return_lse=True)
    assert (o.shape, lse.shape) == ((*sizes[:2], 1, 2, 24), (*sizes[:2], 1, 2))
    o.sum().backward()
    assert all(x.grad is not None and int(torch.count_nonzero(x.grad)) == 0 for x in inputs)


def test_lse_has_no_second_derivative() -> None:
    inputs, window = made("cpu", "h1")
    _, lse = sliding_window_attention(*inputs, window, return_lse=True)
    with pytest.raises(BackendError, match="sliding_window_attention has no second derivative"):
        torch.autograd.grad(lse.sum(), inputs, create_graph=True)
    with pytest.raises(BackendError, match="sliding_window_attention is called inside a backward pass of batched gradients"):
        torch.autograd.grad(lse, inputs, torch.ones(2, *lse.shape), is_grads_batched=True)


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
    (q, k, v), window = made("cpu", "h1")
    arguments = {"q": q.detach(), "k": k.detach(), "v": v.detach(), "window": window}
    refused(sliding_window_attention, arguments, changes, fragments)


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda q: f(q).sum())], ids=["vmap", "grad"])
def test_transforms_are_refused(transform: Any) -> None:
    (q, k, v), window = made("cpu", "h1")
    with pytest.raises(BackendError, match="sliding_window_attention"):
        transform(lambda q: sliding_window_attention(q, k, v, window))(q.detach())


def test_faked_calls_are_refused() -> None:
    (q, k, v), window = made("cpu", "h1")
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(BackendError, match="sliding_window_attention is called while PyTorch"):
        sliding_window_attention(q, k, v, window)
