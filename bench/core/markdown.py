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


def pivot(
    headers: Sequence[str], cells: Iterable[tuple[tuple[Any, ...], Any, Any, str]], parts: Sequence[Any], left: int | None = None
) -> str:
    """Return a table of cells, which may come in any order. Of two for the same part of a cell the later one counts.

    Args:
        headers: of the keys of lines. The other columns are headed by their own names, in the order in which they come.
        cells: line, column, part and text of each. A line begins with its key.
        parts: what a cell shows, as "forward / backward"; "-" for those that it lacks. Another part, such as the time of
            a decoding step, is shown alone.
        left: as of `table`.
    """
    lines: dict[tuple[Any, ...], dict[Any, dict[Any, str]]] = {}
    columns: dict[Any, None] = {}
    for line, column, part, text in cells:
        lines.setdefault(line, {}).setdefault(column, {})[part] = text
        columns[column] = None

    def cell(found: dict[Any, str]) -> str:
        texts = [text for part, text in found.items() if part not in parts][:1] or [found.get(part, "-") for part in parts]
        return "-" if set(texts) == {"-"} else " / ".join(texts)

    found = [(*line, *(cell(some[column]) if column in some else "-" for column in columns)) for line, some in lines.items()]
    return table([*headers, *map(str, columns)], found, left)


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
