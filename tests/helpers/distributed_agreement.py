"""Checks that ranks compare what their decisions depend on; tests/helpers/distributed_checks.py runs them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import nsa_sel
from nsa_sel import Selection
from nsa_sel.distributed import agreement, check_ranks, context_parallel_attention
from nsa_sel.errors import BackendError, NsaSelError
from nsa_sel.settings import tuned
from tests.helpers.ranks import DEVICE, mine, problem, rank


@contextmanager
def only_rank(number: int, name: str, value: str) -> Iterator[None]:
    """Set a flag on one rank alone."""
    if rank() == number:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def assert_raises_on_all(work: Callable[[], object], words: str) -> None:
    """Check the error, and that it survives pickling."""
    with pytest.raises(NsaSelError) as raised:
        work()
    assert words in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def small_call(S: int = 32, D: int = 16, n: int = 1, dtype: torch.dtype = torch.float32, grad: bool = False, **how: Any) -> Tensor:
    """Return o of S rows of this rank, with different values on each rank."""
    torch.manual_seed(rank())
    sizes = (1, S, 1, 2, D), (1, 1, S, D), (1, 1, S, D)
    q, k, v = (torch.randn(size, dtype=dtype, device=DEVICE, requires_grad=grad) for size in sizes)
    blocks = torch.arange(n, dtype=torch.int32, device=DEVICE).expand(1, S, 1, n).contiguous()
    return context_parallel_attention(q, k, v, Selection.from_blocks(blocks, how.pop("block", 16)), **how)


DIFFERENT_CALLS: dict[str, dict[str, Any]] = {  # what the error says -> arguments of all ranks but the first
    "keys is 16 there, 32 on rank 0": {"S": 16, "D": 32},
    "Dv is 32 there, 16 on rank 0": {"D": 32},
    "n is 2 there, 1 on rank 0": {"n": 2},
    "block_size is 8 there, 16 on rank 0": {"block": 8},
    "dtype is 'torch.float64' there, 'torch.float32' on rank 0": {"dtype": torch.float64},
    "needs_grad is True there, False on rank 0": {"grad": True},
    "scale is 0.5 there, 0.25 on rank 0": {"scale": 0.5},
    "has_pos is True there, False on rank 0": {"q_pos": torch.arange(32)},
    "exchange is 'rows' there, 'auto' on rank 0": {"exchange": "rows"},
    "backend is 'sdpa-packed' there, None on rank 0": {"backend": "sdpa-packed"},
}


def first_calls_that_differ_raise_on_all_ranks() -> None:
    """Ranks compare again until their calls are equal, and then no more."""
    group = dist.new_group()
    for words, how in DIFFERENT_CALLS.items():
        how = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in how.items()}
        assert_raises_on_all(lambda how=how: small_call(group=group, **(how if rank() else {})), words)
    with only_rank(1, "NSA_SEL_TRITON_MIN_L", "77"):
        assert_raises_on_all(lambda: small_call(group=group), "settings.sel_triton_min_L is 77 there")
    assert_raises_on_all(
        lambda: check_ranks(group) if rank() else small_call(group=group),
        "call is 'check_ranks' there, 'context_parallel_attention' on rank 0",
    )
    with only_rank(1, "NSA_DEBUG_LOG", os.devnull):  # a log for each rank is fine
        small_call(group=group)
    nsa_sel.log_to(None)
    with mock.patch.object(agreement, "_compare") as compare:
        small_call(group=group)
    compare.assert_not_called()


def every_call_is_compared_while_debugging() -> None:
    small_call()
    with only_rank(rank(), "NSA_DEBUG_TRITON", "1"):
        assert_raises_on_all(lambda: small_call(scale=0.5 if rank() else None), "scale is 0.5 there, 0.25 on rank 0")
        small_call()


def check_ranks_compares_versions_settings_and_tuning() -> None:
    check_ranks()
    with only_rank(1, "NSA_SEL_TRITON_MIN_L", "77"):
        assert_raises_on_all(check_ranks, "settings.sel_triton_min_L is 77 there")
    with mock.patch.object(tuned, "version_of", lambda package: f"{package}-{rank()}"):
        assert_raises_on_all(check_ranks, "versions.numba is 'numba-1' there, 'numba-0' on rank 0")
    small_call()
    if rank() == 1:  # as where one of them has not called sync_tuning()
        tuned.share(nsa_sel.decisions()[-1].device, tuned.TunedTable("mine.json", "abc", b"", {}, {}, None))
    assert_raises_on_all(check_ranks, "tuning is 'mine.json abc' there, None on rank 0")
    tuned.forget()
    check_ranks()


def unknown_backends_are_refused_on_all_ranks() -> None:
    q, k, v, selection = problem(64)
    with pytest.raises(BackendError, match="nothing-such"):
        context_parallel_attention(mine(q, 1), mine(k, 2), mine(v, 2), mine(selection.ranges, 1), backend="nothing-such")


CHECKS = (
    first_calls_that_differ_raise_on_all_ranks,
    every_call_is_compared_while_debugging,
    check_ranks_compares_versions_settings_and_tuning,
    unknown_backends_are_refused_on_all_ranks,
)
