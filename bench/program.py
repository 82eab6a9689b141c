"""How the benches run as programs: words go to stderr, and an error that nsa-sel raises on purpose is one line, not a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer
from rich.console import Console

from nsa_sel.errors import NsaSelError


def stderr_console() -> Console:
    """Where progress and words go: whole lines, as they are."""
    return Console(stderr=True, soft_wrap=True, markup=False, highlight=False)


def program(main: Callable[..., None]) -> None:
    """Run `main` with the options of the command line; exit code 2 for an NsaSelError, in its own words."""
    try:
        typer.run(main)
    except NsaSelError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
