"""Checks of several ranks that make different calls; tests/helpers/distributed_checks.py runs them."""

from __future__ import annotations

import ctypes
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import nsa_sel
from nsa_sel import Selection
from nsa_sel.core import decide
from nsa_sel.distributed import agreement, check_ranks, context_parallel_attention, ended
from nsa_sel.errors import ArgumentError, BackendError, NsaSelError
from nsa_sel.settings import tuned
from tests.helpers.ranks import BACKENDS, DEVICE, mine, problem, rank, ranks


@contextmanager
def only_rank(number: int, name: str, value: str) -> Iterator[None]:
    """A flag on one rank alone."""
    if rank() == number:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def call_of(S: int, **how: Any) -> Tensor:
    q, k, v, selection = problem(S)
    return context_parallel_attention(mine(q, 1), mine(k, 2), mine(v, 2), mine(selection.ranges, 1), **how)


def ranks_agree() -> None:
    check_ranks()
    meetings = agreement._groups[dist.group.WORLD].rounds
    call_of(224)  # of no other check
    call_of(224)
    assert agreement._groups[dist.group.WORLD].rounds == meetings + 1, "reports are compared once per class"
    dist.barrier()
    assert not dist.group.WORLD.get_group_store().check([f"nsa_sel/round{meetings}/rank0"]), "a new process group would find it"
    check_ranks()
    with only_rank(1, "NSA_DEBUG_LOG", os.devnull):  # a log for each rank is fine
        call_of(64)
    nsa_sel.log_to(None)
    with only_rank(1, "NSA_SEL_TRITON_MIN_L", "77"):
        for work in (lambda: call_of(128), check_ranks):
            with pytest.raises(NsaSelError, match=r"rank 1 .*settings\.sel_triton_min_L is 77 there, .+ on rank 0"):
                work()
    with pytest.raises(NsaSelError, match=r"rank 1 .*override is None there, \{'backend': 'sdpa-packed', 'source': 'argument'\} on rank 0"):
        call_of(128, backend=None if rank() else "sdpa-packed")
    with pytest.raises(NsaSelError, match=r"exchange is 'gather' there, 'auto' on rank 0"):
        call_of(128, exchange="gather" if rank() else "auto")
    with pytest.raises(NsaSelError, match=r"request\.S is \d+ there, \d+ on rank 0; keys is 96 there, 80 on rank 0"):
        call_of((80 + 16 * rank()) * ranks())
    real, tuned.version_of = tuned.version_of, lambda package: f"{package}-{rank()}"
    with pytest.raises(NsaSelError, match=r"versions\.numba is 'numba-1' there, 'numba-0' on rank 0"):
        check_ranks()
    tuned.version_of = real
    with pytest.raises(BackendError, match="nothing-such"):
        call_of(128, backend="nothing-such")
    call_of(128)


def rank_0_decides() -> None:
    """Other ranks decide differently, and run rank 0's choice."""
    call_of(64)
    q, k, v, selection = problem(32)
    slices = mine(q, 1), mine(k, 2), mine(v, 2), mine(selection.ranges, 1)
    real = decide.select

    def other(request: Any, device: Any, backend: str | None = None) -> Any:
        decision = real(request, device, BACKENDS[0 if rank() else 1])
        return nsa_sel.core.decision.msgspec.structs.replace(decision, override=None)

    decide.select = other
    first = other(nsa_sel.decisions()[-1].request, nsa_sel.decisions()[-1].device).forward
    context_parallel_attention(*slices)
    decide.select = real
    chosen = [None] * ranks()
    dist.all_gather_object(chosen, (first, nsa_sel.decisions()[-1].forward))
    assert chosen[0][0] != chosen[1][0]
    assert {ran for _, ran in chosen} == {chosen[0][0]}


def assert_raises_on_all(work: Callable[[], object], *words: str) -> None:
    """The error survives pickling."""
    with pytest.raises(NsaSelError) as raised:
        work()
    assert all(word in str(raised.value) for word in words), raised.value
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def small_call(S: int = 32, D: int = 16, n: int = 1, dtype: torch.dtype = torch.float32, grad: bool = False, **how: Any) -> Tensor:
    """o of S rows of this rank, with different values on each rank; 32 by 16 has as many bytes as 16 by 32."""
    torch.manual_seed(rank())
    sizes = (1, S, 1, 2, D), (1, 1, S, D), (1, 1, S, D)
    q, k, v = (torch.randn(size, dtype=dtype, device=DEVICE, requires_grad=grad) for size in sizes)
    blocks = torch.arange(n, dtype=torch.int32, device=DEVICE).expand(1, S, 1, n).contiguous()
    return context_parallel_attention(q, k, v, Selection.from_blocks(blocks, how.pop("block", 16)), **how)


def calls_that_were_agreed_on_and_differ_raise_on_all_ranks() -> None:
    """Ranks agreed on both calls, and make different ones; afterwards they continue."""
    if DEVICE == "cuda":  # there it ends the process: gpus_stop_where_calls_differ
        return
    others: dict[str, dict[str, Any]] = {
        "keys is 16 there, 32 on rank 0": {"S": 16, "D": 32},
        "request.Dv is 32 there, 16 on rank 0": {"D": 32},
        "request.n is 2 there, 1 on rank 0": {"n": 2},
        "block_size is 8 there, 16 on rank 0": {"block": 8},
        "request.dtype is 'float64' there, 'float32' on rank 0": {"dtype": torch.float64},
        "request.needs_grad is True there, False on rank 0": {"grad": True},
        "scale is 0.5 there, 0.25 on rank 0": {"scale": 0.5},
        "q_pos is True there, False on rank 0": {"q_pos": torch.arange(32)},
        "override is {'backend': 'numba', 'source': 'argument'} there, None on rank 0": {"backend": "numba"},
    }
    for exchange in ("gather", "blocks", "rows"):
        right = small_call(exchange=exchange)
        for words, how in others.items():
            small_call(exchange=exchange, **how)
            assert_raises_on_all(lambda how=how, exchange=exchange: small_call(exchange=exchange, **(how if rank() else {})), words)
            assert torch.equal(small_call(exchange=exchange), right), words
    assert_raises_on_all(
        lambda: small_call(exchange="gather", S=48 if rank() else 32), "keys is 48 there, 32 on rank 0"
    )  # new to rank 1 alone
    assert_raises_on_all(lambda: small_call(exchange="gather" if rank() else "rows"), "exchange is 'gather' there, 'rows' on rank 0")
    with only_rank(rank(), "NSA_SEL_TRITON_MIN_L", "77"):
        small_call(exchange="gather")
    with only_rank(1, "NSA_SEL_TRITON_MIN_L", "77"):
        assert_raises_on_all(lambda: small_call(exchange="gather"), "settings.sel_triton_min_L is 77 there")
    small_call(exchange="gather")


def backward_passes_that_differ_raise_on_all_ranks() -> None:
    if DEVICE == "cuda":
        return
    for exchange in ("gather", "blocks", "rows"):
        first, second = (small_call(exchange=exchange, grad=True) for _ in range(2))
        assert_raises_on_all((second if rank() else first).sum().backward, "rank 1", "call is ")
        left = small_call(exchange=exchange, grad=True).sum()
        assert_raises_on_all(small_call if rank() else left.backward, "direction is 'forward' there, 'backward' on rank 0")
        small_call(exchange=exchange, grad=True).sum().backward()


def a_rank_that_fails_alone_is_noticed() -> None:
    """Its next call is not mistaken for the one that others wait in. check_ranks() lets ranks continue, too."""
    for together in (False, True):
        small_call(exchange="gather")
        if rank() == 1:
            with pytest.raises(ArgumentError):
                small_call(exchange="all")
        if together:
            check_ranks()
        elif DEVICE == "cpu":
            assert_raises_on_all(lambda: small_call(exchange="gather"), "rank 1", "call is ")
        else:
            check_ranks()
        small_call(exchange="gather")


def a_waiting_rank_says_what_changed() -> None:
    call_of(64)
    seconds, agreement.SECONDS = agreement.SECONDS, 0.5
    with only_rank(1, "NSA_SEL_TRITON_MIN_L", "77"):
        if rank() == 1:
            with pytest.raises(NsaSelError, match=r"rank 1 waited 0.5 seconds for rank 0 .*: settings\.sel_triton_min_L was .+, is 77\."):
                check_ranks()
    agreement.SECONDS = seconds
    dist.barrier()
    check_ranks()
    meetings = agreement._groups[dist.group.WORLD].rounds
    with only_rank(rank(), "NSA_DEBUG_TRITON", "1"):  # every call is compared
        call_of(64)
        call_of(64)
    assert agreement._groups[dist.group.WORLD].rounds == meetings + 2


def ranks_that_use_other_tuning_results_raise() -> None:
    """As where one of them has not called sync_tuning()."""
    call_of(64)
    device = nsa_sel.decisions()[-1].device
    if rank() == 1:
        tuned.share(device, tuned.TunedTable("mine.json", "abc", b"", {}, {}, None))
    words = r"rank 1 would not run what rank 0 runs: .*settings\.tuned is 'tuned: mine\.json abc' there, None on rank 0"
    with pytest.raises(NsaSelError, match=words):
        call_of(288)  # new to both: on a GPU a rank that has agreed on a class does not compare reports
    tuned.forget()
    call_of(64)


# Ranks that die: each in processes of its own


HOW: dict[str, Any] = {"exchange": "gather", "backend": "sdpa-packed"}


def dies(at: str, exchange: str) -> Callable[[], None]:
    """A check in which rank 1 dies before or after ranks have compared digests, or instead of reporting; rank 0 raises soon."""

    def check() -> None:
        how = {**HOW, "exchange": exchange}
        o = small_call(grad=True, **how)
        if rank() == 1:
            die_in_agreement(at)
        began = time.monotonic()
        if at == "before":
            assert_raises_on_all(
                lambda: small_call(**how), "rank 0 could not compare its call with those of the other ranks (call 2, forward)"
            )
        elif at == "report":
            assert_raises_on_all(lambda: small_call(S=48, **how), ENDED)
        else:
            with pytest.raises(RuntimeError, match="peer"):
                o.sum().backward() if at == "backward" else small_call(grad=True, **how)
        assert time.monotonic() - began < SOON, "it ends in an error, not in a timeout of the process group"

    check.__name__ = f"a_rank_that_dies_{at}_{exchange}_is_noticed"
    return check


ENDED = "rank 0 waits for rank 1 to agree, whose process has ended"
SOON = 20.0  # seconds, on a busy machine; ranks that live are waited for 20 minutes


def die_in_agreement(at: str) -> None:
    match = agreement._digests_match

    def die(*_: Any) -> Any:
        os._exit(0)

    if at == "report":
        agreement._compare_reports = die
    else:
        agreement._digests_match = die if at == "before" else lambda *of: match(*of) and die()


def slow_ranks_are_waited_for_and_dead_ones_before_a_first_call_are_not() -> None:
    """A rank reports, in its first call and in another, once the other has asked twice whether it has ended; then it ends before the first
    call of another group."""
    store, real, compare = dist.group.WORLD.get_group_store(), agreement.has_ended, agreement._compare_reports

    def report_late(*of: Any) -> Any:
        enough = store.add("asked", 0) + 2
        while store.add("asked", 0) < enough:
            time.sleep(0.05)
        return compare(*of)

    if rank() == 1:
        agreement._compare_reports = report_late
    else:
        agreement.has_ended = lambda group, of: (store.add("asked", 1), real(group, of))[1]
    for S in (32, 48):
        small_call(S, **HOW)
    other = dist.new_group([0, 1])
    if rank() == 1:
        os._exit(0)
    began = time.monotonic()
    assert_raises_on_all(lambda: small_call(group=other, **HOW), ENDED)
    assert_raises_on_all(check_ranks, ENDED)
    assert time.monotonic() - began < SOON


def dies_without_gloo(at: str) -> Callable[[], None]:
    """Ranks know by connections of ours that rank 1 has ended, before its first call or while reports are compared. Before, it is slow."""

    def check() -> None:
        if DEVICE == "cpu":
            ended.dist.get_backend_config = lambda group: "cuda:nccl"
        agreement.group_of(None, "context_parallel")  # tells the others where this rank listens
        dist.barrier()
        work: Callable[[], object] = check_ranks
        if at == "report":
            compare = agreement._compare_reports
            if rank() == 1:
                agreement._compare_reports = lambda *of: hold_the_interpreter(2.5 * agreement._ASK_EVERY) or compare(*of)
            small_call(**HOW)
            work = lambda: small_call(S=48, **HOW)  # noqa: E731
            if rank() == 1:
                die_in_agreement("report")
                work()
        elif rank() == 1 and os.fork():  # a process that it started, as for loading data, lives on
            os._exit(0)
        elif rank() == 1:
            time.sleep(SOON)
            os._exit(0)
        began = time.monotonic()
        assert not ended.has_ended(dist.group.WORLD, 0)
        assert_raises_on_all(work, f"rank {rank()} waits for rank 1 to agree, whose process has ended")
        assert time.monotonic() - began < SOON

    check.__name__ = f"a_rank_that_dies_{at}_without_gloo_is_noticed"
    return check


def hold_the_interpreter(seconds: float) -> None:
    """As code in C that does not release the GIL: no other thread of this process runs."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


WITHOUT_GLOO = dies_without_gloo("first"), dies_without_gloo("report")
DEATHS = (
    dies("before", "gather"),
    dies("report", "gather"),
    *(dies(at, exchange) for at in ("forward", "backward") for exchange in ("gather", "blocks", "rows")),
    slow_ranks_are_waited_for_and_dead_ones_before_a_first_call_are_not,
    *WITHOUT_GLOO,
)


def gpus_stop_where_calls_differ() -> None:
    """Both calls are agreed on and have equal bytes; no rank may see a result."""
    shapes = {"S": 32, "D": 16}, {"S": 16, "D": 32}
    for how in shapes:
        assert small_call(exchange="gather", **how).isfinite().all()
    with pytest.raises(RuntimeError):
        print("no error:", float(small_call(exchange="gather", **shapes[rank() % 2]).sum()))
