"""Decoding on the H200 beside what reading keys and values once takes, and the targets, which what the policy picks is held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nsa_sel.bench.core.caches import Cache
from nsa_sel.bench.core.cases import Case, least_bytes
from nsa_sel.bench.core.markdown import table
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.report import decoding
from nsa_sel.bench.report.roofline import PEAKS
from nsa_sel.bench.tune.committed_rows import H200
from nsa_sel.bench.tune.cost_fit import backend_of, cache_of, case_of, request_of, sharing_of
from nsa_sel.bench.tune.regret import Choice
from nsa_sel.policies.cost import BYTES, sharing_at, stored_size

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


class Floor(NamedTuple):
    """Bytes of the keys and values that the rows of a sequence select, each once, and how long a copy of as many takes."""

    bytes: float
    us: float


def floor(case: Case, cache: Cache | None = None) -> Floor:
    """What a step cannot avoid reading; of few tokens the union of their blocks."""
    request = request_of(case, None, False, cache)
    union = sharing_at(sharing_of(case), case.S) / case.S
    read = least_bytes(case) * union * stored_size(request) / BYTES[case.dtype]
    return Floor(read, read / PEAKS[H200].copy_tbs / 1e6)


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
    found = {(choice.asked.case.case, choice.asked.cache): choice for choice in decoding.choices()}
    lines: list[tuple[str, ...]] = [
        (what, case, f"{most:g} us", f"{choice.ms * 1e3:.1f} us", choice.picked, _outcome(choice.ms * 1e3, most))
        for what, case, most in TARGETS
        if (choice := found.get((case, None)))
    ]
    return table(("what", "case", "target", "reached", "by", "outcome"), [*lines, *_ratios(found)])


def _ratios(found: Mapping[tuple[str, Cache | None], Choice]) -> list[tuple[str, ...]]:
    lines = list[tuple[str, ...]]()
    for what, case, cache, over, most in RATIOS:
        one, other = found.get((case, cache)), found.get((case, over))
        if one and other:
            lines.append((what, case, f"{most:g}x", f"{one.ms / other.ms:.3f}x", one.picked, _outcome(one.ms / other.ms, most)))
    return lines


def _outcome(reached: float, most: float) -> str:
    return "met" if reached <= most else f"missed by {reached / most - 1:.1%}"


def _over(us: float, least: float) -> str:
    return f"{us:.1f} ({us / least:.2f}x)"
