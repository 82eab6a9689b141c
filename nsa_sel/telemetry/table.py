"""Plain-text tables, without a package for them."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence


def table(headers: Sequence[str], rows: Iterable[Iterable[object]], width: int = 96, right: Sequence[int] = ()) -> str:
    """A table for a terminal.

    Args:
        width: characters of a cell; longer lines are wrapped.
        right: the columns that are aligned to the right.
    """
    cells = [[[part for line in str(cell).splitlines() for part in textwrap.wrap(line, width)] for cell in row] for row in rows]
    cells.insert(0, [[header] for header in headers])
    widths = [max(len(part) for cell in column for part in cell or [""]) for column in zip(*cells, strict=True)]
    cells.insert(1, [["-" * each] for each in widths])
    lines = []
    for line in (line for row in cells for line in itertools.zip_longest(*row, fillvalue="")):
        aligned = [part.rjust(widths[i]) if i in right else part.ljust(widths[i]) for i, part in enumerate(line)]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)
