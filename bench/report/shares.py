"""What the README's first figures derive from: a layer's attention beside dense attention, and what a model trains at with each.

Of the committed rows, or of rows that were just measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nsa_sel.bench.core import store
from nsa_sel.bench.core.environment import ROOT
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.report import losses, training

PARTS_FILE = ROOT / "bench/results/h200/profiles/layer_parts.jsonl"
PARTS = {"choose": "compressed keys, choosing", "select": "selected blocks", "window": "window", "gate": "gated sum"}  # bottom to top
HEADS = 16  # of a group
Stack = tuple[int, dict[str, float], float]  # a length; of each part, and of the layer, the share of dense attention's time in percent
Rate = tuple[int, float, float]  # a length; tokens/s with dense attention and with NSAttention
Parts = dict[tuple[str, int], list[Row]]  # by part and length: the rows of the forward and of the backward pass


def timed(rows: Iterable[Row]) -> Parts:
    """The parts of which both directions were measured. The last rows count."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        if row["h"] == HEADS and row["direction"] in ("fwd", "bwd"):
            found.setdefault((row["part"], row["S"]), {})[row["direction"]] = row
    return {key: list(both.values()) for key, both in found.items() if len(both) == 2}


def of_part(found: Parts, part: str, S: int) -> list[Row] | None:
    """A part's rows: those of text, where there is one of this length, and of random inputs beyond."""
    return found.get((f"{part} of text", S), found.get((part, S)))


def stacks(rows: Sequence[Row]) -> list[Stack]:
    """Of each length at which all parts and dense attention were measured: forward and backward together."""
    found = timed(rows)
    shares = list[Stack]()
    for S in sorted({S for _, S in found}):
        of_all = [of_part(found, part, S) for part in ("dense", *PARTS, "layer")]
        times = [sum(row["ms_median"] for row in both) for both in of_all if both is not None]
        if len(times) == len(of_all):
            *parts, whole = (100 * ms / times[0] for ms in times[1:])
            shares.append((S, dict(zip(PARTS, parts, strict=True)), whole))
    return shares


def committed() -> tuple[list[Stack], list[Rate]]:
    """What the picture shows, from the committed rows."""
    rates = [(context, losses.speed(dense), losses.speed(nsa)) for context, dense, nsa in training.pairs("speed")]
    return stacks(store.read(PARTS_FILE)), rates
