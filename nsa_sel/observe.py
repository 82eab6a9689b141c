"""What happened: events as JSON lines under the logger `nsa_sel`, the last decisions, counters. Costs next to nothing when off."""

from __future__ import annotations

import collections
import logging
import sys
import threading
import time
from typing import Any

import msgspec

from nsa_sel.decision import Decision
from nsa_sel.errors import ConfigError
from nsa_sel.request import Request

LOGGER = logging.getLogger("nsa_sel")
LOGGER.addHandler(logging.NullHandler())
KEPT_DECISIONS = 1024

_decisions: collections.deque[Decision] = collections.deque(maxlen=KEPT_DECISIONS)
_counters: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()
_handler: logging.Handler | None = None
_followed: str | None = None  # what NSA_DEBUG_LOG said when a call last looked


class JsonLines(logging.Formatter):
    """One JSON object a line: time (seconds since the epoch), event, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "nsa_sel", {})
        return msgspec.json.encode({"time": record.created, "event": record.getMessage(), **fields}, enc_hook=str).decode()


def log_to(target: str | None) -> None:
    """Write events to `target` ("stderr" or a file, appended); None stops it. Raises ConfigError for a file that can't be written."""
    global _handler
    with _lock:
        if _handler is not None:
            LOGGER.removeHandler(_handler)
            _handler.close()
            _handler = None
        if target is None:
            return
        try:
            _handler = logging.StreamHandler(sys.stderr) if target == "stderr" else logging.FileHandler(target)
        except OSError as error:
            raise ConfigError(
                "NSA_DEBUG_LOG", target, "stderr or a file that can be written", f"{error.strerror}: mend the path"
            ) from error
        _handler.setFormatter(JsonLines())
        LOGGER.addHandler(_handler)
        LOGGER.setLevel(logging.INFO)


def follow(flag: str | None) -> None:
    """Log to where NSA_DEBUG_LOG says, once it says something else than before: a user's own `log_to` is left alone."""
    global _followed
    if flag != _followed:
        log_to(flag)
        _followed = flag


def listening() -> bool:
    """Whether anybody reads events: work done only for an event asks this first."""
    return LOGGER.isEnabledFor(logging.INFO)


def emit(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event (`sel.*`, `sel.triton.*`) with its fields."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, event, extra={"nsa_sel": fields})


def record(decision: Decision, request: Request) -> None:
    """Remember the decision of one call; `request` has the call's exact sizes, the decision those of its class."""
    _decisions.append(decision)
    _counters[f"calls.{decision.forward}"] += 1
    if listening():
        emit("sel.decision", request=request, decision=decision)


def decisions() -> tuple[Decision, ...]:
    """The decisions of the last calls of this process, oldest first, at most `KEPT_DECISIONS`."""
    return tuple(_decisions)


def count(name: str) -> None:
    """Add one to a counter."""
    _counters[name] += 1


def counters() -> dict[str, int]:
    """Calls by backend and failures by backend since the process started."""
    return dict(_counters)


def now(device_type: str) -> float:
    """Seconds on a host clock, after all work on the device is done: for NSA_DEBUG_TIMING alone, it synchronises."""
    if device_type == "cuda":
        import torch  # this module stands below torch

        torch.cuda.synchronize()
    return time.perf_counter()
