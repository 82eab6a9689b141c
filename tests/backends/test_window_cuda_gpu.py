"""Sliding windows by Hopper's kernels on a GPU: parity, NaN, and what they leave to Triton. tests/unit/test_window.py has the rest."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import sliding_window_attention
from nsa_sel.backends import window_cuda, window_triton
from nsa_sel.backends.cupy_cuda import window as cuda
from nsa_sel.core import registry
from nsa_sel.core import window as window_calls
from nsa_sel.core.call import WindowCall, device_info
from tests.helpers.cases import make_grads
from tests.helpers.gpus import needs, needs_hopper
from tests.helpers.poison import new_memory_is_nan
from tests.helpers.windows import check, inputs_of

pytestmark = [pytest.mark.gpu, needs("cupy-cuda"), needs_hopper]
SHAPES = {  # B, S, S_kv, G, h, Dk, Dv, window
    "h16": (1, 1500, 1500, 2, 16, 128, 128, 512),
    "h8-64-batch": (2, 777, 777, 2, 8, 64, 64, 200),
    "h4-chunked-prefill": (1, 301, 999, 2, 4, 128, 128, 130),
    "h2": (1, 700, 700, 1, 2, 64, 128, 64),
    "h3": (1, 433, 433, 2, 3, 64, 64, 101),
    "h12": (1, 333, 400, 1, 12, 128, 64, 77),
    "h64": (1, 150, 190, 1, 64, 128, 128, 65),
    "h48-192": (1, 200, 300, 1, 48, 192, 128, 70),
    "window-1": (1, 200, 230, 1, 16, 128, 128, 1),
    "window-17": (1, 200, 200, 1, 6, 128, 128, 17),
    "window-over-S": (2, 257, 300, 1, 16, 64, 64, 5000),
}


@pytest.fixture(autouse=True)
def by_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nothing has failed, and of Triton's kernels none is called but dq of narrow keys."""
    for name in ("forward", "backward"):
        monkeypatch.setattr(window_triton, name, lambda *_: pytest.fail("Triton's kernels run"))
    yield
    assert not registry.broken_windows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_gradients(shape: str, dtype: torch.dtype) -> None:
    inputs, window = inputs_of(SHAPES[shape], dtype, "cuda")
    with new_memory_is_nan():
        check(sliding_window_attention, inputs, window, True)


@pytest.mark.parametrize("shape", ["h16", "h3"])
def test_nan_stays_near(shape: str) -> None:
    """NaN in a row's q and gradient reaches no other row and no tile of keys that it does not see; NaN in a key no rows far away."""
    inputs, window = inputs_of((*SHAPES[shape][:1], 420, 420, *SHAPES[shape][3:7], 101), torch.bfloat16, "cuda")
    do, dlse = make_grads(inputs[0], inputs[2])
    at = 235  # sees 135 to 235: of the tiles of 64 keys, 2 and 3
    seen = torch.arange(420, device="cuda").div(64, rounding_mode="floor").sub(2.5).abs() < 1

    def gradients(q: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        o, lse = window_cuda.forward(q, *kv, window, 0.1)
        return o, lse, *window_cuda.backward(q, *kv, o, lse, do, dlse, window, 0.1)[:3]

    q, *kv = (x.detach() for x in inputs)
    clean = gradients(q, do)
    poisoned = q.clone(), do.clone()
    for x in poisoned:
        x[:, at] = math.nan
    found = gradients(*poisoned)
    rows = torch.arange(420, device="cuda") != at
    assert all(torch.equal(x[:, rows], y[:, rows]) for x, y in zip(found[:3], clean[:3], strict=True))
    assert all(torch.equal(x[:, :, ~seen], y[:, :, ~seen]) for x, y in zip(found[3:], clean[3:], strict=True))
    kv = [x.clone() for x in kv]
    for x in kv:
        x[:, :, 200] = math.nan
    found = gradients(q, do)
    tokens = torch.arange(420, device="cuda")
    far = (tokens < 200 - 64) | (tokens > 300 + 64)
    assert all(torch.equal(x[:, far], y[:, far]) for x, y in zip(found[:3], clean[:3], strict=True))


def test_other_calls_take_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, packed batches, rows that TMA cannot read, float32, and a single head."""
    (q, k, v), _ = inputs_of(SHAPES["h16"], torch.bfloat16, "cuda")
    device = device_info(q.device)
    assert cuda.supports(WindowCall(q, k, v, 512, 1.0), device)
    bounds = window_calls.packed_bounds(torch.tensor([0, 100, 1500], device="cuda"), 1500)
    padded = torch.nn.functional.pad(k, (0, 1))[..., :-1]
    for call in (
        WindowCall(q[:, :8], k, v, 512, 1.0),
        WindowCall(q, k, v, 512, 1.0, bounds),
        WindowCall(q, padded, v, 512, 1.0),
        WindowCall(*(x.float() for x in (q, k, v)), 512, 1.0),
        WindowCall(q[..., :1, :], k, v, 512, 1.0),
    ):
        assert not cuda.supports(call, device)
        monkeypatch.setattr(window_triton, "forward", lambda *_: ("o", "lse"))
        assert window_cuda.forward(*call[:5], call.bounds) == ("o", "lse")
