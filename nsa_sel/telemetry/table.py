"""Plain-text tables, without a package for them."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Iterable, Sequence

LEAST_WIDTH = 12  # characters of a cell, however narrow the terminal


def table(headers: Sequence[str], rows: Iterable[Iterable[object]], width: int = 96, right: Sequence[int] = (), columns: int = 0) -> str:
    """A table for a terminal.

    Args:
        width: most characters of a cell; longer lines are wrapped.
        right: the columns that are aligned to the right.
        columns: of the terminal: cells are wrapped so that lines fit; 0 for any number.
    """
    texts = [[str(cell).splitlines() for cell in row] for row in rows]
    longest = [max(map(len, itertools.chain([header], *(row[i] for row in texts)))) for i, header in enumerate(headers)]
    room = (columns or sys.maxsize) - 2 * (len(headers) - 1)
    width = next((cap for cap in range(width, LEAST_WIDTH, -1) if sum(min(cap, each) for each in longest) <= room), LEAST_WIDTH)
    cells = [[[part for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False)] for lines in row] for row in texts]
    cells.insert(0, [textwrap.wrap(header, width) for header in headers])
    widths = [max(len(part) for cell in column for part in cell or [""]) for column in zip(*cells, strict=True)]
    cells.insert(1, [["-" * each] for each in widths])
    lines = []
    for line in (line for row in cells for line in itertools.zip_longest(*row, fillvalue="")):
        aligned = [part.rjust(widths[i]) if i in right else part.ljust(widths[i]) for i, part in enumerate(line)]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)
