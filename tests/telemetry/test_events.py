"""What is observed: counters by reason, keys read, backward estimates, times of buckets, NVTX ranges, Prometheus; and nothing when off."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nsa_sel
import nsa_sel.core.decide
from nsa_sel.backends import _loads, numba_cpu
from nsa_sel.core.call import Call
from nsa_sel.core.check import check_call
from nsa_sel.errors import BackendError, NsaSelError
from nsa_sel.oracle import oracle_mask
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.schema import Settings
from nsa_sel.telemetry import events, passes, prometheus
from tests.core.test_imports import modules
from tests.helpers.cases import make_blocks, make_qkv, make_spans
from tests.helpers.paths import ROOT
from tests.helpers.policy_cases import CPU, H100, LONG, SHORT, decide, replace


@contextlib.contextmanager
def counted() -> Iterator[dict[tuple[str, ...], int]]:
    """What the counters grew by inside the `with` block; filled when it ends."""
    grown: dict[tuple[str, ...], int] = {}
    before = events.tallies()
    yield grown
    grown.update({name: n - before.get(name, 0) for name, n in events.tallies().items() if n > before.get(name, 0)})


# Counters


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


def test_calls_that_nothing_may_run_are_counted() -> None:
    with counted() as grown, pytest.raises(BackendError):
        nsa_sel.core.decide.decide(LONG, CPU, "no-such-backend")
    assert grown == {("unserved",): 1}


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
from nsa_sel.core import forks
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


def test_no_lock_or_pool_is_made_that_a_fork_may_leave_taken() -> None:
    makes = re.compile(r"\b(?:R?Lock|Condition|Semaphore|Barrier|Queue|\w+PoolExecutor|register_at_fork|in_child)\(")
    sources = {name: file.read_text() for name, file in modules()}
    made = {name: makes.findall(source) for name, source in sources.items() if makes.search(source)}
    assert made.pop("core.forks") == ["RLock(", "register_at_fork(", "in_child(", "register_at_fork("]
    assert made == {"backends.numba_cpu": ["ThreadPoolExecutor(", "in_child("]}


# Keys read


def call_of(q: Any, k: Any, v: Any, selection: Selection, q_pos: Any = None, settings: Settings | None = None) -> Call:
    q, k, v, selection, scale, q_pos = check_call(q, k, v, selection, None, q_pos)
    return Call(q, k, v, selection, q_pos, scale, settings or settings_for(CPU))


@pytest.mark.parametrize(("S", "S_kv"), [(1, 40), (12, 12), (12, 40), (40, 40)])
@pytest.mark.parametrize("positions", [False, True])
def test_keys_read(S: int, S_kv: int, positions: bool) -> None:
    q, k, v = make_qkv(2, S, 2, 3, 16, S_kv=S_kv)
    ranges = make_spans("mixed", 2, S, 2, S_kv, 9)
    q_pos = torch.arange(S) % S_kv if positions else None
    selection = Selection.from_ranges(ranges, max_length=9)
    call = call_of(q, k, v, selection, q_pos)
    exact = int(oracle_mask(ranges, S_kv, S, q_pos).sum())
    assert passes.keys_read(call, count=True) == (exact, "counted")
    at = range(S_kv - S, S_kv)
    most = 4 * sum(9 if positions else min(9, t + 1) for t in at)
    assert passes.keys_read(call, count=False) == (most, "bound")
    assert most >= exact
    selection.measure(S_kv)
    assert passes.keys_read(call, count=False)[1] == ("bound" if positions else "measured")
    if not positions:
        assert passes.keys_read(call, count=False)[0] == exact
        shorter = call_of(q[:, : min(S, 12)], k[:, :, :12], v[:, :, :12], Selection.from_ranges(ranges[:, : min(S, 12)])) if S > 1 else None
        assert shorter is None or passes.keys_read(shorter, count=False)[1] == "bound"
        selection.ranges[:, :, :, 0] = 0  # written: what was measured and counted holds no more
        assert passes.keys_read(call, count=False)[1] == "bound"
        assert passes.keys_read(call, count=True) == (int(oracle_mask(selection.ranges, S_kv, S).sum()), "counted")


def test_a_measure_at_another_length_is_not_used() -> None:
    q, k, v = make_qkv(1, 8, 1, 1, 16, S_kv=32)
    selection = Selection.from_ranges(make_spans("few", 1, 8, 1, 32, 6))
    call = call_of(q, k, v, selection)
    for S_kv, q_pos in ((16, None), (None, None), (32, torch.arange(8))):
        selection.measure(S_kv, q_pos)
        assert passes.keys_read(call, count=False)[1] == "bound"
    selection.measure(32)
    total = passes.keys_read(call, count=False)
    assert total[1] == "measured"
    assert passes.keys_read(call_of(q, k, v, selection.to("cpu")), count=False) == total


def test_nothing_waits_for_the_device_inside_a_graph(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv("NSA_DEBUG_TIMING", "1")
    monkeypatch.setattr(Call, "capturing", lambda call: True)
    monkeypatch.setattr(events, "now", lambda device: pytest.fail("waited"))
    q, k, v = make_qkv(1, 4, 1, 2, 16, S_kv=32)
    nsa_sel.selection_attention(q, k, v, make_spans("few", 1, 4, 1, 32, 6), backend="sdpa-packed")
    assert logged("sel.timing") == logged("sel.timing.bucket") == []
    assert passes.keys_read(call_of(q, k, v, make_blocks(1, 4, 1, 32, 2, 8)), count=True)[1] == "bound"


# Events of passes


@pytest.mark.parametrize("flag", ["NSA_DEBUG_TRITON", "NSA_DEBUG_TIMING"])
def test_backward_estimates(monkeypatch: pytest.MonkeyPatch, logged: Any, flag: str) -> None:
    monkeypatch.setenv(flag, "1")
    B, S, G, h, Dk, Dv, S_kv = 2, 6, 2, 3, 16, 24, 40
    q, k, v = make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv, requires_grad=True)
    ranges = make_spans("few", B, S, G, S_kv, 8)
    nsa_sel.selection_attention(q, k, v, ranges, backend="sdpa-packed").sum().backward()
    (event,) = logged("sel.bwd")
    (reads,) = logged("sel.reads")
    keys = int(oracle_mask(ranges, S_kv, S).sum()) if flag == "NSA_DEBUG_TRITON" else reads["tokens"]
    assert event["source"] == reads["source"] == ("counted" if flag == "NSA_DEBUG_TRITON" else "bound")
    assert reads["tokens"] == keys
    products = 2 * keys * h * (Dk + Dv + Dv + Dk + Dk)  # q.k, do.v, and what dv, dq, dk are summed from
    moved = 4 * (keys * (Dk + Dv) + B * S * G * h * 2 * (Dk + Dv) + B * G * S_kv * (Dk + Dv))
    assert (event["flops"], event["bytes"]) == (products, moved)
    if flag == "NSA_DEBUG_TIMING":
        (timing,) = [fields for fields in logged("sel.timing") if fields["direction"] == "backward"]
        assert timing["ms"] == event["ms"] > 0
        assert event["tflops"] == pytest.approx(products / event["ms"] / 1e9)
        assert event["gbps"] == pytest.approx(moved / event["ms"] / 1e6)
    else:
        assert not {"ms", "tflops", "gbps"}.intersection(event)


@pytest.mark.parametrize("h", [1, 3])
def test_reads_tell_what_is_loaded(monkeypatch: pytest.MonkeyPatch, logged: Any, h: int) -> None:
    """Rows that share blocks: those of a tile load their union, by blocks each is loaded once; nobody loads more than packed's total
    but for triton-token, whose every head loads by itself."""
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    S, S_kv, block, n = 8, 96, 16, 3
    q, k, v = make_qkv(1, S, 2, h, 16, 8, S_kv=S_kv)
    blocks = make_blocks(1, S, 2, S_kv, n, block)
    mask = oracle_mask(blocks.ranges, S_kv, S)  # [B,S,G,S_kv]
    total = int(mask.sum())
    union = int(mask.any(1).sum())
    expected = {"triton-token": total * h, "triton-group": total, "triton-tile": union, "triton-block": union}
    assert union < total
    loaded = {}
    for backend in ("sdpa-packed", "numba", *expected):
        with counted() as grown:
            nsa_sel.selection_attention(q, k, v, blocks, backend=backend)
        event = logged("sel.triton.reads" if backend.startswith("triton") else "sel.reads")[-1]
        assert (event["tokens"], event["bytes"], event["source"]) == (total, total * 24 * 4, "counted")
        loaded[backend] = event["loaded_tokens"]
        assert event["loaded_bytes"] == loaded[backend] * 24 * 4
        assert grown["bytes", backend, "forward"] == (loaded[backend] + S * 2 * h) * 24 * 4
        assert grown["flops", backend, "forward"] == 2 * total * h * 24
    assert expected.items() <= loaded.items()
    assert loaded["numba"] == total
    assert all(found <= total for backend, found in loaded.items() if backend not in ("triton-token", "sdpa-packed"))


def test_tiles_load_the_union_of_their_rows() -> None:
    """The counting, against masks, for tiles of rows and pieces of lists."""
    S, G, S_kv, block = 20, 2, 150, 32
    q, k, v = make_qkv(2, S, G, 1, 16, S_kv=S_kv)
    for q_pos in (None, torch.randint(0, S_kv, (2, S))):
        blocks = make_blocks(2, S, G, S_kv, 3, block)
        call = call_of(q, k, v, blocks, q_pos)
        mask = oracle_mask(blocks.ranges, S_kv, S, q_pos)
        for tokens in (1, 3, 7, S, 64):
            assert _loads.union_keys(call, tokens) == sum(int(mask[:, s : s + tokens].any(1).sum()) for s in range(0, S, tokens))
        assert _loads.piecewise_keys(call, 16, S, 4, 1 << 20) == _loads.union_keys(call, S)
        assert _loads.piecewise_keys(call, 16, S, 1, 1) == int(mask.sum())
        some = [_loads.piecewise_keys(call, 16, 8, 4, piece) for piece in (2, 5, 1000)]
        assert int(mask.sum()) >= some[0] >= some[1] >= some[2] == _loads.union_keys(call, 8)


def test_dense_tiles_load_their_slices(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    q, k, v = make_qkv(1, 12, 2, 2, 16, S_kv=60)
    whole = torch.tensor([0, 60]).expand(1, 12, 2, 1, 2)
    nsa_sel.selection_attention(q, k, v, whole, backend="sdpa-packed")
    assert logged("sel.reads")[-1]["loaded_tokens"] == 2 * 60
    monkeypatch.setenv("NSA_SEL_TRITON_FORCE_PATH", "varlen")
    nsa_sel.selection_attention(q, k, v, whole, backend="sdpa-packed")
    assert logged("sel.reads")[-1]["loaded_tokens"] == 2 * 12 * 60  # 49 to 60 keys a row, padded to the longest of the bucket


def test_without_a_look_loads_are_bounds(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv("NSA_DEBUG_TIMING", "1")
    q, k, v = make_qkv(1, 8, 2, 2, 16, S_kv=96)
    blocks = make_blocks(1, 8, 2, 96, 3, 16)
    for backend, heads in (("sdpa-packed", 1), ("triton-tile", 1), ("triton-block", 1), ("triton-group", 1), ("triton-token", 2)):
        nsa_sel.selection_attention(q, k, v, blocks, backend=backend)
        event = logged("sel.triton.reads" if backend.startswith("triton") else "sel.reads")[-1]
        assert (event["source"], event["loaded_tokens"]) == ("bound", heads * event["tokens"])


def test_passes_are_counted_only_when_asked_for() -> None:
    q, k, v = make_qkv(1, 8, 2, 2, 16, S_kv=96)
    with counted() as grown:
        nsa_sel.selection_attention(q, k, v, make_blocks(1, 8, 2, 96, 3, 16))
    assert not {"bytes", "flops"}.intersection(name[0] for name in grown)


def test_buckets_are_timed(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    lengths = torch.tensor([3, 20, 40])[torch.arange(12) % 3].view(1, 12, 1, 1).expand(1, 12, 2, 1)
    ranges = torch.stack((torch.zeros_like(lengths), lengths), -1).repeat(1, 1, 1, 2, 1)
    ranges[..., 1, :] = 0  # two ranges a row: one would be taken densely
    q, k, v = make_qkv(1, 12, 2, 2, 16, S_kv=60)
    nsa_sel.selection_attention(q, k, v, ranges, backend="sdpa-packed")
    assert logged("sel.timing.bucket") == []
    monkeypatch.setenv("NSA_DEBUG_TIMING", "1")
    monkeypatch.setenv("NSA_DEBUG_COMPARE", "1")  # runs packed SDPA again: those buckets are no part of the call
    nsa_sel.selection_attention(q, k, v, ranges, backend="sdpa-packed")
    buckets = logged("sel.timing.bucket")
    assert [(b["length"], b["rows"], b["direction"]) for b in buckets] == [(16, 8, "forward"), (32, 8, "forward"), (40, 8, "forward")]
    (whole,) = logged("sel.timing")
    assert 0 < sum(bucket["ms"] for bucket in buckets) <= whole["ms"]


def test_gradients_are_compared(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv("NSA_DEBUG_COMPARE", "1")
    real = numba_cpu.backward

    def wrong(*arguments: Any) -> Any:
        dq, dk, dv = real(*arguments)
        return dq, dk + 0.5, dv

    monkeypatch.setattr(numba_cpu, "backward", wrong)
    q, k, v = make_qkv(1, 4, 1, 2, 16, S_kv=32, requires_grad=True)
    nsa_sel.selection_attention(q, k, v, make_blocks(1, 4, 1, 32, 2, 8)).sum().backward()
    forward, backward = logged("sel.compare")
    assert [(event["direction"], event["backend"]) for event in (forward, backward)] == [("forward", "numba"), ("backward", "numba")]
    assert forward["mae"] < 1e-6
    assert backward["mae"] == pytest.approx(0.5, abs=1e-3)


def test_nothing_is_watched_when_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "watched", lambda *_: pytest.fail("a pass was watched"))
    monkeypatch.setattr(events, "now", lambda *_: pytest.fail("the clock was read"))
    q, k, v = make_qkv(1, 4, 1, 2, 16, S_kv=32, requires_grad=True)
    for backend in ("numba", "sdpa-packed"):
        nsa_sel.selection_attention(q, k, v, make_spans("few", 1, 4, 1, 32, 6), backend=backend).sum().backward()


@pytest.mark.parametrize(("flag", "on_gpu"), [(True, True), (True, False), (False, True)])
def test_nvtx_ranges(monkeypatch: pytest.MonkeyPatch, flag: bool, on_gpu: bool) -> None:
    """The range is around the work, on a GPU alone."""
    told: list[str] = []

    @contextlib.contextmanager
    def range_(name: str) -> Iterator[None]:
        told.append(f"push {name}")
        yield
        told.append("pop")

    monkeypatch.setattr(torch.cuda.nvtx, "range", range_)
    q = types.SimpleNamespace(is_cuda=on_gpu, device=types.SimpleNamespace(type="cuda"))
    settings = replace(settings_for(CPU), debug_nvtx=flag)
    call: Any = types.SimpleNamespace(q=q, settings=settings, timed=lambda: False)
    assert passes.watched(call, "triton-tile", "backward", None, lambda: told.append("work") or 7) == 7
    assert told == (["push nsa_sel triton-tile backward", "work", "pop"] if flag and on_gpu else ["work"])


# Prometheus


# prometheus-client is optional, and machines with a GPU collect this file too: it is imported where it is needed.


def test_prometheus_text_is_the_counters() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    events.record(decide(SHORT, H100), SHORT)
    events.count("failed", "triton-tile")
    events.count("of a plug-in", "some", "name")
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(prometheus.text())
        for sample in family.samples
    }
    wanted = {}
    for (kind, *labels), number in events.tallies().items():
        known = prometheus.METRICS.get(kind)
        metric = known.metric if known else f"nsa_sel_{re.sub('[^a-z]', '_', kind)}"
        wanted[f"{metric}_total", tuple(labels) if known else (".".join(labels),)] = number
    assert samples == wanted
    assert samples["nsa_sel_refusals_total", ("triton-group", "min-length")] >= 1
    assert samples["nsa_sel_of_a_plug_in_total", ("some.name",)] >= 1


def test_prometheus_reads_at_every_scrape() -> None:
    from prometheus_client import CollectorRegistry

    metrics = CollectorRegistry()
    collector = prometheus.register(metrics)
    found = []
    for _ in range(2):
        events.count("failed", "x")
        found.append(metrics.get_sample_value("nsa_sel_failures_total", {"backend": "x"}))
    assert found[1] == found[0] + 1
    metrics.unregister(collector)


@pytest.mark.parametrize("work", [prometheus.text, prometheus.register])
def test_prometheus_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(NsaSelError, match=r"prometheus_client, which is not installed.*pip install 'nsa-sel\[prometheus\]'"):
        work()


def test_every_kind_of_counter_has_a_metric() -> None:
    sources = [file.read_text() for folder in ("nsa_sel", "backends") for file in (ROOT / folder).rglob("*.py")]
    kinds = {kind for source in sources for kind in re.findall(r'(?:events\.count\(|\byield (?:from \(\()?)"([a-z]+)"', source)}
    assert kinds == set(prometheus.METRICS)
