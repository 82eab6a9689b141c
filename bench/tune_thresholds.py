"""From which L on Triton pays on this GPU: triton-group against packed SDPA on the threshold cases of the benches, as `nsa-sel tune`
measures it. The rows are kept beside the file; the rule is that of the committed profiles (bench/derive.py)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nsa_sel import registry, tuned
from nsa_sel.bench import cases
from nsa_sel.bench.derive import DIRECTIONS, threshold
from nsa_sel.bench.records import append
from nsa_sel.bench.threshold_optimizer import thresholds
from nsa_sel.bench.tune import ContextLost, Times, locked, rewrite
from nsa_sel.call import Call, device_info
from nsa_sel.config import Settings, Threshold, Way
from nsa_sel.selection import Selection
from nsa_sel.tuned import Stamp

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

    A way with a case that failed has none: the threshold that held before stays. Errors as `nsa_sel.bench.tune.run`.
    """
    deadline = time.monotonic() + seconds
    with locked(stamp):
        path = rows_of(stamp)
        known = _read(path)
        wanted = [
            (case, way, side) for case in cases.threshold_cases() for way in ways if (case.S == 1) == (way == "decode") for side in SIDES
        ]
        for number, (case, way, side) in enumerate(wanted):
            if (case.case, way, side) in known:
                continue
            if time.monotonic() >= deadline:
                break
            tell(f"{case.case} {way}", number / len(wanted))
            row: dict[str, Any] = {**case._asdict(), "way": way, "direction": DIRECTIONS[way], "backend": side}
            try:
                row |= dict(zip(("ms_median", "ms_p20", "ms_p80"), measure(case, way, side), strict=True))
            except ContextLost:
                raise
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            append(path, [row])
            known[case.case, way, side] = row
        found = {}
        for way in ways:
            rows = [known.get((case.case, of, side)) for case, of, side in wanted if of == way]
            complete = [row for row in rows if row is not None and "error" not in row]
            if complete and len(complete) == len(rows):
                found[way] = threshold(thresholds(complete)[0])
        rewrite(stamp, thresholds=found)
    return found


def _read(path: Path) -> dict[tuple[str, Way, str], dict[str, Any]]:
    """The rows so far; a torn last line is dropped, so that the next row begins a line."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        path.write_bytes(whole)
    rows = (json.loads(line) for line in whole.splitlines())
    return {(row["case"], row["way"], row["backend"]): row for row in rows}


class Runner:
    """Times both sides on one device, as calls of the policy would run them; keeps the last case's tensors and o of the first side."""

    def __init__(self, device: torch.device, settings: Settings, time: Callable[[Callable[[], Any], Way], Times]) -> None:
        self.device, self.settings, self.time = device, settings, time
        self.prepared: tuple[cases.Case, Call, torch.Tensor] | None = None
        self.o: dict[str, torch.Tensor] = {}

    def __call__(self, case: cases.Case, way: Way, side: str) -> Times:
        """Median, 20th and 80th percentile in ms of one whole call, plans included."""
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
            fresh = Selection(call.selection.ranges, call.selection.block_size)

            def work() -> Any:
                fresh.forget_plans()
                again = Call(call.q, call.k, call.v, fresh, None, call.scale, call.settings, call.device)
                return module.backward(again, o, lse, do, None) if way == "backward" else module.forward(again)

            work()  # compiles
            return self.time(work, way)
