"""The public call on a CPU: where it is routed and why, equal results on every route, and what happens when a backend fails."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel import Selection
from nsa_sel.backends import sdpa_packed
from nsa_sel.core import registry
from nsa_sel.core.backend import Backend, Limits
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import DeviceInfo, example_request
from nsa_sel.errors import BackendError
from nsa_sel.oracle import oracle_forward, oracle_mask
from nsa_sel.telemetry import events as telemetry
from nsa_sel.telemetry.log import read_log
from tests.helpers.cases import assert_forward, assert_gradients, edge_selections, make_blocks, make_grads, make_qkv, make_spans

PINNED = """
provenance: "the order of the tests, whatever the CPU profile says"
runtime:
  sel_triton_min_L: 4096
  prefer_forward: [sdpa-packed, numba, triton-group, triton-token]
  prefer_backward: [sdpa-packed, numba, triton-group, triton-token]
"""


@pytest.fixture(autouse=True)
def plain_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU without Triton's interpreter, whatever this process was started with, and a fixed order of preference."""
    for user in ("attention", "core.begin"):
        monkeypatch.setattr(f"nsa_sel.{user}.device_info", lambda device: DeviceInfo(kind="cpu"))
    file = tmp_path / "pinned.yaml"
    file.write_text(PINNED)
    monkeypatch.setenv("NSA_SEL_CONFIG", str(file))


def last() -> Decision:
    return nsa_sel.decisions()[-1]


def check(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, **options: Any) -> None:
    """o and lse of the public call against the oracle."""
    assert_forward(nsa_sel.selection_attention(q, k, v, ranges, return_lse=True, **options), q, k, v, ranges, **options)


def problem(**options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = make_qkv(2, 12, 2, 3, 16, 24, S_kv=40, **options)
    return q, k, v, make_spans("mixed", 2, 12, 2, 40, L=18)


def call_forced(monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> None:
    if source == "NSA_SEL_BACKEND":
        monkeypatch.setenv(source, name)
        nsa_sel.selection_attention(*problem())
    elif source == "use_backend":
        with nsa_sel.use_backend(name):
            nsa_sel.selection_attention(*problem())
    else:
        nsa_sel.selection_attention(*problem(), backend=name)


# Routing


@pytest.mark.parametrize(
    ("flags", "source"),
    [
        ({}, None),
        ({"NSA_USE_TRITON_SEL": "0"}, None),
        ({"NSA_USE_TRITON_SEL": "1", "NSA_TRITON_SEL_FORCE": "1", "NSA_SEL_TRITON_MIN_L": "0"}, None),
        ({"NSA_SEL_TRITON_GROUP": "0", "NSA_SEL_TRITON_ALLOW_GRAD": "0", "NSA_SEL_TRITON_REQUIRE_ALIGN": "1"}, None),
        ({"NSA_SEL_TRITON_FORCE_PATH": "varlen", "NSA_SEL_TRITON_DB": "1", "NSA_SEL_TRITON_BLOCK_L": "64"}, None),
        ({"NSA_FORCE_PARITY": "1"}, "NSA_FORCE_PARITY"),
        ({"NSA_SEL_BACKEND": "sdpa-packed"}, "NSA_SEL_BACKEND"),
        ({"NSA_DEBUG_TRITON": "1", "NSA_DEBUG_TIMING": "1", "NSA_DEBUG_COMPARE": "1"}, None),
    ],
)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_cpu_calls_are_routed(monkeypatch: pytest.MonkeyPatch, flags: dict[str, str], source: str | None, needs_grad: bool) -> None:
    for flag, text in flags.items():
        monkeypatch.setenv(flag, text)
    check(*problem(requires_grad=needs_grad))
    decision = last()
    assert decision.forward == "sdpa-packed"
    assert decision.backward == ("sdpa-packed" if needs_grad else None)
    assert (decision.override and decision.override.source) == source
    refused = {verdict.backend: [reason.code for reason in verdict.forward] for verdict in decision.verdicts}
    assert "device-kind" in refused["triton-group"]
    assert "device-kind" in refused["triton-token"]


def test_use_backend_and_argument_are_recorded() -> None:
    arguments = problem()
    with nsa_sel.use_backend("sdpa-packed"):
        nsa_sel.selection_attention(*arguments)
        assert last().override is not None
        assert last().override.source == "use_backend"
    nsa_sel.selection_attention(*arguments, backend="sdpa-packed")
    assert last().override.source == "argument"
    nsa_sel.selection_attention(*arguments)
    assert last().override is None


def test_use_backend_stays_in_its_thread() -> None:
    arguments = problem()
    seen: list[Decision] = []
    with nsa_sel.use_backend("sdpa-packed"):
        thread = threading.Thread(target=lambda: seen.append(nsa_sel.explain(*arguments)))
        thread.start()
        thread.join()
    assert seen[0].override is None


def test_use_backend_ends_with_an_error() -> None:
    def fail() -> None:
        with nsa_sel.use_backend("numba"):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert nsa_sel.explain(*problem()).override is None


@pytest.mark.parametrize("source", ["argument", "use_backend", "NSA_SEL_BACKEND"])
@pytest.mark.parametrize("name", ["triton-group", "triton-token"])
def test_forced_triton_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch, source: str, name: str) -> None:
    monkeypatch.setattr(registry, "load", lambda name: pytest.fail(f"{name} was loaded"))
    before = nsa_sel.decisions()
    with pytest.raises(BackendError) as caught:
        call_forced(monkeypatch, name, source)
    message = str(caught.value)
    assert f"backend '{name}', forced by {source}, refuses this call:" in message
    assert f"{name}: device-kind (unsupported): device.kind is cpu, required cuda" in message
    assert "TRITON_INTERPRET=1" in message
    assert caught.value.decision is not None
    assert caught.value.decision.forward is None
    assert nsa_sel.decisions() == before


@pytest.mark.parametrize("needs_grad", [False, True])
def test_explain_takes_the_decision_of_the_call(needs_grad: bool) -> None:
    arguments = problem(requires_grad=needs_grad)
    explained = nsa_sel.explain(*arguments)
    nsa_sel.selection_attention(*arguments)
    assert last() is explained
    with torch.no_grad():
        assert nsa_sel.explain(*arguments).backward is None


def test_explain_sees_autocast() -> None:
    arguments = problem()
    with torch.autocast("cpu", torch.bfloat16):
        explained = nsa_sel.explain(*arguments)
        nsa_sel.selection_attention(*arguments)
    assert last().request.dtype == "bfloat16"
    assert explained == last()


# Results


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    check(*problem(dtype=dtype))
    assert last().request.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("name", edge_selections(1, 1, 1, 16))
def test_edge_selections(name: str) -> None:
    q, k, v = make_qkv(2, 9, 2, 2, 8, 16, S_kv=32, requires_grad=True)
    ranges = edge_selections(2, 9, 2, 32)[name]
    check(q, k, v, ranges)
    o, lse = nsa_sel.selection_attention(q, k, v, ranges, return_lse=True)
    do, _ = make_grads(q, v)
    o.backward(do)
    assert_gradients((q.grad, k.grad, v.grad), q, k, v, ranges, do)
    empty = lse == -math.inf
    assert bool((o[empty] == 0).all())
    assert bool((q.grad[empty] == 0).all())


def test_float32_error_is_small() -> None:
    q, k, v = make_qkv(1, 64, 2, 4, 64, S_kv=256)
    selection = make_blocks(1, 64, 2, 256, n=6, block_size=16)
    o = nsa_sel.selection_attention(q, k, v, selection)
    assert float((o - oracle_forward(q, k, v, selection.ranges)[0]).abs().mean()) <= 1e-6


def test_gradients_of_both_results() -> None:
    q, k, v, ranges = problem(requires_grad=True)
    do, dlse = make_grads(q, v)
    o, lse = nsa_sel.selection_attention(q, k, v, ranges, return_lse=True, scale=0.3)
    assert bool(lse.isfinite().all())
    assert_gradients(torch.autograd.grad((o, lse), (q, k, v), (do, dlse)), q, k, v, ranges, do, dlse, scale=0.3)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)])
def test_gradients_of_some_inputs(wanted: tuple[int, ...]) -> None:
    *qkv, ranges = problem()
    for i in wanted:
        qkv[i].requires_grad_()
    nsa_sel.selection_attention(*qkv, ranges).square().sum().backward()
    assert [i for i in range(3) if qkv[i].grad is not None] == list(wanted)
    everything = [tensor.detach().requires_grad_() for tensor in qkv]
    nsa_sel.selection_attention(*everything, ranges).square().sum().backward()
    assert all(torch.equal(qkv[i].grad, everything[i].grad) for i in wanted)


def test_lse_alone_may_be_differentiated() -> None:
    q, k, v, ranges = problem(requires_grad=True)
    _, lse = nsa_sel.selection_attention(q, k, v, ranges, return_lse=True)
    dlse = torch.randn_like(lse)
    none = torch.zeros(*q.shape[:-1], v.shape[-1])
    assert_gradients(torch.autograd.grad(lse, (q, k, v), dlse), q, k, v, ranges, none, dlse)


@pytest.mark.parametrize("q_pos", [None, torch.tensor([[3], [39]]), torch.tensor([20])])
def test_decode_form_equals_one_row_of_prefill(q_pos: Tensor | None) -> None:
    q, k, v = make_qkv(2, 1, 3, 4, 16, 8, S_kv=40)
    ranges = make_spans("few", 2, 1, 3, 40, L=16)
    o, lse = nsa_sel.selection_attention(q[:, 0], k, v, ranges[:, 0], q_pos=q_pos, return_lse=True)
    whole = nsa_sel.selection_attention(q, k, v, ranges, q_pos=q_pos, return_lse=True)
    assert (o.shape, lse.shape) == ((2, 3, 4, 8), (2, 3, 4))
    assert torch.equal(o, whole[0][:, 0])
    assert torch.equal(lse, whole[1][:, 0])
    check(q[:, 0], k, v, ranges[:, 0], q_pos=q_pos)


def test_positions_may_be_shared_or_per_sequence() -> None:
    q, k, v, ranges = problem()
    shared = torch.randint(0, 40, (12,))
    check(q, k, v, ranges, q_pos=shared)
    check(q, k, v, ranges, q_pos=shared.flip(0).int().expand(2, 12))


def test_caches_are_taken_as_transposed_views() -> None:
    q, k, v, ranges = problem()
    expected = nsa_sel.selection_attention(q, k, v, ranges)
    cache_k, cache_v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (k, v))
    wide = torch.cat((q, q), -1)[..., :16]
    assert not cache_k.is_contiguous()
    assert torch.equal(nsa_sel.selection_attention(wide, cache_k, cache_v, ranges), expected)


def test_expanded_output_gradients() -> None:
    q, k, v, ranges = problem(requires_grad=True)
    nsa_sel.selection_attention(q, k, v, ranges).sum().backward()
    assert_gradients((q.grad, k.grad, v.grad), q, k, v, ranges, torch.ones(*q.shape[:-1], v.shape[-1]))


@pytest.mark.parametrize(("B", "S", "n"), [(0, 4, 2), (2, 0, 2), (2, 4, 0)])
def test_nothing_to_do(B: int, S: int, n: int) -> None:
    q, k, v = make_qkv(B, S, 2, 3, 16, 8, S_kv=20, requires_grad=True)
    o, lse = nsa_sel.selection_attention(q, k, v, torch.zeros(B, S, 2, n, 2, dtype=torch.int32), return_lse=True)
    assert torch.equal(o, torch.zeros(B, S, 2, 3, 8))
    assert torch.equal(lse, torch.full((B, S, 2, 3), -math.inf))
    o.sum().backward()
    assert all(torch.equal(tensor.grad, torch.zeros_like(tensor)) for tensor in (q, k, v))
    assert last().forward == "sdpa-packed"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_in_its_dtype(dtype: torch.dtype) -> None:
    q, k, v, ranges = problem(requires_grad=True)
    with torch.autocast("cpu", dtype):
        o = nsa_sel.selection_attention(q, k, v, ranges)
    assert o.dtype == dtype
    assert torch.equal(o, nsa_sel.selection_attention(q.to(dtype), k.to(dtype), v.to(dtype), ranges))
    o.float().sum().backward()
    assert all(tensor.grad.dtype == torch.float32 and bool(tensor.grad.isfinite().all()) for tensor in (q, k, v))


def test_repeated_calls_are_bit_equal() -> None:
    q, k, v, ranges = problem(requires_grad=True)
    runs = []
    for _ in range(3):
        o = nsa_sel.selection_attention(q, k, v, Selection.from_ranges(ranges))
        runs.append([o, *torch.autograd.grad(o.square().sum(), (q, k, v))])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_equal_heads_of_a_group_give_equal_outputs() -> None:
    q, k, v, ranges = problem()
    o = nsa_sel.selection_attention(q[:, :, :, :1].expand(-1, -1, -1, 3, -1).contiguous(), k, v, ranges)
    torch.testing.assert_close(o, o[:, :, :, :1].expand_as(o), rtol=0, atol=1e-7)


def test_inputs_written_before_backward_are_noticed() -> None:
    q, k, v, ranges = problem(requires_grad=True)
    keys = k * 1.0
    o = nsa_sel.selection_attention(q, keys, v, ranges)
    with torch.no_grad():
        keys.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_inference_mode() -> None:
    q, k, v, ranges = problem()
    expected = nsa_sel.selection_attention(q, k, v, ranges)
    with torch.inference_mode():
        assert torch.equal(nsa_sel.selection_attention(q, k, v, ranges.clone()), expected)


# A backend that fails


class Fake:
    """A backend module that does what packed SDPA does, or raises; counts its calls."""

    def __init__(self) -> None:
        self.calls = {"forward": 0, "backward": 0}
        self.errors: dict[str, Exception] = {}

    def forward(self, *arguments: Any) -> Any:
        return self._do("forward", sdpa_packed.forward, arguments)

    def backward(self, *arguments: Any) -> Any:
        return self._do("backward", sdpa_packed.backward, arguments)

    def _do(self, direction: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        self.calls[direction] += 1
        if direction in self.errors:
            raise self.errors[direction]
        return work(*arguments)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A backend called fake, the first of the preference."""
    spec = Backend(name="fake", path="nowhere", framework="toy", limits=Limits(dtypes={"cpu": ("float32",)}))
    file = Path(os.environ["NSA_SEL_CONFIG"])
    file.write_text(PINNED.replace("[sdpa-packed", "[fake, sdpa-packed"))
    known, load, module = {**registry.backends(), "fake": spec}, registry.load, Fake()
    monkeypatch.setattr(registry, "backends", lambda: known)
    monkeypatch.setattr(registry, "load", lambda name: module if name == "fake" else load(name))
    registry.missing.cache_clear()
    return module


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    return [record.nsa_sel for record in caplog.records if record.getMessage() == name]


def test_a_registered_backend_is_picked(fake: Fake) -> None:
    check(*problem())
    assert last().forward == "fake"
    assert fake.calls["forward"] == 1


def test_a_failing_choice_falls_back_once_and_says_so(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake.errors["forward"] = RuntimeError("out of resource: shared memory")
    q, k, v, ranges = problem()
    check(q, k, v, ranges)
    (event,) = events(caplog, "sel.backend.failed")
    assert (event["backend"], event["direction"]) == ("fake", "forward")
    assert "out of resource: shared memory" in event["error"]
    assert next(r for r in caplog.records if r.getMessage() == "sel.backend.failed").levelname == "ERROR"
    assert last().forward == "sdpa-packed"
    assert last().override is not None
    assert last().override.source == "failure of fake"

    check(q, k, v, ranges)
    assert fake.calls["forward"] == 1  # not tried again
    assert len(events(caplog, "sel.backend.failed")) == 1
    assert last().override is None
    assert last().steps == ("fake: failed-before",)
    assert "out of resource: shared memory" in nsa_sel.describe(last())

    check(q[:, :3], k, v, ranges[:, :3])  # another class of calls is tried
    assert fake.calls["forward"] == 2
    assert nsa_sel.counters()["failed.fake"] >= 2


def test_a_failing_backward_falls_back(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake.errors["backward"] = RuntimeError("no kernel image")
    q, k, v, ranges = problem(requires_grad=True)
    nsa_sel.selection_attention(q, k, v, ranges).square().sum().backward()
    assert (last().forward, last().backward) == ("fake", "fake")
    (event,) = events(caplog, "sel.backend.failed")
    assert event["direction"] == "backward"
    got = [tensor.grad.clone() for tensor in (q, k, v)]
    again = torch.autograd.grad(nsa_sel.selection_attention(q, k, v, ranges, backend="sdpa-packed").square().sum(), (q, k, v))
    assert all(map(torch.equal, got, again))
    nsa_sel.selection_attention(q, k, v, ranges).sum().backward()
    assert last().backward == "sdpa-packed"
    assert fake.calls["backward"] == 1


@pytest.mark.parametrize("source", ["argument", "use_backend", "NSA_SEL_BACKEND"])
def test_a_failing_forced_backend_raises(monkeypatch: pytest.MonkeyPatch, fake: Fake, source: str) -> None:
    fake.errors["forward"] = RuntimeError("boom")
    for _ in range(2):  # and is tried every time
        with pytest.raises(RuntimeError, match="boom"):
            call_forced(monkeypatch, "fake", source)
    assert fake.calls["forward"] == 2


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_errors_that_must_not_be_hidden(fake: Fake, error: Exception) -> None:
    fake.errors["forward"] = error
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            nsa_sel.selection_attention(*problem())
    assert fake.calls["forward"] == 2


def test_a_fallback_that_is_forbidden(monkeypatch: pytest.MonkeyPatch, fake: Fake) -> None:
    monkeypatch.setenv("NSA_USE_SEL_PACK", "0")
    fake.errors["forward"] = RuntimeError("boom")
    with pytest.raises(BackendError, match=r"fake failed, and the fallback refuses(?s:.*)pack-off") as caught:
        nsa_sel.selection_attention(*problem())
    assert "boom" in str(caught.value.__context__)


def test_failures_may_be_forgotten(fake: Fake) -> None:
    fake.errors["forward"] = RuntimeError("boom")
    arguments = problem()
    nsa_sel.selection_attention(*arguments)
    fake.errors.clear()
    nsa_sel.reset()
    nsa_sel.selection_attention(*arguments)
    assert last().forward == "fake"


# Events


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


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
    decision = next(line.decision for line in read_log(file).lines if line.decision is not None)
    assert decision == last()
    assert decision.request.S_kv == 64
    assert decision.replay() == ()
    monkeypatch.delenv("NSA_DEBUG_LOG")
    nsa_sel.selection_attention(*arguments)
    nsa_sel.selection_attention(*problem(seed=3))
    assert len([line for line in lines_of(file) if line["event"] == "sel.decision"]) == 2


def test_log_to_holds_until_it_is_told_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    nsa_sel.log_to(str(file))
    nsa_sel.selection_attention(*problem())
    nsa_sel.selection_attention(*problem(dtype=torch.float64))
    assert [line["event"] for line in lines_of(file)] == ["sel.settings", "sel.decision", "sel.decision"]


def test_debug_flags_add_events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    for flag in ("NSA_DEBUG_TRITON", "NSA_DEBUG_TIMING", "NSA_DEBUG_COMPARE"):
        monkeypatch.setenv(flag, "1")
    monkeypatch.setenv("NSA_DEBUG_LOG", str(file))
    q, k, v, ranges = problem(requires_grad=True)
    nsa_sel.selection_attention(q, k, v, ranges).sum().backward()
    found = {(line["event"], line.get("direction")): line for line in lines_of(file)}
    assert found["sel.timing", "forward"]["ms"] > 0
    assert found["sel.timing", "backward"]["backend"] == "sdpa-packed"
    assert found["sel.compare", "forward"]["mae"] == found["sel.compare", "backward"]["mae"] == 0
    reads = found["sel.reads", None]
    tokens = int(oracle_mask(ranges, 40, 12).sum())
    assert (reads["tokens"], reads["bytes"], reads["rows"]) == (tokens, tokens * (16 + 24) * 4, 48)


def events_on(stderr: str) -> list[str]:
    return [json.loads(line)["event"] for line in stderr.splitlines()]


@pytest.mark.parametrize(
    ("flag", "event"), [("NSA_DEBUG_TRITON", "sel.reads"), ("NSA_DEBUG_TIMING", "sel.timing"), ("NSA_DEBUG_COMPARE", "sel.compare")]
)
def test_debug_flags_alone_show_their_events_on_stderr(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, event: str
) -> None:
    arguments, log = problem(), tmp_path / "events.jsonl"

    def shown() -> list[str]:
        nsa_sel.selection_attention(*arguments)
        return events_on(capsys.readouterr().err)

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


def test_debug_flags_leave_it_to_who_listens_already(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    arguments, log = problem(), tmp_path / "events.jsonl"
    nsa_sel.log_to(str(log))
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    nsa_sel.selection_attention(*arguments)
    monkeypatch.delenv("NSA_DEBUG_TRITON")
    nsa_sel.selection_attention(*arguments)
    found = [line["event"] for line in lines_of(log)]
    assert [event for event in found if event != "sel.settings"] == ["sel.path", "sel.reads", "sel.decision", "sel.decision"]
    nsa_sel.log_to(None)
    assert not telemetry.listening()  # as before
    caplog.clear()
    caplog.set_level("INFO", logger="nsa_sel")
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    nsa_sel.selection_attention(*arguments)
    assert [record.getMessage() for record in caplog.records] == ["sel.path", "sel.reads", "sel.decision"]
    assert capsys.readouterr().err == ""


def test_a_log_that_is_asked_for_by_1_is_on_stderr(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("1", "true", "0"):
        monkeypatch.setenv("NSA_DEBUG_LOG", text)
        nsa_sel.selection_attention(*problem())
    assert [event for event in events_on(capsys.readouterr().err) if event != "sel.settings"] == ["sel.decision"] * 2
    assert [file.name for file in tmp_path.iterdir()] == ["pinned.yaml"]


def test_a_log_holds_names_that_are_no_utf8(tmp_path: Path) -> None:
    nsa_sel.log_to(str(tmp_path / "log\udcff"))
    telemetry.emit("sel.tuned.ignored", file="/a/b\udcff", request=example_request())
    telemetry.emit("sel.tuned.loaded", file="/a/b")
    lines = lines_of(tmp_path / "log\udcff")
    assert [line["file"] for line in lines] == ["/a/b?", "/a/b"]
    assert lines[0]["request"]["Dk"] == example_request().Dk


def test_no_event_is_made_when_nobody_listens(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="nsa_sel")
    q, k, v, ranges = problem(requires_grad=True)
    nsa_sel.explain(q, k, v, ranges)  # settings are read once
    monkeypatch.setattr(telemetry, "emit", lambda *_, **__: pytest.fail("an event was made"))
    monkeypatch.setattr(msgspec.json, "encode", lambda *_, **__: pytest.fail("something was serialised"))
    nsa_sel.selection_attention(q, k, v, ranges).sum().backward()
