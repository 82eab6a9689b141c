"""What does a KV cache cost? Decoding over caches in one piece and in pages, in bf16 and in e4m3, by every backend that reads them.

    python -m nsa_sel.bench.questions.paged_caches --quantized head --out bench/results/h200/serving.jsonl

One new token a sequence, and four; times are of whole calls by graph replay. Pages are in random order, and all sequences are as long as
their cache. Caches lie in memory as the arguments say, [.., key, group, D]; with --groups-first also with a group's keys together,
[.., group, key, D]. Backends share a cache, so that it is made once. bench/core/caches.py says how rows name it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple, cast

import torch
import typer
from torch import Tensor

from nsa_sel.bench.core import markdown
from nsa_sel.bench.core.caches import GROUPS_FIRST, IN_ONE_PIECE, KEYS_FIRST, Cache, named, parsed
from nsa_sel.bench.core.cases import Case, decode_cases, few_token_cases, parallel_cases
from nsa_sel.bench.core.command_line import Device, Only, Out, Quick, device_of, echo, program, stderr_console
from nsa_sel.bench.core.contenders import Contender, Ready, as_it_is, ours
from nsa_sel.bench.core.parity import Problem
from nsa_sel.bench.core.session import Job, able, run
from nsa_sel.bench.core.store import Row, measured
from nsa_sel.bench.core.timing import Timing
from nsa_sel.core import registry
from nsa_sel.core.request import Quantized
from nsa_sel.quantize import Each, quantize_e4m3
from nsa_sel.selection import Selection
from nsa_sel.serving import selection_attention_with_kvcache

PAGE_SIZES = (16, 64, 256)
READERS = tuple(name for name, backend in registry.backends().items() if backend.reads_caches)
Scaled = enum.StrEnum("Scaled", ["tensor", "head", "page"])
QUICK = Case("quick-decode-B3-512", "random", 3, 1, 512, 2, 2, 16, 16, 4, 16, "float32")
SMALL = Case("decode-B16-32k-G2-h8", "random", 16, 1, 32768, 2, 8, 128, 128, 16, 64, "bfloat16")
FOUR_TOKENS = ("random-B1-S4-64k-G4", "alike-B64-S4-32k-G4", "alike-B64-S4-32k-G1", "alike-B256-S4-16k-G4")  # of 16 heads, D 128


def serving_cases() -> list[Case]:
    """One token a sequence: one stream, a batch and a large one, and a quarter of a model's groups on each GPU. Then four tokens."""
    one, four = [case for case in decode_cases() if (case.G, case.h) == (4, 16)], {case.case: case for case in few_token_cases()}
    of_ranks = [case for case in parallel_cases() if (case.B, case.G, case.h) == (64, 1, 16)]
    return [*one, *of_ranks, SMALL, *(four[f"tokens-{size}-h16-D128"] for size in FOUR_TOKENS)]


class Made(NamedTuple):
    """A cache with its block table, None in one piece, and its scales."""

    k: Tensor
    v: Tensor
    table: Tensor | None
    scales: dict[str, Tensor]


def made(problem: Problem, cache: Cache) -> Made:
    """A cache of a problem's keys and values."""
    tensors, table = [x.detach().transpose(1, 2) for x in (problem.k, problem.v)], None
    B, S_kv = tensors[0].shape[:2]
    if cache.page_size is not None:
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(B * (S_kv // cache.page_size), generator=generator).to(problem.k.device)
        table = order.int().view(B, -1)
        tensors = [in_pages(x, order, cache.page_size) for x in tensors]
    scales: dict[str, Tensor] = {}
    if cache.quantized is not None:
        each = cast(Each, cache.quantized.partition("/")[2])
        (k, scales["k_scale"]), (v, scales["v_scale"]) = (quantize_e4m3(x, each) for x in tensors)
        tensors = [k, v]
    k, v = (laid_out(x, cache.layout) for x in tensors)
    return Made(k, v, table, scales)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """A cache [..,keys,G,D] with its numbers in that order, or with those of a group together."""
    return x.contiguous() if layout == KEYS_FIRST else x.transpose(1, 2).contiguous().transpose(1, 2)


def in_pages(x: Tensor, order: Tensor, page_size: int) -> Tensor:
    """Pages [pages,page_size,G,D] of a cache [B,S_kv,G,D]: page i of all of them stands at order[i]."""
    pages = torch.empty(len(order), page_size, *x.shape[2:], dtype=x.dtype, device=x.device)
    pages[order] = x.unflatten(1, (-1, page_size)).flatten(0, 1)  # type: ignore[no-untyped-call]
    return pages


class Last:
    """The cache that was made last: contenders that follow each other share it."""

    def __init__(self) -> None:
        self.key: tuple[Problem, Cache] | None = None
        self.found: Made | None = None

    def of(self, problem: Problem, cache: Cache) -> Made:
        if self.found is None or self.key is None or self.key[0] is not problem or self.key[1] != cache:
            self.found = None  # frees its memory first
            self.key, self.found = (problem, cache), made(problem, cache)
        return self.found


def cached(backend: str, cache: Cache, last: Last) -> Contender:
    """`backend` over the keys of a problem in a cache."""

    def prepare(problem: Problem) -> Ready:
        k_cache, v_cache, table, scales = last.of(problem, cache)
        lengths = torch.full((len(problem.q),), problem.k.shape[2], dtype=torch.int32, device=problem.q.device)
        ranges, block = problem.selection.ranges, problem.selection.block_size

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            fresh, more = Selection(ranges, block, disjoint=True), cast(dict[str, Any], scales)
            o: Tensor = selection_attention_with_kvcache(q, k_cache, v_cache, fresh, lengths, table, backend=backend, **more)
            return o

        return as_it_is(attend)

    return Contender(named(backend, cache), prepare, ours(backend).lacks, directions=("decode",))


def compared(backends: Sequence[str], each: Each | None, layouts: Sequence[str] = (KEYS_FIRST,)) -> tuple[Contender, ...]:
    """Every cache with every backend that reads its format; each: what of e4m3 caches has a scale of its own, None: none of them."""
    last, formats = Last(), [None] if each is None else [None, cast(Quantized, f"e4m3/{each}")]
    return tuple(
        cached(backend, Cache(size, layout, quantized), last)
        for quantized in formats
        for layout in layouts
        for size in (None, *PAGE_SIZES)
        if quantized != "e4m3/page" or size is not None  # a cache in one piece has no scales of pages
        for backend in backends
        if quantized is None or "e4m3" in registry.backends()[backend].limits.quantized
    )


Times = dict[str, Row]  # by where the keys are: in one piece, or in pages of some size


def by_cache(rows: Sequence[Row]) -> dict[tuple[str, str, str, str], Times]:
    """Rows of each case, backend, order and format of numbers."""
    found: dict[tuple[str, str, str, str], Times] = {}
    for row in measured(rows):
        backend, cache = parsed(row["backend"])
        if cache is not None:
            numbers = cache.quantized or row["dtype"]
            found.setdefault((row["case"], backend, cache.layout, numbers), {})[row["backend"].split(", ")[1]] = row
    return found


def kinds_of_pages(found: Iterable[Times]) -> list[str]:
    return list(dict.fromkeys(where for times in found for where in times if where != IN_ONE_PIECE))


def table(rows: Sequence[Row]) -> str:
    """Microseconds over a cache in one piece, and over pages: of each format of numbers, in this order."""
    found = by_cache(rows)
    formats, wheres = list(dict.fromkeys(key[-1] for key in found)), [IN_ONE_PIECE, *kinds_of_pages(found.values())]

    def cell(key: tuple[str, ...], where: str) -> str:
        of_formats = [found.get((key[0], key[1], key[2], numbers), {}).get(where) for numbers in formats]
        return " / ".join(f"{row['ms_median'] * 1e3:.2f}{markdown.MARK * markdown.scatters(row)}" if row else "-" for row in of_formats)

    lines = [(*key, *(cell(key, where) for where in wheres)) for key in dict.fromkeys(key[:-1] for key in found)]
    return markdown.table(("case", "backend", "layout", f"{IN_ONE_PIECE}: {' / '.join(formats)}", *wheres[1:]), lines)


def main(
    out: Out,
    backends: Annotated[str, typer.Option(help="backends that read caches, comma-separated")] = ",".join(READERS),
    quantized: Annotated[Scaled | None, typer.Option(help="e4m3 caches beside unquantized ones, and what has a scale of its own")] = None,
    groups_first: Annotated[bool, typer.Option("--groups-first", help="also caches in which a group's keys are together")] = False,
    only: Only = "",
    device: Device = "auto",
    quick: Quick = False,
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a row should fill")] = 20,
) -> None:
    """Measure calls over caches in one piece and in pages; print how they compare."""
    where, console = device_of(device), stderr_console()
    layouts = (KEYS_FIRST, GROUPS_FIRST) if groups_first else (KEYS_FIRST,)
    contenders = able(compared(backends.split(","), cast(Each, quantized.value) if quantized else None, layouts), where, console.print)
    small = QUICK if quantized is None else QUICK._replace(dtype="bfloat16")  # whose errors may be as large as those of e4m3
    chosen = [case for case in ([small] if quick else serving_cases()) if only in case.case]
    jobs = [Job(case, contenders, ("decode",), 64, Timing(rep), {"quick": True} if quick else {}) for case in chosen]
    echo(table(run(jobs, out, where, console)))


if __name__ == "__main__":
    program(main)
