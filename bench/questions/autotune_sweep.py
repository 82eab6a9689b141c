"""Which kernel config is fastest for one shape? Those of the curated space (bench/tune/search_space.py), timed at several L.

    python -m nsa_sel.bench.questions.autotune_sweep --H 8 --D 128 --Dv 128 --L_list 128,256,512    # under bench/results/sel_triton/<date>/

Each config is checked and timed as `nsa-sel tune` does it (bench/tune/runner.py). Unlike `nsa-sel tune` it changes nothing for later
calls: it writes a row per config into autotune.jsonl, and the fastest ones per kernel and bucket of L into autotune.md. Needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import msgspec
import torch
import typer

from nsa_sel.bench.bench_sel_triton import RESULTS, default_folder, numbers
from nsa_sel.bench.core import environment, markdown, store
from nsa_sel.bench.core.command_line import need_gpu, program, stderr_console
from nsa_sel.bench.core.store import Row, RowFile, first_line
from nsa_sel.bench.tune.kernel_configs import TOP, Measure
from nsa_sel.bench.tune.resume import ContextLost
from nsa_sel.bench.tune.runner import Runner, timer
from nsa_sel.bench.tune.search_space import PROBLEMS, TUNED, Case, Job, committed_settings, jobs
from nsa_sel.core.facts import device_info
from nsa_sel.errors import ArgumentError

ROWS, TABLE = "autotune.jsonl", "autotune.md"
SHAPE = ("kernel", "problem", "Dk", "Dv", "h", "L", "dtype")  # what configs are compared within


def sweep(found: Sequence[Job], measure: Measure, file: Path, facts: Row, tell: Callable[[str], None], seconds: float) -> list[Row]:
    """A row for each config of the jobs: its times, or why it has none. Rows that the file holds from the same environment are kept.

    Stops after `seconds`, between two configs. ContextLost is passed on.
    """
    deadline = monotonic() + seconds
    done = RowFile(file, _key, tell=tell)
    rows: list[Row] = []
    for job in found:
        for problem in job.problems:
            for config in (job.committed, *job.candidates):
                row = _identity(job, problem) | {"config": job.config_id(config), "committed": config == job.committed, **facts}
                if row not in done:
                    if monotonic() >= deadline:
                        tell("time is up: run the command again to resume")
                        return rows
                    done.add(row | {"settings": msgspec.to_builtins(config)} | _times(measure, job, problem, config))
                rows.append(done[row])
    return rows


def _identity(job: Job, problem: str) -> Row:
    sizes = PROBLEMS[problem]._asdict()
    shape = {"kernel": job.kernel, "direction": job.key.way, "problem": problem, **job.case._asdict(), "bucket": job.key.L}
    return shape | {name: sizes[name] for name in ("B", "S", "S_kv", "G")}


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(field) for field in (*SHAPE, "config", *store.ENVIRONMENT))


def _times(measure: Measure, job: Job, problem: str, config: Any) -> Row:
    try:
        times = measure(job, problem, config)
    except ContextLost:
        raise
    except Exception as error:
        return {"error": first_line(error)}
    return dict(zip(("ms_median", "ms_p20", "ms_p80"), (round(ms, 5) for ms in times), strict=True))


def table(rows: Sequence[Row], top: int = TOP) -> str:
    """The fastest configs of each kernel and bucket of L, with the committed one, as Markdown."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in store.measured(rows):
        groups.setdefault(tuple(row[field] for field in SHAPE), []).append(row)
    lines = []
    for group in groups.values():
        fastest = sorted(group, key=lambda row: row["ms_median"])
        committed = next((row for row in fastest if row["committed"]), None)
        for rank, row in enumerate(fastest, 1):
            if rank <= top or row["committed"]:
                gain = markdown.factor(committed["ms_median"] / row["ms_median"] if committed else None)
                name = f"{row['config']}{' (committed)' * row['committed']}"
                shown = f"{rank} of {len(group)}", name, f"{row['ms_median']:.4g}", markdown.spread(row, 4), gain
                lines.append((row["kernel"], row["problem"], row["bucket"], *shown))
    return markdown.table(["kernel", "problem", "L bucket", "rank", "config", "ms", "20th to 80th", "against committed"], lines, left=2)


def report(rows: Sequence[Row]) -> str:
    """The table, with the shape and what it was measured on."""
    facts, failed = rows[0], sum("error" in row for row in rows)
    return (
        f"# Autotune sweep, h {facts['h']}, Dk {facts['Dk']}, Dv {facts['Dv']}, {facts['dtype']}\n\n"
        f"{markdown.environment(facts)}, `{facts['command']}`\n\n"
        f"{len(rows)} kernel configs, {failed} of which failed; the {TOP} fastest of each kernel and bucket of L. Whole calls in ms.\n\n"
        f"{table(rows)}\n"
    )


def main(
    H: Annotated[int, typer.Option("--H", min=1, help="heads that share a row's selection")] = 8,
    D: Annotated[int, typer.Option("--D", min=1, help="head dim of q and k")] = 128,
    Dv: Annotated[int, typer.Option("--Dv", min=1, help="head dim of v")] = 128,
    L_list: Annotated[str, typer.Option("--L_list", help="keys that a row selects")] = "128,256,512",
    dtype: Annotated[str, typer.Option(help="of q, k, v")] = "bfloat16",
    backend: Annotated[str, typer.Option(help="Triton backend whose prefill kernels are tried")] = "triton-group",
    quick: Annotated[bool, typer.Option("--quick", help="only configs one step from the committed one")] = False,
    rep: Annotated[float, typer.Option(min=0.1, help="ms of timed calls a config")] = 20,
    minutes: Annotated[float, typer.Option(min=0, help="stop after so long; the next run goes on")] = 60,
    out: Annotated[Path | None, typer.Option(help=f"folder of the results; {RESULTS}/<today> by default")] = None,
) -> None:
    """Time the kernel configs of one shape, and say which are fastest in each bucket of L."""
    if backend not in TUNED:
        raise ArgumentError("--backend", repr(backend), ", ".join(TUNED), "name a Triton backend: the others have no kernel configs")
    need_gpu("autotune_sweep")

    device, folder, console = torch.device("cuda", torch.cuda.current_device()), out or default_folder(), stderr_console()
    facts = device_info(device)
    settings = committed_settings(facts)
    sizes = tuple(Case(D, Dv, H, L, dtype) for L in numbers("--L_list", L_list))
    found = [job for job in jobs(settings, facts.sm, sizes, backend, None, quick) if job.key.way != "decode"]
    rows = sweep(found, Runner(device, settings, timer(rep)), folder / ROWS, environment.stamp(), console.print, 60 * minutes)
    if rows:
        store.write_whole(folder / TABLE, report(rows))
    print(table(rows) if rows else "nothing was measured")


if __name__ == "__main__":
    program(main)
