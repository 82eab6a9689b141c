"""The report's panels on speed: each takes rows of one device and gives text, drawings, tables, or one line that says what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.contenders import DENSE, PACKED
from nsa_sel.bench.core.markdown import factor, ms, table
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.report import figures, roofline, summary
from nsa_sel.bench.report.document import Panel, Table, table_of_texts
from nsa_sel.bench.report.figures import Facet, Figure, Line, role_of, short
from nsa_sel.bench.report.roofline import Peaks, Point
from nsa_sel.bench.report.summary import OURS, Curve, break_even, curves, from_length, indexed, ours_in, speed_up

TITLES = {"fwd": "Forward", "bwd": "Backward", "fwd+bwd": "Forward + backward, one call", "decode": "Decode"}
WORDS = {DENSE: "dense attention", PACKED: "packed SDPA"}
KINDS = {"real": "text", "random": "random"}


def thousands(S: float) -> str:
    return f"{S / 1024:.0f}k" if S >= 1024 else f"{S:.0f}"


def plain(x: float) -> str:
    return f"{x:.0f}"


def faster_in(rows: Sequence[Row], over: str) -> str:
    """In how many cases ours is ahead of another backend, as a sentence."""
    gains = [gain for of_case in indexed(rows).values() if (gain := speed_up(of_case, over)) is not None]
    if not gains:
        return f"No case has rows of ours and of {WORDS[over]}."
    return f"Ours is faster than {WORDS[over]} in {sum(gain > 1 for gain in gains)} of {len(gains)} measured pairs of case and direction."


def pays_from(rows: Sequence[Row]) -> str:
    """From which length on ours is ahead of dense attention when training on text, as a sentence."""
    found = [curve for curve in curves(rows) if (curve.direction, curve.kind) == ("fwd+bwd", "real")]
    if not found:
        return "Where selection starts to pay in training was not measured."
    lengths = [f"{from_length(break_even(curve.lengths, curve.gains), curve.lengths)} tokens at h {curve.h}" for curve in found]
    return f"Forward and backward over text, ours is faster than dense attention from these lengths on: {', '.join(lengths)}."


def verdict(rows: Sequence[Row]) -> Panel:
    """Where ours is ahead of dense attention and where not, by kind of case and direction."""
    panel = Panel("verdict", "Where selection beats dense attention, and where it does not")
    made = summary.gains(rows)
    if made.count("\n") == 1:
        missing = f"No case of the suites has rows of both ours ({', '.join(OURS)}) and {DENSE}: nothing to compare with dense attention."
        return panel._replace(missing=missing)
    return panel._replace(
        text="Dense attention reads every key, ours only those that rows select. Dense attention may be faster where texts are short (next"
        " drawings), groups have few heads, or rows select most keys.",
        tables=(Table("Ours against dense attention, the least to the most", made),),
    )


def speedup(rows: Sequence[Row]) -> Panel:
    """How many times faster ours is than dense attention over the length of the text, and from which length on it is."""
    panel = Panel("speedup", "Speed-up over dense attention, by length")
    found = curves(rows)
    if not found:
        return panel._replace(missing=f"No length has rows of ours and {DENSE}: the suites performance and breakeven have.")
    facets, label = [], "times faster than dense attention"
    caption = "The length from which on ours is faster, between lengths interpolated by logarithms"
    for direction in dict.fromkeys(curve.direction for curve in found):
        some = [curve for curve in found if curve.direction == direction]
        draw = figures.gains(TITLES[direction], "tokens S", label, list(map(_line, some)), 1, "dense attention is faster", thousands)
        facets.append(Facet(f"{TITLES[direction]}, {label}: {'; '.join(map(_ends, some))}.", draw))
    return panel._replace(
        text=f"Text: the first S rows of what SmolLM2-135M selects in 8k tokens{_longer(found)}; random selections share few blocks."
        " 4 groups of h heads, 16 blocks of 64 keys a row. A point's color is the fastest backend of ours.",
        figure=Figure(tuple(facets), tuple((role_of(backend), backend) for backend in ours_in(rows)), ("text", "random selections")),
        tables=(Table(caption, summary.breakeven_table(rows)),),
    )


def _longer(found: Sequence[Curve]) -> str:
    longest = max((curve.lengths[-1] for curve in found if curve.kind == "real"), default=0)
    return ", beyond that what models trained with NSA select" if longest > cases.REAL_ROWS else ""


def _line(curve: Curve) -> Line:
    text = curve.kind == "real"
    roles = [role_of(backend) for backend in curve.backends]
    return Line(curve.lengths, curve.gains, roles, f"h {curve.h}", dashed=not text, at_start=text)


def _ends(curve: Curve) -> str:
    """A curve in words."""
    first, last = (f"{factor(curve.gains[i])} at {thousands(curve.lengths[i])}" for i in (0, -1))
    return f"{KINDS[curve.kind]}, h {curve.h}, from {first} to {last}"


def times(rows: Sequence[Row]) -> Panel:
    """Milliseconds of every backend, on the cases of the documents' table; where there are none of those, on all."""
    caption = "Milliseconds a whole call, medians, forward / backward"
    made = summary.performance_table(rows)
    if made.count("\n") > 1:
        text = "Factors compare the fastest of ours with dense attention and with packed SDPA."
        return Panel("times", "Times", text, tables=(Table(caption, made),))
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    cells = [(*key, *(ms(found.get(backend)) for backend in backends)) for key, found in indexed(rows).items()]
    return Panel("times", "Times", tables=(Table(caption, table_of_texts(["case", "direction", *backends], cells, 2)),))


def roof(rows: Sequence[Row], peaks: Peaks | None) -> Panel:
    """What the fastest of the counted kernels reaches of the roof of the device in each case."""
    panel = Panel("roofline", "Roofline")
    points = roofline.points(rows, [case.case for case in (*cases.performance_cases(), *cases.decode_cases())])
    kinds = dict.fromkeys((point.case, point.direction) for point in points)
    fastest = [min((point for point in points if (point.case, point.direction) == kind), key=lambda point: point.ms) for kind in kinds]
    if not fastest:
        return panel._replace(missing=f"No row of {', '.join(roofline.COUNTED)} on the cases of the suites performance and decode.")
    headers = ["case", "direction", "kernel", "ms", "GFLOP", "least MB", "moved MB", "FLOP a byte", "TFLOP/s", "TB/s moved"]
    caption = f"Of {', '.join(roofline.COUNTED)} the fastest: its counted work, and what it reached"
    roofs = "This device's roofs are left out: no figures of it are on record."
    if peaks:
        headers += ["least ms", "of the roof"]
        roofs = f"Roofs: {peaks.copy_tbs:g} TB/s of a copy, {peaks.matmul_tflops:g} TFLOP/s of a bf16 product ({peaks.source})."
        caption += "; least ms: the longer of the times that the operations, and the least bytes, take at the roofs"
    return panel._replace(
        text=f"{roofs} Operations are those that the result needs. Bytes are what the kernel loads and stores, counted from"
        " sizes and from how many blocks neighboring rows share; the L2 cache serves what exceeds the memory's bandwidth. Dense attention"
        " and packed SDPA are not shown: the bytes of their kernels are not counted here.",
        tables=(Table(caption, table(headers, [_cells(point, peaks) for point in fastest], 3)),),
    )


def _cells(point: Point, peaks: Peaks | None) -> tuple[str, ...]:
    work = point.work
    sizes = point.ms, work.operations / 1e9, work.least_bytes / 1e6, work.moved_bytes / 1e6
    shown = [f"{figure:.3g}" for figure in (*sizes, point.intensity, point.tflops, point.moved_tbs)]
    if peaks:
        shown += [f"{point.least_ms(peaks):.3g}", f"{point.least_ms(peaks) / point.ms:.1%}"]
    return (point.case, point.direction, short(point.backend), *shown)
