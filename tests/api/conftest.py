"""Fixtures of the tests of packed batches."""

from __future__ import annotations

import pytest

from tests.helpers.varlen_cases import hide_bounds


@pytest.fixture
def unreadable_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may not read tensors of bounds, as on a GPU."""
    hide_bounds(monkeypatch)
