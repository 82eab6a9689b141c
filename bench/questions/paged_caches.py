"""What does a block table cost? Decoding over a KV cache in one piece and in pages, in one process.

    python -m nsa_sel.bench.questions.paged_caches --out bench/results/h200/serving.jsonl

The cases are those of the decode suite, with one new token a sequence and with four; times are of whole calls by graph replay. Pages
are in random order. A plain call knows no lengths; all others are given them, and all sequences are as long as their cache. Caches lie
in memory as the arguments say, [.., key, group, D], or with a group's keys together, [.., group, key, D]. With --quantized caches are e4m3
with one scale per head, per page and head, or for all.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Any, cast

import torch
import typer
from torch import Tensor

from nsa_sel.bench.core import markdown
from nsa_sel.bench.core.cases import Case, decode_cases
from nsa_sel.bench.core.command_line import Device, Only, Out, Quick, device_of, echo, program, stderr_console
from nsa_sel.bench.core.contenders import Contender, Ready, as_it_is, ours
from nsa_sel.bench.core.parity import Problem
from nsa_sel.bench.core.session import Job, able, run
from nsa_sel.bench.core.store import Row, measured
from nsa_sel.bench.core.timing import Timing
from nsa_sel.quantize import Each, quantize_e4m3
from nsa_sel.selection import Selection
from nsa_sel.serving import selection_attention_with_kvcache

PAGE_SIZES = (16, 64, 256)
Scaled = enum.StrEnum("Scaled", ["tensor", "head", "page"])
QUICK = Case("quick-decode-B3-512", "random", 3, 1, 512, 2, 2, 16, 16, 4, 16, "float32")
IN_ONE_PIECE = "in one piece"  # what pages are compared with
KEYS_FIRST, GROUPS_FIRST = "keys first", "groups first"  # how the numbers of a cache lie in memory


def serving_cases() -> list[Case]:
    """The decode cases of 16 heads per group, and the same with four new tokens per sequence."""
    one = [case for case in decode_cases() if case.h == 16]
    return [*one, *(case._replace(case=f"{case.case}-S4", S=4) for case in one)]


def cached(backend: str, page_size: int | None, layout: str, each: Each | None = None) -> Contender:
    """`backend` over the keys of a problem, as a contiguous cache or as pages in random order; with `each` quantized."""

    def prepare(problem: Problem) -> Ready:
        B, S_kv = len(problem.q), problem.k.shape[2]
        lengths = torch.full((B,), S_kv, dtype=torch.int32, device=problem.q.device)
        k_cache, v_cache = (x.detach().transpose(1, 2) for x in problem[2:4])
        table = None
        if page_size is not None:
            generator = torch.Generator().manual_seed(0)
            order = torch.randperm(B * (S_kv // page_size), generator=generator).to(lengths.device)
            table = order.int().view(B, -1)
            k_cache, v_cache = (in_pages(x, order, page_size) for x in (k_cache, v_cache))
        scales: dict[str, Any] = {}
        if each is not None:
            (k_cache, scales["k_scale"]), (v_cache, scales["v_scale"]) = (quantize_e4m3(x, each) for x in (k_cache, v_cache))
        k_cache, v_cache = (laid_out(x, layout) for x in (k_cache, v_cache))
        ranges, block = problem.selection.ranges, problem.selection.block_size

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            fresh = Selection(ranges, block, disjoint=True)
            o: Tensor = selection_attention_with_kvcache(q, k_cache, v_cache, fresh, lengths, table, backend=backend, **scales)
            return o

        return as_it_is(attend)

    name = f"{IN_ONE_PIECE if page_size is None else f'pages of {page_size}'}, {layout}" + ("" if each is None else f", e4m3/{each}")
    return Contender(f"{backend}, {name}", prepare, ours(backend).lacks, directions=("decode",))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """A cache [..,keys,G,D] with its numbers in that order, or with those of a group together."""
    return x.contiguous() if layout == KEYS_FIRST else x.transpose(1, 2).contiguous().transpose(1, 2)


def in_pages(x: Tensor, order: Tensor, page_size: int) -> Tensor:
    """Pages [pages,page_size,G,D] of a cache [B,S_kv,G,D]: page i of all of them stands at order[i]."""
    pages = torch.empty(len(order), page_size, *x.shape[2:], dtype=x.dtype, device=x.device)
    pages[order] = x.unflatten(1, (-1, page_size)).flatten(0, 1)  # type: ignore[no-untyped-call]
    return pages


def table(rows: Sequence[Row]) -> str:
    """Microseconds over a cache in one piece, and over pages with how many times as long that takes."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in measured(rows):
        backend, *how = row["backend"].split(", ")
        if how:
            numbers = how[2] if len(how) > 2 else row["dtype"]
            found.setdefault((row["case"], backend, how[1], numbers), {})[how[0]] = row
    lines = []
    for key, times in found.items():
        us = {name: f"{row['ms_median'] * 1e3:.2f}{markdown.MARK * markdown.scatters(row)}" for name, row in times.items()}
        whole = times.get(IN_ONE_PIECE, {}).get("ms_median")
        paged = [us[name] + (f" ({row['ms_median'] / whole:.3f})" if whole else "") for name, row in times.items() if name != IN_ONE_PIECE]
        lines.append((*key, us.get(IN_ONE_PIECE, "-"), *paged))
    headers = (
        "case",
        "backend",
        "layout",
        "cache",
        IN_ONE_PIECE,
        *(name for name in next(iter(found.values()), {}) if name != IN_ONE_PIECE),
    )
    return markdown.table(headers, lines)


def main(
    out: Out,
    backend: Annotated[str, typer.Option(help="the backend that is forced")] = "triton-group",
    quantized: Annotated[Scaled | None, typer.Option(help="e4m3 caches beside unquantized ones, and what has a scale of its own")] = None,
    only: Only = "",
    device: Device = "auto",
    quick: Quick = False,
) -> None:
    """Measure plain calls and calls over caches in one piece and in pages; print how they compare."""
    where, console = device_of(device), stderr_console()
    plain = ours(backend)._replace(directions=("decode",))
    kinds = [None] if quantized is None else [None, cast(Each, quantized.value)]
    caches = [
        cached(backend, size, layout, each)
        for each in kinds
        for layout in (KEYS_FIRST, GROUPS_FIRST)
        for size in (None, *PAGE_SIZES)
        if each != "page" or size is not None  # a cache in one piece has no scales of pages
    ]
    contenders = able((plain, *caches), where, console.print)
    small = QUICK if quantized is None else QUICK._replace(dtype="bfloat16")  # whose errors may be as large as those of e4m3
    chosen = [case for case in ([small] if quick else serving_cases()) if only in case.case]
    jobs = [Job(case, contenders, ("decode",), 64, Timing(50), {"quick": True} if quick else {}) for case in chosen]
    echo(table(run(jobs, out, where, console)))


if __name__ == "__main__":
    program(main)
