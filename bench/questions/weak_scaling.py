"""How does context parallelism scale? Each rank has the same number of rows, however many ranks there are: weak scaling.

    python -m nsa_sel.bench.questions.weak_scaling --out bench/results/h200/scaling.jsonl

starts torchrun for 1, 2 and 4 ranks, one after another, on the GPUs of this machine, or with --device cpu through gloo. A row is one
case and direction (forward; forward with backward). Its time is that of the slowest rank, over a few calls that all ranks start
together. It also has the way that was taken, the bytes that each way costs, and `ms_at_hand`: the same rows with all their keys on the
rank, so that the rest is the exchange. Rows of one rank use nothing of torch.distributed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from torch import distributed as dist

from nsa_sel import decisions, selection_attention
from nsa_sel.bench.core import environment, markdown, store, timing
from nsa_sel.bench.core.cases import Case, make_inputs, make_selection
from nsa_sel.bench.core.command_line import Quick, echo, program
from nsa_sel.bench.core.store import Row
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection

DIRECTIONS = ("fwd", "fwd+bwd")
SAMPLES, IN_A_ROW = 20, 5  # as in training, the host runs ahead of the GPU; a sample is the mean of calls one after another


def cases(ranks: int, quick: bool) -> list[Case]:
    """Prefills of `ranks` slices of 8k (quick: 256) rows, h 16 and 4, and one row a rank over slices of a cache, where rows are exchanged.

    Case.S is a rank's rows, S_kv all keys.
    """
    if quick:
        return [Case(f"weak-R{ranks}-quick-h4", "random", 1, 256, 256 * ranks, 2, 4, 32, 32, 4, 32, "float32")]
    rows = 8192
    found = [Case(f"weak-R{ranks}-8k-h{h}", "random", 1, rows, rows * ranks, 4, h, 128, 128, 16, 64, "bfloat16") for h in (16, 4)]
    return [*found, Case(f"weak-R{ranks}-tokens-h16", "random", 16, 1, 16384 * ranks, 4, 16, 128, 128, 16, 64, "bfloat16")]


def slices(case: Case, ranks: int, rank: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Selection]:
    """This rank's q, k, v, do and selection. Every rank draws its own numbers, and its rows of the same selection of all."""
    keys = case.S_kv // ranks
    q, k, v, do = make_inputs(case._replace(S_kv=keys), device, seed=1 + rank)
    whole = make_selection(case._replace(S=case.S * ranks), device)
    ranges = whole.ranges[:, rank * case.S : (rank + 1) * case.S].contiguous()
    return q, k, v, do, Selection(ranges, whole.block_size, disjoint=True)


def works(case: Case, ranks: int, rank: int, device: str, count: bool) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """A call of each direction, with the name of the direction, and the same rows' with all keys at hand."""
    q, k, v, do, selection = slices(case, ranks, rank, device)
    keys = case.S_kv // ranks
    seen = ranks * (keys - case.S) + (rank + 1) * case.S  # this rank's rows are the last of as many keys
    all_k, all_v = (x.repeat(1, 1, ranks, 1)[:, :, :seen] for x in (k, v))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if ranks == 1:
            return selection_attention(q, k, v, selection)
        from nsa_sel.distributed import context_parallel_attention

        return context_parallel_attention(q, k, v, selection, count_blocks=count)

    def at_hand(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return selection_attention(q, k, v, selection)

    def both(attend: Callable[..., Any], *given: Tensor) -> Any:
        inputs = [x.detach().requires_grad_() for x in given]
        return torch.autograd.grad(attend(*inputs), inputs, do)

    yield "fwd", lambda: attend(q, k, v), lambda: at_hand(q, all_k, all_v)
    yield "fwd+bwd", lambda: both(attend, q, k, v), lambda: both(at_hand, q, all_k, all_v)


def slowest(work: Callable[[], Any], samples: int, ranks: int, device: str) -> list[float]:
    """Milliseconds a call, in each sample, on the rank that took longest; all start a sample together."""

    def in_a_row() -> None:
        for _ in range(IN_A_ROW):
            work()

    in_a_row()
    mine = []
    for _ in range(samples):
        dist.barrier()
        mine.append(timing.one_call(in_a_row, device) / IN_A_ROW)
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, mine)
    return np.max(np.asarray(every), axis=0).tolist()  # type: ignore[no-any-return]


def measure_here(out: Path, device: str, *, quick: bool, samples: int = SAMPLES, count: bool = False) -> None:
    """Measure the cases of as many ranks as there are; rank 0 adds the rows to `out`. Every rank calls it, in an initialised job."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    facts = environment.stamp(device)
    for case in cases(ranks, quick):
        for direction, work, at_hand in works(case, ranks, rank, device, count):
            times = timing.spread(slowest(work, samples, ranks, device))
            backend, moved = str(decisions()[-1].forward), exchanged(ranks)
            at_hand_ms = timing.spread(slowest(at_hand, samples, ranks, device)).median
            alone = {"ms_at_hand": round(at_hand_ms, 5), "backend_at_hand": str(decisions()[-1].forward)}
            row = timing.row(case, direction, backend, times, **alone, **moved, **environment.gpu_state(device), **facts)
            if rank == 0:
                store.append(out, [{**row, "quick": quick}])


def exchanged(ranks: int) -> Row:
    """The fields that tell of the last exchange: bytes of each pass, the way that was taken, and both passes' of each way."""
    if ranks == 1:
        nothing = {"bytes_forward": 0, "bytes_backward": 0, "gather_bytes": 0, "blocks_bytes": None, "rows_bytes": 0}
        return {"ranks": 1, "way": None, **nothing, "counted": False}
    from nsa_sel.distributed import exchanges

    last = exchanges()[-1]
    taken = {"gather": last.gather, "blocks": last.blocks, "rows": last.rows}[last.kind]
    assert taken is not None, "blocks were exchanged"
    return {
        "ranks": ranks, "way": last.kind, "bytes_forward": taken.forward, "bytes_backward": taken.backward,
        "gather_bytes": last.gather.total, "blocks_bytes": last.blocks and last.blocks.total,
        "rows_bytes": last.rows.total, "counted": last.counted,
    }  # fmt: skip


def table(rows: list[Row]) -> str:
    """Times with their spread, and the time of one rank over that of more: 1 is perfect weak scaling."""
    alone = {(row["case"].split("-", 2)[2], row["direction"]): row["ms_median"] for row in rows if row["ranks"] == 1}
    lines = []
    for row in rows:
        one = alone.get((row["case"].split("-", 2)[2], row["direction"]))
        moved = (row["bytes_forward"] + (row["bytes_backward"] if row["direction"] != "fwd" else 0)) / 1e6
        spread = f"{row['ms_p20']:.3g} - {row['ms_p80']:.3g}"
        efficiency = f"{one / row['ms_median']:.2f}" if one else "-"
        lines.append(
            [
                row["case"], row["ranks"], row["direction"], markdown.ms(row), spread, f"{row['ms_at_hand']:.3g}", efficiency,
                row["way"] or "-", f"{moved:.1f}",
            ]
        )  # fmt: skip
    headers = ["case", "ranks", "direction", "ms", "p20 - p80", "keys at hand", "efficiency", "way", "MB moved"]
    return markdown.table(headers, lines)


def launch(ranks: int, arguments: list[str]) -> list[str]:
    """The command that runs this program on so many ranks, which find each other at a port that is free."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, "-m", "nsa_sel.bench.questions.weak_scaling", *arguments]


def join(device: str) -> None:
    """Become one of the ranks that torchrun started."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)  # as torchrun does for several ranks alone
    dist.init_process_group("nccl" if device == "cuda" else "gloo")


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file of the rows; rows are added.")],
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "1,2,4",
    device: Annotated[str, typer.Option(help="cuda, one GPU a rank; or cpu.")] = "cuda",
    quick: Quick = False,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each case and direction, of several calls each.")] = SAMPLES,
    count: Annotated[bool, typer.Option("--count", help="count the blocks that are exchanged, instead of bounding them")] = False,
) -> None:
    """Measure weak scaling; print a table and add the rows to a file."""
    if "RANK" in os.environ:
        join(device)
        measure_here(out, device, quick=quick, samples=samples, count=count)
        dist.destroy_process_group()
        return
    numbers = [int(number) for number in ranks.split(",") if number.isdecimal() and int(number)]
    here = torch.cuda.device_count() if device == "cuda" else os.cpu_count() or 1
    if not numbers or max(numbers) > here:
        allowed = f"numbers >= 1, and at most the {here} {device} devices here"
        raise ArgumentError("--ranks", ranks, allowed, "leave out what is too many, or pass --device cpu")
    for number in numbers:
        subprocess.run(launch(number, sys.argv[1:]), check=True)
    echo(table(store.read(out)))


if __name__ == "__main__":
    program(main)
