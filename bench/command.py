"""The command `nsa-sel bench`: the matrix of bench_sel_triton, the suites of questions/speed, and the headline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nsa_sel.bench import bench_sel_triton
from nsa_sel.bench import headline as claims
from nsa_sel.bench.core.command_line import Backends, Device, device_of, echo, stderr_console
from nsa_sel.bench.core.contenders import DENSE, named
from nsa_sel.bench.core.peers import given
from nsa_sel.bench.core.peers import peers as every_peer
from nsa_sel.bench.core.session import able, run
from nsa_sel.bench.questions import speed
from nsa_sel.bench.questions.speed import SUITES, usual_backends
from nsa_sel.errors import ArgumentError

PEERS_SHOWN = (
    *("case", "direction", "backend", "computes", "selection", "ms_median", "ms_p20", "ms_p80", "mae", "causal", "prepare_ms"),
    *("error", "wrong"),
)

Peers = Annotated[
    bool,
    typer.Option(
        "--peers",
        help="Beside ours: FlexAttention, masked and dense SDPA; flash-linear-attention where installed.",
    ),
]
Peer = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=MODULE:FUNCTION", help="With --peers, which it implies: also this function (docs/performance.md). Repeatable."
    ),
]
Headline = Annotated[
    bool, typer.Option("--headline", help="Instead: the README's claims again, on this GPU, each beside dense attention. Minutes.")
]


def bench(
    suite: Annotated[
        str, typer.Option(help=f"Instead of the matrix: {', '.join(SUITES)}, comma-separated, or all (a GPU's sizes); cpu on a CPU.")
    ] = "",
    peers: Peers = False,
    peer: Peer = None,
    headline: Headline = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few and small cases: a look at a machine, in minutes.")] = False,
    out: Annotated[
        Path | None, typer.Option(help=f"Folder of the rows; {bench_sel_triton.RESULTS}/<today> by default. Run again, it resumes.")
    ] = None,
    device: Device = "auto",
    only: Annotated[str, typer.Option(help="With --suite or --peers: only cases whose name contains this.")] = "",
    backends: Backends = "",
    N: bench_sel_triton.NFlag = "",
    H: bench_sel_triton.HFlag = "",
    D: bench_sel_triton.DFlag = "",
    Dv: bench_sel_triton.DvFlag = "",
    L_list: bench_sel_triton.LListFlag = "",
    dist: bench_sel_triton.DistFlag = "",
    iters: bench_sel_triton.ItersFlag = None,
    warmup: bench_sel_triton.WarmupFlag = 5,
    streams: bench_sel_triton.StreamsFlag = 1,
    decode: bench_sel_triton.DecodeFlag = None,
    csv: bench_sel_triton.CsvFlag = None,
) -> None:
    """Measure Triton against packed SDPA over the lengths of a selection, with CSV and Markdown.

    The seed matrix and the decode matrix; --decode 0 or 1 is one of them, and so are sizes. Flags of the matrix go
    without --suite and --peers.
    """
    where, console, folder = device_of(device), stderr_console(), out or bench_sel_triton.default_folder()
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
        _, written = bench_sel_triton.measure(
            both, where, folder, console, sizes=sizes, iters=iters, warmup=warmup, streams=streams, backends=backends, csv=csv, quick=quick
        )
        echo(f"written: {', '.join(map(str, (folder / 'rows.jsonl', *written)))}")
        return
    _unused(of_matrix, "--suite and --peers")
    ours = named(backends or ",".join(usual_backends(where)))
    others = (*every_peer(), *given(peer or (), every_peer())) if peers or peer else ()
    if others:  # dense attention is one of them, there with its parity
        ours = [contender for contender in ours if contender.name != DENSE]
    contenders = able((*ours, *others), where, console.print)
    suites = speed.suites_of(suite or "performance,decode", quick, where)
    rows = run(speed.jobs(suites, contenders, only, where), folder / f"{'peers' if others else 'suites'}.jsonl", where, console)
    echo(speed.table(rows, PEERS_SHOWN if others else speed.SHOWN))


def _unused(flags: dict[str, Any], beside: str) -> None:
    """Raises ArgumentError where one of these flags is given."""
    given_too = [f"--{name}" for name, value in flags.items() if value not in ("", None, 0, [])]
    if given_too:
        raise ArgumentError(", ".join(given_too), "given", f"left out with {beside}", "its cases have sizes of their own")
