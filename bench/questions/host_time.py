"""Time the host work of one call beyond its backend: checks, the decision, autograd, events.

    python -m nsa_sel.bench.questions.host_time --out bench/results/h200/overhead.jsonl

Tensors are tiny by default, so that the host is the bottleneck. Every backend is measured; "nothing", a stand-in that
returns new tensors and computes nothing; and "dense", PyTorch's scaled_dot_product_attention. All parts of a backend
take turns in one process. A round gives each part one median of many calls; differences and ratios are taken within a
round, so that other load on the machine hits both sides.

Parts, in microseconds:
    call                   the whole call, of a selection that keeps its plans; with gradients, its torch.autograd.grad
    call, new              the same from block indices: `Selection.from_blocks`, the plans and the call
    backend                the backend's functions alone
    node                   with gradients: an autograd node that runs the backend and nothing else
    beyond the backend     call - backend, or call - node with gradients
    further call, new      each call beyond the first, from functions of nine calls and of one: with gradients, what a
                           layer of a model takes
    ..., calling thread    under torch.autograd.set_multithreading_enabled(False)
    step                   with --layers, a training step of that many calls, each from block indices and with its own k
                           and v: of the policy's choice and of dense attention
    step, compiled         the same under torch.compile
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Annotated, Any
from unittest import mock

import numpy as np
import torch
import typer
from torch import Tensor

from nsa_sel.attention import selection_attention
from nsa_sel.bench.core import markdown, store
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.command_line import Device, Out, device_of, echo, program
from nsa_sel.bench.core.contenders import PACKED, Problem, dense_causal_sdpa, make_problem
from nsa_sel.bench.core.store import Row
from nsa_sel.cli.output import output_file
from nsa_sel.core import registry
from nsa_sel.core.call import Call, device_info, request_of
from nsa_sel.core.check import check_call
from nsa_sel.core.decide import decide
from nsa_sel.core.transforms import REPEATED
from nsa_sel.errors import BackendError
from nsa_sel.selection import Selection

CASE = Case("host", "random", 1, 4, 64, 1, 2, 16, 16, 2, 16)
CALLS = 50  # a round; few enough that a GPU's queue takes all their launches without waiting
CHOSEN = "chosen"  # by the policy, instead of a backend forced by name
NOTHING = "nothing"  # the stand-in, which runs in the place of packed SDPA
DENSE = "dense"  # no backend of ours
STEP, COMPILED = "step", "step, compiled"
STEPS = 10  # calls of other parts for one step: it takes as long
MANY = 9  # calls in a function, for what each beyond the first takes
NEW = "call, new"
CALLING = ", calling thread"  # of parts with gradients that are also timed there
Works = dict[str, Callable[[], Any]]


def parts(problem: Problem, backend: str, layers: int = 0) -> Works:
    """Return what is timed, by name. Raises BackendError when `backend` refuses the call.

    layers: of the parts `STEP` and `COMPILED`; 0 leaves them out.
    """
    selection, q, k, v, do = problem
    needs_grad, indices, size = q.requires_grad, selection.block_indices, selection.block_size
    forced = {CHOSEN: None, NOTHING: PACKED}.get(backend, backend)
    assert size is not None, "block_indices are of whole blocks"

    def attend(o: Tensor, *keys_and_values: Tensor, new: bool) -> Tensor:  # the q of a call is the o of the one before it
        for k, v in zip(keys_and_values[::2], keys_and_values[1::2], strict=True):
            o = selection_attention(o, k, v, Selection.from_blocks(indices, size) if new else selection, backend=forced)
        return o

    def attend_densely(o: Tensor, *keys_and_values: Tensor) -> Tensor:
        for k, v in zip(keys_and_values[::2], keys_and_values[1::2], strict=True):
            o = dense_causal_sdpa(o, k, v, kernel="any")
        return o

    def whole(work: Callable[..., Tensor], count: int = 1) -> Callable[[], Any]:
        """Return the forward, or with gradients both passes, of so many calls, each with its own k and v, as in layers."""
        own = [x.detach().clone().requires_grad_(needs_grad) for _ in range(count - 1) for x in (k, v)]
        inputs = (q, k, v, *own)
        return lambda: torch.autograd.grad(work(*inputs), inputs, do) if needs_grad else work(*inputs)

    new = attend_densely if backend == DENSE else partial(attend, new=True)
    steps: Works = {STEP: whole(new, layers), COMPILED: whole(torch.compile(new, fullgraph=True), layers)} if layers and needs_grad else {}
    if backend == DENSE:
        return {"call": whole(new), **steps}
    scale = check_call(q, k, v, selection, None, None)[4]
    device = device_info(q.device)
    decision = decide(request_of(q, k, v, selection, needs_grad), device, forced)
    call = Call(q.detach(), k.detach(), v.detach(), selection, None, scale, decision.settings, device)
    call.known[REPEATED] = True  # as calls of a class that was run before
    forward = registry.load(str(decision.forward)).forward
    found: Works = {"call": whole(partial(attend, new=False)), NEW: whole(new), "many calls, new": whole(new, MANY), **steps}
    if not needs_grad:
        return {**found, "backend": lambda: forward(call)[0]}
    backward = registry.load(str(decision.backward)).backward
    found["backend"] = lambda: backward(call, *forward(call), do, None)
    found["node"] = whole(lambda *inputs: _Node.apply(*inputs, call, forward, backward)[0])  # type: ignore[no-untyped-call]
    return found


class _Node(torch.autograd.Function):
    """A node with the inputs and outputs of ours that runs the functions it is given."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, forward: Any, backward: Any) -> tuple[Tensor, Tensor]:
        o, lse = forward(call)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.run = call, backward
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: None) -> tuple[Tensor | None, ...]:
        return *ctx.run(ctx.call, *ctx.saved_tensors[3:], do, None), None, None, None


def standing_in() -> AbstractContextManager[Any]:
    """Give calls inside the `with` block unwritten tensors, whichever backend they run on."""

    def forward(call: Call) -> tuple[Tensor, Tensor]:
        rows = call.q.shape[:-1]
        return call.q.new_empty(*rows, call.v.shape[-1]), torch.empty(rows, device=call.q.device)

    def backward(call: Call, *_: Any) -> tuple[Tensor, ...]:
        return torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v)

    stand_in = types.SimpleNamespace(forward=forward, backward=backward)
    return mock.patch.multiple(registry, load=lambda name: stand_in)  # no Mock: it would take time


def microseconds(work: Callable[[], Any], calls: int, synchronize: Callable[[], None]) -> float:
    """Return the median host time of a call, without the wait for what it queued.

    A mean would count other load on the core.
    """
    synchronize()
    marks = [time.perf_counter_ns()]
    for _ in range(calls):
        work()
        marks.append(time.perf_counter_ns())
    synchronize()
    return float(np.median(np.diff(marks))) / 1e3


def measured(problem: Problem, backend: str, rounds: int, calls: int, layers: int = 0) -> dict[str, np.ndarray]:
    """Return microseconds of every part in each round, and what follows from them."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if problem.q.is_cuda else lambda: None
    works, needs_grad = parts(problem, backend, layers), problem.q.requires_grad
    moved = {f"{name}{CALLING}": works[name] for name in ("call", NEW) if needs_grad and name in works}
    taken: dict[str, list[float]] = {name: [] for name in (*works, *moved)}
    for _ in range(rounds + 1):
        for name, work in works.items():
            taken[name].append(microseconds(work, max(1, calls // STEPS) if name in (STEP, COMPILED) else calls, synchronize))
        with torch.autograd.set_multithreading_enabled(False):  # backward passes run on the thread that calls
            for name, work in moved.items():
                taken[name].append(microseconds(work, calls, synchronize))
    times = {name: np.array(found[1:]) for name, found in taken.items()}  # the first round warms up
    if backend != DENSE:
        times["beyond the backend"] = times["call"] - times["node" if needs_grad else "backend"]
        times["further call, new"] = (times.pop("many calls, new") - times[NEW]) / (MANY - 1)
    return times


def table(rows: list[Row]) -> str:
    """Return medians with their spread."""
    lines = [(row["backend"], row["direction"], row["part"], f"{row['us_median']:.3g}", markdown.spread(row, unit="us")) for row in rows]
    return markdown.table(["backend", "direction", "part", "us", "p20 to p80"], lines)


def main(
    out: Out,
    rounds: Annotated[int, typer.Option(min=1, help="rounds, each of --calls calls of every part")] = 200,
    calls: Annotated[int, typer.Option(min=1, help="calls of a part in a round")] = CALLS,
    device: Device = "auto",
    backends: Annotated[str, typer.Option(help=f"{NOTHING}, {CHOSEN}, {DENSE} or backends, comma-separated; by default all")] = "",
    S: Annotated[int, typer.Option("--S", min=1, help="rows of a call")] = CASE.S,
    h: Annotated[int, typer.Option("--h", min=1, help="heads of a group")] = CASE.h,
    G: Annotated[int, typer.Option("--G", min=1, help="groups")] = CASE.G,
    D: Annotated[int, typer.Option("--D", min=1, help="head dimension")] = CASE.Dk,
    n: Annotated[int, typer.Option("--n", min=1, help="blocks of a row")] = CASE.n,
    block: Annotated[int, typer.Option(min=1, help="keys of a block")] = CASE.block,
    layers: Annotated[int, typer.Option(min=0, help=f"layers of a training step of {CHOSEN} and {DENSE}; 0: no steps")] = 0,
) -> None:
    """Time the stand-in, the policy's choice, dense attention, and every backend that takes the call; print a table and
    write the rows."""
    output_file("--out", out)
    where = device_of(device)
    torch.set_num_threads(1)  # waking threads for tiny tensors would take longer than the work
    dtype = "float32" if where == "cpu" else CASE.dtype
    case = CASE._replace(S=S, S_kv=max(CASE.S_kv, S), h=h, G=G, Dk=D, Dv=D, n=n, block=block, dtype=dtype)

    def rows_of(name: str) -> Iterator[Row]:
        for direction in ("fwd", "fwd+bwd"):
            problem = make_problem(case, where)
            for x in problem[1:4]:
                x.requires_grad_(direction == "fwd+bwd")
            try:
                with standing_in() if name == NOTHING else nullcontext():
                    times = measured(problem, name, rounds, calls, layers if name in (CHOSEN, DENSE) else 0)
            except BackendError as error:
                echo(str(error))
                return
            common = {**case._asdict(), "direction": direction, "backend": name, "rounds": rounds, "calls_a_round": calls, "layers": layers}
            for part, taken in times.items():
                p20, median, p80 = np.quantile(taken, (0.2, 0.5, 0.8)).round(3).tolist()
                yield {**common, "part": part, "us_median": median, "us_p20": p20, "us_p80": p80}

    names = backends.split(",") if backends else (NOTHING, CHOSEN, DENSE, *registry.backends())
    echo(table(store.kept(out, chain.from_iterable(map(rows_of, names)), {**store.stamp(where), "threads": 1})))


if __name__ == "__main__":
    program(main)
