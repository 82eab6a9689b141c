"""What the rows of `speed` say: times against dense attention, layers, scaling, break-even. Tables in Markdown.

Every function takes rows (one object a measurement; of two of the same case, direction and backend the later one counts) and
shows what exists: cases and backends without rows are left out. "Ours" is the fastest of `OURS` in each case and direction.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import DENSE, PACKED
from nsa_sel.bench.core.markdown import MARK, factor, ms, scatters, side_by_side, spread, table
from nsa_sel.bench.core.store import Row, measured
from nsa_sel.core.registry import backends

Table = dict[tuple[str, str], dict[str, Row]]  # by case and direction, in the order of the rows; then by backend

OURS = tuple(name for name in backends() if name != PACKED)
WORKSPACE = 1 << 30  # bytes, the default bound
GAINS = (  # what it is, and the names of its cases
    ("8k tokens of text, h = 16 or 4", r"real-8k-h(16|4)"),
    ("8k tokens of text, h = 1", "real-8k-h1"),
    ("the same, each of 30 layers, 3 groups", r"real-8k-layer\d\d-h1"),
    ("8k tokens, random blocks", r"random-8k-h\d+"),
    ("text, of a model trained with NSA", r"trained-\d+k-h\d+"),
    ("32k to 128k tokens, random blocks", r"random-(32|64|128)k-h\d+"),
    ("1,024 queries over 8k keys", "threshold-prefill.*"),
    ("decode, 1,024 of 16k to 64k keys", r"decode-.*"),
    ("decode, 64 to 1,024 of 8k keys", r"threshold-decode-D\d+-L(?!4096)\d+"),
    ("decode, 4,096 of 8k keys", r"threshold-decode-D\d+-L4096"),
)


class Curve(NamedTuple):
    """How many times faster than dense attention ours is, over the lengths S that were measured; at each, which backend of ours."""

    direction: str
    kind: str  # of selections: real, random
    h: int
    lengths: tuple[int, ...]
    gains: tuple[float, ...]
    backends: tuple[str, ...]
    scattered: tuple[bool, ...]  # whether a time of either scatters


def indexed(rows: Iterable[Row]) -> Table:
    """Rows with a time by case and direction, then by backend."""
    index: Table = {}
    for row in measured(rows):
        index.setdefault((row["case"], row["direction"]), {})[row["backend"]] = row
    return index


def ours(of_case: dict[str, Row]) -> Row | None:
    """The fastest row of our backends; None when there is none."""
    return min((of_case[backend] for backend in OURS if backend in of_case), key=lambda row: row["ms_median"], default=None)


def ours_in(rows: Iterable[Row]) -> tuple[str, ...]:
    """Which of our backends have rows."""
    found = {row["backend"] for row in rows}
    return tuple(backend for backend in OURS if backend in found)


def speed_up(of_case: dict[str, Row], over: str = DENSE) -> float | None:
    """How many times faster ours is than another backend; None when one of the rows is missing."""
    best, other = ours(of_case), of_case.get(over)
    return None if best is None or other is None else float(other["ms_median"] / best["ms_median"])


def break_even(lengths: Sequence[int], gains: Sequence[float]) -> float:
    """The length from which on every gain (dense time over ours) is 1 or more; 0 below the first length, inf beyond the last.

    Between the last length that loses and the next one, log(gain) is taken as linear in log(length): exact for powers of it.
    """
    losing = [i for i, gain in enumerate(gains) if gain < 1]
    if not losing:
        return 0.0
    last = losing[-1]
    if last == len(gains) - 1:
        return math.inf
    low, high = math.log(gains[last]), math.log(gains[last + 1])
    return float(lengths[last] * (lengths[last + 1] / lengths[last]) ** (low / (low - high)))


def performance_table(rows: Iterable[Row]) -> str:
    """Milliseconds of every backend in the prefill, decode and trained cases with rows; ours against dense attention and packed SDPA."""
    names = {case.case for case in (*cases.performance_cases(), *cases.decode_cases(), *cases.trained_cases())}
    chosen = {key: found for key, found in indexed(rows).items() if key[0] in names and key[1] != "fwd+bwd"}
    mine = ours_in(row for found in chosen.values() for row in found.values())
    lines = []
    for key, found in chosen.items():
        if ours(found) is not None:
            times = [ms(found.get(backend)) for backend in (*mine, DENSE, PACKED)]
            lines.append((*key, *times, factor(speed_up(found)), factor(speed_up(found, PACKED), digits=0)))
    return table(["case", *mine, "dense cuDNN", "packed SDPA", "against dense", "against packed"], side_by_side(lines), left=1)


def gains(rows: Iterable[Row], undecided: tuple[str, str] | None = None) -> str:
    """How many times faster the fastest backend is than dense causal attention, over groups of cases; `undecided`: one case, direction."""
    index = indexed(rows)

    def cell(names: str, directions: tuple[str, ...]) -> str:
        of_cell = {key: found for key, found in index.items() if key[1] in directions and re.fullmatch(names, key[0])}
        found = sorted(gain for gain in map(speed_up, of_cell.values()) if gain is not None)
        if not found:
            return "-"
        ends = " to ".join(dict.fromkeys(factor(gain) for gain in (found[0], found[-1])))
        slower = sum(gain < 1 for gain in found)
        return ends + ", undecided" * (set(of_cell) == {undecided}) + (f" ({slower} of {len(found)} slower)" if slower else "")

    lines = [(what, *(cell(names, directions) for directions in (("fwd", "decode"), ("bwd",), ("fwd+bwd",)))) for what, names in GAINS]
    measured = [line for line in lines if set(line[1:]) != {"-"}]
    return table(["queries and keys", "forward", "backward", "both in one call"], measured)


def close_case(files: dict[str, Iterable[Row]], case: str, direction: str) -> str:
    """One case in several files of rows: each of ours against dense attention of the same file, with spreads and whether they overlap."""
    lines = []
    for name, rows in files.items():
        found = indexed(rows).get((case, direction), {})
        dense = found[DENSE]
        for row in (found[backend] for backend in OURS if backend in found):
            ahead = row["ms_p80"] < dense["ms_p20"], dense["ms_p80"] < row["ms_p20"]
            verdict = "faster" if ahead[0] else "slower" if ahead[1] else "undecided, spreads overlap"
            gain = factor(dense["ms_median"] / row["ms_median"])
            lines.append((name, row["backend"], ms(row), spread(row), ms(dense), gain, verdict))
    return table(["rows", "backend", "ms", "20th to 80th", "dense cuDNN", "against dense", "verdict"], lines, left=2)


def workspace_table(rows: Iterable[Row]) -> str:
    """The most memory that each of our backends takes beyond inputs and outputs, and in which case."""
    lines = []
    for backend in (*OURS, PACKED):
        most = max((row for row in measured(rows) if row["backend"] == backend), key=lambda row: row["workspace_bytes"], default=None)
        if most is not None:
            share = most["workspace_bytes"] / WORKSPACE
            met = "met" if share <= 1 else f"over by {share - 1:.0%}"
            lines.append((backend, most["case"], most["direction"], f"{share * 1024:.0f}", met))
    return table(["backend", "case", "direction", "most, MiB", "1 GiB"], lines, left=3)


def layers_table(rows: Iterable[Row]) -> str:
    """Over the layers of the committed maps, each with all its KV heads: ours, dense attention, how often ours is faster, which it is."""
    named = {case.case: case for case in cases.layer_cases()}
    groups: dict[tuple[int, int, str], list[dict[str, Row]]] = {}
    for (case, direction), found in indexed(rows).items():
        if case in named and ours(found) is not None and DENSE in found:
            groups.setdefault((named[case].B, named[case].h, direction), []).append(found)
    lines = []
    for (B, h, direction), members in groups.items():
        mine = [row for row in map(ours, members) if row is not None]
        gains = [gain for gain in map(speed_up, members) if gain is not None]
        low, high = (pick(mine, key=lambda row: row["ms_median"]) for pick in (min, max))
        middle, dense = (f"{median(row['ms_median'] for row in some):.3g}" for some in (mine, [found[DENSE] for found in members]))
        slowest = "-".join(map(str, cases.layers_of(high["case"])))
        against = f"{factor(min(gains))} to {factor(max(gains))}", sum(gain > 1 for gain in gains)
        lines.append((B, h, direction, len(members), ms(low), middle, ms(high), slowest, dense, *against, most_used(mine)))
    headers = ["B", "h", "direction", "cases", "min", "median", "max", "slowest layer", "dense", "against dense", "faster", "which"]
    return table(headers, lines, left=3)


def scaling_table(rows: Iterable[Row]) -> str:
    """ms of random selections by S, by direction and h, and how the time of 1024 rows changes from end to end."""
    index = indexed(rows)
    lines = []
    for direction in ("fwd", "bwd"):
        for h, points in by_heads(index, cases.scaling_cases(), direction):
            if len(points) < 2:
                continue
            lengths, mine = [case.S / 1024 for case, _ in points], [row for _, found in points if (row := ours(found)) is not None]
            first, last = (mine[i]["ms_median"] / lengths[i] for i in (0, -1))
            dense = [found[DENSE]["ms_median"] / (case.S / 1024) for case, found in points if DENSE in found]
            times = ", ".join(f"{S:.0f}k {ms(row)}" for S, row in zip(lengths, mine, strict=True))
            ends = f"{first:.3g}", f"{last:.3g}", f"{last / first:.2f}", f"{dense[-1] / dense[0]:.2f}" if len(dense) == len(points) else "-"
            lines.append((direction, h, most_used(mine), times, *ends))
    per_row = ["ms a 1024 rows, first", "last", "last / first", "dense: last / first"]
    return table(["direction", "h", "which", "S: ms", *per_row], lines, left=4)


def curves(rows: Iterable[Row]) -> list[Curve]:
    """Ours against dense attention over S, from the first rows of a text to 128k rows, by direction, kind of selection and h (falling).

    Text beyond the 8k tokens of SmolLM2's maps is that of models trained with NSA.
    """
    index = indexed(rows)
    every = list({case.case: case for case in (*cases.breakeven_cases(), *cases.scaling_cases(), *cases.trained_cases())}.values())
    found = []
    for direction in ("fwd", "bwd", "fwd+bwd"):
        for kind, distributions in (("real", ("real", "trained")), ("random", ("random",))):
            some = sorted((case for case in every if case.distribution in distributions), key=lambda case: case.S)
            for h, points in by_heads(index, some, direction):
                measured = [
                    (case.S, gain, best["backend"], scatters(best) or scatters(of_case[DENSE]))
                    for case, of_case in points
                    if (gain := speed_up(of_case)) is not None and (best := ours(of_case)) is not None
                ]
                if measured:
                    found.append(Curve(direction, kind, h, *zip(*measured, strict=True)))
    return found


def breakeven_table(rows: Iterable[Row]) -> str:
    """From which length on ours is faster than dense attention, by h, direction and kind of selection, and how much at each length."""
    lines = []
    for direction, kind, h, lengths, gains, _, scattered in curves(rows):
        at = ", ".join(f"{S // 1024}k {factor(gain)}{MARK * mark}" for S, gain, mark in zip(lengths, gains, scattered, strict=True))
        lines.append((direction, kind, h, from_length(break_even(lengths, gains), lengths), at))
    return table(["direction", "selection", "h", "faster from S", "against dense at S"], lines, left=2)


def by_heads(index: Table, some: Iterable[Case], direction: str) -> Iterable[tuple[int, list[tuple[Case, dict[str, Row]]]]]:
    """By h, falling: the cases in which ours was measured, in their order."""
    groups: dict[int, list[tuple[Case, dict[str, Row]]]] = {}
    for case in some:
        found = index.get((case.case, direction), {})
        if ours(found) is not None:
            groups.setdefault(case.h, []).append((case, found))
    return sorted(groups.items(), reverse=True)


def from_length(S: float, measured: Sequence[int]) -> str:
    """A break-even length, or on which side of the measured ones it lies."""
    if S == 0:
        return f"below {measured[0] // 1024}k"
    return f"above {measured[-1] // 1024}k" if S == math.inf else f"{S / 1024:.2g}k"


def most_used(rows: Iterable[Row]) -> str:
    """Backends by how often they were the fastest."""
    counts = Counter(map(short, rows)).most_common()
    return counts[0][0] if len(counts) == 1 else ", ".join(f"{name} {count}" for name, count in counts)


def short(row: Row) -> str:
    """A row's backend without the framework that most share."""
    return str(row["backend"]).removeprefix("triton-")
