"""The contract of decoding over caches, on every device (tests/contract/caches.py)."""

from __future__ import annotations

import pytest

from tests.contract.caches import CHECKS, Layout, cells
from tests.contract.lanes import Lane


@cells("cpu", "interpreter", "emulated", "cuda")
def test_caches(behavior: str, lane: Lane, what: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    lane.open(monkeypatch)
    CHECKS[behavior][0](lane, what, monkeypatch)
