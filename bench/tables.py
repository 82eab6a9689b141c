"""Tables of the documents, the results of matrices and the README's picture, from committed rows: `python -m
nsa_sel.bench.tables`.

Rewrites the text between `<!-- table: NAME -->` and `<!-- end -->` in each document of `BY_DOCUMENT`. Run it after rows
were added, after `python -m nsa_sel.bench.tune.derive`: `make derived` does both. A test derives everything again.
"Ours" is the fastest of our backends in each case and direction.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from nsa_sel.bench import threshold_optimizer
from nsa_sel.bench.core import cases, matrix, store
from nsa_sel.bench.core.contenders import DENSE, PACKED, of_framework
from nsa_sel.bench.core.markdown import MARK, factor, ms, pivot, scatters, spread, table, with_note
from nsa_sel.bench.core.store import CPU_ROWS, H100_RESULTS, H200_RESULTS, H200_ROWS, ROOT, Row, read_rows
from nsa_sel.bench.questions import (
    choosing_steps,
    decoding_steps,
    engines,
    host_time,
    indexer_loss,
    layer_parts,
    packed_batches,
    released_models,
    scaling,
    speed,
)
from nsa_sel.bench.questions.host_time import CHOSEN, NOTHING
from nsa_sel.core import registry
from nsa_sel.core.backend import Offer
from nsa_sel.core.decision import load_policy, make_decision
from nsa_sel.core.request import example_request
from nsa_sel.settings.config import GPUS, settings_for
from nsa_sel.telemetry.describe import describe

Used = dict[str, dict[str, Row]]  # rows of the README's table by line and column
Index = dict[tuple[str, str], dict[str, Row]]  # by case and direction, in the order of the rows; then by backend

OURS = tuple(name for name in registry.backends() if name != PACKED)
CLOSE = "real-8k-h1", "fwd+bwd"  # whose two times in the README's table are too close to decide
GAINS = (  # queries and keys, and the names of their cases
    ("8k tokens of text, h = 16 or 4", r"real-8k-h(16|4)"),
    ("8k tokens of text, h = 1", "real-8k-h1"),
    ("the same, each of 30 layers, 3 groups", r"real-8k-layer\d\d-h1"),
    ("8k tokens, random blocks", r"random-8k-h\d+"),
    ("text, of a model trained with NSA", r"trained-\d+k-h\d+"),
    ("32k to 128k tokens, random blocks", r"random-(32|64|128)k-h\d+"),
    ("1,024 queries over 8k keys", "threshold-prefill.*"),
    ("decode, 1,024 of 16k to 64k keys", r"decode-.*"),
    ("decode, 64 to 1,024 of 8k keys", r"threshold-decode-D\d+-L(?!4096)\d+"),
    ("decode, 4,096 of 8k keys", r"threshold-decode-D\d+-L4096"),
)
TRAINING = ROOT / H200_RESULTS / "training"  # runs of examples/train_nsa_lm.py: speed-, long- and ranks-*.jsonl, a row a step
SETTLED = 10  # steps before speed counts: the first ones compile
PARTS_FILE = ROOT / H200_RESULTS / "profiles/layer_parts.jsonl"
PEERS_FILE = "profiles/peers.jsonl"
PEERS = "flex-attention", "masked-sdpa", DENSE, "dense-flash", "fa4", "cudnn-nsa", "fla-nsa", "flashinfer", "vllm", "sglang"  # in order
HEADS = 16  # of a group
# The README's table. Columns, and the lines of each bench's rows
LIBRARY, DENSE_COLUMN, NSA_SEL = "its library", "dense attention", "nsa-sel"
RELEASED = (
    ("minimax-m3", "prefill of 16k tokens"),
    ("minimax-m3", "prefill of 128k tokens"),
    ("minimax-m3", "prefill of 16k tokens, forward + backward"),
    ("qwen3.8", "prefill of 16k tokens"),
)
LENGTHS = 8192, 32768  # tokens that the README times NSA's layer with
DECODING = "models-minimax-m3-decode-B64-32k"  # the case of "selected blocks alone"
NOTE_TRAINED = '"trained": what a model that was trained with NSA at this context selects (`bench/data/README.md`).'
NOTE_TEXT = """\
"of text": the selected branch attends to what a model chose in a text, SmolLM2-135M up to 8k and one trained with NSA
beyond (`bench/data/README.md`); the layer still chooses its own blocks.

"fla": flash-linear-attention's `parallel_nsa` with its own compression (means of 64 keys: a quarter as many compressed
keys) and choice, without a window."""


# Rows


def rows_of(name: str, folder: str = H200_RESULTS) -> list[Row]:
    """Return the rows of a file below `folder`, those without a time too."""
    return store.read(ROOT / folder / name)


def indexed(rows: Iterable[Row]) -> Index:
    """Return the rows with a time by case and direction, then by backend; of two the later one counts."""
    index: Index = {}
    for row in store.measured(rows):
        index.setdefault((row["case"], row["direction"]), {})[row["backend"]] = row
    return index


def ours(of_case: dict[str, Row]) -> Row | None:
    """Return the fastest row of our backends; None when there is none."""
    return min((of_case[backend] for backend in OURS if backend in of_case), key=lambda row: row["ms_median"], default=None)


def speed_up(of_case: dict[str, Row], over: str = DENSE) -> float | None:
    """Return how many times faster ours is than another backend; None when one of the rows is missing."""
    best, other = ours(of_case), of_case.get(over)
    return None if best is None or other is None else float(other["ms_median"] / best["ms_median"])


def training_pairs(kind: str) -> dict[int, tuple[list[Row], list[Row]]]:
    """Return by context the runs with dense attention and with NSAttention, where both were trained; kind: speed or long."""
    contexts = sorted(int(file.stem.split("-")[1]) for file in TRAINING.glob(f"{kind}-*-nsa.jsonl"))
    return {S: (store.read(TRAINING / f"{kind}-{S}-dense.jsonl"), store.read(TRAINING / f"{kind}-{S}-nsa.jsonl")) for S in contexts}


def tokens_per_second(rows: Sequence[Row]) -> float:
    """Return the median over the settled steps of a run."""
    return float(statistics.median(row["tokens_per_second"] for row in rows[SETTLED:] or rows))


# README.md


def as_used(released: Iterable[Row], parts: Iterable[Row], calls: Iterable[Row]) -> Used:
    """Return the rows of the README's table by line and column, from rows of released_models, layer_parts and speed."""
    found: dict[str, dict[str, Row | None]] = {}
    of_way = {(row["model"], row["case"], row["way"]): row for row in released}
    for model, case in RELEASED:
        ways = {LIBRARY: "transformers", DENSE_COLUMN: "dense", NSA_SEL: "nsa-sel"}
        columns = {column: of_way.get((model, case, way)) for column, way in ways.items()}
        found[f"{released_models.MODELS[model]} layer, {case}"] = columns
    of_part = {(row["part"], row["S"]): row for row in parts if (row["h"], row["direction"]) == (HEADS, "fwd+bwd")}
    for S in LENGTHS:
        names = {LIBRARY: "fla", DENSE_COLUMN: "dense", NSA_SEL: "layer"}
        columns = {column: of_part.get((name, S)) for column, name in names.items()}
        found[f"NSA layer, {S // 1024}k tokens, forward + backward"] = columns
    of_case = indexed(calls).get((DECODING, "decode"), {})
    columns = {LIBRARY: of_case.get("vllm"), DENSE_COLUMN: of_case.get(DENSE), NSA_SEL: ours(of_case)}
    found["MiniMax-M3's selected blocks alone, decoding, 64 sequences of 32k keys"] = columns
    return {what: {column: row for column, row in columns.items() if row is not None} for what, columns in found.items()}


def committed() -> Used:
    """Return the rows of the README's table that are committed."""
    vllm = [row for row in rows_of(PEERS_FILE) if row.get("case") == DECODING and "vllm" in row["command"]]
    return as_used(rows_of("released_models.jsonl"), store.read(PARTS_FILE), vllm)


def used() -> str:
    """Return the README's table: time, and peak memory where it was measured."""
    names = {"MiniMax-M3 ": "transformers", "MiniMax-M3's": "vLLM", "Qwen": "transformers", "NSA": "fla"}

    def cell(what: str, column: str, row: Row | None) -> str:
        if row is None:
            return "-"
        name = next((library + ": " for start, library in names.items() if what.startswith(start)), "") if column == LIBRARY else ""
        if row.get("error"):
            return f"{name}{row['error']}"
        time = released_models.number(row["ms_median"]) + MARK * scatters(row)
        return f"{name}{time} ms" + (f", {row['peak_gib']:.3g} GiB" if row.get("peak_gib") else "")

    columns = (LIBRARY, DENSE_COLUMN, NSA_SEL)
    lines = [(what, *(cell(what, column, found.get(column)) for column in columns)) for what, found in committed().items()]
    return table(["one NVIDIA H200, bf16", *columns], lines, left=1)


def gains() -> str:
    """Return how many times faster the fastest backend is than dense causal attention, over groups of cases."""
    index = indexed(read_rows(H200_ROWS))

    def cell(names: str, directions: tuple[str, ...]) -> str:
        of_cell = {key: found for key, found in index.items() if key[1] in directions and re.fullmatch(names, key[0])}
        found = sorted(gain for gain in map(speed_up, of_cell.values()) if gain is not None)
        if not found:
            return "-"
        ends = " to ".join(dict.fromkeys(factor(gain) for gain in (found[0], found[-1])))
        slower = sum(gain < 1 for gain in found)
        return ends + ", undecided" * (set(of_cell) == {CLOSE}) + (f" ({slower} of {len(found)} slower)" if slower else "")

    lines = [(what, *(cell(names, directions) for directions in (("fwd", "decode"), ("bwd",), ("fwd+bwd",)))) for what, names in GAINS]
    return table(["queries and keys", "forward", "backward", "both in one call"], [line for line in lines if set(line[1:]) != {"-"}])


def explained(name: str) -> str:
    """Return what `nsa-sel explain --device NAME` prints where every package is installed."""
    device = GPUS[name]
    offers = tuple(Offer(backend) for backend in registry.backends().values())
    shown = describe(make_decision(example_request(), device, load_policy("default"), settings_for(device), offers))
    return f"```\n$ nsa-sel explain --device {name}\n" + "\n".join(line.rstrip() for line in shown.splitlines()) + "\n```"


# docs/performance.md, docs/choosing.md


def by_backend(index: Index, columns: Sequence[str], over: dict[str, tuple[str, int]] | None = None) -> str:
    """Return milliseconds of each case, forward / backward, by backend.

    over: further columns, how many times as fast ours is as a backend, with so many digits.
    """
    cells: list[tuple[tuple[str], str, str, str]] = []
    for (case, direction), found in index.items():
        cells += [((case,), name, direction, ms(found.get(name))) for name in columns]
        for header, (name, digits) in (over or {}).items():
            cells.append(((case,), header, direction, factor(speed_up(found, name), digits)))
    return pivot(["case"], cells, ("fwd", "bwd"), left=1)


def performance() -> str:
    """Return milliseconds of every backend in the prefill, decode and trained cases; ours against dense attention and
    packed SDPA.
    """
    names = {case.case for case in (*cases.PERFORMANCE, *cases.DECODE, *cases.TRAINED)}
    index = indexed(row for row in read_rows(H200_ROWS) if row["case"] in names and row["direction"] != "fwd+bwd")
    chosen = {key: found for key, found in index.items() if ours(found) is not None}
    mine = [backend for backend in OURS if any(backend in found for found in chosen.values())]
    shown = by_backend(chosen, [*mine, DENSE, PACKED], {"against dense": (DENSE, 2), "against packed": (PACKED, 0)})
    return f"{shown}\n\n{NOTE_TRAINED}"


def break_even(gains: dict[int, float]) -> str:
    """Return from which length on every gain (dense time over ours, by length) is 1 or more, or on which side of the
    measured lengths that lies.

    Between the last length that loses and the next one, log(gain) is taken as linear in log(length).
    """
    lengths, losing = list(gains), [S for S, gain in gains.items() if gain < 1]
    if not losing:
        return f"below {lengths[0] // 1024}k"
    if losing[-1] == lengths[-1]:
        return f"above {lengths[-1] // 1024}k"
    last, following = losing[-1], lengths[lengths.index(losing[-1]) + 1]
    low, high = math.log(gains[last]), math.log(gains[following])
    return f"{last * (following / last) ** (low / (low - high)) / 1024:.2g}k"


def breakeven() -> str:
    """Return from which length on ours is faster than dense attention, by h, direction and kind of selection, and how
    much at each length.

    Text beyond the 8k tokens of SmolLM2's maps is that of models trained with NSA.
    """
    index, lines = indexed(read_rows(H200_ROWS)), []
    every = {case.case: case for case in (*cases.BREAKEVEN, *cases.SCALING, *cases.TRAINED)}
    by_length = sorted(every.values(), key=lambda case: case.S)
    for direction, kind, h in product(("fwd", "fwd+bwd"), ("real", "random"), (16, 4, 1)):
        gains, cells = dict[int, float](), list[str]()
        for case in (case for case in by_length if case.h == h and (case.distribution == "random") == (kind == "random")):
            found = index.get((case.case, direction), {})
            best, gain = ours(found), speed_up(found)
            if best is not None and gain is not None:
                gains[case.S] = gain
                cells.append(f"{case.S // 1024}k {factor(gain)}{MARK * (scatters(found[DENSE]) or scatters(best))}")
        if gains:
            lines.append((direction, kind, h, break_even(gains), ", ".join(cells)))
    return table(["direction", "selection", "h", "faster from S", "against dense at S"], lines, left=2)


def over_ours(rows: Iterable[Row]) -> str:
    """Return milliseconds of others' kernels, and in brackets over the fastest of ours in the same process; of ours the
    fastest in the last process.
    """
    processes: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in store.measured(row for row in rows if row["direction"] != "fwd+bwd" and "wrong" not in row):
        case = row.get("case") or f"choosing for {row['B']} x 1 of {row['S_kv'] // 1024}k keys"
        processes.setdefault((case, row["direction"], row["command"]), {})[row["backend"]] = row
    best = {key: min(row["ms_median"] for name, row in found.items() if name not in PEERS) for key, found in processes.items()}
    cells = [((case,), NSA_SEL, direction, f"{time:.3g}") for (case, direction, _), time in best.items()]
    for name, (key, found) in product(PEERS, processes.items()):
        if name in found:
            cells.append(((key[0],), name, key[1], f"{ms(found[name])} ({factor(found[name]['ms_median'] / best[key])})"))
    return pivot(["case"], cells, ("fwd", "bwd"), left=1)


def cpu() -> str:
    """Return numba against packed, masked and dense SDPA on a CPU: milliseconds, medians."""
    rows = read_rows(CPU_ROWS)
    numba = {row["direction"]: row["ms_median"] for row in rows if row["backend"] in of_framework("numba")}
    lines = [(row["direction"], row["backend"], ms(row), spread(row), factor(row["ms_median"] / numba[row["direction"]])) for row in rows]
    return table(["direction", "backend", "ms", "20th to 80th percentile", "time over numba's"], lines, left=2)


def overhead() -> str:
    """Return what a call of tiny tensors takes of the host, and what of that is not its backend's: microseconds, forward /
    forward + backward.
    """
    return host_times(False, "call", "call, new", "further call, new", "backend", "beyond the backend", *ON_CALLING_THREAD)


def training_overhead() -> str:
    """Return what a call of a training shape and a step of 24 of them take of the host, as `overhead`."""
    return host_times(True, "call", "call, new", "further call, new", *ON_CALLING_THREAD, "step", "step, compiled")


ON_CALLING_THREAD = ("call, calling thread", "call, new, calling thread")


def host_times(of_training: bool, *parts: str) -> str:
    rows = [row for file in sorted((ROOT / "bench/results").glob("*/overhead.jsonl")) for row in store.read(file) if "us_median" in row]
    rows = [row for row in rows if (row["S"] >= 1024) == of_training and row["backend"] in (NOTHING, CHOSEN, host_time.DENSE)]
    cells = [((row["device"], row["backend"]), row["part"], row["direction"], f"{row['us_median']:.3g}") for row in rows]
    shown = sorted((cell for cell in cells if cell[1] in parts), key=lambda cell: parts.index(cell[1]))
    return pivot(["device", "backend"], shown, ("fwd", "fwd+bwd"))


def models() -> str:
    """Return the prefills of shipped models: ms beside dense attention, and how many times faster ours is."""
    index = {key: found for key, found in indexed(rows_of("models.jsonl")).items() if key[1] != "decode"}
    joined = {key: {**found, NSA_SEL: best} for key, found in index.items() if (best := ours(found))}
    return by_backend(joined, [NSA_SEL, DENSE], {"against dense": (DENSE, 2)})


# docs/layer.md, docs/varlen.md, docs/distributed.md


def layer() -> str:
    """Return the parts of a layer; dense attention at lengths that were not measured beside them, from the rows of the
    selection.
    """
    rows = store.read(PARTS_FILE)
    lengths = {row["S"] for row in rows}
    older = [
        {**row, "part": "dense"}
        for row in rows_of("selection.jsonl")
        if row["backend"] == DENSE
        and re.fullmatch(r"random-\d+k-h16", row["case"])
        and row["S"] in lengths
        and row["direction"] != "fwd+bwd"
    ]
    return f"{layer_parts.table(sorted(older + rows, key=lambda row: row['part'] == 'dense'))}\n\n{NOTE_TEXT}"


def varlen() -> str:
    """Return packed batches as bench/core/variants.py calls them: milliseconds, medians, of forward and of both passes."""
    kinds = {"": "one call", "copied": "one call, k and v copied", "each": "a call for each sequence"}
    cells = []
    for row in store.measured(rows_of("varlen.jsonl")):
        backend = max((name for name in registry.backends() if row["backend"].startswith(name)), key=len)
        kind = row["backend"].removeprefix(backend).removeprefix("-")
        cells.append(((row["case"], backend), kinds[kind], row["direction"], ms(row)))
    return pivot(["case", "backend"], cells, ("fwd", "fwd+bwd"))


def training_speed() -> str:
    """Return tokens per second of whole training steps."""
    lines = []
    for context, (dense, nsa) in training_pairs("speed").items():
        rates = tokens_per_second(dense), tokens_per_second(nsa)
        lines.append((f"{context // 1024}k", *(f"{rate / 1e3:.0f}" for rate in rates), f"{rates[1] / rates[0]:.2f}", nsa[-1]["backend"]))
    return table(["context", "dense, thousand tokens/s", "NSAttention", "times", "selected branch"], lines, left=1)


def training_losses() -> str:
    """Return held-out losses after as many steps, and the last of the longer run."""
    lines = []
    for context, runs in training_pairs("long").items():
        dense, nsa = ({row["step"] + 1: row["held_out_loss"] for row in run if "held_out_loss" in row} for run in runs)
        for step in sorted(dense.keys() | {max(nsa)}):
            one, other = dense.get(step), nsa[step]
            lines.append((f"{context // 1024}k", step, *("-" if x is None else f"{x:.3f}" for x in (one, other, one and other - one))))
    return table(["context", "steps", "dense, nats a byte", "NSAttention", "difference"], lines, left=1)


def training_ranks() -> str:
    """Return tokens per second of one rank and of several, and the loss after the last step."""
    lines, alone = [], dict[str, float]()
    for file in sorted(TRAINING.glob("ranks-*.jsonl"), key=lambda file: (int(file.stem.split("-")[1]), file.stem)):
        (_, context, kind, ranks), rows = file.stem.split("-"), store.read(file)
        rate = tokens_per_second(rows)
        alone.setdefault(context, rate)  # the first of its context
        shown = f"{rate / 1e3:.0f}", f"{rate / alone[context]:.2f}", f"{rows[-1]['loss']:.3f}"
        lines.append((f"{int(context) // 1024}k", kind, ranks, *shown))
    return table(["context", "parallel", "ranks", "thousand tokens/s", "over one rank", f"loss after {len(rows)} steps"], lines, left=2)


def rank_scaling() -> str:
    """Return how training and decoding scale with the number of ranks."""
    return scaling.table([row for row in rows_of("scaling.jsonl") if (row.get("direction") == "fwd") == (row["S"] == 1)])


INDEXED = {"dense": "dense", "nsa": "NSAttention", "msa": "MSAttention, max", "sum": "MSAttention, sum"}  # runs msa-CONTEXT-*.jsonl


def indexed_runs(context: int, kind: str = "msa") -> dict[str, list[Row]]:
    """Return the runs beside those that train an indexer, by the names in `INDEXED`; kind: msa, msa-speed or speed."""
    files = {name: TRAINING / f"{kind}-{context}-{name}.jsonl" for name in INDEXED}
    return {name: store.read(file) for name, file in files.items() if file.exists()}


def indexer_losses(context: int) -> str:
    """Return held-out losses after as many steps, and the share of the attention mass of the best blocks that the
    indexers' blocks hold."""
    runs = {name: {row["step"] + 1: row for row in rows if "held_out_loss" in row} for name, rows in indexed_runs(context).items()}
    learned = [name for name in ("msa", "sum") if name in runs]
    lines = []
    for step in sorted(set().union(*runs.values())):
        losses = [f"{rows[step]['held_out_loss']:.3f}" if step in rows else "-" for rows in runs.values()]
        evaluated = [runs[name].get(step) for name in learned]
        shares = ["-" if row is None else f"{sum(row['mass']) / sum(row['best_mass']):.1%}" for row in evaluated]
        lines.append((step, *losses, *shares))
    masses = [INDEXED[name].replace("MSAttention", "mass") for name in learned]
    return table(["steps", *(INDEXED[name] for name in runs), *masses], lines, left=1)


def indexer_speed() -> str:
    """Return tokens per second of training steps, of MSAttention with dense and with sparse attention."""
    lines = []
    for context in (8192, 32768):
        runs = indexed_runs(context) | indexed_runs(context, "msa-speed")
        if context == 32768:  # programs that compiled ran beside the other run of dense attention
            runs["dense"] = indexed_runs(context, "speed")["dense"]
        runs.pop("sum", None)
        for name, rows in runs.items():
            by_phase = [row for row in rows if row["backend"] is None], [row for row in rows if row["backend"]]
            rates = ["-" if len(part) <= SETTLED else f"{tokens_per_second(part) / 1e3:.0f}" for part in by_phase]
            lines.append((f"{context // 1024}k", INDEXED[name], *rates))
    return table(["tokens", "attention", "dense, thousand tokens/s", "sparse"], lines, left=2)


COPY_RATE = 4.28e12  # bytes per second that a copy reads and writes on an H200

BY_DOCUMENT: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "used": used,
        "explained": lambda: explained("h200"),
    },
    "docs/performance.md": {
        "gains": gains,
        "h200": performance,
        "breakeven": breakeven,
        "cpu": cpu,
        "overhead": overhead,
        "training_overhead": training_overhead,
        "peers": lambda: over_ours(rows_of("peers.jsonl", H100_RESULTS)),
        "peers_h200": lambda: over_ours(rows_of(PEERS_FILE)),
    },
    "docs/choosing.md": {
        "models": models,
        "choosing_steps": lambda: choosing_steps.table(rows_of("profiles/choosing_steps.jsonl")),
        "choosing_requests": lambda: choosing_steps.table(rows_of("profiles/choosing_requests.jsonl")),
        "minimax_m3": lambda: released_models.table(rows_of("released_models.jsonl"), "minimax-m3"),
        "qwen_qsa": lambda: released_models.table(rows_of("released_models.jsonl"), "qwen3.8"),
    },
    "docs/layer.md": {
        "parts": layer,
        "memory": lambda: layer_parts.memory_table(store.read(PARTS_FILE)),
        "speed": training_speed,
        "losses": training_losses,
    },
    "docs/serving.md": {
        "serving": lambda: speed.table_of_caches(rows_of("serving.jsonl")),
        "indices": lambda: speed.table_of_steps(rows_of("profiles/steps.jsonl"), COPY_RATE),
        "packed": lambda: packed_batches.table(rows_of("profiles/mixed.jsonl")),
        "engines": lambda: engines.table(rows_of("profiles/engines.jsonl")),
        "steps": lambda: decoding_steps.table(
            [row for row in rows_of("profiles/decoding_steps.jsonl") if row.get("kv", "bf16") == "bf16" and row["B"] in (1, 64)]
        ),
    },
    "docs/indexer.md": {
        "indexer_loss": lambda: indexer_loss.table(rows_of("indexer_loss.jsonl")),
        "indexer_losses": lambda: indexer_losses(8192),
        "indexer_losses_32k": lambda: indexer_losses(32768),
        "indexer_speed": indexer_speed,
    },
    "docs/varlen.md": {"varlen": varlen},
    "docs/distributed.md": {"rank_scaling": rank_scaling, "ranks": training_ranks},
}
TABLES = {name: make for tables in BY_DOCUMENT.values() for name, make in tables.items()}


def with_tables(text: str) -> str:
    """Return a document with the text between all its markers derived anew."""

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}\n{with_note(TABLES[found[2]]())}\n\n<!-- end -->"

    return re.sub(r"(<!-- table: (\w+) -->\n).*?<!-- end -->", fill, text, flags=re.DOTALL)


def matrices() -> list[Path]:
    """Return the folders of the committed matrices of bench_sel_triton."""
    return [file.parent for file in sorted((ROOT / matrix.RESULTS).glob("*/rows.jsonl"))]


def write_matrix(folder: Path, out: Path) -> None:
    """Write the CSV files and selection_report.md of a matrix into `out`."""
    matrix.write(folder, out)
    (out / "report.md").unlink(missing_ok=True)  # every row of a matrix: too long to commit
    read = {part: matrix.from_csv(out / file) for part, file in matrix.FILES.items() if (out / file).exists()}
    store.write_whole(out / "selection_report.md", threshold_optimizer.report(read))


PICTURE = ROOT / "docs/report/minimax_m3.png"
LINES: dict[str, tuple[str, dict[str, Any]]] = {  # by way of released_models: name and look
    "transformers": ("transformers", {"color": "#c8531c", "marker": "s", "linewidth": 2}),
    "nsa-sel": ("nsa-sel, patch_model(model)", {"color": "#2f7ec4", "marker": "o", "linewidth": 4, "markersize": 8}),
    "dense": ("dense attention (SDPA)", {"color": "#22262b", "marker": "D", "markersize": 4, "linewidth": 1.5, "linestyle": "--"}),
}


def write_picture() -> None:
    """Write the README's picture: time and peak memory of a MiniMax-M3 layer's prefill against its tokens."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot
    from PIL import Image

    of_way: dict[str, dict[int, Row]] = {way: {} for way in LINES}
    for row in rows_of("released_models.jsonl"):
        length = re.fullmatch(r"prefill of (\d+)k tokens", row["case"])
        if length and row["model"] == "minimax-m3" and row["way"] in of_way:
            of_way[row["way"]][int(length[1])] = row
    lengths = sorted({k for rows in of_way.values() for k in rows})
    with pyplot.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}):
        canvas, panels = pyplot.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
        fields = {"ms_median": "time, milliseconds", "peak_gib": "peak memory beyond weights and inputs, GiB"}
        for panel, (field, title) in zip(panels, fields.items(), strict=True):
            for way, (name, look) in LINES.items():
                points = sorted((k, row[field]) for k, row in of_way[way].items() if not row.get("error"))
                panel.plot(*zip(*points, strict=True), label=name, **look)
            k, last = max((k, row[field]) for k, row in of_way["transformers"].items() if not row.get("error"))
            note: dict[str, Any] = {
                "textcoords": "offset points",
                "ha": "right",
                "va": "center",
                "color": LINES["transformers"][1]["color"],
            }
            panel.annotate("out of memory from 32k on", (k, last), (-9, 3), **note)
            panel.set(xscale="log", yscale="log", xlabel="tokens", title=title)
            panel.set_xticks(lengths, [f"{k}k" for k in lengths])
            panel.minorticks_off()
            panel.yaxis.set_major_formatter("{x:g}")
            panel.grid(axis="y", color="#dde1e6")
        canvas.suptitle("One attention layer of MiniMax-M3, prefill on an NVIDIA H200", fontsize=12, fontweight="bold")
        canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(LINES), frameon=False)
        drawn = io.BytesIO()
        canvas.savefig(drawn, format="png", dpi=110)
        pyplot.close(canvas)
    few = Image.open(drawn).convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(PICTURE, optimize=True)


if __name__ == "__main__":
    for folder in matrices():
        write_matrix(folder, folder)
    for document in BY_DOCUMENT:
        file = ROOT / document
        file.write_text(with_tables(file.read_text()))
        print(f"{document} written")
    write_picture()
