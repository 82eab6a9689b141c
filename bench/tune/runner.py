"""Time one kernel config on a GPU, after checking that it was used and that its results are those of the committed config."""

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
from nsa_sel.bench.core.timing import Timing
from nsa_sel.bench.tune.kernel_configs import Times
from nsa_sel.bench.tune.resume import context_loss
from nsa_sel.bench.tune.search_space import BLOCK, PROBLEMS, Case, Job
from nsa_sel.core import registry
from nsa_sel.core.call import Call, device_info
from nsa_sel.errors import NsaSelError
from nsa_sel.selection import Selection
from nsa_sel.settings.schema import KernelConfig, Settings, Way
from nsa_sel.telemetry import events

# Two configs sum in different orders. Allowed error, in units of eps: of the largest value, and of the mean.
ROUNDINGS = {torch.float16: (8, 4), torch.bfloat16: (8, 4), torch.float32: (64, 32), torch.float64: (64, 32)}

Time = Callable[[Callable[[], Any], Way], Times]


class WrongResult(NsaSelError, RuntimeError):
    """A config gave other results than the committed one, or not the same twice, or was not used at all."""


class Prepared(NamedTuple):
    """A problem on the device, with the gradient of o."""

    call: Call
    do: Tensor


def timer(rep: float) -> Time:
    """A function that times whole calls on the GPU for `rep` ms, plans included; decoding by graph replay, as servers run it."""

    def time(work: Callable[[], Any], way: Way) -> Times:
        found = (timing.replayed_milliseconds if way == "decode" else timing.milliseconds)(work, Timing(rep))
        return found[0], found[1], found[2]

    return time


class Runner:
    """Measures kernel configs on one device; keeps the last case's problems, and the committed config's last results.

    Args:
        device: where the kernels run.
        settings: with the committed configs.
        time: takes the times of a call; see `timer`.
    """

    def __init__(self, device: torch.device, settings: Settings, time: Time) -> None:
        # Without the flags that override configs, which would make all candidates equal.
        self.settings = msgspec.structs.replace(settings, block_l=None, block_d=None, block_dv=None, triton_double_buffer=None)
        self.device, self.time = device, time
        self.prepared: dict[tuple[Case, str], Prepared] = {}
        self.expected: tuple[Any, tuple[Tensor, ...]] | None = None  # what it is of, and the committed config's results

    def __call__(self, job: Job, problem: str, config: KernelConfig) -> Times:
        """Median, 20th and 80th percentile in ms.

        Raises:
            WrongResult: the config's results are not those of the committed one.
            ContextLost: the config broke the CUDA context.
        """
        try:
            with torch.no_grad(), context_loss(job.config_id(config)):
                return self._measure(job, problem, config)
        except torch.OutOfMemoryError:
            self.prepared, self.expected = {}, None
            torch.cuda.empty_cache()
            raise

    def _measure(self, job: Job, problem: str, config: KernelConfig) -> Times:
        prepared = self._prepared(job, problem)
        of = (job.key, job.kernel, job.case, problem)
        if self.expected is None or self.expected[0] != of:
            self.expected = None
            self.expected = of, _checked_results(self._work(job, prepared, job.committed), job.config_id(job.committed))
        work = self._work(job, prepared, config)
        check_agreement(_checked_results(work, job.config_id(config)), self.expected[1])
        return self.time(work, job.key.way)

    def _prepared(self, job: Job, problem: str) -> Prepared:
        name = (job.case, problem)
        if name not in self.prepared:
            self.expected = None  # frees memory first
            self.prepared = {of: prepared for of, prepared in self.prepared.items() if of[0] == job.case}
            self.prepared[name] = prepare(job, problem, self.device, self.settings)
        return self.prepared[name]

    def _work(self, job: Job, prepared: Prepared, config: KernelConfig) -> Callable[..., tuple[Tensor, ...]]:
        """One whole call with a config; with debug=True, events name the configs that were used."""
        module = registry.load(job.key.backend)
        kernels = {**self.settings.kernels, job.kernel: config}
        call = replace(prepared.call, settings=msgspec.structs.replace(self.settings, kernels=kernels, debug_triton=False))
        given = call.selection

        def fresh(debug: bool) -> Call:
            settings = msgspec.structs.replace(call.settings, debug_triton=True) if debug else call.settings
            return replace(call, settings=settings, selection=Selection(given.ranges, given.block_size, given.max_length, disjoint=True))

        forward_results = None if job.key.way != "backward" else module.forward(prepared.call)

        def work(debug: bool = False) -> tuple[Tensor, ...]:
            if forward_results is None:
                return module.forward(fresh(debug))
            return module.backward(fresh(debug), *forward_results, prepared.do, None)

        return work


def prepare(job: Job, name: str, device: torch.device, settings: Settings) -> Prepared:
    """Random q, k, v, and a selection of L keys per row, or of all keys where L is more."""
    problem, sizes = PROBLEMS[name], job.case
    n = min(max(1, sizes.L // BLOCK), problem.S_kv // BLOCK)
    kind = "real" if problem.real else "random"
    case = cases.Case("tune", kind, problem.B, problem.S, problem.S_kv, problem.G, sizes.h, sizes.Dk, sizes.Dv, n, BLOCK, sizes.dtype)
    q, k, v, do = cases.make_inputs(case, device)
    call = Call(q, k, v, cases.make_selection(case, device), None, case.Dk**-0.5, settings, device_info(device))
    if not problem.blocks:
        call = replace(call, selection=Selection(call.selection.ranges, None, n * BLOCK, disjoint=True))
    return Prepared(paged(call, problem.page) if problem.page else call, do)


def paged(call: Call, page: int) -> Call:
    """The same call over pages of so many keys, which lie in memory in reverse order."""
    B, _, S_kv, _ = call.k.shape
    table = torch.arange(B * S_kv // page, dtype=torch.int32, device=call.k.device).flip(0).view(B, -1)

    def in_pages(x: Tensor) -> Tensor:
        """[B,G,S_kv,D] as a view [pages,G,page,D] of contiguous pages [pages,page,G,D]."""
        pages: Tensor = x.transpose(1, 2).unflatten(1, (-1, page)).flatten(0, 1)  # type: ignore[no-untyped-call]
        return pages.flip(0).contiguous().transpose(1, 2)

    lengths = torch.full((B,), S_kv, dtype=torch.int32, device=call.k.device)
    return replace(call, k=in_pages(call.k), v=in_pages(call.v), lengths=lengths, block_table=table)


def _checked_results(work: Callable[..., tuple[Tensor, ...]], config: str) -> tuple[Tensor, ...]:
    """The results on memory that held NaN, the same twice, from a run that used `config`."""
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    try:
        with configs_used() as used:
            results = work(debug=True)
        again = work(debug=False)
    finally:
        torch.use_deterministic_algorithms(False)
    if config not in used:
        raise WrongResult(f"this problem does not use {config}; it used {', '.join(used)}")
    if not all(torch.equal(a, b) for a, b in zip(results, again, strict=True)):
        raise WrongResult(f"{config} does not give the same results twice")
    return results


@contextlib.contextmanager
def configs_used() -> Iterator[list[str]]:
    """Return the ids of the chosen configs that `sel.triton.kernel` events name inside the block."""
    used: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "sel.triton.kernel":
                used.append(record.__dict__["nsa_sel"]["chosen"])

    listener, level = Listener(), events.LOGGER.level
    events.LOGGER.addHandler(listener)
    events.LOGGER.setLevel(logging.INFO)
    try:
        yield used
    finally:
        events.LOGGER.removeHandler(listener)
        events.LOGGER.setLevel(level)


def check_agreement(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Raise WrongResult unless both differ by `ROUNDINGS` at most, and are -inf (lse of empty rows) at the same places."""
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        eps = torch.finfo(a.dtype).eps
        empty = b == float("-inf")
        if not torch.equal(a == float("-inf"), empty):
            raise WrongResult(f"result {number} is -inf at other places than with the committed config")
        error = torch.where(empty, 0.0, a.float() - b.float()).abs()
        size = torch.where(empty, 0.0, b.float()).abs()
        if not bool(error.isfinite().all()):
            raise WrongResult(f"result {number} has values that were not written, or are not finite")
        errors, sizes = (float(error.max()), float(error.mean())), (float(size.max()), float(size.mean()))
        allowed = [roundings * eps * size for roundings, size in zip(ROUNDINGS[a.dtype], sizes, strict=True)]
        if errors[0] > allowed[0] or errors[1] > allowed[1]:
            named = zip(("most", "mean"), errors, allowed, strict=True)
            words = ", ".join(f"{name} {x:.3g}, allowed {limit:.3g}" for name, x, limit in named)
            raise WrongResult(f"result {number} differs from the committed config's: {words}")
