"""`nsa_sel.warmup`: compile kernels before the first call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from nsa_sel.core.request import Request, example_request
from nsa_sel.core.warm import Warmed, capturing, warm
from nsa_sel.errors import ArgumentError


def warmup(
    device: torch.device | str | None = None, requests: Sequence[Request | Mapping[str, Any]] | None = None, tune: bool = False
) -> tuple[Warmed, ...]:
    """Run each request once with tensors of its sizes, so that later calls of the same class compile nothing.

    One `sel.triton.warmup` event per request reports the times.

    Args:
        device: by default the current CUDA device, or the CPU without CUDA.
        requests: `Request`s, or mappings of their fields (B, S, S_kv, G, h, Dk, Dv, n, block_size, max_length, dtype, needs_grad,
            page_size, quantized); missing fields are those of the example request. By default the example, an 8k prefill with gradients,
            and its decode step.
        tune: first tune the kernel configs of the chosen backends (as `nsa-sel tune --quick`) and store the results. Needs a GPU.

    Returns:
        For each request, the backends that ran and their times in milliseconds.

    Raises:
        ArgumentError: a bad request, tune=True without a GPU, or a call inside a CUDA graph capture.
        BackendError: as for a call.
    """
    if capturing():
        raise ArgumentError("warmup()", "called within a CUDA graph capture", "outside of one", "call it before torch.cuda.graph(...)")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if tune and device.type != "cuda":
        raise ArgumentError("tune", True, "False on a CPU", "Triton needs a GPU: leave it out")
    example = example_request(needs_grad=True)
    if requests is None and device.type == "cpu":
        requests = [msgspec.structs.replace(example, S=64, S_kv=2048)]  # small: compiled CPU code does not depend on sizes
    elif requests is None:
        requests = [example, msgspec.structs.replace(example, S=1, needs_grad=False)]
    parsed = [request if isinstance(request, Request) else _request(request, example) for request in requests]
    return tuple(warm(request, device, tune) for request in parsed)


def _request(fields: Mapping[str, Any], example: Request) -> Request:
    """Return a request with these fields and the example's. Raises ArgumentError."""
    values = {**msgspec.to_builtins(example), "S_kv": fields.get("S", example.S_kv), **fields}
    try:
        if not set(fields) <= set(Request.__struct_fields__):
            raise msgspec.ValidationError("unknown field")
        request = msgspec.convert(values, Request)
    except msgspec.ValidationError as error:
        allowed = f"the fields of Request: {', '.join(Request.__struct_fields__)}"
        raise ArgumentError("requests", f"{dict(fields)} ({error})", allowed, "correct the field") from error
    if "max_length" in fields:
        return request
    return msgspec.structs.replace(request, max_length=min(request.S_kv, request.n * (request.block_size or request.S_kv)))
