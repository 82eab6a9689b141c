"""Tuning and warming up on a real GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import nsa_sel
from nsa_sel.bench.tune import calls
from nsa_sel.bench.tune.tuned_file import beside
from nsa_sel.cli.app import app
from nsa_sel.core.call import device_info
from nsa_sel.errors import ArgumentError
from nsa_sel.settings import tuned
from nsa_sel.settings.tuned import stamp_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("tuned_folder")]

SMALL = {"B": 1, "S": 256, "S_kv": 512, "G": 2, "h": 4, "Dk": 64, "Dv": 64, "n": 4, "block_size": 64, "dtype": "bfloat16"}


def tune(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["tune", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("way", ["forward", "backward", "decode"])
def test_a_quick_tuning_measures_and_is_used(way: str) -> None:
    device, arguments = device_info(torch.device("cuda", 0)), ("--quick", "--backend", "triton-group", "--direction", way)
    found = tune(*arguments)
    assert found["skipped"] == []
    kernels = {result["kernel"]: result for result in reversed(found["results"])}  # on the first problem: losers stay out of the second
    for result in kernels.values():
        assert result["measured"] >= 2
        assert result["failed"] <= result["measured"], "most configs near the committed one run and agree with it"
    again = tune(*arguments)
    assert (again["results"], again["taken"]) == (found["results"], 0)
    table = tuned.in_force(device)
    assert sum(len(kernels) for kernels in table.kernels.values()) == sum(result["winner"] is not None for result in kernels.values())


def test_a_few_rows_of_the_whole_command_are_kept() -> None:
    """The next run continues with what was not measured within seconds."""
    found = dict[str, Any]()
    for _ in range(10):  # each run measures a row at least, beside other tests not many more
        before, found = found, tune("--minutes", "0.2", "--direction", "decode")["thresholds"]
        if before:
            break
    assert "decode" in found
    assert found == before
    rows = beside(stamp_of(device_info(torch.device("cuda", 0))), calls.ROWS).read_text().splitlines()
    assert {json.loads(row)["direction"] for row in rows} == {"decode"}


def test_a_warm_up_runs_the_policys_choice_but_not_within_a_capture() -> None:
    (warmed,) = nsa_sel.warmup(requests=[SMALL])
    assert warmed.forward == nsa_sel.decisions()[-1].forward
    assert (warmed.ms_backward or 0) > 0
    x = torch.zeros(8, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x + 1
        with pytest.raises(ArgumentError, match="within a CUDA graph capture"):
            nsa_sel.warmup(requests=[SMALL])
