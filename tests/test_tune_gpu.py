"""Tuning, warming up and captures on a real GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import nsa_sel
from nsa_sel import tuned
from nsa_sel.call import device_info
from nsa_sel.cli import app
from nsa_sel.errors import ArgumentError
from nsa_sel.tuned import stamp_of

pytestmark = pytest.mark.gpu

SMALL = {"B": 1, "S": 256, "S_kv": 512, "G": 2, "h": 4, "Dk": 64, "Dv": 64, "n": 4, "block_size": 64, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NSA_SEL_CACHE", str(tmp_path))


def tune(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["tune", "--quick", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("way", ["forward", "backward", "decode"])
def test_a_quick_tuning_measures_and_is_used(way: str) -> None:
    device = device_info(torch.device("cuda", 0))
    found = tune("--backend", "triton-group", "--direction", way)
    assert found["skipped"] == []
    assert found["results"]
    for result in found["results"]:
        assert result["measured"] >= 2
        assert result["failed"] <= result["measured"], "most launches next to the committed one run and agree with it"
    again = tune("--backend", "triton-group", "--direction", way)
    assert again["results"] == found["results"]
    assert again["taken"] == 0
    table = tuned.in_force(device)
    assert table is not None
    won = sum(result["winner"] is not None for result in found["results"])
    assert sum(len(launches) for launches in table.launches.values()) == won
    assert stamp_of(device).driver is not None


def test_warming_up_runs_what_the_policy_picks() -> None:
    (warmed,) = nsa_sel.warmup(requests=[SMALL])
    assert warmed.forward == nsa_sel.decisions()[-1].forward
    assert (warmed.ms_backward or 0) > 0


def test_nothing_warms_up_within_a_capture() -> None:
    x = torch.zeros(8, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x + 1
        with pytest.raises(ArgumentError, match="within a CUDA graph capture"):
            nsa_sel.warmup(requests=[SMALL])
