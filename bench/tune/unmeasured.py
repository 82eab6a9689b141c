"""Profiles of GPUs that nobody has measured: what each assumes, and the command that measures it. Written by bench/tune/derive.py."""

from __future__ import annotations

from typing import Any

from nsa_sel.settings.devices import MEASURE

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


def a100_profile() -> dict[str, Any]:
    """SM 8.0, not measured: the H200's values but for its kernel configs."""
    return {
        "match": {"kind": "cuda", "sm": 80, "name": "NVIDIA A100"},
        "provenance": "not measured on this GPU, nor on any of SM 8.0. Assumed: the thresholds and costs of the H200, the nearest GPU that"
        " was measured. Launches are those of base.yaml: tests/helpers/aot.py compiles them for SM 8.0, and they have run on none."
        f" Predicted times are the H200's. To measure: {MEASURE}",
        "assumes": NEAREST,
    }


def h100_profile() -> dict[str, Any]:
    """SM 9.0, not measured: the H200's values. Its SMs are the same, its memory is slower."""
    return {
        "match": {"kind": "cuda", "sm": 90, "name": "NVIDIA H100"},
        "provenance": "not measured on this GPU. Assumed: the thresholds, costs and launches of the H200. It has the same compute"
        " capability and, beside the SXM card, as many multiprocessors, but more memory bandwidth."
        f" Predicted times are the H200's. To measure: {MEASURE}",
        "assumes": NEAREST,
    }
