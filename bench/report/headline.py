"""The README's claims measured again on this GPU, each beside dense attention in the same process: `nsa-sel bench --headline`.

A claim is what the committed rows say, by the functions that make the README's figures: no number of it stands here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console

from nsa_sel.bench.core import environment, store
from nsa_sel.bench.core.command_line import need_gpu
from nsa_sel.bench.core.contenders import DENSE, PACKED, named
from nsa_sel.bench.core.markdown import factor, table
from nsa_sel.bench.core.session import able, run
from nsa_sel.bench.core.store import Row, first_line
from nsa_sel.bench.questions import layer_parts, speed
from nsa_sel.bench.report import losses, shares, summary, training
from nsa_sel.bench.tune.committed_rows import H200_ROWS, read_rows
from nsa_sel.cli.output import output_folder
from nsa_sel.errors import ArgumentError

LENGTHS = 8192, 32768  # of the layer
CASES = {"real-8k-h16": ("fwd", "bwd"), "real-8k-h4": ("fwd", "bwd"), "decode-B64-32k-h16": ("decode",)}  # of the call
CONTEXT = 8192  # of training
NEAR = 0.95  # of a claim: what passes
REP = 100  # ms of timed calls of the layer
LAYER_FILE, CALLS_FILE, TRAINING_FILE = "layer.jsonl", "calls.jsonl", "training.jsonl"


class Gain(NamedTuple):
    """How many times as fast as dense attention; the least and the most, from the 20th and 80th percentiles of both."""

    median: float
    low: float
    high: float


Gains = dict[str, Gain]  # by what is claimed


def headline(folder: Path, console: Console) -> str:
    """Measure every claim, with rows below `folder`, and return the table. Raises ArgumentError without a GPU or committed rows."""
    need_gpu("nsa-sel bench --headline")
    if not shares.PARTS_FILE.exists():
        allowed, remedy = "a checkout, whose bench/results/ holds the rows of the claims", "run it in one, installed with pip install -e"
        raise ArgumentError("nsa-sel bench --headline", "without committed rows", allowed, remedy)
    folder, here = output_folder("--out", folder), Gains()
    for part in (_layer, _calls, _training):
        try:
            here |= part(folder, console)
        except Exception as error:  # the other claims are measured all the same
            console.print(f"{part.__name__.strip('_')} was left out: {first_line(error)}")
        torch.cuda.empty_cache()
    return verdicts(claims(), here, read_rows(H200_ROWS)[-1]["device"], torch.cuda.get_device_name())


def of_folder(folder: Path) -> str:
    """The table of rows that an earlier run left in a folder."""
    layer, calls, steps = (store.read(folder / name) for name in (LAYER_FILE, CALLS_FILE, TRAINING_FILE))
    dense, nsa = ([row for row in steps if row["attention"] == attention] for attention in ("dense", "nsa"))
    here = layer_gains(layer) | call_gains(calls) | training_gains(dense, nsa)
    return verdicts(claims(), here, read_rows(H200_ROWS)[-1]["device"], layer[-1]["device"])


def verdicts(claimed: Gains, here: Gains, there: str, device: str) -> str:
    """A line a claim: PASS where the spread here reaches `NEAR` of it, else by how much it is missed."""
    lines = []
    for what, claim in claimed.items():
        shown: tuple[str, ...] = ("-", "-", "not measured")
        if found := here.get(what):
            shown = factor(found.median), f"{found.low:.2f} to {found.high:.2f}", verdict(claim, found)
        lines.append((what, factor(claim.median), *shown))
    note = f"How many times as fast as dense attention. README: {there}; here: {device}."
    shown_table = table(("claim", "README", "here", "20th to 80th", "verdict"), lines, left=1)
    return f"{note} PASS: the spread here reaches {NEAR:.0%} of the README's.\n\n{shown_table}"


def verdict(claim: Gain, found: Gain) -> str:
    """PASS, or the difference of medians."""
    return "PASS" if found.high >= NEAR * claim.median else f"{found.median / claim.median - 1:+.0%}"


def claims() -> Gains:
    """What the README says, from the committed rows."""
    (pair,) = (pair for pair in training.pairs("speed") if pair.context == CONTEXT)
    return layer_gains(store.read(shares.PARTS_FILE)) | call_gains(read_rows(H200_ROWS)) | training_gains(pair.dense, pair.nsa)


# Gains, of committed rows and of those measured here


def layer_gains(rows: Iterable[Row]) -> Gains:
    """Of the layer's attention, forward and backward, from rows of `layer_parts`."""
    found, gains = shares.timed(rows), Gains()
    for S in LENGTHS:
        layer, dense = shares.of_part(found, "layer", S), found.get(("dense", S))
        if layer and dense:
            gains[f"attention of a layer, {S // 1024}k tokens, forward + backward"] = of_rows(layer, dense)
    return gains


def call_gains(rows: Iterable[Row]) -> Gains:
    """Of the selected branch, the fastest backend of each case and direction, from rows of `speed`."""
    index, gains = summary.indexed(rows), Gains()
    for case, directions in CASES.items():
        for direction in directions:
            found = index.get((case, direction), {})
            best = summary.ours(found)
            if best and DENSE in found:
                gains[f"selected blocks, {case}, {direction}"] = of_rows([best], [found[DENSE]])
    return gains


def training_gains(dense: Sequence[Row], nsa: Sequence[Row]) -> Gains:
    """Of tokens per second, from rows of examples/train_nsa_lm.py."""
    spreads = [np.quantile([row["tokens_per_second"] for row in rows[losses.SETTLED :] or rows], (0.2, 0.8)) for rows in (dense, nsa)]
    (slow, fast), (low, high) = spreads
    gain = Gain(losses.speed(nsa) / losses.speed(dense), float(low / fast), float(high / slow))
    return {f"training step, {CONTEXT // 1024}k tokens": gain}


def of_rows(ours: Iterable[Row], dense: Iterable[Row]) -> Gain:
    """Of the sums of times."""
    mine, other = ({name: sum(row[f"ms_{name}"] for row in rows) for name in ("median", "p20", "p80")} for rows in map(list, (ours, dense)))
    return Gain(other["median"] / mine["median"], other["p20"] / mine["p80"], other["p80"] / mine["p20"])


# Measuring


def _layer(folder: Path, console: Console) -> Gains:
    facts, rows = environment.stamp(), list[Row]()
    for S in LENGTHS:
        parts = layer_parts.parts(S, shares.HEADS)
        for name in ("layer of text" if "layer of text" in parts else "layer", "dense"):
            console.print(f"attention, {S // 1024}k tokens: {name}")
            found = layer_parts.measure(parts[name](), REP)
            rows += [{"part": name, "S": S, "G": layer_parts.G, "h": shares.HEADS, "D": layer_parts.D, **row, **facts} for row in found]
            torch.cuda.empty_cache()
    store.append(folder / LAYER_FILE, rows)
    return layer_gains(rows)


def _calls(folder: Path, console: Console) -> Gains:
    backends = [name for name in speed.usual_backends("cuda") if name != PACKED]
    contenders = able(named(",".join(backends)), "cuda", console.print)
    jobs = [job for job in speed.jobs(speed.suites_of("performance,decode", False, "cuda"), contenders, "") if job.case.case in CASES]
    return call_gains(run([job._replace(directions=CASES[job.case.case]) for job in jobs], folder / CALLS_FILE, "cuda", console))


def _training(folder: Path, console: Console) -> Gains:
    """As many steps as the committed runs have, by the example's own program, a fresh model each time."""
    program, facts = environment.example("train_nsa_lm"), environment.stamp()
    (pair,) = (pair for pair in training.pairs("speed") if pair.context == CONTEXT)
    train: Callable[..., list[Row]] = program.train
    runs = list[list[Row]]()
    for attention in ("dense", "nsa"):
        console.print(f"training, {CONTEXT // 1024}k tokens: {attention}")
        sizes = program.of_context(program.Sizes(attention=attention), CONTEXT, None)
        with tempfile.TemporaryDirectory() as out:
            # No step of so few is a checkpoint's; a minute is far more than they take.
            rows = train(Path(out), sizes, None, torch.device("cuda"), None, 1.0, len(pair.nsa), len(pair.nsa) + 1, True)
        runs.append([row | facts for row in rows])
        torch.cuda.empty_cache()
    store.append(folder / TRAINING_FILE, [row for rows in runs for row in rows])
    return training_gains(*runs)
