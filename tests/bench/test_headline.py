"""`nsa-sel bench --headline`: its claims are the README's, and its table from made-up measurements. It measures on a GPU alone."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from nsa_sel.bench.core.contenders import DENSE
from nsa_sel.bench.core.markdown import factor
from nsa_sel.bench.core.session import wanted
from nsa_sel.bench.report import headline, shares
from nsa_sel.bench.report.headline import Gain, verdict
from nsa_sel.cli.app import app
from tests.helpers.documents import table_lines
from tests.helpers.paths import ROOT


def test_claims_are_the_readmes() -> None:
    """Each is printed there: shares of time in percent, the least and the greatest gain of the call, tokens per second."""
    claims, readme = headline.claims(), (ROOT / "README.md").read_text()
    assert len(claims) == 2 + 5 + 1
    assert all(gain.low <= gain.median <= gain.high for gain in claims.values())
    of_parts, rates = shares.committed()
    wholes = {S: whole for S, _, whole in of_parts}
    for S in headline.LENGTHS:
        gain = claims[f"attention of a layer, {S // 1024}k tokens, forward + backward"]
        assert gain.median == pytest.approx(100 / wholes[S])
        assert f"{100 / gain.median:.0f}%" in readme
    for direction in ("fwd", "bwd"):
        gains = [claims[f"selected blocks, real-8k-{h}, {direction}"].median for h in ("h16", "h4")]
        assert f"{factor(min(gains))} to {factor(max(gains))}" in readme
    trained = {context: nsa / dense for context, dense, nsa in rates}[headline.CONTEXT]
    assert claims["training step, 8k tokens"].median == pytest.approx(trained)
    assert f"{trained:.2f}" in readme


def test_verdicts() -> None:
    claim = Gain(2.0, 1.9, 2.1)
    assert verdict(claim, Gain(2.0, 2.0, 2.0)) == verdict(claim, Gain(3.0, 2.0, 4.0)) == "PASS"
    assert verdict(claim, Gain(1.8, 1.7, 1.9)) == "PASS"  # the spread reaches 95% of the claim
    assert verdict(claim, Gain(1.8, 1.79, 1.81)) == "-10%"
    assert verdict(claim, Gain(0.5, 0.5, 0.5)) == "-75%"


def times(ms: float) -> dict[str, float]:
    return {"ms_median": ms, "ms_p20": 0.9 * ms, "ms_p80": 1.1 * ms}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU on which dense attention takes 100 ms, the layer 10 ms, and the call 200 ms; a model trains at 3 times the speed. Its runs."""
    runs: list[str] = []

    def parts(S: int, h: int) -> dict[str, Any]:
        return {name: lambda name=name: name for name in ("choose", "layer", "dense", *(["layer of text"] if S == 8192 else []))}

    def measure(name: str, rep: float) -> list[dict[str, Any]]:
        runs.append(name)
        return [{"direction": way, **times(100 if name == "dense" else 10)} for way in ("fwd", "bwd", "fwd+bwd")]

    def run(jobs: Any, out: Path, device: str, console: Console) -> list[dict[str, Any]]:
        rows = [row for job in jobs for row in wanted(job)]
        runs.extend(f"{row['case']} {row['direction']} {row['backend']}" for row in rows)
        return [{**row, **times(100 if row["backend"] == DENSE else 200)} for row in rows]

    def train(out: Path, sizes: Any, backend: None, device: torch.device, *rest: Any) -> list[dict[str, Any]]:
        runs.append(f"train {sizes.attention} {rest[2]}")
        return [{"tokens_per_second": 3e5 if sizes.attention == "nsa" else 1e5} for _ in range(rest[2])]

    program = SimpleNamespace(train=train, Sizes=SimpleNamespace, of_context=lambda sizes, context, batch: sizes)
    monkeypatch.setitem(sys.modules, "train_nsa_lm", program)  # type: ignore[arg-type]
    monkeypatch.setattr(headline.layer_parts, "parts", parts)
    monkeypatch.setattr(headline.layer_parts, "measure", measure)
    monkeypatch.setattr(headline, "run", run)
    monkeypatch.setattr(headline, "need_gpu", lambda program: None)
    monkeypatch.setattr(headline.environment, "stamp", lambda: {"device": "NVIDIA Test"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    return runs


def test_every_claim_is_measured_beside_dense_attention(measured: list[str], tmp_path: Path) -> None:
    text = headline.headline(tmp_path / "rows", Console(quiet=True))
    assert "README: NVIDIA H200; here: NVIDIA Test" in text
    lines = {row["claim"]: row for row in table_lines(text.split("\n\n")[1])}
    assert list(lines) == list(headline.claims())
    layer = lines["attention of a layer, 8k tokens, forward + backward"]
    assert (layer["here"], layer["20th to 80th"], layer["verdict"]) == ("10.00x", "8.18 to 12.22", "PASS")
    call = lines["selected blocks, real-8k-h16, fwd"]
    missed = 0.5 / headline.claims()["selected blocks, real-8k-h16, fwd"].median - 1
    assert (call["here"], call["verdict"]) == ("0.50x", f"{missed:+.0%}")
    assert lines["training step, 8k tokens"]["here"] == "3.00x"
    assert measured[:4] == ["layer of text", "dense", "layer", "dense"]
    assert {name.rsplit(" ", 1)[0] for name in measured[4:-2]} == {f"{case} {way}" for case, ways in headline.CASES.items() for way in ways}
    assert measured[-2:] == ["train dense 60", "train nsa 60"]
    assert {file.name for file in (tmp_path / "rows").iterdir()} == {"layer.jsonl", "training.jsonl"}  # calls.jsonl is `run`'s


def test_a_committed_run_measured_every_claim() -> None:
    lines = table_lines(headline.of_folder(ROOT / "bench/results/h100/headline").split("\n\n")[1])
    assert [row["claim"] for row in lines] == list(headline.claims())
    assert all(row["here"].endswith("x") for row in lines)


def test_what_cannot_be_measured_is_said_and_the_rest_goes_on(measured: list[str], tmp_path: Path, capsys: Any) -> None:
    def no_text(*_: Any) -> None:
        raise RuntimeError("no text here")

    sys.modules["train_nsa_lm"].train = no_text  # type: ignore[attr-defined]
    text = headline.headline(tmp_path, Console(stderr=True, soft_wrap=True))
    assert "training was left out: RuntimeError: no text here" in capsys.readouterr().err
    outcome = {row["claim"]: row["verdict"] for row in table_lines(text.split("\n\n")[1])}
    assert [what for what, verdict in outcome.items() if verdict == "not measured"] == ["training step, 8k tokens"]


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
