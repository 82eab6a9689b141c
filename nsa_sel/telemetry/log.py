"""The format of a log: JSON lines, written by the handlers of NSA_DEBUG_LOG and `log_to`, read by `nsa-sel replay` and `nsa-sel decisions`.

Settings and backends are 12 KB of a decision and the same in most of them: a `sel.settings` line holds them once, and `sel.decision`
lines name it by its fingerprint. Needs no torch.
"""

from __future__ import annotations

import collections
import hashlib
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from nsa_sel.core.backend import Offer, Reason
from nsa_sel.core.decision import Decision, FieldChange
from nsa_sel.errors import ArgumentError, NsaSelError
from nsa_sel.settings.schema import Settings

DIRECTIONS = ("forward", "backward")
TORN_SHOWN = 5  # numbers of torn lines
KEPT_ENCODED = 256
_encoded_decisions: dict[int, tuple[Decision, str, msgspec.Raw]] = {}  # by id: calls of one class share one Decision object
_BAD_FIELDS = (msgspec.DecodeError, NsaSelError, RecursionError, LookupError, TypeError, ValueError, AttributeError)


# Writing


class JsonLines(logging.Formatter):
    """Formats events as one JSON object per line: time (seconds since the epoch), event, and the event's fields.

    It remembers which settings it has written: each target needs a formatter of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._written: set[str] = set()

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "nsa_sel", {})
        events = [(record.getMessage(), fields)]
        if isinstance(fields.get("decision"), Decision):
            *before, (name, short) = decision_events(fields["decision"], self._written)
            events = [*before, (name, {**fields, **short})]
        return "\n".join(_encoded({"time": record.created, "event": name, **fields}) for name, fields in events)


def decision_events(decision: Decision, written: set[str]) -> list[tuple[str, dict[str, Any]]]:
    """The events that record a decision, as names and fields.

    Args:
        written: fingerprints of the settings that the log already holds; a new one is added.

    Returns:
        `sel.settings` where the log does not hold these settings yet, then `sel.decision`.
    """
    kept = _encoded_decisions.get(id(decision))
    if kept is None:
        # Not the settings' own fingerprint alone, which covers neither their sources nor the backends offered.
        shared = msgspec.json.encode((decision.settings, decision.offers))
        fingerprint = f"{decision.settings.fingerprint}-{hashlib.sha256(shared).hexdigest()[:8]}"
        if len(_encoded_decisions) >= KEPT_ENCODED:
            _encoded_decisions.clear()
        kept = _encoded_decisions[id(decision)] = decision, fingerprint, msgspec.Raw(_encoded(_short(decision)).encode())
    _, fingerprint, short = kept
    events: list[tuple[str, dict[str, Any]]] = [("sel.decision", {"settings": fingerprint, "decision": short})]
    if fingerprint not in written:
        written.add(fingerprint)
        events.insert(0, ("sel.settings", {"fingerprint": fingerprint, "settings": decision.settings, "offers": decision.offers}))
    return events


def _short(decision: Decision) -> dict[str, Any]:
    """A decision's fields without settings and offers. Backends share most reasons: verdicts name them by their number."""
    fields = msgspec.structs.asdict(decision)
    del fields["settings"], fields["offers"]
    numbers: dict[Reason, int] = {}
    fields["verdicts"] = {
        verdict.backend: [[numbers.setdefault(reason, len(numbers)) for reason in getattr(verdict, name)] for name in DIRECTIONS]
        for verdict in decision.verdicts
    }
    predictions: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for predicted in decision.predictions:
        predictions[predicted.direction][predicted.backend] = predicted.ms
    return {**fields, "predictions": predictions, "reasons": list(numbers)}


def _encoded(line: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(line, enc_hook=str).decode()
    except UnicodeEncodeError:  # a file's name may hold bytes that are not UTF-8
        text = json.dumps(msgspec.to_builtins(line, enc_hook=str), ensure_ascii=False)
        return text.encode(errors="replace").decode()


# Reading


class Line(NamedTuple):
    """One line of a log: its number from 1 on, the event's name, its fields, and the whole decision of a `sel.decision`."""

    number: int
    event: str
    fields: dict[str, Any]
    decision: Decision | None = None


class Log(NamedTuple):
    """A log's lines, and the numbers of the lines that a crash or a full disk cut short, which are skipped."""

    lines: tuple[Line, ...]
    torn: tuple[int, ...]


class _Shared(msgspec.Struct, frozen=True):
    """A `sel.settings` line."""

    fingerprint: str
    settings: Settings
    offers: tuple[Offer, ...]


class _Named(msgspec.Struct, frozen=True):
    """A `sel.decision` line."""

    settings: str
    decision: dict[str, Any]


class _Numbered(msgspec.Struct, frozen=True):
    """The fields that `_short` changes."""

    reasons: tuple[dict[str, Any], ...]
    verdicts: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    predictions: dict[str, dict[str, float]]


def read_log(log: Path) -> Log:
    """Read a log of events, or of whole decisions (Decision.to_json), which count as `sel.decision`.

    A line that is not whole JSON was cut short while it was written: it is skipped where other lines are readable.

    Raises:
        ArgumentError: for a file that can't be read; with its number, for a line that is neither an event nor a decision, and for a
            decision whose settings no earlier line holds.
    """
    try:
        lines = log.read_bytes().split(b"\n")  # no other character ends a line: texts of events may hold U+2028
    except OSError as error:
        raise ArgumentError("LOG", f"{log} ({error.strerror})", "a readable file of JSON lines", "mend the path") from error
    found: list[Line] = []
    shared: dict[str, _Shared] = {}
    torn: dict[int, Exception] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # msgspec raises the second for bytes that are no UTF-8
            torn[number] = error
            continue
        except RecursionError as error:
            raise _not_a_line(log, number, "nested too deeply", bool(found)) from error
        try:
            found.append(_line(log, number, record, shared))
        except ArgumentError:
            raise
        except _BAD_FIELDS as error:
            raise _not_a_line(log, number, f"no decision ({error})", bool(found)) from error
    if torn and not found:
        number, fault = next(iter(torn.items()))
        raise _not_a_line(log, number, f"no decision ({fault})", False) from fault
    return Log(tuple(found), tuple(torn))


def _line(log: Path, number: int, record: Any, shared: dict[str, _Shared]) -> Line:
    if not isinstance(record, dict) or "event" not in record:
        return Line(number, "sel.decision", {}, msgspec.convert(record, Decision))
    event = record["event"]
    if not isinstance(event, str):
        raise NsaSelError(f"its event is {event!r:.40}, no name")
    if event == "sel.settings":
        settings = msgspec.convert(record, _Shared)
        shared[settings.fingerprint] = settings
    if event != "sel.decision":
        return Line(number, event, record)
    named = msgspec.convert(record, _Named)
    if named.settings not in shared:
        what = f"a decision with settings {named.settings}, which no earlier line holds"
        allowed = "decisions after the sel.settings line with their fingerprint"
        raise ArgumentError(f"line {number} of {log}", what, allowed, "keep the sel.settings lines when you cut a log")
    return Line(number, event, {}, _whole(named.decision, shared[named.settings]))


def _whole(short: dict[str, Any], shared: _Shared) -> Decision:
    """The decision whose `_short` form this is."""
    numbered = msgspec.convert(short, _Numbered)
    verdicts = [
        {"backend": backend, **{name: [numbered.reasons[i] for i in numbers] for name, numbers in zip(DIRECTIONS, both, strict=True)}}
        for backend, both in numbered.verdicts.items()
    ]
    predictions = [
        {"backend": backend, "direction": direction, "ms": ms}
        for direction, times in numbered.predictions.items()
        for backend, ms in times.items()
    ]
    whole = {**short, "settings": shared.settings, "offers": shared.offers, "verdicts": verdicts, "predictions": predictions}
    return msgspec.convert(whole, Decision)


def _not_a_line(log: Path, number: int, what: str, later: bool) -> ArgumentError:
    """The error about a line; `later`: the lines before it belong to a log."""
    remedy = "drop the line" if later else "pass a log that NSA_DEBUG_LOG wrote, or lines of Decision.to_json"
    return ArgumentError(f"line {number} of {log}", what, "a decision as Decision.to_json writes it, or an event", remedy)


def replayed(log: Path, number: int, decision: Decision) -> tuple[FieldChange, ...]:
    """`decision.replay()` for a line of a log.

    Raises:
        ArgumentError: naming the line, where its values make no sense to the policy.
    """
    try:
        return decision.replay()
    except Exception as error:  # no check of single fields finds all that a policy could stumble over
        what = f"a decision that can't be replayed ({type(error).__name__}: {error})"
        raise ArgumentError(f"line {number} of {log}", what, "a decision as Decision.to_json writes it", "drop the line") from error


def torn_words(torn: tuple[int, ...]) -> str:
    """The words about torn lines that follow a total; empty where there are none."""
    if not torn:
        return ""
    shown = ", ".join(map(str, torn[:TORN_SHOWN])) + (", ..." if len(torn) > TORN_SHOWN else "")
    return f"; skipped as torn: line{'s' if len(torn) > 1 else ''} {shown} ({len(torn)} in all)"
