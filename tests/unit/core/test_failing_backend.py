"""Check that packed SDPA takes over once and says so when a chosen backend fails, and that forced backends raise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nsa_sel
from nsa_sel.backends import sdpa_packed
from nsa_sel.core import registry
from nsa_sel.core.backend import Backend, Limits
from nsa_sel.errors import BackendError
from tests.helpers.calls import PINNED, call_forced, check, last, problem

pytestmark = pytest.mark.usefixtures("plain_cpu")


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
def fake(monkeypatch: pytest.MonkeyPatch, plain_cpu: Path) -> Fake:
    """A backend called fake, the first of the preference."""
    spec = Backend(name="fake", path="nowhere", framework="toy", limits=Limits(dtypes={"cpu": ("float32",)}))
    plain_cpu.write_text(PINNED.replace("[sdpa-packed", "[fake, sdpa-packed"))
    backends, load, module = registry.backends, registry.load, Fake()
    monkeypatch.setattr(registry, "backends", lambda kind="attend": {**backends(kind), **({"fake": spec} if kind == "attend" else {})})
    monkeypatch.setattr(registry, "load", lambda name: module if name == "fake" else load(name))
    registry.missing.cache_clear()
    return module


def test_a_failing_choice_falls_back_once_and_says_so(fake: Fake, caplog: pytest.LogCaptureFixture, logged: Any) -> None:
    fake.errors["forward"] = RuntimeError("out of resource: shared memory")
    q, k, v, ranges = problem()
    check(q, k, v, ranges)
    (event,) = logged("sel.backend.failed")
    assert (event["backend"], event["direction"]) == ("fake", "forward")
    assert "out of resource: shared memory" in event["error"]
    assert next(r for r in caplog.records if r.getMessage() == "sel.backend.failed").levelname == "ERROR"
    assert last().forward == "sdpa-packed"
    assert last().override is not None
    assert last().override.source == "failure of fake"

    check(q, k, v, ranges)
    assert fake.calls["forward"] == 1  # not tried again
    assert len(logged("sel.backend.failed")) == 1
    assert last().override is None
    assert last().steps == ("fake: failed-before",)
    assert "out of resource: shared memory" in nsa_sel.describe(last())

    check(q[:, :3], k, v, ranges[:, :3])  # another class of calls is tried
    assert fake.calls["forward"] == 2
    assert nsa_sel.counters()["failed.fake"] >= 2


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


def test_too_little_memory_comes_with_a_remedy(fake: Fake) -> None:
    fake.errors["forward"] = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        nsa_sel.selection_attention(*problem())
    (note,) = caught.value.__notes__
    assert note.startswith("fake, forward pass: besides its results it may take up to 1073741824 bytes (runtime.workspace_bytes). Remedy: ")


def test_a_fallback_that_is_forbidden(monkeypatch: pytest.MonkeyPatch, fake: Fake) -> None:
    monkeypatch.setenv("NSA_USE_SEL_PACK", "0")
    fake.errors["forward"] = RuntimeError("boom")
    with pytest.raises(BackendError, match=r"fake failed, and the fallback refuses(?s:.*)pack-off") as caught:
        nsa_sel.selection_attention(*problem())
    assert "boom" in str(caught.value.__context__)
