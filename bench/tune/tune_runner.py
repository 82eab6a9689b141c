"""What `nsa-sel tune` does with one launch on a GPU: check that it ran, that its results are those of the committed one, and time it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from nsa_sel.bench.core import cases, timing
from nsa_sel.bench.questions.paged_caches import in_pages
from nsa_sel.bench.tune.tune import Times, watched
from nsa_sel.bench.tune.tune_space import BLOCK, PROBLEMS, Job
from nsa_sel.core import registry
from nsa_sel.core.call import Call, device_info
from nsa_sel.errors import NsaSelError
from nsa_sel.selection import Selection
from nsa_sel.settings.config import KernelConfig, Settings, Way
from nsa_sel.telemetry import events

# Two launches add in another order: roundings of the largest value, and of the mean, in which their results may differ.
ROUNDINGS = {torch.float16: (8, 4), torch.bfloat16: (8, 4), torch.float32: (64, 32), torch.float64: (64, 32)}

Time = Callable[[Callable[[], Any], Way], Times]


class WrongResult(NsaSelError, RuntimeError):
    """A launch gave other results than the committed one, or not the same twice, or was not used at all."""


class Setting(NamedTuple):
    """A problem on the device, with the gradient of o."""

    name: tuple[Any, ...]
    call: Call
    do: Tensor


def timer(rep: float) -> Time:
    """Times of whole calls on the GPU, plans included; decoding by graph replay, as servers run it."""

    def time(work: Callable[[], Any], way: Way) -> Times:
        found = (timing.replayed_milliseconds if way == "decode" else timing.milliseconds)(work, rep)
        return found[0], found[1], found[2]

    return time


class Runner:
    """Measures launches on one device; keeps the last case's problems, and the committed launch's results for the last one."""

    def __init__(self, device: torch.device, settings: Settings, time: Time) -> None:
        # Flags that override launches would make all candidates alike.
        self.settings = msgspec.structs.replace(settings, block_l=None, block_d=None, block_dv=None, triton_double_buffer=None)
        self.device, self.time = device, time
        self.prepared: dict[tuple[Any, ...], Setting] = {}
        self.wanted: tuple[Any, tuple[Tensor, ...]] | None = None

    def __call__(self, job: Job, problem: str, config: KernelConfig) -> Times:
        """Median, 20th and 80th percentile in ms. Raises what the launch raises, WrongResult, or ContextLost."""
        try:
            with torch.no_grad(), watched(job.launch_id(config)):
                return self._measure(job, problem, config)
        except torch.OutOfMemoryError:
            self.prepared, self.wanted = {}, None
            torch.cuda.empty_cache()
            raise

    def _measure(self, job: Job, problem: str, config: KernelConfig) -> Times:
        setting = self._setting(job, problem)
        if self.wanted is None or self.wanted[0] != (job.key, job.kernel, setting.name):
            self.wanted = None
            results = _checked_results(self._work(job, setting, job.committed), job.launch_id(job.committed))
            self.wanted = ((job.key, job.kernel, setting.name), results)
        work = self._work(job, setting, config)
        agree(_checked_results(work, job.launch_id(config)), self.wanted[1])
        return self.time(work, job.key.way)

    def _setting(self, job: Job, problem: str) -> Setting:
        name = (job.case, problem)
        if name not in self.prepared:
            self.wanted = None  # frees memory first
            self.prepared = {of: setting for of, setting in self.prepared.items() if of[0] == job.case}
            self.prepared[name] = prepare(job, problem, self.device, self.settings)
        return self.prepared[name]

    def _work(self, job: Job, setting: Setting, config: KernelConfig) -> Callable[..., tuple[Tensor, ...]]:
        """One whole call with a launch; with debug=True, events name the launches that were used."""
        module = registry.load(job.key.backend)
        kernels = {**self.settings.kernels, job.kernel: config}
        call = replace(setting.call, settings=msgspec.structs.replace(self.settings, kernels=kernels, debug_triton=False))
        given = call.selection

        def fresh(debug: bool) -> Call:
            settings = msgspec.structs.replace(call.settings, debug_triton=True) if debug else call.settings
            return replace(call, settings=settings, selection=Selection(given.ranges, given.block_size, given.max_length, disjoint=True))

        forward_results = None if job.key.way != "backward" else module.forward(setting.call)

        def work(debug: bool = False) -> tuple[Tensor, ...]:
            if forward_results is None:
                return module.forward(fresh(debug))
            return module.backward(fresh(debug), *forward_results, setting.do, None)

        return work


def prepare(job: Job, name: str, device: torch.device, settings: Settings) -> Setting:
    """Random q, k, v. Rows select L keys, or all where L is more: as the language model does, or at random, as the problem says."""
    problem, sizes = PROBLEMS[name], job.case
    n = min(max(1, sizes.L // BLOCK), problem.S_kv // BLOCK)
    case = cases.Case(
        "tune",
        "real" if problem.real else "random",
        problem.B,
        problem.S,
        problem.S_kv,
        problem.G,
        sizes.h,
        sizes.Dk,
        sizes.Dv,
        n,
        BLOCK,
        sizes.dtype,
    )
    selection = cases.make_selection(case, device)
    if not problem.blocks:
        selection = Selection(selection.ranges, None, n * BLOCK, disjoint=True)
    q, k, v, do = cases.make_inputs(case, device)
    call = Call(q, k, v, selection, None, sizes.Dk**-0.5, settings, device_info(device))
    return Setting((job.case, name), paged(call, problem.page) if problem.page else call, do)


def paged(call: Call, page: int) -> Call:
    """The same call over pages of so many keys, in another order than the sequences' own."""
    B, _, S_kv, _ = call.k.shape
    table = torch.arange(B * S_kv // page, dtype=torch.int32, device=call.k.device).flip(0).view(B, -1)
    k, v = (in_pages(x.transpose(1, 2), table.flatten().long(), page).transpose(1, 2) for x in (call.k, call.v))
    lengths = torch.full((B,), S_kv, dtype=torch.int32, device=call.k.device)
    return replace(call, k=k, v=v, lengths=lengths, block_table=table)


def _checked_results(work: Callable[..., tuple[Tensor, ...]], launch: str) -> tuple[Tensor, ...]:
    """The results on memory that held NaN, the same twice, from a run that used `launch`."""
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    try:
        with launches_used() as used:
            results = work(debug=True)
        again = work(debug=False)
    finally:
        torch.use_deterministic_algorithms(False)
    if launch not in used:
        raise WrongResult(f"this problem does not use {launch}; it used {', '.join(used)}")
    if not all(torch.equal(a, b) for a, b in zip(results, again, strict=True)):
        raise WrongResult(f"{launch} does not give the same results twice")
    return results


@contextlib.contextmanager
def launches_used() -> Iterator[list[str]]:
    """The ids of the launches that `sel.triton.kernel` events name meanwhile."""
    used: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "sel.triton.kernel":
                used.append(record.__dict__["nsa_sel"]["config"])

    listener, level = Listener(), events.LOGGER.level
    events.LOGGER.addHandler(listener)
    events.LOGGER.setLevel(logging.INFO)
    try:
        yield used
    finally:
        events.LOGGER.removeHandler(listener)
        events.LOGGER.setLevel(level)


def agree(mine: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """WrongResult unless two sets of results differ by roundings alone; -inf (lse of empty rows) must stand at the same places."""
    for number, (a, b) in enumerate(zip(mine, wanted, strict=True)):
        most, mean = ROUNDINGS[a.dtype]
        eps = torch.finfo(a.dtype).eps
        empty = b == float("-inf")
        if not torch.equal(a == float("-inf"), empty):
            raise WrongResult(f"result {number} is -inf at other places than with the committed launch")
        error = torch.where(empty, 0.0, a.float() - b.float()).abs()
        size = torch.where(empty, 0.0, b.float()).abs()
        if not bool(error.isfinite().all()):
            raise WrongResult(f"result {number} has values that were not written, or are not finite")
        found, allowed = (float(error.max()), float(error.mean())), (most * eps * float(size.max()), mean * eps * float(size.mean()))
        if found[0] > allowed[0] or found[1] > allowed[1]:
            words = ", ".join(
                f"{name} {x:.3g}, allowed {limit:.3g}" for name, x, limit in zip(("most", "mean"), found, allowed, strict=True)
            )
            raise WrongResult(f"result {number} differs from the committed launch's: {words}")
