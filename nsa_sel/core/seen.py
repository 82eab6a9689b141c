"""What calls led to, found again by their tensors: one check in C++ of all that PyTorch knows of them, and a key of plain values."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # type: ignore[attr-defined]  # what torch.compile's graphs are guarded by

from nsa_sel.core import memory

_MOST = 8  # entries of a key


class Seen(NamedTuple):
    """What tensors must be like, and what those led to."""

    guards: Any
    low_bits: int
    found: Any


def recall(key: Hashable, q: Any, k: Any, v: Any, *others: Any) -> tuple[Any, bool] | None:
    """What `remember` stored for this key and tensors of the same class, and whether q, k and v all begin at multiples of 16 bytes; None if
    nothing.

    The class: Python type, dtype, device, shape and strides of each, whether autograd records it, the dispatch keys of tensors and thread
    (tracing, torch.func, modes, autocast, inference mode, lazy negation), and the lowest bits of q's, k's and v's addresses.
    """
    entries = memory.recall(key)
    if entries is not None:
        for guards, low_bits, found in entries:
            if guards.check(*_distinct(q, k, v), *others) and low_bits == _low_bits(q, k, v):
                return found, not low_bits
    return None


def remember(key: Hashable, found: Any, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> None:
    """Store what a key and tensors led to, in place of what is stored for their class. The tensors have memory."""
    tensors, low_bits = (*_distinct(q, k, v), *others), _low_bits(q, k, v)
    entry = Seen(TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None), low_bits, found)
    kept = [x for x in memory.recall(key) or () if x.low_bits != low_bits or not x.guards.check(*tensors)]
    memory.remember(key, [*kept[1 - _MOST :], entry])


def _distinct(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """Guards refuse one tensor given twice."""
    return (q, k) if v is k else (q, k, v)


def _low_bits(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Of the addresses. If they are not 0, they do not tell whose they are."""
    return (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
