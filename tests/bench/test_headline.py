"""`nsa-sel bench --headline`: its claims, and its table from made-up measurements. It measures on a GPU alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from nsa_sel.bench import headline
from nsa_sel.bench.core.contenders import DENSE
from nsa_sel.bench.core.session import wanted
from nsa_sel.bench.headline import Gain
from nsa_sel.cli.app import app
from tests.helpers.files import table_lines


def times(ms: float) -> dict[str, float]:
    return {"ms_median": ms, "ms_p20": 0.9 * ms, "ms_p80": 1.1 * ms}


def test_every_claim_is_measured_beside_dense_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU where dense attention takes 100 ms, the layer 10 ms and the call 200 ms, and where the training example fails."""

    def run(jobs: Any, out: Path, device: str, console: Console) -> list[dict[str, Any]]:
        rows = [row for job in jobs for row in wanted(job)]
        return [{**row, **times(100 if row["backend"] == DENSE else 200)} for row in rows]

    def measure(name: str, rep: float) -> list[dict[str, Any]]:
        return [{"direction": direction, **times(100 if name == "dense" else 10)} for direction in ("fwd", "bwd")]

    parts = ("layer", "layer of text", "dense")
    monkeypatch.setattr(headline.layer_parts, "parts", lambda S, h: {name: lambda name=name: name for name in parts})
    monkeypatch.setattr(headline.layer_parts, "measure", measure)
    monkeypatch.setattr(headline, "run", run)
    monkeypatch.setattr(headline, "need_gpu", lambda program: None)
    monkeypatch.setattr(headline.environment, "stamp", lambda: {"device": "NVIDIA Test"})
    monkeypatch.setattr(headline.environment, "example", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    text = headline.headline(tmp_path / "rows", Console(quiet=True))
    assert "README: NVIDIA H200; here: NVIDIA Test" in text
    lines = {row["claim"]: row for row in table_lines(text.split("\n\n")[1])}
    assert len(lines) == 2 + 5 + 1
    layer = lines["attention of a layer, 8k tokens, forward + backward"]
    assert (layer["here"], layer["20th to 80th"], layer["verdict"]) == ("10.00x", "8.18 to 12.22", "PASS")
    call = lines["selected blocks, real-8k-h16, fwd"]
    assert (call["here"], call["verdict"][0]) == ("0.50x", "-")
    assert lines["training step, 8k tokens"]["verdict"] == "not measured"


def test_a_gain_is_of_the_sums_of_times() -> None:
    dense = [times(100), times(300)]
    assert headline.gain_of([times(100), times(100)], dense) == Gain(2.0, pytest.approx(360 / 220), pytest.approx(440 / 180))


def test_without_a_gpu_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flags, words in (
        ([], "nsa-sel bench --headline is on a machine without a usable GPU; allowed: a CUDA device. Remedy: run it on a machine"),
        (["--peers", "--N", "8"], "--N, --peers is given; allowed: left out with --headline."),
    ):
        refused = CliRunner().invoke(app, ["bench", "--headline", "--out", str(tmp_path / "rows"), *flags])
        assert refused.exit_code == 2
        assert words in " ".join(refused.output.split())
    assert not (tmp_path / "rows").exists()
