"""Time each backend on this GPU, packed SDPA and dense attention (cuDNN) in one process: forward, backward, decode.

    python -m nsa_sel.bench.questions.speed --out bench/results/h200/selection.jsonl
    python -m nsa_sel.bench.questions.speed --suite caches --out bench/results/h200/serving.jsonl
    python -m nsa_sel.bench.questions.speed --suite packed --out bench/results/h200/varlen.jsonl
    python -m nsa_sel.bench.questions.speed --suite steps --out bench/results/h200/profiles/steps.jsonl

Whole calls are timed: a fresh `Selection` each time, from block indices and without a promise, so that plans are built
within it; a decoding step as one of 20 calls in a CUDA graph. Parity is checked in the same run, on outputs whose memory
held NaN, for sampled rows against the float64 oracle (`mae`). Suite caches: decoding over KV caches in one piece and in
pages, in bf16 and in e4m3. Suite steps: plain calls, and caches in all orders of memory. Suite packed: all sequences of
a batch in one call, one by one, and after a copy that aligns them (bench/core/variants.py). Run again, it continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer
from tabulate import tabulate

from nsa_sel.bench.core import cases, markdown, variants
from nsa_sel.bench.core.cases import ORDERS, Cache, Case, split_cache
from nsa_sel.bench.core.command_line import Backends, Device, Only, Out, Quick, device_of, echo, program, stderr_console
from nsa_sel.bench.core.contenders import DENSE, PACKED, PREFILL_ONLY, SLOW, Contender, backends_on, named
from nsa_sel.bench.core.session import Job, able, run
from nsa_sel.bench.core.store import Row, measured
from nsa_sel.bench.core.timing import Timing
from nsa_sel.errors import ArgumentError

LEFT_OUT = next(name for name in SLOW if name != PACKED)  # by default: it takes more time than all others
SOME = 5  # names that an error shows
SHOWN = ("case", "direction", "backend", "ms_median", "ms_p20", "ms_p80", "mae", "workspace_bytes", "error")
VARIANTS = "caches", "packed"  # suites that call backends in other ways; not in "all"


class Suite(NamedTuple):
    """One question: its cases, and how they are measured."""

    cases: list[Case]
    packed: bool = False  # measure packed SDPA, too: up to 1.3 s per call at 32k rows
    whole: bool = False  # measure fwd+bwd, beside fwd and bwd
    rep: float = 50  # ms of timed calls
    rows: int = 64  # compared with the oracle


# A case of several suites is measured as in the first of them.
SUITES = {
    "performance": Suite(cases.PERFORMANCE, packed=True, whole=True),
    "decode": Suite(cases.DECODE, packed=True),
    "parallel": Suite(cases.PARALLEL),
    "tokens": Suite(cases.FEW, rep=20, rows=4),
    "threshold": Suite(cases.THRESHOLD, packed=True),
    "breakeven": Suite(cases.BREAKEVEN, whole=True, rows=16),
    "scaling": Suite(cases.SCALING, rows=16),
    "layers": Suite(cases.OF_LAYERS, rep=20, rows=8),
    "models": Suite(cases.OF_MODELS, rep=20, rows=4),
    "steps": Suite(cases.STEPS, rep=20, rows=4),
    "wide": Suite(cases.WIDE, rep=20, rows=4),
    "large": Suite(cases.LARGE, rep=20, rows=4),
    "trained": Suite([*cases.TRAINED, *cases.INDEXED], rows=16),
    "caches": Suite(cases.CACHES, rep=20),
    "packed": Suite(cases.PACKED, whole=True),
}
QUICK = Suite(cases.QUICK, packed=True, whole=True, rep=10, rows=16)
OF_CPU = Suite([Case("target", "random", 1, 2048, 2048, 2, 4, 64, 64, 8, 64, "float32")], True, whole=True, rep=2000, rows=128)


def usual_backends(device: str) -> list[str]:
    """Return what is measured by default on a device: all but the slowest, and dense attention on a GPU."""
    return [name for name in backends_on(device) if name != LEFT_OUT] + [DENSE] * (device == "cuda")


def suites_of(names: str, quick: bool, device: str) -> dict[str, Suite]:
    """Return suites by comma-separated names, or all; with `quick` the quick one instead.

    That one and "cpu" have sizes for a CPU.
    """
    if (names, device, quick) == ("cpu", "cpu", False):
        return {"cpu": OF_CPU}
    unknown = [name for name in names.split(",") if name not in (*SUITES, "all")]
    if unknown:
        raise ArgumentError("--suite", ", ".join(unknown), f"all, {', '.join(SUITES)}, comma-separated", "pass some of these")
    if quick:
        return {"quick": QUICK}
    if device == "cpu":
        raise ArgumentError("--device", "cpu", "cuda for cases of 8k rows and more", "pass --quick or --suite cpu, whose cases suit a CPU")
    chosen = names.split(",") if names != "all" else [name for name in SUITES if name not in VARIANTS]
    return {name: suite for name, suite in SUITES.items() if name in chosen}


def jobs(suites: dict[str, Suite], contenders: Sequence[Contender], only: str, device: str = "cuda") -> list[Job]:
    """Return what to measure, each case once, of those whose names contain `only`."""
    found: dict[str, Job] = {}
    ours = [contender.name for contender in contenders if not contender.peer and contender.name != DENSE]
    for name, suite in suites.items():
        for case in suite.cases:
            step = cases.decodes(case)
            takes_part = {PACKED: suite.packed, **dict.fromkeys(PREFILL_ONLY, not step)}
            chosen = tuple(contender for contender in contenders if takes_part.get(contender.name, True))
            names = [backend for backend in ours if takes_part.get(backend, True)]
            readers = [backend for backend in names if backend in variants.READERS]
            if name == "steps":
                chosen += tuple(variants.over_caches(readers, variants.LAYOUTS if "minimax-m3" in case.case else variants.E4M3))
            if name in VARIANTS:
                chosen = tuple(variants.over_caches(readers) if name == "caches" else variants.on_packed_batches(case, names))
            if step:  # computes no gradients, and checks none
                chosen = tuple(contender._replace(directions=("decode",)) for contender in chosen)
            directions = ("decode",) if step else ("fwd", "bwd", "fwd+bwd") if suite.whole else ("fwd", "bwd")
            if only in case.case and chosen:
                case = case if device == "cuda" else case._replace(dtype="float32")  # what CPUs compute in
                more: dict[str, object] = {"quick": True} if name == "quick" else {}
                found.setdefault(case.case, Job(case, chosen, directions, suite.rows, Timing(suite.rep), more))
    names = sorted({case.case for suite in suites.values() for case in suite.cases})
    if not any(only in name for name in names):
        raise ArgumentError("--only", repr(only), f"a part of a case's name, such as {', '.join(names[:SOME])}", "mend it")
    return list(found.values())


def table(rows: Sequence[Row], shown: Sequence[str] = SHOWN) -> str:
    """Return the rows as they are read on a terminal."""
    return tabulate([[row.get(column) for column in shown] for row in rows], headers=shown, tablefmt="github")


def table_of_steps(rows: Sequence[Row], bandwidth: float) -> str:
    """Return microseconds of decoding steps by what keys and values are stored in, for each order of memory; and what reading
    the selected ones once takes at `bandwidth` bytes per second.
    """
    cells = []
    for row in measured(rows):
        case, (backend, cache) = Case(**{name: row[name] for name in Case._fields}), split_cache(row["backend"])
        cache = Cache(None, None, "groups first") if cache is None else cache  # a plain call reads k and v in this order
        stored, size = ("e4m3", 1) if cache.quantized else ("bf16", 2)
        least = case.B * case.G * case.n * case.block * (case.Dk + case.Dv) * size / bandwidth * 1e6
        text = f"{row['ms_median'] * 1e3:.3g}{markdown.MARK * markdown.scatters(row)}"
        line, column = (case.case, backend, cache.pages), f"{stored}: {' / '.join(ORDERS)}"
        cells += [(line, column, cache.order, text), (line, f"{stored} read once", "least", f"{least:.3g}")]
    return markdown.pivot(["case", "backend", "cache"], cells, ORDERS)


def table_of_caches(rows: Sequence[Row]) -> str:
    """Return microseconds over a cache in one piece, and over pages: in q's dtype / in e4m3."""
    cells = []
    for row in measured(rows):
        backend, cache = split_cache(row["backend"])
        if cache is not None:
            where = "in one piece: bf16 / e4m3" if cache.page_size is None else cache.pages
            text = f"{row['ms_median'] * 1e3:.2f}{markdown.MARK * markdown.scatters(row)}"
            cells.append(((row["case"], backend), where, cache.quantized is not None, text))
    return markdown.pivot(["case", "backend"], cells, (False, True))


def main(
    out: Out,
    suite: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(SUITES)}, comma-separated, or all but {' and '.join(VARIANTS)}. {PACKED} is in performance, decode"
            f" and threshold alone: it takes up to 1.3 s a call at 32k rows. {' and '.join(PREFILL_ONLY)} do not decode. On a CPU: cpu."
        ),
    ] = "all",
    backends: Backends = "",
    only: Only = "",
    device: Device = "auto",
    quick: Quick = False,
) -> None:
    """Measure the cases with every backend; what runs out of memory, refuses or gives wrong results is reported and
    passed over.
    """
    where, console = device_of(device), stderr_console()
    asked = named(backends or ",".join(usual_backends(where)))
    chosen = jobs(suites_of(suite, quick, where), able(asked, where, console.print), only, where)
    echo(table(run(chosen, out, where, console)))


if __name__ == "__main__":
    program(main)
