"""Measured rows as JSON lines: the one store of all benches and of tuning. A run that was killed resumes from its file.

rows = RowFile(file, key)               # reads what is there
for wanted in cases:
    if wanted not in rows:
        rows.add({**wanted, **measure(wanted)})
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nsa_sel.bench.core.cases import Case
from nsa_sel.cli.output import output_file
from nsa_sel.errors import ArgumentError
from nsa_sel.settings import private

Row = dict[str, Any]
Key = Callable[[Row], Any]

# A row with the same values here is not measured again. A bench leaves out the fields that it does not use.
ENVIRONMENT = ("device", "driver", "torch", "triton", "numba", "threads", "commit")
IDENTITY = (*Case._fields, "direction", "backend", "streams", "iters", "warmup", "quick")
OUT_OF_MEMORY = "out of memory"


def key(row: Row) -> tuple[Any, ...]:
    """What was measured, and in which environment."""
    return tuple(row.get(field) for field in (*IDENTITY, *ENVIRONMENT))


class RowFile:
    """The rows of one file by key, which new rows are added to.

    Reading tolerates a torn last line. `add` removes it before it writes, so that a process that only looks changes nothing.

    Args:
        file: JSON lines; made by the first `add`.
        key: what identifies a row. Of two rows with the same key the later one counts.
        strict: raise ArgumentError for a bad line that is not the last. False: skip it and count it in `unreadable`.
        owner_only: for the cache folder. Raise OSError for a file that other users may write, and create it with mode 0600.
        tell: called with one sentence when a torn last line is removed.
    """

    def __init__(
        self, file: Path, key: Key = key, *, strict: bool = True, owner_only: bool = False, tell: Callable[[str], None] = lambda words: None
    ) -> None:
        self.file, self.key, self.owner_only, self.tell = file, key, owner_only, tell
        found, self.unreadable = _parsed_lines(file, _content(file, owner_only), strict)
        self.rows: dict[Any, Row] = {key(row): row for row in found}
        self.mended = False

    def __contains__(self, row: Row) -> bool:
        return self.key(row) in self.rows

    def __getitem__(self, row: Row) -> Row:
        return self.rows[self.key(row)]

    def add(self, row: Row) -> Row:
        """Append a row and return it; it is on disk when this returns. Raises OSError, and then leaves no part of it."""
        if not self.mended:
            self.mend()
        append(self.file, [row], owner_only=self.owner_only)
        self.rows[self.key(row)] = row
        return row

    def mend(self) -> None:
        """Remove a torn last line from the file."""
        mend(self.file, self.tell)
        self.mended = True

    def of(self, wanted: Iterable[Row]) -> list[Row]:
        """The rows that are in the file of those wanted, in the order wanted."""
        return [self[row] for row in wanted if row in self]


def append(file: Path, rows: Iterable[Row], *, owner_only: bool = False) -> None:
    """Add rows to the end, on disk when this returns. Raises OSError, and then leaves no part; a kill may leave part of the last line."""
    content = as_lines(rows).encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    if not owner_only:
        file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = private.opened(file, flags) if owner_only else os.open(file, flags, 0o666)
    try:
        before = os.fstat(descriptor).st_size
        try:
            while content:
                content = content[os.write(descriptor, content) :]
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def read(file: Path) -> list[Row]:
    """All rows, those without a time too. A torn last line is skipped. Raises ArgumentError for any other bad line, or no file."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ArgumentError("the file of rows", f"{file} ({error.strerror})", "a readable file of JSON lines", "mend the path") from error
    return _parsed_lines(file, content, strict=True)[0]


def mend(file: Path, tell: Callable[[str], None]) -> None:
    """Prepare a file for `append`: remove a torn last line, or add the newline that it lacks."""
    if not file.exists():
        return
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    torn = content[whole:]
    if not torn:
        return
    with file.open("r+b") as opened:
        if parsed(torn) is not None:
            opened.seek(0, os.SEEK_END)
            opened.write(b"\n")
        else:
            opened.truncate(whole)
            tell(f"{file.name}: dropped {len(torn)} bytes of a last row that an interruption left unfinished")
        opened.flush()
        os.fsync(opened.fileno())


def measured(rows: Iterable[Row]) -> list[Row]:
    """The rows with a time: a case that ran out of memory has a row without one."""
    return [row for row in rows if row.get("ms_median") is not None]


def of_last_environment(rows: Iterable[Row]) -> list[Row]:
    """The rows of the environment and commit of the last row; of two of the same measurement the later one."""
    rows = list(rows)
    last = {key(row): row for row in rows}
    return [row for row in last.values() if all(row.get(field) == rows[-1].get(field) for field in ENVIRONMENT)]


def write_whole(file: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new one. Raises ArgumentError for a device or a FIFO."""
    file = output_file("the output", file, make_folder=True)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def first_line(error: Exception) -> str:
    """The error's type, and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def as_lines(rows: Iterable[Row]) -> str:
    """The text of a file of rows."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def _content(file: Path, owner_only: bool) -> bytes:
    try:
        return private.read(file) if owner_only else file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return b""


def _parsed_lines(file: Path, content: bytes, strict: bool) -> tuple[list[Row], int]:
    """The rows, and how many lines are none; a torn last line does not count."""
    rows, bad = [], 0
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        row = parsed(line) if line.strip() else {}
        if row:
            rows.append(row)
        elif row is None and number < len(lines):
            bad += 1
            if strict:
                raise ArgumentError(f"line {number} of {file}", f"{line[:40]!r}...", "one JSON object", "restore the line, or drop it")
    return rows, bad


def parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
