"""What do the other ways to choose blocks take, beside the same in plain PyTorch, and dense attention?

    python -m nsa_sel.bench.questions.ways_to_choose --out bench/results/h200/profiles/ways_to_choose.jsonl

One sequence, 4 KV groups of 16 heads, D 128, bf16, random inputs, each way with the sizes of its source, without gradients:
    choose_blocks       MiniMax Sparse Attention: one index head per group, one index key per token, 16 blocks of 128
    moba_selection      MoBA: every head chooses 3 blocks of 512
    infllm_selection    InfLLM-v2: 96 blocks of 64
Contenders: ours, by the policy's choice; torch, bench/core/plain_choosing.py; dense, causal attention by cuDNN to all keys, forward. Rows
of `torch` say which part of the blocks it has that ours has, too (`same`): its products are rounded to bf16, ours are not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from nsa_sel.bench.core import environment, markdown, store
from nsa_sel.bench.core.baselines import dense_causal_sdpa
from nsa_sel.bench.core.command_line import echo, need_gpu, program
from nsa_sel.bench.core.plain_choosing import infllm_blocks, minimax_blocks, moba_blocks
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing, milliseconds
from nsa_sel.choosing import choose_blocks, infllm_selection, moba_selection
from nsa_sel.selection import Selection
from nsa_sel.telemetry import events

G, H, D = 4, 16, 128
LENGTHS = (8192, 32768)


class Way(NamedTuple):
    """`heads`: of a group; `shared`: whether all groups have the same keys."""

    ours: Callable[[Tensor, Tensor], Selection]
    torch: Callable[[Tensor, Tensor], Tensor]
    heads: int = H
    shared: bool = False


WAYS = {
    "choose_blocks": Way(choose_blocks, minimax_blocks, heads=1, shared=True),
    "moba_selection": Way(moba_selection, moba_blocks),
    "infllm_selection": Way(infllm_selection, infllm_blocks),
}


def inputs_of(way: Way, S: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = (1, S, G, way.heads, D), (1, 1 if way.shared else G, S, D)
    q, k = (torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator) for shape in shapes)
    return q, k


def same(ours: Tensor, other: Tensor) -> float:
    """The part of the blocks of `other` that `ours` has, too; both [B,S,groups,n], -1 for padding. Of some rows."""
    step = max(1, ours.shape[1] // 64)
    ours, other = ours[:, ::step], other[:, ::step]
    shared = (other.unsqueeze(-1) == ours.unsqueeze(-2)).any(-1) & (other >= 0)
    return float(shared.sum() / (other >= 0).sum())


def measured(call: Callable[[], Any], rep: float) -> dict[str, Any]:
    call()
    return milliseconds(call, Timing(rep)).fields()


def rows_of(name: str, S: int, rep: float) -> list[Row]:
    """Ours and PyTorch's for one way and length."""
    way = WAYS[name]
    q, k = inputs_of(way, S)
    chosen = way.ours(q, k).block_indices
    facts = {"way": name, "S": S, "G": G, "h": way.heads, "D": D}
    ours = {"contender": "ours", "backend": events.decisions()[-1].forward, **measured(lambda: way.ours(q, k), rep)}
    plain = {"contender": "torch", "same": same(chosen, way.torch(q, k)), **measured(lambda: way.torch(q, k), rep)}
    return [{**facts, **ours}, {**facts, **plain}]


def dense_row(S: int, rep: float) -> Row:
    """Dense attention of the same queries to all keys."""
    q, k = inputs_of(Way(moba_selection, moba_blocks), S)
    v = torch.randn_like(k)
    return {"way": "dense", "S": S, "G": G, "h": H, "D": D, "contender": "dense", **measured(lambda: dense_causal_sdpa(q, k, v), rep)}


def table(rows: list[Row]) -> str:
    """Milliseconds of every way and length; the last row of a measurement counts, "-" stands for none."""
    found = {(row["way"], row["S"], row["contender"]): row for row in rows}
    lines = []
    for name in WAYS:
        for S in LENGTHS:
            ours, plain, dense = found.get((name, S, "ours")), found.get((name, S, "torch")), found.get(("dense", S, "dense"))
            gain = plain["ms_median"] / ours["ms_median"] if ours and plain else None
            lines.append((name, f"{S // 1024}k", markdown.ms(ours), markdown.ms(plain), markdown.factor(gain), markdown.ms(dense)))
    return markdown.table(["call", "tokens", "ours, ms", "PyTorch, ms", "PyTorch's time over ours", "dense attention, ms"], lines, left=1)


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file that rows are appended to")],
    lengths: Annotated[str, typer.Option(help="tokens, comma-separated")] = ",".join(map(str, LENGTHS)),
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a contender should fill")] = 200,
) -> None:
    """Time every way at every length; append the rows, and print a table."""
    need_gpu("ways_to_choose")
    facts, rows = environment.stamp(), list[Row]()
    with torch.no_grad():
        for S in map(int, lengths.split(",")):
            for name in WAYS:
                rows += rows_of(name, S, rep)
            rows.append(dense_row(S, rep))
            torch.cuda.empty_cache()
            store.append(out, ({**row, **facts} for row in rows if row["S"] == S))
    echo(table(rows))


if __name__ == "__main__":
    program(main)
