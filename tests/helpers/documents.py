"""Reading Markdown that the benches write."""

from __future__ import annotations


def table_lines(table: str) -> list[dict[str, str]]:
    """The lines of a Markdown table by header."""
    head, _, *rest = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return [dict(zip(head, line, strict=True)) for line in rest]
