"""Fixtures of the tests of tuning."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tuned_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where `nsa-sel tune` writes: in a cache folder of the test's own."""
    monkeypatch.setenv("NSA_SEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tuned"
