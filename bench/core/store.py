"""Measured rows as JSON lines, and the environment that every row names. A run that was stopped continues from its
file.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from nsa_sel.bench.core.cases import Case
from nsa_sel.cli.output import output_file
from nsa_sel.errors import ArgumentError
from nsa_sel.settings import private, tuned
from nsa_sel.settings.flags import COMMIT_FLAG
from nsa_sel.settings.schema import Direction

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
# Two rows with the same values of these fields are the same measurement. A bench leaves out the fields that it does not
# use.
ENVIRONMENT = ("device", "driver", "torch", "triton", "numba", "threads", "commit")
IDENTITY = (*Case._fields, "direction", "backend", "streams", "iters", "warmup", "quick")
OUT_OF_MEMORY = "out of memory"
DIRECTIONS: dict[Direction, str] = {"forward": "fwd", "backward": "bwd", "decode": "decode"}  # as rows name them
WAYS: dict[str, Direction] = {direction: way for way, direction in DIRECTIONS.items()}
# Committed rows, relative to ROOT
H100_RESULTS, H200_RESULTS = "bench/results/h100", "bench/results/h200"
H200_ROWS = f"{H200_RESULTS}/selection.jsonl"
CPU_ROWS = "bench/results/cpu/numba_vs_sdpa.jsonl"


# Files


def key(row: Row) -> Any:
    """Return the identity of a measurement: the case, what was run, and the environment."""
    return tuple(row.get(field) for field in (*IDENTITY, *ENVIRONMENT))


class RowFile:
    """The rows of one file by key. Of two rows with the same key the later one counts.

    Args:
        file: JSON lines; created by the first `add`.
        key: returns what identifies a row.
        owner_only: for the cache folder. Raise OSError for a file that other users may write, and create it with mode
            0600.
    """

    def __init__(self, file: Path, key: Callable[[Row], Any] = key, *, owner_only: bool = False) -> None:
        self.file, self.key, self.owner_only = file, key, owner_only
        content = b""
        if file.exists():
            content = private.read(file) if owner_only else file.read_bytes()
        self.rows: dict[Any, Row] = {key(row): row for row in _parse(file, content)}

    def __contains__(self, row: Row) -> bool:
        return self.key(row) in self.rows

    def __getitem__(self, row: Row) -> Row:
        return self.rows[self.key(row)]

    def add(self, row: Row) -> Row:
        """Append a row and return it; it is on disk when this returns."""
        append(self.file, [row], owner_only=self.owner_only)
        self.rows[self.key(row)] = row
        return row

    def of(self, wanted: Iterable[Row]) -> list[Row]:
        """Return the wanted rows that are in the file, in the order wanted."""
        return [self[row] for row in wanted if row in self]


def append(file: Path, rows: Iterable[Row], *, owner_only: bool = False) -> None:
    """Add rows to the end of a file, instead of a last line that an interruption left unfinished; they are on disk when
    this returns. Raises OSError.
    """
    if not owner_only:
        file.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT
    with open(private.opened(file, flags) if owner_only else os.open(file, flags, 0o666), "r+b") as opened:
        opened.seek(opened.read().rfind(b"\n") + 1)
        opened.truncate()
        opened.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        opened.flush()
        os.fsync(opened.fileno())


def kept(file: Path, rows: Iterable[Row], facts: Row) -> list[Row]:
    """Append each row, with the facts, as soon as it is measured, and return all."""
    found = []
    for row in rows:
        found.append({**row, **facts})
        append(file, found[-1:])
        torch.cuda.empty_cache()
    return found


def read(file: Path) -> list[Row]:
    """Return all rows, including those without a time, but not an unfinished last line.

    Raises ArgumentError for another bad line, or no file.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ArgumentError("the file of rows", f"{file} ({error.strerror})", "a readable file of JSON lines", "mend the path") from error
    return _parse(file, content)


def _parse(file: Path, content: bytes) -> list[Row]:
    rows = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            rows.append(dict(json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"line {number} of {file}", f"{line[:40]!r}...", "one JSON object", "restore the line, or drop it"
            ) from error
    return rows


def measured(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with a time: a case that ran out of memory has a row without one."""
    return [row for row in rows if row.get("ms_median") is not None]


def read_rows(name: str) -> list[Row]:
    """Return the rows with a time of a file relative to ROOT."""
    return measured(read(ROOT / name))


def digest(name: str) -> str:
    """Return the first 16 hex digits of the SHA-256 of a file relative to ROOT."""
    return hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:16]


def of_last_environment(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the environment and commit of the last row; of two of the same measurement the later one."""
    rows = list(rows)
    last = {key(row): row for row in rows}
    return [row for row in last.values() if all(row.get(field) == rows[-1].get(field) for field in ENVIRONMENT)]


def write_whole(file: Path, text: str) -> None:
    """Replace a file atomically. Raises ArgumentError for a device or a FIFO."""
    file = output_file("the output", file)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def first_line(error: Exception) -> str:
    """Return the error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# The environment


def stamp(device: str = "cuda") -> Row:
    """Return device, driver, versions, commit and the command, without machine paths."""
    on_gpu = device == "cuda"
    facts: Row = {
        "device": torch.cuda.get_device_name() if on_gpu else _processor(),
        "driver": _output("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "torch": torch.__version__,
        "triton": tuned.version_of("triton") if on_gpu else None,
    }
    if not on_gpu:
        facts |= {"numba": tuned.version_of("numba"), "threads": torch.get_num_threads()}
    return {**facts, "commit": commit(), "command": command()}


def commit() -> str:
    """Return NSA_SEL_COMMIT, else the commit of this checkout, with a hash of uncommitted changes other than those of
    rows.
    """
    told = os.environ.get(COMMIT_FLAG)
    if told:
        return told
    top, _, head = (_output("git", "rev-parse", "--show-toplevel", "--short", "HEAD") or "").partition("\n")
    if not head or Path(top) != ROOT:  # a repository around this folder
        return "not a checkout"
    changes = _output("git", "diff", "HEAD", "--", ".", ":!bench/results")
    return f"{head}+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else head


def command() -> str:
    """Return the command line of this program, without machine paths."""
    program, bench = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[1]
    called = f"python {program.parent.name}/{program.name}"
    if program.stem in ("nsa-sel", "__main__"):
        called = "nsa-sel"
    elif program.is_relative_to(bench):
        called = f"python -m nsa_sel.bench.{'.'.join(program.relative_to(bench).with_suffix('').parts)}"
    arguments = [re.sub(r"(^|=)/.*/", r"\1", argument) for argument in sys.argv[1:]]
    return " ".join((called, *map(shlex.quote, arguments)))


def example(name: str) -> Any:
    """Import a program of examples/, which only a checkout has."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
