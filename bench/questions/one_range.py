"""One contiguous range a row, [(0, L)]: which path is the fastest, forward, on a GPU?

    python -m nsa_sel.bench.questions.one_range --out bench/results/h200/dense.jsonl

N rows at the end of max(N, 8192) keys, one group of h heads, D 128, bf16; the largest L is all keys, a causal prefix. Paths:
    triton-group, triton-token    one program a row (and head)
    packed-dense, packed-varlen   sdpa-packed by NSA_SEL_TRITON_FORCE_PATH: tiles of rows under a mask; each row's keys gathered
    dense-cudnn                   causal attention to all keys, whatever was selected: the baseline for the whole prefix
The other paths are compared with triton-group's o (`mae`: mean absolute difference). `slices_over_selected`: keys that packed-dense
loads per selected key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from tabulate import tabulate
from torch import Tensor

import nsa_sel
from nsa_sel.bench.core import environment
from nsa_sel.bench.core.baselines import dense_causal_sdpa
from nsa_sel.bench.core.cases import Case, make_inputs
from nsa_sel.bench.core.command_line import Device, Quick, device_of, program, stderr_console
from nsa_sel.bench.core.contenders import DENSE, PACKED
from nsa_sel.bench.core.store import Row, append
from nsa_sel.bench.core.timing import milliseconds, row
from nsa_sel.selection import Selection

FLAG = "NSA_SEL_TRITON_FORCE_PATH"
PATHS = {  # name -> backend, and the path that the flag forces
    "triton-group": ("triton-group", "auto"),
    "triton-token": ("triton-token", "auto"),
    "packed-dense": (PACKED, "dense"),
    "packed-varlen": (PACKED, "varlen"),
}
REP = 10  # ms of calls each; three at least


def dense_cases(quick: bool) -> list[tuple[Case, int]]:
    """Each case with its L."""
    keys, D = (256, 16) if quick else (8192, 128)
    sizes = [(N, h, L) for N in (1024, 8192) for h in (4, 16) for L in (64, 256, 1024, 4096, keys)]
    if quick:
        sizes = [(64, 4, L) for L in (16, keys)]
    return [(Case(f"prefix-N{N}-h{h}-L{L}", "prefix", 1, N, keys, 1, h, D, D, 1, 0, "bfloat16"), L) for N, h, L in sizes]


def measured(case: Case, L: int, device: str) -> Iterator[Row]:
    """The rows of one case, each as soon as it is known."""
    q, k, v, _ = make_inputs(case, device)
    ranges = torch.tensor([0, L], dtype=torch.int32, device=device).expand(1, case.S, 1, 1, 2).contiguous()
    first = case.S_kv - case.S
    slices = sum(min(first + s - s % 1024 + 1024, case.S_kv) for s in range(case.S))  # keys that tiles of 1024 rows load
    waste = round(slices / sum(min(L, first + s + 1) for s in range(case.S)), 2)
    reference: Tensor | None = None

    def timed(name: str, attend: Callable[[], Tensor], reference: Tensor | None) -> Row:
        with torch.no_grad():
            o = attend()
            mae = None if reference is None else float((o.float() - reference.float()).abs().mean())
            del o
            return row(case, "fwd", name, milliseconds(attend, REP, device=device), mae=mae, slices_over_selected=waste)

    for name, (backend, path) in PATHS.items():
        if device == "cpu" and backend != PACKED:
            continue
        os.environ[FLAG] = path

        def attend(backend: str = backend) -> Tensor:
            o: Tensor = nsa_sel.selection_attention(q, k, v, Selection(ranges, None, L), backend=backend)
            return o

        yield timed(name, attend, reference)
        reference = attend() if reference is None else reference
    yield timed(DENSE, lambda: dense_causal_sdpa(q, k, v), reference if L == case.S_kv else None)


@contextmanager
def flag_restored() -> Iterator[None]:
    """The flag is afterwards what it was."""
    before = os.environ.get(FLAG)
    try:
        yield
    finally:
        os.environ.pop(FLAG, None)
        if before is not None:
            os.environ[FLAG] = before


def table(rows: list[Row]) -> str:
    """Milliseconds of each path, a line a case."""
    names = list(dict.fromkeys(each["backend"] for each in rows))
    times = {(each["case"], each["backend"]): each["ms_median"] for each in rows}
    waste = {each["case"]: each["slices_over_selected"] for each in rows}
    lines = [(case, over, *(times[case, name] for name in names)) for case, over in waste.items()]
    return tabulate(lines, headers=("case", "slices over selected", *names), tablefmt="github", floatfmt=".4g")


def main(
    out: Annotated[Path | None, typer.Option(help="JSON-lines file that rows are appended to")] = None,
    device: Device = "auto",
    quick: Quick = False,
) -> None:
    """Measure the paths for one range a row; print a table, and add the rows to a file."""
    where, console = device_of(device), stderr_console()
    facts, rows = environment.stamp(where), list[Row]()
    with flag_restored():
        for case, L in dense_cases(quick):
            found = [{**each, **facts} for each in measured(case, L, where)]
            rows += found
            told = ", ".join(f"{each['backend']} {each['ms_median']:.4g}" for each in found)
            console.print(f"{case.case}: {told}")
            if out is not None:
                append(out, found)
    print(table(rows))


if __name__ == "__main__":
    program(main)
