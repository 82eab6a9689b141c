"""Measure how long choosing blocks by index keys takes: for one new token of each sequence, for packed requests over
caches, and for a prefill.

    python -m nsa_sel.bench.questions.choosing_steps --out bench/results/h200/profiles/choosing_steps.jsonl
    python -m nsa_sel.bench.questions.choosing_steps --models m3 --batches '' --prefills 16384,32768 \
        --requests 64x1,1x2048,64x1+1x2048,1x32768 --pages 0,128 --out bench/results/h200/profiles/choosing_requests.jsonl

The indexers of MiniMax-M3 (4 index heads, one index key of 128 per token, 16 of the blocks of 128) and of Qwen3.8 (4
index heads, one index key of 128 per block of 4, 512 blocks and the incomplete one), random numbers, bf16 queries; times
by graph replay of `choose_blocks_with_kvcache`, or in a prefill of `choose_blocks`, from index keys to block indices.
Packed requests, such as 64x1+1x2048 (64 of one row, one of 2,048), each have all the keys. `differ` is the share of rows whose
blocks differ from those of the reference, `choose-torch`: of scores that agree to five digits either block may be
chosen. `floor_ms` is what reading the index keys once takes at `read_tbs`, the bandwidth of a sum over 4 GiB measured in
the same process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, product
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from nsa_sel.bench.core import markdown, store
from nsa_sel.bench.core.command_line import Out, echo, need_gpu, program
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing, milliseconds, replayed_milliseconds
from nsa_sel.choosing import choose_blocks
from nsa_sel.quantize import quantize_e4m3
from nsa_sel.selection import Selection
from nsa_sel.serving import choose_blocks_with_kvcache
from nsa_sel.telemetry.events import decisions

D, READ = 128, 1 << 32  # columns of an index key; bytes


class Indexer(NamedTuple):
    """A model's indexer: rows [G,h] of a token, keys that an index key stands for, and options of the choice."""

    name: str
    G: int
    h: int
    stride: int
    options: dict[str, Any]


MODELS = {
    "m3": Indexer("MiniMax-M3", 4, 1, 1, {"block_size": 128, "n": 16}),
    "qsa": Indexer(
        "Qwen3.8", 1, 4, 4,
        {"block_size": 4, "n": 512, "local": 0, "activation": "relu", "tail": True, "compress_block": 4, "compress_stride": 4},
    ),
}  # fmt: skip


def in_pages(k: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Return index keys [B,C,1,D] as pages in random order, and their block table."""
    B, C = k.shape[:2]
    order = torch.randperm(B * C // page, device=k.device)
    pages = torch.empty_like(k).view(-1, page, 1, D)
    pages[order] = k.view(-1, page, 1, D)
    return pages, order.view(B, -1).int()


def measured(model: Indexer, new: list[int], keys: int, page: int | None, stored: str, rep: float, requests: str | None) -> Row:
    """Return the row of a choice for requests of `new` rows over so many keys: packed, by the name `requests`, or None
    for one row each."""
    B, T = len(new), sum(new)
    q = torch.randn(T, model.G, model.h, D, dtype=torch.bfloat16, device="cuda")
    cache, table, scale = torch.randn(B, keys // model.stride, 1, D, dtype=torch.bfloat16, device="cuda"), None, None
    if page is not None:
        cache, table = in_pages(cache, page)
    if stored == "e4m3":
        cache, scale = quantize_e4m3(cache, "tensor")
    lengths = torch.full((B,), keys, dtype=torch.int32, device="cuda")
    cu = torch.tensor([0, *accumulate(new)], dtype=torch.int32, device="cuda")
    packed: dict[str, Any] = {"cu_seqlens_q": cu, "max_seqlen_q": max(new)} if requests else {}

    def choose(backend: str | None = None) -> Selection:
        return choose_blocks_with_kvcache(q, cache, lengths, table, k_scale=scale, backend=backend, **packed, **model.options)

    least = cache.numel() * cache.element_size()
    size = {"B": B, "S": T // B, "S_kv": keys, "G": model.G, "h": model.h, "D": D, "page_size": page, "kv": stored}
    name = {"requests": requests} if requests else {}
    return {"model": model.name, **name, **size, **timed(choose, rep), "least_bytes": least}


def prefilled(model: Indexer, S: int, rep: float) -> Row:
    """Return the row of a prefill's choice, without a cache."""
    q = torch.randn(1, S, model.G, model.h, D, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(1, 1, S // model.stride, D, dtype=torch.bfloat16, device="cuda")

    def choose(backend: str | None = None) -> Selection:
        return choose_blocks(q, k, S_kv=S, backend=backend, **model.options)

    size = {"B": 1, "S": S, "S_kv": S, "G": model.G, "h": model.h, "D": D, "page_size": None, "kv": "bf16"}
    return {"model": model.name, "requests": "prefill", **size, **timed(choose, rep), "least_bytes": k.numel() * k.element_size()}


def timed(choose: Callable[..., Selection], rep: float) -> Row:
    """Return the times of a choice, its backend, and the share of rows that differ from the reference."""
    found = choose().block_indices
    backend = decisions()[-1].forward
    differ = (found != choose("choose-torch").block_indices).any(-1).float().mean().item()
    return {"direction": "choose", "backend": backend, **replayed_milliseconds(choose, Timing(rep)).fields(), "differ": differ}


def counts(requests: str) -> list[int]:
    """Return the rows of each request of a text such as 64x1+1x2048."""
    return [rows for part in requests.split("+") for number, rows in [map(int, part.split("x"))] for _ in range(number)]


def table(rows: list[Row]) -> str:
    """Return microseconds, and in brackets the floor, by model and batch; a column for each cache."""
    caches = list(dict.fromkeys((row["kv"], row["page_size"]) for row in rows))
    sizes = list(dict.fromkeys((row["model"], row.get("requests", row["B"]), row["S_kv"]) for row in rows))
    found = {(row["model"], row.get("requests", row["B"]), row["S_kv"], row["kv"], row["page_size"]): row for row in rows}
    lines = []
    for model, B, S_kv in sizes:
        some = [found.get((model, B, S_kv, *cache)) for cache in caches]
        cells = ["-" if row is None else f"{row['ms_median'] * 1e3:.1f} ({row['floor_ms'] * 1e3:.1f})" for row in some]
        lines.append((model, B, f"{S_kv // 1024}k", *cells))
    names = [kv if page is None else f"{kv}, pages of {page}" for kv, page in caches]
    return markdown.table(["indexer", "B", "keys", *names], lines, left=1)


def read_bandwidth() -> float:
    """Return the TB/s of reading READ bytes once."""
    x = torch.zeros(READ // 8, dtype=torch.int64, device="cuda")
    return READ / milliseconds(x.sum, Timing(20)).median / 1e9


def main(
    out: Out,
    models: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(MODELS)}")] = "m3,qsa",
    batches: Annotated[str, typer.Option(help="sequences of one new token, comma-separated")] = "1,16,64",
    requests: Annotated[str, typer.Option(help="packed batches, comma-separated, such as 64x1+1x2048")] = "",
    prefills: Annotated[str, typer.Option(help="tokens of a prefill without a cache, comma-separated")] = "",
    keys: Annotated[int, typer.Option(help="keys of each sequence")] = 32768,
    pages: Annotated[str, typer.Option(help="index keys of a page, comma-separated; 0: contiguous")] = "0,64,128",
    formats: Annotated[str, typer.Option(help="of index keys, comma-separated: bf16, e4m3")] = "bf16,e4m3",
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a row should fill")] = 15,
) -> None:
    """Time every choice; append the rows, and print a table."""
    need_gpu("choosing_steps")
    torch.manual_seed(0)
    facts, rows, bandwidth = store.stamp(), list[Row](), read_bandwidth()
    named = [(None, [1] * int(B)) for B in batches.split(",") if B] + [(name, counts(name)) for name in requests.split(",") if name]
    caches = product(models.split(","), named, formats.split(","), map(int, pages.split(",")))
    work = [partial(prefilled, MODELS[model], int(S), rep) for model in models.split(",") for S in prefills.split(",") if S]
    for model, (name, new), stored, page in caches:
        work.append(partial(measured, MODELS[model], new, keys, page or None, stored, rep, name))
    for function in work:
        row = function()
        floor_ms = row.pop("least_bytes") / bandwidth / 1e9
        rows.append({**row, "floor_ms": floor_ms, "read_tbs": bandwidth, **facts})
        store.append(out, rows[-1:])
        torch.cuda.empty_cache()
    echo(table(rows))


if __name__ == "__main__":
    program(main)
