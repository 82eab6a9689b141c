"""Measure the README's table again on this GPU: `nsa-sel bench --headline`.

A claim is a ratio of times measured in one process: how many times as fast as the model's own library and as dense
attention; for choosing blocks, as reading the index keys once. The README's side comes from the committed rows, by the
functions that make its table. fla is left out: it tunes itself for minutes.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from nsa_sel.bench import tables
from nsa_sel.bench.core import store
from nsa_sel.bench.core.command_line import need_gpu
from nsa_sel.bench.core.contenders import PACKED, named
from nsa_sel.bench.core.markdown import factor, table
from nsa_sel.bench.core.session import able, run
from nsa_sel.bench.core.store import Row, first_line
from nsa_sel.bench.questions import choosing_steps, layer_parts, released_models, speed
from nsa_sel.bench.tables import CALLS, CONTEXT, HEADS, LENGTHS, NSA_SEL, RELEASED, Used, training_pairs
from nsa_sel.cli.output import output_file
from nsa_sel.errors import ArgumentError

READING = "reading the index keys once"
CHOOSING = "choosing blocks, MiniMax-M3's indexer, 64 sequences of 32k keys"
SEQUENCES, KEYS = 64, 32768  # the case of choosing
NEAR = 0.95  # of a claim: what passes
LEAST_GIB = 0.1  # smaller peaks of memory are not compared
REP = 30  # ms of timed calls


class Gain(NamedTuple):
    """A ratio of times; the least and the most, from the 20th and 80th percentiles of both."""

    median: float
    low: float
    high: float


def headline(folder: Path, console: Console) -> str:
    """Measure every claim, with rows below `folder`, and return a table with a line per claim: PASS where the spread here
    reaches `NEAR` of it, else the difference of medians.

    Raises ArgumentError without a GPU or committed rows.
    """
    need_gpu("nsa-sel bench --headline")
    if not tables.PARTS_FILE.exists():
        allowed, remedy = "a checkout, whose bench/results/ holds the rows of the claims", "run it in one, installed with pip install -e"
        raise ArgumentError("nsa-sel bench --headline", "without committed rows", allowed, remedy)
    folder, here = output_file("--out", folder / "rows.jsonl", make_folder=True).parent, dict[str, Gain]()
    for part in (measure_released, measure_layer, measure_calls, measure_choosing, measure_training):
        try:
            here |= gains(part(folder, console))
        except Exception as error:  # the other claims are measured all the same
            console.print(f"{part.__name__} was left out: {first_line(error)}")
        torch.cuda.empty_cache()
    readme, lines = tables.committed(), []
    claims = gains(readme | choosing(tables.rows_of("profiles/choosing_steps.jsonl")))
    for what, claim in claims.items():
        shown: tuple[str, ...] = ("-", "-", "not measured")
        if found := here.get(what):
            verdict = "PASS" if found.high >= NEAR * claim.median else f"{found.median / claim.median - 1:+.0%}"
            shown = factor(found.median), f"{found.low:.2f} to {found.high:.2f}", verdict
        lines.append((what, factor(claim.median), *shown))
    device = next(row["device"] for columns in readme.values() for row in columns.values())
    note = (
        f"How many times as fast, or as little memory, as what follows the colon. README: {device}; here: {torch.cuda.get_device_name()}."
    )
    shown_table = table(("claim", "README", "here", "20th to 80th", "verdict"), lines, left=1)
    return f"{note} PASS: the spread here reaches {NEAR:.0%} of the README's.\n\n{shown_table}"


def gains(lines: Used) -> dict[str, Gain]:
    """Return the claims of a table: nsa-sel against each other column of a line, in time and, for layers of released
    models, in memory; except what ran out of memory.
    """
    found = {}
    for what, columns in lines.items():
        mine = columns.get(NSA_SEL)
        for column, row in columns.items():
            if mine and column != NSA_SEL and "ms_median" in mine.keys() & row.keys():
                (p20, median, p80), (low, mid, high) = times(row), times(mine)
                found[f"{what}: {column}"] = Gain(median / mid, p20 / high, p80 / low)
                if column == tables.LIBRARY and min(gib := [x.get("peak_gib", 0) for x in (row, mine)]) > LEAST_GIB:
                    found[f"{what}, memory: {column}"] = Gain(*[gib[0] / gib[1]] * 3)
    return found


def times(row: Row) -> tuple[float, float, float]:
    """Return the 20th percentile, the median and the 80th percentile. A way that was timed by one call has the median alone."""
    median = float(row["ms_median"])
    return float(row.get("ms_p20", median)), median, float(row.get("ms_p80", median))


def choosing(rows: Iterable[Row]) -> Used:
    """Return the line of choosing blocks from rows of choosing_steps: contiguous index keys in bf16."""
    size = {"model": "MiniMax-M3", "B": SEQUENCES, "S": 1, "S_kv": KEYS, "page_size": None, "kv": "bf16"}
    row = next(row for row in rows if size.items() <= row.items() and "requests" not in row)
    return {CHOOSING: {READING: {"ms_median": row["floor_ms"]}, NSA_SEL: row}}


# Measuring


def measure_released(folder: Path, console: Console) -> Used:
    """Time layers of released models in transformers, with dense attention and after `patch_model`."""
    if importlib.util.find_spec("transformers") is None:
        raise ArgumentError("transformers", "not installed", "5.23 or newer", "pip install transformers")
    facts, rows = store.stamp(), list[Row]()
    for model, case in RELEASED:
        console.print(f"{released_models.MODELS[model]}, {case}")
        ways = [way for way in ("transformers", "dense", "nsa-sel") if model == "minimax-m3" or way != "dense"]
        S = 1024 * int(case.split()[2].removesuffix("k"))  # "prefill of 16k tokens"
        make = partial(released_models.prefill, model, S=S, backward="backward" in case)
        rows += released_models.measure(model, make, ways, REP, {"case": case, **facts})
        store.append(folder / "released_models.jsonl", rows[-len(ways) :])
    return tables.as_used(rows, (), (), ())


def measure_layer(folder: Path, console: Console) -> Used:
    """Time NSA's layer and dense attention."""
    facts, rows = store.stamp(), list[Row]()
    for S in LENGTHS:
        parts = layer_parts.parts(S, HEADS)
        for name in ("layer", "dense"):
            console.print(f"NSA layer, {S // 1024}k tokens: {name}")
            found = layer_parts.measure(parts[name](), REP)
            rows += [{"part": name, "S": S, "G": layer_parts.G, "h": HEADS, "D": layer_parts.D, **row, **facts} for row in found]
            torch.cuda.empty_cache()
    store.append(folder / "layer.jsonl", rows)
    return tables.as_used((), rows, (), ())


def measure_calls(folder: Path, console: Console) -> Used:
    """Time the selected branch from block indices with every backend, and dense attention."""
    backends = [name for name in speed.usual_backends("cuda") if name != PACKED]
    contenders = able(named(",".join(backends)), "cuda", console.print)
    every = {job.case.case: job for job in speed.jobs(speed.suites_of("performance,decode", False, "cuda"), contenders, "")}
    jobs = [every[case]._replace(directions=(direction,)) for case, direction in CALLS]
    return tables.as_used((), (), run(jobs, folder / "calls.jsonl", "cuda", console), ())


def measure_choosing(folder: Path, console: Console) -> Used:
    """Time the choice of blocks for one new token of each sequence, and reading what it reads."""
    console.print(CHOOSING)
    rows = list(choosing_steps.step(choosing_steps.MODELS["m3"], [1] * SEQUENCES, KEYS, None, "bf16", REP))
    store.append(folder / "choosing.jsonl", [{**row, **store.stamp()} for row in rows])
    return choosing(rows)


def measure_training(folder: Path, console: Console) -> Used:
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
    return tables.as_used((), (), (), runs)
