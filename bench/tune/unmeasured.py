"""Profiles of GPUs that nobody has measured, for bench/tune/derive.py: what each assumes or calculates, and what measures it."""

from __future__ import annotations

from typing import Any

from nsa_sel.bench.tune.data_sheets import MEASURED, factors, least_tensor_ms, words
from nsa_sel.settings.devices import GPUS, MEASURE

NEAREST = "sm90_h200.yaml"  # the measured profile that `nsa_sel.settings.config.nearest_measured` finds for these
THRESHOLDS = "python -m nsa_sel.bench.questions.speed --suite threshold --out"
ADR_RECORD = {64: 0.064, 1024: 0.065}  # L -> ms of the baseline in the record behind ADR-2025-08-M4-02, N 1024, H 8, D 128
ROWS, WIDTHS, BYTES_EACH, BYTES_PER_SECOND = 1024, 128 + 128, 2, 1e12  # the record's rows, Dk + Dv, 16 bits; about that card's memory


def bound_ms(L: int) -> float:
    """The least time in ms to read the record's selected keys and values once (PRD.md says how it is counted)."""
    return ROWS * L * WIDTHS * BYTES_EACH / BYTES_PER_SECOND * 1e3


def rtx4090_profile() -> dict[str, Any]:
    """SM 8.9: the rule of ADR-2025-08-M4-02, with its evidence and the command that would reopen it."""
    below = [L for L, ms in ADR_RECORD.items() if ms < bound_ms(L)]
    assert below == [1024], "the texts say at which L the record contradicts the bound"
    recorded = " and ".join(f"{ms} ms at L {L}" for L, ms in ADR_RECORD.items())
    bounds = " and ".join(f"{bound_ms(L):.3f} ms at L {L}" for L in ADR_RECORD)
    return {
        "match": {"kind": "cuda", "sm": 89},
        "provenance": "ADR-2025-08-M4-02: Triton off on SM 8.9; at L 1024 the record's baseline is faster than one read of its keys and"
        " values (PRD.md), so the rule waits for a measurement; all other values: built-in, not measured",
        "assumes": "base.yaml",
        "triton_off": {
            "rule": "ADR-2025-08-M4-02",
            "evidence": f"RTX 4090 record, N 1024, H 8, D 128: baseline {recorded};"
            f" one read of the selected K and V at 1 TB/s takes {bounds}",
            "reopen": f"NSA_TRITON_SEL_FORCE=1 {THRESHOLDS} rtx4090.jsonl",
        },
    }


def calculated_profile(name: str, match: str = "") -> dict[str, Any]:
    """The H200's thresholds, and its costs at the prices that data sheets give for another GPU.

    Args:
        name: a key of `nsa_sel.settings.devices.GPUS` with a data sheet.
        match: the part of a device's name that the profile is for; empty: all GPUs of this compute capability without one of their own.
    """
    sm = GPUS[name].sm or 0
    launches = (
        "Kernel configs are the H200's"
        if sm == GPUS[MEASURED].sm
        else f"Kernel configs are those of base.yaml: tests/helpers/aot.py compiles them for SM {sm / 10}, and they have run on none"
    )
    return {
        "match": {"kind": "cuda", "sm": sm, **({"name": match} if match else {})},
        "provenance": f"calculated, not measured: thresholds of the {GPUS[MEASURED].name}; its costs, each price times its rate over this"
        f" GPU's from data sheets. {words(name)}. {launches}. To measure: {MEASURE}",
        "assumes": NEAREST,
        "price_factors": factors(name),
        "tensor_ms": least_tensor_ms(name),
    }
