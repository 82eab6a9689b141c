"""Files of `nsa-sel tune` in the cache folder: the user's file (read by nsa_sel/settings/tuned.py), its lock, and its
rows.

A run that was stopped continues: rows that are in a file are not measured again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from nsa_sel.bench.core.store import Row, RowFile, first_line
from nsa_sel.core.registry import is_sticky
from nsa_sel.errors import ArgumentError, ConfigError, NsaSelError
from nsa_sel.settings import private, tuned
from nsa_sel.settings.flags import CACHE_FLAG
from nsa_sel.settings.tuned import Stamp, TunedFile


class ContextLost(NsaSelError, RuntimeError):
    """A kernel broke the CUDA context. This process can measure nothing more."""


class Run(NamedTuple):
    """One run of `nsa-sel tune`: the environment, which names the files; progress, as a step and the share done; and
    the time limit.
    """

    stamp: Stamp
    tell: Callable[[str, float], None] = lambda what, done: None
    deadline: float = math.inf  # of time.monotonic(), checked between two measurements

    def is_over(self) -> bool:
        """Return True if the rest is for the next run."""
        return time.monotonic() >= self.deadline


def beside(stamp: Stamp, suffix: str) -> Path:
    """Return a file of the same environment: the user's file with another suffix."""
    return tuned.file_of(stamp).with_suffix(suffix)


@contextlib.contextmanager
def locked(stamp: Stamp) -> Iterator[None]:
    """Hold the lock of one environment. The system releases it when the process ends.

    Raises:
        ArgumentError: another process holds it.
        ConfigError: the cache folder can't be written.
    """
    path = beside(stamp, ".lock")
    try:
        private.make_folder(path.parent)
        descriptor = private.opened(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(descriptor)
    except BlockingIOError as error:
        raise ArgumentError(
            "nsa-sel tune", "running already for this GPU and environment", "one at a time", "wait for it to end"
        ) from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = f"{error.strerror}; {'make room, or ' if full else ''}set {CACHE_FLAG} to one on a local disk"
        raise ConfigError("the cache folder", str(path.parent), "a folder of your own that can be written", remedy) from error


class Measurements(RowFile):
    """The rows of one file beside the user's file.

    Args:
        stamp: the environment.
        suffix: of the file.
        fields: what identifies a row.
    """

    def __init__(self, stamp: Stamp, suffix: str, fields: tuple[str, ...]) -> None:
        super().__init__(beside(stamp, suffix), lambda row: json.dumps([row.get(field) for field in fields]), owner_only=True)

    def measure(self, row: Row, measure_one: Callable[[Row], Row]) -> Row:
        """Return the row with what `measure_one` adds, or with the `error` that it raised: from the file, or measured
        now and kept.

        Raises:
            ContextLost: the error broke the CUDA context. The next run skips this row.
        """
        if row in self:
            return self[row]
        try:
            return self.add({**row, **measure_one(row)})
        except Exception as error:
            failed = self.add({**row, "error": first_line(error)})
            if is_sticky(error):
                raise ContextLost(f"a kernel broke the CUDA context ({error}). Remedy: run `nsa-sel tune` again to continue.") from error
            return failed


def written(stamp: Stamp) -> TunedFile:
    """Return what earlier runs wrote; an empty file if there is none, or a bad one."""
    path = tuned.file_of(stamp)
    try:
        return tuned.parse(private.read(path), path.name)[0]
    except (OSError, ConfigError):
        return TunedFile(stamp=stamp, commit=None)


def rewrite(stamp: Stamp, **changes: Any) -> None:
    """Replace some fields of the file. Only the process that holds the lock may do it."""
    write(tuned.file_of(stamp), msgspec.structs.replace(written(stamp), **changes))


def write(path: Path, file: TunedFile) -> None:
    """Replace the file atomically. Raises OSError."""
    private.write(path, json.dumps(msgspec.to_builtins(file), indent=1).encode() + b"\n")
