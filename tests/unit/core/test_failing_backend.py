"""Check that packed SDPA takes over once and says so when a chosen backend fails, and that forced backends raise."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import nsa_sel
from nsa_sel.backends import sdpa_packed
from nsa_sel.core import registry
from nsa_sel.core.backend import Backend, Limits
from nsa_sel.errors import BackendError
from tests.helpers.calls import PINNED, call_forced, check, last, problem

pytestmark = pytest.mark.usefixtures("plain_cpu")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, plain_cpu: Path) -> Any:
    """A backend called fake, the first of the preference: it does what packed SDPA does, and counts its calls."""
    spec = Backend(name="fake", path="nowhere", framework="toy", limits=Limits(dtypes={"cpu": ("float32",)}))
    plain_cpu.write_text(PINNED.replace("[sdpa-packed", "[fake, sdpa-packed"))
    module = types.SimpleNamespace(**{name: mock.Mock(wraps=getattr(sdpa_packed, name)) for name in ("forward", "backward")})
    backends, load = registry.backends, registry.load
    monkeypatch.setattr(registry, "backends", lambda kind="attend": {**backends(kind), **({"fake": spec} if kind == "attend" else {})})
    monkeypatch.setattr(registry, "load", lambda name: module if name == "fake" else load(name))
    registry.missing.cache_clear()
    return module


def test_a_failing_choice_falls_back_once_and_says_so(fake: Any, caplog: pytest.LogCaptureFixture, logged: Any) -> None:
    fake.forward.side_effect = RuntimeError("out of resource: shared memory")
    q, k, v, ranges = problem()
    check(q, k, v, ranges)
    (event,) = logged("sel.backend.failed")
    assert (event["backend"], event["direction"]) == ("fake", "forward")
    assert "out of resource: shared memory" in event["error"]
    assert next(r for r in caplog.records if r.getMessage() == "sel.backend.failed").levelname == "ERROR"
    assert last().forward == "sdpa-packed"
    assert last().override.source == "failure of fake"

    check(q, k, v, ranges)
    assert fake.forward.call_count == 1  # not tried again
    assert len(logged("sel.backend.failed")) == 1
    assert last().override is None
    assert last().steps == ("fake: failed-before",)
    assert "out of resource: shared memory" in nsa_sel.describe(last())

    check(q[:, :3], k, v, ranges[:, :3])  # another class of calls is tried
    assert fake.forward.call_count == 2
    assert nsa_sel.counters()["failed.fake"] >= 2


def test_a_forced_backend_that_fails_backward_raises(fake: Any) -> None:
    fake.backward.side_effect = RuntimeError("boom")
    q, *others = problem()
    with pytest.raises(RuntimeError, match="boom"):
        nsa_sel.selection_attention(q.requires_grad_(), *others, backend="fake").sum().backward()


@pytest.mark.parametrize("source", ["argument", "use_backend", "NSA_SEL_BACKEND"])
def test_a_failing_forced_backend_raises(monkeypatch: pytest.MonkeyPatch, fake: Any, source: str) -> None:
    fake.forward.side_effect = RuntimeError("boom")
    for _ in range(2):  # and is tried every time
        with pytest.raises(RuntimeError, match="boom"):
            call_forced(monkeypatch, "fake", source)
    assert fake.forward.call_count == 2


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_errors_that_must_not_be_hidden(fake: Any, error: Exception) -> None:
    fake.forward.side_effect = error
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            nsa_sel.selection_attention(*problem())
    assert fake.forward.call_count == 2


def test_too_little_memory_comes_with_a_remedy(fake: Any) -> None:
    fake.forward.side_effect = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        nsa_sel.selection_attention(*problem())
    (note,) = caught.value.__notes__
    assert note.startswith("fake, forward pass: besides its results it may take up to 1073741824 bytes (runtime.workspace_bytes). Remedy: ")


def test_a_fallback_that_is_forbidden(monkeypatch: pytest.MonkeyPatch, fake: Any) -> None:
    monkeypatch.setenv("NSA_USE_SEL_PACK", "0")
    fake.forward.side_effect = RuntimeError("boom")
    with pytest.raises(BackendError, match=r"fake failed, and the fallback refuses(?s:.*)pack-off") as caught:
        nsa_sel.selection_attention(*problem())
    assert "boom" in str(caught.value.__context__)
