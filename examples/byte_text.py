"""The training text of examples/train_nsa_lm.py: the machine's documentation, or the text of a folder or file."""

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
MAX_BYTES = 64 << 20  # of text
MIN_FILE_BYTES = 200  # shorter texts are left out
HELD_OUT = 32  # 1 / HELD_OUT of the text is for validation
MIN_CONTEXTS = 2 * HELD_OUT  # minimum length of the text, in contexts


def documentation(folders: list[Path], most: int) -> Iterator[bytes]:
    """Yield texts below the folders, sorted by path: .rst, .txt and .md files first, then the docstrings of Python files."""
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.suffix in (*TEXT_ENDINGS, ".py")]
    digests: set[bytes] = set()
    for file in sorted(files, key=lambda file: file.suffix == ".py"):
        text = read(file) if most > 0 else b""
        if file.suffix == ".py":
            text = b"\n\n".join(re.findall(rb'"""(.*?)"""', text, re.DOTALL))
        digest = hashlib.sha256(text).digest()
        if len(text) > MIN_FILE_BYTES and digest not in digests:  # packages share licenses
            digests.add(digest)
            most -= len(text)
            yield text


def read(file: Path) -> bytes:
    """Return a file's bytes, or none if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def load_text(source: Path | None, cache: Path, context: int) -> Tensor:
    """Return the training text as uint8. It is stored in `cache`, so that a resumed run uses the same text."""
    if not cache.exists():
        paths = sysconfig.get_paths()
        candidates = [Path("/usr/share/doc"), Path("/usr/lib/python3"), Path(paths["stdlib"]), Path(paths["purelib"])]
        folders = [source] if source else [folder for folder in candidates if folder.is_dir()]
        joined = read(source) if source and source.is_file() else b"\n\n".join(documentation(folders, MAX_BYTES))[:MAX_BYTES]
        least = MIN_CONTEXTS * context
        if len(joined) < least:
            where, allowed = ", ".join(map(str, folders)), f"at least {least} in .rst, .txt, .md files and docstrings of .py files"
            remedy = "pass --text with a folder of more text, or install some, such as `apt-get install python3-doc`"
            raise ArgumentError("--text", f"{len(joined)} bytes below {where}", allowed, remedy)
        unfinished = cache.with_name(f".{cache.name}.{os.getpid()}")
        unfinished.write_bytes(joined)
        unfinished.replace(cache)
    return torch.frombuffer(bytearray(cache.read_bytes()), dtype=torch.uint8)
