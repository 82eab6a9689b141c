"""How does context parallelism scale, with as many rows on each rank (weak), and with as many rows in all (strong)?

    python -m nsa_sel.bench.questions.scaling --out bench/results/h200/scaling.jsonl

starts torchrun for 1, 2 and 4 ranks, one after another, on the GPUs of this machine, or with --device cpu through gloo.
A row is one case, part (the selected branch, or the attention of a whole layer), direction (forward; forward with
backward) and order of the sequence's rows on ranks ("both ends": two slices a rank, so that ranks have equal work; "in
turn": one). Its time is that of the slowest rank, over a few calls that all ranks start together. It also has the way
that the selected branch took, the bytes that each way costs, and `ms_at_hand`: the same rows with all their keys on the
rank, so that the rest is the exchange. Rows of one rank use nothing of torch.distributed. What does not fit into a
GPU's memory has a row without a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor
from torch import distributed as dist

from nsa_sel import decisions, selection_attention
from nsa_sel.bench.core import markdown, store, timing
from nsa_sel.bench.core.cases import Case, make_inputs, make_selection
from nsa_sel.bench.core.command_line import Quick, echo, program
from nsa_sel.bench.core.store import Row
from nsa_sel.branches import nsa_attention
from nsa_sel.compressed import compressed_attention
from nsa_sel.core.call import Rule
from nsa_sel.errors import ArgumentError
from nsa_sel.gating import gated_sum
from nsa_sel.selection import Selection
from nsa_sel.window import sliding_window_attention

if TYPE_CHECKING:
    from nsa_sel.distributed.slices import Cut

Attend = Callable[..., Any]

DIRECTIONS = ("fwd", "fwd+bwd")
BOTH_ENDS, IN_TURN = ORDERS = "both ends", "in turn"
WEAK_ROWS, STRONG_ROWS, WINDOW = 32768, (32768, 65536, 131072, 262144), 512
SAMPLES, IN_A_ROW = 20, 5  # as in training, the host runs ahead of the GPU; a sample is the mean of calls one after another
LONG = 65536  # keys of a case whose calls are long enough for one to be a sample


class Work(NamedTuple):
    """A case's part: its call over ranks, the same rows' with all keys at hand, and inputs of both, in the order of
    their arguments.
    """

    attend: Attend
    at_hand: Attend
    inputs: tuple[Tensor, ...]
    keys_at_hand: tuple[Tensor, ...]


def cases(ranks: int, quick: bool) -> list[Case]:
    """Prefills of `ranks` slices, and one row a rank over slices of a cache, where rows are exchanged; Case.S is a
    rank's rows, S_kv all keys. "weak": 32k rows a rank, h 16 and 4. "strong": 32k to 256k rows in all, h 16; that of
    one rank's rows alone is the weak one."""
    if quick:
        return [
            Case(f"weak-R{ranks}-quick-h4", "random", 1, 256, 256 * ranks, 2, 4, 32, 32, 4, 32, "float32"),
            Case(f"strong-R{ranks}-half-h4", "random", 1, 512 // ranks, 512, 2, 4, 32, 32, 4, 32, "float32"),
        ]
    found = [_prefill(f"weak-R{ranks}-32k-h{h}", WEAK_ROWS, WEAK_ROWS * ranks, h) for h in (16, 4)]
    found += [_prefill(f"strong-R{ranks}-{S // 1024}k-h16", S // ranks, S, 16) for S in STRONG_ROWS]
    return [*found, Case(f"weak-R{ranks}-tokens-h16", "random", 16, 1, 16384 * ranks, 4, 16, 128, 128, 16, 64, "bfloat16")]


def _prefill(name: str, rows: int, keys: int, h: int) -> Case:
    return Case(name, "random", 1, rows, keys, 4, h, 128, 128, 16, 64, "bfloat16")


def selected(case: Case, ranks: int, rank: int, device: str, count: bool, order: str) -> tuple[Work, Tensor]:
    """`context_parallel_attention` of this rank's rows, and do.

    Every rank draws its own numbers, and its rows of the same selection.
    """
    keys = case.S_kv // ranks
    q, k, v, do = make_inputs(case._replace(S_kv=keys), device, seed=1 + rank)
    whole = make_selection(case._replace(S=case.S * ranks), device)
    rows = _cut(case, ranks, order).positions(rank, torch.device(device))
    selection = Selection(whole.ranges[:, rows], whole.block_size, disjoint=True)
    before = ranks * (keys - case.S)
    q_pos = before + rows if order == BOTH_ENDS else None
    seen = ranks * keys if order == BOTH_ENDS else before + (rank + 1) * case.S  # this rank's rows are the last of as many keys
    all_k, all_v = (x.repeat(1, 1, ranks, 1)[:, :, :seen] for x in (k, v))

    def at_hand(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return selection_attention(q, k, v, selection, q_pos=q_pos)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        from nsa_sel.distributed import context_parallel_attention

        return context_parallel_attention(q, k, v, selection, q_pos=q_pos, count_blocks=count)

    return Work(at_hand if ranks == 1 else attend, at_hand, (q, k, v), (q, all_k, all_v)), do


def _cut(case: Case, ranks: int, order: str) -> Cut:
    from nsa_sel.distributed.slices import Cut

    return Cut(case.S // (1 + (order == BOTH_ENDS)), ranks, order == BOTH_ENDS)


def layer(case: Case, ranks: int, rank: int, device: str, count: bool, order: str) -> tuple[Work, Tensor]:
    """`context_parallel_nsa_attention` of this rank's rows, which chooses the blocks, and do."""
    q, k, v, do = make_inputs(case._replace(S_kv=case.S), device, seed=1 + rank)
    rule = Rule(compress_block=2 * (case.block // 4), compress_stride=case.block // 4, block_size=case.block, n=case.n)
    cut = _cut(case, ranks, order)
    own = case.S // rule.compress_stride - (cut.number - 1 in cut.of(rank))  # no block begins in the last keys
    gates = torch.rand(*q.shape[:4], 3, dtype=q.dtype, device=device)
    all_k, all_v = (x.repeat(1, 1, ranks, 1) for x in (k, v))

    def compressed(x: Tensor, count: int) -> Tensor:
        return x[:, :, :count].contiguous()

    def slices() -> Iterator[tuple[Tensor, ...]]:
        """Of each slice of this rank its rows, and all keys that they see."""
        for i, each in enumerate(cut.held(rank)):
            rows, near = slice(i * cut.size, (i + 1) * cut.size), slice(max(0, each.start - WINDOW + 1), each.stop)
            yield q[:, rows], *(compressed(x, rule.compressed_keys(each.stop)) for x in (all_k, all_v))
            yield *(x[:, :, keys] for keys in (slice(each.stop), near) for x in (all_k, all_v)), gates[:, rows]

    def of_slice(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k: Tensor, v: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor) -> Tensor:
        o, selection = compressed_attention(q, k_cmp, v_cmp, S_kv=k.shape[2], **rule._asdict())
        return gated_sum(o, selection_attention(q, k, v, selection), sliding_window_attention(q, k_win, v_win, WINDOW), gates)

    def at_hand(*inputs: Tensor) -> Tensor:
        parts = [of_slice(*inputs[i : i + 8]) for i in range(0, len(inputs), 8)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def attend(*inputs: Tensor) -> Tensor:
        sizes = {"window": WINDOW, **rule._asdict()}
        if ranks == 1:
            return nsa_attention(*inputs, **sizes)
        from nsa_sel.distributed import context_parallel_nsa_attention

        return context_parallel_nsa_attention(*inputs, **sizes, both_ends=order == BOTH_ENDS)

    here = (q, compressed(k, own), compressed(v, own), k, v, k, v, gates)
    return Work(attend, at_hand, here, tuple(x for part in slices() for x in part)), do


PARTS = {"selected": selected, "layer": layer}


def calls(attend: Attend, inputs: tuple[Tensor, ...], do: Tensor) -> dict[str, Callable[[], Any]]:
    """A call of each direction."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return {"fwd": lambda: attend(*inputs), "fwd+bwd": lambda: torch.autograd.grad(attend(*leaves), leaves, do)}


def slowest(work: Callable[[], Any], samples: int, in_a_row: int, ranks: int, device: str) -> list[float]:
    """Milliseconds a call, in each sample, on the rank that took longest; all start a sample together."""

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


def measure_here(
    out: Path, device: str, *, quick: bool, samples: int = SAMPLES, count: bool = False, orders: Sequence[str] = (BOTH_ENDS,),
    only: str = "",
) -> None:  # fmt: skip
    """Measure the cases of as many ranks as there are; rank 0 adds the rows to `out`.

    Every rank calls it, in an initialized job.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    facts = store.stamp(device)
    for case in cases(ranks, quick):
        if not any(part in case.case for part in only.split(",")):
            continue
        alone = case.S == 1 or ranks == 1  # one slice a rank
        for part in ("selected",) if case.S == 1 else PARTS:
            for order in (IN_TURN,) if alone else orders:
                for row in measured(case, part, ranks, rank, device, samples, count, order):
                    if rank == 0:
                        store.append(out, [{**row, **facts, "quick": quick}])


def measured(case: Case, part: str, ranks: int, rank: int, device: str, samples: int, count: bool, order: str) -> Iterator[Row]:
    """A row of each direction; without a time where the memory of a rank does not hold it."""
    try:
        work, do = PARTS[part](case, ranks, rank, device, count, order)
        over_ranks, at_hand = calls(work.attend, work.inputs, do), calls(work.at_hand, work.keys_at_hand, do)
        often = samples, 1 if case.S_kv >= LONG else IN_A_ROW, ranks, device
        for direction in DIRECTIONS:
            times = timing.spread(slowest(over_ranks[direction], *often))
            # The last call of a layer is not the selected branch.
            backend = next(str(each.forward) for each in reversed(decisions()) if each.request.kind == "attend")
            moved = exchanged(ranks)
            alone = timing.spread(slowest(at_hand[direction], *often)).median
            found = {**case._asdict(), "direction": direction, "backend": backend, **times.fields()}
            yield {**found, "part": part, "order": order, "ms_at_hand": round(alone, 5), **moved}
    except torch.cuda.OutOfMemoryError as error:
        failed = {"error": store.OUT_OF_MEMORY, "error_in": str(error).partition(".")[0]}
        yield {**case._asdict(), "part": part, "order": order, "ranks": ranks, **failed}
        torch.cuda.empty_cache()


def exchanged(ranks: int) -> Row:
    """The fields that tell of the last exchange: bytes of each pass, the way that was taken, and both passes' of each
    way.
    """
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
    """Times by the number of ranks, and the efficiency: the time of one rank over that of more (weak), or over their
    sum (strong).
    """
    rows = [row for row in rows if "ms_median" in row]
    numbers = sorted({row["ranks"] for row in rows})
    alone = {_key(row): row for row in rows if row["ranks"] == 1}
    several: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in rows:
        if row["ranks"] > 1:
            several.setdefault((*_key(row), row.get("order", IN_TURN)), {})[row["ranks"]] = row
    lines = []
    for key, found in several.items():
        kind, size, part, direction, _, order = key
        one, more = alone.get(key[:-1]), [found.get(ranks) for ranks in numbers if ranks > 1]
        times = [markdown.ms(one), *map(markdown.ms, more)]
        at_hand = [f"{row['ms_at_hand']:.3g}" if row else "-" for row in (one, *more)]
        shares = [_efficiency(one, row) for row in more]
        moved = [f"{_moved(row):.1f}" if row else "-" for row in more]
        exchange = ", ".join(dict.fromkeys(row["way"] or "-" for row in found.values()))
        lines.append([f"{kind}-{size}", part, direction, order, *map(" / ".join, (times, at_hand, shares)), exchange, " / ".join(moved)])
    shown = [" / ".join(map(str, ranks)) for ranks in (numbers, [ranks for ranks in numbers if ranks > 1])]
    headers = [f"ms, {shown[0]} ranks", "keys at hand, ms", f"efficiency, {shown[1]}", "exchange", "MB moved"]
    return markdown.table(["case", "part", "direction", "rows", *headers], lines)


def _moved(row: Row) -> float:
    """MB of the selected branch that a rank exchanges."""
    return float(row["bytes_forward"] + (row["bytes_backward"] if row["direction"] != "fwd" else 0)) / 1e6


def _efficiency(one: Row | None, row: Row | None) -> str:
    if one is None or row is None:
        return "-"
    shares = row["ranks"] if row["case"].startswith("strong") else 1
    return f"{one['ms_median'] / row['ms_median'] / shares:.2f}"


def _key(row: Row) -> tuple[str, ...]:
    """What is equal of rows whose ranks alone differ: never of two kinds of GPU."""
    kind, _, size = row["case"].split("-", 2)
    return kind, size, row["part"], row["direction"], row.get("device", "")


def launch(ranks: int, arguments: list[str]) -> list[str]:
    """The command that runs this program on so many ranks, which find each other at a port that is free."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, "-m", "nsa_sel.bench.questions.scaling", *arguments]


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
    orders: Annotated[str, typer.Option(help=f"of rows on several ranks, comma-separated: {', '.join(ORDERS)}")] = BOTH_ENDS,
    only: Annotated[str, typer.Option(help="only cases whose names contain one of these, comma-separated")] = "",
) -> None:
    """Measure how context parallelism scales; print a table and add the rows to a file."""
    given = orders.split(",")
    if not set(given) <= set(ORDERS):
        raise ArgumentError("--orders", orders, ", ".join(ORDERS), "pass one of these, or both")
    if "RANK" in os.environ:
        join(device)
        measure_here(out, device, quick=quick, samples=samples, count=count, orders=given, only=only)
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
