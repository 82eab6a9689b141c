"""The training example at its smallest: its model, and that a resumed run is the run."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_sel.errors import ArgumentError
from tests.helpers.files import ROOT, load

CPU = torch.device("cpu")


example = load("train_nsa_lm")


def run(out: Path, steps: int, backend: str | None = "sdpa-packed", every: int = 2, **sizes: Any) -> list[dict[str, Any]]:
    return example.train(out, replace(example.TINY, layers=1, **sizes), backend, CPU, ROOT / "docs", 1, steps, every, graph=False)  # type: ignore[no-any-return]


def losses(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows]


def furthest(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Return the largest difference between losses of the same step."""
    return max(abs(a["loss"] - b["loss"]) for a, b in zip(rows, others, strict=True))


def test_an_interrupted_run_gives_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at a step, and killed between two checkpoints with a torn last line: both go on as if nothing had been."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / "examples" / "train_nsa_lm.py"), "--out", str(tmp_path / "whole")])
    whole = run(tmp_path / "whole", 7)
    assert {row["command"] for row in whole} == {"python examples/train_nsa_lm.py --out whole"}
    assert all(row["device"] and row["torch"] and "commit" in row for row in whole)
    assert [row["step"] for row in whole] == list(range(7))
    assert [row["step"] for row in whole if "held_out_loss" in row] == [1, 3, 5]
    advance = example.Training.advance

    def killed(self: Any) -> float:
        if self.step == 5:
            raise KeyboardInterrupt
        return float(advance(self))

    run(tmp_path / "parts", 3)
    monkeypatch.setattr(example.Training, "advance", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", 7)
    monkeypatch.undo()
    log = tmp_path / "parts" / "losses.jsonl"
    log.write_text(log.read_text() + '{"step": 5, "lo')
    parts = run(tmp_path / "parts", 7)
    assert losses(parts) == losses(whole)
    assert losses([json.loads(line) for line in log.read_text().splitlines()]) == losses(whole)
    states = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "parts")]
    assert all(torch.equal(a, b) for a, b in zip(*(state["model"].values() for state in states), strict=True))
    assert sorted(file.name for file in (tmp_path / "parts").iterdir()) == ["checkpoint.pt", "losses.jsonl", "text.bin"]
    assert run(tmp_path / "parts", 7) == parts  # nothing is left to do


def test_it_learns_and_backends_agree(tmp_path: Path) -> None:
    runs = {name: run(tmp_path / name, 12, name, every=6) for name in ("sdpa-packed", "numba")}
    assert runs["numba"][0]["backend"] == "numba"
    assert runs["numba"][-1]["loss"] < runs["numba"][0]["loss"] - 0.1
    assert furthest(runs["numba"], runs["sdpa-packed"]) < 1e-4
    dense = run(tmp_path / "dense", 4, None, attention="dense")
    assert (dense[0]["attention"], dense[0]["backend"]) == ("dense", None)


def test_msa_trains_its_indexer_first_with_dense_attention(tmp_path: Path) -> None:
    rows = run(tmp_path / "whole", 12, attention="msa", every=4)
    assert all(row["index_loss"] > 0 for row in rows)
    sparse = run(tmp_path / "sparse", 1, attention="msa", dense_steps=0)
    assert sparse[0]["index_loss"] != rows[0]["index_loss"]
    masses = [(row["mass"], row["best_mass"]) for row in rows if "mass" in row]
    assert len(masses) == 3
    assert all(0 < held <= best + 1e-6 for both in masses for held, best in zip(*both, strict=True))
    run(tmp_path / "parts", 5, attention="msa", every=4)
    assert losses(run(tmp_path / "parts", 12, attention="msa", every=4)) == losses(rows)


@pytest.mark.parametrize("dense_steps", [0, 100])
def test_the_indexer_of_msa_learns_a_batch(tmp_path: Path, dense_steps: int) -> None:
    sizes = replace(example.TINY, layers=1, attention="msa", dense_steps=dense_steps, index_loss=10.0)
    training = example.Training(sizes, "sdpa-packed", CPU, example.load_text(ROOT / "docs", tmp_path / "text.bin", 128), graph=False)
    training.rate.fill_(0.003)
    data = example.batch_at(training.text, 0, sizes)
    for layer in training.msa:
        layer.warm_up = dense_steps > 0
    losses = []
    for _ in range(12):
        training.update(data)
        losses.append(training.indexer_facts()["index_loss"])
    assert losses[-1] < 0.95 * losses[0]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", 1)
    with pytest.raises(ArgumentError, match=r"^--out is a folder of a run with other sizes"):
        run(tmp_path / "run", 2, seed=1)
    (tmp_path / "run" / "text.bin").write_bytes(b"another text " * 1000)
    with pytest.raises(ArgumentError, match=r"^--out is a folder of a run with other text"):
        run(tmp_path / "run", 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match=r"^--text is 0 bytes below .*python3-doc"):
        example.load_text(tmp_path / "empty", tmp_path / "text.bin", 128)
    for wrong in ({"attention": "flash"}, {"attention": "dense", "backend": "numba"}):
        with pytest.raises(ArgumentError, match="--"):
            example.main(tmp_path / "other", **wrong)


@pytest.mark.gpu
def test_backends_train_alike_on_a_gpu(tmp_path: Path) -> None:
    """In bfloat16, with whole blocks that all of them take: every loss within 0.05 nats of packed SDPA's."""
    sizes = replace(example.TINY, context=512, groups=2, heads=4, head_dim=64, block=64)
    runs = {
        name: example.train(tmp_path / name, sizes, name, torch.device("cuda"), ROOT / "docs", 5, 20, 10, graph=True)
        for name in ("sdpa-packed", "triton-group", "triton-token", "triton-tile", "triton-block")
    }
    assert {name: rows[0]["backend"] for name, rows in runs.items()} == {name: name for name in runs}
    distances = {name: furthest(rows, runs["sdpa-packed"]) for name, rows in runs.items()}
    assert max(distances.values()) < 0.05, distances
    assert runs["sdpa-packed"][-1]["loss"] < runs["sdpa-packed"][0]["loss"] - 0.1


# The model


@pytest.mark.parametrize("attention", ["nsa", "msa", "dense"])
def test_no_byte_sees_a_later_one(attention: str) -> None:
    torch.manual_seed(0)
    model = example.LanguageModel(replace(example.TINY, attention=attention), "sdpa-packed")
    text = torch.randint(256, (1, 128))
    other = text.clone()
    other[:, 77:] = torch.randint(256, (1, 51))
    with torch.no_grad():
        before, after = model(text)[:, :77], model(other)[:, :77]
    torch.testing.assert_close(before, after)


@pytest.mark.gpu
def test_a_captured_step_trains_as_an_eager_one(tmp_path: Path) -> None:
    """Each replay uses the current batch, learning rate and weights."""
    device, text = torch.device("cuda"), example.load_text(ROOT / "docs", tmp_path / "text.bin", 512)
    runs = [example.Training(replace(example.TINY, context=512), None, device, text, graph) for graph in (False, True)]
    eager, captured = ([training.advance() for _ in range(8)] for training in runs)
    assert runs[1].graph.done == 8
    assert captured == pytest.approx(eager, abs=2e-3)
    assert captured[-1] < captured[0]
