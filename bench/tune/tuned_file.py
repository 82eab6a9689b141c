"""The user's file that `nsa-sel tune` writes (nsa_sel/settings/tuned.py reads it), and the lock beside it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from nsa_sel.errors import ArgumentError, ConfigError
from nsa_sel.settings import private, tuned
from nsa_sel.settings.flags import CACHE_FLAG
from nsa_sel.settings.tuned import Stamp, TunedFile


def beside(stamp: Stamp, suffix: str) -> Path:
    """A file of the same environment: the user's file with another suffix."""
    return tuned.file_of(stamp).with_suffix(suffix)


@contextlib.contextmanager
def usable_folder() -> Iterator[None]:
    """Raise ConfigError for the OSError of an unusable cache folder: a full disk, or files of another user."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = f"{error.strerror}; {'make room, or ' if full else ''}set {CACHE_FLAG} to one"
        raise ConfigError("the cache folder", str(tuned.cache_folder()), "a folder of your own that can be written", remedy) from error


@contextlib.contextmanager
def locked(stamp: Stamp) -> Iterator[None]:
    """Hold the lock of one environment; the system releases it when the process ends, however it ends.

    Raises:
        ArgumentError: another process holds it.
        ConfigError: the cache folder can't be written.
    """
    path = beside(stamp, ".lock")
    with usable_folder():
        private.make_folder(path.parent)
        descriptor = private.opened(path, os.O_RDWR | os.O_CREAT)
    try:
        _acquire(descriptor, path)
        with usable_folder():
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        value = f"running already for this GPU and environment, as process {os.pread(descriptor, 32, 0).decode() or 'unknown'}"
        raise ArgumentError("nsa-sel tune", value, "one at a time", "wait for it to end") from error
    except OSError as error:
        remedy = f"{error.strerror}: set {CACHE_FLAG} to a folder on a local disk"
        raise ConfigError("the cache folder", str(path.parent), "a file system with locks", remedy) from error


def written(stamp: Stamp) -> TunedFile:
    """What earlier runs wrote; an empty file where there is none that can be read: the measurements are kept beside it."""
    path = tuned.file_of(stamp)
    try:
        return tuned.parse(private.read(path), path.name)[0]
    except (OSError, ConfigError):
        return TunedFile(stamp=stamp, commit=None)


def rewrite(stamp: Stamp, **changes: Any) -> None:
    """Replace some fields of the file; only for the process that holds the lock."""
    write(tuned.file_of(stamp), msgspec.structs.replace(written(stamp), **changes))


def write(path: Path, file: TunedFile) -> None:
    """Replace the file atomically: readers see the old one or the new one, whenever the machine stops. Raises OSError."""
    private.write(path, json.dumps(msgspec.to_builtins(file), indent=1).encode() + b"\n")
