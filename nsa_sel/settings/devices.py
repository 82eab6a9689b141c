"""GPUs by the short names of `nsa-sel explain --device`, with the facts that a policy uses; and the warning about unmeasured GPUs."""

from __future__ import annotations

import logging

from nsa_sel.core.decision import Decision
from nsa_sel.core.request import DeviceInfo
from nsa_sel.errors import warn
from nsa_sel.telemetry import events

MEASURE = "nsa-sel tune"  # measures a GPU; its results override every committed profile
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}  # bytes per block, by compute capability


def _gpu(name: str, sm: int, sm_count: int) -> DeviceInfo:
    return DeviceInfo(kind="cuda", name=name, sm=sm, sm_count=sm_count, shared_memory=SHARED_MEMORY[sm])


GPUS = {
    "a100": _gpu("NVIDIA A100-SXM4-80GB", 80, 108),
    "rtx3090": _gpu("NVIDIA GeForce RTX 3090", 86, 82),
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", 89, 128),
    "l40s": _gpu("NVIDIA L40S", 89, 142),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 90, 132),
    "h200": _gpu("NVIDIA H200", 90, 132),
    "b200": _gpu("NVIDIA B200", 100, 148),
    "rtx5090": _gpu("NVIDIA GeForce RTX 5090", 120, 170),
}


def named(name: str) -> DeviceInfo | None:
    """The GPU of `GPUS` with this full name, as rows record it; None for any other."""
    return next((device for device in GPUS.values() if device.name == name), None)


_told: set[DeviceInfo] = set()


def warn_if_assumed(decision: Decision) -> None:
    """Warn, once per process and device, that a policy used values that were not measured on the device, with the command to measure.

    Silent where a backend is forced, and where the user's own tuning or configuration file is in force.
    """
    settings, device = decision.settings, decision.device
    quiet = settings.assumed is None or settings.tuned is not None or settings.config_file is not None or decision.override is not None
    if quiet or device in _told:
        return
    _told.add(device)
    off, command = settings.triton_off, MEASURE
    if off is not None and not settings.triton_force:
        chosen, command = f"{off.rule} keeps Triton off on its compute capability and packed SDPA runs, which may be far slower", off.reopen
    elif settings.assumed == "base.yaml":
        chosen = "backends are chosen by the built-in values"
    else:
        chosen = f"backends are chosen by the values of {settings.assumed}, which were measured on another GPU"
    words = f"nobody has measured {device.name} (compute capability {(device.sm or 0) / 10}): {chosen}. Measure it with: {command}"
    events.emit(
        "sel.profile.assumed", logging.WARNING, device=device.name, sm=device.sm, profile=settings.profile, assumed=settings.assumed,
        rule=off.rule if off else None, command=command, words=words,
    )  # fmt: skip
    warn(words)
