"""Check the benches' questions on a CPU or by made-up rows: host time, claims of the README, parts of a layer, texts of trained models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from nsa_sel import use_backend
from nsa_sel.bench import headline
from nsa_sel.bench.core import cases, store, trained
from nsa_sel.bench.core.cases import make_selection
from nsa_sel.bench.core.contenders import DENSE
from nsa_sel.bench.core.session import wanted
from nsa_sel.bench.questions import host_time, layer_parts, save_selections
from nsa_sel.bench.questions.host_time import CHOSEN, NOTHING
from nsa_sel.bench.tune import cost_fit
from nsa_sel.cli.app import app
from nsa_sel.errors import ArgumentError, NsaSelError
from nsa_sel.selection import Selection
from tests.helpers.files import table_lines

# Host time


def test_host_time_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, names = tmp_path / "overhead.jsonl", (NOTHING, CHOSEN, "numba")
    threads = torch.get_num_threads()
    host_time.main(out, rounds=2, calls=2, device="cpu", backends=",".join(names), S=70)
    torch.set_num_threads(threads)
    rows = store.read(out)
    assert {(row["backend"], row["direction"]) for row in rows} == {(name, way) for name in names for way in ("fwd", "fwd+bwd")}
    assert all(row["device"] and row["threads"] == 1 and row["command"] and row["S"] == 70 for row in rows)
    assert "beyond the backend" in capsys.readouterr().out
    assert {(name, "further call, new") for name in names} <= {(row["backend"], row["part"]) for row in rows}


# The README's claims


def times(ms: float) -> dict[str, float]:
    return {"ms_median": ms, "ms_p20": 0.9 * ms, "ms_p80": 1.1 * ms}


def test_every_claim_is_measured_beside_dense_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU where dense attention takes 100 ms, the layer 10 ms and the call 200 ms, and where the training example
    fails.
    """

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
    monkeypatch.setattr(headline.store, "stamp", lambda: {"device": "NVIDIA Test"})
    monkeypatch.setattr(headline.store, "example", lambda name: None)
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


def test_headline_refuses_other_flags_and_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flags, words in (([], "is on a machine without a usable GPU"), (["--N", "8"], "--N is given; allowed: left out with --headline.")):
        refused = CliRunner().invoke(app, ["bench", "--headline", "--out", str(tmp_path / "rows"), *flags])
        assert refused.exit_code == 2
        assert words in " ".join(refused.output.split())


# Parts of a layer


def test_parts_make_their_own_inputs() -> None:
    parts = layer_parts.parts(256, 2, "cpu", torch.float32)
    with use_backend("sdpa-packed"):
        for name in ("choose", "from_scores", "select", "window", "gate", "layer", "select of text", "layer of text", "dense"):
            call, inputs = parts[name]()
            assert call().shape[:2] == (1, 256)
            assert all(x.requires_grad for x in inputs)


# Texts of trained models

S, G, N, BLOCK = 1024, 2, 4, 16


def blocks(seed: int, S: int = S) -> Tensor:
    """Return [S,G,N] int16 as a layer chooses them, neighbors alike: scores that last for 16 rows."""
    scores = torch.rand(1, -(-S // 16), G, -(-S // BLOCK), generator=torch.Generator().manual_seed(seed)).repeat_interleave(16, 1)[:, :S]
    return Selection.from_scores(scores, N, BLOCK).block_indices[0].short()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of bench/data, without files of trained models."""
    monkeypatch.setattr(trained, "FOLDER", tmp_path)
    return tmp_path


def test_layers_are_read_back_and_are_cases(folder: Path) -> None:
    assert trained.contexts() == cases.trained_cases() == []
    assert cases.text_case(32768, 16) is None
    trained.file_of(S).write_bytes(save_selections.contents({layer: blocks(layer) for layer in range(3)}, BLOCK, {"step": 300}))
    found = trained.trained_selection(S, "cpu", [2, 0]).validate()
    assert (found.block_size, found.disjoint) == (BLOCK, True)
    assert torch.equal(found.block_indices[0].short(), torch.cat((blocks(2), blocks(0)), 1))
    maps = torch.stack([blocks(layer)[:, group] for layer, group in ((0, 0), (1, 0), (1, 1), (2, 1))], 1)
    assert torch.equal(trained.trained_selection(S, "cpu").block_indices[0].short(), maps)
    assert torch.equal(trained.trained_selection(100, "cpu", [1]).block_indices[0].short(), blocks(1)[:100])
    facts = {"step": 300, "context": S, "groups": G, "n": N, "block_size": BLOCK, "blocks": S // BLOCK, "layers": [0, 1, 2]}
    assert trained.provenance(S) == facts
    assert [case.case for case in cases.trained_cases()] == ["trained-1k-h16", "trained-1k-h4", "trained-1k-h1"]
    for case in cases.trained_cases():
        selection = make_selection(case, "cpu", seed=5)
        assert (selection.ranges.shape, selection.block_size) == ((case.B, case.S, case.G, case.n, 2), case.block)
        assert cost_fit.sharing_of(case) == tuple(round(ratio, 2) for ratio in selection.measure(S).sharing or ())
    with pytest.raises(ArgumentError, match=r"^layers is \[1, 5\]; allowed: some of \[0, 1, 2\]"):
        trained.trained_selection(S, "cpu", [1, 5])
    with pytest.raises(NsaSelError, match=r"no selections of a trained model over 1025 tokens. Remedy: train .*questions.save_selections"):
        trained.trained_selection(S + 1, "cpu")
