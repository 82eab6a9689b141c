"""Events as JSON lines under the logger `nsa_sel`, the last decisions, and counters. They cost next to nothing when nobody listens."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Iterator
from typing import Any

from nsa_sel.core import forks
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import Request

LOGGER = logging.getLogger("nsa_sel")
LOGGER.addHandler(logging.NullHandler())
KEPT_DECISIONS = 1024

_recorded: list[Decision] = []  # of the last calls, at least KEPT_DECISIONS of them
_counted = 0  # the first entries of these that are in the counters already
_pending: list[tuple[tuple[str, ...], int]] = []  # what `count` was told and the counters lack
_counters: collections.Counter[tuple[str, ...]] = collections.Counter()
_lock = forks.lock()


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
    _pending.append((name, by))  # as in `record`: every backward pass counts
    if len(_pending) >= 2 * KEPT_DECISIONS:
        with _lock:
            _fold()


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
        ("bytes", backend, direction), ("flops", backend, direction): estimated work, where `Settings.traced`.
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
    pending = len(_pending)
    for name, by in _pending[:pending]:
        _counters[name] += by
    del _pending[:pending]
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
