"""JSON lines of events: their destination (NSA_DEBUG_LOG, or the user's own `log_to`), their format, and the decisions in
such a log.

The settings and backends of a decision take 12 KB and rarely change. A `sel.settings` line holds them once;
`sel.decision` lines refer to it by fingerprint. Imports no torch.
"""

from __future__ import annotations

import collections
import hashlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from nsa_sel import forks
from nsa_sel.core.backend import Reason
from nsa_sel.core.decision import Decision
from nsa_sel.errors import ArgumentError, ConfigError, shown
from nsa_sel.settings.flags import LOG_FLAG
from nsa_sel.settings.schema import Settings
from nsa_sel.telemetry.events import LOGGER, listening

DIRECTIONS = ("forward", "backward")
KEPT_ENCODED = 256
_encoded_decisions: dict[int, tuple[Decision, str, msgspec.Raw]] = {}  # by id: calls of one class share one Decision object


class JsonLines(logging.Formatter):
    """Format events as one JSON object per line: time (seconds since the epoch), event, and the event's fields.

    An instance remembers which settings it has written, so each target needs a formatter of its own.
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
        return "\n".join(_encode({"time": record.created, "event": name, **fields}) for name, fields in events)


def decision_events(decision: Decision, written: set[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the events that record a decision, as names and fields.

    Args:
        decision: the decision.
        written: fingerprints of the settings that the log already holds. A new fingerprint is added.

    Returns:
        `sel.settings` unless the log holds these settings, then `sel.decision`.
    """
    cached = _encoded_decisions.get(id(decision))
    if cached is None:
        # The settings' own fingerprint covers neither their sources nor the offered backends.
        shared = msgspec.json.encode((decision.settings, decision.offers))
        fingerprint = f"{decision.settings.fingerprint}-{hashlib.sha256(shared).hexdigest()[:8]}"
        if len(_encoded_decisions) >= KEPT_ENCODED:
            _encoded_decisions.clear()
        cached = _encoded_decisions[id(decision)] = decision, fingerprint, msgspec.Raw(_encode(_shorten(decision)).encode())
    _, fingerprint, short = cached
    events: list[tuple[str, dict[str, Any]]] = [("sel.decision", {"settings": fingerprint, "decision": short})]
    if fingerprint not in written:
        written.add(fingerprint)
        events.insert(0, ("sel.settings", {"fingerprint": fingerprint, "settings": decision.settings, "offers": decision.offers}))
    return events


def read_decisions(log: Path) -> list[Decision]:
    """Read the decisions of a log, for example to call `Decision.replay` on each.

    Args:
        log: a file that NSA_DEBUG_LOG or `log_to` wrote. Lines cut short by a crash are skipped.

    Returns:
        The decisions in the order of the calls.

    Raises:
        OSError: if the file cannot be read.
        ArgumentError: for a decision that does not parse or whose `sel.settings` line is missing. The message has the
            line's number.
    """
    decisions, settings = [], {}
    for number, text in enumerate(log.read_bytes().split(b"\n"), 1):
        try:
            line = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        try:
            if line["event"] == "sel.settings":
                settings[line["fingerprint"]] = line
            elif line["event"] == "sel.decision":
                decisions.append(_expand(line["decision"], settings[line["settings"]]))
        except (LookupError, TypeError, AttributeError, msgspec.ValidationError) as error:
            raise ArgumentError(
                f"line {number} of {log}",
                f"not a decision ({error!r})",
                "a sel.decision line after the sel.settings line with its fingerprint",
                "keep the sel.settings lines when you cut a log",
            ) from error
    return decisions


def _shorten(decision: Decision) -> dict[str, Any]:
    """Return a decision's fields without settings and offers. Backends share most reasons, so verdicts refer to them by
    number."""
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


def _expand(short: dict[str, Any], settings: dict[str, Any]) -> Decision:
    """Return the decision that `_shorten` shortened. settings: the fields of its `sel.settings` line."""
    verdicts = [
        {"backend": backend, **{name: [short["reasons"][i] for i in numbers] for name, numbers in zip(DIRECTIONS, both, strict=True)}}
        for backend, both in short["verdicts"].items()
    ]
    predictions = [
        {"backend": backend, "direction": direction, "ms": ms}
        for direction, times in short["predictions"].items()
        for backend, ms in times.items()
    ]
    fields = {**short, "verdicts": verdicts, "predictions": predictions}
    return msgspec.convert({**fields, "settings": settings["settings"], "offers": settings["offers"]}, Decision)


def _encode(line: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(line, enc_hook=str).decode()
    except UnicodeEncodeError:  # a file name may hold bytes that are not UTF-8
        text = json.dumps(msgspec.to_builtins(line, enc_hook=str), ensure_ascii=False)
        return text.encode(errors="replace").decode()


# The destination

_lock = forks.lock()
_handler: logging.Handler | None = None
_handler_from_flag = False  # True if NSA_DEBUG_LOG or another flag added `_handler`, False if `log_to` did
_level_before = logging.NOTSET  # the logger's level before `_handler` was added
followed: str | None = None  # the target in the settings of the last call


class LogFile(logging.FileHandler):
    """Append to a file. Opening never blocks: a FIFO without a reader is an error."""

    def _open(self) -> Any:
        def opener(path: str, flags: int) -> int:
            descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
            os.set_blocking(descriptor, True)
            if os.fstat(descriptor).st_size:  # a crashed process may have left its last line without a newline
                os.write(descriptor, b"\n")
            return descriptor

        return open(self.baseFilename, "a", encoding="utf-8", opener=opener)


def log_to(target: str | None) -> None:
    """Write events as JSON lines.

    Args:
        target: "stderr", or the name of a file to append to. None stops writing.

    Raises:
        ArgumentError: `target` is not a name.
        ConfigError: the file cannot be written.
    """
    if not isinstance(target, str | os.PathLike | None):
        raise ArgumentError("target", shown(target), '"stderr", the name of a file, or None', "pass one of these")
    _write_to(target, "target")


def _write_to(target: str | None, source: str) -> None:
    """Replace the handler. source: the flag or argument that names the target. If opening fails, the previous handler
    stays."""
    global _handler, _level_before, _handler_from_flag
    with _lock:
        try:
            handler: logging.Handler | None = None
            if target is not None:
                handler = logging.StreamHandler(sys.stderr) if target == "stderr" else LogFile(target)
        except OSError as error:
            raise ConfigError(
                source, target, f"stderr or a file that can be written; writing this one: {error.strerror}", "correct the path"
            ) from error
        if _handler is not None:
            LOGGER.removeHandler(_handler)
            LOGGER.setLevel(_level_before)
            _handler.close()
        _handler, _handler_from_flag = handler, False
        if handler is not None:
            handler.setFormatter(JsonLines())
            LOGGER.addHandler(handler)
            _level_before = LOGGER.level
            LOGGER.setLevel(logging.INFO)


def follow(settings: Settings) -> None:
    """Write events to the target of NSA_DEBUG_LOG if it changed since the last call. A target set by `log_to` stays.

    If the flag is unset and another flag asks for events, they go to stderr, unless another handler already receives
    them.
    """
    global followed, _handler_from_flag
    target = settings.debug_log
    if target == followed:
        return
    implied = target is None or settings.sources.get("debug_log") != LOG_FLAG
    handlers = [*LOGGER.handlers, *(logging.getLogger().handlers if LOGGER.propagate else ())]
    handled = listening() and not all(isinstance(handler, logging.NullHandler) for handler in handlers)
    if not implied or _handler_from_flag or (target is not None and not handled):
        _write_to(target, LOG_FLAG)  # may raise; the next call then tries again
        _handler_from_flag = target is not None
    followed = target
