"""Device profiles from committed rows: `python -m nsa_sel.bench.tune.derive` writes configs/devices/; a test derives them again.

A default changes only on evidence: one side's 80th percentile must lie below the other's 20th, for the H200 by the margin too.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from nsa_sel.bench import threshold_optimizer as optimizer
from nsa_sel.bench.core import store
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.threshold_optimizer import faster_by
from nsa_sel.bench.tune import cost_fit, unmeasured
from nsa_sel.settings import tuned
from nsa_sel.settings.config import Evidence, KernelConfig, Side, Source, Threshold, Way

ROOT = Path(__file__).resolve().parents[2]
H200_RESULTS = "bench/results/h200"
H200_TUNED = f"{H200_RESULTS}/tuned.json"  # as `nsa-sel tune` wrote it
H200_ROWS = f"{H200_RESULTS}/selection.jsonl"
H200 = "NVIDIA H200"
LENGTH_ROWS = (
    f"{H200_RESULTS}/*.jsonl",
    "bench/results/sel_triton/*/rows.jsonl",
)  # by L; of two of one case the later counts
CPU_ROWS = "bench/results/cpu/numba_vs_sdpa.jsonl"
LAUNCH_MARGIN = 1.05  # a launch must be this much faster to be committed: what it is tuned on is one problem of many
DIRECTIONS: dict[Way, str] = {"forward": "fwd", "backward": "bwd", "decode": "decode"}  # as rows name them


def read_rows(name: str) -> list[Row]:
    """The rows with a time of a JSON-lines file under the repository's root."""
    return store.measured(store.read(ROOT / name))


def threshold(found: optimizer.Threshold) -> Threshold:
    """The threshold of one direction as a profile keeps it, with the closest case: at the value, or what leaves it undecided."""
    triton, packed = (Side(row["backend"], row["ms_median"], row["ms_p20"], row["ms_p80"]) for row in found.closest)
    return Threshold(
        verdict="undecided" if found.length is None else "measured", value=found.length, margin=found.margin, cases=len(found.pairs),
        closest=found.closest.triton["case"], triton=triton, packed=packed,
    )  # fmt: skip


def length_rows(device: str = H200) -> dict[str, list[Row]]:
    """By file, all committed rows of a device that say from which L on Triton pays: those of the threshold suite and of the matrix."""
    files = [file.relative_to(ROOT).as_posix() for pattern in LENGTH_ROWS for file in sorted(ROOT.glob(pattern))]
    found = {name: [row for row in read_rows(name) if row["device"] == device and optimizer.is_about_length(row)] for name in files}
    return {name: rows for name, rows in found.items() if rows}


def evidence(files: dict[str, list[Row]]) -> Evidence:
    """The `evidence:` part of a profile: the thresholds by way over all rows, and the files that they come from."""
    by_direction = {found.direction: threshold(found) for found in optimizer.thresholds(row for rows in files.values() for row in rows)}
    sources = tuple(
        Source(
            file=name, sha256=digest(name), rows=len(rows), device=rows[0]["device"],
            versions={key: rows[0][key] for key in ("torch", "triton", "driver") if rows[0].get(key)}, commit=rows[0]["commit"],
            command=rows[0]["command"],
        )
        for name, rows in files.items()
    )  # fmt: skip
    return Evidence(
        sources=sources,
        sel_triton_min_L={way: by_direction[direction] for way, direction in DIRECTIONS.items() if direction in by_direction},
    )


def provenance(files: dict[str, list[Row]], finding: str) -> str:
    """Where a profile's values come from: finding, and of each file of rows its hash, count, device, versions, commits, first command."""
    parts = [finding]
    for name, rows in files.items():
        versions = ", ".join(f"{key} {rows[0][key]}" for key in ("torch", "triton", "numba", "driver") if rows[0].get(key))
        commits = ", ".join(f"{commit} ({count} rows)" for commit, count in Counter(row["commit"] for row in rows).items())
        parts.append(f"{source(name, rows)}, {rows[0]['device']}, {versions}, commit {commits}, first `{rows[0]['command']}`")
    return "; ".join(parts)


def source(name: str, rows: list[Row]) -> str:
    """A file of rows, as it was."""
    return f"{name} (sha256 {digest(name)}, {len(rows)} rows)"


def digest(name: str) -> str:
    """Of a file under the repository's root."""
    return hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:16]


def cost_rows(folder: str = H200_RESULTS, wanted: Callable[[Row], bool] = cost_fit.is_cost_row) -> dict[str, list[Row]]:
    """By file, the rows of a folder that measured one backend, forward, backward or decoding, on a case of bench/core/cases.py: those that
    models are fitted to, or `cost_fit.is_time`, all.

    Of several rows of one case, direction and backend the last counts, in the order of the files' names.
    """
    files = sorted((ROOT / folder).glob("*.jsonl"))
    last: dict[tuple[str, str, str], tuple[str, Row]] = {}
    for file in files:
        for row in filter(wanted, read_rows(str(file))):
            last[row["case"], row["direction"], row["backend"]] = (file.as_posix(), row)
    found: dict[str, list[Row]] = {}
    for name, row in last.values():
        found.setdefault(name.removeprefix(f"{ROOT.as_posix()}/"), []).append(row)
    return found


def costs(files: dict[str, list[Row]]) -> dict[str, Any]:
    """The `costs:` part of a profile, from rows by file."""
    rows = [row for rows in files.values() for row in rows]
    found = cost_fit.costs(rows, [source(name, read_rows(name)) for name in files])
    return {**msgspec.to_builtins(found), "dtypes": list(found.dtypes)}


def h200_profile() -> dict[str, Any]:
    """The profile of the NVIDIA H200: from which L on Triton is used, each way, and what each backend's work costs."""
    files = length_rows()
    found = evidence(files)
    decided = {way: known.value for way, known in found.sel_triton_min_L.items() if known.value is not None}
    finding = "; ".join(f"{way}: {words(known)}" for way, known in found.sel_triton_min_L.items())
    return {
        "match": {"kind": "cuda", "sm": 90, "name": H200},
        "provenance": provenance(files, finding),
        "runtime": {"use_triton_sel": True, **({"sel_triton_min_L": decided} if decided else {})},
        "evidence": msgspec.to_builtins(found),
        "costs": costs(cost_rows()),
        "kernels": launches(H200_TUNED),
    }


def launches(name: str) -> dict[str, Any]:
    """The `kernels:` part of a profile: launches that `nsa-sel tune` found ahead by `LAUNCH_MARGIN` in every case and problem."""
    file, _ = tuned.parse((ROOT / name).read_bytes(), name)
    ahead: dict[str, list[KernelConfig | None]] = {}
    for result in file.results:
        ms = next((launch.ms_median for launch in result.top if launch.config == result.winner), result.committed.ms_median)
        ahead.setdefault(result.kernel, []).append(result.winner if result.committed.ms_median / ms >= LAUNCH_MARGIN else None)
    return {kernel: msgspec.to_builtins(found[0]) for kernel, found in ahead.items() if found[0] is not None and len(set(found)) == 1}


def words(known: Threshold) -> str:
    """A threshold in words; the times stand in the evidence."""
    ahead = f"triton-group at least {known.margin}x ahead of sdpa-packed"
    return f"{ahead} in every case from L = {known.value} on" if known.value is not None else f"undecided, from no L on {ahead}"


def cpu_profile() -> dict[str, Any]:
    """The profile of CPUs: whether numba goes before packed SDPA, by direction. Triton is never imported on a CPU path."""
    rows = read_rows(CPU_ROWS)
    runtime, findings = {}, []
    for direction, field in (("fwd", "prefer_forward"), ("fwd+bwd", "prefer_backward")):
        numba, packed = (next(r for r in rows if r["backend"] == b and r["direction"] == direction) for b in ("numba", "sdpa-packed"))
        ahead = faster_by(numba, packed) > 1
        first = ["numba", "sdpa-packed"] if ahead else ["sdpa-packed", "numba"]
        runtime[field] = [*first, "triton-group", "triton-token"]
        findings.append(
            f"{direction}: numba {numba['ms_median']} ms, sdpa-packed {packed['ms_median']} ms" + ("" if ahead else ", undecided")
        )
    return {"match": {"kind": "cpu"}, "provenance": provenance({CPU_ROWS: rows}, "; ".join(findings)), "runtime": runtime}


def render(profile: dict[str, Any]) -> str:
    """The profile as the YAML file that is committed."""
    return "# Written by `python -m nsa_sel.bench.tune.derive`; do not edit.\n" + yaml.safe_dump(profile, sort_keys=False, width=140)


PROFILES = {
    "configs/devices/cpu.yaml": cpu_profile,
    "configs/devices/sm80_a100.yaml": unmeasured.a100_profile,
    "configs/devices/sm89_rtx4090.yaml": unmeasured.rtx4090_profile,
    "configs/devices/sm90_h100.yaml": unmeasured.h100_profile,
    "configs/devices/sm90_h200.yaml": h200_profile,
}

if __name__ == "__main__":
    for target, derive in PROFILES.items():
        (ROOT / target).write_text(render(derive()))
        print(f"{target} written")
