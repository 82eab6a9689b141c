"""Counters by reason, over threads and forks."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

import nsa_sel
import nsa_sel.core.decide
from nsa_sel.backends import numba_cpu
from nsa_sel.telemetry import events
from tests.helpers.calls import counted
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.files import ROOT
from tests.helpers.policy_cases import CPU, H100, LONG, SHORT, decide, replace


def test_calls_are_counted_by_backend_and_direction() -> None:
    q, k, v = make_qkv(1, 4, 1, 2, 16, S_kv=32, requires_grad=True)
    blocks = make_blocks(1, 4, 1, 32, 2, 8)
    with counted() as grown:
        for _ in range(3):
            nsa_sel.selection_attention(q, k, v, blocks).sum().backward()
        nsa_sel.selection_attention(q, k, v, blocks, backend="sdpa-packed")
        with nsa_sel.use_backend("sdpa-packed"):
            nsa_sel.selection_attention(q, k, v, blocks)
    assert grown == {
        ("calls", "numba"): 3, ("backward", "numba"): 3, ("calls", "sdpa-packed"): 2,
        ("forced", "argument"): 1, ("forced", "use_backend"): 1,
    }  # fmt: skip


def test_refusals_of_the_preferred_are_counted_by_code() -> None:
    decision = decide(SHORT, H100)
    assert decision.steps == ("triton-group: min-length", "triton-token: min-length")
    with counted() as grown:
        events.record(decision, SHORT)
        events.record(decision, SHORT)
        events.record(decide(LONG, H100), LONG)
    refused = {("refused", name, "min-length"): 2 for name in ("triton-group", "triton-token")}
    assert grown == {("calls", "sdpa-packed"): 2, ("calls", "triton-group"): 1, **refused}


def test_failures_and_fallbacks_are_counted_by_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv(1, 4, 1, 2, 16, S_kv=32, requires_grad=True)
    blocks = make_blocks(1, 4, 1, 32, 2, 8)
    recorded = nsa_sel.selection_attention(q, k, v, blocks)
    monkeypatch.setattr(numba_cpu, "forward", lambda call: 1 / 0)
    with counted() as grown, pytest.warns(RuntimeWarning, match="numba failed"):
        nsa_sel.selection_attention(q, k, v, blocks)
    assert grown == {("failed", "numba"): 1, ("fallbacks", "numba", "ZeroDivisionError"): 1, ("calls", "sdpa-packed"): 1}
    with counted() as grown:
        nsa_sel.selection_attention(q, k, v, blocks)
        recorded.sum().backward()  # its decision is from before
    fallback = {("fallbacks", "numba", "failed-before"): 1, ("backward", "sdpa-packed"): 1}
    assert grown == {("calls", "sdpa-packed"): 1, ("refused", "numba", "failed-before"): 1, **fallback}


def test_no_call_is_lost_between_threads() -> None:
    decisions = [replace(decide(SHORT, CPU), rule=str(i)) for i in range(4)]

    def record(decision: Any) -> None:
        for _ in range(2000):
            events.record(decision, SHORT)
            events.count("failed", "nobody")

    with counted() as grown:
        threads = [threading.Thread(target=record, args=(decision,)) for decision in decisions]
        for thread in threads:
            thread.start()
        for _ in range(50):
            events.counters()
        for thread in threads:
            thread.join()
    assert (grown["calls", str(decisions[0].forward)], grown["failed", "nobody"]) == (8000, 8000)


def test_many_decisions_are_counted_and_the_last_kept() -> None:
    decision, calls = decide(SHORT, CPU), 3 * events.KEPT_DECISIONS
    with counted() as grown:
        for i in range(calls):
            events.record(replace(decision, rule=str(i)), SHORT)
        assert len(events._recorded) < 2 * events.KEPT_DECISIONS
        assert [kept.rule for kept in events.decisions()] == [str(i) for i in range(calls)][-events.KEPT_DECISIONS :]
    assert grown["calls", str(decision.forward)] == calls
    assert [kept.rule for kept in events.decisions()][-1] == str(calls - 1)


# Forks


FORKING = """
import os, signal, threading, time
from nsa_sel import forks
from nsa_sel.telemetry import events
locks = {"observe": events._lock, "any": forks.lock()}
for name, lock in locks.items():
    held = threading.Event()

    def hold():
        with lock:
            held.set()
            time.sleep(0.1)  # the fork comes meanwhile, and finds the lock taken

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits for ever
        with lock:
            events.count("failed", "nobody")
            events.counters()
        os._exit(0)
    print(name, os.waitpid(child, 0)[1])
    with lock:  # free here too
        thread.join()
with locks["any"]:  # as in a signal handler that interrupts the holder
    child = os.fork()
    if child == 0:
        os._exit(0)
    print("holder", os.waitpid(child, 0)[1])
"""


def test_a_fork_while_another_thread_holds_a_lock_leaves_it_free_in_the_child() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKING], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "observe 0\nany 0\nholder 0\n", done.stderr
