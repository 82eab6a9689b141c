"""How the benches run as programs: an error that nsa-sel raises on purpose is one line, not a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from nsa_sel.errors import NsaSelError


def program(main: Callable[..., None]) -> None:
    """Run `main` with the options of the command line; exit code 2 for an NsaSelError, in its own words."""
    try:
        typer.run(main)
    except NsaSelError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
