"""NSA_DEBUG_COMPARE: what a backend computed, against the fallback, as an event with the mean absolute error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from nsa_sel.core import registry
from nsa_sel.core.call import Call
from nsa_sel.core.decision import Decision
from nsa_sel.telemetry import events

Forward = Callable[[str, Call], tuple[Tensor, Tensor]]


def compare_forward(call: Call, decision: Decision, o: Tensor, forward: Forward) -> None:
    """Compare o. `forward`: runs a backend, given by name."""
    with torch.no_grad():
        wanted, _ = forward(registry.fallback(), _silent(call))
    _emit(decision.forward, "forward", (o,), (wanted,))


def compare_backward(call: Call, decision: Decision, found: tuple[Tensor, ...], *given: Any) -> None:
    """Compare dq, dk and dv, of which the largest error counts. `given`: o, lse, do, dlse."""
    with torch.no_grad():
        wanted = registry.load(registry.fallback()).backward(_silent(call), *given)
    _emit(decision.backward, "backward", found, wanted)


def _silent(call: Call) -> Call:
    off = {"debug_log": None, "debug_triton": False, "debug_timing": False, "debug_compare": False}
    return replace(call, settings=msgspec.structs.replace(call.settings, **off), workspace=None)


def _emit(backend: str | None, direction: str, found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    mae = max(float((mine.detach().double() - other.double()).abs().mean()) for mine, other in zip(found, wanted, strict=True))
    events.emit("sel.compare", backend=backend, direction=direction, reference=registry.fallback(), mae=mae)
