"""The one rule for `sel_triton_min_L`: the smallest L from which Triton is ahead of packed SDPA by the margin, by
evidence.

    python -m nsa_sel.bench.threshold_optimizer rows.jsonl --config min_l.yaml     # as `nsa-sel threshold`

Of every measured case with L or more keys a row, in each direction: packed SDPA's 20th percentile over Triton's 80th
must reach the margin. Below the threshold packed SDPA runs, so that nothing there can be slower than it; from it on, no
case may be more than `REGRESSION` slower. Where medians alone would allow a smaller L, spreads overlap too much to
tell: those lengths are undecided.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
import yaml

from nsa_sel.bench.core import markdown, store
from nsa_sel.bench.core.cases import length_of
from nsa_sel.bench.core.command_line import echo, program
from nsa_sel.bench.core.contenders import PACKED
from nsa_sel.bench.core.markdown import factor
from nsa_sel.bench.core.matrix import from_csv, parts
from nsa_sel.bench.core.store import WAYS, Row
from nsa_sel.cli.output import output_file
from nsa_sel.core.registry import backends
from nsa_sel.errors import ArgumentError

MARGIN = 1.2  # Triton must be this much faster than packed SDPA from the threshold on (REQUIREMENTS 9)
REGRESSION = 0.10  # by which no case from the threshold on may be slower than packed SDPA, whatever the margin
NO_LOSS = 1 / (1 + REGRESSION)  # the gain that this is
ABOUT_LENGTH = re.compile(r"threshold|[a-z]+-N\d+-H\d+-D\d+-Dv\d+-")  # cases of the suite threshold and of bench_sel_triton
TRITON = next(name for name, backend in backends().items() if backend.sets_min_length)


class Pair(NamedTuple):
    """Both sides of one case and direction."""

    triton: Row
    packed: Row

    @property
    def length(self) -> int:
        """Return the keys that a row selects."""
        return length_of(self.triton["case"], self.triton["n"], self.triton["block"])

    @property
    def gain(self) -> float:
        """Return the speedup of the medians."""
        return float(self.packed["ms_median"] / self.triton["ms_median"])

    @property
    def sure_gain(self) -> float:
        """Return the least speedup that the spreads allow."""
        return faster_by(self.triton, self.packed)


class Threshold(NamedTuple):
    """Hold the threshold of one direction. `length` is None if no measured L is fast enough."""

    direction: str
    length: int | None
    undecided: tuple[int, ...]  # measured lengths that the medians alone would let through
    pairs: tuple[Pair, ...]
    margin: float

    @property
    def lengths(self) -> list[int]:
        """Return the measured lengths."""
        return sorted({pair.length for pair in self.pairs})

    @property
    def closest(self) -> Pair:
        """Return the pair with the least sure gain at the threshold, or at the longest L without a threshold."""
        length = self.lengths[-1] if self.length is None else self.length
        return min((pair for pair in self.pairs if pair.length == length), key=lambda pair: pair.sure_gain)

    @property
    def slowest(self) -> Pair | None:
        """Return the pair with the least gain of the medians from the threshold on."""
        length = self.length
        return None if length is None else min((pair for pair in self.pairs if pair.length >= length), key=lambda pair: pair.gain)


def faster_by(fast: Row, slow: Row) -> float:
    """Return the least speedup that the spreads allow: the slow side's 20th percentile over the fast side's 80th."""
    return float(slow["ms_p20"] / fast["ms_p80"])


def length_pairs(rows: Iterable[Row], triton: str = TRITON) -> list[Pair]:
    """Return both sides of every case of the threshold suite, or of bench_sel_triton, in every direction.

    Of two rows of the same thing the later one counts; rows without a time, and those of several streams, count for
    nothing.
    """
    sides: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in store.measured(rows):
        if is_about_length(row) and row["backend"] in (triton, PACKED):
            sides.setdefault((row["direction"], row["case"], row.get("dtype")), {})[row["backend"]] = row
    return [Pair(both[triton], both[PACKED]) for both in sides.values() if len(both) == 2]


def thresholds(rows: Iterable[Row], margin: float = MARGIN, triton: str = TRITON) -> list[Threshold]:
    """Return the threshold of every direction that was measured."""
    if not margin > 0:
        raise ArgumentError("--margin", margin, "a number > 0", f"{MARGIN} asks that Triton be that many times faster")
    allowed = [name for name in backends() if name != PACKED]
    if triton not in allowed:
        raise ArgumentError("--backend", repr(triton), ", ".join(allowed), "pass one of these, or leave it out")
    pairs, found = length_pairs(rows, triton), []
    for direction in WAYS:
        some = [pair for pair in pairs if pair.triton["direction"] == direction]
        if some:
            sure = first_length(some, lambda pair: pair.sure_gain >= margin and pair.gain >= NO_LOSS)
            by_medians = first_length(some, lambda pair: pair.gain >= max(margin, NO_LOSS))
            doubtful = {pair.length for pair in some if by_medians is not None and pair.length >= by_medians}
            below = tuple(sorted(length for length in doubtful if sure is None or length < sure))
            found.append(Threshold(direction, sure, below, tuple(some), margin))
    return found


def first_length(pairs: Sequence[Pair], holds: Callable[[Pair], bool]) -> int | None:
    """Return the smallest length from which on it holds for every pair."""
    lengths = sorted({pair.length for pair in pairs})
    return next((length for length in lengths if all(holds(pair) for pair in pairs if pair.length >= length)), None)


def sentence(threshold: Threshold) -> str:
    """Return in words what a direction's rows say, with both sides' medians and spreads in the closest case."""
    pair, margin = threshold.closest, threshold.margin
    compared = f"{threshold.direction}: {pair.triton['backend']}"
    shown = " against ".join(f"{row['backend']} {row['ms_median']} ms ({row['ms_p20']} to {row['ms_p80']})" for row in pair)
    case = f"closest there, {pair.triton['case']}: {shown}"
    if threshold.length is not None:
        least = ", the least measured" if threshold.length == threshold.lengths[0] else ""
        doubt = f", undecided at L = {', '.join(map(str, threshold.undecided))}" if threshold.undecided else ""
        return f"{compared} at least {margin}x faster than {PACKED} in every case from L = {threshold.length}{least}{doubt}; {case}"
    if threshold.undecided:
        return f"{compared} undecided, the spreads allow less than {margin}x where the medians reach it; at the longest L, {case}"
    return f"{compared} is never {margin}x faster than {PACKED} up to L = {threshold.lengths[-1]}; {case}"


def profile(rows: Sequence[Row], found: Sequence[Threshold], source: str) -> str:
    """Return a configuration file with the thresholds by direction, for NSA_SEL_CONFIG; it leaves out directions without
    one.
    """
    by_way = {WAYS[each.direction]: each.length for each in found if each.length is not None}
    provenance = f"{'; '.join(map(sentence, found))}; {source}, {markdown.environment(store.measured(rows)[0])}"
    runtime = {"sel_triton_min_L": by_way} if by_way else {}
    return yaml.safe_dump({"provenance": provenance, "runtime": runtime}, sort_keys=False, width=140)


def decided(rows: Sequence[Row], margin: float = MARGIN, triton: str = TRITON) -> list[Threshold]:
    """Return `thresholds`. Raises ArgumentError if no case has both sides, or rows come from several devices."""
    devices = sorted({str(row.get("device")) for row in store.measured(rows)})
    if len(devices) > 1:
        raise ArgumentError("ROWS", f"{len(rows)} rows from {' and '.join(devices)}", "rows of one device", "pass its files alone")
    found = thresholds(rows, margin, triton)
    if not found:
        value = f"{len(rows)} rows, in which no case has both {triton} and {PACKED}"
        allowed = f"rows of both on the same cases of `nsa-sel bench`, which times {triton} on a GPU alone"
        raise ArgumentError("ROWS", value, allowed, "measure on a GPU: nsa-sel bench")
    return found


def report(rows_by_part: Mapping[str, Sequence[Row]], margin: float = MARGIN, triton: str = TRITON) -> str:
    """Return in Markdown the threshold over all parts, then what each part alone says, with the pairs behind it."""
    every = [row for rows in rows_by_part.values() for row in rows]
    found, timed = decided(every, margin, triton), store.measured(every)
    values = "; ".join(f"{each.direction}: {each.length or 'the default stays'}" for each in found)
    verdicts = []
    for threshold in found:
        closest, slowest = threshold.closest, threshold.slowest
        times = [f"{markdown.ms(row, 4)} ({markdown.spread(row, 4)})" for row in closest]
        length = threshold.length or ("undecided" if threshold.undecided else "none")
        undecided = ", ".join(map(str, threshold.undecided)) or "-"
        gains = factor(closest.sure_gain), factor(slowest and slowest.gain)
        verdicts.append((threshold.direction, length, undecided, len(threshold.pairs), closest.triton["case"], *times, *gains))
    headers = ["direction", "min L", "undecided L", "cases", "closest case there", "its ms", "packed, ms", "sure gain"]
    lines = [
        f"# From which L {triton} pays",
        f"{markdown.environment(timed[0])}. {len(timed)} rows with a time, {len(every) - len(timed)} cases out of memory.",
        f"**`sel_triton_min_L`, {values}.** In each direction, {PACKED}'s 20th percentile over {triton}'s 80th must be {margin} or more in"
        f" every case of L or more keys a row. Below it {PACKED} runs; from it on no case may be over {REGRESSION:.0%} slower than that.",
        markdown.table([*headers, "least gain from there on"], verdicts),
    ]
    for name, rows in rows_by_part.items():
        alone = thresholds(rows, margin, triton)
        lines += [f"## {name}", *map(by_length, alone)] if alone else [f"## {name}", f"No case with both {triton} and {PACKED}."]
    return markdown.with_note("\n\n".join(lines)) + "\n"


def by_length(threshold: Threshold) -> str:
    """Return gains of one direction by L: the least and the median of the medians' gains, and the least that the spreads
    allow.
    """
    lines = []
    for length in threshold.lengths:
        some = [pair for pair in threshold.pairs if pair.length == length]
        gains = [pair.gain for pair in some]
        state = "undecided" if length in threshold.undecided else "Triton" if length >= (threshold.length or length + 1) else "packed"
        figures = min(gains), median(gains), min(pair.sure_gain for pair in some)
        lines.append((threshold.direction, length, len(some), *map(factor, figures), state))
    return markdown.table(["direction", "L", "cases", "least gain", "median gain", "least sure gain", "runs"], lines)


def main(
    rows: Annotated[list[Path], typer.Argument(metavar="ROWS", help="Rows of `nsa-sel bench`: .jsonl or .csv.")],
    margin: Annotated[float, typer.Option(help="How much faster than packed SDPA Triton must be.")] = MARGIN,
    backend: Annotated[str, typer.Option(help="The Triton backend that is compared.")] = TRITON,
    out: Annotated[Path | None, typer.Option(help="Markdown file with the evidence; without it nothing is written.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with the thresholds, for NSA_SEL_CONFIG.")] = None,
) -> None:
    """From which L on Triton pays on this GPU, by evidence: sel_triton_min_L for each direction, or undecided."""
    written = {option: path for option, path in (("--out", out), ("--config", config)) if path is not None}
    for option, path in written.items():
        output_file(option, path)
    read = [row for file in rows for row in (from_csv(file) if file.suffix == ".csv" else store.read(file))]
    found = decided(read, margin, backend)
    if out is not None:
        store.write_whole(out, report(parts(read), margin, backend))
    if config is not None:
        store.write_whole(config, profile(read, found, ", ".join(file.name for file in rows)))
    for each in found:
        echo(sentence(each))
    if written:
        echo(f"written: {', '.join(map(str, written.values()))}")


def is_about_length(row: Row) -> bool:
    """Return True for a row of the threshold suite, or of the matrix on a single stream."""
    return ABOUT_LENGTH.match(str(row["case"])) is not None and row.get("streams", 1) in (1, None)


if __name__ == "__main__":
    program(main)
