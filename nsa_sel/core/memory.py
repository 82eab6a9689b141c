"""The one memory of decisions, by classes of requests and by the facts of whole calls.

An entry holds for one state: the flags of the environment, the tuning that was read, and the backend that `use_backend` forces.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from typing import Any

from nsa_sel.settings import tuned
from nsa_sel.settings.flags import environment

forced_name: ContextVar[str | None] = ContextVar("nsa_sel_backend", default=None)  # by `use_backend`
_memory: dict[Any, Any] = {}
_MOST = 8192  # entries


def recall(facts: Hashable) -> Any:
    """What `remember` stored for these facts in this state; None if nothing, or if facts is None."""
    try:
        return None if facts is None else _memory.get((facts, _state()))
    except TypeError:  # an argument that is not hashable, which the checks refuse
        return None


def facts_of_tensors(q: Any, k: Any, v: Any) -> tuple[Any, ...] | None:
    """All that checks and requests read of q, k and v, as part of the facts of a call; None where they must see them each time."""
    try:
        return (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        )  # fmt: skip
    except (AttributeError, RuntimeError):  # no tensor, or one without strides or memory
        return None


def remember(facts: Hashable, found: Any) -> None:
    """Store what facts that are not None led to."""
    if facts is None:
        return
    if len(_memory) >= _MOST:
        _memory.clear()
    _memory[facts, _state()] = found


def forget() -> None:
    """Drop all entries."""
    _memory.clear()


def _state() -> tuple[Any, ...]:
    return environment(), tuned.token(), forced_name.get()
