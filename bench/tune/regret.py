"""How much slower the policy's choice is than the best measured backend: `python -m nsa_sel.bench.tune.regret`.

Over all committed rows of the H200, for each case and direction that two or more backends were measured on. The policy knows the
selection's sharing as a user has it: counted by itself at the first call (`counted`), without further ado; exactly, after
`Selection.measure()` (`measured`); or not at all, where counting is off and the prior of configs/base.yaml is assumed (`assumed`). Also
by models that were fitted without any row of that many tokens, as on lengths that nobody measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import typer
from tabulate import tabulate

from nsa_sel.bench.core.caches import Cache
from nsa_sel.bench.core.cases import CHOICE, Case
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.tune.committed_rows import H200_RESULTS, cost_rows
from nsa_sel.bench.tune.cost_fit import BACKENDS, backend_of, cache_of, case_of, is_cost_row, is_time, models, request_of, sharing_of
from nsa_sel.bench.tune.counted import counted_sharing
from nsa_sel.core.backend import Offer
from nsa_sel.core.decide import countable, decides
from nsa_sel.core.decision import Decision, load_policy, make_decision
from nsa_sel.core.request import FEW_TOKENS, DeviceInfo, Request
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.devices import GPUS
from nsa_sel.settings.schema import Costs, Settings

Sharing = Literal["counted", "measured", "assumed"]  # how the policy knows it
H200 = GPUS["h200"]
CLOSE = 0.10  # within which a choice counts as right


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


def measured_times(rows: Sequence[Row]) -> dict[Asked, dict[str, float]]:
    """Median ms by what was asked, then by backend, where two or more backends were measured."""
    times: dict[Asked, dict[str, float]] = {}
    for row in rows:
        times.setdefault(Asked(case_of(row), row["direction"], cache_of(row)), {})[backend_of(row)] = row["ms_median"]
    return {key: found for key, found in times.items() if len(found) > 1}


def choose(asked: Asked, times: Mapping[str, float], settings: Settings, sharing: Sharing, device: DeviceInfo = H200) -> Choice | None:
    """The default policy's choice among the backends that were measured, None if it refuses all of them.

    Args:
        asked: what was measured.
        times: median ms by backend.
        settings: with the cost models.
        sharing: how the policy knows what the selection shares.
        device: what the policy chooses for.
    """
    backward = asked.direction == "bwd"
    offers = [Offer(spec) for name, spec in BACKENDS.items() if name in times]

    def decide(request: Request) -> Decision:
        return make_decision(request, device, load_policy("default"), settings, offers)

    request = request_of(asked.case, sharing_of(asked.case) if sharing == "measured" else None, backward, asked.cache)
    if sharing == "counted" and countable(request) and decides(request, decide):
        request = msgspec.structs.replace(request, sharing=counted_sharing(asked.case), counted=True)
    decision = decide(request)
    picked = decision.backward if backward else decision.forward
    if picked is None:
        return None
    best = min(times, key=lambda name: times[name])
    return Choice(asked, picked, times[picked], best, times[best])


def choices(rows: Sequence[Row], settings: Settings, sharing: Sharing, device: DeviceInfo = H200) -> list[Choice]:
    """The policy's choice in every measured case."""
    found = [choose(asked, times, settings, sharing, device) for asked, times in measured_times(rows).items()]
    return [choice for choice in found if choice is not None]


def choices_left_out(rows: Sequence[Row], settings: Settings) -> list[Choice]:
    """`choices` with counted sharing for prefills of a length S, each by models that were fitted to the rows of all other lengths.

    Only of lengths between others: the shortest and the longest that were measured, and head dims of one length alone, are nothing that
    other rows tell of.
    """
    fitted = [(row, case_of(row)) for row in filter(is_cost_row, rows) if row["S"] > FEW_TOKENS and row["distribution"] != CHOICE]

    @cache
    def between(S: int, Dk: int, direction: str) -> bool:
        lengths = {case.S for row, case in fitted if row["direction"] == direction and case.Dk == Dk}
        return min(lengths, default=S) < S < max(lengths, default=S)

    @cache
    def without(S: int, direction: str) -> Settings:
        others = [row for row, case in fitted if row["direction"] == direction and case.S != S]
        dtypes = settings.costs.dtypes if settings.costs else ()
        costs = Costs(provenance=f"without S = {S}", dtypes=dtypes, models=models(others, H200.sm_count))
        return msgspec.structs.replace(settings, costs=costs)

    found = [
        choose(asked, times, without(asked.case.S, asked.direction), "counted")
        for asked, times in measured_times(rows).items()
        if asked.case.distribution != CHOICE and between(asked.case.S, asked.case.Dk, asked.direction)
    ]
    return [choice for choice in found if choice is not None]


def summary(found: Sequence[Choice], within: float = CLOSE) -> str:
    """In words: how many choices are so close to the best, the mean regret and the worst."""
    regrets = np.array([choice.regret for choice in found])
    close = float((regrets <= within).mean())
    return f"{close:.1%} of {len(found)} within {within:.0%} of the best, mean {regrets.mean():.1%}, worst {regrets.max():.1%}"


def misses(found: Sequence[Choice]) -> str:
    """A Markdown table of the choices that are not the best, worst first."""
    missed = sorted((choice for choice in found if choice.picked != choice.best), key=lambda choice: -choice.regret)
    lines = [(c.asked.words, c.asked.direction, c.picked, f"{c.ms:.3g}", c.best, f"{c.best_ms:.3g}", f"{c.regret:.1%}") for c in missed]
    return tabulate(lines, headers=["case", "direction", "picked", "ms", "best", "ms", "regret"], tablefmt="github")


def main(folder: Annotated[str, typer.Option(help="folder of rows, relative to the repository")] = H200_RESULTS) -> None:
    """Print the four summaries, and every choice that is not the best."""
    settings = settings_for(H200)
    rows = [row for found in cost_rows(is_time, folder).values() for row in found]
    for name, found in (
        ("sharing counted at the first call", choices(rows, settings, "counted")),
        ("the same, rows of as many tokens left out of the fit", choices_left_out(rows, settings)),
        ("sharing measured", choices(rows, settings, "measured")),
        ("counting off: sharing assumed", choices(rows, settings, "assumed")),
    ):
        print(f"{name}: {summary(found)}\n\n{misses(found)}\n")


if __name__ == "__main__":
    typer.run(main)
