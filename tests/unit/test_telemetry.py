"""Check counters, logs, what the NSA_DEBUG_* flags write, and what is recorded of a pass; nothing if nobody listens."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import nsa_sel
import nsa_sel.core.decide
from nsa_sel.backends import numba_cpu
from nsa_sel.core.call import Call
from nsa_sel.oracle import oracle_mask
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from nsa_sel.telemetry import events, passes
from nsa_sel.telemetry.log import decision_events, read_decisions
from tests.helpers.calls import assert_refused, counted, last, problem
from tests.helpers.cases import make_blocks, make_call, make_qkv, make_spans
from tests.helpers.files import ROOT
from tests.helpers.policy_cases import CPU, H100, H200, LONG, RTX4090, SHORT, decide, replace


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
    decision = decide(SHORT, CPU)

    def record(rule: str) -> None:
        for _ in range(2000):
            events.record(replace(decision, rule=rule), SHORT)
            events.count("failed", "nobody")

    with counted() as grown, ThreadPoolExecutor(5) as pool:
        pool.submit(lambda: [events.counters() for _ in range(50)])
        assert list(pool.map(record, "0123")) == [None] * 4
    assert (grown["calls", str(decision.forward)], grown["failed", "nobody"]) == (8000, 8000)


def test_many_decisions_are_counted_and_the_last_kept() -> None:
    decision, calls = decide(SHORT, CPU), 3 * events.KEPT_DECISIONS
    with counted() as grown:
        for i in range(calls):
            events.record(replace(decision, rule=str(i)), SHORT)
        assert len(events._recorded) < 2 * events.KEPT_DECISIONS
        assert [kept.rule for kept in events.decisions()] == [str(i) for i in range(calls)][-events.KEPT_DECISIONS :]
    assert grown["calls", str(decision.forward)] == calls


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


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.usefixtures("plain_cpu")
def test_debug_log_holds_json_lines_that_replay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    arguments = problem()
    nsa_sel.selection_attention(*arguments)
    monkeypatch.setenv("NSA_DEBUG_LOG", str(file))
    nsa_sel.selection_attention(*arguments)
    nsa_sel.selection_attention(*arguments)
    lines = [line for line in lines_of(file) if line["event"] == "sel.decision"]
    assert len(lines) == 2
    assert all(line["time"] > 0 for line in lines)
    assert lines[0]["request"]["S_kv"] == 40  # the exact call; the decision holds its class
    decision = read_decisions(file)[0]
    assert decision == last()
    assert decision.request.S_kv == 64
    assert decision.replay() == ()
    monkeypatch.delenv("NSA_DEBUG_LOG")
    nsa_sel.selection_attention(*arguments)
    nsa_sel.selection_attention(*problem(seed=3))
    assert len([line for line in lines_of(file) if line["event"] == "sel.decision"]) == 2


@pytest.mark.usefixtures("plain_cpu")
@pytest.mark.parametrize(
    ("flag", "event"), [("NSA_DEBUG_TRITON", "sel.reads"), ("NSA_DEBUG_TIMING", "sel.timing"), ("NSA_DEBUG_COMPARE", "sel.compare")]
)
def test_debug_flags_alone_show_their_events_on_stderr(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, event: str
) -> None:
    arguments, log = problem(), tmp_path / "events.jsonl"

    def shown() -> list[str]:
        nsa_sel.selection_attention(*arguments)
        return [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]

    assert shown() == []
    monkeypatch.setenv(flag, "1")
    assert event in shown()
    monkeypatch.setenv("NSA_DEBUG_LOG", "off")  # says where to: nowhere
    assert shown() == []
    monkeypatch.setenv("NSA_DEBUG_LOG", str(log))
    assert shown() == []
    assert event in [line["event"] for line in lines_of(log)]
    monkeypatch.delenv("NSA_DEBUG_LOG")
    assert event in shown()
    monkeypatch.delenv(flag)
    assert shown() == []


@pytest.mark.usefixtures("plain_cpu")
def test_no_event_is_made_when_nobody_listens(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="nsa_sel")
    q, k, v, ranges = problem(requires_grad=True)
    nsa_sel.explain(q, k, v, ranges)  # settings are read once
    monkeypatch.setattr(events, "emit", lambda *_, **__: pytest.fail("an event was made"))
    monkeypatch.setattr(msgspec.json, "encode", lambda *_, **__: pytest.fail("something was serialised"))
    nsa_sel.selection_attention(q, k, v, ranges).sum().backward()


DECISIONS = [
    decide(SHORT, H100),
    decide(replace(LONG, needs_grad=True), RTX4090, backend="triton-group"),
    decide(SHORT, CPU, backend="no-such-backend"),
    nsa_sel.explain_request(replace(SHORT, needs_grad=True), H200),
]


def write(log: Path, *decisions: nsa_sel.Decision) -> list[str]:
    """Log a call of each decision and return the last lines of the log."""
    nsa_sel.log_to(str(log))
    for decision in decisions:
        events.record(decision, decision.request)
    nsa_sel.log_to(None)
    return [line for line in log.read_text().splitlines() if line]


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: f"{decision.device.name}-{decision.forward}")
def test_a_decision_is_read_back_whole(tmp_path: Path, decision: nsa_sel.Decision) -> None:
    assert len(write(tmp_path / "log.jsonl", decision)[-1]) <= 2048
    assert read_decisions(tmp_path / "log.jsonl") == [decision] == [nsa_sel.Decision.from_json(decision.to_json())]
    assert last() is decision


def test_settings_are_written_once_to_each_target(tmp_path: Path) -> None:
    twice = decide(SHORT, H100), decide(LONG, H100)
    lines = [write(tmp_path / "a.jsonl", *twice), write(tmp_path / "b.jsonl", *twice), write(tmp_path / "a.jsonl", twice[0])[3:]]
    once = ["sel.settings", "sel.decision"]
    assert [[json.loads(line)["event"] for line in some] for some in lines] == [[*once, once[1]]] * 2 + [once], "a later process may append"


def test_a_line_cut_short_by_a_crash_costs_no_other_line(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    write(log, decide(SHORT, H100))
    log.write_bytes(log.read_bytes()[:-100])
    write(log, decide(LONG, H100))
    log.write_bytes(b'{"event": "\xff"}\n' + log.read_bytes())
    assert read_decisions(log) == [decide(LONG, H100)]


@pytest.mark.parametrize(("field", "value"), [("verdicts", {"numba": [[7], []]}), ("verdicts", []), ("reasons", [3]), ("request", None)])
def test_a_line_that_is_not_a_decision_is_named(tmp_path: Path, field: str, value: object) -> None:
    log = tmp_path / "log.jsonl"
    (name, settings), (_, fields) = decision_events(decide(SHORT, H100), set())
    fields["decision"] = {**msgspec.json.decode(fields["decision"]), field: value}
    log.write_bytes(b"\n".join(msgspec.json.encode(line) for line in ({"event": name, **settings}, {"event": "sel.decision", **fields})))
    assert_refused((f"line 2 of {log} is not a decision", lambda: read_decisions(log)))
    log.write_bytes(log.read_bytes().splitlines()[1])
    assert_refused(("line 1 of .* keep the sel.settings lines when you cut a log", lambda: read_decisions(log)))


@pytest.mark.parametrize(("S", "S_kv"), [(1, 40), (12, 12), (12, 40), (40, 40)])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("groups", [2, 1])
def test_keys_read(S: int, S_kv: int, positions: bool, groups: int) -> None:
    q, k, v = make_qkv(2, S, 2, 3, 16, S_kv=S_kv)
    ranges = make_spans("mixed", 2, S, groups, S_kv, 9)
    q_pos = torch.arange(S) % S_kv if positions else None
    selection = Selection.from_ranges(ranges, max_length=9)
    call = make_call(q, k, v, selection, q_pos=q_pos)
    share = 2 // groups
    exact = share * int(oracle_mask(ranges, S_kv, S, q_pos).sum())
    assert passes.keys_read(call, count=True) == (exact, "counted")
    at = range(S_kv - S, S_kv)
    most = 4 * sum(9 if positions else min(9, t + 1) for t in at)
    assert passes.keys_read(call, count=False) == (most, "bound")
    assert most >= exact
    selection.measure(S_kv)
    assert passes.keys_read(call, count=False)[1] == ("bound" if positions else "measured")
    if not positions:
        assert passes.keys_read(call, count=False)[0] == exact
        selection.ranges[:, :, :, 0] = 0  # written: what was measured and counted holds no more
        assert passes.keys_read(call, count=False)[1] == "bound"
        assert passes.keys_read(call, count=True) == (share * int(oracle_mask(selection.ranges, S_kv, S).sum()), "counted")


def test_nothing_waits_for_the_device_inside_a_graph(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv("NSA_DEBUG_TIMING", "1")
    monkeypatch.setattr(Call, "capturing", lambda call: True)
    monkeypatch.setattr(events, "now", lambda device: pytest.fail("waited"))
    q, k, v = make_qkv(1, 4, 1, 2, 16, S_kv=32)
    nsa_sel.selection_attention(q, k, v, make_spans("few", 1, 4, 1, 32, 6), backend="sdpa-packed")
    assert logged("sel.timing") == logged("sel.timing.bucket") == []
    assert passes.keys_read(make_call(q, k, v, make_blocks(1, 4, 1, 32, 2, 8)), count=True)[1] == "bound"


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


@pytest.mark.parametrize(("S", "path", "forward"), [(4, "varlen", "gathered"), (64, "varlen", "tiles of keys"), (64, "dense", "slices")])
def test_buckets_are_timed_in_both_directions(monkeypatch: pytest.MonkeyPatch, logged: Any, S: int, path: str, forward: str) -> None:
    """Rows are counted once for each bucket, slice of keys, or tile of keys that they are in."""
    monkeypatch.setenv("NSA_DEBUG_TIMING", "1")
    monkeypatch.setenv("NSA_SEL_TRITON_FORCE_PATH", path)
    q, k, v = make_qkv(2, S, 1, 2, 16, S_kv=64, requires_grad=True)
    selection = Selection.from_blocks(torch.zeros(2, S, 1, 1, dtype=torch.int32), 32)
    positions = torch.full((2, S), 63)
    nsa_sel.selection_attention(q, k, v, selection, q_pos=positions, backend="sdpa-packed").sum().backward()
    found = {"forward": [], "backward": []}
    for event in logged("sel.timing.bucket"):
        assert event["ms"] > 0
        found[event["direction"]].append((event["length"], event["rows"]))
    pairs = [(32, S), (32, S)]
    assert found == {"forward": pairs if forward == "tiles of keys" else [(32, 2 * S)], "backward": pairs}


@pytest.mark.parametrize("h", [1, 3])
def test_reads_tell_what_is_loaded(monkeypatch: pytest.MonkeyPatch, logged: Any, h: int) -> None:
    """Rows share blocks. A tile loads their union, and per-block kernels load each block once. All load at most the selected total,
    except triton-token, where each head loads its own, and sdpa-packed."""
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


def test_gradients_are_compared(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv("NSA_DEBUG_COMPARE", "1")
    real = numba_cpu.backward
    monkeypatch.setattr(numba_cpu, "backward", lambda *given: [dx + off for dx, off in zip(real(*given), (0, 0.5, 0), strict=True)])
    q, k, v = make_qkv(1, 4, 1, 2, 16, S_kv=32, requires_grad=True)
    nsa_sel.selection_attention(q, k, v, make_blocks(1, 4, 1, 32, 2, 8)).sum().backward()
    forward, backward = logged("sel.compare")
    assert [(event["direction"], event["backend"]) for event in (forward, backward)] == [("forward", "numba"), ("backward", "numba")]
    assert forward["mae"] < 1e-6
    assert backward["mae"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(("flag", "on_gpu"), [(True, True), (True, False), (False, True)])
def test_nvtx_ranges(monkeypatch: pytest.MonkeyPatch, flag: bool, on_gpu: bool) -> None:
    """The range is around the work, on a GPU alone."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: told.append(name) or contextlib.nullcontext())
    q = types.SimpleNamespace(is_cuda=on_gpu, device=types.SimpleNamespace(type="cuda"))
    call: Any = types.SimpleNamespace(q=q, settings=replace(settings_for(CPU), debug_nvtx=flag), timed=lambda: False)
    assert passes.recorded(call, "triton-tile", "backward", None, lambda: told.append("work") or 7) == 7
    assert told == ["nsa_sel triton-tile backward"] * (flag and on_gpu) + ["work"]
