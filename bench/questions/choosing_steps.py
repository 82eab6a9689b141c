"""Measure how long choosing blocks by index keys takes: for one new token of each sequence, for packed requests over
caches, and in a prefill.

    python -m nsa_sel.bench.questions.choosing_steps --prefills '' --out bench/results/h200/profiles/choosing_steps.jsonl
    python -m nsa_sel.bench.questions.choosing_steps --batches '' --out bench/results/h200/profiles/choosing_requests.jsonl
    python -m nsa_sel.bench.questions.choosing_steps --models m3 --batches '' --prefills '' --formats bf16 --pages 128 \
        --requests 64x1,1x2048,64x1+1x2048,1x32768 --out bench/results/h200/profiles/choosing_requests.jsonl

The indexers of MiniMax-M3 (4 index heads, one index key of 128 per token, 16 of the blocks of 128) and of Qwen3.8 (4
index heads, one index key of 128 per block of 4, 512 blocks and the incomplete one), random numbers, bf16 queries.
Times are by graph replay of `choose_blocks_with_kvcache`, from cached index keys to block indices; those of a prefill
are whole calls of `choose_blocks`. Packed requests, such as 64x1+1x2048 (64 of one row, one of 2,048), each have all
the keys. `differ` is the share of sampled rows whose blocks differ from the best ones by scores in float64: of scores
that agree to five digits either block may be chosen. `floor_ms` is what reading the index keys once takes at
`read_tbs`, the bandwidth of a sum over 4 GiB measured in the same process; in a prefill, what the logits of all visible
index keys take at `matmul_tflops`, the rate of a matrix product measured likewise. `--peer` adds kernels of
MiniMax-M3's indexer (examples/engine_kernels.py), over bf16 keys in pages of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, chain, product
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from nsa_sel.bench.core import markdown, store
from nsa_sel.bench.core.command_line import Out, echo, need_gpu, program
from nsa_sel.bench.core.peers import functions
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Spread, Timing, milliseconds, replayed_milliseconds
from nsa_sel.bench.questions.host_time import CALLS, microseconds
from nsa_sel.choosing import choose_blocks
from nsa_sel.core.registry import backends
from nsa_sel.quantize import quantize_e4m3
from nsa_sel.selection import Selection
from nsa_sel.serving import choose_blocks_with_kvcache
from nsa_sel.telemetry.events import decisions

D, READ, SQUARE = 128, 1 << 32, 8192  # columns of an index key; bytes; rows and columns of a matrix
CHECKED = 8  # sequences, and rows of each
PEERS_PAGE = 128  # index keys
# By name, a function of (q, pages [pages,128,1,D], lengths [B], block_table [B,pages], block_size, n), which returns the
# function to time. That one returns block indices [B,S,G,n].
Choices = dict[str, Callable[[], Selection | Tensor]]
Peers = dict[str, Callable[..., Callable[[], Tensor]]]


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


def best_blocks(model: Indexer, q: Tensor, k: Tensor, position: Tensor) -> Tensor:
    """Return the blocks that rows q [R,G,h,D] at `position` [R] choose of index keys [1 or R,C,D] by scores in float64:
    ascending, [R,G,n], or n + 1 with a tail; -1 first.
    """
    options, stride = model.options, model.stride
    block, n = options["block_size"], options["n"]
    logits = torch.einsum("rghd,rcd->rghc", q.double(), k.double().expand(len(q), -1, -1))
    scores = (logits.relu() if "activation" in options else logits).sum(2)  # [R,G,C]
    seen = torch.arange(1, k.shape[1] + 1, device=q.device) * stride - 1 <= position[:, None]
    scores = torch.unflatten(scores.masked_fill(~seen[:, None], -torch.inf), -1, (-1, block // stride)).amax(-1)
    current = (position // block)[:, None, None].expand(*scores.shape[:2], 1)
    if options.get("local", 1):
        scores = scores.scatter(-1, current, torch.inf)
    values, order = scores.sort(dim=-1, descending=True, stable=True)  # ties go to the lower block
    found = order[..., :n].masked_fill(values[..., :n] == -torch.inf, -1)
    if options.get("tail"):
        found = torch.cat((found, torch.where((position[:, None, None] + 1) % block > 0, current, -1)), -1)
    ascending: Tensor = found.sort(-1).values
    return ascending


def measured(
    model: Indexer, q: Tensor, k: Tensor, new: Sequence[int], S_kv: int, choices: Choices, times: Callable[..., Spread]
) -> Iterator[Row]:
    """Yield the row of each choice.

    Args:
        q: [T,G,h,D], the rows of all sequences.
        k: [B,C,D], the index keys that were stored, for the check.
        new: rows of each sequence.
        S_kv: keys of each sequence.
        choices: by name; "" is the policy's.
        times: returns the spread of what it is given.
    """
    exact, starts = dict[int, Tensor](), [0, *accumulate(new)]
    for b in {*range(min(len(new), CHECKED)), len(new) - 1}:
        row = torch.randperm(new[b], device=q.device)[:CHECKED]
        best = best_blocks(model, q[starts[b] + row], k[b : b + 1], S_kv - new[b] + row)
        exact |= dict(zip((starts[b] + row).tolist(), best, strict=True))
    for name, choose in choices.items():
        found = choose()
        chosen = (found.block_indices if isinstance(found, Selection) else found).flatten(0, 1).long().sort(-1).values
        differ = [(chosen[row] != best).any(-1) for row, best in exact.items()]
        size = {"model": model.name, "B": len(new), "S": len(q) // len(new), "S_kv": S_kv, "G": model.G, "h": model.h, "D": D}
        more = {"backend": name or decisions()[-1].forward, "differ": torch.cat(differ).float().mean().item()}
        yield {**size, "direction": "choose", **more, **times(choose).fields()}


def step(
    model: Indexer,
    new: Sequence[int],
    keys: int,
    page: int | None,
    stored: str,
    rep: float,
    requests: str = "",
    peers: Peers = {},  # noqa: B006
) -> Iterator[Row]:
    """Yield the rows of choosing for sequences of `new` rows over so many keys: packed, by the name `requests`, or of one
    row each.
    """
    B, T = len(new), sum(new)
    q = torch.randn(T, model.G, model.h, D, dtype=torch.bfloat16, device="cuda")
    k = kept = torch.randn(B, keys // model.stride, 1, D, dtype=torch.bfloat16, device="cuda")
    scale = table = None
    if stored == "e4m3":
        kept, scale = quantize_e4m3(kept, "tensor")
        k = kept.float() * scale
    if page is not None:
        kept, table = in_pages(kept, page)
    lengths, block, n = torch.full((B,), keys, dtype=torch.int32, device="cuda"), model.options["block_size"], model.options["n"]
    options: dict[str, Any] = {"k_scale": scale, **model.options}
    if requests:
        options["cu_seqlens_q"] = torch.tensor([0, *accumulate(new)], dtype=torch.int32, device="cuda")
        options["max_seqlen_q"] = max(new)
    choices: Choices = {"": lambda: choose_blocks_with_kvcache(q, kept, lengths, table, **options)}
    if page == PEERS_PAGE and stored == "bf16" and not requests:
        choices |= {name: make(q.unsqueeze(1), kept, lengths, table, block, n) for name, make in peers.items()}
    rate = read_bandwidth()
    of_keys = {"page_size": page, "kv": stored, "floor_ms": kept.numel() * kept.element_size() / rate / 1e9, "read_tbs": rate}
    of_requests = {"requests": requests, "host_us": microseconds(choices[""], CALLS, torch.cuda.synchronize)} if requests else {}
    for row in measured(model, q, k[:, :, 0], new, keys, choices, lambda work: replayed_milliseconds(work, Timing(rep))):
        yield row | of_requests | of_keys


def prefill(model: Indexer, S: int, rep: float, peers: Peers = {}) -> Iterator[Row]:  # noqa: B006
    """Yield the rows of choosing for all S tokens of a sequence."""
    q = torch.randn(1, S, model.G, model.h, D, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(1, S // model.stride, 1, D, dtype=torch.bfloat16, device="cuda")
    choices: Choices = {"": lambda: choose_blocks(q, k.transpose(1, 2), S_kv=S, **model.options)}
    if peers:
        pages, table = in_pages(k, PEERS_PAGE)
        given = pages, torch.tensor([S], dtype=torch.int32, device="cuda"), table, model.options["block_size"], model.options["n"]
        choices |= {name: make(q, *given) for name, make in peers.items()}
    rate = matmul_rate()  # a multiplication and an addition for each column of half of all pairs
    floor_ms = q.numel() * S / model.stride / rate / 1e9
    for row in measured(model, q[0], k[:, :, 0], [S], S, choices, lambda work: milliseconds(work, Timing(rep))):
        yield row | {
            "page_size": PEERS_PAGE if row["backend"] in peers else None,
            "kv": "bf16",
            "floor_ms": floor_ms,
            "matmul_tflops": rate,
        }


def counts(requests: str) -> list[int]:
    """Return the rows of each request of a text such as 64x1+1x2048."""
    return [rows for part in requests.split("+") for number, rows in [map(int, part.split("x"))] for _ in range(number)]


def table(rows: list[Row]) -> str:
    """Return microseconds, and in brackets the floor, by model and batch; a column for each cache."""
    found: dict[tuple[str, object, int], dict[tuple[str, int | None], Row]] = {}
    for row in rows:
        size = row["model"], row.get("requests", row["B"] if row["S"] == 1 else "prefill"), row["S_kv"]
        found.setdefault(size, {})[row["kv"], row["page_size"]] = row
    caches = list(dict.fromkeys(cache for some in found.values() for cache in some))
    lines = []
    for (model, B, S_kv), some in found.items():
        cells = [f"{x['ms_median'] * 1e3:.1f} ({x['floor_ms'] * 1e3:.1f})" if (x := some.get(cache)) else "-" for cache in caches]
        lines.append((model, B, f"{S_kv // 1024}k", *cells))
    names = [kv if page is None else f"{kv}, pages of {page}" for kv, page in caches]
    return markdown.table(["indexer", "B", "keys", *names], lines, left=1)


@cache
def read_bandwidth() -> float:
    """Return the TB/s of reading READ bytes once."""
    x = torch.zeros(READ // 8, dtype=torch.int64, device="cuda")
    return READ / milliseconds(x.sum, Timing(20)).median / 1e9


@cache
def matmul_rate() -> float:
    """Return the TFLOP/s of a product of square matrices in bf16."""
    x = torch.randn(SQUARE, SQUARE, dtype=torch.bfloat16, device="cuda")
    return 2 * SQUARE**3 / milliseconds(partial(torch.mm, x, x), Timing(20)).median / 1e9


def main(
    out: Out,
    models: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(MODELS)}")] = "m3,qsa",
    batches: Annotated[str, typer.Option(help="sequences of one new token, comma-separated")] = "1,16,64",
    requests: Annotated[str, typer.Option(help="packed batches, comma-separated, such as 64x1+1x2048")] = "",
    keys: Annotated[int, typer.Option(help="keys of each sequence")] = 32768,
    pages: Annotated[str, typer.Option(help="index keys of a page, comma-separated; 0: contiguous")] = "0,64,128",
    formats: Annotated[str, typer.Option(help="of index keys, comma-separated: bf16, e4m3")] = "bf16,e4m3",
    prefills: Annotated[str, typer.Option(help="tokens of a prefill, comma-separated")] = "16384,32768",
    peer: Annotated[list[str] | None, typer.Option(metavar="NAME=MODULE:FUNCTION", help="also this kernel, for MiniMax-M3")] = None,
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a row should fill")] = 15,
) -> None:
    """Time every choice; append the rows, and print a table."""
    need_gpu("choosing_steps")
    torch.manual_seed(0)
    others = {name: function for name, (_, function) in functions(peer or (), backends()).items()}
    named = [("", [1] * int(B)) for B in batches.split(",") if B] + [(name, counts(name)) for name in requests.split(",") if name]
    each = list(product(named, formats.split(","), map(int, pages.split(","))))

    def rows_of(name: str) -> Iterator[Row]:
        model, some = MODELS[name], others if name == "m3" else {}
        for (packed, new), stored, page in each:
            yield from step(model, new, keys, page or None, stored, rep, packed, some)
        for S in filter(None, prefills.split(",")):
            yield from prefill(model, int(S), rep, some)

    echo(table(store.kept(out, chain.from_iterable(map(rows_of, models.split(","))), store.stamp())))


if __name__ == "__main__":
    program(main)
