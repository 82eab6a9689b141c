"""On a CPU, how fast is numba beside packed SDPA, masked SDPA and dense causal SDPA? Forward, and forward with backward.

    python -m nsa_sel.bench.questions.cpu_backends

All take turns within one process, so that other load on the machine hits all of them. Each call of the library gets a new `Selection`,
so that plans are built within its time; the mask of masked SDPA is built outside. Rows go to a JSON-lines file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from nsa_sel.bench.core import environment, markdown, timing
from nsa_sel.bench.core.baselines import dense_causal_sdpa, masked_sdpa, token_mask
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.command_line import Quick, echo, program
from nsa_sel.bench.core.contenders import PACKED, Contender, Ready, as_it_is, backends_on, ours
from nsa_sel.bench.core.parity import Problem, make_problem, parity, sample
from nsa_sel.bench.core.session import work_of
from nsa_sel.bench.core.store import Row, as_lines, write_whole
from nsa_sel.cli.output import output_file

DIRECTIONS = ("fwd", "fwd+bwd")
TARGET = Case("target", "random", 1, 2048, 2048, 2, 4, 64, 64, 8, 64, "float32")
QUICK = Case("quick", "random", 1, 512, 512, 2, 4, 64, 64, 4, 64, "float32")
ROWS_CHECKED = 128
ROWS = environment.ROOT / "bench/results/cpu/numba_vs_sdpa.jsonl"


def contenders() -> list[Contender]:
    """What is compared. Dense causal attention computes another function; it is there for scale."""

    def masked(problem: Problem) -> Ready:
        mask = token_mask(problem.selection, problem.k.shape[2])
        return as_it_is(lambda q, k, v: masked_sdpa(q, k, v, mask))

    dense = Contender("dense-causal-sdpa", lambda problem: as_it_is(dense_causal_sdpa), checked=False)
    faster = [name for name in backends_on("cpu") if name != PACKED]
    return [*map(ours, faster), ours(PACKED), Contender("masked-sdpa", masked), dense]


def in_turns(works: dict[tuple[str, str], Callable[[], Any]], repeats: int) -> dict[tuple[str, str], timing.Spread]:
    """The times of `repeats` calls of each, after one of each that is not counted."""
    times: dict[tuple[str, str], list[float]] = {name: [] for name in works}
    for _ in track(range(repeats + 1), "in turns"):
        for name, call in works.items():
            times[name].append(timing.cpu_milliseconds(call))
    return {name: timing.spread(taken[1:]) for name, taken in times.items()}


def measured(case: Case, repeats: int, seed: int) -> list[Row]:
    """The rows of all contenders, parity checked first; dense attention has no `mae`."""
    problem = make_problem(case, "cpu", seed)
    exact, facts = sample(case, problem, ROWS_CHECKED), environment.stamp("cpu")
    ready = {contender: contender.prepare(problem) for contender in contenders()}
    mae = {contender.name: parity(made.call, problem, exact) if contender.checked else (None, None) for contender, made in ready.items()}
    works = {
        (contender.name, direction): work_of(direction, made, problem) for direction in DIRECTIONS for contender, made in ready.items()
    }
    rows = []
    for (name, direction), times in in_turns(works, repeats).items():
        error = mae[name][0] if direction == "fwd" else max((x for x in mae[name] if x is not None), default=None)
        rows.append(timing.row(case, direction, name, times, mae=error, workspace_bytes=None, **environment.gpu_state("cpu"), **facts))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Medians, and how many times longer than the first contender each takes."""
    first = {row["direction"]: row["ms_median"] for row in reversed(rows)}
    lines = []
    for row in rows:
        error = "other function" if row["mae"] is None else f"{row['mae']:.1e}"
        ratio = row["ms_median"] / first[row["direction"]]
        lines.append([row["direction"], row["backend"], f"{row['ms_median']:.1f}", markdown.spread(row), f"{ratio:.2f}", error])
    return markdown.table(["direction", "backend", "ms", "p20 to p80", f"x {rows[0]['backend']}", "MAE"], lines)


def main(
    quick: Quick = False,
    repeats: Annotated[int, typer.Option(min=1, help="calls of each contender and direction")] = 15,
    threads: Annotated[int | None, typer.Option(min=1, help="torch.set_num_threads; torch's default otherwise")] = None,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="JSON-lines file of the rows; overwritten")] = ROWS,
) -> None:
    """Time all contenders in turns; print a table and write the rows."""
    output_file("--out", out, make_folder=True)
    if threads is not None:
        torch.set_num_threads(threads)
    rows = measured(QUICK if quick else TARGET, repeats, seed)
    write_whole(out, as_lines(rows))
    echo(table(rows))


if __name__ == "__main__":
    program(main)
