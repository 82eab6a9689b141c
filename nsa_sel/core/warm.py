"""Warm-up: run a request once with tensors of its sizes, so that its kernels compile (and are tuned if asked) before
they are needed."""

from __future__ import annotations

import importlib
import logging
import math
from typing import Any

import msgspec
import torch
from torch import Tensor

from nsa_sel.core import decide, registry
from nsa_sel.core.call import device_info
from nsa_sel.core.decide import Decided, decide_call, forget_decisions
from nsa_sel.core.request import Request
from nsa_sel.core.run import attend
from nsa_sel.errors import NsaSelError, first_time, forget_first, warn
from nsa_sel.quantize import STORED, Scales
from nsa_sel.selection import Selection
from nsa_sel.settings import tuned
from nsa_sel.telemetry import events, log

TUNER = "nsa_sel.bench.tune.kernel_configs"  # module with tune_for(request, device), loaded by name like backends and policies


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """One warmed-up request: its backends, and each direction's first run in milliseconds, compilation included."""

    request: Request
    forward: str
    backward: str | None
    ms_forward: float
    ms_backward: float | None
    ms_tuning: float | None = None  # of quick tuning


def prepared(decided: Decided, backend: str | None) -> Decided:
    """Do what flags ask for between the decision and the run: events go to their target, kernels warm up before a
    device's first call, and the selection is validated.

    Returns:
        `decided`, decided again where a warm-up may have changed the choice.

    Raises:
        ArgumentError: a selection that breaks its promises.
    """
    call, request, settings = decided.call, decided.request, decided.call.settings
    log.follow(settings)
    if settings.autotune in ("warmup", "warmup-tune") and not capturing() and first_time("warm-up", call.q.device):
        try:
            warm(request, call.q.device, tune=settings.autotune == "warmup-tune")
        except Exception as error:
            events.emit("sel.triton.warmup", logging.ERROR, request=request, error=repr(error))
            warn(f"the warm-up failed, kernels compile at their first call: {error!r}")
        decided = decide_call(
            call.q, call.k, call.v, call.selection, call.scale, call.q_pos, request.needs_grad, backend, call.lengths, call.block_table,
            call.scales, table_rows=call.table_rows, most_rows=call.most_rows, out=call.out,
        )  # fmt: skip
    if settings.debug_triton and not decided.call.capturing():
        decided.call.selection.validate()
    return decided


def capturing() -> bool:
    """Return True if a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def warm(request: Request, device: torch.device, tune: bool) -> Warmed:
    """Tune quickly if asked, then run `request` once on `device`, forward and, if it needs gradients, backward."""
    facts = device_info(device)
    ms_tuning = _tune(request, device) if tune and facts.kind == "cuda" else None
    q, k, v, selection = _tensors(request, device)
    kind, scale, ms_backward = device.type, 1.0 / math.sqrt(request.Dk), None
    with torch.inference_mode(False), torch.set_grad_enabled(request.needs_grad), torch.autocast(kind, enabled=False):
        started = events.now(kind)
        lengths, table, scales = None, None, None
        if request.page_size is not None or request.quantized is not None:
            k, v, lengths, table, scales = _cache(request, k, v)
        o, _ = attend(decide_call(q, k, v, selection, scale, None, request.needs_grad, None, lengths, table, scales, counts=False))
        ms_forward = (events.now(kind) - started) * 1e3
        decision = events.decisions()[-1]
        if request.needs_grad:
            started = events.now(kind)
            torch.autograd.grad(o, (q, k, v), torch.zeros_like(o))
            ms_backward = (events.now(kind) - started) * 1e3
    assert decision.forward is not None, "a call that nothing may run raises"
    warmed = Warmed(
        request=request, forward=decision.forward, backward=decision.backward, ms_forward=ms_forward, ms_backward=ms_backward,
        ms_tuning=ms_tuning,
    )  # fmt: skip
    events.count("warmups", warmed.forward)
    events.emit("sel.triton.warmup", device=facts.name, fingerprint=decision.settings.fingerprint, **msgspec.structs.asdict(warmed))
    return warmed


def _tensors(request: Request, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Selection]:
    """Zeros, and evenly spread ranges: compilation depends only on sizes."""
    B, S, S_kv, G, n = request.B, request.S, request.S_kv, request.G, request.n
    with torch.inference_mode(False):
        shapes = (B, S, G, request.h, request.Dk), (B, G, S_kv, request.Dk), (B, G, S_kv, request.Dv)
        dtype = getattr(torch, request.dtype)
        q, k, v = (torch.zeros(shape, dtype=dtype, device=device, requires_grad=request.needs_grad) for shape in shapes)
        length = request.block_size or max(1, request.max_length // n)
        start = torch.arange(n, dtype=torch.int32, device=device) * length
        ranges = torch.stack((start, start + length), -1).expand(B, S, G, n, 2).contiguous()
    return q, k, v, Selection(ranges, request.block_size, min(request.max_length, S_kv), disjoint=True)


def _cache(request: Request, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Scales | None]:
    """k and v of a cache, lengths [B] of full sequences, a block table, scales. Of a paged cache: [1,G,page_size,D],
    with one page, and a table with that page alone."""
    size, table, scales = request.page_size, None, None
    lengths = torch.full((request.B,), request.S_kv, dtype=torch.int32, device=k.device)
    if size is not None:
        k, v = (x.new_zeros(1, size, request.G, x.shape[3]).transpose(1, 2) for x in (k, v))
        table = lengths.new_zeros(request.B, -(-request.S_kv // size))
    if request.quantized is not None:
        _, _, each = request.quantized.partition("/")
        one = torch.ones((), device=k.device).expand(1, request.G) if each == "tensor" else torch.ones(1, request.G, device=k.device)
        k, v = k.to(STORED), v.to(STORED)
        scales = Scales(one, one, size or 0 if each == "page" else 0, each) if each else Scales(None, None, 0, None)
    return k, v, lengths, table, scales


def _tune(request: Request, device: torch.device) -> float | None:
    """Tune the chosen backends' kernel configs quickly. Returns milliseconds, or None where ranks would tune
    separately."""
    started = events.now("cuda")
    if tuned.distributed():
        words = "ranks would tune separately; run `nsa-sel tune` before the job, and sync_tuning() in it"
        events.emit("sel.tuned.ignored", logging.WARNING, file=None, why="distributed", words=words)
        return None
    tuner: Any = importlib.import_module(TUNER)
    try:
        tuner.tune_for(request, device)
    except NsaSelError as error:  # another process tunes, or the folder can't be written; the warm-up continues
        events.emit("sel.tuned.ignored", logging.WARNING, file=None, why="not tuned", words=str(error))
    return (events.now("cuda") - started) * 1e3


def reset() -> None:
    """Drop cached decisions, counts of sharing, configuration files, failed backends and warm-ups; counters and logs
    are kept.

    For use after a configuration file, an installed package or a driver has changed.
    """
    forget_decisions()
    decide.forget_counts()
    registry.broken.clear()
    forget_first("warm-up")
