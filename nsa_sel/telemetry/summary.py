"""`nsa-sel decisions`: what a log says. Which backends ran and why, how often each was refused, what failed, what was slow."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from nsa_sel.core.decision import Decision
from nsa_sel.errors import ArgumentError
from nsa_sel.telemetry.log import Line, read_log, torn_words
from nsa_sel.telemetry.table import table

Rows = list[dict[str, Any]]
EVENT_FIELDS: dict[str, dict[str, type]] = {  # event -> the fields that the summary needs
    "sel.backend.failed": {"backend": str, "direction": str, "error": str},
    "sel.timing": {"backend": str, "direction": str, "ms": float},
    "sel.timing.bucket": {"backend": str, "direction": str, "length": int, "rows": int, "ms": float},
    "sel.triton.kernel": {"kernel": str, "config": str, "path": str},
    "sel.triton.reads": {"backend": str, "tokens": int, "bytes": int, "rows": int, "source": str},
    "sel.reads": {"backend": str, "tokens": int, "bytes": int, "rows": int, "source": str},
    "sel.triton.bwd": {"backend": str, "flops": int, "bytes": int, "source": str},
    "sel.bwd": {"backend": str, "flops": int, "bytes": int, "source": str},
    "sel.compare": {"backend": str, "direction": str, "reference": str, "mae": float},
}
OPTIONAL_FIELDS: dict[str, type] = {"length": int, "rows": int, "tflops": float, "gbps": float}  # of the same events
TABLES = {  # part of the summary -> title
    "won": "backends that ran, and by which rule",
    "refusals": "refused",
    "failures": "failed",
    "buckets": "slowest buckets of packed SDPA",
    "passes": "passes",
    "kernels": "launches",
    "reads": "read",
    "backward": "backward, estimated work",
    "worst_mae": "compared with packed SDPA",
}
_PREDICTIONS = re.compile(r"(?<=least predicted time): .*?(?= \((?!no prediction))")


def summarise(log: Path, top: int = 10) -> dict[str, Any]:
    """The summary of a log.

    Args:
        top: how many of the slowest buckets it has.

    Returns:
        log, lines, torn_lines (numbers of the lines that were skipped), events (by name), decisions (how many), and the rows of `TABLES`:

        won: calls of one device with the same decision; `override` is what forced the backend.
        refusals: calls in which a check refused a backend; `stepped_over`: those in which it is preferred to the backend that ran.
        failures: exceptions in a backend.
        buckets, passes: times of packed SDPA's buckets of rows of one length, and of whole passes, the slowest first.
        kernels: kernel config and path -> launches.
        reads: keys that the rows of a backend's calls select, the bytes of their K and V, and the source of these numbers.
        backward: estimated work of a backend's backward passes; median rates of those that were timed.
        worst_mae: backend and direction -> the largest mean absolute error.

    Raises:
        ArgumentError: as `read_log`, for an empty log, and for an event without a field that the summary needs.
    """
    lines, torn = read_log(log)
    if not lines:
        raise ArgumentError("LOG", f"{log}, which is empty", "JSON lines of NSA_DEBUG_LOG or Decision.to_json", "mend the path")
    events: dict[str, Rows] = collections.defaultdict(list)
    for line in lines:
        fault = _fault(line)
        if fault:
            allowed = ", ".join(f"{field} ({kind.__name__})" for field, kind in EVENT_FIELDS[line.event].items())
            raise ArgumentError(f"line {line.number} of {log}", f"{line.event} {fault}", allowed, "drop the line")
        events[line.event].append(line.fields)
    decisions = [line.decision for line in lines if line.decision is not None]
    kernels = collections.Counter(f"{fields['config']} ({fields['path']})" for fields in events["sel.triton.kernel"])
    compared = _grouped(events["sel.compare"], "backend", "direction")
    return {
        "log": str(log),
        "lines": len(lines),
        "torn_lines": torn,
        "events": dict(collections.Counter(line.event for line in lines).most_common()),
        "decisions": len(decisions),
        "won": _won(decisions),
        "refusals": _refusals(decisions),
        "failures": _failures(events["sel.backend.failed"]),
        "buckets": _times(events["sel.timing.bucket"])[:top],
        "passes": _times(events["sel.timing"]),
        "kernels": dict(kernels.most_common()),
        "reads": _reads([*events["sel.triton.reads"], *events["sel.reads"]]),
        "backward": _backward([*events["sel.triton.bwd"], *events["sel.bwd"]]),
        "worst_mae": {f"{key['backend']} {key['direction']}": max(fields["mae"] for fields in group) for key, group in compared},
    }


def _fault(line: Line) -> str | None:
    """What is wrong with an event's fields."""
    needed = EVENT_FIELDS.get(line.event, {})
    lacking = [field for field in needed if field not in line.fields]
    if lacking:
        return f"without {', '.join(lacking)}"
    given = {field: kind for field, kind in OPTIONAL_FIELDS.items() if line.fields.get(field) is not None}
    for field, kind in {**given, **needed}.items() if needed else ():
        try:
            msgspec.convert(line.fields[field], kind)
        except msgspec.ValidationError as error:
            return f"whose {field} does not fit ({error})"
    return None


def _won(decisions: Iterable[Decision]) -> Rows:
    # Predicted times differ from shape to shape; without them it is one rule.
    keys = ("device", "forward", "backward", "rule", "override")
    found = collections.Counter(
        (d.device.name, d.forward, d.backward, _PREDICTIONS.sub("", d.rule), d.override.source if d.override else None) for d in decisions
    )
    return [{**dict(zip(keys, values, strict=True)), "calls": calls} for values, calls in found.most_common()]


def _refusals(decisions: Iterable[Decision]) -> Rows:
    calls: collections.Counter[tuple[str, str, str]] = collections.Counter()
    stepped_over: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for decision in decisions:
        ahead = {step.partition(": ")[0] for step in decision.steps}
        for verdict in decision.verdicts:
            for code, kind in dict.fromkeys((reason.code, reason.kind) for reason in (*verdict.forward, *verdict.backward)):
                calls[verdict.backend, code, kind] += 1
                stepped_over[verdict.backend, code, kind] += verdict.backend in ahead
    return [
        {"backend": key[0], "code": key[1], "kind": key[2], "calls": number, "stepped_over": stepped_over[key]}
        for key, number in calls.most_common()
    ]


def _grouped(events: Rows, *names: str) -> list[tuple[dict[str, Any], Rows]]:
    """Events by the values of these fields."""
    groups: dict[tuple[Any, ...], Rows] = collections.defaultdict(list)
    for fields in events:
        groups[tuple(fields.get(name) for name in names)].append(fields)
    return [(dict(zip(names, values, strict=True)), group) for values, group in groups.items()]


def _failures(events: Rows) -> Rows:
    first_lines = [{**fields, "error": (str(fields["error"]).splitlines() or [""])[0]} for fields in events]
    found = [{**key, "times": len(group)} for key, group in _grouped(first_lines, "backend", "direction", "error")]
    return sorted(found, key=lambda row: -row["times"])


def _times(events: Rows) -> Rows:
    found = []
    for key, group in _grouped(events, "backend", "direction", "length", "rows"):
        ms = [fields["ms"] for fields in group]
        found.append({**key, "passes": len(ms), "median_ms": median(ms), "worst_ms": max(ms)})
    return sorted(found, key=lambda row: -row["median_ms"])


def _reads(events: Rows) -> Rows:
    return [{**key, "calls": len(group), **_sums(group, "tokens", "bytes")} for key, group in _grouped(events, "backend", "source")]


def _backward(events: Rows) -> Rows:
    found = []
    for key, group in _grouped(events, "backend"):
        rates = {name: [fields[name] for fields in group if name in fields] for name in ("tflops", "gbps")}
        medians = {name: median(rate) if rate else None for name, rate in rates.items()}
        found.append({**key, "passes": len(group), **_sums(group, "flops", "bytes"), **medians})
    return found


def _sums(group: Rows, *names: str) -> dict[str, int]:
    return {name: sum(fields[name] for fields in group) for name in names}


def text(summary: dict[str, Any], columns: int = 0) -> str:
    """The summary for a terminal of so many columns (0: any number), without empty tables."""
    events = ", ".join(f"{n} {event}" for event, n in summary["events"].items())
    parts = [f"{summary['log']}: {summary['lines']} lines, {events}{torn_words(summary['torn_lines'])}"]
    for name, title in TABLES.items():
        rows = summary[name]
        if isinstance(rows, dict):
            headers: Sequence[str] = ("kernel config", "launches") if name == "kernels" else ("backend", "worst MAE")
            cells = [list(row) for row in rows.items()]
        else:
            headers, cells = [key.replace("_", " ") for key in rows[0]] if rows else [], [list(row.values()) for row in rows]
        if rows:
            parts.append(f"{title}\n{table(headers, [[_shown(cell) for cell in row] for row in cells], width=72, columns=columns)}")
    return "\n\n".join(parts)


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
