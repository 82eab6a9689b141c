"""Numba against packed SDPA, masked SDPA and dense causal SDPA on this CPU: forward, and forward with backward, in turns.

All take turns within one process, so that what else the machine does meets all of them. Each call of the library gets a new
`Selection`, so that plans are built within the time; the mask of masked SDPA is built outside it. Rows go to a JSON-lines file.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from rich.progress import track
from tabulate import tabulate
from torch import Tensor

import nsa_sel
from nsa_sel.bench.baselines import dense_causal_sdpa, masked_sdpa, token_mask
from nsa_sel.bench.measure import processor
from nsa_sel.oracle import oracle_backward, oracle_forward
from nsa_sel.selection import Selection

ROOT = Path(__file__).resolve().parents[1]
SETTLE = 0.02  # seconds before each call: threads of the one before may still wait busily for work
DIRECTIONS = ("fwd", "fwd+bwd")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """Sizes of one case; as many keys as queries, Dv = Dk = D."""

    case: str
    B: int
    S: int
    G: int
    h: int
    D: int
    n: int
    block: int


TARGET = Shape("target", 1, 2048, 2, 4, 64, 8, 64)
QUICK = Shape("quick", 1, 512, 2, 4, 64, 4, 64)


class Problem(NamedTuple):
    """Inputs in float32 that require gradients, the gradient of o, and the blocks selected by random scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    selection: Selection


def make_problem(shape: Shape, seed: int) -> Problem:
    """Standard normal q [B,S,G,h,D], k, v [B,G,S,D], do; n blocks a row, the first and two local ones among them."""
    B, S, G, h, D = shape[1:6]
    generator = torch.Generator().manual_seed(seed)
    sizes = (B, S, G, h, D), (B, G, S, D), (B, G, S, D), (B, S, G, h, D)
    q, k, v, do = (torch.randn(size, generator=generator) for size in sizes)
    scores = torch.randn(B, S, G, -(-S // shape.block), generator=generator)
    selection = Selection.from_scores(scores, shape.n, shape.block)
    return Problem(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do, selection)


def contenders(problem: Problem) -> dict[str, Attend]:
    """What is compared, by name. Dense causal attention computes something else; it is there for scale."""
    ranges, block = problem.selection.ranges, problem.selection.block_size
    mask = token_mask(problem.selection, problem.k.shape[2])

    def library(backend: str) -> Attend:
        return lambda q, k, v: nsa_sel.selection_attention(q, k, v, Selection(ranges, block), backend=backend)

    return {
        "numba": library("numba"),
        "sdpa-packed": library("sdpa-packed"),
        "masked-sdpa": lambda q, k, v: masked_sdpa(q, k, v, mask),
        "dense-causal-sdpa": dense_causal_sdpa,
    }


def work(attend: Attend, problem: Problem, direction: str) -> tuple[Tensor, ...]:
    """o, and with the backward pass dq, dk, dv."""
    q, k, v, do, _ = problem
    if direction == "fwd":
        with torch.no_grad():
            return (attend(q, k, v),)
    o = attend(q, k, v)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)


def errors(named: dict[str, Attend], problem: Problem) -> dict[tuple[str, str], float | None]:
    """Mean absolute error against float64 by backend and direction: of o, and with the backward pass the largest of o, dq, dk, dv.

    New tensors hold NaN before they are written, so that nothing left over from an earlier run passes for a result.
    """
    q, k, v, do, selection = problem
    exact = oracle_forward(q, k, v, selection.ranges)[0], *oracle_backward(q, k, v, selection.ranges, do)
    found: dict[tuple[str, str], float | None] = {}
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    try:
        for name, attend in named.items():
            for direction in DIRECTIONS:
                pairs = zip(work(attend, problem, direction), exact, strict=False)
                found[name, direction] = max(float((mine.double() - wanted).abs().mean()) for mine, wanted in pairs)
    finally:
        torch.use_deterministic_algorithms(False)
    for direction in DIRECTIONS:
        found["dense-causal-sdpa", direction] = None
    return found


def measure(named: dict[str, Attend], problem: Problem, repeats: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of `repeats` calls by backend and direction, after one call of each that is not counted."""
    times: dict[tuple[str, str], list[float]] = {(name, direction): [] for name in named for direction in DIRECTIONS}
    for _ in track(range(repeats + 1), "in turns"):
        for (name, direction), taken in times.items():
            time.sleep(SETTLE)
            started = time.perf_counter()
            work(named[name], problem, direction)
            taken.append((time.perf_counter() - started) * 1e3)
    return {key: taken[1:] for key, taken in times.items()}


def facts(shape: Shape, command: str) -> dict[str, Any]:
    """What all rows of a run share."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "case": shape.case, "distribution": "random", "B": shape.B, "S": shape.S, "S_kv": shape.S, "G": shape.G, "h": shape.h,
        "Dk": shape.D, "Dv": shape.D, "n": shape.n, "block": shape.block, "dtype": "float32",
        "workspace_bytes": None, "device": processor(), "driver": None, "torch": torch.__version__, "triton": None,
        "numba": metadata.version("numba"), "threads": torch.get_num_threads(),
        "commit": git.stdout.strip() or None, "command": command,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Medians and how many times longer than numba each contender takes."""
    ours = {row["direction"]: row["ms_median"] for row in rows if row["backend"] == "numba"}
    lines = [
        [
            row["direction"],
            row["backend"],
            f"{row['ms_median']:.1f}",
            f"{row['ms_p20']:.1f} - {row['ms_p80']:.1f}",
            f"{row['ms_median'] / ours[row['direction']]:.2f}",
            "other function" if row["mae"] is None else f"{row['mae']:.1e}",
        ]
        for row in rows
    ]
    return tabulate(lines, headers=["direction", "backend", "ms", "p20 - p80", "x numba", "MAE"], disable_numparse=True)


def main(
    quick: Annotated[bool, typer.Option(help="A smaller case.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Calls of each contender and direction.")] = 15,
    threads: Annotated[int | None, typer.Option(min=1, help="torch.set_num_threads; torch's default otherwise.")] = None,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="JSON-lines file of the rows; overwritten.")] = ROOT / "bench/results/cpu/numba_vs_sdpa.jsonl",
) -> None:
    """Time numba, packed SDPA, masked SDPA and dense causal SDPA in turns; print a table and write the rows."""
    if threads is not None:
        torch.set_num_threads(threads)
    shape = QUICK if quick else TARGET
    options = [f"--repeats {repeats}", f"--seed {seed}", *(["--quick"] if quick else []), *([f"--threads {threads}"] if threads else [])]
    common = facts(shape, " ".join(["python bench/bench_cpu.py", *options]))
    problem = make_problem(shape, seed)
    named = contenders(problem)
    mae = errors(named, problem)
    rows = []
    for (name, direction), taken in measure(named, problem, repeats).items():
        p20, median, p80 = np.quantile(taken, (0.2, 0.5, 0.8)).round(4).tolist()
        result = {"ms_median": median, "ms_p20": p20, "ms_p80": p80, "mae": mae[name, direction]}
        rows.append({**common, "direction": direction, "backend": name, **result})
    rows.sort(key=lambda row: DIRECTIONS.index(row["direction"]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    typer.echo(table(rows))


if __name__ == "__main__":
    typer.run(main)
