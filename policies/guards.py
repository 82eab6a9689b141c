"""Guards: check whether a backend can run the call (its limits and requirements). Speed does not matter here."""

from __future__ import annotations

from collections.abc import Iterator

from nsa_sel.core.backend import Offer, PolicyInput, Reason


def available(case: PolicyInput, offer: Offer) -> Iterator[Reason]:
    """Yield the packages and libraries that are missing on this machine, and earlier failures of the backend."""
    yield from offer.missing


def within_limits(case: PolicyInput, offer: Offer) -> Iterator[Reason]:
    """Yield every limit of the backend that the call or the device exceeds, with both values."""
    limits, request, device = offer.backend.limits, case.request, case.device
    size, block = request.block_size, "request.block_size"

    def refuse(code: str, field: str, actual: str | int | None, required: str | int, remedy: str) -> Reason:
        return Reason(code, "unsupported", field, actual, required, remedy)

    interpreted = device.kind == "cpu" and device.triton_interpret and "interpreter" in limits.dtypes
    kind = "interpreter" if interpreted else device.kind
    if kind not in limits.dtypes:
        test = ", or set TRITON_INTERPRET=1 before Python starts to test it slowly on the CPU" if "interpreter" in limits.dtypes else ""
        yield refuse(
            "device-kind",
            "device.kind",
            device.kind,
            " or ".join(name for name in limits.dtypes if name != "interpreter"),
            f"move q, k, v there{test}",
        )
    elif request.dtype not in limits.dtypes[kind]:
        yield refuse("dtype", "request.dtype", request.dtype, f"one of {', '.join(limits.dtypes[kind])}", "cast q, k, v")
    if kind == "cuda" and (device.sm or 0) < limits.min_sm:
        yield refuse("compute-capability", "device.sm", device.sm, f">= {limits.min_sm}", "use a newer GPU or another backend")
    for field, dim in (("request.Dk", request.Dk), ("request.Dv", request.Dv)):
        if dim % limits.head_dim_multiple:
            yield refuse("head-dim-multiple", field, dim, f"a multiple of {limits.head_dim_multiple}", "pad the head dimension with zeros")
        if dim > limits.head_dim_max:
            yield refuse("head-dim-max", field, dim, f"<= {limits.head_dim_max}", "use another backend")
    if limits.block_aligned_only and size is None:
        yield refuse("block-aligned", block, None, "whole blocks", "build the Selection with from_blocks")
    if limits.block_aligned_only and request.page_size is not None:
        remedy = "let the policy choose a backend that reads block tables, or use a cache without pages"
        yield refuse("paged", "request.page_size", request.page_size, "a cache without pages", remedy)
    yield from _quantized(case, offer)
    if size is not None and not limits.takes_block(size):
        required = " or ".join((*map(str, limits.small_blocks), f"a multiple of {limits.block_multiple}"))
        yield refuse("block-multiple", block, size, required, "select blocks of that size, or use another backend")
    if request.n > limits.ranges_max:
        yield refuse("ranges-max", "request.n", request.n, f"<= {limits.ranges_max}", "select fewer blocks, or use another backend")
    blocks = -(-request.S_kv // size) if request.kind == "choose" and size else 0
    if blocks > limits.choice_max:
        remedy = "choose larger blocks, or use another backend"
        yield refuse("choice-max", "request.S_kv / request.block_size", blocks, f"<= {limits.choice_max}", remedy)
    tiles = offer.backend.tiles
    if limits.tiles_only and tiles is not None and not (device.sm == tiles.sm and tiles.take(request)):
        call = f"S {request.S}, h {request.h}, Dk {request.Dk}, Dv {request.Dv}, SM {(device.sm or 0) / 10}"
        call += "" if request.aligned else ", not aligned"
        yield refuse("tiles-only", "request", call, tiles.wanted(), "let the policy choose another backend")
    if not limits.deterministic:
        remedy = "make the backend sum in a fixed order, because results must be bit-equal"
        yield refuse("not-deterministic", "limits.deterministic", False, True, remedy)
    if request.needs_grad and not limits.backward:
        yield refuse("no-backward", "request.needs_grad", True, False, "use another backend, or torch.no_grad()")


def _quantized(case: PolicyInput, offer: Offer) -> Iterator[Reason]:
    """Yield a reason if the backend does not read the cache's format, reads it only on newer GPUs, or only in whole
    steps of keys."""
    request, device, formats, steps = case.request, case.device, offer.backend.limits.quantized, offer.backend.quantized_by
    if not request.quantized:
        return
    format_name, sm, own = request.quantized.split("/")[0], device.sm or 0, "a cache of q's dtype"
    if request.needs_grad:
        remedy = f"call it under torch.no_grad(), or use {own}"
        yield Reason("quantized-grad", "unsupported", "request.needs_grad", True, False, remedy)
    elif format_name not in formats:
        remedy = f"let the policy choose another backend, or use {own}"
        yield Reason("quantized", "unsupported", "request.quantized", request.quantized, " or ".join(formats) or None, remedy)
    elif device.kind == "cuda" and sm < formats[format_name]:
        required, remedy = f">= {formats[format_name]} for {format_name}", f"use a newer GPU, another backend, or {own}"
        yield Reason("quantized-sm", "unsupported", "device.sm", device.sm, required, remedy)
    elif steps is not None and not (device.sm == steps.sm and steps.take(request)):
        call = f"{request.quantized}, blocks of {request.block_size}, Dk {request.Dk}, Dv {request.Dv}, SM {sm / 10}"
        call += "" if request.page_size is None else f", pages of {request.page_size}"
        call += "" if request.aligned else ", not aligned"
        yield Reason("quantized-steps", "unsupported", "request", call, steps.wanted(), "let the policy choose another backend")


def forced_path(case: PolicyInput, offer: Offer) -> Iterator[Reason]:
    """Refuse NSA_SEL_TRITON_FORCE_PATH=dense for rows of several ranges and for backends that take whole blocks only."""
    if offer.backend.framework != "triton" or case.settings.triton_force_path != "dense":
        return
    remedy = "unset NSA_SEL_TRITON_FORCE_PATH"
    if case.request.n != 1 and case.request.kind == "attend":
        yield Reason("path-dense", "unsupported", "request.n", case.request.n, 1, f"{remedy} or set it to varlen")
    if offer.backend.limits.block_aligned_only:
        yield Reason("path-dense-blocks", "unsupported", "settings.triton_force_path", "dense", "auto or varlen", remedy)
