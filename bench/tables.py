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
from nsa_sel.bench.questions import choosing_steps, decoding_steps, layer_parts, released_models, scaling, speed
from nsa_sel.core import registry
from nsa_sel.core.backend import Offer
from nsa_sel.core.decision import load_policy, make_decision
from nsa_sel.core.request import example_request
from nsa_sel.settings.config import GPUS, settings_for
from nsa_sel.telemetry.describe import describe

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
TRAINING = ROOT / H200_RESULTS / "training"  # runs of examples/train_nsa_lm.py: speed-, long-, band- and ranks-*.jsonl, a row a step
SETTLED = 10  # steps before speed counts: the first ones compile
BAND_WINDOW = 20  # steps that losses of a band are averaged over
PARTS_FILE = ROOT / H200_RESULTS / "profiles/layer_parts.jsonl"
PARTS = {"choose": "compressed keys, choosing", "select": "selected blocks", "window": "window", "gate": "gated sum"}  # bottom to top
HEADS = 16  # of a group
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


def both_passes(rows: Iterable[Row]) -> dict[tuple[str, int], list[Row]]:
    """Return the rows of layer_parts with HEADS heads, by part and length: forward and backward where both were
    measured.
    """
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        if row["h"] == HEADS and row["direction"] in ("fwd", "bwd"):
            found.setdefault((row["part"], row["S"]), {})[row["direction"]] = row
    return {key: list(both.values()) for key, both in found.items() if len(both) == 2}


def of_part(found: dict[tuple[str, int], list[Row]], part: str, S: int) -> list[Row] | None:
    """Return a part's rows: those of text where there are any of this length, else those of random inputs."""
    return found.get((f"{part} of text", S), found.get((part, S)))


def layer_shares() -> dict[int, dict[str, float]]:
    """Return, at each length at which everything was measured, the percent of dense attention's time, forward and
    backward together, that each of `PARTS` and the layer take.
    """
    found, shares = both_passes(store.read(PARTS_FILE)), {}
    for S in sorted({S for _, S in found}):
        of_all = {part: of_part(found, part, S) for part in ("dense", *PARTS, "layer")}
        times = {part: sum(row["ms_median"] for row in both) for part, both in of_all.items() if both is not None}
        if len(times) == len(of_all):
            dense = times.pop("dense")
            shares[S] = {part: 100 * ms / dense for part, ms in times.items()}
    return shares


# README.md


def claim() -> str:
    """Return the README's first figures, in words."""

    def listed(words: Iterable[str]) -> str:
        *first, last = words
        return f"{', '.join(first)} and {last}"

    shares, rates = layer_shares(), training_pairs("speed")
    text = max(row["S"] for row in store.read(PARTS_FILE) if row["part"] == "layer of text")
    inputs = "text" if text == max(shares) else f"text up to {text // 1024}k, random inputs beyond"
    percents, lengths = listed(f"{of_parts['layer']:.0f}%" for of_parts in shares.values()), listed(f"{S // 1024}k" for S in shares)
    gains = listed(f"{tokens_per_second(nsa) / tokens_per_second(dense):.2f}" for dense, nsa in rates.values())
    return (
        f"Measured on an NVIDIA H200: attention of one layer, forward and backward, takes {percents} of dense attention's time (cuDNN) at"
        f" {lengths} tokens ({inputs}; 4 KV groups of 16 heads, D 128, bf16). A model of 25 million parameters trains at {gains} times as"
        f" many tokens per second as with dense attention at {listed(f'{context // 1024}k' for context in rates)}."
        " [layer.md](https://github.com/nsa-sel/nsa-sel/blob/main/docs/layer.md) has all parts, and the losses."
        f" Rows: `{PARTS_FILE.relative_to(ROOT).as_posix()}`, `{TRAINING.relative_to(ROOT).as_posix()}/speed-*.jsonl`."
    )


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
    for direction, kind, h in product(("fwd", "bwd", "fwd+bwd"), ("real", "random"), (16, 4, 1)):
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


def peers() -> str:
    """Return what others offer for the same selections, in one process with ours: milliseconds, medians."""
    index = {key: found for key, found in indexed(rows_of("peers.jsonl", H100_RESULTS)).items() if key[1] != "fwd+bwd"}
    return by_backend(index, list(dict.fromkeys(name for found in index.values() for name in found)))


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
    rows = [row for row in rows if (row["S"] >= 1024) == of_training]
    cells = [((row["device"], row["backend"]), row["part"], row["direction"], f"{row['us_median']:.3g}") for row in rows]
    shown = sorted((cell for cell in cells if cell[1] in parts), key=lambda cell: parts.index(cell[1]))
    return pivot(["device", "backend"], shown, ("fwd", "fwd+bwd"))


def models() -> str:
    """Return the suite of shipped models on an H100: ms of each backend beside dense attention, and how many times
    faster the fastest is.
    """
    index = indexed(rows_of("models.jsonl", H100_RESULTS))
    names = list(dict.fromkeys(name for found in index.values() for name in found if name != DENSE))
    return by_backend(index, [*names, DENSE], {"against dense": (DENSE, 2)})


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


def training_band() -> str:
    """Return the largest distance of averaged losses from the run with packed SDPA."""
    runs = {file.stem.removeprefix("band-"): store.read(file) for file in sorted(TRAINING.glob("band-*.jsonl"))}

    def averages(rows: Sequence[Row]) -> list[float]:
        ends = range(BAND_WINDOW, len(rows) + 1, BAND_WINDOW)
        return [statistics.fmean(row["loss"] for row in rows[end - BAND_WINDOW : end]) for end in ends]

    lines = []
    for name, rows in runs.items():
        far = max(abs(a - b) for a, b in zip(averages(rows), averages(runs[PACKED]), strict=False))
        lines.append((name, rows[-1]["backend"], len(rows), f"{rows[-1]['loss']:.3f}", f"{far:.4f}"))
    return table(["forced", "selected branch", "steps", "last loss", "from packed SDPA"], lines, left=2)


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


COPY_RATE = 4.28e12  # bytes per second that a copy reads and writes on an H200

BY_DOCUMENT: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "released": lambda: released_models.highlights(rows_of("released_models.jsonl")),
        "claim": claim,
        "gains": gains,
        "explained": lambda: explained("h200"),
    },
    "docs/performance.md": {
        "h200": performance,
        "breakeven": breakeven,
        "peers": peers,
        "cpu": cpu,
        "overhead": overhead,
        "training_overhead": training_overhead,
    },
    "docs/compat.md": {"fla": lambda: layer_parts.table(rows_of("profiles/fla_layer.jsonl", H100_RESULTS))},
    "docs/choosing.md": {
        "models": models,
        "choosing_steps": lambda: choosing_steps.table(rows_of("profiles/choosing_steps.jsonl")),
        "minimax_m3": lambda: released_models.table(rows_of("released_models.jsonl"), "minimax-m3"),
        "qwen_qsa": lambda: released_models.table(rows_of("released_models.jsonl"), "qwen3.8"),
    },
    "docs/layer.md": {
        "parts": layer,
        "memory": lambda: layer_parts.memory_table(store.read(PARTS_FILE)),
        "speed": training_speed,
        "losses": training_losses,
        "band": training_band,
    },
    "docs/serving.md": {
        "serving": lambda: speed.table_of_caches(rows_of("serving.jsonl")),
        "indices": lambda: speed.table_of_steps(rows_of("profiles/steps.jsonl"), COPY_RATE),
        "steps": lambda: decoding_steps.table(
            [row for row in rows_of("profiles/decoding_steps.jsonl") if row.get("kv", "bf16") == "bf16" and row["B"] in (1, 64)]
        ),
    },
    "docs/varlen.md": {"varlen": varlen},
    "docs/distributed.md": {"rank_scaling": lambda: scaling.table(rows_of("scaling.jsonl")), "ranks": training_ranks},
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


PICTURE = ROOT / "docs/report/layer"
COLORS = {  # on light and on dark ground; parts of a layer are shades of one hue
    "surface": ("#ffffff", "#15181d"),
    "ink": ("#1b1d21", "#e8eaed"),
    "muted": ("#5a6069", "#a6adb7"),
    "grid": ("#dde1e6", "#343a43"),
    "dense": ("#33373d", "#d3d7dc"),
    "choose": ("#0b3c6f", "#d3e6fb"),
    "select": ("#2f7ec4", "#8fc1f0"),
    "window": ("#7fb4e3", "#4d8fcf"),
    "gate": ("#bcd8f1", "#2b5f96"),
}
PALETTE = 96  # colors of the PNG


def write_picture() -> None:
    """Write the README's picture for light and for dark pages.

    Left, a layer's attention as a share of dense attention's time, part by part; right, training speed with each kind
    of attention.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from PIL import Image

    shares = layer_shares()
    rates = {context: (tokens_per_second(dense), tokens_per_second(nsa)) for context, (dense, nsa) in training_pairs("speed").items()}
    for i, ending in enumerate(("", "-dark")):
        color = {role: both[i] for role, both in COLORS.items()}
        style: Any = {
            **{"font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.axisbelow": True},
            **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y"},
            **{f"{name}.color": color["muted"] for name in ("xtick", "ytick")},
            **{"figure.facecolor": color["surface"], "axes.facecolor": color["surface"], "grid.color": color["grid"]},
            **{
                "text.color": color["ink"],
                "axes.labelcolor": color["ink"],
                "axes.titlecolor": color["ink"],
                "axes.edgecolor": color["muted"],
            },
        }
        with pyplot.rc_context(style):
            canvas, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.7), layout="constrained")
            left.set(title="Attention of one layer, forward + backward", xlabel="tokens", ylabel="% of dense attention's time")
            left.axhline(100, color=color["dense"], linewidth=1.4)
            for bar, of_parts in enumerate(shares.values()):
                bottom = 0.0
                for part in PARTS:
                    left.bar(bar, of_parts[part], 0.6, bottom=bottom, color=color[part])
                    bottom += of_parts[part]
                left.text(bar, bottom + 2, f"{100 / of_parts['layer']:.2g}x", ha="center", fontsize=8)
            left.set_xticks(range(len(shares)), [f"{S // 1024}k" for S in shares])
            right.set(title="Training a model of 25M parameters", xlabel="context, tokens", ylabel="thousand tokens per second")
            for bar, (dense, nsa) in enumerate(rates.values()):
                right.bar(bar - 0.2, dense / 1e3, 0.38, color=color["dense"])
                right.bar(bar + 0.2, nsa / 1e3, 0.38, color=color["select"])
                right.text(bar + 0.2, nsa / 1e3, f"{nsa / dense:.2g}x", ha="center", va="bottom", fontsize=8)
            right.set_xticks(range(len(rates)), [f"{context // 1024}k" for context in rates])
            canvas.suptitle("NSAttention on an NVIDIA H200", fontsize=12, fontweight="bold", x=0.01, ha="left")
            key = {"dense": "dense attention (cuDNN)", **PARTS}
            handles = [Line2D([], [], marker="s", linestyle="", markersize=7, color=color[role], label=key[role]) for role in key]
            canvas.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False)
            drawn = io.BytesIO()
            canvas.savefig(drawn, format="png", dpi=110)
            pyplot.close(canvas)
        few = Image.open(drawn).convert("RGB").quantize(PALETTE, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(f"{PICTURE}{ending}.png", optimize=True)


if __name__ == "__main__":
    for folder in matrices():
        write_matrix(folder, folder)
    for document in BY_DOCUMENT:
        file = ROOT / document
        file.write_text(with_tables(file.read_text()))
        print(f"{document} written")
    write_picture()
