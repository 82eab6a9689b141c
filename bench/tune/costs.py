"""Measure what a call costs on this GPU with every backend, and fit the cost models, by which the policy picks (policies/cost.py).

Calls are timed whole, through `selection_attention`, with the kernel configs in force: so this comes after tuning, and rows are measured
again when their configs change. The rows are kept beside the user's file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from unittest import mock

import torch

from nsa_sel.backends.specs import SPECS
from nsa_sel.bench.core import cases, session, store
from nsa_sel.bench.core.cases import CHOICE, Case
from nsa_sel.bench.core.contenders import DENSE, SLOW, named
from nsa_sel.bench.core.parity import Problem, Sample, WrongResult, make_problem, sample
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing
from nsa_sel.bench.tune import choice_times, cost_fit
from nsa_sel.bench.tune.choice_times import MAX_ROWS
from nsa_sel.bench.tune.committed_rows import DIRECTIONS
from nsa_sel.bench.tune.cost_fit import TERMS, model_of, phase_of
from nsa_sel.bench.tune.resume import Measurements, Run, collect, context_loss
from nsa_sel.bench.tune.search_space import SPACES, kernel_name
from nsa_sel.bench.tune.tuned_file import beside, locked, rewrite, written
from nsa_sel.core import registry
from nsa_sel.core.request import DeviceInfo
from nsa_sel.policies.cost import modelled
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.flags import CONFIG_FLAG, FLAGS
from nsa_sel.settings.schema import Costs, KernelConfig, Settings, Way
from nsa_sel.settings.tuned import Stamp

ROWS = ".costs.jsonl"  # suffix of the file of rows
BACKENDS = (*(backend.name for backend in SPECS if backend.cost_terms), DENSE)  # dense attention is for the report alone
ORDER: tuple[Way, ...] = ("forward", "decode", "backward")  # a direction is used as soon as its rows are complete: the quick ones first
ORACLE_ROWS = 16  # compared with the oracle
MAX_ERROR = 1e-3  # mean absolute error of o, and of each gradient (REQUIREMENTS 8)
REP = 20.0  # ms of timed calls

Measure = Callable[[Row], Row]


@contextlib.contextmanager
def without_flags() -> Iterator[None]:
    """Run without the user's flags and configuration file: every backend may run, as committed and tuned, and nothing is logged."""
    with mock.patch.dict(os.environ):
        for name in (*(flag.name for flag in FLAGS), CONFIG_FLAG):
            os.environ.pop(name, None)
        os.environ["NSA_TRITON_SEL_FORCE"] = "1"  # a device rule may keep Triton off until someone measures
        yield


@without_flags()
def wanted(device: DeviceInfo, ways: Sequence[Way]) -> list[Row]:
    """The rows to measure: case, direction, backend, and under "launches" the kernel configs in force for it now."""
    settings = settings_for(device)
    asked = [way for way in ORDER if way in ways]
    return [row for way in asked for rows in (_attending, choice_times.wanted) for row in rows(device, settings, way)]


def _attending(device: DeviceInfo, settings: Settings, way: Way) -> list[Row]:
    """Those of attention to selected blocks."""
    contenders, backward = named(",".join(BACKENDS)), way == "backward"
    return [
        {**case._asdict(), "direction": DIRECTIONS[way], "backend": name, "launches": _configs(kernels, name, case, way)}
        for case in cases.cost_cases()
        if cases.decodes(case) == (way == "decode")
        for kernels in (tuned.apply(settings, cost_fit.request_of(case, None, backward), device).kernels,)
        for name, contender in zip(BACKENDS, contenders, strict=True)
        if contender.refuses(case) is None and (name not in SLOW or case.S <= MAX_ROWS) and (name == DENSE or _is_modeled(name, case, way))
    ]


def _is_modeled(backend: str, case: Case, way: Way) -> bool:
    """Whether the backend is installed, and its model covers such calls."""
    request, entry = cost_fit.request_of(case, None, way == "backward"), registry.backends()[backend]
    has_terms = request.phase(way == "backward") in entry.cost_terms
    return has_terms and not registry.missing(backend) and modelled(entry, request, way == "backward")


def _configs(kernels: Mapping[str, KernelConfig], backend: str, case: Case, way: Way) -> str:
    """The ids of the kernel configs that a backend has for such calls."""
    spaces = [space for space in SPACES if (space.backend, space.way) == (backend, way)]
    names = sorted(kernel_name(space, case.Dk, case.Dv, case.dtype) for space in spaces)
    return ", ".join(kernels[name].config_id(name) for name in names)


def unmeasured(stamp: Stamp, rows: Sequence[Row]) -> int:
    """How many of the rows no run has measured."""
    return len(rows) - len(Measurements(beside(stamp, ROWS)).of(rows))


@without_flags()
def measure_costs(run: Run, device: DeviceInfo, measure: Measure, ways: Sequence[Way]) -> Costs | None:
    """Measure the rows that are missing, and write the models of the directions whose rows are complete.

    Models that the file holds stay until the rows of all their directions are complete again. Raises as `kernel_configs.tune`.

    Args:
        run: of `nsa-sel tune`.
        device: what decisions depend on.
        measure: adds the times to a row.
        ways: directions to measure.

    Returns:
        The models of all complete directions, None where there are none.
    """
    with locked(run.stamp):
        tuned.forget()  # the configs in force are those of the file now
        collect(run, ROWS, wanted(device, ways), measure)
        path, every = beside(run.stamp, ROWS), wanted(device, ORDER)
        found = fitted(every, Measurements(path).of(every), path.name)
        before = written(run.stamp).costs
        if found is not None and (before is None or _ways(before) <= _ways(found)):
            rewrite(run.stamp, costs=found)
            tuned.forget()
    return found


def _ways(costs: Costs) -> set[str]:
    return {name.partition("/")[2] for name in costs.models}


def fitted(every: Sequence[Row], known: Sequence[Row], name: str) -> Costs | None:
    """The models of the phases all of whose rows are known, None where no phase has two backends to compare.

    A backend that mostly fails has fewer rows than its model has terms, and gets no model: the policy then prefers the others.

    Args:
        every: the rows of all directions, without times.
        known: those of them that were measured.
        name: of the file of rows, for the provenance.
    """
    counts = Counter(map(phase_of, known))
    complete = {phase for phase, count in Counter(map(phase_of, every)).items() if counts[phase] == count}
    timed = [row for row in store.measured(known) if phase_of(row) in complete and cost_fit.is_cost_row(row)]
    rows_of_model = Counter(map(model_of, timed))
    fit = {name for name, count in rows_of_model.items() if count > len(set(TERMS[name]) - cost_fit.OF_CACHES)}
    compared = Counter(name.partition("/")[2] for name in fit)
    rows = [row for row in timed if model_of(row) in fit and compared[phase_of(row) or ""] > 1]
    if not rows:
        return None
    digest = hashlib.sha256("".join(json.dumps(row, sort_keys=True) for row in rows).encode()).hexdigest()[:16]
    return cost_fit.costs(rows, (f"`nsa-sel tune` on this machine: {name} ({len(rows)} of its rows, sha256 {digest})",))


class Runner:
    """Times one backend on one case, checked against the oracle; keeps the last case's tensors.

    Args:
        device: "cuda" or "cpu".
        rep: ms of timed calls.
    """

    def __init__(self, device: str = "cuda", rep: float = REP) -> None:
        self.device, self.timing = device, Timing(rep)
        self.prepared: tuple[Case, Problem, Sample] | None = None
        self.choosing = choice_times.Runner(device, self.timing, MAX_ERROR)

    def __call__(self, row: Row) -> Row:
        """The row with its times.

        Raises:
            WrongResult: o or a gradient is further than MAX_ERROR from the oracle.
            ContextLost: a kernel broke the CUDA context.
        """
        try:
            with context_loss(f"{row['backend']} on {row['case']}"):
                return self.choosing(row) if row["distribution"] == CHOICE else self._measured(row)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise

    def _measured(self, row: Row) -> Row:
        case, direction, (contender,) = cost_fit.case_of(row), row["direction"], named(row["backend"])
        if direction != "bwd":  # computes no gradients, and checks none
            contender = contender._replace(directions=("fwd", "decode"))
        if self.prepared is None or self.prepared[0] != case:
            self.prepared = None  # frees their memory first
            problem = make_problem(case, self.device)
            self.prepared = case, problem, sample(case, problem, ORACLE_ROWS, backward=not cases.decodes(case))
        _, problem, exact = self.prepared
        job = session.Job(case, (contender,), (direction,), ORACLE_ROWS, self.timing)
        (found,) = session.contender_rows(job, contender, (direction,), problem, exact, self.device, [""])
        if contender.checked and not found["mae"] <= MAX_ERROR:
            raise WrongResult(f"the mean absolute error is {found['mae']:.3g}, allowed {MAX_ERROR}")
        return found
