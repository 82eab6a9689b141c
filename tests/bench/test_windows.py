"""The bench of sliding windows: FlexAttention as a contender, the table, and what the committed rows show."""

from __future__ import annotations

from typing import Any

import pytest

from nsa_sel.bench.core import store
from nsa_sel.bench.questions import windows
from tests.helpers.files import ROOT
from tests.helpers.windows import check, inputs_of

FILE = ROOT / "bench" / "results" / "h200" / "profiles" / "windows.jsonl"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_has_the_results_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where FlexAttention runs uncompiled and refuses gradients unless nobody looks."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setattr(windows, "_compiled", lambda: flex_attention)
    inputs, size = inputs_of((1, 150, 190, 2, 3, 16, 24, 41))
    check(lambda q, k, v, window, **_: windows.flex_window(q, k, v, windows.window_mask(150, 190, window, "cpu")), inputs, size, False)


def row(case: str, contender: str, direction: str, ms: float) -> dict[str, Any]:
    return {"case": case, "contender": contender, "direction": direction, "ms_median": ms}


@pytest.mark.skipif(not FILE.exists(), reason="no rows of this bench are committed")
@pytest.mark.parametrize("case", windows.CASES)
def test_ours_is_ahead_of_flex_by_a_third(case: str) -> None:
    """What lets the kernels stay; in each direction ours is ahead, too."""
    factors = windows.ahead(store.read(FILE), case)
    assert factors["both"] >= 4 / 3
    assert min(factors.values()) > 1
