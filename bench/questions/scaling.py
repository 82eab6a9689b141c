"""Measure how context parallelism scales with fixed rows per rank (weak) and with fixed total rows (strong).

    python -m nsa_sel.bench.questions.scaling --out bench/results/h200/scaling.jsonl

starts torchrun for 1, 2 and 4 ranks, one after another, on the GPUs of this machine, or with --device cpu through gloo.
A row is one case, part (the selected branch, or the attention of a whole layer), direction (forward; forward with
backward) and order of the sequence's rows on ranks ("both ends": two slices a rank, so that ranks have equal work; "in
turn": one). Its time is that of the slowest rank, over a few calls that all ranks start together. It also has the way
that the selected branch took, and the bytes that it moved. Rows of one rank use nothing of torch.distributed. What does
not fit into a GPU's memory has a row without a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from torch import distributed as dist

from nsa_sel import decisions, selection_attention
from nsa_sel.bench.core import markdown, store, timing
from nsa_sel.bench.core.cases import Case, make_inputs, make_selection
from nsa_sel.bench.core.command_line import Out, Quick, echo, program
from nsa_sel.bench.core.store import Row
from nsa_sel.branches import nsa_attention
from nsa_sel.core.call import Rule
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection

Part = tuple[Callable[..., Any], tuple[Tensor, ...], Tensor]  # a call over ranks, its inputs, and the gradient of o

BOTH_ENDS, IN_TURN = "both ends", "in turn"
STRONG_ROWS, WINDOW = (32768, 65536, 131072, 262144), 512
SAMPLES, IN_A_ROW = 20, 5  # as in training, the host runs ahead of the GPU; a sample is the mean of calls one after another
LONG = 65536  # keys of a case whose calls are long enough for one to be a sample


def cases(ranks: int, quick: bool) -> list[Case]:
    """Return prefills of `ranks` slices, and one row a rank over slices of a cache, where rows are exchanged.

    Case.S is a rank's rows, S_kv all keys. "weak": 32k rows a rank, h 16 and 4. "strong": 32k to 256k rows in all, h 16.
    """
    if quick:
        return [
            Case(f"weak-R{ranks}-quick-h4", "random", 1, 256, 256 * ranks, 2, 4, 32, 32, 4, 32, "float32"),
            Case(f"strong-R{ranks}-half-h4", "random", 1, 512 // ranks, 512, 2, 4, 32, 32, 4, 32, "float32"),
        ]
    sizes = [(f"weak-R{ranks}-32k-h{h}", 32768, 32768 * ranks, h) for h in (16, 4)]
    sizes += [(f"strong-R{ranks}-{S // 1024}k-h16", S // ranks, S, 16) for S in STRONG_ROWS]
    prefills = [Case(name, "random", 1, rows, keys, 4, h, 128, 128, 16, 64) for name, rows, keys, h in sizes]
    return [*prefills, Case(f"weak-R{ranks}-tokens-h16", "random", 16, 1, 16384 * ranks, 4, 16, 128, 128, 16, 64)]


def selected(case: Case, ranks: int, rank: int, device: str, order: str) -> Part:
    """Return `context_parallel_attention` of this rank's rows.

    Every rank draws its own numbers, and its rows of the same selection.
    """
    q, k, v, do = make_inputs(case._replace(S_kv=case.S_kv // ranks), device, seed=1 + rank)
    whole = make_selection(case._replace(S=case.S * ranks), device)
    if ranks == 1:
        return partial(selection_attention, selection=whole), (q, k, v), do
    from nsa_sel.distributed import context_parallel_attention
    from nsa_sel.distributed.slices import Cut

    both_ends = order == BOTH_ENDS
    rows = Cut(case.S // (1 + both_ends), ranks, both_ends).positions(rank, torch.device(device))
    selection = Selection(whole.ranges[:, rows], whole.block_size, disjoint=True)
    q_pos = case.S_kv - ranks * case.S + rows if both_ends else None
    return partial(context_parallel_attention, selection=selection, q_pos=q_pos), (q, k, v), do


def layer(case: Case, ranks: int, rank: int, device: str, order: str) -> Part:
    """Return `context_parallel_nsa_attention` of this rank's rows, which chooses the blocks."""
    q, k, v, do = make_inputs(case._replace(S_kv=case.S), device, seed=1 + rank)
    rule = Rule(compress_block=2 * (case.block // 4), compress_stride=case.block // 4, block_size=case.block, n=case.n)
    last = 0 if order == BOTH_ENDS else ranks - 1  # the rank of the sequence's last keys, in which no compressed block begins
    own = case.S // rule.compress_stride - (rank == last)
    k_cmp, v_cmp = (x[:, :, :own].contiguous() for x in (k, v))
    inputs = q, k_cmp, v_cmp, k, v, k, v, torch.rand(*q.shape[:4], 3, dtype=q.dtype, device=device)
    sizes = {"window": WINDOW, **rule._asdict()}
    if ranks == 1:
        return partial(nsa_attention, **sizes), inputs, do
    from nsa_sel.distributed import context_parallel_nsa_attention

    return partial(context_parallel_nsa_attention, **sizes, both_ends=order == BOTH_ENDS), inputs, do


PARTS = {"selected": selected, "layer": layer}


def slowest(work: Callable[[], Any], samples: int, in_a_row: int, ranks: int, device: str) -> list[float]:
    """Return milliseconds a call, in each sample, on the rank that took longest; all start a sample together."""

    def several() -> None:
        for _ in range(in_a_row):
            work()

    several()
    mine = []
    for _ in range(samples):
        dist.barrier()
        mine.append(timing.call_times(several, 1, device)[0] / in_a_row)
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, mine)
    return np.max(np.asarray(every), axis=0).tolist()  # type: ignore[no-any-return]


def measured(case: Case, part: str, order: str, device: str, samples: int) -> Iterator[Row]:
    """Yield a row of each direction; without a time where the memory of a rank does not hold it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    row = {**case._asdict(), "part": part, "order": order, "ranks": ranks}
    try:
        attend, inputs, do = PARTS[part](case, ranks, rank, device, order)
        leaves = [x.detach().requires_grad_() for x in inputs]
        works: dict[str, Callable[[], Any]] = {
            "fwd": lambda: attend(*inputs), "fwd+bwd": lambda: torch.autograd.grad(attend(*leaves), leaves, do),
        }  # fmt: skip
        for direction, work in works.items():
            times = timing.spread(slowest(work, samples, 1 if case.S_kv >= LONG else IN_A_ROW, ranks, device))
            # The last call of a layer is not the selected branch.
            backend = next(str(each.forward) for each in reversed(decisions()) if each.request.kind == "attend")
            yield {**row, "direction": direction, "backend": backend, **times.fields(), **exchanged(ranks)}
    except torch.cuda.OutOfMemoryError:
        yield {**row, "error": store.OUT_OF_MEMORY}
        torch.cuda.empty_cache()


def exchanged(ranks: int) -> Row:
    """Return the way that the last exchange took, and the bytes that it moved in each pass."""
    if ranks == 1:
        return {"way": None, "bytes_forward": 0, "bytes_backward": 0}
    from nsa_sel.distributed import exchanges

    last = exchanges()[-1]
    taken = {"gather": last.gather, "blocks": last.blocks, "rows": last.rows}[last.kind]
    assert taken is not None, "blocks were exchanged"
    return {"way": last.kind, "bytes_forward": taken.forward, "bytes_backward": taken.backward}


def table(rows: list[Row]) -> str:
    """Return times by the number of ranks, and the efficiency: the time of one rank over that of more (weak), or over
    their sum (strong).
    """

    def key(row: Row) -> tuple[str, ...]:  # equal for rows whose ranks alone differ: never of two kinds of GPU
        kind, _, size = row["case"].split("-", 2)
        return f"{kind}-{size}", row["part"], row["direction"], row["device"]

    rows = store.measured(rows)
    alone = {key(row): row for row in rows if row["ranks"] == 1}
    numbers = sorted({row["ranks"] for row in rows if row["ranks"] > 1})
    several: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in rows:
        if row["ranks"] > 1:
            several.setdefault((*key(row), row.get("order", IN_TURN)), {})[row["ranks"]] = row
    lines = []
    for (case, part, direction, device, order), found in several.items():
        one = alone.get((case, part, direction, device))
        cells = [[markdown.ms(one)], list[str](), list[str]()]
        for other in map(found.get, numbers):
            shares = other["ranks"] if other and case.startswith("strong") else 1
            moved = other["bytes_forward"] + (other["bytes_backward"] if direction != "fwd" else 0) if other else 0
            cells[0].append(markdown.ms(other))
            cells[1].append(f"{one['ms_median'] / other['ms_median'] / shares:.2f}" if one and other else "-")
            cells[2].append(f"{moved / 1e6:.1f}" if other else "-")
        times, efficiency, moved_mb = map(" / ".join, cells)
        ways = ", ".join(dict.fromkeys(row["way"] for row in found.values()))
        lines.append([case, part, direction, order, times, efficiency, ways, moved_mb])
    shown = " / ".join(map(str, numbers))
    headers = ["case", "part", "direction", "rows", f"ms, 1 / {shown} ranks", f"efficiency, {shown}", "exchange", "MB moved"]
    return markdown.table(headers, lines)


def main(
    out: Out,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "1,2,4",
    device: Annotated[str, typer.Option(help="cuda, one GPU a rank; or cpu.")] = "cuda",
    quick: Quick = False,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each case and direction, of several calls each.")] = SAMPLES,
    in_turn: Annotated[bool, typer.Option("--in-turn", help="One slice a rank in place of two, one from each end.")] = False,
    only: Annotated[str, typer.Option(help="only cases whose names contain one of these, comma-separated")] = "",
) -> None:
    """Measure how context parallelism scales; print a table and add the rows to a file."""
    if "RANK" in os.environ:  # one of the ranks that torchrun started
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        facts = store.stamp(device)
        for case in cases(dist.get_world_size(), quick):
            order = IN_TURN if in_turn or case.S == 1 or dist.get_world_size() == 1 else BOTH_ENDS
            for part in ("selected",) if case.S == 1 else PARTS:
                for row in measured(case, part, order, device, samples) if any(name in case.case for name in only.split(",")) else ():
                    if dist.get_rank() == 0:
                        store.append(out, [{**row, **facts, "quick": quick}])
        dist.destroy_process_group()
        return
    numbers = [int(number) for number in ranks.split(",") if number.isdecimal() and int(number)]
    here = torch.cuda.device_count() if device == "cuda" else os.cpu_count() or 1
    if not numbers or max(numbers) > here:
        allowed = f"numbers >= 1, and at most the {here} {device} devices here"
        raise ArgumentError("--ranks", ranks, allowed, "leave out what is too many, or pass --device cpu")
    for number in numbers:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
        subprocess.run([*torchrun, "-m", "nsa_sel.bench.questions.scaling", *sys.argv[1:]], check=True)
    echo(table(store.read(out)))


if __name__ == "__main__":
    program(main)
