"""Check which backend each GPU gets under the shipped configuration, with injected devices (`make lane-sm89`) and a real one."""

from __future__ import annotations

import pytest
import torch

import nsa_sel
from nsa_sel.backends._triton import arguments
from nsa_sel.core.backend import Offer, Reason
from nsa_sel.core.call import Call, device_info
from nsa_sel.core.decide import explain_request
from nsa_sel.core.decision import Decision, Override, load_policy, make_decision, refusal
from nsa_sel.core.request import DeviceInfo, Request, example_choice
from nsa_sel.settings.config import settings_for
from nsa_sel.telemetry.describe import describe
from tests.helpers.calls import assert_in_order
from tests.helpers.cases import assert_forward, make_blocks, make_qkv
from tests.helpers.policy_cases import A100, B200, H100, H200, L40S, LONG, OFFERS, RTX3090, RTX4090, RTX5090, SHORT, codes, replace

LANES = {"sm80": (A100,), "sm86": (RTX3090,), "sm89": (RTX4090, L40S), "sm90": (H100, H200), "sm100": (B200,), "sm120": (RTX5090,)}
KERNELS = tuple(offer.backend.name for offer in OFFERS if offer.backend.framework in ("triton", "cupy"))
TRITON = tuple(offer.backend.name for offer in OFFERS if offer.backend.framework == "triton")
DEVICES = [pytest.param(device, id=f"{lane}-{device.name.split()[-1]}") for lane, devices in LANES.items() for device in devices]
lanes = pytest.mark.parametrize("device", DEVICES)


def routed(device: DeviceInfo, request: Request = LONG, offers: tuple[Offer, ...] = OFFERS, backend: str | None = None) -> Decision:
    """The decision of the shipped policy and profiles; L = 8192 is above every gate."""
    request = replace(request, needs_grad=True)
    override = Override(backend, "argument") if backend else None
    return make_decision(request, device, load_policy("default"), settings_for(device), offers, override)


def off(device: DeviceInfo) -> bool:
    return device.sm == 89


SHAPES = {
    "long": LONG,
    "prefill": SHORT,
    "few-heads": replace(SHORT, h=3, Dk=64, Dv=64),
    "wide": replace(SHORT, h=64, G=1, Dk=192),
    "decode": replace(SHORT, S=1, S_kv=65536),
    "batch-decode": replace(SHORT, B=64, S=1, S_kv=65536),
    "ranges": replace(SHORT, block_size=None),
}


@lanes
@pytest.mark.parametrize("shape", SHAPES)
def test_16_blocks_of_64_run_on_a_kernel(device: DeviceInfo, shape: str) -> None:
    """Except on the ADR's GPU, the paper's selection runs on a kernel that supports the GPU."""
    decision = routed(device, SHAPES[shape])
    if off(device):
        assert (decision.forward, decision.backward) == ("sdpa-packed", "sdpa-packed")
        return
    measured = decision.settings.assumed is None or device.sm == 90
    for winner in (decision.forward, decision.backward):
        # cupy-cuda's cost model was measured on Hopper alone. test_triton_aot.py compiles Triton's configs for each chip.
        assert winner in (KERNELS if measured else TRITON)
        assert codes(decision, winner) == []
    assert measured or "sm90_h200.yaml (assumed)" in decision.rule


@pytest.mark.parametrize(("device", "loads"), [(A100, "pointer"), (RTX3090, "pointer"), (H100, "tma"), (B200, "tma"), (RTX5090, "tma")])
def test_kernels_load_as_the_chip_can(device: DeviceInfo, loads: str) -> None:
    """Kernel configs with TMA use pointers before SM 9.0."""
    q, k, v = make_qkv(1, 8, 1, 4, 64, S_kv=256)
    call = Call(q, k, v, make_blocks(1, 8, 1, 256, 2, 64), None, 0.125, settings_for(device), device)
    assert call.settings.kernels["triton-group/forward-blocks"].loads == "tma"
    assert arguments.kernel_config(call, arguments.heads(call), "triton-group/forward-blocks").loads == loads


@lanes
def test_rows_below_the_gate_run_on_packed_sdpa(device: DeviceInfo) -> None:
    gate = settings_for(device).min_length("forward")
    decision = routed(device, replace(LONG, max_length=gate - 1))
    assert (decision.forward, decision.backward) == ("sdpa-packed", "sdpa-packed")
    able = [backend for backend in KERNELS if "compute-capability" not in codes(decision, backend)]
    assert set(KERNELS) - set(able) <= {"cuda-block"}
    assert all("min-length" in codes(decision, backend) for backend in able)


@lanes
@pytest.mark.parametrize("backend", TRITON)
def test_forced_triton_runs_unless_the_adr_forbids(device: DeviceInfo, backend: str) -> None:
    decision = routed(device, backend=backend)
    if off(device):
        assert decision.forward is None
        words = "Triton is disabled on SM 8.9 (ADR-2025-08-M4-02). Set NSA_TRITON_SEL_FORCE=1 to try it"
        forced = f"backend {backend!r}, forced by argument, refuses this call:"
        assert_in_order(str(refusal(decision)), (forced, f"device-rule (disabled): {words}"))
        assert "NSA_TRITON_SEL_FORCE=1" in describe(decision)
    else:
        assert (decision.forward, decision.backward) == (backend, backend)


@lanes
@pytest.mark.parametrize(
    ("changes", "code"),
    [({"Dk": 100}, "head-dim-multiple"), ({"Dv": 264}, "head-dim-max"), ({"dtype": "float64"}, "dtype")],
    ids=["odd-dim", "wide-dim", "float64"],
)
def test_unsupported_requests_fall_back(device: DeviceInfo, changes: dict[str, object], code: str) -> None:
    decision = routed(device, replace(LONG, **changes))
    assert (decision.forward, decision.backward) == ("sdpa-packed", "sdpa-packed")
    assert all(code in codes(decision, backend) for backend in KERNELS)


@lanes
@pytest.mark.parametrize("code", ["package-missing", "failed-before"])
def test_missing_and_broken_backends_fall_back_and_refuse_when_forced(device: DeviceInfo, code: str) -> None:
    reason = Reason(code, "unavailable", "x", None, "y", "Mend it")
    lacking = tuple(replace(offer, missing=(reason,)) if offer.backend.name in KERNELS else offer for offer in OFFERS)
    decision = routed(device, offers=lacking)
    assert (decision.forward, decision.backward) == ("sdpa-packed", "sdpa-packed")
    assert decision.steps
    assert all(code in step for step in decision.steps)
    assert "Mend it" in str(refusal(routed(device, offers=lacking, backend="triton-group")))


@lanes
def test_choosing_follows_the_rule_too(monkeypatch: pytest.MonkeyPatch, device: DeviceInfo) -> None:
    decision = explain_request(example_choice(needs_grad=True), device)
    assert (decision.forward == decision.backward == "choose-torch") is off(device)
    assert ("device-rule" in codes(decision, "choose-triton")) is off(device)
    monkeypatch.setenv("NSA_TRITON_SEL_FORCE", "1")
    assert explain_request(example_choice(), device).forward != "choose-torch"


@pytest.mark.gpu
def test_a_real_gpu_is_routed_as_its_lane() -> None:
    """The result matches the oracle; on SM 8.9 the decision says why it is packed SDPA."""
    device = device_info(torch.device("cuda", 0))
    q, k, v = make_qkv(1, 128, 1, 4, 64, S_kv=512, dtype=torch.bfloat16, device="cuda")
    selection = make_blocks(1, 128, 1, 512, 4, 64, device="cuda")
    o, lse = nsa_sel.selection_attention(q, k, v, selection, return_lse=True)
    decision = nsa_sel.decisions()[-1]
    assert decision == explain_request(decision.request, device)
    assert_forward((o.cpu(), lse.cpu()), q.cpu(), k.cpu(), v.cpu(), selection.ranges.cpu())
    if off(device):
        assert decision.forward == "sdpa-packed"
        assert all("device-rule" in codes(decision, backend) for backend in TRITON)
    else:
        assert all("device-rule" not in codes(decision, backend) for backend in TRITON)
