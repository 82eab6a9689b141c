"""Loss curves of examples/train_nsa_lm.py, a row a step: their averages, and how far two of them are from each other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from nsa_sel.bench.core.store import Row

SETTLED = 10  # steps before speed counts: the first ones compile


def averages(rows: Sequence[Row], window: int) -> list[float]:
    """Mean losses of every `window` steps, the last ones left out where they are fewer."""
    return [statistics.fmean(row["loss"] for row in rows[i : i + window]) for i in range(0, len(rows) - window + 1, window)]


def furthest(rows: Sequence[Row], reference: Sequence[Row], window: int) -> float | None:
    """The largest difference of averaged losses over the steps of both; None of another attention, or of too few steps."""
    if rows[0]["attention"] != reference[0]["attention"]:
        return None
    pairs = zip(averages(rows, window), averages(reference, window), strict=False)
    return max((abs(a - b) for a, b in pairs), default=None)


def speed(rows: Sequence[Row]) -> float:
    """The median of tokens a second, of settled steps where there are any."""
    return float(statistics.median(row["tokens_per_second"] for row in rows[SETTLED:] or rows))
