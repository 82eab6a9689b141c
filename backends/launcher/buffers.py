"""Allocate uninitialized tensors in half the host time of `torch.empty`: `unwritten` for results, `temporary` for the
rest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# torch.compile's generated code calls these functions. They allocate without the dispatcher and the argument parser.
from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda  # type: ignore[attr-defined]

from nsa_sel.backends.launcher.cuda_driver import thread


def temporary(call: Any, like: Tensor, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized tensor that lives until the pass of the Call, ChooseCall or WindowCall ends, from its
    workspace if it has one."""
    workspace = call.workspace
    taken: Tensor | None = None if workspace is None else workspace.take(sizes, like.dtype if dtype is None else dtype)
    if taken is None:
        return unwritten(like, *sizes, dtype=dtype)
    return taken.fill_(float("nan")) if torch.are_deterministic_algorithms_enabled() and taken.is_floating_point() else taken


def unwritten(like: Tensor, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return `like.new_empty(sizes, dtype=dtype)` for at least one size. `like` is on the CPU, the current GPU or meta,
    not fake."""
    # With deterministic algorithms PyTorch fills new tensors with NaN, so that checks notice elements that no kernel
    # wrote.
    if torch.are_deterministic_algorithms_enabled() or like.is_meta:
        return like.new_empty(sizes, dtype=dtype)
    made: Tensor = allocator(like)(sizes, contiguous(sizes), like.dtype if dtype is None else dtype)
    if thread.recording is not None:
        thread.recording.hold(made)
    return made


def bits_dtype(rows: int) -> torch.dtype:
    """Return the smallest integer dtype with one bit per row, for at most 64 rows."""
    return next(x for x in (torch.int8, torch.int16, torch.int32, torch.int64) if torch.iinfo(x).bits >= rows)


def allocator(like: Tensor) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """Return a function (sizes, strides, dtype) -> tensor that allocates on `like`'s device: the CPU or the current
    GPU."""
    return _empty_strided_cuda if like.is_cuda else _empty_strided_cpu  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1024)
def contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor. As in PyTorch, an empty dimension counts as one element."""
    steps = [1]
    for size in sizes[:0:-1]:
        steps.append(steps[-1] * max(1, size))
    return tuple(reversed(steps))
