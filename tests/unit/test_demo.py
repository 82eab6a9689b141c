"""Check the demo end to end on a tiny trace: figures, recorded decisions, picture, and exit code 1 when a backend is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from typer.testing import CliRunner

from nsa_sel.backends import numba_cpu
from nsa_sel.cli import demo
from nsa_sel.cli.app import app
from nsa_sel.core.call import device_info
from nsa_sel.selection import Selection
from tests.helpers.paths import ROOT

S, G, H, D, BLOCK, N = 40, 2, 3, 16, 4, 5
SHIPPED = ROOT / "bench" / "data" / "smollm2_trace.safetensors"
FACTS = {"model": "a tiny one, made up", "text": "noise", "layer": 0, "block_size": BLOCK, "first": 1, "local": 2}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="looks at the CPU's rows")


@pytest.fixture(autouse=True)
def short_and_without_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two rounds of timing, without Triton's interpreter, which other tests ask for."""
    monkeypatch.setitem(demo.ROUNDS, "cpu", 2)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    device_info.cache_clear()
    yield
    device_info.cache_clear()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.safetensors"
    selection = Selection.from_scores(torch.rand(1, S, G, S // BLOCK), N, BLOCK, first=1, local=2)
    tensors = {
        "q": torch.randn(1, S, G, H, D).bfloat16(),
        "k": torch.randn(1, G, S, D).bfloat16(),
        "v": torch.randn(1, G, S, D).bfloat16(),
        "block_indices": selection.block_indices.to(torch.int8),
    }
    safetensors.torch.save_file(tensors, path, {"provenance": json.dumps(FACTS)})
    return path


def run_demo(trace: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["demo", "--trace", str(trace), "--out-dir", str(trace.parent / "out"), *options])


def rows_of(result: Any) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(result.stdout)["rows"]}


def test_every_backend_is_checked_timed_and_drawn(trace: Path) -> None:
    result = run_demo(trace, "--json")
    assert result.exit_code == 0, result.output
    document, rows = json.loads(result.stdout), rows_of(result)
    assert document == json.loads((trace.parent / "out" / "demo.json").read_text())
    assert document["passed"]
    assert {"sdpa-packed", "numba", demo.MASKED, demo.DENSE} <= set(rows)
    assert [row["name"] for row in rows.values() if row["policy_choice"]] == [document["decision"]["forward"]]
    assert "cuda" in document["refused"]["triton-group"]
    for name, row in rows.items():
        for times in (row["forward"], row["forward_backward"]):
            assert 0 < times["p20"] <= times["median"] <= times["p80"]
            assert times["repeats"] == 2
        if name in (demo.MASKED, demo.DENSE):
            assert row["decision"] is None
        else:
            assert (row["decision"]["forward"], row["decision"]["backward"]) == (name, name)
            assert set(row["errors"]) == {"o", "lse", "dq", "dk", "dv"}
            assert all(0 < error["mae"] <= error["bound"] for error in row["errors"].values())
            assert row["errors"]["o"]["bound"] == 1e-6
    assert (rows[demo.DENSE]["errors"], rows[demo.DENSE]["passed"]) == ({}, None)
    assert (trace.parent / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    output = run_demo(trace).output
    for words in ("Model: a tiny one, made up, layer 0", "triton-group does not run here: ", "Fastest forward + backward: ", "oracle"):
        assert words in output


@pytest.mark.parametrize(
    ("name", "change", "verdict"),
    [
        ("backward", lambda dq, dk, dv: (dq, dk * 1.001, dv), "mean dk off by"),
        ("forward", lambda o, lse: (o + float("nan"), lse), "o off by nan"),
    ],
)
def test_a_wrong_result_gives_exit_code_1(trace: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Any, verdict: str) -> None:
    """With fewer checked rows than rows: gradients are those of a loss over the checked rows."""
    monkeypatch.setattr(demo, "CHECKED_ROWS", 9)
    assert run_demo(trace).exit_code == 0
    right = getattr(numba_cpu, name)
    monkeypatch.setattr(numba_cpu, name, lambda *arguments: change(*right(*arguments)))
    result = run_demo(trace, "--json")
    assert (result.exit_code, json.loads(result.stdout)["checked_rows"]) == (1, 9)
    rows = rows_of(result)
    assert rows["numba"]["verdict"].startswith("WRONG: ")
    assert verdict in rows["numba"]["verdict"]
    assert (rows["numba"]["passed"], rows["sdpa-packed"]["passed"]) == (False, True)


def test_a_backend_that_breaks_does_not_end_the_demo(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(numba_cpu, "forward", broken)
    result = run_demo(trace, "--json")
    rows = rows_of(result)
    # The policy's own choice is not forced: packed SDPA stepped in.
    assert (result.exit_code, rows["numba"]["verdict"].partition(":")[0], rows["numba"]["forward"]) == (1, "FAILED", None)
    assert rows["sdpa-packed"]["passed"]


def test_the_demo_of_the_shipped_trace_passes(tmp_path: Path) -> None:
    """On its first 512 tokens, which take a second."""
    tensors = safetensors.torch.load_file(SHIPPED)
    with safetensors.safe_open(SHIPPED, framework="pt") as file:
        metadata = file.metadata()
    cut = {name: tensor[:, :512] if name in ("q", "block_indices") else tensor[:, :, :512] for name, tensor in tensors.items()}
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in cut.items()}, tmp_path / "cut.safetensors", metadata)
    result = run_demo(tmp_path / "cut.safetensors", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["passed"], document["checked_rows"], document["facts"]["tokens"]) == (True, 512, 8192)


def test_wrong_traces_and_folders_are_clear_errors(trace: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--trace", str(trace.parent / "absent.safetensors")])
    assert (result.exit_code, "a readable .safetensors file" in result.output) == (2, True)
    result = CliRunner().invoke(app, ["demo", "--trace", str(trace), "--out-dir", str(trace / "folder")])
    assert (result.exit_code, "--out-dir" in result.output) == (2, True)
