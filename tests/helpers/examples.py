"""The programs of examples/, which is no package."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.helpers.paths import ROOT


def load(name: str) -> ModuleType:
    """A program as a module; it finds its neighbors while it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        return importlib.import_module(name)
