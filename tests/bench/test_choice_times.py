"""Choosers in `nsa-sel tune`: what is measured, how it is checked, and what decisions make of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.parity import WrongResult
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing
from nsa_sel.bench.tune import choice_times, costs
from nsa_sel.core import registry

SMALL = cases.Case("choose-small", cases.CHOICE, 1, 90, 200, 2, 3, 16, 24, 3, 64, "float32")


def row(direction: str) -> Row:
    return {**SMALL._asdict(), "direction": direction, "backend": "choose-torch", "launches": ""}


def test_a_chooser_is_timed_and_compared() -> None:
    measure = costs.Runner("cpu", rep=1)
    for direction in ("fwd", "bwd"):
        found = measure(row(direction))
        assert 0 < found["ms_p20"] <= found["ms_median"] <= found["ms_p80"]
        assert (found["mae"], found["same_blocks"], found["direction"]) == (0.0, 1.0, direction)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("NaN in o", "o is nan off"),
        ("other blocks", "0.0% of the blocks"),
        ("wrong gradient", "dk is 1"),
        ("NaN in a gradient", "dv is nan off"),
    ],
)
def test_wrong_results_are_no_times(monkeypatch: pytest.MonkeyPatch, damage: str, message: str) -> None:
    measure = choice_times.Runner("cpu", Timing(1), 1e-3)
    measure(row("bwd"))
    right = choice_times.results

    def wrong(*given: Any) -> tuple[torch.Tensor, ...]:
        o, dq, dk, dv, blocks = right(*given)
        if damage == "NaN in o":
            o[0, 0] = torch.nan
        if damage == "NaN in a gradient":
            dv[0, 0] = torch.nan
        return o, dq, dk + (damage == "wrong gradient"), dv, blocks + 64 * (damage == "other blocks")

    monkeypatch.setattr(choice_times, "results", wrong)
    with pytest.raises(WrongResult, match=message):
        measure(row("bwd"))


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_every_chooser_is_timed_on_a_gpu(direction: str) -> None:
    measure, names = choice_times.Runner("cuda", Timing(1), costs.MAX_ERROR), registry.backends("choose")
    case = cases.prefill(cases.CHOICE, 1024, 4)
    for name in (name for name in names if not registry.missing(name)):
        found = measure({**case._asdict(), "direction": direction, "backend": name, "launches": ""})
        assert found["ms_median"] > 0
        assert found["workspace_bytes"] >= 0
