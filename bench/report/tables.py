"""The documents' tables from committed rows: `python -m nsa_sel.bench.report.tables` rewrites them between their markers."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable

from tabulate import tabulate

from nsa_sel.bench.core import cases, markdown, store
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.questions import paged_caches, weak_scaling
from nsa_sel.bench.report import losses, summary
from nsa_sel.bench.report.trials import trials_table
from nsa_sel.bench.tune.committed_rows import CPU_ROWS, H200_ROWS, ROOT, read_rows
from nsa_sel.core import registry
from nsa_sel.core.decision import Offer
from nsa_sel.core.dispatch import load_policy, select
from nsa_sel.core.request import DeviceInfo, example_request
from nsa_sel.settings.config import settings_for
from nsa_sel.telemetry.describe import describe

H200_OVERHEAD = "bench/results/h200/overhead.jsonl"
H200_SERVING, H200_VARLEN = "bench/results/h200/serving.jsonl", "bench/results/h200/varlen.jsonl"
H200_SCALING, H200_TRAINING = "bench/results/h200/scaling.jsonl", "bench/results/h200/training"
CLOSE = "real-8k-h1", "fwd+bwd"  # the case of the table in README's claim that is closest to dense attention
WINDOW = 20  # steps of a training run that losses are averaged over
H200_COUNTERS = "bench/results/h200/profiles/counters.jsonl"
H200_TRIALS = "bench/results/h200/profiles/trials.jsonl"
H200_PEERS = "bench/results/h200/peers.jsonl"
H200_KERNEL_TIMES = "bench/results/h200/profiles/kernel_times.jsonl"


def cpu_table() -> str:
    """numba against packed, masked and dense SDPA on a CPU: milliseconds, medians."""
    rows = read_rows(CPU_ROWS)
    numba = {row["direction"]: row["ms_median"] for row in rows if row["backend"] == "numba"}
    lines = [
        (row["direction"], row["backend"], markdown.ms(row), f"{row['ms_p20']:.3g} to {row['ms_p80']:.3g}",
         f"{row['ms_median'] / numba[row['direction']]:.2f}x")
        for row in rows
    ]  # fmt: skip
    headers = ["direction", "backend", "ms", "20th to 80th percentile", "time against numba"]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True, colalign=("left", "left", "right", "right", "right"))


def decision() -> str:
    """What `nsa-sel explain --device rtx4090` prints where nothing is missing: the device rule at work."""
    card = DeviceInfo(kind="cuda", name="NVIDIA GeForce RTX 4090", sm=89, sm_count=128, shared_memory=99 * 1024)
    offers = tuple(Offer(backend) for backend in registry.backends().values())
    shown = describe(select(example_request(), card, load_policy("default"), settings_for(card), offers))
    return "```\n$ nsa-sel explain --device rtx4090\n" + "\n".join(line.rstrip() for line in shown.splitlines()) + "\n```"


def of_h200(table: Callable[[list[Row]], str]) -> Callable[[], str]:
    """A table over the committed rows of the H200."""
    return lambda: table(read_rows(H200_ROWS))


def profiles() -> str:
    """What the hardware counters say of single kernels (bench/questions/kernel_counters.py), in percent of what the device could do."""
    shares = ("l2_pct", "dram_pct", "l2_hit_pct", "issue_pct")
    lines = []
    for r in store.read(ROOT / H200_COUNTERS):
        percent = [f"{r[key]:.0f}%" for key in shares]
        pipe = f"{r['busiest_pipe']} {r['busiest_pipe_pct']:.0f}%" if "busiest_pipe" in r else "-"
        stall = f"{r['stall']} {r['stall_pct']:.0f}%" if "stall" in r else "-"
        lines.append(
            (r["kernel"], r["case"], f"{r['duration_us'] / 1e3:.3g}", *percent, pipe, stall, r["registers"], f"{r['shared_kbyte']:.0f}")
        )
    headers = ["kernel", "case", "ms", "L2", "DRAM", "L2 hits", "issue slots", "busiest pipe", "warps wait for", "registers", "shared, KB"]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def kernel_times() -> str:
    """GPU microseconds of every kernel of one call with the backend that takes least of it (bench/core/kernel_times.py)."""
    least: dict[tuple[str, str], tuple[float, str, dict[str, list[float]]]] = {}
    for r in store.read(ROOT / H200_KERNEL_TIMES):
        total = sum(us for _, us in r["kernels"].values())
        least[r["case"], r["direction"]] = min(
            least.get((r["case"], r["direction"]), (math.inf, "", {})), (total, r["backend"], r["kernels"])
        )
    lines = []
    for (case, direction), (total, backend, kernels) in least.items():
        each = [
            f"{name.removesuffix('_kernel')} {us:.0f}" + (f" ({count:.0f})" if count > 1 else "")
            for name, (count, us) in kernels.items()
            if us >= 1
        ]
        lines.append((case, direction, backend.removeprefix("triton-"), f"{total:.0f}", ", ".join(each)))
    headers = ["case", "direction", "backend", "us", "kernels: us (launches)"]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def cupy_cuda(rows: list[Row]) -> str:
    """cupy-cuda beside the fastest Triton backend, on single cases and over the layers of the committed maps: milliseconds, medians."""
    table = summary.indexed(rows)
    lines: list[tuple[str, ...]] = []
    for case in (*cases.performance_cases(), *cases.decode_cases()):
        for direction in ("fwd", "bwd", "decode"):
            times = _cuda_and_triton(table.get((case.case, direction), {}))
            if times is not None:
                cuda, triton = times
                gain = triton["ms_median"] / cuda["ms_median"]
                lines.append((case.case, direction, markdown.ms(cuda), markdown.ms(triton), f"{gain:.2f}x"))
    for B, h in ((B, h) for B in (1, 4) for h in (16, 4)):
        for direction in ("fwd", "bwd"):
            found = [_cuda_and_triton(table.get((c.case, direction), {})) for c in cases.layer_cases() if (c.B, c.h) == (B, h)]
            known = [times for times in found if times is not None]
            if known:
                middle = [f"{statistics.median(times[i]['ms_median'] for times in known):.3g}" for i in (0, 1)]
                gains = [triton["ms_median"] / cuda["ms_median"] for cuda, triton in known]
                lines.append((f"{len(known)} layers, B {B}, h {h}", direction, *middle, f"{min(gains):.2f}x to {max(gains):.2f}x"))
    headers = ["case", "direction", "cupy-cuda", "fastest of Triton's", "Triton's time over it"]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def _cuda_and_triton(of_case: dict[str, Row]) -> tuple[Row, Row] | None:
    """The rows of cupy-cuda and of the fastest Triton backend; None where one is missing."""
    triton = [row for backend, row in of_case.items() if backend.startswith("triton-")]
    return (of_case["cupy-cuda"], min(triton, key=lambda row: row["ms_median"])) if triton and "cupy-cuda" in of_case else None


def peers() -> str:
    """What torch offers for the same selections, in one process with ours: milliseconds, medians."""
    table = summary.indexed(store.read(ROOT / H200_PEERS))
    names = ("triton-tile", "triton-block", "triton-group", "sdpa-packed", "flex-attention", "masked-sdpa", "dense-flash", "dense-cudnn")
    lines = []
    for (case, direction), found in table.items():
        if set(names) <= set(found):
            lines.append((case, direction, *(markdown.ms(found[name]) for name in names)))
    return tabulate(lines, headers=["case", "direction", *names], tablefmt="github", disable_numparse=True)


def overhead() -> str:
    """What a call costs the host beyond its backend, microseconds, and the ratio of a call to one without observing."""
    parts = ("call", "backend", "beyond the backend", "check", "decide", "known", "decision, cached", "autograd", "node")
    lines = []
    for file in sorted((ROOT / "bench/results").glob("*/overhead.jsonl")):
        calls: dict[tuple[str, str, str, str], dict[str, Row]] = {}
        for row in store.read(ROOT / str(file)):
            calls.setdefault((row["device"], str(row["S"]), row["backend"], row["direction"]), {})[row["part"]] = row
        for key, found in calls.items():
            times = [f"{found[part]['us_median']:.3g}" if part in found else "-" for part in parts]
            ratio = found["observing, off"]
            lines.append((*key, *times, f"{ratio['ratio_median']:.2f} ({ratio['ratio_p20']:.2f} to {ratio['ratio_p80']:.2f})"))
    headers = ["device", "rows", "backend", "direction", *parts, "observing off / none"]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def compiled() -> str:
    """What torch.compile makes of a call of a stand-in that computes nothing, microseconds of the host."""
    parts = (
        "call", "graph", "empty graph", "further call", "further compiled call", "compiling adds", "op", "deciding", "deciding, compiled",
    )  # fmt: skip
    calls: dict[tuple[str, str], dict[str, Row]] = {}
    for row in store.read(ROOT / H200_OVERHEAD):
        if row["backend"] == "nothing" and "us_median" in row:
            calls.setdefault((row["device"], row["direction"]), {})[row["part"]] = row
    lines = [(*key, *(f"{found[part]['us_median']:.3g}" if part in found else "-" for part in parts)) for key, found in calls.items()]
    return tabulate(lines, headers=["device", "direction", *parts], tablefmt="github", disable_numparse=True)


def varlen() -> str:
    """Packed batches in the ways of bench/questions/packed_batches.py: milliseconds, medians."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in store.measured(store.read(ROOT / H200_VARLEN)):
        backend = "-".join(row["backend"].split("-")[:2])
        way = row["backend"].removeprefix(backend).removeprefix("-")
        found.setdefault((row["case"], row["direction"], backend), {})[way] = markdown.ms(row)
    lines = [(*key, *(times.get(way, "-") for way in ("", "copied", "each"))) for key, times in found.items()]
    headers = ["case", "direction", "backend", "one call", "one call, k and v copied", "a call for each sequence"]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def training() -> str:
    """Runs of examples/train_nsa_lm.py: speed, losses, and how far their averages were from packed SDPA's and triton-tile's."""
    runs = {file.stem: store.read(file) for file in sorted((ROOT / H200_TRAINING).glob("*.jsonl"))}
    lines = []
    for name, rows in runs.items():
        held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
        distances = [losses.furthest(rows, runs[other], WINDOW) for other in ("sdpa-packed", "triton-tile")]
        far = ["-" if distance is None else f"{distance:.4f}" for distance in distances]
        last = f"{held_out[-1]:.3f}" if held_out else "-"
        lines.append((name, rows[0]["backend"] or "-", len(rows), f"{rows[-1]['seconds']:.0f}", f"{losses.speed(rows):.0f}", last, *far))
    headers = ["run", "selected branch", "steps", "seconds", "tokens/s", "held-out loss", "from packed SDPA", "from triton-tile"]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


# By document, one that is not there left out; any document may show any of them.
PLACES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"h200": of_h200(summary.performance_table), "cpu": cpu_table, "decision": decision},
    "PRD.md": {"overhead": overhead},
    "docs/pytorch.md": {"compiled": compiled},
    "docs/serving.md": {"serving": lambda: paged_caches.table(store.read(ROOT / H200_SERVING))},
    "docs/varlen.md": {"varlen": varlen},
    "docs/distributed.md": {"weak": lambda: weak_scaling.table(store.read(ROOT / H200_SCALING))},
    "docs/training.md": {"training": training},
    "docs/kernels.md": {
        "targets": lambda: summary.targets_table(read_rows(H200_ROWS), read_rows(H200_PEERS)),
        "close": lambda: summary.close_case({name: read_rows(name) for name in (H200_ROWS, H200_PEERS)}, *CLOSE),
        "workspace": of_h200(summary.workspace_table),
        "layers": of_h200(summary.layers_table),
        "scaling": of_h200(summary.scaling_table),
        "breakeven": of_h200(summary.breakeven_table),
        "profiles": profiles,
        "kernel_times": kernel_times,
        "cupy_cuda": of_h200(cupy_cuda),
        "peers": peers,
        "trials": lambda: trials_table(store.read(ROOT / H200_TRIALS)),
    },
}
DOCUMENTS = tuple(document for document in PLACES if (ROOT / document).exists())
TABLES = {name: make for document in DOCUMENTS for name, make in PLACES[document].items()}


def with_tables(text: str) -> str:
    """The document with every `<!-- table: NAME -->` ... `<!-- end -->` filled anew."""

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}\n{markdown.with_note(TABLES[found[2]]())}\n\n<!-- end -->"

    return re.sub(r"(<!-- table: (\w+) -->\n).*?<!-- end -->", fill, text, flags=re.DOTALL)


if __name__ == "__main__":
    for document in DOCUMENTS:
        file = ROOT / document
        file.write_text(with_tables(file.read_text()))
        print(f"{document} written")
