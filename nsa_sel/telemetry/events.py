"""What happened: events as JSON lines under the logger `nsa_sel`, the last decisions, counters. Costs next to nothing when off."""

from __future__ import annotations

import collections
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from nsa_sel.core import forks
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import Request
from nsa_sel.errors import ConfigError
from nsa_sel.settings.flags import LOG_FLAG
from nsa_sel.settings.schema import Settings
from nsa_sel.telemetry.log import JsonLines

LOGGER = logging.getLogger("nsa_sel")
LOGGER.addHandler(logging.NullHandler())
KEPT_DECISIONS = 1024

_taken: list[Decision] = []  # by the last calls, at least KEPT_DECISIONS of them
_counted = 0  # how many of these, from the first on, are in the counters
_counters: collections.Counter[tuple[str, ...]] = collections.Counter()
_lock = forks.lock()
_handler: logging.Handler | None = None
_level = logging.NOTSET  # of the logger before `_handler`
_followed: str | None = None  # what the settings said of it when a call last looked
_following = False  # whether `_handler` is there because they said so


class LogFile(logging.FileHandler):
    """Appends to a file, and never waits for one: a FIFO that nobody reads can't be opened."""

    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_opener)


def _opener(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    if os.fstat(descriptor).st_size:  # a process that crashed may have left its last line without an end
        os.write(descriptor, b"\n")
    return descriptor


def log_to(target: str | None) -> None:
    """Write events to `target` ("stderr" or a file, appended); None stops it. Raises ConfigError for a file that can't be written."""
    global _handler, _level, _following
    with _lock:
        _following = False
        if _handler is not None:
            LOGGER.removeHandler(_handler)
            LOGGER.setLevel(_level)
            _handler.close()
            _handler = None
        if target is None:
            return
        try:
            _handler = logging.StreamHandler(sys.stderr) if target == "stderr" else LogFile(target)
        except OSError as error:
            allowed = f"stderr or a file that can be written; writing this one: {error.strerror}"
            raise ConfigError(LOG_FLAG, target, allowed, "mend the path") from error
        _handler.setFormatter(JsonLines())
        LOGGER.addHandler(_handler)
        _level = LOGGER.level
        LOGGER.setLevel(logging.INFO)


def follow(settings: Settings) -> None:
    """Log to where NSA_DEBUG_LOG says, once it says something else than before: a user's own `log_to` is left alone.

    Where it is unset and another flag asks for events, they go to stderr unless somebody listens already.
    """
    global _followed, _following
    target = settings.debug_log
    if target == _followed:
        return
    _followed = target
    implied = target is None or settings.sources.get("debug_log") != LOG_FLAG
    if implied and not _following and (target is None or _heard()):
        return
    log_to(target)
    _following = target is not None


def _heard() -> bool:
    """Whether events reach a handler of somebody."""
    handlers = [*LOGGER.handlers, *(logging.getLogger().handlers if LOGGER.propagate else ())]
    return listening() and not all(isinstance(handler, logging.NullHandler) for handler in handlers)


def listening() -> bool:
    """Whether anybody reads events: work done only for an event asks this first."""
    return LOGGER.isEnabledFor(logging.INFO)


def emit(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event (`sel.*`, `sel.triton.*`) with its fields."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, event, extra={"nsa_sel": fields})


def record(decision: Decision, request: Request) -> None:
    """Remember the decision of one call; `request` has the call's exact sizes, the decision those of its class."""
    # Appending needs no lock, and what a call says about itself is in its decision: it is counted later, many calls at a time.
    _taken.append(decision)
    if len(_taken) >= 2 * KEPT_DECISIONS:
        with _lock:
            _fold()
    if LOGGER.isEnabledFor(logging.INFO):
        emit("sel.decision", request=request, decision=decision)


def decisions() -> tuple[Decision, ...]:
    """The decisions of the last calls of this process, oldest first, at most `KEPT_DECISIONS`."""
    return tuple(_taken[-KEPT_DECISIONS:])


def count(*name: str, by: int = 1) -> None:
    """Add to a counter: its kind, then what tells counters of that kind apart ("failed", "triton-tile")."""
    with _lock:
        _counters[name] += by


def tallies() -> dict[tuple[str, ...], int]:
    """All counters since the process started, by kind and labels.

    ("calls", backend): forward passes; ("backward", backend): backward passes; ("forced", source): calls with a backend by name;
    ("refused", backend, code): calls in which a check turned away a backend that is preferred to the chosen one;
    ("unserved",): calls that no backend might run; ("failed", backend): exceptions in a backend;
    ("fallbacks", backend, reason): passes that packed SDPA took over from it, for an exception now or one before;
    ("bytes", backend, direction), ("flops", backend, direction): estimated work of passes under NSA_DEBUG_TRITON or NSA_DEBUG_TIMING.
    """
    with _lock:
        _fold()
        return dict(_counters)


def counters() -> dict[str, int]:
    """`tallies` with the parts of a name joined by dots: "refused.triton-group.min-length"."""
    return {".".join(name): number for name, number in tallies().items()}


def _fold() -> None:
    """Count the decisions that were taken since the last time, and forget the oldest; under the lock. Others may go on appending."""
    global _counted
    end = len(_taken)
    new = {id(decision): decision for decision in _taken[_counted:end]}
    for key, calls in collections.Counter(map(id, _taken[_counted:end])).items():
        for name in _names(new[key]):
            _counters[name] += calls
    surplus = max(0, end - KEPT_DECISIONS)
    del _taken[:surplus]
    _counted = end - surplus


def _names(decision: Decision) -> Iterator[tuple[str, ...]]:
    yield "calls", str(decision.forward)
    if decision.override is not None and not decision.override.source.startswith("failure of "):  # those are fallbacks
        yield "forced", decision.override.source
    stepped_over = {step.partition(": ")[0] for step in decision.steps}
    for verdict in decision.verdicts:
        if verdict.backend in stepped_over:
            yield from (("refused", verdict.backend, reason.code) for reason in verdict.forward)


def now(device_type: str) -> float:
    """Seconds on a host clock, after all work on the device is done: for NSA_DEBUG_TIMING alone, it synchronises."""
    if device_type == "cuda":
        import torch  # this module stands below torch

        torch.cuda.synchronize()
    return time.perf_counter()
