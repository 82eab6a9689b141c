"""On a CPU, how fast is numba beside packed SDPA, masked SDPA and dense causal SDPA? Forward, and forward with backward.

    python -m nsa_sel.bench.questions.cpu_backends --out bench/results/cpu/numba_vs_sdpa.jsonl

Each call of the library gets a new `Selection`, so that plans are built within its time; the mask of masked SDPA is built outside. Run
again, it resumes.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from nsa_sel.bench.core.baselines import masked_sdpa, token_mask
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.command_line import Out, Quick, echo, program, stderr_console
from nsa_sel.bench.core.contenders import PACKED, Contender, Ready, as_it_is, backends_on, dense, ours
from nsa_sel.bench.core.parity import Problem
from nsa_sel.bench.core.session import Job, run
from nsa_sel.bench.core.timing import Timing
from nsa_sel.bench.questions.speed import SHOWN, table

DIRECTIONS = ("fwd", "fwd+bwd")
TARGET = Case("target", "random", 1, 2048, 2048, 2, 4, 64, 64, 8, 64, "float32")
QUICK = Case("quick", "random", 1, 512, 512, 2, 4, 64, 64, 4, 64, "float32")
ROWS_CHECKED = 128


def contenders() -> tuple[Contender, ...]:
    """What is compared. Dense causal attention computes another function; it is there for scale."""

    def masked(problem: Problem) -> Ready:
        mask = token_mask(problem.selection, problem.k.shape[2])
        return as_it_is(lambda q, k, v: masked_sdpa(q, k, v, mask))

    faster = [name for name in backends_on("cpu") if name != PACKED]
    return (*map(ours, faster), ours(PACKED), Contender("masked-sdpa", masked), dense("dense-causal-sdpa", "any", "cpu"))


def main(
    out: Out,
    quick: Quick = False,
    repeats: Annotated[int, typer.Option(min=3, help="calls of each contender and direction")] = 15,
    threads: Annotated[int | None, typer.Option(min=1, help="torch.set_num_threads; torch's default otherwise")] = None,
) -> None:
    """Measure all contenders; print a table, and add the rows to a file."""
    if threads is not None:
        torch.set_num_threads(threads)
    job = Job(QUICK if quick else TARGET, contenders(), DIRECTIONS, ROWS_CHECKED, Timing(calls=repeats), {"quick": True} if quick else {})
    echo(table(run([job], out, "cpu", stderr_console()), SHOWN[:7]))


if __name__ == "__main__":
    program(main)
