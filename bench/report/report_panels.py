"""The report's panels on speed: each takes rows of one device and gives text, drawings, tables, or one line that says what is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.markdown import MARK, factor, ms
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.report import report_figures, roofline, summary
from nsa_sel.bench.report.report_figures import Facet, Figure, Interval, Line, Mark, Slope, role_of, short
from nsa_sel.bench.report.report_page import Panel, Table, of_markdown
from nsa_sel.bench.report.roofline import Peaks, Point
from nsa_sel.bench.report.summary import (
    DENSE,
    OURS,
    PACKED,
    Curve,
    break_even,
    curves,
    from_length,
    indexed,
    ours,
    ours_in,
    speed_up,
)

TITLES = {"fwd": "Forward", "bwd": "Backward", "fwd+bwd": "Forward + backward, one call", "decode": "Decode"}
WORDS = {DENSE: "dense attention", PACKED: "packed SDPA"}
KINDS = {"real": "text", "random": "random"}


def thousands(S: float) -> str:
    return f"{S / 1024:.0f}k" if S >= 1024 else f"{S:.0f}"


def plain(x: float) -> str:
    return f"{x:.0f}"


def key(backends: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The colours of some backends."""
    return tuple((role_of(backend), backend) for backend in backends)


def way_name(direction: str) -> str:
    """A direction as a part of a name."""
    return direction.replace("+", "-")


# Where it wins


def case_groups() -> dict[str, str]:
    """Case name -> what kind of cases it belongs to; a case of several kinds to the first."""
    groups: dict[str, list[Case]] = {
        "text and random, 8k and 32k": cases.performance_cases(),
        "decode, long caches": cases.decode_cases(),
        "1024 rows of 8k keys, by L": [case for case in cases.threshold_cases() if case.S > 1],
        "64 sequences decoded, by L": [case for case in cases.threshold_cases() if case.S == 1],
        "other lengths, 1k to 128k": [*cases.breakeven_cases(), *cases.scaling_cases()],
        "every layer of the model": [case for case in cases.layer_cases() if case.B == 1],
        "four layers as a batch": [case for case in cases.layer_cases() if case.B > 1],
    }
    names: dict[str, str] = {}
    for group, members in groups.items():
        for case in members:
            names.setdefault(case.case, group)
    return names


def verdict(rows: Sequence[Row]) -> Panel:
    """Where ours is ahead of dense attention and where not, by kind of case, direction and h."""
    panel = Panel("verdict", "Where selection beats dense attention, and where it does not")
    known = case_groups()
    order = [*dict.fromkeys(known.values()), "other cases"]
    groups: dict[tuple[int, int, int], list[tuple[float, str]]] = {}
    for (name, direction), found in indexed(rows).items():
        best, gain = ours(found), speed_up(found)
        if best is not None and gain is not None and direction in TITLES:
            place = order.index(known.get(name, "other cases")), list(TITLES).index(direction), -best["h"]
            groups.setdefault(place, []).append((gain, name))
    if not groups:
        return panel._replace(
            missing=f"No case has rows of both ours ({', '.join(OURS)}) and {DENSE}: nothing to compare with dense attention."
        )
    lines = []
    for (group, way, h), members in sorted(groups.items()):
        (least, where), (most, _), middle = min(members), max(members), median(gain for gain, _ in members)
        ahead = sum(gain > 1 for gain, _ in members)
        lines.append((order[group], list(TITLES)[way], -h, len(members), ahead, *map(factor, (least, middle, most)), where))
    headers = ["cases", "direction", "h", "measured", "ours faster", "least", "median", "most", "least in"]
    return panel._replace(
        text="Dense attention reads every key, ours those that rows select: where texts are short, heads a group few, or most keys selected"
        " anyway, dense attention may be the faster one.",
        tables=(Table("Ours against dense attention", headers, lines, 2),),
    )


def speedup_by_S(rows: Sequence[Row], over: str) -> Panel:
    """How many times faster ours is than another backend, over the length of the text."""
    panel = Panel({DENSE: "speedup", PACKED: "speedup-packed"}[over], f"Speed-up over {WORDS[over]}, by length")
    found = curves(rows, over)
    if not found:
        return panel._replace(missing=f"No length has rows of ours and {over}: bench_selection's suites performance and breakeven have.")
    facets = []
    for direction in dict.fromkeys(curve.direction for curve in found):
        some = [curve for curve in found if curve.direction == direction]
        lines = [_line(curve) for curve in some]
        label = f"times faster than {WORDS[over]}"
        draw = report_figures.gains(TITLES[direction], "tokens S", label, lines, 1, f"{WORDS[over]} is faster", thousands)
        facets.append(Facet(way_name(direction), f"{TITLES[direction]}, {label}: {'; '.join(map(_ends, some))}.", draw))
    cells = [
        (curve.direction, KINDS[curve.kind], curve.h, thousands(S), f"{factor(gain)}{MARK * mark}", backend)
        for curve in found
        for S, gain, backend, mark in zip(curve.lengths, curve.gains, curve.backends, curve.scattered, strict=True)
    ]
    return panel._replace(
        text="Text: the first S rows of what SmolLM2-135M selects in 8k tokens; random selections share few blocks. 4 groups of h heads,"
        " 16 blocks of 64 keys a row. A point's colour is the fastest backend of ours.",
        figure=Figure(panel.name, tuple(facets), key(ours_in(rows)), ("text", "random selections")),
        tables=(Table(f"Ours against {WORDS[over]}", ["direction", "selection", "h", "S", "faster by", "with"], cells, 2, folded=True),),
    )


def _line(curve: Curve) -> Line:
    text = curve.kind == "real"
    roles = [role_of(backend) for backend in curve.backends]
    return Line(curve.lengths, curve.gains, roles, f"h {curve.h}", dashed=not text, at_start=text)


def _ends(curve: Curve) -> str:
    """A curve in words."""
    (first, *_, last) = zip((*curve.lengths, curve.lengths[-1]), (*curve.gains, curve.gains[-1]), strict=True)
    return (
        f"{KINDS[curve.kind]}, h {curve.h}, from {factor(first[1])} at {thousands(first[0])} to {factor(last[1])} at {thousands(last[0])}"
    )


def speedup_by_L(rows: Sequence[Row]) -> Panel:
    """How many times faster ours is, over the number of keys that a row selects."""
    panel = Panel("speedup-by-L", "Speed-up by selected keys")
    facets, cells, partners = [], [], []
    for direction, title in (("fwd", "1024 rows of 8k keys, forward"), ("bwd", "The same, backward"), ("decode", "64 sequences decoded")):
        lines = []
        for over in (PACKED, DENSE):
            for D in (64, 128):
                gains = by_L(rows, direction, D, over)
                if gains:
                    partners.append(over)
                    words = f"{WORDS[over].split()[0]}, D {D}"
                    lines.append(Line(list(gains), list(gains.values()), [over] * len(gains), words, over, dashed=D == 64))
                    cells += [(direction, WORDS[over], D, L, factor(gain)) for L, gain in gains.items()]
        if lines:
            draw = report_figures.gains(title, "selected keys a row, L", "times faster", lines, 1, "the other is faster", plain)
            alt = "; ".join(
                f"than {line.label}, {', '.join(f'{factor(y)} at {x}' for x, y in zip(line.x, line.y, strict=True))}" for line in lines
            )
            facets.append(Facet(direction, f"{title}, times faster by L: {alt}.", draw))
    missing = [
        f"No case by L has rows of ours and {over}: bench_selection's suite threshold has." for over in WORDS if over not in partners
    ]
    if not facets:
        return panel._replace(missing=" ".join(missing))
    return panel._replace(
        text="Random selections, 2 groups of 4 heads. With half of all keys selected (L 4096 of 8192) selection has little left to spare.",
        figure=Figure(
            panel.name, tuple(facets), tuple((over, f"over {WORDS[over]}") for over in dict.fromkeys(partners)), ("D 128", "D 64")
        ),
        tables=(Table("Speed-up by L", ["direction", "against", "D", "L", "faster by"], cells, 2, folded=True),),
        missing=" ".join(missing),
    )


def by_L(rows: Sequence[Row], direction: str, D: int, over: str) -> dict[int, float]:
    """L -> how many times faster ours is, over the threshold cases of one direction and head dimension."""
    table = indexed(rows)
    found = {case.n * case.block: speed_up(table.get((case.case, direction), {}), over) for case in cases.threshold_cases() if case.Dk == D
             if (case.S == 1) == (direction == "decode")}  # fmt: skip
    return {L: gain for L, gain in found.items() if gain is not None}


def breakeven(rows: Sequence[Row]) -> Panel:
    """From which length on ours is faster than dense attention, by h."""
    panel = Panel("break-even", "Where selection starts to pay against dense attention")
    found = curves(rows)
    if not found:
        return panel._replace(missing=f"No length has rows of ours and {DENSE}: bench_selection's suite breakeven has.")
    span = min(curve.lengths[0] for curve in found), max(curve.lengths[-1] for curve in found)
    facets = []
    for direction in dict.fromkeys(curve.direction for curve in found):
        intervals = [_interval(curve) for curve in found if curve.direction == direction]
        draw = report_figures.lengths(TITLES[direction], "faster from so many tokens on", intervals, thousands, span)
        alt = "; ".join(f"{interval.row}, {interval.words}" for interval in intervals)
        facets.append(Facet(way_name(direction), f"{TITLES[direction]}, faster than dense attention from so many tokens on: {alt}.", draw))
    return panel._replace(
        text="From which length on every measured length is faster; between two lengths, by a straight line over logarithms. An arrow: it"
        " lies beyond the lengths that were measured, which for text end at 8k and for random selections begin there.",
        figure=Figure(panel.name, tuple(facets)),
        tables=(of_markdown(summary.breakeven_table(rows), "Break-even", 2, folded=True),),
    )


def _interval(curve: Curve) -> Interval:
    S = break_even(curve.lengths, curve.gains)
    side, at = (-1, curve.lengths[0]) if S == 0 else (1, curve.lengths[-1]) if S == math.inf else (0, S)
    role = "ink" if curve.kind == "real" else "muted"
    return Interval(f"h {curve.h}", at, side, role, f"{KINDS[curve.kind]}: {from_length(S, curve.lengths)}")


def times(rows: Sequence[Row]) -> Panel:
    """Milliseconds of every backend, on the cases of the documents' table; where there are none of those, on all."""
    caption = "Milliseconds a whole call, medians"
    made = of_markdown(summary.performance_table(rows), caption, 2)
    if not made.lines:
        table, backends = indexed(rows), list(dict.fromkeys(row["backend"] for row in rows))
        cells = [(*key, *(ms(found.get(backend)) for backend in backends)) for key, found in table.items()]
        return Panel("times", "Times", tables=(Table(caption, ["case", "direction", *backends], cells, 2),))
    return Panel("times", "Times", "Factors compare the fastest of ours with dense attention and with packed SDPA.", tables=(made,))


# What the device could do


def roof(rows: Sequence[Row], peaks: Peaks | None) -> Panel:
    """Every kernel under the roof of the device."""
    panel = Panel("roofline", "Roofline")
    points = roofline.points(rows, [case.case for case in (*cases.performance_cases(), *cases.decode_cases())])
    if not points:
        counted = ", ".join(roofline.COUNTED)
        return panel._replace(missing=f"No row of {counted} on the cases of bench_selection's suites performance and decode.")
    facets = []
    for direction in (way for way in roofline.DIRECTIONS if any(point.direction == way for point in points)):
        facets.append(_under_the_roof(direction, [point for point in points if point.direction == direction], peaks))
    headers = ["case", "direction", "kernel", "ms", "GFLOP", "least MB", "moved MB", "FLOP a byte", "TFLOP/s", "TB/s moved"]
    if peaks:
        headers += ["least ms", "of the roof"]
        roofs = f"Roofs: {peaks.copy_tbs:g} TB/s of a copy, {peaks.matmul_tflops:g} TFLOP/s of a bf16 product ({peaks.source})."
    else:
        roofs = "This device's roofs are left out: no figures of it are on record, and none were given (--copy-tbs, --matmul-tflops)."
    caption = "Counted work, and what was reached"
    if peaks:
        caption += "; least ms: what the operations, or the least bytes, take at the roofs, whichever is longer"
    return panel._replace(
        text=f"{roofs} Operations are those that the result needs. Bytes are what the kernel's programs load and store, counted from"
        " sizes and from how many blocks neighbouring rows share; what lies above the memory line comes from the L2 cache (dashed: the most"
        " that a kernel moves here). Circles: text;"
        " squares: random selections. Dense attention and packed SDPA are not on it: what their kernels load is not counted here.",
        figure=Figure(panel.name, tuple(facets), key([name for name in roofline.COUNTED if name in ours_in(rows)])),
        tables=(Table(caption, headers, [_cells(point, peaks) for point in points], 3, folded=True),),
    )


def _under_the_roof(direction: str, points: Sequence[Point], peaks: Peaks | None) -> Facet:
    fastest, best = max(points, key=lambda point: point.moved_tbs), max(points, key=lambda point: point.tflops)
    slopes = [Slope(peaks.copy_tbs, f"memory, {peaks.copy_tbs:g} TB/s", False)] if peaks else []
    if not peaks or fastest.moved_tbs > peaks.copy_tbs:
        slopes.append(Slope(fastest.moved_tbs, f"most moved here, {fastest.moved_tbs:.3g} TB/s", True))
    # Points of one backend and h at about one intensity share a label, beside the highest.
    highest = {(p.backend, p.h, round(2 * math.log(p.intensity))): p for p in sorted(points, key=lambda point: point.tflops)}
    labelled = set(highest.values())
    marks = [
        Mark(
            p.intensity,
            p.tflops,
            role_of(p.backend),
            f"h {p.h}" if p in labelled else "",
            shape="o" if p.case.startswith("real") else "s",
            left=p.backend == "triton-group",
        )
        for p in points
    ]
    alt = (
        f"{TITLES[direction]}, {len(points)} kernels and cases under the roof. Most operations: {best.backend} on {best.case},"
        f" {best.tflops:.3g} TFLOP/s at {best.intensity:.3g} operations a byte. Most bytes: {fastest.backend} on {fastest.case},"
        f" {fastest.moved_tbs:.3g} TB/s."
    )
    return Facet(direction, alt, report_figures.roofline(TITLES[direction], marks, slopes, peaks.matmul_tflops if peaks else None))


def _cells(point: Point, peaks: Peaks | None) -> tuple[str, ...]:
    work = point.work
    figures = (
        point.ms,
        work.operations / 1e9,
        work.least_bytes / 1e6,
        work.moved_bytes / 1e6,
        point.intensity,
        point.tflops,
        point.moved_tbs,
    )
    cells = (point.case, point.direction, short(point.backend), *(f"{figure:.3g}" for figure in figures))
    return (*cells, f"{point.least_ms(peaks):.3g}", f"{point.least_ms(peaks) / point.ms:.1%}") if peaks else cells
