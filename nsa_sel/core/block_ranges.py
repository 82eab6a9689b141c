"""Ranges from block indices, and distinct ones: by one kernel on a GPU, by plain PyTorch elsewhere and where operations are traced.

A CUDA graph captures PyTorch's operations, too, where it can't keep a plan: it needs another kernel than calls before the capture, and
one that is loaded within a capture breaks it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.core import transforms
from nsa_sel.core.arguments import check_flag, checked_blocks, padded, range_dtype, whole_blocks
from nsa_sel.core.ranges import disjoint
from nsa_sel.core.transforms import capturing
from nsa_sel.errors import warn

KERNEL = "nsa_sel.backends._triton.block_ranges"  # imported with the first block indices on a GPU
_failed: list[bool] = []  # an entry once the kernel has failed: it is not tried again


def ranges_of_blocks(
    block_indices: Tensor, block_size: int, block_counts: Tensor | None, disjoint: bool
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Ranges [B,S,G,n,2] from the arguments of `Selection.from_blocks`, and those of distinct blocks (`ranges.disjoint`) where a kernel
    has found them."""
    given = (block_indices,) if block_counts is None else (block_indices, block_counts)
    key = _key(block_indices, block_size, block_counts, disjoint)
    alike: _Alike | None = None if key is None else transforms.find_class(_classes.get(key, ()), *given)
    if alike is not None and alike.as_given:
        indices, counts = block_indices, block_counts
    else:
        check_flag("disjoint", disjoint)
        indices, counts = checked_blocks(block_indices, block_size, block_counts)
        if alike is None and _takes(indices):
            alike = _Alike.of(indices, block_size, disjoint, indices is block_indices and counts is block_counts)
            if key is not None:
                if len(_classes) >= _MOST:
                    _classes.clear()
                _classes[key] = transforms.with_class(_classes.get(key, ()), alike, *given)
    found: tuple[Tensor, Tensor | None] | None = None
    if alike is not None and not _failed and not (alike.several and capturing(indices)):
        found = _run("block_ranges", indices, counts, block_size, alike.dtype, alike.find_unique, alike.known)
    return (whole_blocks(padded(indices, counts), block_size), None) if found is None else found


class _Alike(NamedTuple):
    """What is the same for all block indices of a class that a kernel takes."""

    as_given: bool  # checks only look
    dtype: torch.dtype  # of the ranges
    several: bool  # blocks of a row, maybe not distinct
    find_unique: bool
    known: dict[Any, Any]  # recordings

    @classmethod
    def of(cls, indices: Tensor, block_size: int, disjoint: bool, as_given: bool) -> _Alike:
        several = not disjoint and indices.shape[-1] > 1
        dtype = torch.int64 if indices.dtype == torch.int64 else range_dtype(block_size)
        # What a plan may keep: see `Selection.plan`.
        return cls(as_given, dtype, several, several and not torch.is_inference_mode_enabled(), {})


_classes: dict[Any, transforms.Classes] = {}
_MOST = 1024  # shapes


def _key(block_indices: Any, block_size: Any, block_counts: Any, disjoint: Any) -> tuple[Any, ...] | None:
    """What tells classes apart beside guards, and the shapes, which keep them few; None where no kernel runs, or guards can't be asked."""
    if type(block_size) is not int or type(disjoint) is not bool or not transforms.plain(block_indices):
        return None
    try:
        return block_indices.shape, block_size, None if block_counts is None else block_counts.shape, disjoint
    except (AttributeError, RuntimeError):  # no tensor, or a nested one
        return None


def distinct_ranges(ranges: Tensor, block_size: int | None) -> Tensor:
    """`ranges.disjoint`, of blocks on a GPU by one kernel."""
    found: Tensor | None = None
    if block_size is not None and _takes(ranges) and not capturing(ranges):
        found = _run("distinct_ranges", ranges, block_size)
    return disjoint(ranges) if found is None else found


def _takes(x: Tensor) -> bool:
    """Whether a kernel takes indices or ranges."""
    if not on_gpu(x) or not transforms.plain(x) or not x.numel():
        return False
    return not _failed and _kernel() is not None


def _run(name: str, x: Tensor, *others: Any) -> Any:
    """What a function of the kernels' module returns on the device of x; None once one has failed."""
    try:
        if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(x.device):
                return getattr(_kernel(), name)(x, *others)
        return getattr(_kernel(), name)(x, *others)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _failed.append(True)
        warn(f"the kernel of block indices failed, PyTorch's operations replace it from now on: {error!r}")
        return None


def on_gpu(indices: Tensor) -> bool:
    """Whether the kernel may run."""
    return indices.is_cuda


@functools.cache
def _kernel() -> Any:
    """Its module, None without Triton."""
    return importlib.import_module(KERNEL) if importlib.util.find_spec("triton") is not None else None
