"""Print how much slower the policy's choice is than the best measured backend: `python -m nsa_sel.bench.tune.regret`.

This covers the committed rows of both measured GPUs: each case and direction that two or more backends were measured
on. What neighboring rows share is counted, as at a user's first call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from tabulate import tabulate

from nsa_sel.bench.core.cases import Cache, Case, make_selection, random_rows
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.tune.cost_fit import BACKENDS, backend_of, cache_of, case_of, committed_rows, is_time, request_of
from nsa_sel.bench.tune.derive import RESULTS
from nsa_sel.core.backend import Offer
from nsa_sel.core.decide import countable, decides
from nsa_sel.core.decision import Decision, load_policy, make_decision
from nsa_sel.core.ranges import sample_rows, sampled_sharing
from nsa_sel.core.request import DeviceInfo, Request
from nsa_sel.settings.config import GPUS, settings_for
from nsa_sel.settings.schema import Settings

CLOSE = 0.10  # within which a choice counts as right
MOST_DRAWN = 1 << 27  # rows times blocks: drawing a larger random selection again takes minutes


class Asked(NamedTuple):
    """What backends were measured on: a case, "fwd", "bwd" or "decode", and the cache that its keys are in."""

    case: Case
    direction: str
    cache: Cache | None = None

    @property
    def words(self) -> str:
        """The case's name, and the cache."""
        return self.case.case if self.cache is None else f"{self.case.case}, {self.cache}"


class Choice(NamedTuple):
    """What was asked, the backend that was picked and its ms, the best backend and its ms."""

    asked: Asked
    picked: str
    ms: float
    best: str
    best_ms: float

    @property
    def regret(self) -> float:
        """How much slower the choice is, relative to the best: 0.1 is 10%."""
        return self.ms / self.best_ms - 1


def time_rows(gpu: str) -> list[Row]:
    """Return the last row of each case, direction, cache and backend of a measured GPU ("h100" or "h200")."""
    rows = (row for found in committed_rows(is_time, RESULTS[gpu]).values() for row in found)
    return [row for row in rows if row["S"] * row["S_kv"] // row["block"] <= MOST_DRAWN]


def measured_times(rows: Sequence[Row]) -> dict[Asked, dict[str, float]]:
    """Return the median ms by what was asked, then by backend, where two or more backends were measured."""
    times: dict[Asked, dict[str, float]] = {}
    for row in rows:
        times.setdefault(Asked(case_of(row), row["direction"], cache_of(row)), {})[backend_of(row)] = row["ms_median"]
    return {key: found for key, found in times.items() if len(found) > 1}


def counted_sharing(case: Case) -> tuple[float, ...]:
    """Return the sharing that a first call on the case would count (nsa_sel.core.decide), without a GPU.

    Draws random rows anew.
    """
    if case.distribution == "random":
        return _sampled_sharing(case._replace(case="", h=1, Dk=0, Dv=0, dtype=""))
    return _sampled_sharing(case._replace(case=case.case.replace(f"-h{case.h}", "-h1"), h=1))  # a group's heads share their selection


@cache
def _sampled_sharing(case: Case) -> tuple[float, ...]:
    b, s, g = sample_rows(case.B, case.S, case.G, case.n, "cpu")
    positions = case.S_kv - case.S + s
    if case.distribution == "random":
        drawn = random_rows(case._replace(B=1, G=1), positions.flatten(), torch.Generator().manual_seed(0))
        return sampled_sharing(drawn.view(*s.shape, case.n, 2), positions + 1, case.block)
    return sampled_sharing(make_selection(case, "cpu").ranges[b, s, g], positions + 1, case.block)


def choose(asked: Asked, times: Mapping[str, float], settings: Settings, device: DeviceInfo) -> Choice | None:
    """Return the default policy's choice among the backends that were measured, None if it refuses all of them.

    Args:
        asked: what was measured.
        times: median ms by backend.
        settings: with the cost models.
        device: what the policy chooses for.
    """
    backward = asked.direction == "bwd"
    offers = [Offer(spec) for name, spec in BACKENDS.items() if name in times]

    def decide(request: Request) -> Decision:
        return make_decision(request, device, load_policy("default"), settings, offers)

    request = request_of(asked.case, None, backward, asked.cache)
    if countable(request) and decides(request, decide):
        request = msgspec.structs.replace(request, sharing=counted_sharing(asked.case), counted=True)
    decision = decide(request)
    picked = decision.backward if backward else decision.forward
    if picked is None:
        return None
    best = min(times, key=lambda name: times[name])
    return Choice(asked, picked, times[picked], best, times[best])


def choices(rows: Sequence[Row], device: DeviceInfo, settings: Settings | None = None) -> list[Choice]:
    """Return the policy's choice in every measured case, by the shipped settings of the device unless others are given."""
    settings = settings or settings_for(device)
    found = [choose(asked, times, settings, device) for asked, times in measured_times(rows).items()]
    return [choice for choice in found if choice is not None]


def summary(found: Sequence[Choice], within: float = CLOSE) -> str:
    """Return in words how many choices are so close to the best, the mean regret and the worst."""
    regrets = np.array([choice.regret for choice in found])
    close = float((regrets <= within).mean())
    return f"{close:.1%} of {len(found)} within {within:.0%} of the best, mean {regrets.mean():.1%}, worst {regrets.max():.1%}"


def misses(found: Sequence[Choice]) -> str:
    """Return a Markdown table of the choices that are not the best, worst first."""
    missed = sorted((choice for choice in found if choice.picked != choice.best), key=lambda choice: -choice.regret)
    lines = [(c.asked.words, c.asked.direction, c.picked, f"{c.ms:.3g}", c.best, f"{c.best_ms:.3g}", f"{c.regret:.1%}") for c in missed]
    return tabulate(lines, headers=["case", "direction", "picked", "ms", "best", "ms", "regret"], tablefmt="github")


if __name__ == "__main__":
    for gpu in RESULTS:
        every = choices(time_rows(gpu), GPUS[gpu])
        print(f"{GPUS[gpu].name}: {summary(every)}\n\n{misses(every)}\n")
