"""How the benches run as programs: words go to stderr, and an error that nsa-sel raises on purpose is one line, not a traceback;
neither is Ctrl-C."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console

from nsa_sel.cli.output import printable
from nsa_sel.errors import NsaSelError

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it


def stderr_console() -> Console:
    """Where progress and words go: whole lines, as they are."""
    return Console(stderr=True, soft_wrap=True, markup=False, highlight=False)


def echo(text: str) -> None:
    """Print a result: rows come from files, which may hold anything."""
    typer.echo(printable(text))


def program(main: Callable[..., None]) -> None:
    """Run `main` with the options of the command line; exit code 2 for an NsaSelError, in its own words, and 130 after Ctrl-C."""

    @functools.wraps(main)
    def interruptible(**options: Any) -> None:
        try:
            main(**options)
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(INTERRUPTED) from interrupt

    try:
        typer.run(interruptible)
    except NsaSelError as error:
        typer.echo(printable(f"error: {error}"), err=True)
        sys.exit(2)
