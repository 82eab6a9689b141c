"""One contiguous range a row, [(0, L)]: which way is the fastest, forward, on a GPU?

    python -m nsa_sel.bench.questions.one_range --out bench/results/h200/dense.jsonl

N rows at the end of max(N, 8192) keys, one group of h heads, D 128, bf16; the last L is all keys, a causal prefix. Ways:
    triton-group, triton-token    one program a row (and head)
    packed-dense, packed-varlen   sdpa-packed by NSA_SEL_TRITON_FORCE_PATH: tiles of rows under a mask; each row's keys gathered
    dense-cudnn                   causal attention to all keys, whatever was selected: the row for the whole prefix
The other ways are held to triton-group's o (`mae`: mean absolute difference). `slices_over_selected`: keys that packed-dense looks at
for one that is selected.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
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
from nsa_sel.bench.core.command_line import program, stderr_console
from nsa_sel.bench.core.store import Row, append
from nsa_sel.bench.core.timing import milliseconds, row
from nsa_sel.bench.questions.speed import device_of
from nsa_sel.selection import Selection

FLAG = "NSA_SEL_TRITON_FORCE_PATH"
WAYS = {  # name -> backend and the path that the flag forces
    "triton-group": ("triton-group", "auto"),
    "triton-token": ("triton-token", "auto"),
    "packed-dense": ("sdpa-packed", "dense"),
    "packed-varlen": ("sdpa-packed", "varlen"),
}
REP = 10  # ms of calls each; three at least


def dense_cases(quick: bool) -> list[tuple[Case, int]]:
    """Each case with its L."""
    found = []
    for N in (64,) if quick else (1024, 8192):
        keys = 256 if quick else 8192
        for h in (4,) if quick else (4, 16):
            for L in (16, keys) if quick else (64, 256, 1024, 4096, keys):
                D = 16 if quick else 128
                found.append((Case(f"prefix-N{N}-h{h}-L{L}", "prefix", 1, N, keys, 1, h, D, D, 1, 0, "bfloat16"), L))
    return found


def measured(case: Case, L: int, device: str) -> Iterator[Row]:
    """The rows of one case, each as soon as it is known."""
    q, k, v, _ = make_inputs(case, device)
    ranges = torch.tensor([0, L], dtype=torch.int32, device=device).expand(1, case.S, 1, 1, 2).contiguous()
    first = case.S_kv - case.S
    slices = sum(min(first + s - s % 1024 + 1024, case.S_kv) for s in range(case.S))  # as tiles of 1024 rows look at them
    waste = slices / sum(min(L, first + s + 1) for s in range(case.S))
    reference: Tensor | None = None
    for name, (backend, path) in WAYS.items():
        if device == "cpu" and backend != "sdpa-packed":
            continue
        os.environ[FLAG] = path

        def attend(backend: str = backend) -> Tensor:
            o: Tensor = nsa_sel.selection_attention(q, k, v, Selection(ranges, None, L), backend=backend)
            return o

        yield _row(case, name, attend, device, waste, reference)
        reference = attend() if reference is None else reference
    yield _row(case, "dense-cudnn", lambda: dense_causal_sdpa(q, k, v), device, waste, reference if L == case.S_kv else None)


def _row(case: Case, name: str, attend: Callable[[], Tensor], device: str, waste: float, reference: Tensor | None) -> Row:
    with torch.no_grad():
        o = attend()
        mae = None if reference is None else float((o.float() - reference.float()).abs().mean())
        del o
        times = milliseconds(attend, REP, device=device)
    return row(case, "fwd", name, times, mae=mae, slices_over_selected=round(waste, 2))


def main(
    out: Annotated[Path | None, typer.Option(help="file of JSON lines to add the rows to")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda, cpu")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="two tiny cases")] = False,
) -> None:
    """Measure the ways through one range a row; print a table, and add the rows to a file."""
    where, console, given = device_of(device), stderr_console(), os.environ.get(FLAG)
    facts, rows = environment.stamp(where), list[Row]()
    try:
        for case, L in dense_cases(quick):
            found = [{**each, **facts} for each in measured(case, L, where)]
            rows += found
            told = ", ".join(f"{each['backend']} {each['ms_median']:.4g}" for each in found)
            console.print(f"{case.case}: {told}")
            if out is not None:
                append(out, found)
    finally:
        if given is None:
            os.environ.pop(FLAG, None)
        else:
            os.environ[FLAG] = given
    names = list(dict.fromkeys(each["backend"] for each in rows))
    times = {(each["case"], each["backend"]): each["ms_median"] for each in rows}
    lines = [
        (name, each["slices_over_selected"], *(times[name, way] for way in names))
        for name, each in {each["case"]: each for each in rows}.items()
    ]
    print(tabulate(lines, headers=("case", "slices over selected", *names), tablefmt="github", floatfmt=".4g"))


if __name__ == "__main__":
    program(main)
