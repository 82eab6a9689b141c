"""Whether the library does the right thing with a case: `check(case)` raises for what it should not do, and says which kernels ran."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nsa_sel.core import registry
from tests import conftest
from tests.fuzz import calls, inputs, tiles
from tests.fuzz.generators import Case, case, digest

CPU_SECONDS = 120  # of processor time, which does not grow under load, that one case may take; compiling takes most of it
CHECKS = {
    "call": calls.check_call, "varlen": calls.check_varlen, "cache": calls.check_cache, "write": calls.check_write,
    "tiles": tiles.check_tiles, "bad": inputs.check_bad, "config": inputs.check_config, "log": inputs.check_log, "file": inputs.check_file,
}  # fmt: skip


def prepare() -> None:
    """One thread and a fast interpreter, as the tests have them."""
    faulthandler.enable()
    torch.set_num_threads(1)
    contextlib.contextmanager(conftest.interpreter_of_tests.__wrapped__)().__enter__()  # for as long as the process lives


def run(first: int, count: int, device: str, kind: str | None = None, until: float = math.inf) -> dict[str, Any]:
    """A row of the ledger: the cases of these seeds, checked. kind: as of `case`. until: of `time.time()`, when no further one is begun."""
    begun, kinds, ran, failed = time.perf_counter(), Counter[str](), calls.Ran(), []
    cases = [case(seed, device, kind) for seed in range(first, first + count)]
    of_cases = digest(cases)  # before they are checked, which may write into one
    for one in cases:
        if time.time() > until:
            break
        kinds[one.kind] += 1
        try:
            ran += check(one)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            failed.append([one.seed, one.kind, f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:300]}"])
    return {
        "first": first, "count": count, "device": device, "digest": of_cases, "failed": failed, "kinds": dict(sorted(kinds.items())),
        "ran": dict(sorted(ran.items())), "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip


def check(case: Case) -> calls.Ran:
    """How often which backend ran which way, and how often something was refused. Raises for anything that is wrong."""
    with _limited(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="nsa-sel: .* failed")  # packed SDPA would hide what failed
        registry.forget_broken()
        ran = calls.Ran()
        with tiles.counted(ran) if case.device == "cuda" else contextlib.nullcontext():
            return CHECKS[case.kind](case, case.facts) + ran


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """TimeoutError instead of a hang."""

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {CPU_SECONDS} s of processor time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
