"""The table of ideas that were tried on the way to the kernels, from results/h200/profiles: ideas.jsonl (what each promised and what
came of it) and trials.jsonl (the measured times).

A time is the median of whole calls, plans included, of one run. In trials 10 and 11 it is a single kernel's by torch's profiler, but
for decoding and for one head in trial 11. The code of a variant that was slower is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from nsa_sel.bench.core.markdown import table
from nsa_sel.bench.core.store import Row


def ideas_table(ideas: Iterable[Row], trials: Iterable[Row]) -> str:
    """Each idea with its times in ms: `variants` maps a label to the trials whose times add up."""
    times = {(int(row["trial"].split()[0]), row["case"], row["variant"]): row["ms_median"] for row in trials}
    lines = []
    for idea in ideas:
        sums = {label: sum(times[idea["trial"], idea["case"], name] for name in names) for label, names in idea["variants"].items()}
        lines.append((idea["idea"], idea["case"], ", ".join(f"{label} {ms:.3g}" for label, ms in sums.items()), idea["outcome"]))
    return table(["idea", "case", "ms", "outcome"], lines)
