"""The contract of `selection_attention` on a CPU: the backends of a CPU, and emulated CUDA kernels; over caches, on every device.

The cells of Triton's interpreter are in tests/test_triton_sel_parity.py and tests/test_triton_sel_edge_cases.py, those of a GPU in
tests/test_triton_sel_parity_gpu.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract import caches
from tests.contract.attend import cells, run
from tests.contract.lanes import PATHS, Lane


@cells(
    *PATHS, only=("edges", "promised", "positions", "poison", "packed", "size", "dtype", "scale", "decode", "reuse", "one-group", "layouts")
)
def test_attend_by_packed_sdpa(behavior: str, lane: Lane, what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(behavior, lane, what, monkeypatch)


@cells("cpu", "emulated")
def test_attend(behavior: str, lane: Lane, what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(behavior, lane, what, monkeypatch)


@caches.cells("cpu", "interpreter", "emulated", "cuda")
def test_caches(behavior: str, lane: Lane, what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lane.open(monkeypatch)
    caches.CHECKS[behavior][0](lane, what, monkeypatch)
