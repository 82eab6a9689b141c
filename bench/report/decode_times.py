"""Decoding beside what reading keys and values once takes, and the targets, which what the policy picks is held to.

Targets in microseconds are the H200's. Ratios hold on every GPU that has rows below bench/results.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from nsa_sel.bench.core import store
from nsa_sel.bench.core.caches import Cache
from nsa_sel.bench.core.cases import Case, least_bytes
from nsa_sel.bench.core.environment import ROOT
from nsa_sel.bench.core.markdown import table
from nsa_sel.bench.core.reading_alone import BACKEND, READING
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.report import decoding
from nsa_sel.bench.report.roofline import COPY_TBS
from nsa_sel.bench.tune.committed_rows import H200
from nsa_sel.bench.tune.cost_fit import backend_of, cache_of, case_of, request_of, sharing_of
from nsa_sel.bench.tune.regret import Choice
from nsa_sel.policies.cost import BYTES, sharing_at, stored_size
from nsa_sel.settings.devices import GPUS

SHOWN = ("cupy-cuda", "triton-group")
SMALL_PAGES = Cache(64)
FORMAT = Cache(None, quantized="e4m3/head")
ONE_RANK = "B64-32k-G1-h16-b128"  # MiniMax-M3 on four ranks
TARGETS = (  # what, case, microseconds
    ("one sequence", "decode-B1-64k-h16", 4.8),
    ("a batch", "decode-B64-32k-h16", 34),
    ("a large batch", "decode-B256-16k-h16", 126),
    ("MiniMax-M3, a rank of four", f"parallel-{ONE_RANK}", 23.5),
    ("a batch, 4 tokens each", "tokens-alike-B64-S4-32k-G4-h16-D128", 68),
    ("MiniMax-M3, a rank of four, 4 tokens each", "tokens-alike-B64-S4-32k-G1-h16-D128", 38),
)
RATIOS = (  # what, case, the cache, the cache that it is compared with, how many times as long
    ("pages of 64", "decode-B64-32k-h16", SMALL_PAGES, Cache(None), 1.03),
    ("pages of 64", "decode-B256-16k-h16", SMALL_PAGES, Cache(None), 1.03),
    ("pages of 64, 4 tokens each", "tokens-alike-B64-S4-32k-G4-h16-D128", SMALL_PAGES, Cache(None), 1.05),
    ("e4m3 over bfloat16", "decode-B64-32k-h16", FORMAT, Cache(None), 0.62),
    ("e4m3 over bfloat16", "decode-B256-16k-h16", FORMAT, Cache(None), 0.62),
)

OVER_READING, FROM_SEQUENCES = 1.08, 64  # a rank of tensor parallelism over what reading alone takes, from so many sequences on


class Floor(NamedTuple):
    """Bytes of the keys and values that the rows of a sequence select, each once, and how long a copy of as many takes."""

    bytes: float
    us: float


def floor(case: Case, cache: Cache | None = None) -> Floor:
    """What a step cannot avoid reading; of few tokens the union of their blocks."""
    request = request_of(case, None, False, cache)
    union = sharing_at(sharing_of(case), case.S) / case.S
    read = least_bytes(case) * union * stored_size(request) / BYTES[case.dtype]
    return Floor(read, read / COPY_TBS[H200] / 1e6)


def times_table() -> str:
    """Microseconds of plain calls by backend, and in brackets how many times as long as reading once."""
    found: dict[str, dict[str, Row]] = {}
    for row in decoding.rows():
        if cache_of(row) is None and backend_of(row) in SHOWN:
            found.setdefault(row["case"], {})[backend_of(row)] = row
    picked = {choice.asked.case.case: choice.picked for choice in decoding.choices() if choice.asked.cache is None}
    lines = []
    for name, times in found.items():
        least = floor(case_of(next(iter(times.values())))).us
        cells = [_over(times[backend]["ms_median"] * 1e3, least) if backend in times else "-" for backend in SHOWN]
        lines.append((name, f"{least:.1f}", *cells, picked.get(name, "-")))
    return table(("case", "reading once", *SHOWN, "picked"), lines)


def targets_table() -> str:
    """Every target whose case has rows: what is reached by the policy's choice, and whether that meets it."""
    found = by_call("h200")
    lines: list[tuple[str, ...]] = [
        (what, case, f"{most:g} us", f"{choice.ms * 1e3:.1f} us", choice.picked, _outcome(choice.ms * 1e3, most))
        for what, case, most in TARGETS
        if (choice := found.get((case, None)))
    ]
    ratios = [line for gpu in decoding.measured_gpus() for line in _ratios(by_call(gpu), "" if gpu == "h200" else f", {GPUS[gpu].name}")]
    return table(("what", "case", "target", "reached", "by", "outcome"), [*lines, *ratios])


def by_call(gpu: str) -> dict[tuple[str, Cache | None], Choice]:
    """What the policy picks on a GPU, by case and cache."""
    return {(choice.asked.case.case, choice.asked.cache): choice for choice in decoding.choices(gpu)}


def reading_table() -> str:
    """Decoding on a rank of tensor parallelism beside its kernel with consumers that compute nothing (bench/core/reading_alone.cu)."""
    lines = [_reading_line(found) for found in _beside_reading()]
    headers = ("GPU", "case", "copy", *READING, BACKEND, *(f"over {name}" for name in READING), f"{OVER_READING:g}x of the first")
    return table(headers, lines)


def held_table() -> str:
    """By GPU, of the sizes that are held to OVER_READING: how many are within it, and the worst."""
    lines = []
    held = [found for found in _beside_reading() if found[BACKEND]["B"] >= FROM_SEQUENCES]
    for gpu, name in itertools.product(dict.fromkeys(found[BACKEND]["device"] for found in held), READING):
        over = {found[BACKEND]["case"]: _over_reading(found, name) for found in held if found[BACKEND]["device"] == gpu}
        worst = max(over, key=lambda case: over[case])
        lines.append((gpu, name, f"{sum(x <= OVER_READING for x in over.values())} of {len(over)}", f"{over[worst]:.3f}x", worst))
    return table(("GPU", "beside", f"within {OVER_READING:g}x", "worst", "worst in"), lines)


def _beside_reading() -> list[dict[str, Row]]:
    """Of every case of `parallel` whose kernel was timed beside reading: its rows, by backend."""
    found = list[dict[str, Row]]()
    for gpu in decoding.measured_gpus():
        file = ROOT / decoding.RESULTS / gpu / "parallel.jsonl"
        times: dict[str, dict[str, Row]] = {}
        for row in store.of_last_environment(store.measured(store.read(file))) if file.exists() else ():
            times.setdefault(row["case"], {})[row["backend"]] = row
        found += [rows for rows in times.values() if {BACKEND, *READING} <= set(rows)]
    return found


def _over_reading(found: Mapping[str, Row], name: str) -> float:
    return float(found[BACKEND]["ms_median"] / found[name]["ms_median"])


def _reading_line(found: Mapping[str, Row]) -> tuple[str, ...]:
    """Of the rows of one case, by backend."""
    row, over = found[BACKEND], [_over_reading(found, name) for name in READING]
    copied = f"{row['least_bytes'] / COPY_TBS[row['device']] / 1e6:.1f}" if row["device"] in COPY_TBS else "-"
    held = _outcome(over[0], OVER_READING) if row["B"] >= FROM_SEQUENCES else "-"
    times = [f"{found[name]['ms_median'] * 1e3:.1f}" for name in (*READING, BACKEND)]
    return row["device"], row["case"], copied, *times, *(f"{x:.3f}x" for x in over), held


def _ratios(found: Mapping[tuple[str, Cache | None], Choice], where: str) -> list[tuple[str, ...]]:
    lines = list[tuple[str, ...]]()
    for what, case, cache, over, most in RATIOS:
        one, other = found.get((case, cache)), found.get((case, over))
        if one and other:
            lines.append((what + where, case, f"{most:g}x", f"{one.ms / other.ms:.3f}x", one.picked, _outcome(one.ms / other.ms, most)))
    return lines


def _outcome(reached: float, most: float) -> str:
    return "met" if reached <= most else f"missed by {reached / most - 1:.1%}"


def _over(us: float, least: float) -> str:
    return f"{us:.1f} ({us / least:.2f}x)"
