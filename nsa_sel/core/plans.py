"""What a Selection caches: plans of backends and measured statistics, and how to tell whether they are valid."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.settings.flags import debugging


def validates(ranges: Tensor) -> bool:
    """Whether to validate a selection when it is made. Not in a CUDA graph, which can't be read; compiled calls do it when they run."""
    return not torch.compiler.is_compiling() and debugging() and not capturing(ranges)


def capturing(ranges: Tensor) -> bool:
    """Whether a CUDA graph is being captured; its replays see what is in the ranges by then."""
    return ranges.is_cuda and torch.cuda.is_current_stream_capturing()


class Exact(NamedTuple):
    """What `measure` found and decisions use."""

    longest: int  # keys of the longest row, before the causal clamp
    sharing: tuple[float, ...] | None  # to two digits
    mean: int  # keys of a row on average, to two digits
    total: tuple[int, int] | None  # S_kv, and the keys of all rows at the default positions


class Plan(NamedTuple):
    """A cached plan."""

    states: list[Any]  # of `made_from` when it was built
    made_from: tuple[Any, ...]  # kept alive, so that no other tensor reuses the memory
    value: Any


class Snapshot(NamedTuple):
    """All that is cached for one version of the ranges. It is replaced as a whole, so that a thread sees an old one or a new one."""

    version: int  # of the ranges
    copy: Tensor | None  # of the ranges, where comparing is cheap (CPU) or asked for (debugging)
    exact: Exact | None
    plans: dict[Any, Plan]


UNKNOWN = "unknown"  # the state of a tensor without a version counter


def state_of(x: Any) -> Any:
    """A value that changes when x is written or replaced; of a plain value the value itself."""
    if not isinstance(x, Tensor):
        return x
    if x.is_cpu:  # its few values: a write through NumPy has no version
        return x.dtype, x.shape, x.detach().contiguous().numpy().tobytes()
    return UNKNOWN if x.is_inference() else (x.data_ptr(), x.dtype, x.shape, x.stride(), x._version)
