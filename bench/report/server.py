"""The table of docs/serving-results.md about the example's server, from rows of examples/load_test.py."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_sel.bench.core import markdown
from nsa_sel.bench.core.store import Row


def table(rows: Sequence[Row]) -> str:
    """Rates and times by the size of prompts and by how many requests there are at once; the last row of a load counts."""
    loads = {(row["most"], row["at_once"]): row for row in rows}

    def milliseconds(row: Row, name: str) -> str:
        median, p95 = row[f"{name}_ms_median"], row[f"{name}_ms_p95"]
        return "-" if median is None else f"{median:,.1f} ({p95:,.1f})"

    lines = []
    for (most, at_once), row in sorted(loads.items()):
        rates = f"{row['requests_per_second']:.1f}", f"{row['tokens_per_second']:,.0f}"
        times = [milliseconds(row, name) for name in ("first", "between", "request")]
        lines.append((f"{most:,}", at_once, row["requests"], *rates, *times))
    headers = ["prompt", "at once", "requests", "requests/s", "tokens/s", "first token, ms", "between tokens, ms", "request, ms"]
    return markdown.table(headers, lines, left=0)
