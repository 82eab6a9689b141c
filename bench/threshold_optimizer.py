"""The one rule for `sel_triton_min_L`: the smallest L from which Triton is ahead of packed SDPA by the margin, by
evidence.

    python -m nsa_sel.bench.threshold_optimizer rows.jsonl --out threshold.yaml

Of every measured case with L or more keys a row, in each direction: packed SDPA's 20th percentile over Triton's 80th
must reach the margin. Below the threshold packed SDPA runs, so that nothing there can be slower than it; from it on, no
case may be more than `REGRESSION` slower. Where medians alone would allow a smaller L, spreads overlap too much to
tell: those lengths are undecided.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import yaml

from nsa_sel.bench.core import store
from nsa_sel.bench.core.cases import length_of
from nsa_sel.bench.core.command_line import echo, program
from nsa_sel.bench.core.contenders import PACKED
from nsa_sel.bench.core.markdown import environment
from nsa_sel.bench.core.store import WAYS, Row
from nsa_sel.core.registry import backends
from nsa_sel.errors import ArgumentError

MARGIN = 1.2  # Triton must be this much faster than packed SDPA from the threshold on (REQUIREMENTS 9)
REGRESSION = 0.10  # by which no case from the threshold on may be slower than packed SDPA, whatever the margin
NO_LOSS = 1 / (1 + REGRESSION)  # the gain that this is
TRITON = next(name for name, backend in backends().items() if backend.sets_min_length)


class Pair(NamedTuple):
    """Both sides of one case and direction."""

    triton: Row
    packed: Row

    @property
    def length(self) -> int:
        """Keys that a row selects."""
        return length_of(self.triton["case"], self.triton["n"], self.triton["block"])

    @property
    def gain(self) -> float:
        """The speed-up of the medians."""
        return float(self.packed["ms_median"] / self.triton["ms_median"])

    @property
    def sure_gain(self) -> float:
        """The least speed-up that the spreads allow."""
        return faster_by(self.triton, self.packed)


class Threshold(NamedTuple):
    """What the rows say of one direction. `length` is None where no L will do."""

    direction: str
    length: int | None
    undecided: tuple[int, ...]  # measured lengths that the medians alone would let through
    pairs: tuple[Pair, ...]
    margin: float

    @property
    def lengths(self) -> list[int]:
        """The measured ones."""
        return sorted({pair.length for pair in self.pairs})

    @property
    def closest(self) -> Pair:
        """Of the pairs at the threshold, or of the longest L where there is none, that with the least sure gain."""
        length = self.lengths[-1] if self.length is None else self.length
        return min((pair for pair in self.pairs if pair.length == length), key=lambda pair: pair.sure_gain)

    @property
    def slowest(self) -> Pair | None:
        """Of all pairs from the threshold on, that with the least gain of the medians."""
        length = self.length
        return None if length is None else min((pair for pair in self.pairs if pair.length >= length), key=lambda pair: pair.gain)


def faster_by(fast: Row, slow: Row) -> float:
    """The least speed-up that the spreads allow: the slow side's 20th percentile over the fast side's 80th."""
    return float(slow["ms_p20"] / fast["ms_p80"])


def length_pairs(rows: Iterable[Row], triton: str = TRITON) -> list[Pair]:
    """Both sides of every case of the threshold suite, or of bench_sel_triton, in every direction.

    Of two rows of the same thing the later one counts; rows without a time, and those of several streams, count for
    nothing.
    """
    sides: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in store.measured(rows):
        if is_about_length(row) and row["backend"] in (triton, PACKED):
            sides.setdefault((row["direction"], row["case"], row.get("dtype")), {})[row["backend"]] = row
    return [Pair(both[triton], both[PACKED]) for both in sides.values() if len(both) == 2]


def sure_length(pairs: Sequence[Pair], margin: float) -> int | None:
    """The rule: the smallest measured L from which on every pair's spreads allow the margin, and none is slower by
    `REGRESSION`.
    """
    return _first_length(pairs, lambda pair: pair.sure_gain >= margin and pair.gain >= NO_LOSS)


def thresholds(rows: Iterable[Row], margin: float = MARGIN, triton: str = TRITON) -> list[Threshold]:
    """The threshold of every direction that was measured."""
    if not margin > 0:
        raise ArgumentError("--margin", margin, "a number > 0", f"{MARGIN} asks that Triton be that many times faster")
    allowed = [name for name in backends() if name != PACKED]
    if triton not in allowed:
        raise ArgumentError("--backend", repr(triton), ", ".join(allowed), "pass one of these, or leave it out")
    pairs = length_pairs(rows, triton)
    found = []
    for direction in WAYS:
        some = [pair for pair in pairs if pair.triton["direction"] == direction]
        if some:
            sure, median = sure_length(some, margin), _first_length(some, lambda pair: pair.gain >= max(margin, NO_LOSS))
            doubtful = {pair.length for pair in some if median is not None and pair.length >= median}
            below = tuple(sorted(length for length in doubtful if sure is None or length < sure))
            found.append(Threshold(direction, sure, below, tuple(some), margin))
    return found


def sentence(threshold: Threshold) -> str:
    """What a direction's rows say, with both sides' medians and spreads in the closest case."""
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


def profile(rows: Sequence[Row], found: Sequence[Threshold], source: str) -> dict[str, Any]:
    """A configuration file with the thresholds by direction, for NSA_SEL_CONFIG; it leaves out directions without one."""
    by_way = {WAYS[each.direction]: each.length for each in found if each.length is not None}
    one_value = len(by_way) == len(WAYS) and len(set(by_way.values())) == 1
    provenance = f"{'; '.join(map(sentence, found))}; {source}, {environment(store.measured(rows)[0])}"
    runtime = {"sel_triton_min_L": by_way["forward"] if one_value else by_way} if by_way else {}
    return {"provenance": provenance, "runtime": runtime}


def as_yaml(profile: dict[str, Any]) -> str:
    """The file's text."""
    return yaml.safe_dump(profile, sort_keys=False, width=140)


def decided(rows: Sequence[Row], margin: float, triton: str = TRITON) -> list[Threshold]:
    """`thresholds`, or ArgumentError where no case has both sides, or rows come from several devices."""
    devices = sorted({str(row.get("device")) for row in store.measured(rows)})
    if len(devices) > 1:
        raise ArgumentError("ROWS", f"{len(rows)} rows from {' and '.join(devices)}", "rows of one device", "pass its files alone")
    found = thresholds(rows, margin, triton)
    if not found:
        value = f"{len(rows)} rows, in which no case has both {triton} and {PACKED}"
        allowed = f"rows of both on the same cases of `nsa-sel bench`, which times {triton} on a GPU alone"
        raise ArgumentError("ROWS", value, allowed, "measure on a GPU: nsa-sel bench")
    return found


def main(
    rows: Annotated[list[Path], typer.Argument(help="JSON lines of bench_sel_triton, or of the suite threshold")],
    margin: Annotated[float, typer.Option(help="how much faster Triton must be")] = MARGIN,
    backend: Annotated[str, typer.Option(help="the Triton backend that is compared")] = TRITON,
    out: Annotated[Path | None, typer.Option(help="YAML file for NSA_SEL_CONFIG")] = None,
) -> None:
    """Say from which L on Triton pays in each direction, and write it as a configuration file."""
    every = [row for file in rows for row in store.read(file)]
    found = decided(every, margin, backend)
    for threshold in found:
        echo(sentence(threshold))
    if out is not None:
        store.write_whole(out, as_yaml(profile(every, found, ", ".join(file.name for file in rows))))
        echo(f"{out} written")


def _first_length(pairs: Sequence[Pair], holds: Callable[[Pair], bool]) -> int | None:
    """The smallest length from which on it holds of every pair."""
    lengths = sorted({pair.length for pair in pairs})
    return next((length for length in lengths if all(holds(pair) for pair in pairs if pair.length >= length)), None)


def of_matrix(row: Row) -> bool:
    """Whether a row is of the matrix of bench_sel_triton, decoding or not."""
    return re.match(r"[a-z]+-N\d+-H\d+-D\d+-Dv\d+-", str(row["case"])) is not None


def is_about_length(row: Row) -> bool:
    """Whether a row is of the threshold suite, or of the matrix on a single stream."""
    return (of_matrix(row) or str(row["case"]).startswith("threshold")) and row.get("streams", 1) in (1, None)


if __name__ == "__main__":
    program(main)
