"""Events as JSON lines under the logger `nsa_sel`, the last decisions, and counters. They cost next to nothing when nobody listens."""

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

_recorded: list[Decision] = []  # of the last calls, at least KEPT_DECISIONS of them
_counted = 0  # the first entries of these that are in the counters already
_counters: collections.Counter[tuple[str, ...]] = collections.Counter()
_lock = forks.lock()
_handler: logging.Handler | None = None
_level = logging.NOTSET  # the logger's level before `_handler` was added
_followed: str | None = None  # the target in the settings of the last call
_following = False  # whether `_handler` was added because of these settings


class LogFile(logging.FileHandler):
    """Appends to a file. It never waits: opening a FIFO that nobody reads is an error."""

    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_opener)


def _opener(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    if os.fstat(descriptor).st_size:  # a process that crashed may have left its last line without an end
        os.write(descriptor, b"\n")
    return descriptor


def log_to(target: str | None) -> None:
    """Write events as JSON lines.

    Args:
        target: "stderr", or a file, to which lines are appended. None stops writing.

    Raises:
        ConfigError: for a file that can't be written.
    """
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
    """Write events to the target of NSA_DEBUG_LOG, where it differs from the last call's; the user's own `log_to` is left alone.

    Where the flag is unset and another flag asks for events, they go to stderr, unless a handler takes them already.
    """
    global _followed, _following
    target = settings.debug_log
    if target == _followed:
        return
    _followed = target
    implied = target is None or settings.sources.get("debug_log") != LOG_FLAG
    if implied and not _following and (target is None or _has_handler()):
        return
    log_to(target)
    _following = target is not None


def _has_handler() -> bool:
    handlers = [*LOGGER.handlers, *(logging.getLogger().handlers if LOGGER.propagate else ())]
    return listening() and not all(isinstance(handler, logging.NullHandler) for handler in handlers)


def listening() -> bool:
    """Whether events are read. Ask this before work that only an event needs."""
    return LOGGER.isEnabledFor(logging.INFO)


def emit(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event (`sel.*`, `sel.triton.*`) with its fields."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, event, extra={"nsa_sel": fields})


def record(decision: Decision, request: Request) -> None:
    """Keep and log the decision of one call. `request` has the call's exact sizes, the decision those of its class."""
    # On the path of every call: appending needs no lock, and decisions are counted later, many at a time.
    _recorded.append(decision)
    if len(_recorded) >= 2 * KEPT_DECISIONS:
        with _lock:
            _fold()
    if LOGGER.isEnabledFor(logging.INFO):
        emit("sel.decision", request=request, decision=decision)


def decisions() -> tuple[Decision, ...]:
    """The decisions of this process's last calls, oldest first, at most `KEPT_DECISIONS`."""
    return tuple(_recorded[-KEPT_DECISIONS:])


def count(*name: str, by: int = 1) -> None:
    """Add `by` to a counter, named by its kind and its labels ("failed", "triton-tile")."""
    with _lock:
        _counters[name] += by


def tallies() -> dict[tuple[str, ...], int]:
    """All counters since the process started, by kind and labels.

    Returns:
        ("calls", backend): forward passes.
        ("backward", backend): backward passes.
        ("forced", source): calls with a backend forced by name.
        ("refused", backend, code): calls in which a check refused a backend that is preferred to the chosen one.
        ("unserved",): calls that no backend may run.
        ("warmups", backend): warmed-up requests.
        ("failed", backend): exceptions in a backend.
        ("fallbacks", backend, reason): passes that packed SDPA ran instead, after an exception in this pass or an earlier one.
        ("bytes", backend, direction), ("flops", backend, direction): estimated work under NSA_DEBUG_TRITON or NSA_DEBUG_TIMING.
    """
    with _lock:
        _fold()
        return dict(_counters)


def counters() -> dict[str, int]:
    """The counters since the process started, by name: "refused.triton-group.min-length"."""
    return {".".join(name): number for name, number in tallies().items()}


def _fold() -> None:
    """Count the decisions recorded since the last time and drop the oldest. Under the lock; other threads may append meanwhile."""
    global _counted
    end = len(_recorded)
    new = {id(decision): decision for decision in _recorded[_counted:end]}
    for key, calls in collections.Counter(map(id, _recorded[_counted:end])).items():
        for name in _names(new[key]):
            _counters[name] += calls
    surplus = max(0, end - KEPT_DECISIONS)
    del _recorded[:surplus]
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
    """Seconds on a host clock after all work on the device. It synchronises the device: for NSA_DEBUG_TIMING and warm-up alone."""
    if device_type == "cuda":
        import torch  # replay needs this module, and no torch

        torch.cuda.synchronize()
    return time.perf_counter()
