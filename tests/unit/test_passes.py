"""Check what is recorded of a pass: keys read and loaded, estimates, times of buckets, NVTX ranges."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

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
from tests.helpers.cases import make_blocks, make_call, make_qkv, make_spans
from tests.helpers.events import counted
from tests.helpers.policy_cases import CPU, replace


@pytest.mark.parametrize(("S", "S_kv"), [(1, 40), (12, 12), (12, 40), (40, 40)])
@pytest.mark.parametrize("positions", [False, True])
def test_keys_read(S: int, S_kv: int, positions: bool) -> None:
    q, k, v = make_qkv(2, S, 2, 3, 16, S_kv=S_kv)
    ranges = make_spans("mixed", 2, S, 2, S_kv, 9)
    q_pos = torch.arange(S) % S_kv if positions else None
    selection = Selection.from_ranges(ranges, max_length=9)
    call = make_call(q, k, v, selection, q_pos=q_pos)
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
        shorter = (
            make_call(q[:, : min(S, 12)], k[:, :, :12], v[:, :, :12], Selection.from_ranges(ranges[:, : min(S, 12)])) if S > 1 else None
        )
        assert shorter is None or passes.keys_read(shorter, count=False)[1] == "bound"
        selection.ranges[:, :, :, 0] = 0  # written: what was measured and counted holds no more
        assert passes.keys_read(call, count=False)[1] == "bound"
        assert passes.keys_read(call, count=True) == (int(oracle_mask(selection.ranges, S_kv, S).sum()), "counted")


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
    assert passes.recorded(call, "triton-tile", "backward", None, lambda: told.append("work") or 7) == 7
    assert told == (["push nsa_sel triton-tile backward", "work", "pop"] if flag and on_gpu else ["work"])
