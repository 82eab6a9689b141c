"""Fixtures of the tests of benches and tuning."""

from __future__ import annotations

from typing import Any

import pytest

from nsa_sel.bench.core import timing
from nsa_sel.bench.core.timing import Spread, Timing


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> list[Timing]:
    """Calls are made once and not waited for, and take 2 ms; how they were to be timed."""
    asked: list[Timing] = []

    def milliseconds(work: Any, timing: Timing, device: str) -> Spread:
        work()
        asked.append(timing)
        return Spread(2.0, 1.0, 3.0, 1.5, 2.5, timing.calls or 7)

    monkeypatch.setattr(timing, "milliseconds", milliseconds)
    monkeypatch.setenv("NSA_SEL_COMMIT", "abc1234")
    return asked
