"""The one memory of decisions, by classes of requests and of calls (core/repeat.py), and of counts of sharing (core/count_sharing.py).

An entry holds for one state: the flags of the environment, the tuning that was read, and the backend that `use_backend` forces. Counts
are facts of the data: they hold in any state.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from typing import Any

from nsa_sel.settings import tuned
from nsa_sel.settings.flags import environment


class Count:
    """How much neighbors share in the calls of a class, to the digits of `Request.sharing`, and how many calls may use it."""

    __slots__ = ("left", "sharing")

    def __init__(self, sharing: tuple[float, ...] | None, left: float) -> None:
        self.sharing = sharing  # None: not counted yet, as in a CUDA graph's capture
        self.left = left

    def use(self) -> bool:
        """Take one of the calls; False where none is left, and in a distributed job, whose ranks must decide alike."""
        self.left -= 1
        return self.left >= 0 and not tuned.distributed()


forced_name: ContextVar[str | None] = ContextVar("nsa_sel_backend", default=None)  # by `use_backend`
_memory: dict[Any, Any] = {}
_counts: dict[Any, Count] = {}
_MOST = 8192  # entries


def recall(facts: Hashable) -> Any:
    """What `remember` stored for these facts in this state; None if nothing, or if facts is None."""
    try:
        return None if facts is None else _memory.get((facts, _state()))
    except TypeError:  # an argument that is not hashable, which the checks refuse
        return None


def remember(facts: Hashable, found: Any) -> None:
    """Store what facts that are not None led to."""
    if facts is None:
        return
    if len(_memory) >= _MOST:
        _memory.clear()
    _memory[facts, _state()] = found


def forget() -> None:
    """Drop all entries; counts stay."""
    _memory.clear()


def count_of(kind: Hashable) -> Count | None:
    """The count that is kept for this kind of call."""
    return _counts.get(kind)


def keep_count(kind: Hashable, count: Count) -> None:
    """Keep a count. Of the one before it no call is left, so that calls which remember that one ask again."""
    before = _counts.get(kind)
    if before is not None:
        before.left = 0
    if len(_counts) >= _MOST:
        _counts.clear()
    _counts[kind] = count


def forget_counts() -> None:
    """Drop all counts."""
    for count in _counts.values():
        count.left = 0
    _counts.clear()


def _state() -> tuple[Any, ...]:
    return environment(), tuned.token(), forced_name.get()
