"""Requests, devices and offers for tests of the policies: no tensors, no torch, and nothing that depends on this machine."""

from __future__ import annotations

from typing import Any

import msgspec

from nsa_sel.backends.specs import SPECS
from nsa_sel.core.backend import Backend, Limits, Offer
from nsa_sel.core.decision import Decision, Override, load_policy, make_decision
from nsa_sel.core.request import DeviceInfo, Request, example_request
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.schema import Settings

NAMES = ("triton-group", "triton-token", "sdpa-packed", "numba")
OFFERS = tuple(Offer(spec) for spec in SPECS)

CPU = DeviceInfo(kind="cpu")
INTERPRETER = DeviceInfo(kind="cpu", triton_interpret=True)
RTX4090 = DeviceInfo(kind="cuda", name="NVIDIA GeForce RTX 4090", sm=89, sm_count=128, shared_memory=101376)
A100 = DeviceInfo(kind="cuda", name="NVIDIA A100-SXM4-80GB", sm=80, sm_count=108, shared_memory=166912)
H100 = DeviceInfo(kind="cuda", name="NVIDIA H100 80GB HBM3", sm=90, sm_count=132, shared_memory=232448)
H200 = msgspec.structs.replace(H100, name="NVIDIA H200")
RTX3090 = DeviceInfo(kind="cuda", name="NVIDIA GeForce RTX 3090", sm=86, sm_count=82, shared_memory=101376)
L40S = DeviceInfo(kind="cuda", name="NVIDIA L40S", sm=89, sm_count=142, shared_memory=101376)
B200 = DeviceInfo(kind="cuda", name="NVIDIA B200", sm=100, sm_count=148, shared_memory=232448)
RTX5090 = DeviceInfo(kind="cuda", name="NVIDIA GeForce RTX 5090", sm=120, sm_count=170, shared_memory=101376)
TOO_OLD = DeviceInfo(kind="cuda", name="Tesla T4", sm=75, sm_count=40, shared_memory=65536)  # no kernel runs there: built-in values
UNKNOWN = DeviceInfo(kind="cuda", name="a GPU without a profile", sm=999, sm_count=64, shared_memory=65536)

SHORT = example_request()  # L = 1024
LONG = msgspec.structs.replace(SHORT, n=128, max_length=8192)


def replace(thing: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(thing, **changes)


def settings(**changes: Any) -> Settings:
    """The built-in settings with the numbers pinned, then changed."""
    pinned = {"use_triton_sel": True, "sel_triton_min_L": 4096, "prefer_forward": NAMES, "prefer_backward": NAMES, "triton_off": None}
    built_in: Settings = replace(settings_for(TOO_OLD), **{**pinned, **changes})
    return built_in


def decide(
    request: Request, device: DeviceInfo, offers: tuple[Offer, ...] = OFFERS, backend: str | None = None, **changes: Any
) -> Decision:
    """The default policy's decision under `settings(**changes)`, with a backend forced by argument."""
    override = None if backend is None else Override(backend, "argument")
    return make_decision(request, device, load_policy("default"), settings(**changes), offers, override)


def codes(decision: Decision, backend: str) -> list[str]:
    return [reason.code for verdict in decision.verdicts if verdict.backend == backend for reason in verdict.forward]


def toy(**limits: Any) -> Offer:
    """A backend called toy that is offered here, for float16 and bfloat16 on GPUs unless `limits` say otherwise."""
    limits = {"dtypes": {"cuda": ("float16", "bfloat16")}, **limits}
    return Offer(Backend(name="toy", path="toy", framework="torch", limits=Limits(**limits)))
