"""The README's picture and sentence, and the tables of training: from made-up rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nsa_sel.bench.report import layer, shares, training
from nsa_sel.bench.report.figures import LIGHT, png


def part(name: str, S: int, fwd: float, bwd: float) -> list[dict[str, Any]]:
    return [{"part": name, "h": 16, "S": S, "direction": way, "ms_median": ms} for way, ms in (("fwd", fwd), ("bwd", bwd))]


ROWS = [
    *part("choose", 8192, 1, 1), *part("select", 8192, 5, 5), *part("select of text", 8192, 1, 2), *part("window", 8192, 1, 1),
    *part("gate", 8192, 0.5, 0.5), *part("layer", 8192, 9, 9), *part("layer of text", 8192, 2, 3), *part("dense", 8192, 4, 6),
    *part("dense", 32768, 4, 6), *part("choose", 32768, 1, 1),
]  # fmt: skip


def test_shares_of_dense_attention() -> None:
    """Text where there is one; lengths without all parts are left out."""
    assert shares.stacks(ROWS) == [(8192, {"choose": 20.0, "select": 30.0, "window": 20.0, "gate": 10.0}, 50.0)]


def test_the_picture_is_drawn_and_said(tmp_path: Path) -> None:
    figure = layer.figure(shares.stacks(ROWS), [(8192, 100e3, 150e3), (32768, 10e3, 40e3)])
    assert "50% at 8k tokens" in figure.alt
    assert "1.50 times at 8k, 4.00 times at 32k" in figure.alt
    png(figure, LIGHT, tmp_path / "layer.png")
    assert (tmp_path / "layer.png").stat().st_size > 1000


def run(folder: Path, name: str, losses: list[float], backend: str | None = None, held_out: float = 2.0) -> None:
    rows = [
        {
            "step": i,
            "loss": loss,
            "tokens_per_second": 1000 * (i + 1),
            "attention": "nsa",
            "backend": backend,
            "held_out_loss": held_out - i,
        }
        for i, loss in enumerate(losses)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "FOLDER", tmp_path)
    monkeypatch.setattr(training.pairs, "__defaults__", (tmp_path,))
    for kind in ("speed", "long"):
        run(tmp_path, f"{kind}-8192-dense", [3.0], held_out=2.5)
        run(tmp_path, f"{kind}-8192-nsa", [3.0, 2.0, 1.0], "cupy-cuda")
    run(tmp_path, "band-sdpa-packed", [3.0] * 20, "sdpa-packed")
    run(tmp_path, "band-triton-tile", [3.25] * 20, "triton-tile")


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


@pytest.mark.usefixtures("runs")
def test_tables_of_training() -> None:
    assert cells(training.speed_table()) == [["8k", "1", "2", "2.00", "cupy-cuda"]]
    assert cells(training.loss_table()) == [["8k", "1", "2.500", "2.000", "-0.500"], ["8k", "3", "-", "0.000", "-"]]
    assert cells(training.band_table()) == [
        ["sdpa-packed", "sdpa-packed", "20", "3.000", "0.0000"], ["triton-tile", "triton-tile", "20", "3.250", "0.2500"]
    ]  # fmt: skip
