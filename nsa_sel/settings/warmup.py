"""Optional steps before the first call: `warmup` compiles kernels, `sync_tuning` shares tuning results among ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import distributed as dist

from nsa_sel.core.call import device_info
from nsa_sel.core.decide import forget_decisions
from nsa_sel.core.request import DeviceInfo, Request, example_request
from nsa_sel.core.warm import Warmed, capturing, warm
from nsa_sel.errors import ArgumentError, NsaSelError
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for


def warmup(
    device: torch.device | str | None = None, requests: Sequence[Request | Mapping[str, Any]] | None = None, tune: bool = False
) -> tuple[Warmed, ...]:
    """Run each request once with tensors of its sizes, so that later calls of the same class compile nothing.

    One `sel.triton.warmup` event per request reports the times.

    Args:
        device: by default the current CUDA device, or the CPU without CUDA.
        requests: `Request`s, or mappings of their fields (B, S, S_kv, G, h, Dk, Dv, n, block_size, max_length, dtype,
            needs_grad, page_size, quantized); missing fields are those of the example request. By default the example,
            an 8k prefill with gradients, and its decode step.
        tune: first tune the kernel configs of the chosen backends (as `nsa-sel tune --quick`) and store the results.
            Needs a GPU.

    Returns:
        For each request, the backends that ran and their times in milliseconds.

    Raises:
        ArgumentError: a bad request, tune=True without a GPU, or a call inside a CUDA graph capture.
        BackendError: as for a call.
    """
    if capturing():
        raise ArgumentError("warmup()", "called within a CUDA graph capture", "outside of one", "call it before torch.cuda.graph(...)")
    device = _current_device() if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = _current_device()
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
        raise ArgumentError(
            "requests", f"{dict(fields)} ({error})", f"the fields of Request: {', '.join(Request.__struct_fields__)}", "correct the field"
        ) from error
    if "max_length" in fields:
        return request
    return msgspec.structs.replace(request, max_length=min(request.S_kv, request.n * (request.block_size or request.S_kv)))


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def sync_tuning(device: DeviceInfo | None = None) -> str | None:
    """Use rank 0's tuning results on every rank. A collective: all ranks must call it, after init_process_group.

    A distributed job that does not call it ignores tuning results. Sharing them at the first call would hang if a rank
    makes no call.

    Args:
        device: by default this rank's current device.

    Returns:
        The fingerprint of the table that all ranks now use on `device`, or None if rank 0 has none and the committed
        configs are used.

    Raises:
        NsaSelError: outside of a distributed job; on all ranks, if rank 0's table is for another environment than a
            rank's, or if ranks differ in NSA_SEL_AUTOTUNE. The message has the rank and the field.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise NsaSelError(
            "sync_tuning is called outside a distributed job; allowed: after torch.distributed.init_process_group. Remedy: move the call."
        )
    if device is None:
        device = device_info(_current_device())
    table = tuned.read(device)
    mine = (tuned.stamp_of(device), settings_for(device).autotune == "off", table and (table.name, table.data))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, msgspec.msgpack.encode(mine))
    decoded = [msgspec.msgpack.decode(rank, type=tuple[tuned.Stamp, bool, tuple[str, bytes] | None]) for rank in ranks]
    stamp, ignored, shared = decoded[0]
    for rank, (other, other_ignored, _) in enumerate(decoded):
        if other_ignored != ignored:
            raise NsaSelError(
                f"rank {rank} would use other kernel configs than rank 0: NSA_SEL_AUTOTUNE is {'off' if other_ignored else 'not off'}"
                " there, and the opposite on rank 0. Remedy: set it to the same value on all ranks."
            )
        differing = other.differences(stamp)
        if shared is not None and not ignored and differing:
            raise NsaSelError(
                f"rank 0's tuning results are not for the environment of rank {rank}: {'; '.join(differing)} (rank 0's first)."
                " Remedy: run all ranks in one environment, or set NSA_SEL_AUTOTUNE=off."
            )
    agreed = None if shared is None or ignored else tuned.parse(shared[1], shared[0])[1]
    tuned.share(device, agreed)
    forget_decisions()
    return agreed.fingerprint if agreed else None
