"""The report's panels on the policy: what it picks where, what its choices cost, and what its thresholds rest on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nsa_sel.bench import threshold_optimizer
from nsa_sel.bench.core import cases
from nsa_sel.bench.core.contenders import PACKED
from nsa_sel.bench.core.markdown import factor, table
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.report import figures
from nsa_sel.bench.report.document import Panel, Table
from nsa_sel.bench.report.figures import Facet, Figure, Line, Share, role_of, short
from nsa_sel.bench.report.speed import TITLES, plain, thousands
from nsa_sel.bench.sel_threshold_from_csv import by_length
from nsa_sel.bench.threshold_optimizer import MARGIN, TRITON, Pair, length_pairs, sure_length
from nsa_sel.bench.tune import cost_fit, regret
from nsa_sel.core import registry
from nsa_sel.core.backend import Offer
from nsa_sel.core.call import device_info
from nsa_sel.core.decision import load_policy, make_decision
from nsa_sel.core.request import DeviceInfo, Request, example_request
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.devices import GPUS, named
from nsa_sel.settings.schema import Settings

LENGTHS, HEADS = [1 << e for e in range(10, 18)], (1, 2, 4, 8, 16, 32, 64)
DECODED = 64  # sequences
REGRET_SHOWN = 60.0  # percent


class Map(NamedTuple):
    """One drawing of the decision map; `measured`: whether the policy is told that the selections are random."""

    direction: str
    title: str
    measured: bool


MAPS = (
    Map("forward", "Forward, as text", False),
    Map("backward", "Backward, as text", False),
    Map("decode", "Decode", False),
    Map("forward", "Forward, random, measured", True),
    Map("backward", "Backward, random, measured", True),
)


def device_of(name: str) -> DeviceInfo | None:
    """The facts of a device that rows name: this machine's own, or one of `nsa_sel.settings.devices`; None for others."""
    here = torch.cuda.is_available() and torch.cuda.get_device_name() == name
    return device_info(torch.device("cuda", 0)) if here else named(name)


def decision_map(name: str, device: DeviceInfo | None) -> Panel:
    """Which backend the policy picks over S and h, on the device and, in numbers, on others."""
    panel = Panel("decision-map", "Which backend runs where")
    elsewhere = [
        (gpu.name, settings_for(gpu).profile, *(_shares(gpu, chart) for chart in MAPS if not chart.measured)) for gpu in GPUS.values()
    ]
    caption = f"Backends by how many of a drawing's {len(LENGTHS) * len(HEADS)} requests they run, as text, on the GPUs with a profile"
    others = Table(caption, table(["device", "profile", "forward", "backward", "decode"], elsewhere, 5))
    if device is None:
        missing = f"No map of {name}: it is neither a GPU in devices.py nor this machine's; of another GPU write the report on it."
        return panel._replace(missing=missing, tables=(others,))
    facets, taken = [], set()
    for chart in MAPS:
        cells = picks(device, chart)
        taken |= {name for line in cells for name in line if name}
        sizes = list(map(thousands, LENGTHS)), list(map(str, HEADS))
        x_label = "keys S_kv" if chart.direction == "decode" else "tokens S"
        draw = figures.tiles(chart.title, x_label, "heads per group, h", *sizes, cells)
        said = "; ".join(f"h {h}: {_runs(line)}" for h, line in zip(HEADS, cells, strict=True))
        facets.append(Facet(f"{chart.title}, {thousands(LENGTHS[0])} to {thousands(LENGTHS[-1])}. {said}.", draw))
    return panel._replace(
        text=f"Asked of the policy itself for {name} (profile {settings_for(device).profile}): bf16, 4 groups, head dims 128, 16 blocks of"
        " 64 keys a row. As text: what it assumes of a selection that nobody measured. Random, measured: after Selection.measure() told it"
        f" that neighboring rows share little. Decode: {DECODED} sequences.",
        figure=Figure(tuple(facets), tuple((role_of(backend), backend) for backend in sorted(taken))),
        tables=(others,),
    )


def picks(device: DeviceInfo, chart: Map) -> list[list[str | None]]:
    """The policy's choices, [HEADS][LENGTHS]; None where nothing may run."""
    return [[_pick(device, chart, S, h) for S in LENGTHS] for h in HEADS]


def _pick(device: DeviceInfo, chart: Map, S: int, h: int) -> str | None:
    case = cases.prefill("random", S, h)
    if chart.direction == "decode":
        case = case._replace(B=DECODED, S=1)
    request = cost_fit.request_of(case, cost_fit.sharing_of(case) if chart.measured else None, chart.direction == "backward")
    settings = tuned.apply(settings_for(device), request, device)
    decision = make_decision(request, device, load_policy("default"), settings, _offers(request, device))
    return decision.backward if chart.direction == "backward" else decision.forward


def _offers(request: Request, device: DeviceInfo) -> tuple[Offer, ...]:
    """On a GPU all backends, whatever is missing on the machine that draws."""
    return registry.offers(request) if device.kind == "cpu" else tuple(Offer(spec) for spec in registry.backends().values())


def _shares(device: DeviceInfo, chart: Map) -> str:
    """Backends by how many cells of a drawing are theirs."""
    counts = Counter(name or "none" for line in picks(device, chart) for name in line).most_common()
    return counts[0][0] if len(counts) == 1 else ", ".join(f"{name} {count}" for name, count in counts)


def _runs(line: Sequence[str | None]) -> str:
    """One h in words: which backend from which length on."""
    begins = [i for i in range(len(line)) if i == 0 or line[i] != line[i - 1]]
    return ", ".join(short(line[i]) + (f" from {thousands(LENGTHS[i])}" if i else "") for i in begins)


def regrets(name: str, device: DeviceInfo | None, rows: Sequence[Row]) -> Panel:
    """What the policy's choices cost beside the best measured backend."""
    panel = Panel("regret", "What the policy's choice costs against the best")
    if device is None:
        return panel._replace(missing=f"No regret on {name}: the policy needs the device's facts, see the map.")
    last = {(row["case"], row["direction"], row["backend"]): row for row in rows if cost_fit.is_time(row)}
    settings = _in_force(device)
    series: tuple[tuple[str, str, regret.Sharing], ...] = (
        ("sharing counted at the first call", "ink", "counted"),
        ("after measure()", "muted", "measured"),
        ("counting off", "other", "assumed"),
    )
    every = [(label, role, regret.choices(list(last.values()), settings, sharing, device)) for label, role, sharing in series]
    told = every[0][2]
    if not told:
        missing = "No case was measured on two backends that the policy has a cost model of: there is no choice to judge."
        return panel._replace(missing=missing)
    facets = []
    for direction in (each for each in TITLES if any(choice.asked.direction == each for choice in told)):
        of_way = [(label, role, [choice for choice in found if choice.asked.direction == direction]) for label, role, found in every]
        values = [Share(label, role, [choice.regret for choice in found]) for label, role, found in of_way]
        draw = figures.shares(TITLES[direction], "at most so many % longer than the best", values, regret.CLOSE, REGRET_SHOWN)
        alt = "; ".join(f"{label}, {regret.summary(found)}" for label, _, found in of_way)
        facets.append(Facet(f"{TITLES[direction]}, share of choices by regret: {alt}.", draw))
    beyond = sum(choice.regret * 100 > REGRET_SHOWN for _, _, found in every for choice in found)
    said = " ".join(f"{label.capitalize()}: {regret.summary(found)}." for label, _, found in every)
    return panel._replace(
        text=f"{said} The first call of a kind counts how much neighboring rows share where that decides. With counting off"
        " (NSA_SEL_COUNT_SHARING=off, or several ranks) the policy assumes that a selection shares blocks as text does, which random ones"
        " do not."
        f"{f' Choices beyond the right edge of the drawings: {beyond}.' if beyond else ''}",
        figure=Figure(tuple(facets)),
        tables=(Table(f"Choices that were not the best, {every[0][0]}", regret.misses(told), folded=True),),
    )


def _in_force(device: DeviceInfo) -> Settings:
    """The device's settings with the thresholds and costs that the user's own tuning found there."""
    return tuned.apply(settings_for(device), example_request(), device)


def thresholds(device: DeviceInfo | None, rows: Sequence[Row]) -> Panel:
    """From which L on Triton is worth it, and how sure that is."""
    panel = Panel("thresholds", "Thresholds, with their evidence")
    every = threshold_optimizer.thresholds(rows)
    if not every:
        return panel._replace(missing=f"No case by L has rows of {TRITON} and {PACKED}: the suite threshold has.")
    facets, said = [], []
    for found in every:
        said.append(f"{found.direction} {_said(found.pairs)}")
        least: dict[int, dict[int, float]] = {}  # D -> L -> the speed-up that spreads leave for sure in the closest case
        for pair in sorted(found.pairs, key=lambda pair: (pair.triton["Dk"], pair.length, -pair.sure_gain)):
            least.setdefault(pair.triton["Dk"], {})[pair.length] = pair.sure_gain
        lines = [Line([*of_D], [*of_D.values()], [TRITON] * len(of_D), f"D {D}", TRITON, dashed=D == 64) for D, of_D in least.items()]
        title = f"{TITLES[found.direction]}: {_said(found.pairs)}"
        draw = figures.gains(title, "selected keys a row, L", "surely times faster", lines, MARGIN, "below the margin", plain)
        alt = "; ".join(f"D {D}, L {L}: {factor(gain)}" for D, of_D in least.items() for L, gain in of_D.items())
        facets.append(Facet(f"{title}. Surely times faster than packed SDPA: {alt}.", draw))
    text = (
        f"The smallest L from which {TRITON} is surely {MARGIN:g}x faster than packed SDPA in every case: packed SDPA's 20th percentile"
        f" over {TRITON}'s 80th. By direction: {', '.join(said)}; of all: {_said(length_pairs(rows, TRITON))}."
    )
    if device:
        settings = _in_force(device)
        least_L = settings.sel_triton_min_L
        values = str(least_L) if isinstance(least_L, int) else ", ".join(f"{length} {direction}" for direction, length in least_L.items())
        text += f" In force: L = {values} ({settings.sources.get('sel_triton_min_L', 'built-in')})."
    return panel._replace(
        text=text,
        figure=Figure(tuple(facets), dashes=("D 128", "D 64")),
        tables=tuple(Table(f"{TITLES[found.direction]}, by L", by_length(found), folded=True) for found in every),
    )


def _said(pairs: Sequence[Pair]) -> str:
    length = sure_length(pairs, MARGIN)
    return "undecided" if length is None else f"L = {length}"
