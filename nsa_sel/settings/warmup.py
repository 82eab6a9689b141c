"""Warm-up: compile the kernels that the policy would choose, forward and backward, before the work begins, and log how long it took."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from nsa_sel.attention import selection_attention
from nsa_sel.core.call import device_info
from nsa_sel.core.request import Request, example_request
from nsa_sel.errors import ArgumentError, NsaSelError
from nsa_sel.selection import Selection
from nsa_sel.serving import selection_attention_with_kvcache
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for
from nsa_sel.telemetry import events

_started: set[torch.device] = set()  # devices whose first call has warmed up, or is about to


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a warm-up: its backends, and how long each direction took the first time, compilation included."""

    request: Request
    forward: str
    backward: str | None
    ms_forward: float
    ms_backward: float | None
    ms_tuning: float | None = None  # of the light tuning before it


def warmup(
    device: torch.device | str | None = None, requests: Sequence[Request | Mapping[str, Any]] | None = None, tune: bool = False
) -> tuple[Warmed, ...]:
    """Run each request once with tensors of its sizes, so that later calls of its kind compile nothing.

    One `sel.triton.warmup` event per request holds the times.

    Args:
        device: by default the current CUDA device, else the CPU.
        requests: `Request`s, or mappings of their fields (B, S, S_kv, G, h, Dk, Dv, n, block_size, max_length, dtype, needs_grad,
            page_size) over those of the example. By default the example, an 8k prefill with gradients, and its decode step.
        tune: on a GPU, first tune the kernel configs near the committed ones, for the backends that were chosen, and keep the result.

    Returns:
        The backends and times of each request.

    Raises:
        ArgumentError: a bad request; tune=True without a GPU; or a CUDA graph capture, in which nothing may compile or tune.
        BackendError: as a call.
    """
    if capturing():
        raise ArgumentError("warmup()", "called within a CUDA graph capture", "outside of one", "call it before torch.cuda.graph(...)")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    if tune and where.type != "cuda":
        raise ArgumentError("tune", True, "False on a CPU", "Triton needs a GPU: leave it out")
    return tuple(_warm(request, where, tune) for request in _requests(requests, where))


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def first_call(request: Request, device: torch.device) -> bool:
    """Warm up before the first call on a device, for NSA_SEL_AUTOTUNE=warmup. Never fatal.

    Args:
        request: of the call.
        device: of the call.

    Returns:
        Whether it warmed up now. Within a CUDA graph capture it waits for a later call.
    """
    if device in _started or capturing():
        return False
    _started.add(device)
    tune = settings_for(device_info(device)).autotune == "warmup-tune"
    try:
        _warm(request, device, tune)
    except Exception as error:
        events.emit("sel.triton.warmup", logging.ERROR, request=request, error=repr(error))
        warnings.warn(f"nsa-sel: the warm-up failed, calls compile when they come: {error!r}", RuntimeWarning, stacklevel=3)
    return True


def forget_warmups() -> None:
    """Warm up again at the next first call."""
    _started.clear()


def _requests(given: Sequence[Request | Mapping[str, Any]] | None, device: torch.device) -> list[Request]:
    example = example_request(needs_grad=True)
    if given is None:
        if device.type == "cpu":
            return [msgspec.structs.replace(example, S=64, S_kv=2048)]  # sizes do not matter to what is compiled there
        return [example, msgspec.structs.replace(example, S=1, needs_grad=False)]
    return [request if isinstance(request, Request) else _request(request, example) for request in given]


def _request(fields: Mapping[str, Any], example: Request) -> Request:
    values = {**msgspec.to_builtins(example), "S_kv": fields.get("S", example.S_kv), **fields}
    try:
        if not set(fields) <= set(Request.__struct_fields__):
            raise msgspec.ValidationError("a field of another name")
        request = msgspec.convert(values, Request)
    except msgspec.ValidationError as error:
        allowed = f"the fields of Request: {', '.join(Request.__struct_fields__)}"
        raise ArgumentError("requests", f"{dict(fields)} ({error})", allowed, "mend the field") from error
    if "max_length" in fields:
        return request
    return msgspec.structs.replace(request, max_length=min(request.S_kv, request.n * (request.block_size or request.S_kv)))


def _warm(request: Request, device: torch.device, tune: bool) -> Warmed:
    facts = device_info(device)
    ms_tuning = _tune(request, device) if tune and facts.kind == "cuda" else None
    q, k, v, selection = _tensors(request, device)
    kind, ms_backward = device.type, None
    with torch.inference_mode(False), torch.set_grad_enabled(request.needs_grad), torch.autocast(kind, enabled=False):
        started = events.now(kind)
        o = selection_attention(q, k, v, selection) if request.page_size is None else _over_pages(request, q, k, v, selection)
        ms_forward = (events.now(kind) - started) * 1e3
        decision = events.decisions()[-1]
        if request.needs_grad:
            started = events.now(kind)
            torch.autograd.grad(o, (q, k, v), torch.zeros_like(o))
            ms_backward = (events.now(kind) - started) * 1e3
    assert decision.forward is not None, "selection_attention refuses before"
    warmed = Warmed(
        request=request, forward=decision.forward, backward=decision.backward, ms_forward=ms_forward, ms_backward=ms_backward,
        ms_tuning=ms_tuning,
    )  # fmt: skip
    events.count("warmups", warmed.forward)
    events.emit("sel.triton.warmup", device=facts.name, fingerprint=decision.settings.fingerprint, **msgspec.structs.asdict(warmed))
    return warmed


def _tensors(request: Request, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Selection]:
    """Zeros, and evenly spread ranges: only sizes decide what is compiled."""
    B, S, S_kv, G, n = request.B, request.S, request.S_kv, request.G, request.n
    with torch.inference_mode(False):
        shapes = (B, S, G, request.h, request.Dk), (B, G, S_kv, request.Dk), (B, G, S_kv, request.Dv)
        dtype = getattr(torch, request.dtype)
        q, k, v = (torch.zeros(shape, dtype=dtype, device=device, requires_grad=request.needs_grad) for shape in shapes)
        length = request.block_size or max(1, request.max_length // n)
        start = torch.arange(n, dtype=torch.int32, device=device) * length
        ranges = torch.stack((start, start + length), -1).expand(B, S, G, n, 2).contiguous()
    return q, k, v, Selection(ranges, request.block_size, min(request.max_length, S_kv), disjoint=True)


def _over_pages(request: Request, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, selection: Selection) -> torch.Tensor:
    """o of the request over a paged cache whose block table names one page everywhere."""
    B, S_kv, size = request.B, request.S_kv, request.page_size or 0
    k_cache, v_cache = (x.new_zeros(1, size, request.G, x.shape[3]) for x in (k, v))
    lengths = torch.full((B,), S_kv, dtype=torch.int32, device=q.device)
    table = torch.zeros(B, -(-S_kv // size), dtype=torch.int32, device=q.device)
    o: torch.Tensor = selection_attention_with_kvcache(q, k_cache, v_cache, selection, lengths, table)
    return o


def _tune(request: Request, device: torch.device) -> float | None:
    """Milliseconds of tuning the chosen backends' kernel configs quickly; None where that is not possible."""
    from nsa_sel.bench.tune.quick import tune_for  # loads the benches: for this alone

    started = events.now("cuda")
    if tuned.distributed():
        words = "ranks would tune apart; run `nsa-sel tune` before the job, and sync_tuning() in it"
        events.emit("sel.tuned.ignored", logging.WARNING, file=None, why="distributed", words=words)
        return None
    try:
        tune_for(request, device)
    except NsaSelError as error:  # another process tunes, or the folder can't be written: the warm-up goes on
        events.emit("sel.tuned.ignored", logging.WARNING, file=None, why="not tuned", words=str(error))
    return (events.now("cuda") - started) * 1e3
