"""The documents' tables from committed rows: `python -m nsa_sel.bench.report.tables` rewrites them between their markers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence

from nsa_sel.bench.core import store, trained
from nsa_sel.bench.core.contenders import of_framework
from nsa_sel.bench.core.environment import ROOT
from nsa_sel.bench.core.markdown import factor, ms, pair_of, side_by_side, spread, table, with_note
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.questions import (
    decoding_peers,
    decoding_steps,
    dense_model,
    layer_parts,
    paged_caches,
    scaling,
    ways_to_choose,
    windows,
)
from nsa_sel.bench.questions.host_time import CHOSEN, NOTHING
from nsa_sel.bench.report import decode_times, decoding, headline, on_paper, server, summary, targets, training
from nsa_sel.bench.report import layer as layer_picture
from nsa_sel.bench.report.sharing import origin, sharing_table
from nsa_sel.bench.tune.committed_rows import CPU_ROWS, H100_ROWS, H200_ROWS, read_rows
from nsa_sel.core import registry
from nsa_sel.core.backend import Offer
from nsa_sel.core.decision import load_policy, make_decision
from nsa_sel.core.request import example_request
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.devices import GPUS
from nsa_sel.telemetry.describe import describe

H200 = "bench/results/h200"
H200_PEERS, H100_PEERS = f"{H200}/peers.jsonl", "bench/results/h100/peers.jsonl"
CLOSE = "real-8k-h1", "fwd+bwd"  # the case of the table in README's claim that is closest to dense attention
TRAINED = '"trained": what a model that was trained with NSA at this context selects ([decisions.md](decisions.md)).'
OF_TEXT = (
    '"of text": the selected branch attends to what a model chose in a text, SmolLM2-135M up to 8k and one trained with NSA beyond'
    " ([decisions.md](decisions.md)); the layer chooses all the same.\n"
    '"fla": flash-linear-attention\'s `parallel_nsa` from its wheel, with its own compression (means of 64 keys: a quarter as many'
    " compressed keys) and choice, but without a window."
)


H100_COUNTERS = "bench/results/h100/profiles/counters.jsonl"


def rows_of(name: str) -> list[Row]:
    """The rows of a file of the H200, those without a time too."""
    return store.read(ROOT / H200 / name)


def of_h200(made: Callable[[list[Row]], str]) -> Callable[[], str]:
    """A table over the committed rows of the H200."""
    return lambda: made(read_rows(H200_ROWS))


def cpu_table() -> str:
    """numba against packed, masked and dense SDPA on a CPU: milliseconds, medians."""
    rows = read_rows(CPU_ROWS)
    numba = {row["direction"]: row["ms_median"] for row in rows if row["backend"] in of_framework("numba")}
    lines = [(row["direction"], row["backend"], ms(row), spread(row), factor(row["ms_median"] / numba[row["direction"]])) for row in rows]
    return table(["direction", "backend", "ms", "20th to 80th percentile", "time over numba's"], lines, left=2)


def performance(rows: list[Row]) -> str:
    """Every backend on single cases."""
    made = summary.performance_table(rows)
    return f"{made}\n\n{TRAINED}" if any(row["distribution"] == "trained" for row in rows) else made


def explained(name: str) -> str:
    """What `nsa-sel explain --device NAME` prints where every package is installed."""
    device = GPUS[name]
    offers = tuple(Offer(backend) for backend in registry.backends().values())
    shown = describe(make_decision(example_request(), device, load_policy("default"), settings_for(device), offers))
    return f"```\n$ nsa-sel explain --device {name}\n" + "\n".join(line.rstrip() for line in shown.splitlines()) + "\n```"


# What warps wait for, by the names that Nsight Compute has for it in its tables.
STALLS = {
    "waiting for a scoreboard dependency on a L1TEX (local, global, surface, texture) operation": "long scoreboard",
    "waiting on a fixed latency execution dependency": "wait",
}


def profiles() -> str:
    """What the hardware counters say of single kernels (bench/questions/kernel_counters.py), in percent of what the device could do."""
    lines = []
    counted = [("H200", r) for r in rows_of("profiles/counters.jsonl")]
    for gpu, r in counted + [("H100", r) for r in store.read(ROOT / H100_COUNTERS)]:
        percent = [f"{r[key]:.0f}%" for key in ("l2_pct", "dram_pct", "l2_hit_pct", "issue_pct")]
        reasons = [f"{STALLS.get(r[key], r[key])} {r[f'{key}_pct']:.0f}%" if key in r else "-" for key in ("busiest_pipe", "stall")]
        sizes = r["registers"], f"{r['shared_kbyte']:.0f}"
        lines.append((r["kernel"], gpu, r["case"], f"{r['duration_us'] / 1e3:.3g}", *percent, *reasons, *sizes))
    headers = [
        "kernel",
        "GPU",
        "case",
        "ms",
        "L2",
        "DRAM",
        "L2 hits",
        "issue slots",
        "busiest pipe",
        "warps wait for",
        "registers",
        "shared, KB",
    ]
    return table(headers, lines)


def trials() -> str:
    """Ideas that were tried on the way to the kernels, with their times in ms: `variants` maps a label to the trials whose times add up.

    A time is the median of whole calls, plans included, of one run. In trials 10 and 11 it is a single kernel's by torch's profiler, but
    for decoding and for one head in trial 11.
    """
    times = {(int(row["trial"].split()[0]), row["case"], row["variant"]): row["ms_median"] for row in rows_of("profiles/trials.jsonl")}
    lines = []
    for idea in rows_of("profiles/ideas.jsonl"):
        sums = {label: sum(times[idea["trial"], idea["case"], name] for name in names) for label, names in idea["variants"].items()}
        lines.append((idea["idea"], idea["case"], ", ".join(f"{label} {ms:.3g}" for label, ms in sums.items()), idea["outcome"]))
    return table(["idea", "case", "ms", "outcome"], lines)


def kernel_times() -> str:
    """GPU microseconds of the kernels of one call with the backend that takes least of it, but for those that take less than a hundredth
    (bench/questions/kernel_times.py)."""
    least: dict[tuple[str, str], tuple[float, Row]] = {}
    for row in rows_of("profiles/kernel_times.jsonl"):
        total, key = sum(us for _, us in row["kernels"].values()), (row["case"], row["direction"])
        if key not in least or total < least[key][0]:
            least[key] = total, row
    lines = []
    for key, (total, row) in least.items():
        kernels = [(name.removesuffix("_kernel"), count, us) for name, (count, us) in row["kernels"].items() if us >= total / 100]
        each = [f"{name} {us:.0f}" + (f" ({count:.0f})" if count > 1 else "") for name, count, us in kernels]
        lines.append((*key, summary.short(row), f"{total:.0f}", ", ".join(each)))
    return table(["case", "direction", "backend", "us", "kernels: us (launches)"], lines)


def peers(file: str) -> str:
    """What others offer for the same selections, in one process with ours: milliseconds, medians."""
    index = {key: found for key, found in summary.indexed(store.read(ROOT / file)).items() if key[1] != "fwd+bwd"}
    names = dict.fromkeys(name for found in index.values() for name in found)
    lines = [(*key, *(ms(found.get(name)) for name in names)) for key, found in index.items()]
    return table(["case", *names], side_by_side(lines), left=1)


def _host_parts(parts: Sequence[str], last: Callable[[dict[str, Row]], str] | None = None) -> list[list[str]]:
    """Microseconds of parts of a call by device and backend, "forward / forward + backward"; and what `last` makes of forward's rows."""
    lines = []
    for file in sorted((ROOT / "bench/results").glob("*/overhead.jsonl")):
        of_backend: dict[tuple[str, str], dict[str, dict[str, Row]]] = {}
        for (device, backend, direction), found in _by_part(store.read(file), ("device", "backend", "direction")).items():
            of_backend.setdefault((device, backend), {})[direction] = found
        for key, directions in of_backend.items():
            pairs = zip(*(_microseconds(directions.get(direction, {}), parts) for direction in ("fwd", "fwd+bwd")), strict=True)
            lines.append([*key, *map(pair_of, pairs), *([last(directions["fwd"])] if last else [])])
    return lines


def overhead() -> str:
    """What a call takes of the host, and what of that is not its backend's: microseconds."""
    parts = ("call", "call, new", "further call, new", "backend", "beyond the backend", "call, calling thread", "call, new, calling thread")
    return table(["device", "backend", *parts], _host_parts(parts))


def overhead_parts() -> str:
    """What a call does on the host beside its backend, microseconds, and the ratio of a call to one without observing. It hardly depends
    on the backend: of the stand-in, and of the one that the policy picks."""

    def observed(found: dict[str, Row]) -> str:
        ratio = found["observing, off"]
        return f"{ratio['ratio_median']:.2f} ({ratio['ratio_p20']:.2f} to {ratio['ratio_p80']:.2f})"

    parts = ("check", "decide", "repeat", "decision, cached", "autograd", "node", "autograd, calling thread")
    lines = [line for line in _host_parts(parts, observed) if line[1] in (NOTHING, CHOSEN)]
    return table(["device", "backend", *parts, "observing off / none"], lines)


def compiled() -> str:
    """What torch.compile makes of a call of a stand-in that computes nothing and of the policy's choice, microseconds of the host."""
    by_itself, further = ("call", "graph"), ("further call", "further compiled call")
    parts = (*(name + new for name in (*by_itself, *further) for new in ("", ", new")), "empty graph")
    rows = [row for row in rows_of("profiles/compiled_calls.jsonl") if "us_median" in row]
    lines = [(*key, *_microseconds(found, parts)) for key, found in _by_part(rows, ("device", "backend", "direction")).items()]
    return table(["device", "backend", "direction", *parts], lines)


def models() -> str:
    """The suite of shipped models on an H100: ms of each backend beside dense attention, and how many times faster the fastest is."""
    index = summary.indexed(store.measured(store.read(ROOT / "bench/results/h100/models.jsonl")))
    dense = "dense-cudnn"
    names = list(dict.fromkeys(name for found in index.values() for name in found if name != dense))
    lines = []
    for key, found in index.items():
        least = min(row["ms_median"] for name, row in found.items() if name != dense)
        cells = [ms(found[name]) if name in found else "-" for name in (*names, dense)]
        lines.append((*key, *cells, factor(found[dense]["ms_median"] / least)))
    return table(["case", *names, dense, "against dense"], side_by_side(lines), left=1)


def _by_part(rows: Iterable[Row], key: Sequence[str]) -> dict[tuple[str, ...], dict[str, Row]]:
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(str(row[field]) for field in key), {})[row["part"]] = row
    return found


def _microseconds(found: dict[str, Row], parts: Sequence[str]) -> list[str]:
    return [f"{found[part]['us_median']:.3g}" if part in found else "-" for part in parts]


def varlen() -> str:
    """Packed batches in the ways of bench/questions/packed_batches.py: milliseconds, medians, of forward and of both passes."""
    found: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for row in store.measured(rows_of("varlen.jsonl")):
        backend = max((name for name in registry.backends() if row["backend"].startswith(name)), key=len)
        way = row["backend"].removeprefix(backend).removeprefix("-")
        found.setdefault((row["case"], backend), {})[way, row["direction"]] = ms(row)
    lines = [
        (*key, *(pair_of([times.get((way, direction), "-") for direction in ("fwd", "fwd+bwd")]) for way in ("", "copied", "each")))
        for key, times in found.items()
    ]
    return table(["case", "backend", "one call", "one call, k and v copied", "a call for each sequence"], lines)


def sharing() -> str:
    """What neighboring rows share, and of which models the trained selections are."""
    return "\n\n".join((sharing_table(), *(f"Trained with NSA: {words}" for words in map(origin, trained.contexts()))))


def layer() -> str:
    """The parts of a layer; dense attention at lengths that were not measured beside them, from the rows of the selection."""
    rows = rows_of("profiles/layer_parts.jsonl")
    lengths = {row["S"] for row in rows}
    dense = [row for row in rows_of("selection.jsonl") if row["backend"] == "dense-cudnn" and re.fullmatch(r"random-\d+k-h16", row["case"])]
    older = [{**row, "part": "dense"} for row in dense if row["S"] in lengths and row["direction"] in ("fwd", "bwd")]
    made = layer_parts.table(sorted(older + rows, key=lambda row: row["part"] == "dense"))
    return f"{made}\n\n{OF_TEXT}" if any("of text" in row["part"] for row in rows) else made


@functools.cache
def held_to_targets() -> list[targets.Line]:
    """The targets of whole calls, and the committed rows that they are held to."""
    return targets.lines(*map(read_rows, (H200_ROWS, H100_ROWS, H200_PEERS)))


def other_ways() -> str:
    """Other ways to choose blocks."""
    return ways_to_choose.table(rows_of("profiles/ways_to_choose.jsonl"))


BY_DOCUMENT: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "claim": layer_picture.claim,
        "gains": of_h200(lambda rows: summary.gains(rows, undecided=CLOSE)),
        "explained": lambda: explained("h200"),
    },
    "docs/decisions.md": {
        "refused": lambda: explained("rtx4090"),
        "sharing": sharing,
        "decoding": decoding.choice_table,
        "sheets": on_paper.sheets_table,
        "picks": on_paper.picks_table,
        "efficiency": on_paper.efficiency_table,
        "h100": on_paper.h100_table,
    },
    "docs/performance.md": {
        "h200": of_h200(performance),
        "close": lambda: summary.close_case({name: read_rows(name) for name in (H200_ROWS, H200_PEERS)}, *CLOSE),
        "layers": of_h200(summary.layers_table),
        "scaling": of_h200(summary.scaling_table),
        "breakeven": of_h200(summary.breakeven_table),
        "workspace": of_h200(summary.workspace_table),
        "peers": lambda: peers(H100_PEERS),
        "cpu": cpu_table,
        "overhead": overhead,
        "overhead_parts": overhead_parts,
        "compiled": compiled,
    },
    "docs/choosing.md": {"other_ways": other_ways},
    "docs/compat.md": {
        "fla": lambda: layer_parts.table(store.read(ROOT / "bench/results/h100/profiles/fla_layer.jsonl")),
        "dense_model": lambda: dense_model.table(store.read(ROOT / "bench/results/h100/profiles/dense_model.jsonl")),
    },
    "docs/kernels.md": {"windows": lambda: windows.table(rows_of("profiles/windows.jsonl"))},
    "docs/models.md": {"models": models},
    "docs/layer.md": {"parts": layer, "memory": lambda: layer_parts.memory_table(rows_of("profiles/layer_parts.jsonl"))},
    "docs/serving-results.md": {
        "decode_targets": decode_times.targets_table,
        "decode_times": decode_times.times_table,
        "reading": decode_times.reading_table,
        "reading_held": decode_times.held_table,
        "serving": lambda: paged_caches.table(rows_of("serving.jsonl")),
        "page_costs": lambda: paged_caches.page_costs(rows_of("serving.jsonl")),
        "steps": lambda: decoding_steps.table(rows_of("profiles/decoding_steps.jsonl")),
        "flashinfer": lambda: decoding_peers.table(rows_of("profiles/decoding_peers.jsonl"), rows_of("profiles/decoding_steps.jsonl")),
        "server": lambda: server.table(rows_of("profiles/server.jsonl")),
    },
    "docs/tuning.md": {"headline": lambda: headline.of_folder(ROOT / "bench/results/h100/headline")},
    "docs/varlen.md": {"varlen": varlen},
    "docs/distributed.md": {
        "rank_scaling": lambda: scaling.table(store.read(ROOT / f"{H200}/scaling.jsonl")),
        "rank_scaling_h100": lambda: scaling.table(store.read(ROOT / "bench/results/h100/scaling.jsonl")),
        "ranks": training.ranks_table,
    },
    "docs/training.md": {"speed": training.speed_table, "losses": training.loss_table, "band": training.band_table},
    "docs/kernel-results.md": {
        "targets": lambda: targets.targets_table(held_to_targets()),
        "products": lambda: targets.products_table(held_to_targets()),
        "performance_h100": lambda: performance(read_rows(H100_ROWS)),
        "kernel_times": kernel_times,
        "profiles": profiles,
    },
    "docs/kernel-trials.md": {"trials": trials},
}
DOCUMENTS = tuple(document for document in BY_DOCUMENT if (ROOT / document).exists())
TABLES = {name: make for document in DOCUMENTS for name, make in BY_DOCUMENT[document].items()}


def with_tables(text: str) -> str:
    """The document with every `<!-- table: NAME -->` ... `<!-- end -->` filled anew."""

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}\n{with_note(TABLES[found[2]]())}\n\n<!-- end -->"

    return re.sub(r"(<!-- table: (\w+) -->\n).*?<!-- end -->", fill, text, flags=re.DOTALL)


if __name__ == "__main__":
    for document in DOCUMENTS:
        file = ROOT / document
        file.write_text(with_tables(file.read_text()))
        print(f"{document} written")
