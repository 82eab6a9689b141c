"""What a call costs on this GPU: a suite of cases with every backend, as `nsa-sel tune` measures it, and the models fitted to its rows.

The policy then picks by predicted time (policies/cost.py) on a GPU that nobody has measured. Calls are timed whole, through
`selection_attention`, with the launches that are in force for them: so this comes after tuning, and a launch that changes later makes
its rows be measured again. The rows are kept beside the user's file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from nsa_sel.attention import forget_decisions
from nsa_sel.backends.specs import launch_class, tile_columns
from nsa_sel.bench.core import cases, session, store
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import DENSE, PACKED, named
from nsa_sel.bench.core.parity import Problem, Sample, WrongResult, make_problem, sample
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing
from nsa_sel.bench.tune import cost_fit
from nsa_sel.bench.tune.derive import DIRECTIONS
from nsa_sel.bench.tune.tune import locked, rewrite, watched, written
from nsa_sel.bench.tune.tune_rows import collect, facts, key, read
from nsa_sel.bench.tune.tune_space import SPACES
from nsa_sel.core import registry
from nsa_sel.core.request import DeviceInfo
from nsa_sel.policies.cost import BYTES, modelled
from nsa_sel.settings import tuned
from nsa_sel.settings.config import CONFIG_FLAG, FLAGS, Costs, Settings, Way, settings_for
from nsa_sel.settings.tuned import Stamp

BACKENDS = (
    "triton-group",
    "triton-tile",
    "triton-block",
    "triton-token",
    "cupy-cuda",
    PACKED,
    DENSE,
)  # dense attention is for the report alone
SLOW = ("triton-token", PACKED)  # up to seconds a call on many rows: their models follow from fewer
MOST_ROWS = 8192  # of a case that the slow ones take part in
ORDER: tuple[Way, ...] = ("forward", "decode", "backward")  # a way serves as soon as it is measured whole: the quick ones first
ORACLE_ROWS = 16  # compared with the oracle
MOST_ERROR = 1e-3  # mean absolute error of o, and of each gradient (REQUIREMENTS 8)
REP = 20.0  # ms of timed calls

Measure = Callable[[Row], Row]


def rows_of(stamp: Stamp) -> Path:
    """Beside the file, for the same environment."""
    return tuned.file_of(stamp).with_suffix(".costs.jsonl")


@contextlib.contextmanager
def without_flags() -> Iterator[None]:
    """As if the user had set no flag and no file, so that every backend may run, as it was committed and tuned, and nothing is logged."""
    names = [flag.name for flag in FLAGS] + [CONFIG_FLAG]
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ["NSA_TRITON_SEL_FORCE"] = "1"  # a device rule keeps Triton off until someone measures
    try:
        yield
    finally:
        del os.environ["NSA_TRITON_SEL_FORCE"]
        os.environ.update(kept)


@without_flags()
def wanted(device: DeviceInfo, ways: Sequence[Way]) -> list[Row]:
    """What is to be measured: case, direction, backend and the launches that are in force for it now."""
    settings = settings_for(device)
    return [
        {**case._asdict(), "direction": DIRECTIONS[way], "backend": name, "launches": _launches(name, case, way, settings, device)}
        for way in ORDER
        if way in ways
        for case in cases.cost_cases()
        if (case.S == 1) == (way == "decode")
        for name, contender in zip(BACKENDS, named(",".join(BACKENDS)), strict=True)
        if contender.refuses(case) is None and (name not in SLOW or case.S <= MOST_ROWS) and (name == DENSE or _explained(name, case, way))
    ]


def _explained(backend: str, case: Case, way: Way) -> bool:
    """Whether the backend is there, and its model speaks for such calls."""
    return not registry.missing(backend) and modelled(backend, cost_fit.request_of(case, None, way == "backward"), way == "backward")


def _launches(backend: str, case: Case, way: Way, settings: Settings, device: DeviceInfo) -> str:
    """The ids of the launches that a backend has for calls like this."""
    request = cost_fit.request_of(case, None, way == "backward")
    kernels = tuned.apply(settings, request, device).kernels
    size = BYTES[case.dtype]
    suffix = launch_class(sum(tile_columns(case.Dk, case.Dv, size)), size)
    names = sorted({space.kernel + suffix for space in SPACES if space.kernel.startswith(f"{backend}/") and space.way == way})
    return ", ".join(kernels[name].config_id(name) for name in names)


@without_flags()
def run(
    stamp: Stamp,
    device: DeviceInfo,
    measure: Measure,
    ways: Sequence[Way],
    tell: Callable[[str, float], None] = lambda what, done: None,
    seconds: float = float("inf"),
) -> Costs | None:
    """Measure what is not known yet, and write the models of the ways that are measured whole into the user's file: these, or None.

    Models that the file holds stay as they are until all their ways are whole again. Errors as `nsa_sel.bench.tune.tune.run`.
    """
    with locked(stamp):
        _use_the_file()
        path = rows_of(stamp)
        collect(path, wanted(device, ways), measure, facts(stamp), tell, seconds)
        every, known = wanted(device, ORDER), read(path)
        found = fitted(every, [known[key(row)] for row in every if key(row) in known], path.name)
        before = written(stamp).costs
        if found is not None and (before is None or _ways(before) <= _ways(found)):
            rewrite(stamp, costs=found)
            _use_the_file()
    return found


def _use_the_file() -> None:
    """Calls of this process follow the file as it is now."""
    tuned.forget()
    forget_decisions()


def _ways(costs: Costs) -> set[str]:
    return {name.partition("/")[2] for name in costs.models}


def fitted(every: Sequence[Row], known: Sequence[Row], name: str) -> Costs | None:
    """The models of the directions of which each row is known; None where no direction has two to compare.

    A backend that mostly fails has fewer rows than its model has terms, and none: the policy then prefers the others.
    """
    keys = {key(row) for row in known}
    unfinished = {row["direction"] for row in every if key(row) not in keys}
    timed = [row for row in store.measured(known) if row["direction"] not in unfinished and cost_fit.is_cost_row(row)]
    counted = Counter((row["backend"], row["direction"]) for row in timed)
    fit = {of for of, rows in counted.items() if rows > len(cost_fit.TERMS[f"{of[0]}/{cost_fit.WAYS[of[1]]}"])}
    compared = Counter(direction for _, direction in fit)
    rows = [row for row in timed if (row["backend"], row["direction"]) in fit and compared[row["direction"]] > 1]
    if not rows:
        return None
    digest = hashlib.sha256("".join(json.dumps(row, sort_keys=True) for row in rows).encode()).hexdigest()[:16]
    return cost_fit.costs(rows, (f"`nsa-sel tune` on this machine: {name} ({len(rows)} of its rows, sha256 {digest})",))


class Runner:
    """Times one backend on one case of this device, checked against the oracle; keeps the last case's tensors."""

    def __init__(self, device: str = "cuda", rep: float = REP) -> None:
        self.device, self.timing = device, Timing(rep)
        self.prepared: tuple[Case, Problem, Sample] | None = None

    def __call__(self, row: Row) -> Row:
        """The row with its times. Raises what the backend raises, WrongResult, or ContextLost."""
        try:
            with watched(f"{row['backend']} on {row['case']}"):
                return self._measured(row)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise

    def _measured(self, row: Row) -> Row:
        case, direction, (contender,) = cost_fit.case_of(row), row["direction"], named(row["backend"])
        if direction != "bwd":  # gradients are neither checked nor made
            contender = contender._replace(directions=("fwd", "decode"))
        if self.prepared is None or self.prepared[0] != case:
            self.prepared = None  # frees their memory first
            problem = make_problem(case, self.device)
            self.prepared = case, problem, sample(case, problem, ORACLE_ROWS)
        _, problem, exact = self.prepared
        job = session.Job(case, (contender,), (direction,), ORACLE_ROWS, self.timing)
        (found,) = session.contender_rows(job, contender, (direction,), problem, exact, self.device, [""])
        if contender.checked and not found["mae"] <= MOST_ERROR:
            raise WrongResult(f"the mean absolute error is {found['mae']:.3g}, allowed {MOST_ERROR}")
        return found
