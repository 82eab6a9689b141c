"""New tensors for kernels to write, in half the host time of `torch.empty`: a call makes two of them, four where rows are split.

What a pass returns is `unwritten`; what it needs until it ends is `temporary`, and may lie in the caller's workspace.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

# What the code that torch.compile generates calls: a tensor straight from the allocator, past the dispatcher and its parser of arguments.
from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from nsa_sel.core.call import Call


def temporary(call: Call, like: Tensor, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
    """As `unwritten`, until the pass of the call ends: from the call's workspace, where it has one."""
    if call.workspace is not None:
        taken = call.workspace.take(sizes, like.dtype if dtype is None else dtype)
        if taken is not None:
            return taken.fill_(float("nan")) if torch.are_deterministic_algorithms_enabled() and taken.is_floating_point() else taken
    return unwritten(like, *sizes, dtype=dtype)


def unwritten(like: Tensor, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
    """`like.new_empty(sizes, dtype=dtype)`, contiguous, where `like` is on the CPU or on the current GPU, as it is in a backend.

    One size or more; `like` is a real tensor, not one that stands for another while PyTorch traces.
    """
    if torch.are_deterministic_algorithms_enabled():  # has PyTorch fill new tensors with NaN, by which checks see what nobody wrote
        return like.new_empty(sizes, dtype=dtype)
    make = _empty_strided_cuda if like.is_cuda else _empty_strided_cpu
    made: Tensor = make(sizes, _contiguous(sizes), like.dtype if dtype is None else dtype)
    return made


@functools.lru_cache(maxsize=1024)
def _contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor; as in PyTorch, a dimension of no elements counts as one of one."""
    steps = [1]
    for size in sizes[:0:-1]:
        steps.append(steps[-1] * max(1, size))
    return tuple(reversed(steps))
