"""Did a change cost speed? Times the same calls by two checkouts in turn, on one GPU, and compares their medians.

    python -m nsa_sel.bench.questions.before_after --before OTHER_CHECKOUT --out rows.jsonl

Cases: forward and backward of the performance cases up to 8k rows and one of 32k, decoding, and the host time of small calls; each by every
backend that takes it and by the policy's choice. The two checkouts take turns, `--rounds` times, in processes of their own. These use
nothing but the public functions, so that checkouts of any age can be compared.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

BACKENDS = (None, "triton-group", "triton-tile", "triton-block", "triton-token", "cupy-cuda", "sdpa-packed")
MOST_ROWS = {"triton-token": 1024, "sdpa-packed": 8192}  # rows beyond which a backend is too slow to be worth the GPU's time
CALLS, WARM_UP, SMALL_CALLS = 20, 3, 2000
HERE = Path(__file__).resolve().parents[2]
NOISE = 1.05  # a ratio of medians beyond which a case is listed


def measure(problems: Path) -> None:
    """Print one JSON line for each case, direction and backend. Runs in a process whose `nsa_sel` is one of the checkouts'."""
    import nsa_sel

    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for case in torch.load(problems, weights_only=True):
        B, S, G, h, Dk, Dv, S_kv = case["sizes"]
        torch.manual_seed(0)
        shapes = (B, S, G, h, Dk), (B, G, S_kv, Dk), (B, G, S_kv, Dv)
        q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=S > 1) for shape in shapes)
        selection = nsa_sel.Selection.from_blocks(case["blocks"].cuda(), case["block_size"], disjoint=True)
        for backend in BACKENDS:
            if S > MOST_ROWS.get(str(backend), S):
                continue
            row = {"case": case["name"], "backend": backend or "policy"}
            try:
                for direction, ms in _times(nsa_sel.selection_attention, (q, k, v, selection), backend, case["host"], flush):
                    print(json.dumps({**row, "direction": direction, "ms_median": ms}), flush=True)
            except nsa_sel.errors.BackendError:
                continue


def _times(attend: Any, tensors: tuple[Any, ...], backend: str | None, host: bool, flush: torch.Tensor) -> list[tuple[str, float]]:
    def forward() -> Any:
        with torch.no_grad():
            return attend(*tensors, backend=backend)

    if host:
        return [("host", _host_ms(forward))]
    found = [("fwd", _gpu_ms(forward, flush))]
    if tensors[0].requires_grad:
        o = attend(*tensors, backend=backend)
        do = torch.randn_like(o)
        found.append(("bwd", _gpu_ms(lambda: torch.autograd.grad(o, tensors[:3], do, retain_graph=True), flush)))
    return found


def _gpu_ms(work: Any, flush: torch.Tensor) -> float:
    times: list[float] = []
    for call in range(WARM_UP + CALLS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if call >= WARM_UP:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def _host_ms(work: Any) -> float:
    times = []
    for call in range(SMALL_CALLS):
        started = time.perf_counter()
        work()
        if call >= SMALL_CALLS // 4:
            times.append((time.perf_counter() - started) * 1e3)
        if call % 100 == 0:
            torch.cuda.synchronize()
    return statistics.median(times)


def _problems() -> list[dict[str, Any]]:
    from nsa_sel.bench.core import cases

    chosen = [case for case in cases.performance_cases() if case.S <= 8192] + [cases.prefill("random", 32768, 4), *cases.decode_cases()]
    small = cases.prefill("random", 8192, 4)._replace(case="small", S=16, S_kv=1024)
    return [
        {
            "name": case.case, "sizes": (case.B, case.S, case.G, case.h, case.Dk, case.Dv, case.S_kv), "block_size": case.block,
            "blocks": cases.make_selection(case, "cuda").block_indices.cpu(), "host": case is small,
        }
        for case in (*chosen, small)
    ]  # fmt: skip


def main(
    before: Annotated[Path, typer.Option(help="the other checkout: the folder that holds nsa_sel")],
    out: Annotated[Path, typer.Option(help="JSON-lines file that the rows are appended to")],
    after: Annotated[Path, typer.Option(help="the checkout that is compared, by default this one")] = HERE,
    rounds: Annotated[int, typer.Option(help="how often the checkouts take turns")] = 2,
    only: Annotated[str, typer.Option(help="only cases whose name contains this: small for host time alone")] = "",
) -> None:
    """Measure, append the rows, and print the ratio of medians of every case that differs by more than 5%."""
    from nsa_sel.bench.core.environment import stamp

    with tempfile.TemporaryDirectory() as folder:
        problems = Path(folder) / "problems.pt"
        torch.save([problem for problem in _problems() if only in problem["name"]], problems)
        facts, rows = stamp(), []
        for turn in range(rounds):
            for name, tree in (("before", before), ("after", after))[:: 1 if turn % 2 == 0 else -1]:
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tree.resolve()), os.environ.get("PYTHONPATH", "")))}
                command = [sys.executable, __file__, "--measure", str(problems)]
                done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(f"error: {name}: {done.stderr.strip().splitlines()[-1]}")
                new = [{**json.loads(line), "checkout": name, "round": turn} for line in done.stdout.splitlines()]
                with out.open("a") as file:  # now: a later turn may be cut off
                    file.writelines(json.dumps({**row, **facts}) + "\n" for row in new)
                rows += new
    print(summary(rows))


def summary(rows: list[dict[str, Any]]) -> str:
    """The ratios after / before of the least medians of the rounds: their median and extremes, and every case beyond `NOISE`."""
    least: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        times = least.setdefault((row["case"], row["direction"], row["backend"]), {})
        times[row["checkout"]] = min(row["ms_median"], times.get(row["checkout"], row["ms_median"]))
    ratios = {key: times["after"] / times["before"] for key, times in least.items() if len(times) == 2}
    spread = f"{len(ratios)} cases: after / before {statistics.median(ratios.values()):.3f} in the median, {min(ratios.values()):.3f} to"
    lines = [f"{' '.join(key)}: {least[key]['before']:.4f} -> {least[key]['after']:.4f} ms, {ratio:.3f}" for key, ratio in ratios.items()
             if not 1 / NOISE < ratio < NOISE]  # fmt: skip
    return "\n".join((f"{spread} {max(ratios.values()):.3f}", *lines))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]))
    else:
        from nsa_sel.bench.core.command_line import program

        program(main)
