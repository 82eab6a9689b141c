"""The light tuning before a warm-up: configs near the committed ones, for one request and the backends that were chosen for it."""

from __future__ import annotations

import logging
from time import monotonic

import torch

from nsa_sel.bench.tune.backends import TUNED
from nsa_sel.bench.tune.kernel_configs import tune
from nsa_sel.bench.tune.resume import Run
from nsa_sel.bench.tune.runner import Runner, timer
from nsa_sel.bench.tune.search_space import Case, committed_settings, jobs
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import Request
from nsa_sel.errors import NsaSelError
from nsa_sel.settings import tuned
from nsa_sel.telemetry import events

REP = 10.0  # ms of timed calls per config
SECONDS = 300.0  # per backend


def tune_quickly(request: Request, decision: Decision, device: torch.device) -> float | None:
    """Tune the backends that a decision chose, for a request, and keep what was found; later calls of this process use it.

    Never fatal: where another process tunes, or the cache folder can't be written, a `sel.tuned.ignored` event says so.

    Args:
        request: the sizes to tune for.
        decision: the backends that run it.
        device: a CUDA device.

    Returns:
        Milliseconds that it took; None in a distributed job, whose ranks would tune apart.
    """
    started = events.now("cuda")
    if tuned.distributed():
        _ignore("distributed", "ranks would tune apart; run `nsa-sel tune` before the job, and sync_tuning() in it")
        return None
    case = Case(request.Dk, request.Dv, request.h, request.max_length, request.dtype)
    try:
        for backend in TUNED:
            if backend in (decision.forward, decision.backward):
                _tune(decision, device, case, backend)
    except NsaSelError as error:
        _ignore("not tuned", str(error))
    finally:
        tuned.forget()
    return (events.now("cuda") - started) * 1e3


def _tune(decision: Decision, device: torch.device, case: Case, backend: str) -> None:
    settings = committed_settings(decision.device)
    found = jobs(settings, decision.device.sm, (case,), backend, quick=True)
    with torch.cuda.device(device):
        runner = Runner(torch.device("cuda", torch.cuda.current_device()), settings, timer(REP))
        tune(Run(tuned.stamp_of(decision.device), deadline=monotonic() + SECONDS), found, runner)


def _ignore(why: str, words: str) -> None:
    events.emit("sel.tuned.ignored", logging.WARNING, file=None, why=why, words=words)
