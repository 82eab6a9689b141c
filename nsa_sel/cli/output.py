"""Output of commands: text that is safe for a terminal, and checks of output paths before the work begins."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import unicodedata
from pathlib import Path

from nsa_sel.errors import ArgumentError

# Escaped are control characters except tab and newline, formats such as bidi overrides, line separators, and lone
# surrogates. The pattern skips printable ASCII quickly.
_SUSPECT = re.compile(r"[^\t\n\x20-\x7e]")
_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


def printable(text: str) -> str:
    """Escape every character that could control a terminal as `\\uXXXX`. File contents and variables may hold such
    characters.

    In JSON they occur only in strings, where the escape means the same text.
    """

    def escape(match: re.Match[str]) -> str:
        if unicodedata.category(match[0]) not in _ESCAPED:
            return match[0]
        units = match[0].encode("utf-16-be", "surrogatepass").hex()
        return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))

    return _SUSPECT.sub(escape, text)


def terminal_columns() -> int:
    """Return the width of the terminal, or the variable COLUMNS; 0 for a file or a pipe."""
    return shutil.get_terminal_size((0, 0)).columns


def output_file(option: str, path: Path) -> Path:
    """Return the file, links followed, that writing to `path` creates or replaces, and make its folder. Raises
    ArgumentError unless it is regular and writable.

    Commands replace a file by renaming another one over it, which would destroy a device, a FIFO or a link.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = stat.S_IFMT(target.stat().st_mode) if target.exists() else stat.S_IFREG
        if mode != stat.S_IFREG:
            raise ArgumentError(
                option, f"{path}, {_KINDS.get(mode, 'no regular file')}", "a regular file, or an unused name", "choose another name"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.open("ab").close()
        with tempfile.TemporaryFile(dir=target.parent):
            pass  # checking permissions is not enough: a file system may be read-only, or map root to nobody
    except OSError as error:
        raise ArgumentError(option, f"{path} ({error.strerror})", "a file that can be written", "correct the path") from error
    return target
