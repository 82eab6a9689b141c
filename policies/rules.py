"""Rules: check whether a backend should run the call: device rules (ADR), flags, and measured thresholds."""

from __future__ import annotations

from nsa_sel.core.backend import Offer, PolicyInput, Reason


def device_rule(case: PolicyInput, offer: Offer) -> tuple[Reason, ...]:
    """Refuse Triton on devices whose profile disables it (ADR-2025-08-M4-02 on SM 8.9), for attending and choosing.

    Only NSA_TRITON_SEL_FORCE=1 overrides the rule.
    """
    off = case.settings.triton_off
    if offer.backend.framework != "triton" or off is None or case.settings.triton_force:
        return ()
    remedy = f"set NSA_TRITON_SEL_FORCE=1 to try it; to reopen the rule, measure: {off.reopen}"
    return (Reason("device-rule", "disabled", "device.sm", case.device.sm, f"another: {off.rule}", remedy),)


def switches(case: PolicyInput, offer: Offer) -> tuple[Reason, ...]:
    """Refuse a backend that a setting disables."""
    off = [switch for switch in offer.backend.switches if not getattr(case.settings, switch.setting)]
    return tuple(Reason(switch.code, "disabled", f"settings.{switch.setting}", False, True, switch.remedy) for switch in off)


def triton_flags(case: PolicyInput, offer: Offer) -> tuple[Reason, ...]:
    """Refuse Triton where flags or configuration disable it."""
    settings, request = case.settings, case.request
    if offer.backend.framework != "triton":
        return ()
    reasons = []
    if not settings.use_triton_sel:
        remedy = "set NSA_USE_TRITON_SEL=1 or runtime.use_triton_sel"
        reasons.append(Reason("triton-off", "disabled", "settings.use_triton_sel", False, True, remedy))
    if request.needs_grad and not settings.triton_allow_grad:
        reasons.append(
            Reason("grad-off", "disabled", "settings.triton_allow_grad", False, True, "unset NSA_SEL_TRITON_ALLOW_GRAD, or torch.no_grad()")
        )
    if settings.triton_require_align:
        dims = (request.Dk, request.Dv)
        if any(dim % 16 for dim in dims):
            remedy = "pad, or unset NSA_SEL_TRITON_REQUIRE_ALIGN"
            reasons.append(Reason("align-dims", "disabled", "request.Dk, request.Dv", f"{dims[0]}, {dims[1]}", "multiples of 16", remedy))
        if not request.aligned:
            remedy = "make q, k, v 16-byte aligned, or unset NSA_SEL_TRITON_REQUIRE_ALIGN"
            reasons.append(Reason("align-pointers", "disabled", "request.aligned", False, True, remedy))
    return tuple(reasons)


def no_triton_on_cpu(case: PolicyInput, offer: Offer) -> tuple[Reason, ...]:
    """Refuse Triton's interpreter on a CPU unless it is forced: it is for tests, and every CPU backend is faster."""
    if offer.backend.framework != "triton" or case.device.kind != "cpu":
        return ()
    return (Reason("triton-on-cpu", "slower", "device.kind", "cpu", "cuda", "force it by name to run the interpreter"),)


def min_length(case: PolicyInput, offer: Offer) -> tuple[Reason, ...]:
    """Apply the min-L gate of Triton and CUDA kernels on a GPU: rows must select at least `sel_triton_min_L` keys.

    Compares the measured average if `Selection.measure` ran, else the bound of the longest row.
    """
    gate, length = case.settings.min_length(case.phase), case.request.length
    gated = offer.backend.framework in ("triton", "cupy") and case.device.kind != "cpu" and case.request.kind == "attend"
    if not gated or length >= gate:
        return ()
    remedy = "lower NSA_SEL_TRITON_MIN_L or runtime.sel_triton_min_L when a measurement on this GPU shows a gain"
    field = "request.max_length" if case.request.mean_length is None else "request.mean_length"
    return (Reason("min-length", "slower", field, length, f">= {gate}", remedy, satisfied_by=gate),)
