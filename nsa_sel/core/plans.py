"""Plans that a selection caches for one version of its ranges: lists, unions and counts that backends build from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_PLANS = 16
MOST_SEARCHED = 128  # most blocks of a row whose duplicates the kernel that makes ranges removes: of more it would sort for longer
DISJOINT = ("disjoint",)  # the key of a tuple that begins with `Selection.disjoint_ranges`


class Plan:
    """A cached plan."""

    __slots__ = ("made_from", "states", "value")

    def __init__(self, value: Any, states: Sequence[Any] = (), made_from: tuple[Any, ...] = ()) -> None:
        self.value = value
        self.states = states  # the states that `made_from` had when the plan was built
        self.made_from = made_from  # kept alive, so that no other tensor reuses the memory

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of the plan's tensors."""
        return tuple([x.data_ptr() for x in tensors_of(self.value)])


class Part(NamedTuple):
    """A contiguous tensor within a buffer of int32."""

    offset: int  # bytes
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, buffer: Tensor) -> Tensor:
        typed = buffer if self.dtype == torch.int32 else buffer.view(self.dtype)
        return typed.as_strided(self.sizes, self.strides, self.offset // self.dtype.itemsize)


class PlanInBuffer:
    """A plan of the ranges alone, whose tensors lie in one buffer. Most are read by kernels only: views take time, and
    are made when Python asks for the value."""

    __slots__ = ("_begin", "_facts", "_value", "buffer")
    states, made_from = (), ()

    def __init__(self, buffer: Tensor, begin: int, facts: tuple[Any, tuple[Any, ...], tuple[int, ...]]) -> None:
        """begin: the buffer's address. facts: the type of the value, its fields (tensors as `Part`), and the offsets of
        its tensors."""
        self.buffer, self._begin, self._facts, self._value = buffer, begin, facts, None

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of the plan's tensors."""
        begin = self._begin
        return tuple([begin + offset for offset in self._facts[2]])

    @property
    def value(self) -> Any:
        """Return the plan, a tuple of tensors and numbers."""
        if self._value is None:
            kind, fields, _ = self._facts
            self._value = kind(x.of(self.buffer) if type(x) is Part else x for x in fields)
        return self._value


Plans = dict[Any, Plan | PlanInBuffer]  # by key and, on a GPU, by stream


def make_room(plans: Plans, new: int) -> None:
    """Drop the oldest plans of many, to add `new` ones: a growing KV cache makes new keys at every step."""
    while len(plans) + new > MOST_PLANS and plans:
        plans.pop(next(iter(tuple(plans)), None), None)  # a tuple: another thread may add a plan meanwhile


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a plan's or a pass's value, if it is a tuple."""
    return [x for x in value if isinstance(x, Tensor)] if isinstance(value, tuple) else []
