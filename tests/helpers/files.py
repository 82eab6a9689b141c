"""Files of the checkout, programs of examples/, Markdown tables, and damaged files of the cache."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"


def load(name: str) -> ModuleType:
    """A program as a module; it finds its neighbors while it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        return importlib.import_module(name)


def table_lines(table: str) -> list[dict[str, str]]:
    """The lines of a Markdown table by header."""
    head, _, *rest = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return [dict(zip(head, line, strict=True)) for line in rest]


def as_another_users(file: Path) -> None:
    if os.geteuid():
        pytest.skip("only root may give a file away")
    os.chown(file, 12345, -1)


OF_THE_FILE: list[tuple[Callable[[Path], object], str]] = [
    (lambda file: file.chmod(0o666), r"may be written by other users \(-rw-rw-rw-\): remove it, or `chmod go-w` it"),
    (as_another_users, r"belongs to another user \(uid 12345\): remove it, or set NSA_SEL_CACHE"),
    (lambda file: file.symlink_to(file.rename(file.with_name("elsewhere"))), "is a symbolic link: remove it"),
    (lambda file: (file.unlink(), os.mkfifo(file)), "is a FIFO, not a regular file: remove it"),
]
OF_THE_FOLDER: list[tuple[Callable[[Path], object], str]] = [  # and where a folder stands in the file's place: nothing can be written there
    (lambda file: file.parent.chmod(0o777), r"may be written by other users \(drwxrwxrwx\): remove it, or `chmod go-w`"),
    (lambda file: as_another_users(file.parent), r"belongs to another user \(uid 12345\): remove it, or set NSA_SEL_CACHE"),
    (lambda file: (file.unlink(), file.mkdir()), "is a directory, not a regular file: remove it"),
]
