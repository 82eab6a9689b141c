"""The report's panels on the policy: what it picks where, what its choices cost, and what its thresholds rest on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.markdown import factor
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.report import report_figures
from nsa_sel.bench.report.report_figures import Facet, Figure, Line, Share, role_of, short
from nsa_sel.bench.report.report_page import Panel, Table, of_markdown
from nsa_sel.bench.report.report_panels import TITLES, plain, thousands, way_name
from nsa_sel.bench.report.summary import PACKED
from nsa_sel.bench.threshold_optimizer import MARGIN, Pair, length_pairs, sure_length
from nsa_sel.bench.tune import cost_fit, regret
from nsa_sel.core import registry
from nsa_sel.core.call import device_info
from nsa_sel.core.decision import Offer
from nsa_sel.core.dispatch import load_policy, select
from nsa_sel.core.request import DeviceInfo, Request, example_request
from nsa_sel.settings import tuned
from nsa_sel.settings.config import Settings, settings_for
from nsa_sel.settings.devices import GPUS, named

LENGTHS, HEADS = [1 << e for e in range(10, 18)], (1, 2, 4, 8, 16, 32, 64)
DECODED = 64  # sequences
REGRET_SHOWN = 60.0  # percent
GATED = "triton-group"  # the backend that derive.py compares with packed SDPA


class Map(NamedTuple):
    """One drawing of the decision map; `measured`: whether the policy is told that the selections are random."""

    way: str
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


# What it picks


def decision_map(name: str, device: DeviceInfo | None) -> Panel:
    """Which backend the policy picks over S and h, on the device and, in numbers, on others."""
    panel = Panel("decision-map", "Which backend where")
    headers = ["device", "profile", "forward", "backward", "decode"]
    elsewhere = [
        (gpu.name, settings_for(gpu).profile, *(_shares(gpu, chart) for chart in MAPS if not chart.measured)) for gpu in GPUS.values()
    ]
    caption = f"Who takes how many of a drawing's {len(LENGTHS) * len(HEADS)} requests, as text, on the GPUs that nsa-sel knows by name"
    others = Table(caption, headers, elsewhere, 5)
    if device is None:
        missing = f"No map of {name}: it is neither a GPU in devices.py nor this machine's; of another GPU write the report on it."
        return panel._replace(missing=missing, tables=(others,))
    facets, taken = [], set()
    for chart in MAPS:
        cells = picks(device, chart)
        taken |= {name for line in cells for name in line if name}
        sizes = list(map(thousands, LENGTHS)), list(map(str, HEADS))
        draw = report_figures.tiles(chart.title, "keys S_kv" if chart.way == "decode" else "tokens S", "heads a group, h", *sizes, cells)
        said = "; ".join(f"h {h}: {_runs(line)}" for h, line in zip(HEADS, cells, strict=True))
        alt = f"{chart.title}, {thousands(LENGTHS[0])} to {thousands(LENGTHS[-1])}. {said}."
        facets.append(Facet(f"{chart.way}-{'random' if chart.measured else 'text'}", alt, draw))
    return panel._replace(
        text=f"Asked of the policy itself for {name} (profile {settings_for(device).profile}): bf16, 4 groups, head dims 128, 16 blocks of"
        " 64 keys a row. As text: what it assumes of a selection that nobody measured. Random, measured: after Selection.measure() told it"
        f" that neighbouring rows share little. Decode: {DECODED} sequences.",
        figure=Figure(panel.name, tuple(facets), tuple((role_of(backend), backend) for backend in sorted(taken))),
        tables=(others,),
    )


def picks(device: DeviceInfo, chart: Map) -> list[list[str | None]]:
    """The policy's choices, [HEADS][LENGTHS]; None where nothing may run."""
    return [[_pick(device, chart, S, h) for S in LENGTHS] for h in HEADS]


def _pick(device: DeviceInfo, chart: Map, S: int, h: int) -> str | None:
    case = cases.prefill("random", S, h)
    if chart.way == "decode":
        case = case._replace(B=DECODED, S=1)
    request = cost_fit.request_of(case, cost_fit.sharing_of(case) if chart.measured else None, chart.way == "backward")
    settings = tuned.apply(settings_for(device), request, device)
    decision = select(request, device, load_policy("default"), settings, _offers(request, device))
    return decision.backward if chart.way == "backward" else decision.forward


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


# What its choices cost


def regrets(name: str, device: DeviceInfo | None, rows: Sequence[Row]) -> Panel:
    """What the policy's choices cost beside the best measured backend."""
    panel = Panel("regret", "What the policy's choice costs against the best")
    if device is None:
        return panel._replace(missing=f"No regret on {name}: the policy needs the device's facts, see the map.")
    last = {(row["case"], row["direction"], row["backend"]): row for row in rows if cost_fit.is_time(row)}
    settings = _in_force(device)
    told, untold = (regret.choices(list(last.values()), settings, known, device) for known in (True, False))
    if not told:
        return panel._replace(
            missing="No case was measured on two backends that the policy knows the work of: there is no choice to judge."
        )
    both = (("sharing measured", "ink", told), ("sharing not measured", "other", untold))
    facets = []
    for direction in (way for way in TITLES if any(choice.direction == way for choice in told)):
        of_way = [(label, role, [choice for choice in found if choice.direction == direction]) for label, role, found in both]
        values = [Share(label, role, [choice.regret for choice in found]) for label, role, found in of_way]
        draw = report_figures.shares(TITLES[direction], "at most so many % longer than the best", values, regret.CLOSE, REGRET_SHOWN)
        alt = "; ".join(f"{label}, {regret.summary(found)}" for label, _, found in of_way)
        facets.append(Facet(way_name(direction), f"{TITLES[direction]}, share of choices by regret: {alt}.", draw))
    beyond = sum(choice.regret * 100 > REGRET_SHOWN for _, _, found in both for choice in found)
    said = " ".join(f"{label.capitalize()}: {regret.summary(found)}." for label, _, found in both)
    return panel._replace(
        text=f"{said} Where nobody measured it, the policy takes a selection for text, which random ones are not."
        f"{f' Choices that lie right of the drawings: {beyond}.' if beyond else ''}",
        figure=Figure(panel.name, tuple(facets)),
        tables=tuple(
            of_markdown(regret.misses(found), f"Choices that were not the best, {label}", 3, folded=True) for label, _, found in both
        ),
    )


def _in_force(device: DeviceInfo) -> Settings:
    """The device's settings with the thresholds and costs that the user's own tuning found there."""
    return tuned.apply(settings_for(device), example_request(), device)


# What its thresholds rest on


class Evidence(NamedTuple):
    """Of the cases of one direction, head dim and L, the closest: both rows, and the speed-up that their spreads leave for sure."""

    direction: str
    D: int
    L: int
    cases: int
    closest: Pair


def evidence(rows: Sequence[Row]) -> list[Evidence]:
    """The pairs of rows by L: those of the threshold suite and of bench_sel_triton's matrix."""
    groups: dict[tuple[int, int, int], list[Pair]] = {}
    for pair in length_pairs(rows, GATED):
        groups.setdefault((list(TITLES).index(pair.triton["direction"]), pair.triton["Dk"], pair.length), []).append(pair)
    return [
        Evidence(list(TITLES)[way], D, L, len(pairs), min(pairs, key=lambda pair: pair.sure_gain))
        for (way, D, L), pairs in sorted(groups.items())
    ]


def thresholds(device: DeviceInfo | None, rows: Sequence[Row]) -> Panel:
    """From which L on Triton is worth it, and how sure that is."""
    panel = Panel("thresholds", "Thresholds, with their evidence")
    pairs = evidence(rows)
    if not pairs:
        return panel._replace(missing=f"No case by L has rows of {GATED} and {PACKED}: bench_selection's suite threshold has.")
    facets, said = [], []
    for direction in dict.fromkeys(pair.direction for pair in pairs):
        some = [pair for pair in pairs if pair.direction == direction]
        found = _said([row for row in rows if row["direction"] == direction])
        said.append(f"{direction} {found}")
        lines = []
        for D in dict.fromkeys(pair.D for pair in some):
            of_D = [pair for pair in some if pair.D == D]
            gains = [pair.closest.sure_gain for pair in of_D]
            lines.append(Line([pair.L for pair in of_D], gains, [GATED] * len(of_D), f"D {D}", GATED, dashed=D == 64))
        title = f"{TITLES[direction]}: {found}"
        draw = report_figures.gains(title, "selected keys a row, L", "surely times faster", lines, MARGIN, "below the margin", plain)
        alt = "; ".join(f"D {pair.D}, L {pair.L}: {factor(pair.closest.sure_gain)}" for pair in some)
        facets.append(Facet(way_name(direction), f"{title}. Surely times faster than packed SDPA: {alt}.", draw))
    text = (
        f"The smallest L from which {GATED} is surely {MARGIN:g}x faster than packed SDPA in every case: packed SDPA's 20th percentile over"
        f" {GATED}'s 80th. By direction: {', '.join(said)}; of all: {_said(rows)}."
    )
    if device:
        settings = _in_force(device)
        least = settings.sel_triton_min_L
        values = str(least) if isinstance(least, int) else ", ".join(f"{length} {way}" for way, length in least.items())
        text += f" In force: L = {values} ({settings.sources.get('sel_triton_min_L', 'built-in')})."
    cells = [
        (p.direction, p.D, p.L, p.cases, p.closest.triton["case"], *map(_spread, p.closest), factor(p.closest.sure_gain)) for p in pairs
    ]
    headers = ["direction", "D", "L", "cases", "closest case", f"{GATED}, ms", f"{PACKED}, ms", "surely faster by"]
    return panel._replace(
        text=text,
        figure=Figure(panel.name, tuple(facets), dashes=("D 128", "D 64")),
        tables=(Table("The closest case by L: medians, 20th to 80th percentile", headers, cells, 5, folded=True),),
    )


def _said(rows: Sequence[Row]) -> str:
    length = sure_length(length_pairs(rows, GATED), MARGIN)
    return "undecided" if length is None else f"L = {length}"


def _spread(row: Row) -> str:
    return f"{row['ms_median']:.3g} ({row['ms_p20']:.3g} to {row['ms_p80']:.3g})"
