"""Records of a run: JSON lines in a file, each with the environment that made it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import nsa_sel

Row = dict[str, Any]


def facts(device: str) -> Row:
    """Return device, versions, and the command without absolute paths. The commit is NSA_SEL_COMMIT."""
    arguments = [Path(text).name if Path(text).is_absolute() else text for text in sys.argv[1:]]
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "nsa_sel": nsa_sel.__version__,
        "commit": os.environ.get("NSA_SEL_COMMIT", "not a checkout"),
        "command": shlex.join(["python", f"examples/{Path(sys.argv[0]).name}", *arguments]),
    }


def append(file: Path, rows: Iterable[Row]) -> None:
    """Append rows to a file."""
    with file.open("a") as opened:
        opened.writelines(json.dumps(row) + "\n" for row in rows)


def replace(file: Path, rows: Iterable[Row]) -> None:
    """Replace a file's rows atomically."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows))
    unfinished.replace(file)


def read(file: Path) -> list[Row]:
    """Return the rows of a file, without an unfinished last line. A missing file has none."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]
