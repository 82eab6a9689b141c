"""Tables of the documents, from committed rows. `python -m nsa_sel.bench.report.tables` rewrites them between their markers."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence

from tabulate import tabulate

from nsa_sel.bench.core import cases, records
from nsa_sel.bench.core.records import Row
from nsa_sel.bench.questions import bench_scaling, bench_serving
from nsa_sel.bench.report import losses, summary
from nsa_sel.bench.report.trials import trials_table
from nsa_sel.bench.tune.derive import CPU_ROWS, H200_ROWS, ROOT, read_rows
from nsa_sel.core import registry
from nsa_sel.core.backend import Offer
from nsa_sel.core.decision import load_policy, make_decision
from nsa_sel.core.request import example_request
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.devices import GPUS
from nsa_sel.telemetry.describe import describe

H200_OVERHEAD = "bench/results/h200/overhead.jsonl"
H200_SERVING, H200_VARLEN = "bench/results/h200/serving.jsonl", "bench/results/h200/varlen.jsonl"
H200_SCALING, H200_TRAINING = "bench/results/h200/scaling.jsonl", "bench/results/h200/training"
CLOSE = "real-8k-h1", "fwd+bwd"  # the case that is closest to dense attention
WINDOW = 20  # steps of a training run that losses are averaged over
H200_COUNTERS = "bench/results/h200/profiles/counters.jsonl"
H200_TRIALS = "bench/results/h200/profiles/trials.jsonl"
H200_PEERS = "bench/results/h200/peers.jsonl"
H200_KERNEL_TIMES = "bench/results/h200/profiles/kernel_times.jsonl"

GAINS = (  # what it is, and the names of its cases
    ("8k tokens of text, h = 16 or 4", r"real-8k-h(16|4)"),
    ("8k tokens of text, h = 1", "real-8k-h1"),
    ("the same, each of 30 layers, 3 groups", r"real-8k-layer\d\d-h1"),
    ("8k tokens, random blocks", r"random-8k-h\d+"),
    ("32k to 128k tokens, random blocks", r"random-(32|64|128)k-h\d+"),
    ("1,024 queries over 8k keys", "threshold-prefill.*"),
    ("decode, 1,024 of 16k to 64k keys", r"decode-.*"),
    ("decode, 64 to 1,024 of 8k keys", r"threshold-decode-D\d+-L(?!4096)\d+"),
    ("decode, 4,096 of 8k keys", r"threshold-decode-D\d+-L4096"),
)


def github(headers: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A Markdown table, with numbers as they are written."""
    return tabulate(list(lines), headers=headers, tablefmt="github", disable_numparse=True)


def gains(rows: list[Row]) -> str:
    """How many times faster the fastest backend is than dense causal attention, over groups of cases."""
    table = summary.indexed(rows)

    def cell(names: str, directions: tuple[str, ...]) -> str:
        cases_of = [found for (case, direction), found in table.items() if direction in directions and re.fullmatch(names, case)]
        found = sorted(gain for gain in map(summary.speed_up, cases_of) if gain is not None)
        if not found:
            return "-"
        ends = dict.fromkeys(summary.gain_of(gain) for gain in (found[0], found[-1]))
        slower = sum(gain < 1 for gain in found)
        return " to ".join(ends) + (f" ({slower} of {len(found)} slower)" if slower else "")

    lines = [(what, *(cell(names, directions) for directions in (("fwd", "decode"), ("bwd",), ("fwd+bwd",)))) for what, names in GAINS]
    return github(["queries and keys", "forward", "backward", "both in one call"], lines)


def cpu_table() -> str:
    """numba against packed, masked and dense SDPA on a CPU: milliseconds, medians."""
    rows = read_rows(CPU_ROWS)
    numba = {row["direction"]: row["ms_median"] for row in rows if row["backend"] == "numba"}
    lines = [
        (row["direction"], row["backend"], records.ms(row), f"{row['ms_p20']:.3g} to {row['ms_p80']:.3g}",
         f"{row['ms_median'] / numba[row['direction']]:.2f}x")
        for row in rows
    ]  # fmt: skip
    return github(["direction", "backend", "ms", "20th to 80th percentile", "time over numba's"], lines)


def explained(name: str) -> str:
    """What `nsa-sel explain --device NAME` prints where every package is installed."""
    device = GPUS[name]
    offers = tuple(Offer(backend) for backend in registry.backends().values())
    shown = describe(make_decision(example_request(), device, load_policy("default"), settings_for(device), offers))
    return f"```\n$ nsa-sel explain --device {name}\n" + "\n".join(line.rstrip() for line in shown.splitlines()) + "\n```"


def of_h200(table: Callable[[list[Row]], str]) -> Callable[[], str]:
    """A table over the committed rows of the H200."""
    return lambda: table(read_rows(H200_ROWS))


def profiles() -> str:
    """What the hardware counters say of single kernels (bench/questions/profile_kernels.py), in percent of what the device could do."""
    shares = ("l2_pct", "dram_pct", "l2_hit_pct", "issue_pct")
    lines = []
    for r in records.read(ROOT / H200_COUNTERS):
        percent = [f"{r[key]:.0f}%" for key in shares]
        pipe = f"{r['busiest_pipe']} {r['busiest_pipe_pct']:.0f}%" if "busiest_pipe" in r else "-"
        stall = f"{r['stall']} {r['stall_pct']:.0f}%" if "stall" in r else "-"
        lines.append(
            (r["kernel"], r["case"], f"{r['duration_us'] / 1e3:.3g}", *percent, pipe, stall, r["registers"], f"{r['shared_kbyte']:.0f}")
        )
    return github(
        ["kernel", "case", "ms", "L2", "DRAM", "L2 hits", "issue slots", "busiest pipe", "warps wait for", "registers", "shared, KB"], lines
    )


def kernel_times() -> str:
    """GPU microseconds of every kernel of one call with the backend that takes least of it (bench/core/kernel_times.py)."""
    least: dict[tuple[str, str], tuple[float, str, dict[str, list[float]]]] = {}
    for r in records.read(ROOT / H200_KERNEL_TIMES):
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
    return github(["case", "direction", "backend", "us", "kernels: us (launches)"], lines)


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
                lines.append((case.case, direction, records.ms(cuda), records.ms(triton), f"{gain:.2f}x"))
    for B, h in ((B, h) for B in (1, 4) for h in (16, 4)):
        for direction in ("fwd", "bwd"):
            found = [_cuda_and_triton(table.get((c.case, direction), {})) for c in cases.layer_cases() if (c.B, c.h) == (B, h)]
            known = [times for times in found if times is not None]
            if known:
                middle = [f"{statistics.median(times[i]['ms_median'] for times in known):.3g}" for i in (0, 1)]
                gains = [triton["ms_median"] / cuda["ms_median"] for cuda, triton in known]
                lines.append((f"{len(known)} layers, B {B}, h {h}", direction, *middle, f"{min(gains):.2f}x to {max(gains):.2f}x"))
    return github(["case", "direction", "cupy-cuda", "fastest of Triton's", "Triton's time over it"], lines)


def _cuda_and_triton(of_case: dict[str, Row]) -> tuple[Row, Row] | None:
    """The rows of cupy-cuda and of the fastest Triton backend; None where one is missing."""
    triton = [row for backend, row in of_case.items() if backend.startswith("triton-")]
    return (of_case["cupy-cuda"], min(triton, key=lambda row: row["ms_median"])) if triton and "cupy-cuda" in of_case else None


def peers() -> str:
    """What torch offers for the same selections, in one process with ours: milliseconds, medians."""
    table = summary.indexed(records.read(ROOT / H200_PEERS))
    names = ("triton-tile", "triton-block", "triton-group", "sdpa-packed", "flex-attention", "masked-sdpa", "dense-flash", "dense-cudnn")
    lines = []
    for (case, direction), found in table.items():
        if set(names) <= set(found):
            lines.append((case, direction, *(records.ms(found[name]) for name in names)))
    return github(["case", "direction", *names], lines)


def overhead() -> str:
    """What a call costs the host beyond its backend, microseconds, and the ratio of a call to one without observing."""
    parts = ("call", "backend", "beyond the backend", "check", "decide", "decision, cached", "autograd", "node")
    lines = []
    for file in sorted((ROOT / "bench/results").glob("*/overhead.jsonl")):
        calls: dict[tuple[str, str, str, str], dict[str, Row]] = {}
        for row in records.read(ROOT / str(file)):
            calls.setdefault((row["device"], str(row["S"]), row["backend"], row["direction"]), {})[row["part"]] = row
        for key, found in calls.items():
            times = [f"{found[part]['us_median']:.3g}" if part in found else "-" for part in parts]
            ratio = found["observing, off"]
            lines.append((*key, *times, f"{ratio['ratio_median']:.2f} ({ratio['ratio_p20']:.2f} to {ratio['ratio_p80']:.2f})"))
    return github(["device", "rows", "backend", "direction", *parts, "observing off / none"], lines)


def compiled() -> str:
    """What torch.compile makes of a call of a stand-in that computes nothing, microseconds of the host."""
    parts = (
        "call", "graph", "empty graph", "further call", "further compiled call", "compiling adds", "op", "deciding", "deciding, compiled",
    )  # fmt: skip
    calls: dict[tuple[str, str], dict[str, Row]] = {}
    for row in records.read(ROOT / H200_OVERHEAD):
        if row["backend"] == "nothing" and "us_median" in row:
            calls.setdefault((row["device"], row["direction"]), {})[row["part"]] = row
    lines = [(*key, *(f"{found[part]['us_median']:.3g}" if part in found else "-" for part in parts)) for key, found in calls.items()]
    return github(["device", "direction", *parts], lines)


def varlen() -> str:
    """Packed batches by bench_varlen: milliseconds, medians."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in records.measured(records.read(ROOT / H200_VARLEN)):
        backend = "-".join(row["backend"].split("-")[:2])
        variant = row["backend"].removeprefix(backend).removeprefix("-")
        found.setdefault((row["case"], row["direction"], backend), {})[variant] = records.ms(row)
    lines = [(*key, *(times.get(variant, "-") for variant in ("", "copied", "each"))) for key, times in found.items()]
    return github(["case", "direction", "backend", "one call", "one call, k and v copied", "a call for each sequence"], lines)


def training() -> str:
    """Runs of examples/train_nsa_lm.py: speed, losses, and how far their averages were from packed SDPA's and triton-tile's."""
    runs = {file.stem: records.read(file) for file in sorted((ROOT / H200_TRAINING).glob("*.jsonl"))}
    lines = []
    for name, rows in runs.items():
        held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
        distances = [losses.furthest(rows, runs[other], WINDOW) for other in ("sdpa-packed", "triton-tile")]
        far = ["-" if distance is None else f"{distance:.4f}" for distance in distances]
        last = f"{held_out[-1]:.3f}" if held_out else "-"
        lines.append((name, rows[0]["backend"] or "-", len(rows), f"{rows[-1]['seconds']:.0f}", f"{losses.speed(rows):.0f}", last, *far))
    return github(
        ["run", "selected branch", "steps", "seconds", "tokens/s", "held-out loss", "from packed SDPA", "from triton-tile"], lines
    )


BY_DOCUMENT: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"gains": of_h200(gains), "explained": lambda: explained("h200")},
    "docs/decisions.md": {"refused": lambda: explained("rtx4090")},
    "docs/performance.md": {
        "h200": of_h200(summary.performance_table),
        "close": lambda: summary.close_case({name: read_rows(name) for name in (H200_ROWS, H200_PEERS)}, *CLOSE),
        "layers": of_h200(summary.layers_table),
        "scaling": of_h200(summary.scaling_table),
        "breakeven": of_h200(summary.breakeven_table),
        "workspace": of_h200(summary.workspace_table),
        "peers": peers,
        "cpu": cpu_table,
        "overhead": overhead,
        "compiled": compiled,
    },
    "docs/serving.md": {"serving": lambda: bench_serving.table(records.read(ROOT / H200_SERVING))},
    "docs/varlen.md": {"varlen": varlen},
    "docs/distributed.md": {"weak": lambda: bench_scaling.table(records.read(ROOT / H200_SCALING))},
    "docs/training.md": {"training": training},
    "docs/kernel-results.md": {
        "targets": lambda: summary.targets_table(read_rows(H200_ROWS), read_rows(H200_PEERS)),
        "cupy_cuda": of_h200(cupy_cuda),
        "kernel_times": kernel_times,
        "profiles": profiles,
        "trials": lambda: trials_table(records.read(ROOT / H200_TRIALS)),
    },
}
DOCUMENTS = tuple(document for document in BY_DOCUMENT if (ROOT / document).exists())
TABLES = {name: make for document in DOCUMENTS for name, make in BY_DOCUMENT[document].items()}


def with_tables(text: str) -> str:
    """The document with every `<!-- table: NAME -->` ... `<!-- end -->` filled anew."""

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}\n{records.with_note(TABLES[found[2]]())}\n\n<!-- end -->"

    return re.sub(r"(<!-- table: (\w+) -->\n).*?<!-- end -->", fill, text, flags=re.DOTALL)


if __name__ == "__main__":
    for document in DOCUMENTS:
        file = ROOT / document
        file.write_text(with_tables(file.read_text()))
        print(f"{document} written")
