"""From which L on Triton pays on this GPU: triton-group against packed SDPA on the threshold cases of the benches, as `nsa-sel tune`
measures it. The rows are kept beside the file; the rule is that of the committed profiles (bench/tune/derive.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.threshold_optimizer import thresholds
from nsa_sel.bench.tune.cost_fit import case_of
from nsa_sel.bench.tune.derive import DIRECTIONS, threshold
from nsa_sel.bench.tune.tune import Times, locked, rewrite, watched, written
from nsa_sel.bench.tune.tune_rows import collect, facts
from nsa_sel.core import registry
from nsa_sel.core.call import Call, device_info
from nsa_sel.selection import Selection
from nsa_sel.settings import tuned
from nsa_sel.settings.config import Settings, Threshold, Way
from nsa_sel.settings.tuned import Stamp

SIDES = ("triton-group", "sdpa-packed")
MOST_ERROR = 1e-3  # mean absolute difference of o between the sides (REQUIREMENTS 8)

Measure = Callable[[cases.Case, Way, str], Times]


def rows_of(stamp: Stamp) -> Path:
    """Beside the file, for the same environment."""
    return tuned.file_of(stamp).with_suffix(".thresholds.jsonl")


def run(
    stamp: Stamp,
    measure: Measure,
    ways: tuple[Way, ...],
    tell: Callable[[str, float], None] = lambda what, done: None,
    seconds: float = float("inf"),
) -> dict[Way, Threshold]:
    """Measure what is not known yet, and write the thresholds of the ways that are measured whole into the user's file.

    A way with a case that failed has none: the threshold that held before stays. Errors as `nsa_sel.bench.tune.tune.run`.
    """
    asked = wanted(ways)

    def measured(row: Row) -> Row:
        times = measure(case_of(row), row["way"], row["backend"])
        return dict(zip(("ms_median", "ms_p20", "ms_p80"), times, strict=True))

    with locked(stamp):
        rows = collect(rows_of(stamp), asked, measured, facts(stamp), tell, seconds)
        found = {}
        for way in ways:
            of_way = [row for row in rows if row["way"] == way]
            if of_way and len(of_way) == sum(row["way"] == way for row in asked) and not any("error" in row for row in of_way):
                found[way] = threshold(thresholds(of_way)[0])
        rewrite(stamp, thresholds={**written(stamp).thresholds, **found})
    return found


def wanted(ways: Sequence[Way]) -> list[Row]:
    """Both sides of every case, case by case."""
    return [
        {**case._asdict(), "way": way, "direction": DIRECTIONS[way], "backend": side}
        for case in cases.threshold_cases()
        for way in ways
        if (case.S == 1) == (way == "decode")
        for side in SIDES
    ]


class Runner:
    """Times both sides on one device, as calls of the policy would run them; keeps the last case's tensors and o of the first side."""

    def __init__(self, device: torch.device, settings: Settings, time: Callable[[Callable[[], Any], Way], Times]) -> None:
        self.device, self.settings, self.time = device, settings, time
        self.prepared: tuple[cases.Case, Call, torch.Tensor] | None = None
        self.o: dict[str, torch.Tensor] = {}

    def __call__(self, case: cases.Case, way: Way, side: str) -> Times:
        """Median, 20th and 80th percentile in ms of one whole call, plans included. Raises what the backend raises, or ContextLost."""
        with watched(f"{side} on {case.case}"):
            return self._measured(case, way, side)

    def _measured(self, case: cases.Case, way: Way, side: str) -> Times:
        if self.prepared is None or self.prepared[0] != case:
            self.prepared, self.o = None, {}
            q, k, v, do = cases.make_inputs(case, self.device)
            selection = cases.make_selection(case, self.device)
            call = Call(q, k, v, selection, None, case.Dk**-0.5, self.settings, device_info(self.device))
            self.prepared = case, call, do
        _, call, do = self.prepared
        module = registry.load(side)
        with torch.no_grad():
            o, lse = module.forward(call)
            for other, theirs in self.o.items():
                error = float((o.float() - theirs.float()).abs().mean())
                if not error <= MOST_ERROR:
                    raise ValueError(f"{side} and {other} differ by {error:.3g} in the mean, allowed {MOST_ERROR}")
            self.o[side] = o
            fresh = Selection(call.selection.ranges, call.selection.block_size, disjoint=True)

            def work() -> Any:
                fresh.forget_plans()
                again = Call(call.q, call.k, call.v, fresh, None, call.scale, call.settings, call.device)
                return module.backward(again, o, lse, do, None) if way == "backward" else module.forward(again)

            work()  # compiles
            return self.time(work, way)
