"""What one call costs the host beyond its backend: checking, deciding, recording; and what observing costs while it is off.

On tiny tensors, so that the host is what takes the time, with every backend and with "nothing": a stand-in that returns new tensors
and computes nothing, beside which the rest of a call is not lost in a kernel's spread. All parts of a backend take turns within one
process, many calls at a time; a round gives each part one median, and differences and ratios are taken within a round, so that what
else the machine does meets both sides. "known" is what a call like one before takes in place of "check" and "decide". "Without
observing" is the same call with the functions of `nsa_sel.telemetry.events` that a call runs replaced by ones that do nothing: decisions
are neither kept nor counted, and whether anybody listens is not asked; what stays are a few attributes that are looked at.

With gradients, a call is `torch.autograd.grad` of it. PyTorch runs backward passes on a thread of its own, where the same backend takes
longer than alone, so two more parts tell PyTorch's share from ours: "autograd" is a node with the same inputs and outputs that does
nothing, "node" one that runs the same backend's forward and backward on the same call and nothing else. "Beyond the backend" is the
call less the backend where there are no gradients, and less the node where there are. Rows go to a JSON-lines file.

The stand-in's calls are also compiled. "graph" is a compiled function of one call and "empty graph" one of the same arguments that calls
nothing: what torch.compile takes once a graph, however many calls are in it. What each further call takes is told by functions of
nine calls and of one, a ninth of which feeds on an eighth: "further call" eager, "further compiled call" in a graph, and "compiling adds"
is the second less the first. Both are also taken with checks and decisions replaced by what a first call found. How much less that takes
is "deciding", eager, and "deciding, compiled", whose backward passes decide too; the difference of what is left of both is "op": PyTorch's
dispatcher, the wrapper that its compiler writes around an op, Python's slower calls while its compiler is at work, and a selection that
is made anew.
"""

from __future__ import annotations

import contextlib
import json
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import torch
import typer
from rich.progress import track
from tabulate import tabulate
from torch import Tensor

from nsa_sel import attention
from nsa_sel.bench.core import environment, store
from nsa_sel.cli.output import output_file
from nsa_sel.core import ops, registry
from nsa_sel.core.call import Call, check_call, device_info, request_of
from nsa_sel.errors import BackendError
from nsa_sel.selection import Selection
from nsa_sel.telemetry import events

SHAPE = {"B": 1, "S": 4, "S_kv": 64, "G": 1, "h": 2, "Dk": 16, "Dv": 16, "n": 2, "block": 16}
CALLS = 50  # a round; few enough that a GPU's queue takes all their launches without waiting
CHOSEN = "chosen"  # by the policy, instead of a backend forced by name
NOTHING = "nothing"  # the stand-in, forced in the place of packed SDPA
MANY = 9  # calls in a function, for what each beyond the first takes
# What each further call takes: of a function of MANY calls, beyond that of one.
FURTHER = {"further call": ("many calls", "call"), "further compiled call": ("graph of many", "graph")}


class Problem(NamedTuple):
    """The arguments of a call, and the gradient of o for calls that need gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    selection: Selection
    do: Tensor | None


def shape_of(S: int) -> dict[str, int]:
    """SHAPE with S rows."""
    return {**SHAPE, "S": S, "S_kv": max(SHAPE["S_kv"], S)}


def make_problem(device: str, needs_grad: bool, rows: int = SHAPE["S"]) -> Problem:
    """Standard normal tensors of SHAPE with so many rows, float32 on a CPU and bfloat16 on a GPU; all rows select the first two blocks."""
    B, S, S_kv, G, h, Dk, Dv, n, block = shape_of(rows).values()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    shapes = (B, S, G, h, Dk), (B, G, S_kv, Dk), (B, G, S_kv, Dv), (B, S, G, h, Dv)
    q, k, v, do = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    blocks = torch.arange(n, dtype=torch.int32, device=device).expand(B, S, G, n)
    for x in (q, k, v):
        x.requires_grad_(needs_grad)
    return Problem(q, k, v, Selection.from_blocks(blocks, block), do if needs_grad else None)


def parts(problem: Problem, backend: str) -> dict[str, Callable[[], Any]]:
    """What is timed, by name: the whole call, and its steps one by one. Raises BackendError when `backend` refuses the call."""
    q, k, v, selection, do = problem
    forced = {CHOSEN: None, NOTHING: attention.FALLBACK}.get(backend, backend)
    arguments = check_call(q, k, v, selection, None, None)
    device = device_info(q.device)
    request = request_of(q, k, v, selection, do is not None)
    decision = attention.decide(request, device, forced)
    call = Call(q.detach(), k.detach(), v.detach(), selection, None, arguments[4], decision.settings, device)
    forward = registry.load(str(decision.forward)).forward
    backward: Any = None if do is None else registry.load(str(decision.backward)).backward

    def whole() -> Any:
        o = attention.selection_attention(q, k, v, selection, backend=forced)
        return o if do is None else torch.autograd.grad(o, (q, k, v), do)

    def alone() -> Any:
        o, lse = forward(call)
        return o if do is None else backward(call, o, lse, do, None)

    def autograd() -> Any:
        """A node with the same inputs and outputs that does nothing: what PyTorch itself takes."""
        return torch.autograd.grad(_Nothing.apply(q, k, v)[0], (q, k, v), do)  # type: ignore[no-untyped-call]

    def node() -> Any:
        """A node that runs the backend and nothing else: what PyTorch and the backend take together."""
        return torch.autograd.grad(_Backend.apply(q, k, v, call, forward, backward)[0], (q, k, v), do)  # type: ignore[no-untyped-call]

    return {
        "call": whole,
        "backend": alone,
        **({} if do is None else {"autograd": autograd, "node": node}),
        "check": lambda: check_call(q, k, v, selection, None, None),
        "decide": lambda: attention.decide(request_of(q, k, v, selection, do is not None), device_info(q.device), forced),
        "known": lambda: attention.begin(q, k, v, selection, None, None, forced),
        "decision, cached": lambda: attention.select(request, device, forced),
    }


def compiled_parts(problem: Problem, compiler: str) -> dict[str, Callable[[], Any]]:
    """Calls of packed SDPA, or of what stands in for it, one and MANY in a function, eager and compiled by a backend of torch.compile."""
    q, k, v, selection, do = problem

    def chain(calls: int) -> Callable[..., Tensor]:
        def work(o: Tensor, k: Tensor, v: Tensor, selection: Selection) -> Tensor:
            for _ in range(calls):
                o = attention.selection_attention(o, k, v, selection, backend=attention.FALLBACK)
            return o

        return work

    def empty(q: Tensor, k: Tensor, v: Tensor, selection: Selection) -> Tensor:
        return q * k.sum() * v.sum() * selection.ranges.sum()

    def compiled(work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.compile(work, fullgraph=True, dynamic=True, backend=compiler)

    def part(work: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: work(q, k, v, selection) if do is None else torch.autograd.grad(work(q, k, v, selection), (q, k, v), do)

    works = {"many calls": chain(MANY), "graph": compiled(chain(1)), "graph of many": compiled(chain(MANY)), "empty graph": compiled(empty)}
    return {name: part(work) for name, work in works.items()}


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rows = q.shape[:-1]
        o, lse = q.new_empty(*rows, v.shape[-1]), torch.empty(rows, device=q.device)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: None) -> tuple[Tensor, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Backend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, forward: Any, backward: Any) -> tuple[Tensor, Tensor]:
        o, lse = forward(call)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.backward_of = call, backward
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: None) -> tuple[Tensor | None, ...]:
        _, _, _, o, lse = ctx.saved_tensors
        return *ctx.backward_of(ctx.call, o, lse, do, None), None, None, None


@contextlib.contextmanager
def without_observing() -> Iterator[None]:
    """Calls inside the `with` block keep, count and look at nothing."""
    module: Any = attention
    module.events = types.SimpleNamespace(record=lambda *_: None, follow=lambda _: None, count=lambda *_: None, emit=lambda *_, **__: None)
    try:
        yield
    finally:
        module.events = events


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Calls inside the `with` block get new tensors, unwritten, from whichever backend they are given to."""

    def forward(call: Call) -> tuple[Tensor, Tensor]:
        rows = call.q.shape[:-1]
        return call.q.new_empty(*rows, call.v.shape[-1]), torch.empty(rows, device=call.q.device)

    def backward(call: Call, *_: Any) -> tuple[Tensor, ...]:
        return torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v)

    stand_in, module, load = types.SimpleNamespace(forward=forward, backward=backward), cast(Any, registry), registry.load
    module.load = lambda name: stand_in
    try:
        yield
    finally:
        module.load = load


@contextlib.contextmanager
def decided(problem: Problem) -> Iterator[None]:
    """Calls of packed SDPA inside the `with` block are not checked, and get the decision of `problem`'s."""
    first, decision, request = attention.begin(*problem[:4], None, None, attention.FALLBACK)

    def begin(q: Tensor, k: Tensor, v: Tensor, selection: Selection, *_: Any) -> Any:
        return Call(q, k, v, selection, None, first.scale, first.settings, first.device), decision, request

    def begin_op(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, q_pos: None, block_size: int, max_length: None, *_: Any) -> Any:
        return begin(q, k, v, Selection(ranges, block_size, max_length, disjoint=True))

    eager, of_ops, before = cast(Any, attention), cast(Any, ops), (attention.begin, ops._begin)
    eager.begin, of_ops._begin = begin, begin_op
    try:
        yield
    finally:
        eager.begin, of_ops._begin = before


def microseconds(work: Callable[[], Any], calls: int, synchronise: Callable[[], None]) -> float:
    """Median time of one call on the host, not counting the wait for what it queued. A mean would be of who else wants the core."""
    synchronise()
    marks = [time.perf_counter_ns()]
    for _ in range(calls):
        work()
        marks.append(time.perf_counter_ns())
    synchronise()
    return float(np.median(np.diff(marks))) / 1e3


def measured(problem: Problem, backend: str, rounds: int, calls: int, compiler: str = "") -> dict[str, list[float]]:
    """Microseconds of every part in each round, with "call, without observing" and what follows from them."""
    synchronise: Callable[[], None] = torch.cuda.synchronize if problem.q.is_cuda else lambda: None
    works = parts(problem, backend) | (compiled_parts(problem, compiler) if compiler else {})
    named = f"{backend}, {'fwd+bwd' if problem.do is not None else 'fwd'}"
    times: dict[str, list[float]] = {name: [] for name in (*works, "call, without observing")}
    twice = [name for pair in FURTHER.values() for name in pair] if compiler else []
    times |= {f"{name}, decided": [] for name in twice}
    for turn in track(range(rounds + 1), named):
        for name, work in works.items():
            if name not in ("call", *twice):
                times[name].append(microseconds(work, calls, synchronise))
        # Who goes first may matter: they take turns at that too.
        for observing in (True, False) if turn % 2 else (False, True):
            with contextlib.nullcontext() if observing else without_observing():
                times["call" if observing else "call, without observing"].append(microseconds(works["call"], calls, synchronise))
        for name in twice:
            if name != "call":
                times[name].append(microseconds(works[name], calls, synchronise))
            with decided(problem):
                times[f"{name}, decided"].append(microseconds(works[name], calls, synchronise))
    times = {name: taken[1:] for name, taken in times.items()}  # the first round warms up
    least = times["backend" if problem.do is None else "node"]
    times["beyond the backend"] = [call - backend for call, backend in zip(times["call"], least, strict=True)]
    if compiler:
        left = {}
        for name, (many, one) in FURTHER.items():
            times[name] = _each(MANY - 1, times.pop(many), times[one])
            left[name] = _each(MANY - 1, times.pop(f"{many}, decided"), times.pop(f"{one}, decided"))
            times["deciding" if one == "call" else "deciding, compiled"] = _each(1, times[name], left[name])
        eager, compiled = FURTHER
        times["op"] = _each(1, left[compiled], left[eager])
        times["compiling adds"] = _each(1, times[compiled], times[eager])
    return times


def _each(number: int, many: list[float], few: list[float]) -> list[float]:
    """What one of `number` takes that the many have beyond the few, in each round."""
    return [(a - b) / number for a, b in zip(many, few, strict=True)]


def rows_of(problem: Problem, backend: str, rounds: int, calls: int, compiler: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a part, in microseconds, and one with the ratio of a call to one without observing."""
    with standing_in() if backend == NOTHING else contextlib.nullcontext():
        times = measured(problem, backend, rounds, calls, compiler if backend == NOTHING else "")
    direction = "fwd" if problem.do is None else "fwd+bwd"
    common = {
        **shape_of(problem.q.shape[1]),
        "dtype": str(problem.q.dtype).removeprefix("torch."),
        "direction": direction,
        "backend": backend,
    }
    common |= {"rounds": rounds, "calls_a_round": calls}
    rows = []
    for part, taken in times.items():
        p20, median, p80 = np.quantile(taken, (0.2, 0.5, 0.8)).round(3).tolist()
        rows.append({**common, "part": part, "us_median": median, "us_p20": p20, "us_p80": p80, **facts})
    ratios = [a / b for a, b in zip(times["call"], times["call, without observing"], strict=True)]
    p20, median, p80 = np.quantile(ratios, (0.2, 0.5, 0.8)).round(4).tolist()
    rows.append({**common, "part": "observing, off", "ratio_median": median, "ratio_p20": p20, "ratio_p80": p80, **facts})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Medians with their spread."""
    lines = []
    for row in rows:
        unit = "us" if "us_median" in row else "ratio"
        spread = f"{row[f'{unit}_p20']:.3g} - {row[f'{unit}_p80']:.3g}"
        lines.append([row["backend"], row["direction"], row["part"], f"{row[f'{unit}_median']:.3g}", spread, unit])
    return tabulate(lines, headers=["backend", "direction", "part", "median", "p20 - p80", ""], disable_numparse=True)


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file of the rows; overwritten.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each of --calls calls of every part.")] = 200,
    calls: Annotated[int, typer.Option(min=1, help="Calls of a part in a round.")] = CALLS,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = "",
    backend: Annotated[list[str] | None, typer.Option(help="Only these; repeat it for several. By default all.")] = None,
    compiler: Annotated[str, typer.Option(help="The backend of torch.compile for the stand-in's compiled calls.")] = "inductor",
    S: Annotated[int, typer.Option("--S", min=1, help="Rows of a call.")] = SHAPE["S"],
) -> None:
    """Time the stand-in, the policy's choice, and every backend that takes the call, by name; print a table and write the rows."""
    output_file("--out", out, make_folder=True)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # waking threads for tiny tensors would take longer than the work
    facts = {**environment.stamp(device), "threads": 1}
    rows = []
    for name in backend or (NOTHING, CHOSEN, *registry.backends()):
        for needs_grad in (False, True):
            try:
                rows += rows_of(make_problem(device, needs_grad, S), name, rounds, calls, compiler, facts)
            except BackendError as error:
                typer.echo(str(error))
                break
    store.write_whole(out, "".join(json.dumps(row) + "\n" for row in rows))
    typer.echo(table(rows))


if __name__ == "__main__":
    typer.run(main)
