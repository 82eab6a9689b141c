"""Triton backends in the interpreter, on CPU tensors: cells of the contract table (tests/contract/attend.py) that compare values."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.attend import EDGES, cells, run
from tests.contract.lanes import Lane


@cells("interpreter", leave_out=EDGES)
def test_triton_sel_parity(behavior: str, lane: Lane, what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(behavior, lane, what, monkeypatch)
