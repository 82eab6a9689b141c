"""The command line that all benches share: options, results on stdout, progress and errors in one line on stderr."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from typer.core import TyperCommand

from nsa_sel.cli.output import printable
from nsa_sel.errors import ArgumentError, NsaSelError

INTERRUPTED = 130  # exit code after Ctrl-C, as in shells

Out = Annotated[Path, typer.Option("--out", help="JSON-lines file that rows are appended to")]
Device = Annotated[str, typer.Option("--device", help="auto, cuda, cpu")]
Quick = Annotated[bool, typer.Option("--quick", help="a few small cases instead, on any device")]
Only = Annotated[str, typer.Option("--only", help="only cases whose name contains this")]
Backends = Annotated[str, typer.Option("--backends", help="backends, comma-separated; by default those that run on the device")]


class BenchCommand(TyperCommand):
    """A command that takes --decode without a value as --decode 1, which Typer's options can't."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        after = [*args[1:], "-"]
        bare = [arg == "--decode" and following.startswith("-") for arg, following in zip(args, after, strict=True)]
        return super().parse_args(ctx, ["--decode=1" if each else arg for each, arg in zip(bare, args, strict=True)])


def device_of(name: str) -> str:
    """Resolve auto, cuda or cpu to cuda or cpu. Raises ArgumentError for a missing device."""
    here = torch.cuda.is_available()
    if name not in ("auto", "cuda", "cpu"):
        raise ArgumentError("--device", repr(name), "auto, cuda, cpu", "pass one of these")
    if name == "cuda" and not here:
        raise ArgumentError("--device", "cuda", "cpu: no CUDA device is usable here", "leave --device out, or see `nsa-sel doctor`")
    return "cuda" if here and name != "cpu" else "cpu"


def need_gpu(program: str) -> None:
    """Raise ArgumentError on a machine without a GPU."""
    if not torch.cuda.is_available():
        raise ArgumentError(program, "on a machine without a usable GPU", "a CUDA device", "run it on a machine with a GPU")


def stderr_console() -> Console:
    """Return the console for progress and messages: whole lines, without markup."""
    return Console(stderr=True, soft_wrap=True, markup=False, highlight=False)


def echo(text: str) -> None:
    """Print a result. Control characters are escaped: rows come from files."""
    typer.echo(printable(text))


def program(main: Callable[..., None]) -> None:
    """Run `main` with the options of the command line.

    Exit code 2 and one line for an NsaSelError, and 130 after Ctrl-C.
    """

    @functools.wraps(main)
    def interruptible(**options: Any) -> None:
        try:
            main(**options)
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(INTERRUPTED) from interrupt

    app = typer.Typer(add_completion=False)
    app.command(cls=BenchCommand)(interruptible)
    try:
        app()
    except NsaSelError as error:
        typer.echo(printable(f"error: {error}"), err=True)
        sys.exit(2)
