"""The bytes that examples/train_nsa_lm.py learns: documentation that is found on the machine, or a folder's or file's text."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from nsa_sel.errors import ArgumentError

TEXT_ENDINGS = (".rst", ".txt", ".md")
MOST_BYTES = 64 << 20  # of text
SHORT = 200  # bytes of a text that is left out
HELD_OUT = 32  # one part in so many of the text is for validation
LEAST_CONTEXTS = 2 * HELD_OUT  # that the text must hold


def documentation(folders: list[Path], most: int) -> Iterator[bytes]:
    """Texts below the folders in the order of their paths: .rst, .txt and .md files first, then the docstrings of Python files."""
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.suffix in (*TEXT_ENDINGS, ".py")]
    seen: set[bytes] = set()
    for file in sorted(files, key=lambda file: file.suffix == ".py"):
        text = read(file) if most > 0 else b""
        if file.suffix == ".py":
            text = b"\n\n".join(re.findall(rb'"""(.*?)"""', text, re.DOTALL))
        digest = hashlib.sha256(text).digest()
        if len(text) > SHORT and digest not in seen:  # packages repeat each other's licences
            seen.add(digest)
            most -= len(text)
            yield text


def read(file: Path) -> bytes:
    """A file's bytes; none of one that can't be read."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def load_text(source: Path | None, cache: Path, context: int) -> Tensor:
    """The bytes to learn, uint8; kept in `cache`, so that a run resumes with the text that it began with, whatever is installed since."""
    if not cache.exists():
        paths = sysconfig.get_paths()
        found = [Path("/usr/share/doc"), Path("/usr/lib/python3"), Path(paths["stdlib"]), Path(paths["purelib"])]
        folders = [source] if source else [folder for folder in found if folder.is_dir()]
        joined = read(source) if source and source.is_file() else b"\n\n".join(documentation(folders, MOST_BYTES))[:MOST_BYTES]
        least = LEAST_CONTEXTS * context
        if len(joined) < least:
            where, allowed = ", ".join(map(str, folders)), f"at least {least} in .rst, .txt, .md files and docstrings of .py files"
            remedy = "pass --text with a folder of more text, or install some, such as `apt-get install python3-doc`"
            raise ArgumentError("--text", f"{len(joined)} bytes below {where}", allowed, remedy)
        unfinished = cache.with_name(f".{cache.name}.{os.getpid()}")
        unfinished.write_bytes(joined)
        unfinished.replace(cache)
    return torch.frombuffer(bytearray(cache.read_bytes()), dtype=torch.uint8)
