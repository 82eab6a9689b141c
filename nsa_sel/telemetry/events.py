"""Events as JSON lines under the logger `nsa_sel`, the last decisions, and counters. They cost almost nothing without a
listener."""

from __future__ import annotations

import collections
import logging
import time
from typing import Any

from nsa_sel import forks
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import Request

LOGGER = logging.getLogger("nsa_sel")
LOGGER.addHandler(logging.NullHandler())
KEPT_DECISIONS = 1024

_recorded: list[Decision] = []  # decisions of the last calls, at least KEPT_DECISIONS of them
_counted = 0  # number of entries at the head of _recorded that _counters include
_pending: list[tuple[tuple[str, ...], int]] = []  # increments passed to `count` that _counters do not include yet
_counters: collections.Counter[tuple[str, ...]] = collections.Counter()
_lock = forks.lock()


def listening() -> bool:
    """Return True if a handler receives events. Ask before doing work that only an event needs."""
    return LOGGER.isEnabledFor(logging.INFO)


def emit(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event (`sel.*`, `sel.triton.*`) with its fields."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, event, extra={"nsa_sel": fields})


def record(decision: Decision, request: Request) -> None:
    """Store and log the decision of one call. `request` has the call's exact sizes; the decision has those of its
    class."""
    # Every call runs this. Appending needs no lock, and decisions are counted later, many at a time.
    _recorded.append(decision)
    if len(_recorded) >= 2 * KEPT_DECISIONS:
        with _lock:
            _update_counters()
    if LOGGER.isEnabledFor(logging.INFO):
        emit("sel.decision", request=request, decision=decision)


def decisions() -> tuple[Decision, ...]:
    """Return the decisions of this process's last calls, oldest first, at most `KEPT_DECISIONS`."""
    return tuple(_recorded[-KEPT_DECISIONS:])


def count(*name: str, by: int = 1) -> None:
    """Add `by` to a counter. name: the counter's kind and labels, such as ("failed", "triton-tile")."""
    _pending.append((name, by))  # without a lock, as in `record`: every backward pass counts
    if len(_pending) >= 2 * KEPT_DECISIONS:
        with _lock:
            _update_counters()


def tallies() -> dict[tuple[str, ...], int]:
    """Return all counters since the process started, by kind and labels.

    Returns:
        ("calls", backend): forward passes.
        ("backward", backend): backward passes.
        ("forced", source): calls with a backend forced by name.
        ("refused", backend, code): calls in which a check refused a backend that is preferred to the chosen one.
        ("unserved",): calls that no backend can run.
        ("warmups", backend): warmed-up requests.
        ("failed", backend): exceptions in a backend.
        ("fallbacks", backend, reason): passes that packed SDPA ran instead, after an exception in this pass or an
        earlier one. ("bytes", backend, direction), ("flops", backend, direction): estimated work, counted if
        `Settings.traced`.
    """
    with _lock:
        _update_counters()
        return dict(_counters)


def counters() -> dict[str, int]:
    """Return the counters since the process started, by name, such as "refused.triton-group.min-length"."""
    return {".".join(name): number for name, number in tallies().items()}


def _update_counters() -> None:
    """Add pending increments and new decisions to the counters, and drop old decisions. Requires the lock; other
    threads may append."""
    global _counted
    pending = len(_pending)
    for name, by in _pending[:pending]:
        _counters[name] += by
    del _pending[:pending]
    end = len(_recorded)
    new = {id(decision): decision for decision in _recorded[_counted:end]}
    for key, calls in collections.Counter(map(id, _recorded[_counted:end])).items():
        decision = new[key]
        _counters["calls", str(decision.forward)] += calls
        if decision.override is not None and not decision.override.source.startswith("failure of "):  # those count as fallbacks
            _counters["forced", decision.override.source] += calls
        stepped_over = {step.partition(": ")[0] for step in decision.steps}
        for verdict in decision.verdicts:
            for reason in verdict.forward if verdict.backend in stepped_over else ():
                _counters["refused", verdict.backend, reason.code] += calls
    surplus = max(0, end - KEPT_DECISIONS)
    del _recorded[:surplus]
    _counted = end - surplus


def now(device_type: str) -> float:
    """Return seconds on a host clock after all work on the device. Synchronizes: only for NSA_DEBUG_TIMING and warm-up."""
    if device_type == "cuda":
        import torch  # Decision.replay needs this module without torch

        torch.cuda.synchronize()
    return time.perf_counter()
