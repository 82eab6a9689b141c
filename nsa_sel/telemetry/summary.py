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

_PREDICTIONS = re.compile(r"(?<=least predicted time): .*?(?= \((?!no prediction))")


class Won(msgspec.Struct, frozen=True):
    """Calls of one device with the same decision."""

    device: str
    forward: str | None
    backward: str | None
    rule: str
    override: str | None  # what forced the backend
    calls: int


class Refusal(msgspec.Struct, frozen=True):
    """How often a check refused a backend, and in how many of these calls the backend is preferred to the one that ran."""

    backend: str
    code: str
    kind: str
    calls: int
    stepped_over: int


class Failure(msgspec.Struct, frozen=True):
    """Exceptions in a backend."""

    backend: str
    direction: str
    error: str
    times: int


class Times(msgspec.Struct, frozen=True):
    """Times of a backend's passes (`length` and `rows` are None), or of packed SDPA's bucket of rows of one length."""

    backend: str
    direction: str
    length: int | None
    rows: int | None
    passes: int
    median_ms: float
    worst_ms: float


class Traffic(msgspec.Struct, frozen=True):
    """Keys that the rows of a backend's calls select, and the bytes of their K and V."""

    backend: str
    calls: int
    tokens: int
    bytes: int
    source: str  # where the numbers are from: counted, measured, bound


class Backward(msgspec.Struct, frozen=True):
    """Estimated work of a backend's backward passes; median rates of those that were timed."""

    backend: str
    passes: int
    flops: int
    bytes: int
    tflops: float | None
    gbps: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All that `nsa-sel decisions` shows."""

    log: str
    lines: int
    torn_lines: tuple[int, ...]  # their numbers; skipped
    events: dict[str, int]
    decisions: int
    won: tuple[Won, ...]
    refusals: tuple[Refusal, ...]
    failures: tuple[Failure, ...]
    buckets: tuple[Times, ...]  # the slowest first
    passes: tuple[Times, ...]
    kernels: dict[str, int]  # kernel config -> number of launches
    reads: tuple[Traffic, ...]
    backward: tuple[Backward, ...]
    worst_mae: dict[str, float]  # backend and direction -> against packed SDPA


def summarise(log: Path, top: int = 10) -> Summary:
    """The summary of a log.

    Args:
        top: how many of the slowest buckets it has.

    Raises:
        ArgumentError: as `read_log`, for an empty log, and for an event without a field that the summary needs.
    """
    lines, torn = read_log(log)
    if not lines:
        raise ArgumentError("LOG", f"{log}, which is empty", "JSON lines of NSA_DEBUG_LOG or Decision.to_json", "mend the path")
    by_event: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for line in lines:
        fault = _fault(line)
        if fault:
            allowed = ", ".join(f"{field} ({kind.__name__})" for field, kind in EVENT_FIELDS[line.event].items())
            raise ArgumentError(f"line {line.number} of {log}", f"{line.event} {fault}", allowed, "drop the line")
        by_event[line.event].append(line.fields)
    decisions = [line.decision for line in lines if line.decision is not None]
    kernels = collections.Counter(f"{fields['config']} ({fields['path']})" for fields in by_event["sel.triton.kernel"])
    worst: dict[str, float] = {}
    for fields in by_event["sel.compare"]:
        compared = f"{fields['backend']} {fields['direction']}"
        worst[compared] = max(worst.get(compared, 0.0), fields["mae"])
    return Summary(
        log=str(log), lines=len(lines), torn_lines=torn, events=dict(collections.Counter(line.event for line in lines).most_common()),
        decisions=len(decisions), won=_won(decisions), refusals=_refusals(decisions), failures=_failures(by_event["sel.backend.failed"]),
        buckets=_times(by_event["sel.timing.bucket"])[:top], passes=_times(by_event["sel.timing"]), kernels=dict(kernels.most_common()),
        reads=_reads([*by_event["sel.triton.reads"], *by_event["sel.reads"]]),
        backward=_backward([*by_event["sel.triton.bwd"], *by_event["sel.bwd"]]), worst_mae=worst,
    )  # fmt: skip


def _fault(line: Line) -> str | None:
    """What is wrong with an event's fields."""
    needed = EVENT_FIELDS.get(line.event, {})
    lacking = [field for field in needed if field not in line.fields]
    if lacking:
        return f"without {', '.join(lacking)}"
    kinds = {**{field: kind for field, kind in OPTIONAL_FIELDS.items() if line.fields.get(field) is not None}, **needed} if needed else {}
    for field, kind in kinds.items():
        try:
            msgspec.convert(line.fields[field], kind)
        except msgspec.ValidationError as error:
            return f"whose {field} does not fit ({error})"
    return None


def _won(decisions: Iterable[Decision]) -> tuple[Won, ...]:
    # Predicted times differ from shape to shape; without them it is one rule.
    found = collections.Counter(
        (d.device.name, d.forward, d.backward, _PREDICTIONS.sub("", d.rule), d.override.source if d.override else None) for d in decisions
    )
    return tuple(Won(*key, calls) for key, calls in found.most_common())


def _refusals(decisions: Iterable[Decision]) -> tuple[Refusal, ...]:
    calls: collections.Counter[tuple[str, str, str]] = collections.Counter()
    stepped_over: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for decision in decisions:
        ahead = {step.partition(": ")[0] for step in decision.steps}
        for verdict in decision.verdicts:
            for code, kind in dict.fromkeys((reason.code, reason.kind) for reason in (*verdict.forward, *verdict.backward)):
                calls[verdict.backend, code, kind] += 1
                stepped_over[verdict.backend, code, kind] += verdict.backend in ahead
    return tuple(Refusal(*key, number, stepped_over[key]) for key, number in calls.most_common())


def _failures(events: Iterable[dict[str, Any]]) -> tuple[Failure, ...]:
    found = collections.Counter((e["backend"], e["direction"], (str(e["error"]).splitlines() or [""])[0]) for e in events)
    return tuple(Failure(*key, times) for key, times in found.most_common())


def _grouped(events: Iterable[dict[str, Any]], *names: str) -> list[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    """Events by the values of these fields."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = collections.defaultdict(list)
    for fields in events:
        groups[tuple(fields.get(name) for name in names)].append(fields)
    return list(groups.items())


def _times(events: Iterable[dict[str, Any]]) -> tuple[Times, ...]:
    found = []
    for (backend, direction, length, rows), group in _grouped(events, "backend", "direction", "length", "rows"):
        ms = [fields["ms"] for fields in group]
        found.append(Times(backend, direction, length, rows, len(ms), median(ms), max(ms)))
    return tuple(sorted(found, key=lambda times: -times.median_ms))


def _reads(events: Iterable[dict[str, Any]]) -> tuple[Traffic, ...]:
    groups = _grouped(events, "backend", "source")
    return tuple(Traffic(key[0], len(group), _sum(group, "tokens"), _sum(group, "bytes"), key[1]) for key, group in groups)


def _backward(events: Iterable[dict[str, Any]]) -> tuple[Backward, ...]:
    found = []
    for (backend,), group in _grouped(events, "backend"):
        rates = [[fields[name] for fields in group if name in fields] for name in ("tflops", "gbps")]
        tflops, gbps = (median(rate) if rate else None for rate in rates)
        found.append(Backward(backend, len(group), _sum(group, "flops"), _sum(group, "bytes"), tflops, gbps))
    return tuple(found)


def _sum(group: list[dict[str, Any]], name: str) -> int:
    return sum(fields[name] for fields in group)


def text(summary: Summary) -> str:
    """The summary for a terminal, without empty tables."""
    events = ", ".join(f"{n} {event}" for event, n in summary.events.items())
    parts = [f"{summary.log}: {summary.lines} lines, {events}{torn_words(summary.torn_lines)}"]
    tables: dict[str, Sequence[msgspec.Struct]] = {
        "backends that ran, and by which rule": summary.won, "refused": summary.refusals, "failed": summary.failures,
        "slowest buckets of packed SDPA": summary.buckets, "passes": summary.passes, "read": summary.reads,
        "backward, estimated work": summary.backward,
    }  # fmt: skip
    for title, rows in tables.items():
        if rows:
            fields = rows[0].__struct_fields__
            cells = [[_shown(getattr(row, field)) for field in fields] for row in rows]
            parts.append(f"{title}\n{table([field.replace('_', ' ') for field in fields], cells, width=72)}")
    if summary.kernels:
        parts.append("launches\n" + table(["kernel config", "launches"], summary.kernels.items()))
    if summary.worst_mae:
        rows_of_mae = [(backend, _shown(mae)) for backend, mae in summary.worst_mae.items()]
        parts.append("compared with packed SDPA\n" + table(["backend", "worst MAE"], rows_of_mae))
    return "\n\n".join(parts)


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
