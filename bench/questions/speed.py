"""How fast is each backend on this GPU? Ours, packed SDPA and dense attention (cuDNN) in one process: forward, backward, decode.

    python -m nsa_sel.bench.questions.speed --out bench/results/h200/selection.jsonl

Times are of the whole call: a fresh `Selection` each time, so that plans are built within it. Parity is checked in the same run
on outputs whose memory held NaN, for sampled rows against the float64 oracle (`mae`). Run again, it resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import typer
from tabulate import tabulate

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.command_line import Backends, Device, Only, Out, Quick, device_of, echo, program, stderr_console
from nsa_sel.bench.core.contenders import DENSE, PACKED, PREFILL_ONLY, SLOW, Contender, backends_on, named
from nsa_sel.bench.core.session import Job, able, run
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing
from nsa_sel.errors import ArgumentError

LEFT_OUT = next(name for name in SLOW if name != PACKED)  # by default: it takes more time than all others
SOME = 5  # names that an error shows
SHOWN = ("case", "direction", "backend", "ms_median", "ms_p20", "ms_p80", "mae", "workspace_bytes", "error")


class Suite(NamedTuple):
    """One question: its cases, and how closely each is looked at."""

    cases: Callable[[], list[Case]]
    packed: bool  # whether packed SDPA takes part: up to 1.3 s a call at 32k rows
    whole: bool  # whether fwd+bwd is measured, beside fwd and bwd
    rep: float  # ms of timed calls
    rows: int  # compared with the oracle


# In this order a case that several suites share is looked at most closely by the first of them.
SUITES = {
    "performance": Suite(cases.performance_cases, packed=True, whole=True, rep=50, rows=64),
    "decode": Suite(cases.decode_cases, packed=True, whole=False, rep=50, rows=64),
    "parallel": Suite(cases.parallel_cases, packed=False, whole=False, rep=50, rows=64),
    "tokens": Suite(cases.few_token_cases, packed=False, whole=False, rep=20, rows=4),
    "threshold": Suite(cases.threshold_cases, packed=True, whole=False, rep=50, rows=64),
    "breakeven": Suite(cases.breakeven_cases, packed=False, whole=True, rep=50, rows=16),
    "scaling": Suite(cases.scaling_cases, packed=False, whole=False, rep=50, rows=16),
    "layers": Suite(cases.layer_cases, packed=False, whole=False, rep=20, rows=8),
    "models": Suite(cases.model_cases, packed=False, whole=False, rep=20, rows=4),
    "wide": Suite(cases.wide_cases, packed=False, whole=False, rep=20, rows=4),
    "large": Suite(cases.large_cases, packed=False, whole=False, rep=20, rows=4),
    "trained": Suite(cases.trained_cases, packed=False, whole=False, rep=50, rows=16),
    "trained-layers": Suite(cases.trained_layer_cases, packed=False, whole=False, rep=20, rows=8),
}
QUICK = Suite(cases.quick_cases, packed=True, whole=True, rep=10, rows=16)
OF_CPU = Suite(lambda: [Case("target", "random", 1, 2048, 2048, 2, 4, 64, 64, 8, 64, "float32")], True, whole=True, rep=2000, rows=128)


def usual_backends(device: str) -> list[str]:
    """What is measured by default on a device: all but the slowest, and dense attention on a GPU."""
    return [name for name in backends_on(device) if name != LEFT_OUT] + [DENSE] * (device == "cuda")


def suites_of(names: str, quick: bool, device: str) -> dict[str, Suite]:
    """Suites by comma-separated names, or all; the quick one instead. That one and "cpu" have sizes for a CPU."""
    if (names, device, quick) == ("cpu", "cpu", False):
        return {"cpu": OF_CPU}
    unknown = [name for name in names.split(",") if name not in (*SUITES, "all")]
    if unknown:
        raise ArgumentError("--suite", ", ".join(unknown), f"all, {', '.join(SUITES)}, comma-separated", "pass some of these")
    if quick:
        return {"quick": QUICK}
    if device == "cpu":
        raise ArgumentError("--device", "cpu", "cuda for cases of 8k rows and more", "pass --quick or --suite cpu, whose cases suit a CPU")
    return {name: suite for name, suite in SUITES.items() if name in names.split(",") or names == "all"}


def jobs(suites: dict[str, Suite], contenders: Sequence[Contender], only: str, device: str = "cuda") -> list[Job]:
    """What to measure, each case once, of those whose names contain `only`."""
    found: dict[str, Job] = {}
    for name, suite in suites.items():
        for case in suite.cases():
            step = cases.decodes(case)
            takes_part = {PACKED: suite.packed, **dict.fromkeys(PREFILL_ONLY, not step)}
            chosen = tuple(contender for contender in contenders if takes_part.get(contender.name, True))
            if step:  # computes no gradients, and checks none
                chosen = tuple(contender._replace(directions=("decode",)) for contender in chosen)
            directions = ("decode",) if step else ("fwd", "bwd", "fwd+bwd") if suite.whole else ("fwd", "bwd")
            if only in case.case and chosen:
                case = case if device == "cuda" else case._replace(dtype="float32")  # what CPUs compute in
                more: dict[str, object] = {"quick": True} if name == "quick" else {}
                found.setdefault(case.case, Job(case, chosen, directions, suite.rows, Timing(suite.rep), more))
    names = sorted({case.case for suite in suites.values() for case in suite.cases()})
    if not any(only in name for name in names):
        raise ArgumentError("--only", repr(only), f"a part of a case's name, such as {', '.join(names[:SOME])}", "mend it")
    return list(found.values())


def table(rows: Sequence[Row], shown: Sequence[str] = SHOWN) -> str:
    """The rows as they are read on a terminal."""
    return tabulate([[row.get(column) for column in shown] for row in rows], headers=shown, tablefmt="github")


def main(
    out: Out,
    suite: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(SUITES)}, some of them comma-separated, or all. {PACKED} is in performance, decode and threshold alone:"
            f" it takes up to 1.3 s a call at 32k rows. {DENSE} is in all. {' and '.join(PREFILL_ONLY)} do not decode. On a CPU: cpu."
        ),
    ] = "all",
    backends: Backends = "",
    only: Only = "",
    device: Device = "auto",
    quick: Quick = False,
) -> None:
    """Measure the cases with every backend; what runs out of memory, refuses or gives wrong results is reported and passed over."""
    where, console = device_of(device), stderr_console()
    asked = named(backends or ",".join(usual_backends(where)))
    chosen = jobs(suites_of(suite, quick, where), able(asked, where, console.print), only, where)
    echo(table(run(chosen, out, where, console)))


if __name__ == "__main__":
    program(main)
