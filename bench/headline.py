"""Measure the README's table again on this GPU: `nsa-sel bench --headline`.

A claim is a ratio of times measured in one process: how many times as fast as the model's own library, and as dense
attention. The README's side comes from the committed rows, by the function that makes its table. fla, which tunes itself
for minutes, and vLLM are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
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
from nsa_sel.bench.core.session import able, measured_rows, wanted
from nsa_sel.bench.core.store import Row, first_line
from nsa_sel.bench.questions import layer_parts, released_models, speed
from nsa_sel.bench.tables import DECODING, HEADS, LENGTHS, LIBRARY, NSA_SEL, RELEASED, Used
from nsa_sel.cli.output import output_file
from nsa_sel.errors import ArgumentError

NEAR = 0.95  # of a claim: what passes
LEAST_GIB = 0.1  # smaller peaks of memory are not compared
REP = 30  # ms of timed calls


class Gain(NamedTuple):
    """A ratio of times; the least and the most, from the 20th and 80th percentiles of both."""

    median: float
    low: float
    high: float

    def verdict(self, claim: Gain) -> str:
        """Return PASS where the spread reaches `NEAR` of a claim, else the difference of medians."""
        return "PASS" if self.high >= NEAR * claim.median else f"{self.median / claim.median - 1:+.0%}"


def headline(folder: Path, console: Console) -> str:
    """Measure the README's table, and return a table with the verdict on each claim. Each row is written below `folder`
    and shown with the seconds since the start as soon as it is measured, and each verdict after its last row.

    Raises ArgumentError without a GPU or committed rows.
    """
    need_gpu("nsa-sel bench --headline")
    if not tables.PARTS_FILE.exists():
        allowed, remedy = "a checkout, whose bench/results/ holds the rows of the claims", "run it in one, installed with pip install -e"
        raise ArgumentError("nsa-sel bench --headline", "without committed rows", allowed, remedy)
    folder, began = output_file("--out", folder / "rows.jsonl").parent, time.monotonic()
    readme, here, facts = tables.committed(), dict[str, Gain](), store.stamp()
    claims, rows = gains(readme), {part: list[Row]() for part in PARTS}

    def tell(text: str) -> None:
        console.print(f"{time.monotonic() - began:5.0f} s  {text}")

    for part, measure in PARTS.items():
        try:
            for name, row in measure(console):
                rows[part].append(row | facts)
                store.append(folder / f"{part}.jsonl", rows[part][-1:])
                tell(f"{name}: {row.get('error') or '{ms_median:.4g} ms'.format_map(row)}")
                for what, gain in gains(tables.as_used(*rows.values())).items():
                    if what in claims and what not in here:
                        here[what] = gain
                        tell(f"{gain.verdict(claims[what])}: {what}")
        except Exception as error:  # the other claims are measured all the same
            tell(f"{part} was left out: {first_line(error)}")
        torch.cuda.empty_cache()
    lines = [
        (what, factor(claim.median), factor(mine.median), f"{mine.low:.2f} to {mine.high:.2f}", mine.verdict(claim))
        if (mine := here.get(what))
        else (what, factor(claim.median), "-", "-", "not measured")
        for what, claim in claims.items()
    ]
    device = next(row["device"] for columns in readme.values() for row in columns.values())
    note = (
        f"How many times as fast, or as little memory, as what follows the colon. README: {device}; here: {torch.cuda.get_device_name()},"
        f" in {time.monotonic() - began:.0f} s. PASS: the spread here reaches {NEAR:.0%} of the README's. fla and vLLM were not run."
    )
    return f"{note}\n\n{table(('claim', 'README', 'here', '20th to 80th', 'verdict'), lines, left=1)}"


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
                if column == LIBRARY and min(gib := [x.get("peak_gib", 0) for x in (row, mine)]) > LEAST_GIB:
                    found[f"{what}, memory: {column}"] = Gain(*[gib[0] / gib[1]] * 3)
    return found


def times(row: Row) -> tuple[float, float, float]:
    """Return the 20th percentile, the median and the 80th percentile. A way that was timed by one call has the median alone."""
    median = float(row["ms_median"])
    return float(row.get("ms_p20", median)), median, float(row.get("ms_p80", median))


# Measuring


def measure_released(console: Console) -> Iterator[tuple[str, Row]]:
    """Time layers of released models in transformers, with dense attention and after `patch_model`."""
    for model, case in RELEASED:
        ways = [way for way in ("transformers", "dense", "nsa-sel") if model == "minimax-m3" or way != "dense"]
        S = 1024 * int(case.split()[2].removesuffix("k"))  # "prefill of 16k tokens"
        make = partial(released_models.prefill, model, S=S, backward="backward" in case)
        for row in released_models.measure(model, make, ways, REP, {"case": case}):
            yield f"{released_models.MODELS[model]}, {case}, {row['way']}", row


def measure_layer(console: Console) -> Iterator[tuple[str, Row]]:
    """Time NSA's layer and dense attention."""
    for S in LENGTHS:
        parts = layer_parts.parts(S, HEADS)
        for name in ("layer", "dense"):
            (row,) = layer_parts.measure(parts[name](), REP, ("fwd+bwd",))
            sizes = {"part": name, "S": S, "G": layer_parts.G, "h": HEADS, "D": layer_parts.D}
            yield f"NSA layer, {S // 1024}k tokens, {name}", sizes | row
            torch.cuda.empty_cache()


def measure_decoding(console: Console) -> Iterator[tuple[str, Row]]:
    """Time the selected branch from block indices with every backend that decodes, and dense attention."""
    backends = [name for name in speed.usual_backends("cuda") if name != PACKED]
    contenders = able(named(",".join(backends)), "cuda", console.print)
    (job,) = (job for job in speed.jobs(speed.suites_of("models", False, "cuda"), contenders, DECODING) if job.case.case == DECODING)
    for row in measured_rows(job, wanted(job), "cuda", console.print):
        yield f"decoding, {row['backend']}", row


# By the name of its file of rows; in the order of the arguments of tables.as_used
PARTS = {"released_models": measure_released, "layer": measure_layer, "decoding": measure_decoding}
