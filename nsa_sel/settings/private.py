"""Read and write files of the cache folder. Machine code is loaded from them, so only the user may have write access.

A file is accepted if it is a regular file and not a symbolic link, if it and its folder belong to the process's
effective user or to root, and if nobody else can write to either. Parent folders are not checked, because renaming a
folder does not change its owner.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path


class Untrusted(OSError):
    """A file that other users could have written. `strerror` has the reason and the remedy."""


def read_regular(path: Path, most: int) -> bytes:
    """Return the first `most` bytes of a file that the user names: any owner, links followed. Raises OSError; never
    blocks on a FIFO."""
    with open(_checked(path, os.open(path, os.O_RDONLY | os.O_NONBLOCK), own=False), "rb") as file:
        return file.read(most)


def opened(path: Path, flags: int) -> int:
    """Open a private file and return its descriptor. O_CREAT in `flags` creates it with mode 0600. Raises OSError."""
    folder = _opened_folder(path.parent)
    try:
        return _checked(path, os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Untrusted(errno.EPERM, f"{path} is a symbolic link: remove it") from error
        raise
    finally:
        os.close(folder)


def read(path: Path) -> bytes:
    """Return the content of a private file. Raises OSError."""
    with open(opened(path, os.O_RDONLY), "rb") as file:
        return file.read()


def write(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old or the new content, even after a crash. Raises OSError and leaves
    no partial file."""
    make_folder(path.parent)
    folder = _opened_folder(path.parent)
    temporary = f".{path.name}.{secrets.token_hex(8)}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(temporary, dir_fd=folder)
            raise
        with contextlib.suppress(OSError):  # not supported by some file systems; the file is complete anyway
            os.fsync(folder)
    finally:
        os.close(folder)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700. Raises OSError."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _opened_folder(folder: Path) -> int:
    return _checked(folder, os.open(folder, os.O_RDONLY | os.O_DIRECTORY), regular=False)


def _checked(path: Path, descriptor: int, *, regular: bool = True, own: bool = True) -> int:
    """Return the descriptor of `path`; close it and raise Untrusted for another kind of file, or if another user may
    write it.

    Args:
        path: its name, for messages.
        descriptor: of the opened file or folder.
        regular: refuse anything but a regular file.
        own: refuse what other users own or may write.
    """
    status = os.fstat(descriptor)
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    words = ""
    if regular and not stat.S_ISREG(status.st_mode):
        kind = kinds.get(stat.S_IFMT(status.st_mode), "something else")
        words = f"is {kind}, not a regular file: remove it, or name another"
    elif own and status.st_uid not in (os.geteuid(), 0):
        words = f"belongs to another user (uid {status.st_uid}): remove it, or set NSA_SEL_CACHE to a folder of your own"
    elif own and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.filemode(status.st_mode)
        words = f"may be written by other users ({mode}): remove it, or `chmod go-w` it if you trust what it holds"
    if words:
        os.close(descriptor)
        raise Untrusted(errno.EPERM, f"{path} {words}")
    return descriptor
