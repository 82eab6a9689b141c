"""Check parts of sliding windows: Hopper's kernels fit, Triton's loads by TMA and by pointers agree, and refusals."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from nsa_sel import sliding_window_attention
from nsa_sel.backends import window_cuda, window_triton
from nsa_sel.core import window as window_calls
from nsa_sel.errors import BackendError
from tests.helpers.aot import TARGETS
from tests.helpers.cases import make_qkv
from tests.helpers.cuda import compiled, needs_nvrtc
from tests.helpers.policy_cases import H200

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
    assert {kernel["kernel"] for kernel in kernels} == ALL - OF_TRITON.get(shape, set())
    for kernel in kernels:
        assert kernel["shared"] <= TARGETS[90][0] * 1024, kernel
        assert kernel["registers"] * kernel["threads"] <= 65536, kernel
        assert kernel["spilled"] == kernel["serialized"] == 0, kernel


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


def test_the_op_of_windows_passes_opcheck_and_has_no_second_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_qkv(1, 5, 1, 2, 16, S_kv=7, requires_grad=True)
    monkeypatch.setattr(window_calls, "takes", lambda q, v, kernels: kernels.name == "Triton")
    torch.library.opcheck(torch.ops.nsa_sel.window_forward.default, (*inputs, None, 3, 0.25, True, True))
    with pytest.raises(BackendError, match="sliding_window_attention has no second derivative"):
        torch.autograd.grad(sliding_window_attention(*inputs, 20).sum(), inputs, create_graph=True)
