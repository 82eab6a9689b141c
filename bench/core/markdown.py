"""Tables in Markdown, and how a measured time is written in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

from nsa_sel.bench.core.store import Row

SCATTERED = 0.2  # of the median: rows whose 20th and 80th percentiles differ by more are marked
MARK = "†"
MARK_NOTE = f"{MARK} a time that scatters: its 20th and 80th percentiles differ by more than {SCATTERED:.0%} of the median."


def table(headers: Sequence[str], lines: Iterable[Sequence[Any]], left: int | None = None) -> str:
    """A table. left: the first columns, flush left, the others flush right; None: all as tabulate does, flush left."""
    cells = [[str(cell) for cell in line] for line in lines]
    align = None if left is None or not cells else ("left",) * left + ("right",) * (len(headers) - left)
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True, colalign=align)


def side_by_side(lines: Iterable[Sequence[Any]]) -> list[list[str]]:
    """Lines of a case, a direction and cells, as one line for each case: "forward / backward", or a single direction's cell (decoding)."""
    cases: dict[str, dict[str, Sequence[Any]]] = {}
    for case, direction, *cells in lines:
        cases.setdefault(case, {})[direction] = cells
    made = []
    for case, found in cases.items():
        single = len(found) == 1 and "bwd" not in found
        blank = ["-"] * len(next(iter(found.values())))
        pairs = zip(found.get("fwd", blank), found.get("bwd", blank), strict=True)
        made.append([case, *(next(iter(found.values())) if single else map(pair_of, pairs))])
    return made


def pair_of(cells: Sequence[str]) -> str:
    """Two cells as one."""
    return "-" if set(cells) == {"-"} else " / ".join(cells)


def scatters(row: Row) -> bool:
    """Whether the median is quoted with a mark. Some rows have no percentiles."""
    return "ms_p20" in row and row["ms_p80"] - row["ms_p20"] > SCATTERED * row["ms_median"]


def ms(row: Row | None, digits: int = 3) -> str:
    """The median in ms, marked where it scatters; "-" without a row."""
    return "-" if row is None else f"{row['ms_median']:.{digits}g}{MARK * scatters(row)}"


def spread(row: Row, digits: int = 3, unit: str = "ms") -> str:
    """The 20th to the 80th percentile."""
    return f"{row[f'{unit}_p20']:.{digits}g} to {row[f'{unit}_p80']:.{digits}g}"


def factor(gain: float | None, digits: int = 2) -> str:
    """How many times faster: 1.23x; "-" where it is not measured."""
    return "-" if gain is None else f"{gain:.{digits}f}x"


def environment(row: Row) -> str:
    """The device, versions and commit that a row was measured with."""
    versions = [f"{name} {row[name]}" for name in ("torch", "triton", "numba", "driver", "commit") if row.get(name)]
    return ", ".join((row["device"], *versions))


def with_note(text: str) -> str:
    """A text, and what the mark means where it has one."""
    return f"{text}\n\n{MARK_NOTE}" if MARK in text else text
