"""Print how much slower the policy's choice is than the best measured backend: `python -m nsa_sel.bench.tune.regret`.

This covers the committed rows of both measured GPUs: each case and direction that two or more backends were measured
on. What neighboring rows share is counted, as at a user's first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from tabulate import tabulate

from nsa_sel.bench.core.cases import Cache, Case, make_selection, random_rows, with_cache
from nsa_sel.bench.tune.cost_fit import BACKENDS, backend_of, cache_of, case_of, committed_rows, is_time, request_of
from nsa_sel.bench.tune.derive import RESULTS
from nsa_sel.core.backend import Offer
from nsa_sel.core.decide import countable, decides
from nsa_sel.core.decision import load_policy, make_decision
from nsa_sel.core.ranges import sample_rows, sampled_sharing
from nsa_sel.settings.config import GPUS, settings_for

CLOSE = 0.10  # within which a choice counts as right
MOST_DRAWN = 1 << 27  # rows times blocks: drawing a larger random selection again takes minutes


class Choice(NamedTuple):
    """Hold a request (case, "fwd", "bwd" or "decode", KV cache), the backend picked and the best one, with ms."""

    case: Case
    direction: str
    cache: Cache | None
    picked: str
    ms: float
    best: str
    best_ms: float

    @property
    def regret(self) -> float:
        """Return how much slower the choice is, relative to the best: 0.1 is 10%."""
        return self.ms / self.best_ms - 1


def counted_sharing(case: Case) -> tuple[float, ...]:
    """Return the sharing that a first call on the case would count (nsa_sel.core.decide), without a GPU.

    Draws random rows anew.
    """
    if case.distribution == "random":
        return _sampled_sharing(case._replace(case="", h=1, Dk=0, Dv=0, dtype=""))
    return _sampled_sharing(case._replace(case=case.case.replace(f"-h{case.h}", "-h1"), h=1))  # a group's heads share their selection


@lru_cache(None)
def _sampled_sharing(case: Case) -> tuple[float, ...]:
    b, s, g = sample_rows(case.B, case.S, case.G, case.n, "cpu")
    positions = case.S_kv - case.S + s
    if case.distribution == "random":
        drawn = random_rows(case._replace(B=1, G=1), positions.flatten(), torch.Generator().manual_seed(0))
        return sampled_sharing(drawn.view(*s.shape, case.n, 2), positions + 1, case.block)
    return sampled_sharing(make_selection(case, "cpu").ranges[b, s, g], positions + 1, case.block)


def choices(gpu: str) -> list[Choice]:
    """Return the default policy's choice, by the shipped settings, wherever two or more backends were measured.

    gpu: "h100" or "h200". Of a case, direction, cache and backend the last row counts.
    """
    times: dict[tuple[Case, str, Cache | None], dict[str, float]] = {}
    for row in (row for rows in committed_rows(is_time, RESULTS[gpu]).values() for row in rows):
        if row["S"] * row["S_kv"] // row["block"] <= MOST_DRAWN:
            times.setdefault((case_of(row), row["direction"], cache_of(row)), {})[backend_of(row)] = row["ms_median"]
    device, settings, found = GPUS[gpu], settings_for(GPUS[gpu]), []
    for (case, direction, cache), ms in times.items():
        offers = [Offer(spec) for name, spec in BACKENDS.items() if name in ms]
        decide = partial(make_decision, device=device, policy=load_policy("default"), settings=settings, offers=offers)
        request = request_of(case, None, direction == "bwd", cache)
        if len(ms) > 1 and countable(request) and decides(request, decide):
            request = msgspec.structs.replace(request, sharing=counted_sharing(case), counted=True)
        decision, best = decide(request), min(ms, key=lambda name: ms[name])
        picked = decision.backward if direction == "bwd" else decision.forward
        if len(ms) > 1 and picked is not None:
            found.append(Choice(case, direction, cache, picked, ms[picked], best, ms[best]))
    return found


def report(found: Sequence[Choice]) -> str:
    """Return how many choices are within `CLOSE` of the best, the mean regret and the worst; and a Markdown table of the
    choices that are not the best, worst first.
    """
    regrets = np.array([choice.regret for choice in found])
    missed = sorted((choice for choice in found if choice.picked != choice.best), key=lambda choice: -choice.regret)
    lines = [
        (with_cache(c.case.case, c.cache), c.direction, c.picked, f"{c.ms:.3g}", c.best, f"{c.best_ms:.3g}", f"{c.regret:.1%}")
        for c in missed
    ]
    close = f"{(regrets <= CLOSE).mean():.1%} of {len(found)} within {CLOSE:.0%} of the best"
    table = tabulate(lines, headers=["case", "direction", "picked", "ms", "best", "ms", "regret"], tablefmt="github")
    return f"{close}, mean {regrets.mean():.1%}, worst {regrets.max():.1%}\n\n{table}"


if __name__ == "__main__":
    for gpu in RESULTS:
        print(f"{GPUS[gpu].name}: {report(choices(gpu))}\n")
