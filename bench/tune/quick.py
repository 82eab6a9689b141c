"""The quick tuning before a warm-up: configs near the committed ones, for one request and the backends that would run it."""

from __future__ import annotations

from time import monotonic

import torch

from nsa_sel.bench.tune.kernel_configs import tune
from nsa_sel.bench.tune.resume import Run
from nsa_sel.bench.tune.runner import Runner, timer
from nsa_sel.bench.tune.search_space import TUNED, Case, committed_settings, jobs
from nsa_sel.core.call import device_info
from nsa_sel.core.decide import decide
from nsa_sel.core.request import Request
from nsa_sel.settings import tuned

REP = 10.0  # ms of timed calls per config
SECONDS = 300.0  # per backend


def tune_for(request: Request, device: torch.device) -> None:
    """Tune the backends that would run a request for its sizes, and keep what was found; later calls of this process use it.

    Args:
        request: the sizes.
        device: a CUDA device.

    Raises:
        BackendError: no backend may run the request.
        ArgumentError, ConfigError, ContextLost: as `kernel_configs.tune`.
    """
    facts = device_info(device)
    decision, settings = decide(request, facts), committed_settings(facts)
    case = Case(request.Dk, request.Dv, request.h, request.max_length, request.dtype)
    try:
        for backend in TUNED:
            if backend in (decision.forward, decision.backward):
                found = jobs(settings, facts.sm, (case,), backend, quick=True)
                with torch.cuda.device(device):
                    runner = Runner(torch.device("cuda", torch.cuda.current_device()), settings, timer(REP))
                    tune(Run(tuned.stamp_of(facts), deadline=monotonic() + SECONDS), found, runner)
    finally:
        tuned.forget()
