"""Measured rows on disk: JSON lines that a kill at any moment leaves whole, read again so that nothing is measured twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nsa_sel.bench.core.cases import Case
from nsa_sel.cli.output import regular
from nsa_sel.errors import ArgumentError

Row = dict[str, Any]

# Of one environment a row with these values is measured once. A row lacks those that its bench does not know.
ENVIRONMENT = ("device", "driver", "torch", "triton", "numba", "threads", "commit")
IDENTITY = (*Case._fields, "direction", "backend", "streams", "iters", "warmup", "quick")
OUT_OF_MEMORY = "out of memory"
SCATTERED = 0.2  # of the median, by which the 20th and 80th percentiles of a row that is quoted without a mark may differ
MARK = "†"
MARK_NOTE = f"{MARK} a time that scatters: its 20th and 80th percentiles differ by more than {SCATTERED:.0%} of the median."


def append(file: Path, rows: Iterable[Row]) -> None:
    """Add rows to the end, in one write that is on disk when this returns: a kill tears at most the last line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with file.open("ab") as opened:
        opened.write(text.encode())
        opened.flush()
        os.fsync(opened.fileno())


def read(file: Path) -> list[Row]:
    """All rows, those without a time too. A last line that a kill tore is passed over; any other bad line is an ArgumentError."""
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ArgumentError("the file of rows", f"{file} ({error.strerror})", "a readable file of JSON lines", "mend the path") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            row = parsed(line)
            if row is not None:
                rows.append(row)
            elif number < len(lines):
                raise ArgumentError(f"line {number} of {file}", f"{line[:40]!r}...", "one JSON object", "restore the line, or drop it")
    return rows


def mend(file: Path, tell: Callable[[str], None]) -> None:
    """Make the end of a file ready to be added to: what a kill left of a last line is dropped, and told."""
    if not file.exists():
        return
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    torn = content[whole:]
    if not torn:
        return
    with file.open("r+b") as opened:
        if parsed(torn) is not None:  # only its newline is missing
            opened.seek(0, os.SEEK_END)
            opened.write(b"\n")
        else:
            opened.truncate(whole)
            tell(f"{file.name}: dropped {len(torn)} bytes of a last row that an interruption left unfinished")
        opened.flush()
        os.fsync(opened.fileno())


def measured(rows: Iterable[Row]) -> list[Row]:
    """The rows that hold a time: cases that ran out of memory have rows without one."""
    return [row for row in rows if row.get("ms_median") is not None]


def scatters(row: Row) -> bool:
    """Whether a measured row's percentiles lie so far apart that its median is quoted with a mark. Some rows hold no percentiles."""
    return "ms_p20" in row and row["ms_p80"] - row["ms_p20"] > SCATTERED * row["ms_median"]


def ms(row: Row, digits: int = 3) -> str:
    """A row's median as tables show it, marked where it scatters."""
    return f"{row['ms_median']:.{digits}g}{MARK * scatters(row)}"


def with_note(table: str) -> str:
    """A table, and below it what the mark means where it has one."""
    return f"{table}\n\n{MARK_NOTE}" if MARK in table else table


def key(row: Row) -> tuple[Any, ...]:
    """What was measured, and where: equal for two rows of which one would do."""
    return tuple(row.get(field) for field in (*IDENTITY, *ENVIRONMENT))


def of_last_environment(rows: Iterable[Row]) -> list[Row]:
    """The rows of the environment and commit that the last row was measured in, the later one of two of the same thing."""
    rows = list(rows)
    last = {key(row): row for row in rows}
    return [row for row in last.values() if all(row.get(field) == rows[-1].get(field) for field in ENVIRONMENT)]


def write_whole(file: Path, text: str) -> None:
    """Replace a file at once: a reader, or a kill, meets the old text or the new one, and what fails leaves no part behind. Raises
    ArgumentError for a device or a FIFO."""
    file = regular("the output", file)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def parsed(line: bytes) -> Row | None:
    """The row of a line; None where it holds none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
