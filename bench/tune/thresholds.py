"""Measure from which L on Triton pays on this GPU: both sides of the threshold on the threshold cases of the benches.

The rows are kept beside the user's file. The rule is that of the committed profiles (bench/tune/derive.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.contenders import PACKED
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.threshold_optimizer import TRITON, thresholds
from nsa_sel.bench.tune.committed_rows import DIRECTIONS
from nsa_sel.bench.tune.cost_fit import case_of
from nsa_sel.bench.tune.derive import threshold
from nsa_sel.bench.tune.kernel_configs import Times
from nsa_sel.bench.tune.resume import Run, collect, context_loss
from nsa_sel.bench.tune.runner import Prepared, Time, make_call
from nsa_sel.bench.tune.tuned_file import locked, rewrite, written
from nsa_sel.core import registry
from nsa_sel.core.call import REPEATED, Call
from nsa_sel.selection import Selection
from nsa_sel.settings.schema import Settings, Threshold, Way

ROWS = ".thresholds.jsonl"  # suffix of the file of rows
MAX_ERROR = 1e-3  # mean absolute difference of o between the sides (REQUIREMENTS 8)

Measure = Callable[[cases.Case, Way, str], Times]


def measure_thresholds(run: Run, measure: Measure, ways: tuple[Way, ...]) -> dict[Way, Threshold]:
    """Measure the rows that are missing, and write the thresholds of the directions whose rows are complete.

    A direction with a case that failed keeps the threshold that it had. Raises as `kernel_configs.tune`.

    Args:
        run: of `nsa-sel tune`.
        measure: times one side on one case.
        ways: directions.

    Returns:
        The thresholds that were written.
    """
    asked = wanted(ways)

    def measured(row: Row) -> Row:
        times = measure(case_of(row), row["way"], row["backend"])
        return dict(zip(("ms_median", "ms_p20", "ms_p80"), times, strict=True))

    with locked(run.stamp):
        rows = collect(run, ROWS, asked, measured)
        found = {}
        for way in ways:
            of_way = [row for row in rows if row["way"] == way and "error" not in row]
            if of_way and len(of_way) == sum(row["way"] == way for row in asked):
                found[way] = threshold(thresholds(of_way)[0])
        rewrite(run.stamp, thresholds={**written(run.stamp).thresholds, **found})
    return found


def wanted(ways: Sequence[Way]) -> list[Row]:
    """Both sides of every case, case by case."""
    return [
        {**case._asdict(), "way": way, "direction": DIRECTIONS[way], "backend": side}
        for case in cases.threshold_cases()
        for way in ways
        if (case.S == 1) == (way == "decode")
        for side in (TRITON, PACKED)
    ]


class Runner:
    """Times both sides on one device, as the policy's calls would run them; keeps the last case's tensors, and o of each side.

    Args:
        device: where both sides run.
        settings: for the calls.
        time: takes the times of a call; see `runner.timer`.
    """

    def __init__(self, device: torch.device, settings: Settings, time: Time) -> None:
        self.device, self.settings, self.time = device, settings, time
        self.prepared: tuple[cases.Case, Prepared] | None = None
        self.o: dict[str, torch.Tensor] = {}

    def __call__(self, case: cases.Case, way: Way, side: str) -> Times:
        """Median, 20th and 80th percentile in ms of one whole call, plans included.

        Raises:
            ValueError: the two sides' o differ.
            ContextLost: a kernel broke the CUDA context.
        """
        with torch.no_grad(), context_loss(f"{side} on {case.case}"):
            call, do = self._prepared(case)
            module = registry.load(side)
            o, lse = module.forward(call)
            self._compare(side, o)
            fresh = Selection(call.selection.ranges, call.selection.block_size, disjoint=True)
            known: dict[Any, Any] = {REPEATED: True}  # calls repeat, as a model's do, on new selections

            def work() -> Any:
                fresh.forget_plans()
                again = Call(call.q, call.k, call.v, fresh, None, call.scale, call.settings, call.device)
                again.known = known
                return module.backward(again, o, lse, do, None) if way == "backward" else module.forward(again)

            work()  # compiles
            return self.time(work, way)

    def _prepared(self, case: cases.Case) -> Prepared:
        if self.prepared is None or self.prepared[0] != case:
            self.prepared, self.o = None, {}  # frees memory first
            self.prepared = case, make_call(case, self.device, self.settings)
        return self.prepared[1]

    def _compare(self, side: str, o: torch.Tensor) -> None:
        for other, theirs in self.o.items():
            error = float((o.float() - theirs.float()).abs().mean())
            if not error <= MAX_ERROR:
                raise ValueError(f"{side} and {other} differ by {error:.3g} in the mean, allowed {MAX_ERROR}")
        self.o[side] = o
