"""Command-line options shared by the examples, and one-line errors. Needs typer, from the extra `cli`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from nsa_sel.errors import ArgumentError, NsaSelError

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
