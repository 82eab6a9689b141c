"""Derive device profiles from committed rows: `python -m nsa_sel.bench.tune.derive` writes configs/devices/. A test
derives them again.

A default changes only on evidence: one side's 80th percentile must lie below the other's 20th, for GPUs by the margin,
too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
import yaml

from nsa_sel.bench import threshold_optimizer as optimizer
from nsa_sel.bench.core.store import CPU_ROWS, DIRECTIONS, H100_RESULTS, H200_RESULTS, ROOT, Row, digest, read_rows
from nsa_sel.bench.threshold_optimizer import faster_by
from nsa_sel.bench.tune import cost_fit
from nsa_sel.settings import tuned
from nsa_sel.settings.config import GPUS
from nsa_sel.settings.schema import Costs, Evidence, KernelConfig, Side, Source, Threshold

RESULTS = {"h100": H100_RESULTS, "h200": H200_RESULTS}
H200_TUNED = f"{H200_RESULTS}/tuned.json"  # as `nsa-sel tune` wrote it
LENGTH_ROWS = (*(f"{folder}/*.jsonl" for folder in RESULTS.values()), "bench/results/sel_triton/*/rows.jsonl")
RENAMED = {  # commands that rows of older commits record -> as they are run today
    "python -m nsa_sel.bench.bench_selection ": "python -m nsa_sel.bench.questions.speed ",
    "python bench/bench_cpu.py --repeats 15 --seed 0": "python -m nsa_sel.bench.questions.speed --device cpu --suite cpu --out cpu.jsonl",
}
ENOUGH_ROWS = 20  # for a GPU's own model if the other GPU has more: fewer do not vary every term
CONFIG_MARGIN = 1.05  # a kernel config must be this much faster to be committed: it was tuned on one problem of many


def command_of(row: Row) -> str:
    """Return the command that measures such rows today."""
    command: str = row["command"]
    for old, new in RENAMED.items():
        command = command.replace(old, new)
    return command


def threshold(found: optimizer.Threshold) -> Threshold:
    """Return the threshold of one direction as a profile keeps it, with the case that is closest to the margin."""
    triton, packed = (Side(row["backend"], row["ms_median"], row["ms_p20"], row["ms_p80"]) for row in found.closest)
    return Threshold(
        verdict="undecided" if found.length is None else "measured", value=found.length, margin=found.margin, cases=len(found.pairs),
        closest=found.closest.triton["case"], triton=triton, packed=packed,
    )  # fmt: skip


def length_rows(device: str = GPUS["h200"].name) -> dict[str, list[Row]]:
    """Return by file the committed rows of a device that decide the threshold: those of the threshold suite and of the
    matrix.
    """
    files = [file.relative_to(ROOT).as_posix() for pattern in LENGTH_ROWS for file in sorted(ROOT.glob(pattern))]
    found = {name: [row for row in read_rows(name) if row["device"] == device and optimizer.is_about_length(row)] for name in files}
    return {name: rows for name, rows in found.items() if rows}


def evidence(files: dict[str, list[Row]]) -> Evidence:
    """Return the `evidence:` part of a profile: the thresholds by direction over all rows, and the files that they come
    from.
    """
    by_direction = {found.direction: threshold(found) for found in optimizer.thresholds(row for rows in files.values() for row in rows)}
    sources = tuple(
        Source(
            file=name, sha256=digest(name), rows=len(rows), device=rows[0]["device"],
            versions={key: rows[0][key] for key in ("torch", "triton", "driver") if rows[0].get(key)}, commit=rows[0]["commit"],
            command=command_of(rows[0]),
        )
        for name, rows in files.items()
    )  # fmt: skip
    return Evidence(
        sources=sources,
        sel_triton_min_L={way: by_direction[direction] for way, direction in DIRECTIONS.items() if direction in by_direction},
    )


def provenance(files: dict[str, list[Row]], finding: str) -> str:
    """Return the finding, and each file's hash, row count, device, versions, commits and first command."""
    parts = [finding]
    for name, rows in files.items():
        versions = ", ".join(f"{key} {rows[0][key]}" for key in ("torch", "triton", "numba", "driver") if rows[0].get(key))
        commits = ", ".join(f"{commit} ({count} rows)" for commit, count in Counter(row["commit"] for row in rows).items())
        parts.append(f"{cost_fit.source(name, rows)}, {rows[0]['device']}, {versions}, commit {commits}, first `{command_of(rows[0])}`")
    return "; ".join(parts)


def measured_profile(gpu: str) -> dict[str, Any]:
    """Return the profile of a GPU with rows: thresholds, cost models, and the H200's kernel configs, which fit both
    GPUs.

    Args:
        gpu: "h100" or "h200".
    """
    device = GPUS[gpu]
    files = length_rows(device.name)
    found = evidence(files)
    decided = {way: each.value for way, each in found.sel_triton_min_L.items() if each.value is not None}
    finding = "; ".join(f"{way}: {words(each)}" for way, each in found.sel_triton_min_L.items())
    if gpu != "h200":
        fullest = evidence(length_rows()).sel_triton_min_L
        counts = ", ".join(f"{way} {each.cases}" for way, each in fullest.items())
        finding += f"; measured on few cases: the {GPUS['h200'].name} has {counts}"
    return {
        "match": {"kind": "cuda", "sm": device.sm, "name": device.name},
        "provenance": provenance(files, finding),
        "runtime": {"use_triton_sel": True, **({"sel_triton_min_L": decided} if decided else {})},
        "evidence": msgspec.to_builtins(found),
        "costs": merged_costs(gpu),
        "kernels": kernel_configs(H200_TUNED),
    }


def merged_costs(gpu: str) -> dict[str, Any]:
    """Return the cost models of a measured GPU: its own, or the other GPU's if that has more rows.

    The H100 and the H200 are one chip with different memory. Prices of work that no row of a model has are the other's,
    too.

    Args:
        gpu: "h100" or "h200".
    """
    own, other = own_costs(gpu), "h200" if gpu == "h100" else "h100"
    theirs, models, borrowed = own_costs(other), {}, list[str]()
    for name in (each for each in cost_fit.TERMS if each in {*own.models, *theirs.models}):
        mine, their = own.models.get(name), theirs.models.get(name)
        if mine is None or (their is not None and mine.rows < min(ENOUGH_ROWS, their.rows)):
            models[name] = their
            borrowed.append(name)
            continue
        missing = {term: price for term, price in (their.terms if their else {}).items() if term not in mine.terms}
        models[name] = msgspec.structs.replace(mine, terms={**mine.terms, **missing})
        borrowed += [f"{term} of {name}" for term in missing]
    provenance = f"{own.provenance}; {', '.join(borrowed)}: of an {GPUS[other].name}: {theirs.provenance}"
    return {**msgspec.to_builtins(msgspec.structs.replace(own, models=models, provenance=provenance)), "dtypes": list(own.dtypes)}


@cache
def own_costs(gpu: str) -> Costs:
    """Return the cost models fitted to the committed rows of a GPU."""
    files = cost_fit.committed_rows(cost_fit.is_cost_row, RESULTS[gpu])
    sources = [cost_fit.source(name, read_rows(name)) for name in files]
    return cost_fit.costs([row for rows in files.values() for row in rows], sources)


def kernel_configs(name: str) -> dict[str, Any]:
    """Return the `kernels:` part of a profile: configs of `nsa-sel tune` that are ahead by `CONFIG_MARGIN` in every
    case and problem.
    """
    file, _ = tuned.parse((ROOT / name).read_bytes(), name)
    ahead: dict[str, list[KernelConfig | None]] = {}
    for result in file.results:
        ms = next((timed.ms_median for timed in result.top if timed.config == result.winner), result.committed.ms_median)
        ahead.setdefault(result.kernel, []).append(result.winner if result.committed.ms_median / ms >= CONFIG_MARGIN else None)
    return {kernel: msgspec.to_builtins(found[0]) for kernel, found in ahead.items() if found[0] is not None and len(set(found)) == 1}


def words(found: Threshold) -> str:
    """Return a threshold in words, without the times."""
    ahead = f"{found.triton.backend} at least {found.margin}x ahead of {found.packed.backend}"
    from_there = f"{ahead} in every case from L = {found.value} on" if found.value is not None else f"undecided, from no L on {ahead}"
    return f"{from_there} ({found.cases} cases)"


def cpu_profile() -> dict[str, Any]:
    """Return the profile of CPUs: whether numba is preferred to packed SDPA, by direction."""
    rows = read_rows(CPU_ROWS)
    runtime, findings = {}, []
    for direction, field in (("fwd", "prefer_forward"), ("fwd+bwd", "prefer_backward")):
        numba, packed = (next(r for r in rows if r["backend"] == b and r["direction"] == direction) for b in ("numba", "sdpa-packed"))
        ahead = faster_by(numba, packed) > 1
        runtime[field] = [*(("numba", "sdpa-packed") if ahead else ("sdpa-packed", "numba")), "triton-group", "triton-token"]
        times = f"{direction}: numba {numba['ms_median']} ms, sdpa-packed {packed['ms_median']} ms"
        findings.append(times if ahead else f"{times}, undecided")
    return {"match": {"kind": "cpu"}, "provenance": provenance({CPU_ROWS: rows}, "; ".join(findings)), "runtime": runtime}


def render(profile: dict[str, Any]) -> str:
    """Return the profile as the YAML file that is committed."""
    return "# Written by `python -m nsa_sel.bench.tune.derive`; do not edit.\n" + yaml.safe_dump(profile, sort_keys=False, width=140)


PROFILES: dict[str, Callable[[], dict[str, Any]]] = {
    "configs/devices/cpu.yaml": cpu_profile,
    "configs/devices/sm90_h100.yaml": partial(measured_profile, "h100"),
    "configs/devices/sm90_h200.yaml": partial(measured_profile, "h200"),
}

if __name__ == "__main__":
    for target, derive in PROFILES.items():
        (ROOT / target).write_text(render(derive()))
        print(f"{target} written")
