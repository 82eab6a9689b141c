"""Measure from which L on Triton pays on this GPU: both sides of the threshold on the threshold cases of the benches.

The rows are kept beside the user's file. The rule is that of the committed profiles (bench/tune/derive.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.contenders import PACKED
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.threshold_optimizer import TRITON, thresholds
from nsa_sel.bench.tune.committed_rows import DIRECTIONS
from nsa_sel.bench.tune.costs import Measure, without_flags
from nsa_sel.bench.tune.derive import threshold
from nsa_sel.bench.tune.resume import Run, collect
from nsa_sel.bench.tune.tuned_file import locked, rewrite, written
from nsa_sel.settings.schema import Threshold, Way

ROWS = ".thresholds.jsonl"  # suffix of the file of rows


@without_flags()
def measure_thresholds(run: Run, measure: Measure, ways: Sequence[Way]) -> dict[Way, Threshold]:
    """Measure the rows that are missing, and write the thresholds of the directions whose rows are complete.

    A direction with a case that failed keeps the threshold that it had. Raises as `kernel_configs.tune`.

    Args:
        run: of `nsa-sel tune`.
        measure: adds the times to a row, as `costs.Runner` does.
        ways: directions.

    Returns:
        The thresholds that were written.
    """
    asked = wanted(ways)
    with locked(run.stamp):
        rows, found = collect(run, ROWS, asked, measure), dict[Way, Threshold]()
        for way in ways:
            of_way = [row for row in rows if row["direction"] == DIRECTIONS[way] and "error" not in row]
            if of_way and len(of_way) == sum(row["direction"] == DIRECTIONS[way] for row in asked):
                found[way] = threshold(thresholds(of_way)[0])
        rewrite(run.stamp, thresholds={**written(run.stamp).thresholds, **found})
    return found


def wanted(ways: Sequence[Way]) -> list[Row]:
    """Both sides of every case, case by case."""
    return [
        {**case._asdict(), "direction": DIRECTIONS[way], "backend": side}
        for case in cases.threshold_cases()
        for way in ways
        if (case.S == 1) == (way == "decode")
        for side in (TRITON, PACKED)
    ]
