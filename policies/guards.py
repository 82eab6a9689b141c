"""Guards: check whether a backend can run the call (its limits and requirements). Speed does not matter here."""

from __future__ import annotations

from nsa_sel.core.backend import Offer, PolicyInput, Reason


def available(case: PolicyInput, offer: Offer) -> tuple[Reason, ...]:
    """Return the packages and libraries that are missing on this machine, and earlier failures of the backend."""
    return offer.missing


def within_limits(case: PolicyInput, offer: Offer) -> tuple[Reason, ...]:
    """Return every limit of the backend that the call or the device exceeds, with both values."""
    limits, request, device = offer.backend.limits, case.request, case.device
    interpreted = device.kind == "cpu" and device.triton_interpret and "interpreter" in limits.dtypes
    kind = "interpreter" if interpreted else device.kind
    kinds = " or ".join(name for name in limits.dtypes if name != "interpreter")
    reasons = []
    if kind not in limits.dtypes:
        remedy = "move q, k, v there"
        if "interpreter" in limits.dtypes:
            remedy += ", or set TRITON_INTERPRET=1 before Python starts to test it slowly on the CPU"
        reasons.append(Reason("device-kind", "unsupported", "device.kind", device.kind, kinds, remedy))
    elif request.dtype not in limits.dtypes[kind]:
        dtypes = ", ".join(limits.dtypes[kind])
        reasons.append(Reason("dtype", "unsupported", "request.dtype", request.dtype, f"one of {dtypes}", "cast q, k, v"))
    if kind == "cuda" and (device.sm or 0) < limits.min_sm:
        reasons.append(
            Reason("compute-capability", "unsupported", "device.sm", device.sm, f">= {limits.min_sm}", "use a newer GPU or another backend")
        )
    for field in ("Dk", "Dv"):
        value = getattr(request, field)
        if value % limits.head_dim_multiple:
            required = f"a multiple of {limits.head_dim_multiple}"
            reasons.append(
                Reason("head-dim-multiple", "unsupported", f"request.{field}", value, required, "pad the head dimension with zeros")
            )
        if value > limits.head_dim_max:
            required = f"<= {limits.head_dim_max}"
            reasons.append(Reason("head-dim-max", "unsupported", f"request.{field}", value, required, "use another backend"))
    if limits.block_aligned_only and request.block_size is None:
        reasons.append(
            Reason("block-aligned", "unsupported", "request.block_size", None, "whole blocks", "build the Selection with from_blocks")
        )
    if limits.block_aligned_only and request.page_size is not None:
        remedy = "let the policy choose a backend that reads block tables, or use a cache without pages"
        reasons.append(Reason("paged", "unsupported", "request.page_size", request.page_size, "a cache without pages", remedy))
    reasons += _quantized(case, offer)
    size = request.block_size
    if size is not None and not limits.takes_block(size):
        required = " or ".join((*map(str, limits.small_blocks), f"a multiple of {limits.block_multiple}"))
        remedy = "select blocks of that size, or use another backend"
        reasons.append(Reason("block-multiple", "unsupported", "request.block_size", request.block_size, required, remedy))
    if request.n > limits.ranges_max:
        required = f"<= {limits.ranges_max}"
        reasons.append(Reason("ranges-max", "unsupported", "request.n", request.n, required, "select fewer blocks, or use another backend"))
    blocks = -(-request.S_kv // request.block_size) if request.kind == "choose" and request.block_size else 0
    if blocks > limits.choice_max:
        remedy = "choose larger blocks, or use another backend"
        reasons.append(Reason("choice-max", "unsupported", "request.S_kv / request.block_size", blocks, f"<= {limits.choice_max}", remedy))
    reasons += _beyond_tiles(case, offer)
    if not limits.deterministic:
        remedy = "make the backend sum in a fixed order, because results must be bit-equal"
        reasons.append(Reason("not-deterministic", "unsupported", "limits.deterministic", False, True, remedy))
    if request.needs_grad and not limits.backward:
        reasons.append(Reason("no-backward", "unsupported", "request.needs_grad", True, False, "use another backend, or torch.no_grad()"))
    return tuple(reasons)


def _quantized(case: PolicyInput, offer: Offer) -> list[Reason]:
    """Refuse a quantized cache whose format the backend does not read, or reads only on newer GPUs."""
    format_name = (case.request.quantized or "").split("/")[0]
    if not format_name:
        return []
    formats, name = offer.backend.limits.quantized, case.request.quantized
    if case.request.needs_grad:
        remedy = "call it under torch.no_grad(), or use a cache of q's dtype"
        return [Reason("quantized-grad", "unsupported", "request.needs_grad", True, False, remedy)]
    if format_name not in formats:
        remedy = "let the policy choose another backend, or use a cache of q's dtype"
        return [Reason("quantized", "unsupported", "request.quantized", name, " or ".join(formats) or None, remedy)]
    if case.device.kind == "cuda" and (case.device.sm or 0) < formats[format_name]:
        required, remedy = f">= {formats[format_name]} for {format_name}", "use a newer GPU, another backend, or a cache of q's dtype"
        return [Reason("quantized-sm", "unsupported", "device.sm", case.device.sm, required, remedy)]
    return _beyond_steps(case, offer)


def _beyond_steps(case: PolicyInput, offer: Offer) -> list[Reason]:
    """Refuse a quantized cache if the backend reads it only with kernels of whole steps and these do not take the
    call."""
    request, steps = case.request, offer.backend.quantized_by
    if steps is None or (case.device.sm == steps.sm and steps.take(request)):
        return []
    found = f"{request.quantized}, blocks of {request.block_size}, Dk {request.Dk}, Dv {request.Dv}, SM {(case.device.sm or 0) / 10}"
    found += "" if request.page_size is None else f", pages of {request.page_size}"
    found += "" if request.aligned else ", not aligned"
    return [Reason("quantized-steps", "unsupported", "request", found, steps.wanted(), "let the policy choose another backend")]


def _beyond_tiles(case: PolicyInput, offer: Offer) -> list[Reason]:
    """Refuse calls that the tile kernels do not take if the backend has no other kernels."""
    request, tiles = case.request, offer.backend.tiles
    if not offer.backend.limits.tiles_only or tiles is None or (case.device.sm == tiles.sm and tiles.take(request)):
        return []
    found = f"S {request.S}, h {request.h}, Dk {request.Dk}, Dv {request.Dv}, SM {(case.device.sm or 0) / 10}"
    found += "" if request.aligned else ", not aligned"
    return [Reason("tiles-only", "unsupported", "request", found, tiles.wanted(), "let the policy choose another backend")]


def forced_path(case: PolicyInput, offer: Offer) -> tuple[Reason, ...]:
    """Refuse NSA_SEL_TRITON_FORCE_PATH=dense for rows of several ranges and for backends that take whole blocks
    only."""
    if offer.backend.framework != "triton":
        return ()
    reasons = []
    if case.settings.triton_force_path == "dense" and case.request.n != 1 and case.request.kind == "attend":
        reasons.append(
            Reason("path-dense", "unsupported", "request.n", case.request.n, 1, "unset NSA_SEL_TRITON_FORCE_PATH or set it to varlen")
        )
    if case.settings.triton_force_path == "dense" and offer.backend.limits.block_aligned_only:
        remedy = "unset NSA_SEL_TRITON_FORCE_PATH"
        reasons.append(Reason("path-dense-blocks", "unsupported", "settings.triton_force_path", "dense", "auto or varlen", remedy))
    return tuple(reasons)
