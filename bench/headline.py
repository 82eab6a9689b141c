"""The README's claims measured again on this GPU, each beside dense attention in the same process: `nsa-sel bench
--headline`.

A claim is what the committed rows say, by the functions that make the README's tables: no number of it stands here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console

from nsa_sel.bench.core import store
from nsa_sel.bench.core.command_line import need_gpu
from nsa_sel.bench.core.contenders import DENSE, PACKED, named
from nsa_sel.bench.core.markdown import factor, table
from nsa_sel.bench.core.session import able, run
from nsa_sel.bench.core.store import H200_ROWS, Row, first_line, read_rows
from nsa_sel.bench.questions import layer_parts, speed
from nsa_sel.bench.tables import HEADS, PARTS_FILE, SETTLED, both_passes, indexed, of_part, ours, tokens_per_second, training_pairs
from nsa_sel.cli.output import output_file
from nsa_sel.errors import ArgumentError

LENGTHS = 8192, 32768  # of the layer
CASES = {"real-8k-h16": ("fwd", "bwd"), "real-8k-h4": ("fwd", "bwd"), "decode-B64-32k-h16": ("decode",)}  # of the call
CONTEXT = 8192  # of training
NEAR = 0.95  # of a claim: what passes
REP = 100  # ms of timed calls of the layer


class Gain(NamedTuple):
    """How many times as fast as dense attention; the least and the most, from the 20th and 80th percentiles of both."""

    median: float
    low: float
    high: float


Gains = dict[str, Gain]  # by what is claimed


def headline(folder: Path, console: Console) -> str:
    """Measure every claim, with rows below `folder`, and return a table with a line per claim: PASS where the spread here
    reaches `NEAR` of it, else the difference of medians.

    Raises ArgumentError without a GPU or committed rows.
    """
    need_gpu("nsa-sel bench --headline")
    if not PARTS_FILE.exists():
        allowed, remedy = "a checkout, whose bench/results/ holds the rows of the claims", "run it in one, installed with pip install -e"
        raise ArgumentError("nsa-sel bench --headline", "without committed rows", allowed, remedy)
    folder, here = output_file("--out", folder / "rows.jsonl", make_folder=True).parent, Gains()
    for part in (measure_layer, measure_calls, measure_training):
        try:
            here |= part(folder, console)
        except Exception as error:  # the other claims are measured all the same
            console.print(f"{part.__name__} was left out: {first_line(error)}")
        torch.cuda.empty_cache()
    calls, lines = read_rows(H200_ROWS), []
    claims = layer_gains(store.read(PARTS_FILE)) | call_gains(calls) | training_gains(*training_pairs("speed")[CONTEXT])
    for what, claim in claims.items():
        shown: tuple[str, ...] = ("-", "-", "not measured")
        if found := here.get(what):
            verdict = "PASS" if found.high >= NEAR * claim.median else f"{found.median / claim.median - 1:+.0%}"
            shown = factor(found.median), f"{found.low:.2f} to {found.high:.2f}", verdict
        lines.append((what, factor(claim.median), *shown))
    note = f"How many times as fast as dense attention. README: {calls[-1]['device']}; here: {torch.cuda.get_device_name()}."
    shown_table = table(("claim", "README", "here", "20th to 80th", "verdict"), lines, left=1)
    return f"{note} PASS: the spread here reaches {NEAR:.0%} of the README's.\n\n{shown_table}"


# Gains, of committed rows and of those measured here


def layer_gains(rows: Iterable[Row]) -> Gains:
    """Return those of a layer's attention, forward and backward, from rows of `layer_parts`."""
    found = both_passes(rows)
    both = {S: (of_part(found, "layer", S), found.get(("dense", S))) for S in LENGTHS}
    return {
        f"attention of a layer, {S // 1024}k tokens, forward + backward": gain_of(layer, dense)
        for S, (layer, dense) in both.items()
        if layer and dense
    }


def call_gains(rows: Iterable[Row]) -> Gains:
    """Return those of the selected branch, the fastest backend of each case and direction, from rows of `speed`."""
    index, gains = indexed(rows), Gains()
    for case, direction in ((case, direction) for case, directions in CASES.items() for direction in directions):
        found = index.get((case, direction), {})
        best = ours(found)
        if best and DENSE in found:
            gains[f"selected blocks, {case}, {direction}"] = gain_of([best], [found[DENSE]])
    return gains


def training_gains(dense: Sequence[Row], nsa: Sequence[Row]) -> Gains:
    """Return that of tokens per second, from rows of examples/train_nsa_lm.py."""
    spreads = [np.quantile([row["tokens_per_second"] for row in rows[SETTLED:] or rows], (0.2, 0.8)) for rows in (dense, nsa)]
    (slow, fast), (low, high) = spreads
    gain = Gain(tokens_per_second(nsa) / tokens_per_second(dense), float(low / fast), float(high / slow))
    return {f"training step, {CONTEXT // 1024}k tokens": gain}


def gain_of(mine: Sequence[Row], dense: Sequence[Row]) -> Gain:
    """Return the gain of the sums of times."""
    times, other = ({name: sum(row[f"ms_{name}"] for row in rows) for name in ("median", "p20", "p80")} for rows in (mine, dense))
    return Gain(other["median"] / times["median"], other["p20"] / times["p80"], other["p80"] / times["p20"])


# Measuring


def measure_layer(folder: Path, console: Console) -> Gains:
    """Time the layer and dense attention."""
    facts, rows = store.stamp(), list[Row]()
    for S in LENGTHS:
        parts = layer_parts.parts(S, HEADS)
        for name in ("layer of text" if "layer of text" in parts else "layer", "dense"):
            console.print(f"attention, {S // 1024}k tokens: {name}")
            found = layer_parts.measure(parts[name](), REP)
            rows += [{"part": name, "S": S, "G": layer_parts.G, "h": HEADS, "D": layer_parts.D, **row, **facts} for row in found]
            torch.cuda.empty_cache()
    store.append(folder / "layer.jsonl", rows)
    return layer_gains(rows)


def measure_calls(folder: Path, console: Console) -> Gains:
    """Time the selected branch with every backend, and dense attention."""
    backends = [name for name in speed.usual_backends("cuda") if name != PACKED]
    contenders = able(named(",".join(backends)), "cuda", console.print)
    jobs = [job for job in speed.jobs(speed.suites_of("performance,decode", False, "cuda"), contenders, "") if job.case.case in CASES]
    return call_gains(run([job._replace(directions=CASES[job.case.case]) for job in jobs], folder / "calls.jsonl", "cuda", console))


def measure_training(folder: Path, console: Console) -> Gains:
    """Train as many steps as the committed runs have, by the example's own program, a fresh model each time."""
    program, facts, runs = store.example("train_nsa_lm"), store.stamp(), list[list[Row]]()
    steps = len(training_pairs("speed")[CONTEXT][1])
    for attention in ("dense", "nsa"):
        console.print(f"training, {CONTEXT // 1024}k tokens: {attention}")
        sizes = program.of_context(program.Sizes(attention=attention), CONTEXT, None)
        with tempfile.TemporaryDirectory() as out:
            # No step of so few is a checkpoint's; a minute is far more than they take.
            rows = program.train(Path(out), sizes, None, torch.device("cuda"), None, 1.0, steps, steps + 1, True)
        runs.append([row | facts for row in rows])
        torch.cuda.empty_cache()
    store.append(folder / "training.jsonl", [row for rows in runs for row in rows])
    return training_gains(*runs)
