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
    """Return a table. left: the number of columns flush left, the others are flush right;

    None: all as tabulate does, flush left.
    """
    cells = [[str(cell) for cell in line] for line in lines]
    align = None if left is None or not cells else ("left",) * left + ("right",) * (len(headers) - left)
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True, colalign=align)


def side_by_side(lines: Iterable[Sequence[Any]]) -> list[list[str]]:
    """Merge lines of a case, a direction and cells into one per case: "forward / backward", or a single direction's
    cell (decoding).
    """
    cases: dict[str, dict[str, Sequence[Any]]] = {}
    for case, direction, *cells in lines:
        cases.setdefault(case, {})[direction] = cells
    made = []
    for case, found in cases.items():
        first = next(iter(found.values()))
        pairs = zip(*(found.get(direction, ["-"] * len(first)) for direction in ("fwd", "bwd")), strict=True)
        made.append([case, *(first if len(found) == 1 and "bwd" not in found else map(pair_of, pairs))])
    return made


def pair_of(cells: Sequence[str]) -> str:
    """Return two cells as one."""
    return "-" if set(cells) == {"-"} else " / ".join(cells)


def scatters(row: Row) -> bool:
    """Return True if the median gets a mark. Some rows have no percentiles."""
    return "ms_p20" in row and row["ms_p80"] - row["ms_p20"] > SCATTERED * row["ms_median"]


def ms(row: Row | None, digits: int = 3) -> str:
    """Return the median in ms, marked if it scatters; "-" without a row."""
    return "-" if row is None else f"{row['ms_median']:.{digits}g}{MARK * scatters(row)}"


def spread(row: Row, digits: int = 3, unit: str = "ms") -> str:
    """Return the 20th to the 80th percentile."""
    return f"{row[f'{unit}_p20']:.{digits}g} to {row[f'{unit}_p80']:.{digits}g}"


def factor(gain: float | None, digits: int = 2) -> str:
    """Return a speedup as 1.23x; "-" for None."""
    return "-" if gain is None else f"{gain:.{digits}f}x"


def environment(row: Row) -> str:
    """Return the device, versions and commit that a row was measured with."""
    versions = [f"{name} {row[name]}" for name in ("torch", "triton", "numba", "driver", "commit") if row.get(name)]
    return ", ".join((row["device"], *versions))


def with_note(text: str) -> str:
    """Add what the mark means to a text that has one."""
    return f"{text}\n\n{MARK_NOTE}" if MARK in text else text
