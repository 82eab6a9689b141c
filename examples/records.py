"""Records of a run: lines of JSON in a file, and what every line says of where it was made."""

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
    """Device, versions, and the command without the machine's paths. The commit is that of NSA_SEL_COMMIT, if set."""
    arguments = [Path(part).name if Path(part).is_absolute() else part for part in sys.argv[1:]]
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "nsa_sel": nsa_sel.__version__,
        "commit": os.environ.get("NSA_SEL_COMMIT"),
        "command": shlex.join(["python", f"examples/{Path(sys.argv[0]).name}", *arguments]),
    }


def append(file: Path, rows: Iterable[Row]) -> None:
    """Add rows at the end of a file."""
    with file.open("a") as opened:
        opened.writelines(json.dumps(row) + "\n" for row in rows)


def replace(file: Path, rows: Iterable[Row]) -> None:
    """Replace a file's rows at once: a kill leaves the old ones or the new ones."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows))
    unfinished.replace(file)


def read(file: Path) -> list[Row]:
    """The rows of a file, none of a missing one; without a last line that a kill left unfinished."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]
