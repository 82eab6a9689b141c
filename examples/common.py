"""Helpers shared by the examples: command-line options, and rows as JSON lines.

Needs typer, from the extra `cli`.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import nsa_sel
from nsa_sel.errors import ArgumentError, NsaSelError

Row = dict[str, Any]
Device = Annotated[str, typer.Option("--device", help="auto, cuda, cpu")]


def device_of(name: str) -> str:
    """Resolve auto, cuda or cpu to cuda or cpu. Raises ArgumentError for a missing device."""
    allowed = ("auto", "cuda", "cpu") if torch.cuda.is_available() else ("auto", "cpu")
    if name not in allowed:
        raise ArgumentError("--device", repr(name), ", ".join(allowed), "pass one of these, or see `nsa-sel doctor`")
    return "cuda" if name != "cpu" and "cuda" in allowed else "cpu"


def program(main: Callable[..., None]) -> None:
    """Run `main` with the options of the command line. An NsaSelError is printed in one line, with exit code 2."""
    try:
        typer.run(main)
    except NsaSelError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


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


def write_rows(file: Path, rows: Iterable[Row], mode: str = "a") -> None:
    """Append rows to a file, or replace its rows with mode "w"."""
    with file.open(mode) as opened:
        opened.writelines(json.dumps(row) + "\n" for row in rows)


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file, without an unfinished last line. A missing file has none."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]
