"""Time whole calls with every backend on this GPU: for the smallest L for which Triton pays, and for the cost models of
policies/cost.py.

Calls use the kernel configs in force, so costs are measured after tuning, and again when configs change. Rows are kept
beside the user's file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nsa_sel.bench.core import cases, session, store, timing
from nsa_sel.bench.core.cases import CHOICE, Case
from nsa_sel.bench.core.contenders import PACKED, Problem, make_problem, named
from nsa_sel.bench.core.session import Sample, checked_error
from nsa_sel.bench.core.store import DIRECTIONS, Row
from nsa_sel.bench.core.timing import Timing, WrongResult
from nsa_sel.bench.threshold_optimizer import TRITON, thresholds
from nsa_sel.bench.tune import cost_fit
from nsa_sel.bench.tune.cost_fit import TERMS, model_of, phase_of
from nsa_sel.bench.tune.derive import threshold
from nsa_sel.bench.tune.search_space import SPACES, kernel_name
from nsa_sel.bench.tune.tuned_file import Measurements, Run, locked, rewrite, written
from nsa_sel.choosing import compressed_attention
from nsa_sel.core import registry
from nsa_sel.core.backend import Offer, PolicyInput
from nsa_sel.core.call import Rule
from nsa_sel.core.request import DeviceInfo
from nsa_sel.policies.cost import modelled
from nsa_sel.policies.guards import within_limits
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.flags import COMMIT_FLAG, CONFIG_FLAG, FLAGS
from nsa_sel.settings.schema import Costs, Direction, Threshold
from nsa_sel.testing import new_memory_is_nan

ROWS, IDENTITY = ".calls.jsonl", (*Case._fields, "direction", "backend", "launches")  # of the file of rows
ORDER: tuple[Direction, ...] = ("forward", "decode", "backward")  # used as soon as its rows are complete: the quick ones first
ORACLE_ROWS = 16  # compared with the oracle
MAX_ERROR = 1e-3  # mean absolute error of o, and of each gradient
MAX_ROWS = 8192  # of a case that slow backends are measured on
LEAST_SAME = 0.99  # of the chosen blocks: scores that agree to five digits may swap
REP = 20.0  # ms of timed calls

Measure = Callable[[Row], Row]


@contextlib.contextmanager
def without_flags() -> Iterator[None]:
    """Run without the user's flags and configuration file: every backend may run, as committed and tuned, and nothing
    is logged.
    """
    with mock.patch.dict(os.environ):
        for name in (*(flag.name for flag in FLAGS), CONFIG_FLAG):
            os.environ.pop(name, None)
        os.environ["NSA_TRITON_SEL_FORCE"] = "1"  # a device rule may keep Triton off until someone measures
        yield


def collect(run: Run, asked: Sequence[Row], measure: Measure) -> list[Row]:
    """Measure the rows that are missing, until the run is over, and return all that the file then has.

    Args:
        run: the caller holds the lock.
        asked: rows with the fields of IDENTITY.
        measure: adds the times to a row.

    Raises:
        ContextLost: a kernel broke the CUDA context.
    """
    facts = {field: getattr(run.stamp, field) for field in ("device", "driver", "torch", "triton", "nsa_sel", "kernels")}
    facts |= {"commit": os.environ.get(COMMIT_FLAG), "command": store.command()}
    kept = Measurements(run.stamp, ROWS, IDENTITY)
    for number, row in enumerate(asked):
        if row not in kept and not run.is_over():
            run.tell(f"{row['case']} {row['direction']} {row['backend']}", number / len(asked))
            kept.measure({**row, **facts}, measure)
    return kept.of(asked)


# Thresholds


@without_flags()
def measure_thresholds(run: Run, measure: Measure, ways: Sequence[Direction]) -> dict[Direction, Threshold]:
    """Measure both sides of the threshold cases, and write the thresholds of the directions whose rows are complete.

    The rule is that of the committed profiles (threshold_optimizer.py). A direction with a case that failed keeps the
    threshold that it had.

    Args:
        run: of `nsa-sel tune`.
        measure: adds the times to a row, as `Runner` does.
        ways: directions.

    Returns:
        The thresholds that were written.
    """
    asked = [
        {**case._asdict(), "direction": DIRECTIONS[way], "backend": side, "launches": ""}
        for case in cases.THRESHOLD
        for way in ways
        if (case.S == 1) == (way == "decode")
        for side in (TRITON, PACKED)
    ]
    found: dict[Direction, Threshold] = {}
    with locked(run.stamp):
        timed = store.measured(collect(run, asked, measure))
        for way in ways:
            of_way = [row for row in timed if row["direction"] == DIRECTIONS[way]]
            if of_way and len(of_way) == sum(row["direction"] == DIRECTIONS[way] for row in asked):
                found[way] = threshold(thresholds(of_way)[0])
        rewrite(run.stamp, thresholds={**written(run.stamp).thresholds, **found})
    return found


# Costs


@without_flags()
def wanted(device: DeviceInfo, ways: Sequence[Direction]) -> list[Row]:
    """Return the rows to measure: case, direction, backend, and under "launches" the kernel configs in force for it
    now.
    """
    settings, rows = settings_for(device), []
    for way, case in ((way, case) for way in ORDER if way in ways for case in (*cases.COSTS, *cases.CHOICES)):
        if cases.decodes(case) != (way == "decode"):
            continue
        request = cost_fit.request_of(case, None, way == "backward")
        asked = PolicyInput(request, device, settings, "backward" if way == "backward" else "forward")
        kernels = tuned.apply(settings, request, device).kernels
        for name, backend in registry.backends(request.kind).items():
            has_model = request.phase(way == "backward") in backend.cost_terms and modelled(backend, request, way == "backward")
            runs = not registry.missing(name) and not list(within_limits(asked, Offer(backend)))
            if has_model and runs and not (backend.slow and case.S > MAX_ROWS):
                spaces = [space for space in SPACES if (space.backend, space.way) == (name, way)]
                configs = sorted(kernel_name(space, case.Dk, case.Dv, case.dtype) for space in spaces)
                launches = ", ".join(kernels[config].config_id(config) for config in configs)
                rows.append({**case._asdict(), "direction": DIRECTIONS[way], "backend": name, "launches": launches})
    return rows


@without_flags()
def measure_costs(run: Run, device: DeviceInfo, measure: Measure, ways: Sequence[Direction]) -> tuple[Costs | None, int]:
    """Measure the rows that are missing, and write the models of the directions whose rows are complete.

    Models that the file has stay until the rows of all their directions are complete again.

    Args:
        run: of `nsa-sel tune`.
        device: what decisions depend on.
        measure: adds the times to a row.
        ways: directions to measure.

    Returns:
        The models of all complete directions, None if there are none; and how many rows of these directions are left.
    """

    def phases(costs: Costs) -> set[str]:
        return {name.partition("/")[2] for name in costs.models}

    with locked(run.stamp):
        tuned.forget()  # the configs in force are those of the file now
        asked = wanted(device, ways)
        left = len(asked) - len(collect(run, asked, measure))
        every = wanted(device, ORDER)
        found, before = fitted(every, Measurements(run.stamp, ROWS, IDENTITY).of(every)), written(run.stamp).costs
        if found is not None and (before is None or phases(before) <= phases(found)):
            rewrite(run.stamp, costs=found)
            tuned.forget()
    return found, left


def fitted(every: Sequence[Row], done: Sequence[Row]) -> Costs | None:
    """Return the models of the phases all of whose rows were measured, None if no phase has two backends to compare.

    A backend that mostly fails has fewer rows than its model has terms, and gets no model: the policy then prefers the
    others.

    Args:
        every: the rows of all directions, without times.
        done: those of them that were measured.
    """
    counts = Counter(map(phase_of, done))
    complete = {phase for phase, count in Counter(map(phase_of, every)).items() if counts[phase] == count}
    timed = [row for row in store.measured(done) if phase_of(row) in complete and cost_fit.is_cost_row(row)]
    fit = {name for name, count in Counter(map(model_of, timed)).items() if count > len(set(TERMS[name]) - cost_fit.OF_CACHES)}
    compared = Counter(name.partition("/")[2] for name in fit)
    used = [row for row in timed if model_of(row) in fit and compared[phase_of(row) or ""] > 1]
    if not used:
        return None
    digest = hashlib.sha256("".join(json.dumps(row, sort_keys=True) for row in used).encode()).hexdigest()[:16]
    return cost_fit.costs(used, (f"`nsa-sel tune` on this machine: {len(used)} rows, sha256 {digest}",))


# Measuring


class Runner:
    """Time one backend on one case, after its results were checked. Keeps the last case's tensors.

    Args:
        device: "cuda" or "cpu".
        rep: ms of timed calls.
    """

    def __init__(self, device: str = "cuda", rep: float = REP) -> None:
        self.device, self.timing = device, Timing(rep)
        self.prepared: tuple[Case, Any] | None = None

    def __call__(self, row: Row) -> Row:
        """Return the row with its times. Raises WrongResult."""
        try:
            return self._choose(row) if row["distribution"] == CHOICE else self._attend(row)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise

    def _prepared(self, case: Case, make: Callable[[Case], Any]) -> Any:
        if self.prepared is None or self.prepared[0] != case:
            self.prepared = None  # frees memory first
            self.prepared = case, make(case)
        return self.prepared[1]

    def _attend(self, row: Row) -> Row:
        """Time `selection_attention`, checked against the oracle."""
        case, direction, (contender,) = cost_fit.case_of(row), row["direction"], named(row["backend"])
        if direction != "bwd":  # computes no gradients, and checks none
            contender = contender._replace(directions=("fwd", "decode"))

        def make(case: Case) -> tuple[Problem, Sample]:
            problem = make_problem(case, self.device)
            return problem, session.sample(case, problem, ORACLE_ROWS, backward=not cases.decodes(case))

        problem, exact = self._prepared(case, make)
        job = session.Job(case, (contender,), (direction,), ORACLE_ROWS, self.timing)
        ((_, found),) = session.measured(job, contender, (direction,), problem, exact, self.device, lambda words: None)
        if not found["mae"] <= MAX_ERROR:
            raise WrongResult(f"the mean absolute error is {found['mae']:.3g}, allowed {MAX_ERROR}")
        return {**row, **found}

    def _choose(self, row: Row) -> Row:
        """Time `compressed_attention`, checked against the fallback in float32.

        Gradients sum over thousands of rows: they are compared with their own magnitude (`checked_error`), o with
        MAX_ERROR.
        """
        case, backward, backend = cost_fit.case_of(row), row["direction"] == "bwd", row["backend"]

        def call(inputs: tuple[Tensor, ...], backend: str) -> tuple[Tensor, Tensor]:
            o, selection = compressed_attention(*inputs, block_size=case.block, n=case.n, S_kv=case.S_kv, backend=backend)
            return o, selection.ranges[..., 0]

        def results(inputs: tuple[Tensor, ...], do: Tensor, backend: str, backward: bool) -> tuple[Tensor, ...]:
            with torch.set_grad_enabled(backward):
                o, blocks = call(inputs, backend)
            return blocks, o.detach(), *(torch.autograd.grad(o, inputs, do) if backward else ())

        def make(case: Case) -> tuple[tuple[Tensor, ...], Tensor, tuple[Tensor, ...]]:
            keys = Rule(block_size=case.block, n=case.n).compressed_keys(case.S_kv)
            *inputs, do = cases.make_inputs(case._replace(S_kv=keys), self.device)
            leaves = tuple(x.requires_grad_() for x in inputs)
            return leaves, do, results(leaves, do, registry.fallback("choose"), True)

        inputs, do, expected = self._prepared(case, make)
        with new_memory_is_nan(strict=False):
            blocks, *found = results(inputs, do, backend, backward)
        same = float((blocks == expected[0]).float().mean())
        error, *_ = [checked_error(*each) for each in zip(("o", "dq", "dk", "dv"), found, expected[1:], strict=False)]
        if not (same >= LEAST_SAME and error <= MAX_ERROR):
            raise WrongResult(f"{same:.1%} of the blocks are the same, the mean absolute error of o is {error:.3g}, allowed {MAX_ERROR}")
        with torch.set_grad_enabled(backward):
            o = call(inputs, backend)[0]
            work = partial(torch.autograd.grad, o, inputs, do, retain_graph=True) if backward else partial(call, inputs, backend)
            times = timing.milliseconds(work, self.timing, self.device)
        return {**row, **times.fields(), "mae": error, "same_blocks": same}
