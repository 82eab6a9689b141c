"""Rules: check whether a backend should run the call: device rules (ADR), flags, and measured thresholds."""

from __future__ import annotations

from collections.abc import Iterator

from nsa_sel.core.backend import Offer, PolicyInput, Reason


def device_rule(case: PolicyInput, offer: Offer) -> Iterator[Reason]:
    """Refuse Triton on devices whose profile disables it (ADR-2025-08-M4-02 on SM 8.9), for attending and choosing.

    Only NSA_TRITON_SEL_FORCE=1 overrides the rule.
    """
    off = case.settings.triton_off
    if offer.backend.framework == "triton" and off is not None and not case.settings.triton_force:
        yield Reason(
            "device-rule",
            "disabled",
            "device.sm",
            case.device.sm,
            f"another: {off.rule}",
            f"set NSA_TRITON_SEL_FORCE=1 to try it; to reopen the rule, measure: {off.reopen}",
        )


def switches(case: PolicyInput, offer: Offer) -> Iterator[Reason]:
    """Refuse a backend that a setting disables."""
    for switch in offer.backend.switches:
        if not getattr(case.settings, switch.setting):
            yield Reason(switch.code, "disabled", f"settings.{switch.setting}", False, True, switch.remedy)


def triton_flags(case: PolicyInput, offer: Offer) -> Iterator[Reason]:
    """Refuse Triton where flags or configuration disable it."""
    settings, request = case.settings, case.request
    if offer.backend.framework != "triton":
        return
    if not settings.use_triton_sel:
        remedy = "set NSA_USE_TRITON_SEL=1 or runtime.use_triton_sel"
        yield Reason("triton-off", "disabled", "settings.use_triton_sel", False, True, remedy)
    if request.needs_grad and not settings.triton_allow_grad:
        remedy = "unset NSA_SEL_TRITON_ALLOW_GRAD, or torch.no_grad()"
        yield Reason("grad-off", "disabled", "settings.triton_allow_grad", False, True, remedy)
    if settings.triton_require_align:
        remedy = "unset NSA_SEL_TRITON_REQUIRE_ALIGN"
        if request.Dk % 16 or request.Dv % 16:
            yield Reason(
                "align-dims", "disabled", "request.Dk, request.Dv", f"{request.Dk}, {request.Dv}", "multiples of 16", f"pad, or {remedy}"
            )
        if not request.aligned:
            yield Reason("align-pointers", "disabled", "request.aligned", False, True, f"make q, k, v 16-byte aligned, or {remedy}")


def no_triton_on_cpu(case: PolicyInput, offer: Offer) -> Iterator[Reason]:
    """Refuse Triton's interpreter on a CPU unless it is forced: it is for tests, and every CPU backend is faster."""
    if offer.backend.framework == "triton" and case.device.kind == "cpu":
        yield Reason("triton-on-cpu", "slower", "device.kind", "cpu", "cuda", "force it by name to run the interpreter")


def min_length(case: PolicyInput, offer: Offer) -> Iterator[Reason]:
    """Apply the min-L gate of Triton and CUDA kernels on a GPU: rows must select at least `sel_triton_min_L` keys.

    Compares the measured average if `Selection.measure` ran, else the bound of the longest row.
    """
    gate, length = case.settings.min_length(case.phase), case.request.length
    gated = offer.backend.framework in ("triton", "cupy") and case.device.kind != "cpu" and case.request.kind == "attend"
    if gated and length < gate:
        yield Reason(
            "min-length",
            "slower",
            "request.max_length" if case.request.mean_length is None else "request.mean_length",
            length,
            f">= {gate}",
            "lower NSA_SEL_TRITON_MIN_L or runtime.sel_triton_min_L when a measurement on this GPU shows a gain",
            satisfied_by=gate,
        )
