"""Check nsa-sel doctor, explain and demo: what they print, their JSON and exit codes; mistakes of a user are clear messages."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from typer.testing import CliRunner

import nsa_sel
from nsa_sel.backends import numba_cpu
from nsa_sel.cli import demo, demo_model
from nsa_sel.cli.app import app
from nsa_sel.core import registry
from nsa_sel.core.backend import Reason
from nsa_sel.core.call import device_info
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import example_request
from nsa_sel.selection import Selection
from nsa_sel.settings.flags import CACHE_FLAG
from tests.helpers.calls import assert_in_order
from tests.helpers.cases import make_qkv
from tests.helpers.files import ROOT


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def ask(*arguments: object, exit_code: int = 0) -> Any:
    """The JSON document that a command prints; anything else on stdout fails to parse."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def refused(*arguments: object) -> str:
    """The message of a command that ends with exit code 2 and no traceback."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    return result.output


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="looks at the CPU's rows")


class TestDoctor:
    def test_begins_with_its_verdict(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        because = "runs your calls on this machine (cpu), because it is"
        first = invoke("doctor").output.splitlines()[0]
        assert first == ask("doctor")["verdict"] == f"numba {because} the first of the preference (cpu.yaml)"
        absent = Reason("package-missing", "unavailable", "package numba", None, ">= 0.60", "pip install 'nsa-sel[cpu]'")
        monkeypatch.setattr(registry, "missing", lambda name: (absent,) if name == "numba" else ())
        nsa_sel.reset()
        first = invoke("doctor").output.splitlines()[0]
        assert first.startswith(f"sdpa-packed {because} the first of the preference")
        assert "But package numba is not installed" in first
        assert first.endswith("pip install 'nsa-sel[cpu]'")
        monkeypatch.setenv("NSA_SEL_BACKEND", "nmba")
        assert invoke("doctor").output.startswith("nothing runs your calls on this machine (cpu): backend 'nmba' (NSA_SEL_BACKEND) is unk")

    def test_names_omp_wait_policy_where_torch_and_numba_share_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for value, words in ((None, "OMP_WAIT_POLICY is not set: "), ("ACTIVE", "OMP_WAIT_POLICY is ACTIVE: ")):
            monkeypatch.setenv("OMP_WAIT_POLICY", value) if value else monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
            (line,) = (line for line in invoke("doctor").output.splitlines() if "OMP_WAIT_POLICY" in line)
            assert line.startswith(words)
            assert line.endswith("set OMP_WAIT_POLICY=PASSIVE before Python starts")
            assert ask("doctor")["omp_wait_policy"] == value
        monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        assert "set OMP_WAIT_POLICY" not in invoke("doctor").output

    def test_says_what_a_backend_lacks_and_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NSA_USE_SEL_PACK", "0")
        report = ask("doctor")
        here = {backend["name"]: backend for backend in report["devices"][0]["backends"]}
        assert here["numba"]["lacks"] == []
        assert [reason["remedy"] for reason in here["sdpa-packed"]["lacks"]] == ["unset NSA_USE_SEL_PACK"]
        assert report["flags"] == {"NSA_USE_SEL_PACK": "0", CACHE_FLAG: os.environ[CACHE_FLAG]}
        assert report["devices"][0]["settings"]["sources"]["use_sel_pack"] == "NSA_USE_SEL_PACK"

    @pytest.mark.filterwarnings("ignore:nsa-sel. the environment variable:RuntimeWarning")
    def test_names_unknown_variables_and_the_flag_that_was_meant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NSA_SEL_BAKEND", "numba")
        assert ask("doctor")["unknown_variables"] == [{"name": "NSA_SEL_BAKEND", "did_you_mean": "NSA_SEL_BACKEND"}]
        assert "NSA_SEL_BAKEND has no effect; did you mean NSA_SEL_BACKEND?" in invoke("doctor").output

    def test_reports_a_bad_flag_instead_of_failing_on_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NSA_SEL_TRITON_MIN_L", "many")
        result = invoke("doctor")
        assert result.exit_code == 0
        assert "NSA_SEL_TRITON_MIN_L is 'many'; allowed: a whole number >= 0" in result.output


class TestExplain:
    def test_example_request_by_default(self) -> None:
        decision = Decision.from_json(json.dumps(ask("explain", "--device", "cpu")))
        assert decision.request == example_request().request_class()
        assert decision.forward == "numba"

    def test_a_gpu_by_name_is_not_judged_by_the_packages_of_this_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        absent = Reason("package-missing", "unavailable", "package x", None, ">= 1", "pip install x")
        monkeypatch.setattr(registry, "missing", lambda name: () if name == "sdpa-packed" else (absent,))
        nsa_sel.reset()
        picked = {device: ask("explain", "--device", device)["forward"] for device in ("cpu", "h200", "sm80")}
        assert picked == {"cpu": "sdpa-packed", "h200": "cupy-cuda", "sm80": "triton-tile"}

    def test_shape_options_reach_the_request(self) -> None:
        shape = ("--B", 2, "--S", 1, "--S-kv", 500, "--G", 3, "--h", 5, "--Dk", 24, "--Dv", 40, "--n", 7)
        request = ask("explain", *shape, "--block-size", 0, "--max-length", 99, "--dtype", "float32", "--needs-grad", "--page-size", 16)[
            "request"
        ]
        expected = {"B": 2, "S": 1, "S_kv": 512, "G": 3, "h": 5, "Dk": 24, "Dv": 40, "n": 7, "block_size": None}
        expected |= {"max_length": 99, "dtype": "float32", "needs_grad": True, "aligned": True, "sharing": None, "page_size": 16}
        expected |= {"quantized": None, "kind": "attend", "compress": None, "pool": None, "counted": False, "mean_length": None}
        assert request == expected
        assert "at most 99 keys a row (L)" in invoke("explain", "--L", 99).output
        assert ask("explain", "--S", 1, "--quantized", "e4m3/head")["request"]["quantized"] == "e4m3/head"

    @pytest.mark.parametrize(
        ("way", "expected"),
        [
            ("nsa", {"compress": [32, 16], "pool": None, "G": 4, "h": 16, "Dv": 128}),
            ("minimax", {"compress": [1, 1], "pool": ["logits", "sum", "max"], "G": 4, "h": 1, "Dv": 0}),
            ("moba", {"compress": [64, 64], "pool": ["logits", "sum", "max"], "G": 64, "h": 1, "Dv": 0}),
            ("infllm", {"compress": [32, 16], "pool": ["weights", "sum", "max"], "G": 4, "h": 16, "Dv": 0}),
        ],
    )
    def test_a_choice_of_blocks(self, way: str, expected: dict[str, Any]) -> None:
        decision = ask("explain", "--choose", way, "--device", "h200")
        assert {name: decision["request"][name] for name in expected} == expected
        assert (decision["request"]["kind"], decision["forward"]) == ("choose", "choose-cuda" if way == "nsa" else "choose-triton")
        measured = way == "nsa" and any(name.startswith("choose") for name in decision["settings"]["costs"]["models"])
        assert bool(decision["predictions"]) == measured, "cost models are of compressed_attention alone"
        assert decision["rule"].startswith("least predicted time" if measured else "first of the preference")
        assert Decision.from_json(json.dumps(decision)).replay() == ()

    @pytest.mark.parametrize("keys", [(), ("--block-size", 0, "--n", 1)])
    def test_an_indexers_loss(self, keys: tuple[object, ...]) -> None:
        decision = ask("explain", "--loss", "--needs-grad", "--device", "h200", *keys)
        assert (decision["request"]["kind"], decision["forward"]) == ("index_loss", "loss-triton")
        assert decision["rule"].startswith("least predicted time: loss-triton")

    def test_forced_refusal_prints_every_reason(self) -> None:
        message = refused("explain", "--device", "sm89", "--Dk", 12, "--backend", "triton-group")
        assert_in_order(
            message, ("forced by argument, refuses", "head-dim-multiple", "a multiple of 8", "device-rule", "NSA_TRITON_SEL_FORCE=1")
        )
        assert ask("explain", "--device", "sm89", "--backend", "triton-group", exit_code=2)["forward"] is None

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--backend", "tritn-group"), ("unknown", "did you mean 'triton-group'?", "sdpa-packed")),
            (("--device", "sm12"), ("--device is 'sm12'", "h100", "sm89")),
            (("--S", 64, "--S-kv", 8), ("--S is 64", "at most S_kv = 8")),
            (("--choose", "moba", "--block-size", 0), ("keys of a block",)),
            (("--choose", "infllm", "--needs-grad"), ("its choice has no gradient",)),
            (("--choose", "nsa", "--loss"), ("--loss is given with --choose nsa",)),
        ],
    )
    def test_mistakes_are_named(self, arguments: tuple[object, ...], words: tuple[str, ...]) -> None:
        assert_in_order(refused("explain", *arguments), words)

    def test_bad_flag_is_an_error_in_words_and_in_json(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NSA_USE_TRITON_SEL", "perhaps")
        assert "NSA_USE_TRITON_SEL is 'perhaps'; allowed: 0 or 1" in refused("explain")
        assert "NSA_USE_TRITON_SEL" in ask("explain", exit_code=2)["error"]


def test_no_text_of_files_or_variables_commands_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = "\x1b]0;owned\x07\u202e"
    rows, config = tmp_path / "rows.jsonl", tmp_path / "own.yaml"
    rows.write_text(json.dumps({"case": bad, "error": bad}) + "\n" + json.dumps({"case": "x", "backend": bad, "error": bad}) + "\n")
    config.write_text(json.dumps({"provenance": bad, "runtime": {"prefer_forward": ["numba"]}}))
    outputs = [invoke("threshold", rows).output]
    monkeypatch.setenv("NSA_SEL_CONFIG", str(config))
    outputs += [invoke("doctor").output, invoke("doctor", "--json").output]
    monkeypatch.setenv("NSA_SEL_BACKEND", bad)
    outputs += [invoke("doctor").output, invoke("explain").output]
    assert not any(set(output) & set("\x1b\x07\u202e") for output in outputs)
    assert all("owned" in output for output in outputs[-2:])


ROWS, GROUPS, HEADS, DIM, KEYS, CHOSEN = 40, 2, 3, 16, 4, 5
SHIPPED = ROOT / "bench" / "data" / "smollm2_trace.safetensors"
FACTS = {"model": "a tiny one, made up", "text": "noise", "layer": 0, "block_size": KEYS, "first": 1, "local": 2}


@pytest.fixture(autouse=True)
def short_and_without_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two rounds of timing, without Triton's interpreter, which other tests ask for."""
    monkeypatch.setitem(demo.ROUNDS, "cpu", 2)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    device_info.cache_clear()
    yield
    device_info.cache_clear()


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace of 40 tokens, which the demo runs without its layer of MiniMax-M3."""
    path = tmp_path / "trace.safetensors"
    selection = Selection.from_scores(torch.rand(1, ROWS, GROUPS, ROWS // KEYS), CHOSEN, KEYS, first=1, local=2)
    q, k, v = make_qkv(1, ROWS, GROUPS, HEADS, DIM, dtype=torch.bfloat16)
    held = {"q": q, "k": k, "v": v, "block_indices": selection.block_indices.to(torch.int8)}
    safetensors.torch.save_file(held, path, {"provenance": json.dumps(FACTS)})
    monkeypatch.setattr(demo, "TRACE", path)
    monkeypatch.setattr(demo_model, "run", lambda device: "not here")
    return path


def rows_of(document: dict[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for row in document["rows"]}


@on_cpu
def test_every_backend_is_checked_timed_and_drawn(trace: Path) -> None:
    document = ask("demo", "--out-dir", trace.parent / "out")
    rows = rows_of(document)
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
            assert 0 < row["errors"]["o"] <= document["bound"] == 1e-6
            assert 0 < row["errors"]["gradients"] < 1e-5
    assert (rows[demo.DENSE]["errors"], rows[demo.DENSE]["passed"]) == ({}, None)
    assert (trace.parent / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    output = invoke("demo", "--out-dir", trace.parent / "out").output
    assert_in_order(
        output, ("Model: a tiny one, made up, layer 0", "triton-group does not run here: ", "Every result agrees with the oracle")
    )


@on_cpu
@pytest.mark.parametrize(
    ("name", "change", "verdict"),
    [
        ("backward", lambda dq, dk, dv: (dq, dk * 1.0005, dv), "in the mean gradients off by"),
        ("forward", lambda o, lse: (o + float("nan"), lse), "is nan off in the mean"),
    ],
)
def test_a_wrong_result_gives_exit_code_1(trace: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Any, verdict: str) -> None:
    """With fewer checked rows than rows: gradients are those of a loss over the checked rows."""
    monkeypatch.setattr(demo, "CHECKED_ROWS", 9)
    assert ask("demo", "--out-dir", trace.parent / "out")["passed"]
    right = getattr(numba_cpu, name)
    monkeypatch.setattr(numba_cpu, name, lambda *arguments: change(*right(*arguments)))
    document = ask("demo", "--out-dir", trace.parent / "out", exit_code=1)
    rows = rows_of(document)
    assert document["checked_rows"] == 9
    assert rows["numba"]["verdict"].startswith("WRONG: ")
    assert verdict in rows["numba"]["verdict"]
    assert (rows["numba"]["passed"], rows["sdpa-packed"]["passed"]) == (False, True)


@on_cpu
def test_the_demo_of_the_shipped_trace_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its first 512 tokens, which take a second, and without the layer of MiniMax-M3."""
    monkeypatch.setattr(demo_model, "run", lambda device: "not here")
    tensors = safetensors.torch.load_file(SHIPPED)
    with safetensors.safe_open(SHIPPED, framework="pt") as file:
        metadata = file.metadata()
    cut = {name: tensor[:, :512] if name in ("q", "block_indices") else tensor[:, :, :512] for name, tensor in tensors.items()}
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in cut.items()}, tmp_path / "cut.safetensors", metadata)
    monkeypatch.setattr(demo, "TRACE", tmp_path / "cut.safetensors")
    document = ask("demo", "--out-dir", tmp_path / "out")
    assert (document["passed"], document["checked_rows"], document["facts"]["tokens"]) == (True, 512, 8192)


def test_the_demos_layer_of_minimax_m3_equals_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers.models.minimax_m3_vl")
    monkeypatch.setitem(demo_model.TOKENS, "cpu", (700,))
    compared = demo_model.run("cpu")
    if "transformers is 5.1" in str(compared):  # of the oldest packages, whose choice of blocks is another
        pytest.skip(str(compared))
    assert compared.passed
    assert all(words in demo_model.text(compared) for words in ("patch_model", "700 tokens", "outputs differ by at most"))
    monkeypatch.setitem(sys.modules, "transformers.models.minimax_m3_vl", None)
    assert str(demo_model.run("cpu")).startswith("No layer of MiniMax-M3 was run: ")


@on_cpu
def test_a_folder_of_outputs_holds_nothing_but_files(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renaming a new file over a FIFO or a device would destroy it: for the whole machine, where it is /dev/null and the user root."""
    folder = trace.parent / "out"
    folder.mkdir()
    monkeypatch.setattr(demo, "prepare", None)  # nothing is read or computed before
    for kind, make in (("a FIFO", os.mkfifo), ("a folder", os.mkdir), ("a device", lambda file: os.symlink("/dev/null", file))):
        make(folder / "demo.png")
        assert f"demo.png, {kind}; allowed: a regular file" in " ".join(refused("demo", "--out-dir", folder).split())
        assert stat.S_IFMT(os.stat(folder / "demo.png").st_mode) != stat.S_IFREG
        (folder / "demo.png").rename(folder / kind)
