"""Time one call over the rows of several requests, next to calls of its parts.

    python -m nsa_sel.bench.questions.packed_batches --out bench/results/h200/profiles/mixed.jsonl

MiniMax-M3's attention: 4 KV groups of 16 heads, D 128, 16 blocks of 128 keys, the current one among them, bf16, keys and
values of pages of 128 in one pool; from block indices as `choose_blocks_with_kvcache` returns them, times by graph replay.
Cases:
    decode64   one new token of each of 64 sequences of 32k keys
    chunk      2k new tokens behind a prefix of 30k
    prompt     a prompt of 16k tokens
    mixed      decode64 and chunk
    mixed-4    decode64, and chunks of 2k tokens behind prefixes of 0, 6k, 14k and 30k
Backends: the policy's choice, "rows" without visits of blocks (decoding kernels for all rows), "contiguous"
(selection_attention over keys in one piece, of a case of one request), and "dense" (cuDNN over all keys, of a prompt alone).
`host_us` is the host's time for a call outside of a graph, without the wait for the GPU.
`mae` is the mean difference of o from that of the policy's choice.
`floor_ms` is what reading each row's keys (decoding) or each request's keys once, q, and writing o take at `copy_tbs`, the
bandwidth of a copy measured in the same process, or the products at 785 TFLOP/s, if that is longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from nsa_sel.attention import selection_attention
from nsa_sel.backends.cupy_cuda import packed
from nsa_sel.bench.core import markdown, store
from nsa_sel.bench.core.command_line import Out, echo, need_gpu, program
from nsa_sel.bench.core.contenders import dense_causal_sdpa
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing, copy_bandwidth, replayed_milliseconds
from nsa_sel.bench.questions.host_time import CALLS, microseconds
from nsa_sel.core.decide import forget_decisions
from nsa_sel.selection import Selection
from nsa_sel.serving import selection_attention_with_kvcache
from nsa_sel.telemetry import events

G, h, D, n, PAGE = 4, 16, 128, 16, 128  # blocks are pages
DECODING = ([1] * 64, [32768] * 64)
CASES = {
    "decode64": DECODING,
    "chunk": ([2048], [32768]),
    "prompt": ([16384], [16384]),
    "mixed": ([*DECODING[0], 2048], [*DECODING[1], 32768]),
    "mixed-4": ([*DECODING[0], *[2048] * 4], [*DECODING[1], 2048, 8192, 16384, 32768]),
}
ALIKE = 32  # adjacent rows that select mostly the same blocks
TFLOPS = 785.0


class Step(NamedTuple):
    """A packed batch: q [T,G,h,D], views of a pool, block indices [T,G,n], lengths [R], a block table, bounds [R+1]."""

    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    lengths: Tensor
    table: Tensor
    cu: Tensor
    most: int

    def attend(self) -> Tensor:
        """Attend in one call."""
        selection = Selection.of_chosen(self.indices, PAGE)
        return selection_attention_with_kvcache(
            self.q, self.k, self.v, selection, self.lengths, self.table, cu_seqlens_q=self.cu, max_seqlen_q=self.most
        )

    def contiguous(self) -> tuple[Tensor, Tensor]:
        """Return k and v [1,G,S_kv,D] of the only request."""
        k, v = (x[self.table[0].long()].flatten(0, 1).transpose(0, 1).unsqueeze(0).contiguous() for x in (self.k, self.v))
        return k, v


def made(new: list[int], lengths: list[int], distribution: str) -> Step:
    """Return random requests of so many rows and keys, with pages in random order."""
    pages, used = max(lengths) // PAGE, [length // PAGE for length in lengths]
    on: dict[str, Any] = {"device": "cuda"}
    k, v = torch.split(torch.randn(sum(used), G, PAGE, 2 * D, dtype=torch.bfloat16, **on).transpose(1, 2), D, -1)
    order, table = torch.split(torch.randperm(sum(used), **on).int(), used), torch.zeros(len(new), pages, dtype=torch.int32, **on)
    for row, own in zip(table, order, strict=True):
        row[: len(own)] = own
    position = torch.cat([torch.arange(length - rows, length, **on) for rows, length in zip(new, lengths, strict=True)])
    scores = torch.rand(len(position), G, pages, **on)
    if distribution == "alike":
        scores = scores / 4 + torch.rand(len(position) // ALIKE + 1, G, pages, **on).repeat_interleave(ALIKE, 0)[: len(position)]
    current, block = position[:, None, None] // PAGE, torch.arange(pages, **on)
    scores = scores.masked_fill(block > current, -1).masked_fill(block == current, 2)
    best, indices = scores.topk(n, -1)
    indices = torch.where(best < 0, -1, indices).int()
    cu = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32, **on)
    q = torch.randn(len(position), G, h, D, dtype=torch.bfloat16, **on)
    return Step(q, k, v, indices, torch.tensor(lengths, dtype=torch.int32, **on), table, cu, max(new))


def least(new: list[int], lengths: list[int]) -> tuple[float, float]:
    """Return the bytes and the TFLOP of a batch at least."""
    keys = sum(min(rows * n * PAGE, length) for rows, length in zip(new, lengths, strict=True))
    return 2.0 * D * G * (2 * keys + 2 * h * sum(new)), 4e-12 * D * G * h * sum(new) * n * PAGE


def works(step: Step) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield what is timed by name."""
    yield "policy", step.attend
    if step.most > 1:
        yield "rows", step.attend
    if len(step.lengths) == 1:
        k, v = step.contiguous()
        q, indices = step.q.unsqueeze(0), step.indices.unsqueeze(0)
        yield "contiguous", lambda: selection_attention(q, k, v, Selection.from_blocks(indices, PAGE))
        if q.shape[1] == k.shape[2]:
            yield "dense", lambda: dense_causal_sdpa(q, k, v)


def measured(case: str, distribution: str, rep: float, copy_tbs: float) -> Iterator[Row]:
    """Yield a row of every backend for one case."""
    new, lengths = CASES[case]
    step, (size, products) = made(new, lengths, distribution), least(new, lengths)
    sizes = {"requests": len(new), "T": sum(new), "G": G, "h": h, "D": D, "n": n, "block": PAGE}
    floor = {"floor_ms": max(size / copy_tbs / 1e9, products / TFLOPS * 1e3), "copy_tbs": copy_tbs}
    kept, first = packed.LEAST_ROWS, step.attend().float()
    for name, work in works(step):
        packed.LEAST_ROWS = 1 << 30 if name == "rows" else kept
        forget_decisions()  # and what was recorded with another value
        mae = float((work().view_as(first).float() - first).abs().mean())
        decided = name if name == "dense" else events.decisions()[-1].forward
        ran = {"case": case, "distribution": distribution, **sizes, "direction": "fwd", "backend": name, "ran": decided, "mae": mae}
        times = replayed_milliseconds(work, Timing(rep)).fields()
        yield {**ran, **times, "host_us": microseconds(work, CALLS, torch.cuda.synchronize), **floor}
    packed.LEAST_ROWS = kept


def table(rows: list[Row]) -> str:
    """Return milliseconds by case and distribution, and the host's microseconds for the policy's choice."""
    cells = [((row["case"], row["distribution"]), row["backend"], "fwd", f"{row['ms_median']:.3f}") for row in rows]
    cells += [(line, "floor", "fwd", f"{row['floor_ms']:.3f}") for (line, *_), row in zip(cells, rows, strict=True)]
    hosts = [row for row in rows if row["backend"] == "policy" and "host_us" in row]
    cells += [((row["case"], row["distribution"]), "host, us", "fwd", f"{row['host_us']:.0f}") for row in hosts]
    return markdown.pivot(["case", "blocks"], cells, ("fwd",), left=1)


def main(
    out: Out,
    cases: Annotated[str, typer.Option(help=f"comma-separated, of {', '.join(CASES)}")] = ",".join(CASES),
    distributions: Annotated[str, typer.Option(help="random, alike: comma-separated")] = "random,alike",
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a part should fill")] = 40,
) -> None:
    """Time every backend on every case; append the rows, and print a table."""
    need_gpu("packed_batches")
    torch.manual_seed(0)
    with torch.inference_mode():
        bandwidth = copy_bandwidth()
        each = (measured(case, kind, rep, bandwidth) for kind, case in itertools.product(distributions.split(","), cases.split(",")))
        echo(table(store.kept(out, itertools.chain.from_iterable(each), store.stamp())))


if __name__ == "__main__":
    program(main)
