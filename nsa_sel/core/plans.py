"""Plans that a selection caches: which tensors they were made from, and how many are kept."""

from __future__ import annotations

from typing import Any, NamedTuple

MOST_PLANS = 16


class Plan(NamedTuple):
    """A cached plan."""

    states: list[Any]  # of `made_from` when it was built
    made_from: tuple[Any, ...]  # kept alive, so that no other tensor reuses the memory
    value: Any


Plans = dict[Any, Plan]  # by key and, on a GPU, by stream


def keep(plans: Plans, on: tuple[Any, ...], value: Any, states: list[Any] | None = None, made_from: tuple[Any, ...] = ()) -> None:
    """Cache a plan. on: its key and the current stream; states, made_from: of `Plan`, by default those of a plan that
    depends on the ranges alone."""
    if len(plans) >= MOST_PLANS:  # a growing KV cache makes new keys at every step
        plans.pop(next(iter(tuple(plans)), None), None)  # a tuple: another thread may add a plan meanwhile
    plans[on] = Plan([] if states is None else states, made_from, value)
