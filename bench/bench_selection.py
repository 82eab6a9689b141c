"""The performance table on this GPU: our backends, packed SDPA and dense attention (cuDNN) in one process, forward, backward, decode.

    python -m nsa_sel.bench.bench_selection --out bench/results/h200/selection.jsonl

Times are of the whole call: a fresh `Selection` each time, so that plans are built within it. Parity is checked in the same run
on outputs whose memory held NaN: o and dq of 64 rows against the float64 oracle (`mae`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from tabulate import tabulate
from torch import Tensor

import nsa_sel
from nsa_sel.bench import cases, measure
from nsa_sel.bench.baselines import dense_causal_sdpa
from nsa_sel.bench.cases import Case
from nsa_sel.oracle import oracle_backward, oracle_forward
from nsa_sel.selection import Selection

DENSE = "dense-cudnn"
SAMPLED_ROWS = 64


def attend(backend: str, selection: Selection) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """One whole call of `backend`, with plans built anew."""
    if backend == DENSE:
        return dense_causal_sdpa
    ranges, block = selection.ranges, selection.block_size

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = nsa_sel.selection_attention(q, k, v, Selection(ranges, block), backend=backend)
        return o

    return call


def parity(
    work: Callable[[Tensor, Tensor, Tensor], Tensor], case: Case, selection: Selection, inputs: tuple[Tensor, ...]
) -> tuple[float, float | None]:
    """Mean absolute error of o, and of dq unless decoding, over sampled rows; new memory is filled with NaN first."""
    q, k, v, do = (x.detach() for x in inputs)
    rows = torch.randperm(case.S, generator=torch.Generator().manual_seed(0))[:SAMPLED_ROWS].sort().values
    first = min(case.B, 4)  # batch entries compared: the oracle is slow
    few = [x[:first, rows.to(x.device)] for x in (q, selection.ranges, do)]
    position = rows + case.S_kv - case.S
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    try:
        if case.S == 1:
            o = work(q, k, v)
        else:
            for x in (q, k, v):
                x.requires_grad_()
            o = work(q, k, v)
            dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
            assert bool(dk.isfinite().all()), "dk has values that were not written"
            assert bool(dv.isfinite().all()), "dv has values that were not written"
    finally:
        torch.use_deterministic_algorithms(False)
    few_k, few_v = k.detach()[:first], v.detach()[:first]
    exact, _ = oracle_forward(few[0], few_k, few_v, few[1], q_pos=position)
    mae = float((o.detach()[:first, rows.to(o.device)].cpu().double() - exact).abs().mean())
    if case.S == 1:
        return mae, None
    exact_dq, _, _ = oracle_backward(few[0].detach(), few_k, few_v, few[1], few[2], q_pos=position)
    return mae, float((dq[:first, rows.to(dq.device)].cpu().double() - exact_dq).abs().mean())


def measure_case(case: Case, backend: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one backend on one case."""
    selection = cases.make_selection(case, "cuda")
    q, k, v, do = cases.make_inputs(case, "cuda")
    call = attend(backend, selection)
    mae = (None, None) if backend == DENSE else parity(call, case, selection, (q, k, v, do))
    with torch.no_grad():
        work = lambda: call(q, k, v)  # noqa: E731
        space = measure.workspace_bytes(work)
        if case.S == 1:
            return [measure.row(case, "decode", backend, measure.replayed_milliseconds(work), mae=mae[0], workspace_bytes=space, **facts)]
        rows = [measure.row(case, "fwd", backend, measure.milliseconds(work), mae=mae[0], workspace_bytes=space, **facts)]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    ranges, block = selection.ranges, selection.block_size
    fresh = Selection(ranges, block)
    o = dense_causal_sdpa(q, k, v) if backend == DENSE else nsa_sel.selection_attention(q, k, v, fresh, backend=backend)

    def backward() -> Any:
        fresh.forget_plans()
        return torch.autograd.grad(o, inputs, do, retain_graph=True)

    space = measure.workspace_bytes(backward)
    rows.append(measure.row(case, "bwd", backend, measure.milliseconds(backward), mae=mae[1], workspace_bytes=space, **facts))
    return rows


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file that rows are appended to")],
    backends: Annotated[str, typer.Option(help="backends, comma-separated")] = f"triton-group,sdpa-packed,{DENSE}",
    only: Annotated[str, typer.Option(help="only cases whose name contains this")] = "",
) -> None:
    """Measure every case with every backend; what runs out of memory or refuses is reported and passed over."""
    facts, table, console = measure.environment(), [], Console(stderr=True)
    every = (*cases.performance_cases(), *cases.decode_cases(), *cases.threshold_cases())
    chosen = [case for case in every if only in case.case]
    for case in track(chosen, "cases", console=console):
        for backend in backends.split(","):
            try:
                rows = measure_case(case, backend, facts)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                console.print(f"{case.case} {backend}: {type(error).__name__}: {str(error).splitlines()[0]}")
                continue
            finally:
                torch.cuda.empty_cache()
            measure.append(out, rows)
            table += [
                (r["case"], r["direction"], backend, r["ms_median"], r["ms_p20"], r["ms_p80"], r["mae"], r["workspace_bytes"]) for r in rows
            ]
    print(tabulate(table, headers=["case", "direction", "backend", "ms", "p20", "p80", "mae", "workspace"], tablefmt="github"))


if __name__ == "__main__":
    typer.run(main)
