"""Measure the loss of an indexer, and the backward passes of the attention that it learns from.

    python -m nsa_sel.bench.questions.indexer_loss --out bench/results/h200/indexer_loss.jsonl

MiniMax-M3's sizes: 64 heads over 4 KV heads of 128, 16 blocks of 128 keys, 4 index heads of 128 over one index key per
token; bf16. Parts:
    sparse         indexer_loss over the selected keys, forward and backward, with a fresh Selection
    warm-up        indexer_loss over all visible keys, forward and backward
    selected       backward pass of selection_attention
    dense          backward pass of dense attention (cuDNN)
Neighboring tokens of a "random" selection choose independently, those of an "alike" one nearly the same blocks. Rows of
the loss have the largest errors of the loss and of diq of sampled rows against the float64 oracle, over the largest value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from nsa_sel import indexer_loss, selection_attention, sliding_window_attention, use_backend
from nsa_sel.bench.core import markdown, store
from nsa_sel.bench.core.cases import ALIKE, Case, make_inputs, make_selection, model_case
from nsa_sel.bench.core.command_line import Out, echo, need_gpu, program
from nsa_sel.bench.core.contenders import DENSE, dense_causal_sdpa
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing, milliseconds, workspace_bytes
from nsa_sel.oracle import oracle_indexer_loss
from nsa_sel.selection import Selection
from nsa_sel.telemetry.events import decisions

TITLES = {  # the table's columns, in order, by measured part
    "sparse": "loss, sparse", "selected": "selected attention, backward", "warm-up": "loss, warm-up",
    "dense": "dense attention (cuDNN), backward",
}  # fmt: skip
SAMPLED = 8  # rows compared with the oracle


class Inputs:
    """Random inputs of a case, with the log-sum-exp of both attentions."""

    def __init__(self, case: Case, device: str) -> None:
        self.q, self.k, self.v, self.do = make_inputs(case, device)
        options: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(2), "dtype": self.q.dtype, "device": device}
        self.index_q = torch.randn(case.B, case.S, case.G, case.Dk, **options).requires_grad_()
        self.index_k = torch.randn(case.B, case.S_kv, case.Dk, **options).requires_grad_()
        self.ranges = make_selection(case, device).ranges
        self.block = case.block

    def selection(self) -> Selection:
        """Return a Selection without plans."""
        return Selection.from_ranges(self.ranges, self.block, disjoint=True)

    def of_part(self, part: str) -> tuple[Tensor, Selection | None]:
        """Return the log-sum-exp of the attention that the loss of a part follows, and a fresh selection or None."""
        with torch.no_grad():
            if part == "sparse":
                selection = self.selection()
                return selection_attention(self.q, self.k, self.v, selection, return_lse=True)[1], selection
            return sliding_window_attention(self.q, self.k, self.v, self.k.shape[2], return_lse=True)[1], None


def loss_work(inputs: Inputs, part: str) -> Callable[[], tuple[Tensor, ...]]:
    """Return a call that computes the loss and its gradients."""
    lse, selection = inputs.of_part(part)

    def work() -> tuple[Tensor, ...]:
        fresh = None if selection is None else inputs.selection()
        loss = indexer_loss(inputs.q, inputs.k, lse, inputs.index_q, inputs.index_k, fresh)
        return loss, *torch.autograd.grad(loss, (inputs.index_q, inputs.index_k))

    return work


def backward_work(inputs: Inputs, part: str) -> Callable[[], tuple[Tensor, ...]]:
    """Return a call of an attention's backward pass."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    o = selection_attention(q, k, v, inputs.selection()) if part == "selected" else dense_causal_sdpa(q, k, v)
    return lambda: torch.autograd.grad(o, leaves, inputs.do, retain_graph=True)


def errors(inputs: Inputs, part: str) -> Row:
    """Return the largest errors of the loss and of diq of a few rows against the oracle."""
    lse, selection = inputs.of_part(part)
    S, S_kv = inputs.q.shape[1], inputs.k.shape[2]
    rows = indexer_loss(inputs.q, inputs.k, lse, inputs.index_q, inputs.index_k, selection, reduction="none")
    (dq,) = torch.autograd.grad(rows.sum(), inputs.index_q)
    few = torch.randperm(S, generator=torch.Generator().manual_seed(0))[:SAMPLED].sort().values
    at, position = few.to(inputs.q.device), few + S_kv - S
    ranges = None if selection is None else selection.ranges[:, at].cpu()
    exact = oracle_indexer_loss(inputs.q[:, at], inputs.k, lse[:, at], inputs.index_q[:, at], inputs.index_k, ranges, q_pos=position)

    def worst(x: Tensor, y: Tensor) -> float:
        return float((x[:, at].double().cpu() - y).abs().max() / y.abs().max())

    return {"error_loss": worst(rows.detach(), exact.loss), "error_dq": worst(dq, exact.dq)}


def measure(case: Case, parts: list[str], rep: float, device: str = "cuda") -> Iterator[Row]:
    """Yield a row for each part."""
    inputs = Inputs(case, device)
    for part in parts:
        row = {**case._asdict(), "part": part}
        try:
            loss = part in ("sparse", "warm-up")
            work = loss_work(inputs, part) if loss else backward_work(inputs, part)
            row |= {"direction": "fwd+bwd" if loss else "bwd"}
            work()
            decision = None if part == "dense" else decisions()[-1]
            row["backend"] = DENSE if decision is None else str(decision.forward if loss else decision.backward)
            row["workspace_bytes"] = workspace_bytes(work, device)
            row |= milliseconds(work, Timing(rep=rep), device).fields() | (errors(inputs, part) if loss else {})
        except torch.cuda.OutOfMemoryError:
            row["error"] = store.OUT_OF_MEMORY
        yield row


def table(rows: list[Row]) -> str:
    """Return milliseconds, a line for each length and kind of selection, a column for each part."""
    cells = []
    for row in store.measured(rows):
        line = f"{row['S'] // 1024}k", "alike" if row["distribution"] == ALIKE else row["distribution"]
        cells.append((line, TITLES[row["part"]], False, markdown.ms(row, 4)))
    return markdown.pivot(["tokens", "selection"], cells, (False,))


def main(
    out: Out,
    lengths: Annotated[str, typer.Option(help="tokens, comma-separated")] = "8192,16384,32768,131072",
    kinds: Annotated[str, typer.Option(help="of selections, comma-separated")] = f"random,{ALIKE}",
    parts: Annotated[str, typer.Option(help="comma-separated; dense ones of the first kind alone")] = ",".join(TITLES),
    shape: Annotated[str | None, typer.Option(help="G,h,Dk,Dv,n,block of other heads and blocks than MiniMax-M3's")] = None,
    backend: Annotated[str | None, typer.Option(help="of the loss, by default the policy chooses")] = None,
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a part should fill")] = 200,
) -> None:
    """Time the loss and attention's backward passes; append the rows, and print a table."""
    need_gpu("indexer_loss")

    def rows_of(S: int) -> Iterator[Row]:
        for number, kind in enumerate(kinds.split(",")):
            case = model_case("minimax-m3", f"{kind}-{S // 1024}k", S, kind)
            if shape is not None:
                name = f"loss-{shape.replace(',', '-')}-{kind}-{S // 1024}k"
                G, h, Dk, Dv, n, block = map(int, shape.split(","))
                case = Case(name, kind, 1, S, S, G, h, Dk, Dv, n, block)
            yield from measure(case, [part for part in parts.split(",") if part in ("sparse", "selected") or number == 0], rep)

    with nullcontext() if backend is None else use_backend(backend):
        echo(table(store.kept(out, chain.from_iterable(map(rows_of, map(int, lengths.split(",")))), store.stamp())))


if __name__ == "__main__":
    program(main)
