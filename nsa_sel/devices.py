"""GPUs whose decisions one may ask for without having them: their facts, by the short name that `nsa-sel explain --device` takes."""

from __future__ import annotations

from nsa_sel.request import DeviceInfo

SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}  # bytes a block, by compute capability


def _gpu(name: str, sm: int, sm_count: int) -> DeviceInfo:
    return DeviceInfo(kind="cuda", name=name, sm=sm, sm_count=sm_count, shared_memory=SHARED_MEMORY[sm])


GPUS = {
    "a100": _gpu("NVIDIA A100-SXM4-80GB", 80, 108),
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", 89, 128),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 90, 132),
    "h200": _gpu("NVIDIA H200", 90, 132),
}


def named(name: str) -> DeviceInfo | None:
    """The GPU of `GPUS` that calls itself so, as rows record it; None for any other."""
    return next((device for device in GPUS.values() if device.name == name), None)
