"""Plain-text tables without a third-party package."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Iterable, Sequence

MIN_WIDTH = 12  # characters of a cell, however narrow the terminal


def table(headers: Sequence[str], rows: Iterable[Iterable[object]], width: int = 96, right: Sequence[int] = (), columns: int = 0) -> str:
    """Format a table for a terminal.

    Args:
        headers: titles of the columns.
        rows: cells, converted with `str`. A cell may have several lines.
        width: maximum characters of a cell; longer lines are wrapped.
        right: indices of right-aligned columns.
        columns: width of the terminal, to which cells are wrapped. 0: unlimited.

    Returns:
        The table's lines.
    """
    texts = [[str(cell).splitlines() for cell in row] for row in rows]
    longest = [max(map(len, itertools.chain([header], *(row[i] for row in texts)))) for i, header in enumerate(headers)]
    available = (columns or sys.maxsize) - 2 * (len(headers) - 1)
    width = next((cap for cap in range(width, MIN_WIDTH, -1) if sum(min(cap, size) for size in longest) <= available), MIN_WIDTH)
    cells = [[[piece for line in lines for piece in textwrap.wrap(line, width, break_on_hyphens=False)] for lines in row] for row in texts]
    cells.insert(0, [textwrap.wrap(header, width) for header in headers])
    widths = [max(len(piece) for cell in column for piece in cell or [""]) for column in zip(*cells, strict=True)]
    cells.insert(1, [["-" * size] for size in widths])
    lines = []
    for line in (line for row in cells for line in itertools.zip_longest(*row, fillvalue="")):
        aligned = [piece.rjust(widths[i]) if i in right else piece.ljust(widths[i]) for i, piece in enumerate(line)]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)
