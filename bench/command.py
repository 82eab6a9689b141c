"""The command `nsa-sel bench`, which is that of bench_sel_triton.py too: its matrix, the suites of questions/speed, and
the headline.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from nsa_sel.bench import headline as claims
from nsa_sel.bench.core import matrix
from nsa_sel.bench.core.command_line import Backends, Device, device_of, echo, stderr_console
from nsa_sel.bench.core.contenders import named
from nsa_sel.bench.core.peers import given
from nsa_sel.bench.core.peers import peers as every_peer
from nsa_sel.bench.core.session import able, run
from nsa_sel.bench.questions import speed
from nsa_sel.bench.questions.speed import SUITES, usual_backends
from nsa_sel.errors import ArgumentError

PEERS_SHOWN = (
    *("case", "direction", "backend", "computes", "selection", "ms_median", "ms_p20", "ms_p80", "mae", "prepare_ms"),
    *("error", "wrong"),
)


def bench(
    suite: Annotated[
        str, typer.Option(help=f"Instead of the matrix: {', '.join(SUITES)}, comma-separated, or all (a GPU's sizes); cpu on a CPU.")
    ] = "",
    peers: Annotated[
        bool,
        typer.Option(
            "--peers",
            help="Beside ours: FlexAttention, masked and dense SDPA; where installed fla, cuDNN's NSA, FlashAttention-4."
            " With --backends: those that it names.",
        ),
    ] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODULE:FUNCTION", help="With --peers, which it implies: also this function (docs/performance.md). Repeatable."
        ),
    ] = None,
    headline: Annotated[
        bool, typer.Option("--headline", help="Instead: the README's claims again, on this GPU, each beside dense attention. Minutes.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few and small cases: a look at a machine, in minutes.")] = False,
    out: Annotated[
        Path | None, typer.Option(help=f"Folder of the rows; {matrix.RESULTS}/<today> by default. Run again, it resumes.")
    ] = None,
    device: Device = "auto",
    only: Annotated[str, typer.Option(help="With --suite or --peers: only cases whose name contains this.")] = "",
    backends: Backends = "",
    N: Annotated[str, typer.Option("--N", help="query rows [64,256,1024], or sequences decoded [64,256]")] = "",
    H: Annotated[str, typer.Option("--H", help="heads that share a row's selection [4,8; decoding 2,4]")] = "",
    D: Annotated[str, typer.Option("--D", help="head dim of q and k [64,128]")] = "",
    Dv: Annotated[str, typer.Option("--Dv", help="head dim of v [64,128]")] = "",
    L_list: Annotated[str, typer.Option("--L_list", help="keys that a row selects [16,32,64,128,256,512,1024; decoding 512,1024]")] = "",
    dist: Annotated[str, typer.Option(help="how L is cut: few (one span), many (8 equal), mixed (2, 4 or 8 random) [few,many,mixed]")] = "",
    iters: Annotated[int | None, typer.Option(min=3, help="timed calls, of which the median is taken [50; 10 with --quick]")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="calls before them")] = 5,
    streams: Annotated[int, typer.Option(min=1, help="CUDA streams that each run the call at once; ms is the time over their number")] = 1,
    decode: Annotated[
        int | None, typer.Option(min=0, max=1, help="1, or no value: the decode matrix, S = 1, 8 and 16 blocks of 64 keys")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="write the rows of this command's cases into this CSV file too")] = None,
) -> None:
    """Measure Triton against packed SDPA over the lengths of a selection, with CSV and Markdown.

    The seed matrix and the decode matrix; --decode 0 or 1 is one of them, and so are sizes. Flags of the matrix go
    without --suite and --peers.
    """
    where, console, folder = device_of(device), stderr_console(), out or matrix.RESULTS / datetime.date.today().isoformat()
    sizes = {"N": N, "H": H, "D": D, "Dv": Dv, "L_list": L_list, "dist": dist}
    of_matrix = {**sizes, "decode": decode, "iters": iters, "csv": csv, "warmup": warmup - 5, "streams": streams - 1}
    if headline:
        of_cases = {"suite": suite, "peers": peers, "peer": peer, "quick": quick, "only": only, "backends": backends}
        _unused({**of_matrix, **of_cases}, "--headline")
        echo(claims.headline(folder / "headline", console))
        return
    if not suite and not peers and not peer:
        if only:
            allowed = "only with --suite or --peers, whose cases have names"
            raise ArgumentError("--only", repr(only), allowed, "add --suite all; the matrix is measured whole without it")
        both = (False, True) if decode is None and not any(sizes.values()) else (bool(decode),)
        rows, written = matrix.measure(
            both, where, folder, console, sizes=sizes, iters=iters, warmup=warmup, streams=streams, backends=backends, csv=csv, quick=quick
        )
        if any(sizes.values()) and rows:
            echo(matrix.report(rows))
        echo(f"written: {', '.join(map(str, (folder / 'rows.jsonl', *written)))}")
        return
    _unused(of_matrix, "--suite and --peers")
    others = (*every_peer(), *given(peer or (), every_peer())) if peers or peer else ()
    asked = backends.split(",") if backends else usual_backends(where)
    of_peers = {contender.name for contender in others}  # dense attention is one of them, there with its parity
    ours = [contender for name in asked if name not in of_peers for contender in named(name)]
    if backends and of_peers.intersection(asked):
        others = tuple(contender for contender in others if contender.name in asked)
    contenders = able((*ours, *others), where, console.print)
    suites = speed.suites_of(suite or "performance,decode", quick, where)
    rows = run(speed.jobs(suites, contenders, only, where), folder / f"{'peers' if others else 'suites'}.jsonl", where, console)
    echo(speed.table(rows, PEERS_SHOWN if others else speed.SHOWN))


def _unused(flags: dict[str, Any], beside: str) -> None:
    given_too = [f"--{name}" for name, value in flags.items() if value not in ("", None, 0, [])]
    if given_too:
        raise ArgumentError(", ".join(given_too), "given", f"left out with {beside}", "its cases have sizes of their own")
