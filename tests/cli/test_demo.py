"""The demo end to end on a tiny trace: figures, recorded decisions, picture, and exit code 1 when a backend is wrong."""

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

from nsa_sel.attention import selection_attention
from nsa_sel.backends import numba_cpu
from nsa_sel.bench.core.baselines import selected
from nsa_sel.bench.questions import capture_trace
from nsa_sel.cli import bench_door, demo, demo_picture, demo_text
from nsa_sel.cli.app import app
from nsa_sel.cli.demo_picture import BY_SCORE, FIRST, FUTURE, LOCAL, PASSED_OVER
from nsa_sel.cli.tensor_file import Problem, read_problem
from nsa_sel.core.call import device_info
from nsa_sel.oracle import oracle_forward
from nsa_sel.selection import Selection
from tests.helpers.paths import ROOT

S, G, H, D, BLOCK, N = 40, 2, 3, 16, 4, 5
SHIPPED = ROOT / "bench" / "data" / "smollm2_trace.safetensors"
FACTS = {"model": "a tiny one, made up", "text": "noise", "layer": 0, "block_size": BLOCK, "first": 1, "local": 2}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="looks at the CPU's rows")


@pytest.fixture(autouse=True)
def short_and_without_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two rounds of timing; Triton's interpreter, which the other tests ask for, is not."""
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
    document = json.loads(result.stdout)
    assert document == json.loads((trace.parent / "out" / "demo.json").read_text())
    assert document["passed"]
    assert document["facts"]["model"] == FACTS["model"]

    rows = rows_of(result)
    assert {"sdpa-packed", "numba", demo.MASKED, demo.DENSE} <= set(rows)
    assert [row["name"] for row in rows.values() if row["policy_choice"]] == [document["decision"]["forward"]]
    assert document["refused"]["triton-group"] == "device.kind is cpu, required cuda"
    for name, row in rows.items():
        for times in (row["forward"], row["forward_backward"]):
            assert 0 < times["p20"] <= times["median"] <= times["p80"]
            assert times["repeats"] == 2
        if row["baseline"]:
            assert row["decision"] is None
        else:
            # Numbers do not prove who made them: the record does.
            assert (row["decision"]["forward"], row["decision"]["backward"]) == (name, name)
            forced = None if row["policy_choice"] else {"backend": name, "source": "argument"}
            assert row["decision"]["override"] == forced
            assert set(row["errors"]) == {"o", "lse", "dq", "dk", "dv"}
            assert all(0 < error["mae"] <= error["bound"] for error in row["errors"].values())
            assert row["errors"]["o"]["bound"] == 1e-6
    assert rows[demo.DENSE]["errors"] == {}
    assert rows[demo.DENSE]["passed"] is None

    picture = (trace.parent / "out" / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


def test_text_says_what_is_computed_why_and_who_is_fastest(trace: Path) -> None:
    result = run_demo(trace)
    assert result.exit_code == 0, result.output
    for words in (
        "Model: a tiny one, made up, layer 0",
        "Blocks of a row: 1 first, 2 local, 2 by score",
        "The policy's choice:",
        "triton-group does not run here: device.kind is cpu, required cuda",
        "Fastest forward: ",
        "Fastest forward + backward: ",
        "the speed of dense causal SDPA (",
        "speed vs dense",
        "compared with a float64 oracle on all rows.",
        "dense causal SDPA computes something else",
        "are few (slow calls are) or scatter widely",  # two repeats are few
        "Every result agrees with the oracle.",
        "demo.png",
    ):
        assert words in result.output
    assert result.output.index("are few (slow calls are)") < result.output.index("Fastest forward: ")


@pytest.mark.parametrize(
    ("name", "change", "verdict"),
    [
        ("backward", lambda dq, dk, dv: (dq, dk * 1.001, dv), "mean dk off by"),
        ("forward", lambda o, lse: (o + float("nan"), lse), "o off by nan"),
    ],
)
def test_a_wrong_result_gives_exit_code_1(trace: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Any, verdict: str) -> None:
    right = getattr(numba_cpu, name)
    monkeypatch.setattr(numba_cpu, name, lambda *arguments: change(*right(*arguments)))
    result = run_demo(trace, "--json")
    assert result.exit_code == 1
    rows = rows_of(result)
    assert rows["numba"]["verdict"].startswith("WRONG: ")
    assert verdict in rows["numba"]["verdict"]
    assert (rows["numba"]["passed"], rows["sdpa-packed"]["passed"]) == (False, True)
    assert "WRONG: numba." in run_demo(trace).output


def test_of_many_rows_some_are_checked_in_results_of_all(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """dk and dv sum over all rows: the oracle's few rows give the same sums where the others have no part in the loss."""
    monkeypatch.setattr(demo, "CHECKED_ROWS", 9)
    looked_at, right = [], numba_cpu.backward
    monkeypatch.setattr(demo, "oracle_forward", lambda q, *rest: [looked_at.append(q.shape[1]), oracle_forward(q, *rest)][1])
    result = run_demo(trace, "--json")
    assert result.exit_code == 0, result.output
    assert (looked_at, json.loads(result.stdout)["checked_rows"]) == ([9], 9)
    assert set(rows_of(result)["numba"]["errors"]) == {"o", "lse", "dq", "dk", "dv"}
    assert demo._sample(40, 9).tolist() == sorted({0, 39, *demo._sample(40, 9).tolist()})
    monkeypatch.setattr(numba_cpu, "backward", lambda *arguments: (*right(*arguments)[:2], right(*arguments)[2] * 1.001))
    assert run_demo(trace, "--json").exit_code == 1


def test_a_call_that_goes_elsewhere_is_found_in_the_record(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "selection_attention", lambda *a, backend, **k: selection_attention(*a, backend=None, **k))
    result = run_demo(trace, "--json")
    assert result.exit_code == 1
    assert rows_of(result)["sdpa-packed"]["verdict"] == "FAILED: BackendError: the recorded decision names numba, not sdpa-packed"


def test_a_backend_that_breaks_does_not_end_the_demo(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(numba_cpu, "forward", broken)
    result = run_demo(trace, "--json")
    assert result.exit_code == 1
    rows = rows_of(result)
    # The policy's own choice is not forced: packed SDPA stepped in, and the demo says that it was not numba that ran.
    assert rows["numba"]["verdict"] == "FAILED: BackendError: the recorded decision names sdpa-packed, not numba"
    assert rows["numba"]["forward"] is None
    assert rows["sdpa-packed"]["passed"]


def test_selection_map_tells_first_local_and_scored_blocks_apart() -> None:
    # Rows at positions 4 to 7 over blocks of 2; the last row leaves block 1 out.
    blocks = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 3], [0, 3, -1]], dtype=torch.int32)[None, :, None]
    selection = Selection.from_blocks(blocks, 2)
    q, k = torch.zeros(1, 4, 1, 1, 8), torch.zeros(1, 1, 8, 8)
    kinds, keys = demo_picture.selection_map(Problem(q, k, k, selection, None, {"first": 1, "local": 1}), 0)
    assert keys == 2
    assert kinds.tolist() == [
        [FIRST, BY_SCORE, LOCAL, FUTURE],
        [FIRST, BY_SCORE, LOCAL, FUTURE],
        [FIRST, BY_SCORE, PASSED_OVER, LOCAL],
        [FIRST, PASSED_OVER, PASSED_OVER, LOCAL],
    ]


def test_the_shipped_trace_is_the_default() -> None:
    setting = demo.prepare()
    q, k, v, selection, _, facts = setting.problem
    assert (q.shape, k.shape, v.shape, q.dtype) == ((1, 8192, 1, 3, 64), (1, 1, 8192, 64), (1, 1, 8192, 64), torch.float32)
    assert (selection.block_size, selection.n, len(setting.rows)) == (64, 8, 1024)
    assert facts["model"].startswith("SmolLM2-135M")
    words = demo_text.introduction(setting)
    for part in ("SmolLM2-135M", "layer 18, KV head 1", "rounded to float8_e4m3fn", "its first 8192 tokens", "on 1024 of 8192 rows"):
        assert part in words


def test_without_the_trace_the_demo_is_synthetic_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo.resources, "files", lambda package: tmp_path)
    monkeypatch.setattr(bench_door, "real_selection", lambda G: Selection.from_blocks(torch.zeros(1, 8, G, 1, dtype=torch.int8), 4))
    setting = demo.prepare()
    assert setting.problem.q.shape == (1, 8, 1, 3, 64)
    assert torch.equal(setting.problem.q, demo.prepare().problem.q)
    words = demo_text.introduction(setting)
    assert "q, k and v are seeded random numbers" in words
    assert "From a checkout: nsa-sel demo --trace bench/data/smollm2_trace.safetensors" in words
    assert "Model:" not in words


def test_the_shipped_trace_is_small_and_selects_what_its_own_numbers_say() -> None:
    assert SHIPPED.stat().st_size <= 3_000_000
    tensors = safetensors.torch.load_file(SHIPPED)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        **dict.fromkeys(("q", "k", "v"), torch.float8_e4m3fn), "block_indices": torch.int8,
    }  # fmt: skip
    again = capture_trace.select(tensors["q"].float(), tensors["k"].float(), 8, 64)
    blocks = [selected(Selection.from_blocks(indices, 1), torch.arange(128)) for indices in (again, tensors["block_indices"])]
    assert float((blocks[0] == blocks[1]).double().mean()) > 0.9999  # ties may fall otherwise on another CPU


def test_the_demo_of_the_shipped_numbers_ends_well(tmp_path: Path) -> None:
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
    for row in document["rows"]:
        assert row["passed"] is (None if row["name"] == demo.DENSE else True)
        assert row["forward"]["repeats"] >= 1


def test_a_gpu_is_given_several_copies_as_one_batch(trace: Path) -> None:
    one = read_problem(trace)
    several = demo._copied(one, 3)
    assert (several.q.shape, several.k.shape, several.v.shape) == ((3, S, G, H, D), (3, G, S, D), (3, G, S, D))
    assert several.facts["copies"] == 3
    assert (several.selection.block_size, several.selection.n) == (BLOCK, N)
    assert all(torch.equal(several.selection.ranges[b], one.selection.ranges[0]) for b in range(3))
    assert (demo._dtype(several.q), demo._dtype(several.q.to(torch.float8_e4m3fn))) == (torch.bfloat16, torch.bfloat16)


def test_what_takes_long_is_timed_once_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    monkeypatch.setitem(demo.ROUNDS, "cpu", 5)
    monkeypatch.setitem(demo.TIMING_SECONDS, "cpu", 8.0)
    problem = read_problem(trace).to(torch.device("cpu"), torch.float32)
    candidates = [demo.Candidate(name, demo._selected(problem, "sdpa-packed"), gradients=False) for name in ("slow", "fast")]
    monkeypatch.setattr(bench_door, "one_call", lambda call, device: 5000.0 if call.args[0].name == "slow" else 1.0)
    times = demo._time(candidates, problem, problem.q, lambda what, done: None)
    assert {name: spread.repeats for (name, _), spread in times.items()} == {"slow": 1, "fast": 5}
    clock = iter(range(0, 10**6, 17))  # 17 seconds pass from one look at the clock to the next: on a busy machine
    monkeypatch.setattr(demo.time, "perf_counter", lambda: next(clock))
    assert demo._time(candidates, problem, problem.q, lambda what, done: None) == {}


def test_wrong_traces_and_folders_are_clear_errors(trace: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--trace", str(trace.parent / "absent.safetensors")])
    assert (result.exit_code, "a readable .safetensors file" in result.output) == (2, True)
    result = CliRunner().invoke(app, ["demo", "--trace", str(trace), "--out-dir", str(trace / "folder")])
    assert (result.exit_code, "--out-dir" in result.output) == (2, True)
