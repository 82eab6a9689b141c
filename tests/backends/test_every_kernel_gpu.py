"""The short GPU lane: every Triton and CUDA kernel runs once and is checked against the oracle (`make gpu-test`, under three minutes)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nsa_sel
from nsa_sel.backends import choose_cuda, choose_triton
from nsa_sel.backends.cupy_cuda import compressed
from nsa_sel.core import registry
from nsa_sel.core.call import Rule, device_info
from nsa_sel.core.request import DeviceInfo
from nsa_sel.settings.config import settings_for
from tests.helpers.cases import make_qkv
from tests.helpers.choose_cases import check_both as check_choice
from tests.helpers.choose_cases import make_choose_call, make_packed_call
from tests.helpers.choosing_reference import assert_chosen, best, infllm_scores, moba_scores, msa_scores
from tests.helpers.gpus import needs_hopper
from tests.helpers.kernel_cases import CUDA_CASES, CUDA_KERNELS, launched, run_all
from tests.helpers.layer_kernels import check_deltas, check_gate, check_gate_parts, check_rotation
from tests.helpers.policy_cases import A100, B200, H200, RTX3090

gpu = pytest.mark.gpu

WIDTHS = {"": (64, 64, torch.bfloat16), "-wide": (192, 128, torch.bfloat16), "-widest": (128, 128, torch.float32)}  # class of kernel config


@gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("backend", [name for name, backend in registry.backends().items() if backend.framework == "triton"])
def test_every_triton_kernel(backend: str, width: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Dk, Dv, dtype = WIDTHS[width]
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    caplog.set_level("INFO", logger="nsa_sel")
    run_all(backend, dtype, Dk, Dv, 4)
    ran = {record.nsa_sel["config"].partition(":")[0] for record in caplog.records if record.getMessage() == "sel.triton.kernel"}  # type: ignore[attr-defined]
    suffixes = tuple(suffix for suffix in WIDTHS if suffix)
    kernels = (name for name in settings_for(device_info(torch.device("cuda"))).kernels if name.startswith(f"{backend}/"))
    wanted = {name for name in kernels if (name.endswith(width) if width else not name.endswith(suffixes))}
    assert wanted, "no kernel of this backend has a config"
    assert wanted <= ran, f"never ran: {sorted(wanted - ran)}"


@gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_every_kernel_of_choosing(width: str) -> None:
    Dk, Dv, dtype = WIDTHS[width]
    for B, S, S_kv in ((1, 200, 200), (2, 40, 1200), (3, 1, 700)):
        call = make_choose_call((B, S, S_kv, 2, 4, Dk, Dv, Rule(n=4)), dtype, "cuda")
        check_choice(choose_triton, call, 1e-4)
    packed = make_packed_call((150, 0, 1, 31, 333), 9, Rule(n=4), (2, 4, Dk, Dv), dtype, "cuda")
    check_choice(choose_triton, packed, 1e-4)


@gpu
@needs_hopper
def test_every_cuda_kernel_of_choosing() -> None:
    """Those of tiles, compiled for compressed keys; tile by tile, and in several segments of rows."""
    for B, S, S_kv, h in ((2, 333, 1200, 16), (1, 2500, 2500, 4)):
        call = make_choose_call((B, S, S_kv, 2, h, 128, 128, Rule(n=4)), torch.bfloat16, "cuda")
        assert compressed.supports(call, device_info(call.q.device))
        check_choice(choose_cuda, call, 1e-4)


@gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_every_kernel_of_choosing_without_attention(width: str) -> None:
    """A MiniMax indexer with one key for all groups, MoBA, InfLLM-v2. Float32 sums agree to 5 digits; a mean may round to another 16-bit
    number, which moves a score by less than a thousandth of the largest."""
    Dk, _, dtype = WIDTHS[width]
    S, S_kv = 40, 1200
    q, k, _ = make_qkv(2, S, 2, 4, Dk, Dk, S_kv=S_kv, dtype=dtype, device="cuda")
    t = torch.arange(S_kv - S, S_kv).expand(2, S)
    slack = 1e-5 if dtype == torch.float32 else 1e-3
    minimax = nsa_sel.choose_blocks(q[:, :, :, :1], k[:, :1], block_size=64, n=4)
    scores = msa_scores(q[:, :, :, :1], k[:, :1], t, 64)
    assert_chosen(minimax.block_indices, scores, best(scores, t, 64, 4, 0, 1), 1e-5)
    scores = moba_scores(q, k, t, 64)
    assert_chosen(nsa_sel.moba_selection(q, k, block_size=64, n=4).block_indices, scores, best(scores, t, 64, 4, 0, 1), slack)
    scores = infllm_scores(q, k, t, coarse=True)
    assert_chosen(nsa_sel.infllm_selection(q, k, n=4, local=2).block_indices, scores, best(scores, t, 64, 4, 1, 2), slack)
    assert {decision.forward for decision in nsa_sel.decisions()[-4:]} == {"choose-triton"}


@gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_every_kernel_of_the_layer(width: str) -> None:
    Dk, Dv, dtype = WIDTHS[width]
    check_gate(dtype, "cuda", Dv)
    check_deltas(dtype, "cuda")
    check_gate_parts(dtype, "cuda", Dv)
    check_rotation(dtype, "cuda", Dk)


@gpu
@pytest.mark.parametrize("name", CUDA_CASES)
def test_every_cuda_kernel(name: str, started: list[str]) -> None:
    case, sm = CUDA_CASES[name], device_info(torch.device("cuda")).sm
    if not case.kernels(sm):
        pytest.skip("needs a GPU of SM 9.0")
    case.run("cuda")
    ran = {Path(source).stem for source in started}
    assert case.kernels(sm) <= ran, f"never ran: {sorted(case.kernels(sm) - ran)}"


@pytest.mark.parametrize("device", [A100, RTX3090, H200, B200], ids=lambda device: f"sm{device.sm}")
def test_the_table_of_cases_starts_every_cuda_kernel(monkeypatch: pytest.MonkeyPatch, device: DeviceInfo) -> None:
    """Without a GPU: launches are noted alone. On SM 9.0 all files run, and on others all that some other one has."""
    wanted = CUDA_KERNELS if device.sm == 90 else set().union(*(case.kernels(None) for case in CUDA_CASES.values()))
    assert set().union(*(case.kernels(device.sm) for case in CUDA_CASES.values())) == wanted
    for name, case in CUDA_CASES.items():
        if case.kernels(device.sm):
            never = case.kernels(device.sm) - launched(monkeypatch, case, device)
            assert not never, f"{name} never starts {sorted(never)}"
