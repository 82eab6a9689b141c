"""One contiguous range a row, [(0, L)]: which path is the fastest, forward, on a GPU?

    python -m nsa_sel.bench.questions.one_range --out bench/results/h200/dense.jsonl

N rows at the end of 8192 keys, one group of h heads, D 128, bf16; the largest L is all keys, a causal prefix. Paths:
    triton-group, triton-token    one program a row (and head)
    packed-dense, packed-varlen   sdpa-packed by NSA_SEL_TRITON_FORCE_PATH: tiles of rows under a mask; each row's keys gathered
    dense-cudnn                   causal attention to all keys, whatever was selected: the baseline for the whole prefix
`slices_over_selected`: keys that packed-dense loads per selected key. Run again, it resumes.
"""

from __future__ import annotations

import os
from unittest import mock

from nsa_sel.bench.core.cases import Case, length_of
from nsa_sel.bench.core.command_line import Device, Out, Quick, device_of, echo, program, stderr_console
from nsa_sel.bench.core.contenders import PACKED, Contender, Ready, dense, ours
from nsa_sel.bench.core.parity import Problem
from nsa_sel.bench.core.session import Job, able, run
from nsa_sel.bench.core.timing import Timing
from nsa_sel.bench.questions.speed import SHOWN, table

FLAG = "NSA_SEL_TRITON_FORCE_PATH"
PATHS = {  # name -> backend, and the path that the flag forces
    "triton-group": ("triton-group", "auto"),
    "triton-token": ("triton-token", "auto"),
    "packed-dense": (PACKED, "dense"),
    "packed-varlen": (PACKED, "varlen"),
}
TILE = 1024  # rows that packed-dense computes together
ROWS_CHECKED = 16


def prefix_cases(quick: bool, device: str) -> list[Case]:
    """A small pair of cases, or 1024 and 8192 rows of 4 and 16 heads that select from 64 to all keys."""
    keys, D = (256, 16) if quick else (8192, 128)
    sizes = [(N, h, L) for N in (1024, 8192) for h in (4, 16) for L in (64, 256, 1024, 4096, keys)]
    if quick:
        sizes = [(64, 4, L) for L in (16, keys)]
    dtype = "bfloat16" if device == "cuda" else "float32"
    return [Case(f"prefix-N{N}-h{h}-L{L}", "prefix", 1, N, keys, 1, h, D, D, 1, 0, dtype) for N, h, L in sizes]


def path(name: str) -> Contender:
    """A backend with the flag set to one of its paths."""
    backend, forced = PATHS[name]
    contender = ours(backend)

    def prepare(problem: Problem) -> Ready:
        os.environ[FLAG] = forced  # contenders take turns: until the next one
        return contender.prepare(problem)

    return contender._replace(name=name, prepare=prepare)


def waste(case: Case) -> float:
    """Keys that packed-dense loads per selected key."""
    L, first = length_of(case.case, case.n, case.block), case.S_kv - case.S
    loaded = sum(min(first + s - s % TILE + TILE, case.S_kv) for s in range(case.S))
    return round(loaded / sum(min(L, first + s + 1) for s in range(case.S)), 2)


def main(out: Out, device: Device = "auto", quick: Quick = False) -> None:
    """Measure the paths for one range a row; print a table, and add the rows to a file."""
    where, console = device_of(device), stderr_console()
    contenders = able((*map(path, PATHS), dense()), where, console.print)
    more = {"quick": True} if quick else {}
    jobs = [
        Job(case, contenders, ("fwd",), ROWS_CHECKED, Timing(10), {"slices_over_selected": waste(case), **more})
        for case in prefix_cases(quick, where)
    ]
    with mock.patch.dict(os.environ):  # afterwards the flag is what it was
        echo(table(run(jobs, out, where, console), (*SHOWN[:6], "mae", "slices_over_selected")))


if __name__ == "__main__":
    program(main)
