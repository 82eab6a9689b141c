"""Fixtures of the tests of calls: packed batches, and the layer."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.varlen_cases import hide_bounds


@pytest.fixture
def unreadable_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may not read tensors of bounds, as on a GPU."""
    hide_bounds(monkeypatch)


@pytest.fixture
def cheapest_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the selected branch on a CPU with a backend that compiles nothing."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("NSA_SEL_BACKEND", "sdpa-packed")
