"""Time each part of a decoding step of NSA's layer over an `NSACache`, and dense attention over the same keys.

    python -m nsa_sel.bench.questions.decoding_steps --out bench/results/h200/profiles/decoding_steps.jsonl

4 KV groups of 16 heads, D 128, bf16, NSA's sizes, one new token of each of B sequences of one length, caches of random
numbers in pages of 64, of which K and V of the selected branch and of the window are in bf16 or in e4m3; times by graph
replay. Parts:
    extend   appends keys and values, and compresses the last 32
    choose   attention to compressed keys in their pages, scores of blocks, the best of them
    select   the selected branch, by the policy's choice
    window   the window, as one range of each row
    whole    all of them and the gated sum: `LayerStep.attend`, without projections
    between  the same where nothing is to be compressed: 15 of 16 steps of a sequence
    dense    attention to all keys in bf16 by cuDNN, in one piece
`floor_ms` is what reading the keys and values of a part once takes at `copy_tbs`, the bandwidth of a copy measured in
the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from nsa_sel.attention_layer import NSAttention
from nsa_sel.bench.core import markdown, store
from nsa_sel.bench.core.command_line import Out, echo, need_gpu, program
from nsa_sel.bench.core.contenders import dense_causal_sdpa
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing, copy_bandwidth, replayed_milliseconds
from nsa_sel.cache import NSACache
from nsa_sel.caching.pools import joined
from nsa_sel.projection import Parts
from nsa_sel.quantize import STORED
from nsa_sel.selection import Selection
from nsa_sel.telemetry import events

G, h, D, PAGE = 4, 16, 128, 64
FORMATS = {"bf16": torch.bfloat16, "fp8": STORED}
CHUNK = 4096  # tokens per step that reserves pages
ON_GPU: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


Part = tuple[Callable[[], object], int]  # what is timed, and the bytes of keys and values that it has to read


def grown(layer: NSAttention, B: int, lengths: list[int], kv_dtype: torch.dtype) -> Iterator[tuple[NSACache, list[int], int]]:
    """Yield a cache of B sequences at each length in turn; the caller adds the last two tokens of each length."""
    recent = (layer.window + CHUNK - 2) // PAGE + 2
    cache = NSACache.of([layer], B * -(-max(lengths) // PAGE), PAGE, window_pages=B * recent, kv_dtype=kv_dtype)
    for x in cache.pools:
        if x.dtype == STORED:
            x.view(torch.uint8).random_(256).bitwise_and_(0xBF)  # of magnitudes below 2
        else:
            x.normal_()
    sequences, held = [cache.open() for _ in range(B)], 0
    for length in lengths:
        while held < length - 2:
            count = min(CHUNK, length - 2 - held)
            cache.step(sequences, count)
            held += count
        yield cache, sequences, length
        held = length


def parts(layer: NSAttention, cache: NSACache, sequences: list[int], length: int) -> dict[str, Part]:
    """Return every part of a step in which each sequence gets its last token, and the step before."""
    B, rule, compress, random = len(sequences), layer.rule, (layer.compress_k, layer.compress_v), partial(torch.randn, **ON_GPU)
    before, step = (cache.step(sequences, room=length)[0] for _ in range(2))
    new = Parts._make((*random(2, B, 1, G, h, D), *random(6, B, 1, G, D), torch.rand(B, 1, G, h, 3, **ON_GPU)))
    ranges = step.choose(new.q_cmp, rule)[1].ranges
    numbers = B * G * 2 * D  # of K and V, one key of every group
    choose = numbers * rule.compressed_keys(length) * step.pools.k_cmp.itemsize
    select, window = (numbers * keys * step.pools.k.itemsize for keys in (rule.n * rule.block_size, layer.window))

    def selected() -> Tensor:
        return step.attend_selected(new.q, Selection.from_ranges(ranges, rule.block_size, disjoint=True), None)

    found: dict[str, Part] = {
        "extend": (lambda: step.extend(new, compress), 0),
        "choose": (lambda: step.choose(new.q_cmp, rule), choose),
        "select": (selected, select),
        "window": (lambda: step.attend_window(new.q), window),
        "whole": (lambda: step.attend(new, compress, rule, None), choose + select + window),
        "between": (lambda: before.attend(new, compress, rule, None), choose + select + window),
    }
    if step.scales is None:
        both = joined(step.pools.k, step.pools.v)[: B * length // PAGE].transpose(1, 2)
        both = both.view(B, G, length, 2 * D)  # as many numbers, as keys in one piece
        k, v = both[..., :D], both[..., D:]
        found["dense"] = lambda: dense_causal_sdpa(new.q, k, v), numbers * length * k.itemsize
    return found


def measured(layer: NSAttention, B: int, lengths: list[int], kv: str, rep: float, copy_tbs: float) -> Iterator[Row]:
    """Yield a row of every part at each length."""
    for cache, sequences, length in grown(layer, B, lengths, FORMATS[kv]):
        for name, (work, least_bytes) in parts(layer, cache, sequences, length).items():
            work()
            decided = events.decisions()[-1].forward if name in ("choose", "select", "window") else None
            row = {"part": name, "B": B, "S": 1, "S_kv": length, "G": G, "h": h, "D": D, "page_size": PAGE, "kv": kv}
            times = replayed_milliseconds(work, Timing(rep)).fields()
            floor = {"floor_ms": least_bytes / copy_tbs / 1e9, "copy_tbs": copy_tbs}
            yield {**row, "direction": "decode", "backend": decided, **times, **floor}


def table(rows: list[Row]) -> str:
    """Return microseconds of each part, and in brackets the floor, by B, length and format of K and V; then how many
    times as long dense attention takes.
    """
    found: dict[tuple[int, int, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["B"], row["S_kv"], row.get("kv", "bf16")), {})[row["part"]] = row
    names, lines = list(dict.fromkeys(row["part"] for row in rows)), []
    for (B, S_kv, kv), of_size in found.items():
        some = [of_size.get(name) for name in names]
        cells = ["-" if row is None else f"{row['ms_median'] * 1e3:.1f} ({row['floor_ms'] * 1e3:.1f})" for row in some]
        ahead = of_size["dense"]["ms_median"] / of_size["whole"]["ms_median"] if {"dense", "whole"} <= set(of_size) else None
        lines.append((B, f"{S_kv // 1024}k", kv, *cells, markdown.factor(ahead)))
    return markdown.table(["B", "keys", "K and V", *names, "dense / whole"], lines, left=0)


def main(
    out: Out,
    batches: Annotated[str, typer.Option(help="sequences, comma-separated")] = "1,16,64,256",
    lengths: Annotated[
        str, typer.Option(help="keys of each sequence, comma-separated, ascending multiples of 64")
    ] = "16384,32768,65536,131072",
    formats: Annotated[str, typer.Option(help=f"of K and V in the cache, comma-separated: {', '.join(FORMATS)}")] = "bf16",
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a part should fill")] = 15,
) -> None:
    """Time every part at every size; append the rows, and print a table."""
    need_gpu("decoding_steps")
    torch.manual_seed(0)
    layer = NSAttention(64, G, h, D, device="cuda", dtype=torch.bfloat16).requires_grad_(False)  # projections are not timed
    with torch.inference_mode():
        keys, bandwidth = list(map(int, lengths.split(","))), copy_bandwidth()
        each = (measured(layer, int(B), keys, kv, rep, bandwidth) for B, kv in product(batches.split(","), formats.split(",")))
        echo(table(store.kept(out, chain.from_iterable(each), store.stamp())))


if __name__ == "__main__":
    program(main)
