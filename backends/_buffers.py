"""New tensors for kernels to write, in half the host time of `torch.empty`: `unwritten` for results, `temporary` for the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The functions that torch.compile's generated code calls: they allocate without the dispatcher and argument parser.
from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda  # type: ignore[attr-defined]

from nsa_sel.backends._driver import thread


def temporary(call: Any, like: Tensor, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
    """As `unwritten`, until the pass of the call ends: from the workspace of the Call, ChooseCall or WindowCall, if it has one."""
    workspace = call.workspace
    taken: Tensor | None = None if workspace is None else workspace.take(sizes, like.dtype if dtype is None else dtype)
    if taken is None:
        return unwritten(like, *sizes, dtype=dtype)
    return taken.fill_(float("nan")) if torch.are_deterministic_algorithms_enabled() and taken.is_floating_point() else taken


def unwritten(like: Tensor, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
    """`like.new_empty(sizes, dtype=dtype)` for one size or more; `like` is on the CPU, the current GPU or meta, and no fake tensor."""
    # Deterministic algorithms have PyTorch fill new tensors with NaN, which shows checks what no kernel wrote.
    if torch.are_deterministic_algorithms_enabled() or like.is_meta:
        return like.new_empty(sizes, dtype=dtype)
    made: Tensor = allocator(like)(sizes, contiguous(sizes), like.dtype if dtype is None else dtype)
    if thread.recording is not None:
        thread.recording.made.append(made)
    return made


def bits_dtype(rows: int) -> torch.dtype:
    """The shortest integers with a bit for each of so many rows, at most 64."""
    return next(x for x in (torch.int8, torch.int16, torch.int32, torch.int64) if torch.iinfo(x).bits >= rows)


def allocator(like: Tensor) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """Makes tensors of these sizes, strides and dtype where `like` is: on the CPU or the current GPU."""
    return _empty_strided_cuda if like.is_cuda else _empty_strided_cpu  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1024)
def contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor; as in PyTorch, an empty dimension counts as one element."""
    steps = [1]
    for size in sizes[:0:-1]:
        steps.append(steps[-1] * max(1, size))
    return tuple(reversed(steps))
