"""What the policy picks when a batch decodes, against the fastest backend that was measured, over all committed rows of a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nsa_sel.bench.core.environment import ROOT
from nsa_sel.bench.core.markdown import table
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.tune import regret
from nsa_sel.bench.tune.committed_rows import cost_rows
from nsa_sel.bench.tune.cost_fit import is_time
from nsa_sel.bench.tune.regret import Asked, Choice
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.devices import GPUS

RESULTS = "bench/results"
CLOSE = 0.05  # issue 20: what is picked is within 5% of the best in 95% of the decode rows
WHERE = ("no cache", "contiguous cache", "pages")
HEADERS = ("new tokens", "keys", "measured", "picked", f"within {CLOSE:.0%}", "mean", "worst", "worst in")


def measured_gpus() -> list[str]:
    """The names of GPUS that have rows below bench/results."""
    return [name for name in GPUS if (ROOT / RESULTS / name).is_dir()]


def rows(gpu: str = "h200") -> list[Row]:
    """The last row of every case, cache and backend, of a name of GPUS."""
    found = cost_rows(lambda row: bool(row.get("direction") == "decode" and is_time(row)), f"{RESULTS}/{gpu}")
    return [row for of_file in found.values() for row in of_file]


def choices(gpu: str = "h200") -> list[Choice]:
    """The policy's choice in every decode case that two or more backends were measured on; it does not know what the tokens share."""
    return regret.choices(rows(gpu), settings_for(GPUS[gpu]), "assumed", device=GPUS[gpu])


def kind_of(asked: Asked) -> tuple[str, str]:
    """What a line of the table is about: new tokens of a sequence, and where its keys are."""
    cache = asked.cache
    where = WHERE[0 if cache is None else 1 if cache.page_size is None else 2]
    return "one" if asked.case.S == 1 else "2 to 8", f"{where}, {cache.quantized}" if cache and cache.quantized else where


def choice_table() -> str:
    """Choices by new tokens and cache: how many are close to the best, and by how much the worst misses it."""
    found, kinds = choices(), dict[tuple[str, str], list[Choice]]()
    for choice in found:
        kinds.setdefault(kind_of(choice.asked), []).append(choice)
    lines = [
        (*kind, *_summary(kinds[kind]))
        for kind in sorted(kinds, key=lambda kind: (kind[0] != "one", "," in kind[1], WHERE.index(kind[1].split(",")[0])))
    ]
    return table(HEADERS, [*lines, ("all", "", *_summary(found))], left=2)


def _summary(found: Sequence[Choice]) -> tuple[str, ...]:
    regrets, worst = [choice.regret for choice in found], max(found, key=lambda choice: choice.regret)
    picked = ", ".join(f"{name} {count}" for name, count in Counter(choice.picked for choice in found).most_common())
    close, mean = sum(each <= CLOSE for each in regrets) / len(regrets), sum(regrets) / len(regrets)
    where = worst.asked.words if worst.regret > 0 else "-"
    return str(len(found)), picked, f"{close:.0%}", f"{mean:.1%}", f"{worst.regret:.1%}", where
