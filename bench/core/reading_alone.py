"""What reading takes of a decoding call: the kernel of cupy-cuda that computes it, with consumers that compute nothing (reading_alone.cu).

Its grid, clusters, TMA loads and barriers are those of the call. It is a contender of benches alone: no backend, and nothing of the library
starts it. Its rows say `"computes": "nothing"`.
"""

from __future__ import annotations

from importlib import resources
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import launch
from nsa_sel.backends.cupy_cuda.compiler import constants
from nsa_sel.bench.core.contenders import Contender, Ready
from nsa_sel.bench.core.parity import Problem
from nsa_sel.errors import NsaSelError

BACKEND, KERNEL = "cupy-cuda", "forward_blocks.cu"
READING = {"reading-alone": 0, "reading-with-results": 1}  # RESULTS of reading_alone.cu


def readings(of: Contender) -> list[Contender]:
    """What reading takes of a contender of `BACKEND`, alone, and with q and the results beside it; named as it, for its cache."""
    return [_reading(of, of.name.replace(BACKEND, name), results) for name, results in READING.items()]


def _reading(of: Contender, name: str, results: int) -> Contender:
    def prepare(problem: Problem) -> Ready:
        source = resources.files("nsa_sel") / "bench" / "core" / "reading_alone.cu"
        q, k, v = (x.detach() for x in (problem.q, problem.k, problem.v))
        with torch.no_grad(), mock.patch.object(launch, "start", wraps=launch.start) as start:
            ready = of.prepare(problem)
            o = ready.call(q, k, v)
        calls = start.call_args_list
        if [call.args[0] for call in calls] != [KERNEL]:
            raise NsaSelError(f"{name}: {[call.args[0] for call in calls]} ran, which is not {KERNEL} alone. Remedy: leave this case out.")
        _, macros, device, ctas, threads, shared, _, _, *values = calls[0].args
        macros, others = constants(**dict(macros), RESULTS=results), dict[str, Any](calls[0].kwargs)
        lse = torch.empty(o.shape[:-1], dtype=torch.float32, device=o.device)

        def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            launch.start(str(source), macros, device, ctas, threads, shared, o.data_ptr(), lse.data_ptr(), *values, **others)
            return lse

        return Ready(read, ready.trained)  # which keeps what the call was prepared with

    return Contender(name, prepare, of.lacks, of.refuses, checked=False, computes_nothing=True, directions=("decode",))
