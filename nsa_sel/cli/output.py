"""The output of commands: text that is safe for a terminal, and files and folders that are checked before the work begins."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import unicodedata
from pathlib import Path

from nsa_sel.errors import ArgumentError

# Control characters but tab and newline, formats such as bidi overrides, separators of lines, lone surrogates. Most texts are ASCII: a
# pattern finds the few others quickly.
_SUSPECT = re.compile(r"[^\t\n\x20-\x7e]")
_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


def printable(text: str) -> str:
    """`text` with every character that could control a terminal as `\\uXXXX`: files and variables may hold such characters.

    In a JSON document they occur in strings alone, where the escape is the same text.
    """
    return _SUSPECT.sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    if unicodedata.category(found[0]) not in _ESCAPED:
        return found[0]
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def terminal_columns() -> int:
    """The columns of the terminal that stdout is, or of the variable COLUMNS; 0 for a file or a pipe."""
    return shutil.get_terminal_size((0, 0)).columns


def regular(option: str, path: Path) -> Path:
    """The file that `path` names, links followed. Raises ArgumentError where it is, or can be, no regular file.

    Commands replace a file by renaming another one: a device, a FIFO or a link would be lost.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = stat.S_IFMT(target.stat().st_mode)
    except FileNotFoundError:
        return target
    except OSError as error:
        raise ArgumentError(option, f"{path} ({error.strerror})", "a file that can be written", "mend the path") from error
    if mode != stat.S_IFREG:
        allowed = "a regular file, or a name that is free"
        raise ArgumentError(option, f"{path}, {_KINDS.get(mode, 'no regular file')}", allowed, "choose another name")
    return target


def output_file(option: str, path: Path, *, make_folder: bool = False) -> Path:
    """The file that writing to `path` makes or replaces: `regular`, and writable now. Raises ArgumentError."""
    target = regular(option, path)
    try:
        if make_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.open("ab").close()
        _try_to_write(target.parent)
    except OSError as error:
        remedy = "mend the path" if make_folder else "mend the path; its folder must exist"
        raise ArgumentError(option, f"{path} ({error.strerror})", "a file that can be written", remedy) from error
    return target


def output_folder(option: str, path: Path) -> Path:
    """`path`, created where it is missing. Raises ArgumentError where nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        _try_to_write(path)
    except OSError as error:
        raise ArgumentError(option, f"{path} ({error.strerror})", "a folder that can be written", "choose another") from error
    return path


def _try_to_write(folder: Path) -> None:
    """Permissions are not enough: a file system may be read-only, or map root to nobody."""
    with tempfile.TemporaryFile(dir=folder):
        pass
