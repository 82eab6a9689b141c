"""Check `nsa-sel bench --peer NAME=module:function` by stand-ins, and the peers that PyTorch provides, on a CPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nsa_sel.bench import command
from nsa_sel.bench.core import session, store
from nsa_sel.bench.core.cases import Case, span_case
from nsa_sel.bench.core.contenders import make_problem
from nsa_sel.bench.core.peers import peers
from nsa_sel.bench.core.session import able, lacks_gradients, parity, sample
from nsa_sel.bench.questions import speed
from nsa_sel.cli.app import app
from tests.helpers.files import ROOT

OTHERS = """
from my_peer import attend

NUMBER = 3

def forward(*args):
    return attend(*args).detach()

def sees_the_future(q, k, v, *rest):
    return attend(q, k, v, *rest) + v.mean(2)[:, None, :, None]

def flat(*args):
    return attend(*args).flatten(2, 3)

def refuses(*args):
    raise ValueError("takes 16 heads alone")
"""


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write docs/performance.md's adapter and others to the current folder; quick runs have two tiny cases and no usual
    peers.
    """
    (documented,) = re.findall(
        r"^```python\n(# my_peer\.py\n.*?)^```$", (ROOT / "docs/performance.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "my_peer.py").write_text(documented)
    (tmp_path / "others.py").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("my_peer", "others"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    cases = [
        Case("tiny", "random", 1, 64, 64, 2, 2, 16, 8, 2, 16, "bfloat16"),
        Case("one", "random", 2, 1, 64, 2, 2, 16, 16, 2, 16, "bfloat16"),
    ]
    monkeypatch.setattr(speed, "QUICK", speed.QUICK._replace(cases=cases))
    monkeypatch.setattr(command, "every_peer", tuple)
    return tmp_path


def bench(*peers: str) -> Any:
    flags = [part for peer in peers for part in ("--peer", peer)]
    return CliRunner().invoke(app, ["bench", "--quick", "--backends", "sdpa-packed", "--out", "out", *flags])


@pytest.mark.usefixtures("instant")
def test_the_documented_adapter_is_held_to_the_reference_and_timed_in_every_direction(adapters: Path) -> None:
    result = bench("mine=my_peer:attend")
    assert result.exit_code == 0, result.output
    found = {(row["backend"], row["direction"]): row for row in store.read(adapters / "out" / "peers.jsonl")}
    assert set(found) == {(name, way) for name in ("sdpa-packed", "mine") for way in ("fwd", "bwd", "fwd+bwd", "decode")}
    for (name, _), row in found.items():
        assert row["mae"] < 1e-6
        assert row["selection"] == "new"
        if name == "mine":
            assert "wrong" not in row
            assert row["computes"] == "selection"
            assert row["prepare_ms"] >= 0
    assert "my_peer" in sys.modules


@pytest.mark.usefixtures("instant")
def test_given_peers_without_gradients_wrong_ones_and_those_that_refuse(adapters: Path) -> None:
    result = bench("forward=others:forward", "future=others:sees_the_future", "flat=others:flat", "picky=others:refuses")
    assert result.exit_code == 0, result.output
    found = {(row["backend"], row["direction"]): row for row in store.read(adapters / "out" / "peers.jsonl")}
    assert {way for name, way in found if name == "forward"} == {"fwd", "decode"}
    assert found["forward", "fwd"]["mae"] < 1e-6
    assert "tiny forward: its forward alone is measured: RuntimeError: element 0 of tensors does not require grad" in result.stderr
    assert "dv is not 0 at keys that no row with a gradient attends to" in found["future", "fwd"]["wrong"]
    assert "it is not the attention of this selection" in found["future", "decode"]["wrong"]
    assert not any(name in ("flat", "picky") for name, _ in found)
    assert "tiny flat: ArgumentError: --peer is 'flat=others:flat', which returned [1, 64, 4, 8]" in result.stderr
    assert "one picky: ValueError: takes 16 heads alone" in result.stderr


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        (["mine=my_peer.attend"], "--peer is 'mine=my_peer.attend'; allowed: NAME=module:function"),
        (["numba=my_peer:attend"], "--peer is 'numba=my_peer:attend'; allowed: a name other than"),
        (["mine=no_such_peer:attend"], "(ModuleNotFoundError: No module named 'no_such_peer'); allowed: a function that can be imported"),
        (["mine=others:NUMBER"], "--peer is 'mine=others:NUMBER', a int; allowed: a function."),
    ],
)
def test_a_bad_flag_is_refused_before_the_first_measurement(
    adapters: Path, monkeypatch: pytest.MonkeyPatch, peers: list[str], words: str
) -> None:
    monkeypatch.setattr(session, "measured_rows", None)  # nothing is measured
    refused = bench(*peers)
    assert refused.exit_code == 2, refused.output
    said = " ".join(refused.output.split())
    assert words in said
    assert said.count("Remedy: ") == 1
    assert not (adapters / "out").exists()


# Of torch


@pytest.mark.parametrize(
    "case",
    [
        Case("blocks", "random", 2, 48, 96, 2, 3, 16, 8, 3, 16, "float32"),
        Case("decode", "random", 2, 1, 96, 2, 3, 16, 8, 3, 16, "float32"),
        span_case("mixed", 9, 2, 16, 8, 40, "float32"),
    ],
    ids=lambda case: case.case,
)
@pytest.mark.parametrize("name", ["flex-attention", "masked-sdpa", "dense-sdpa"])
def test_peers_compute_what_they_say(case: Case, name: str) -> None:
    (peer,) = able([peer for peer in peers() if peer.name == name], "cpu", lambda _: None)
    problem = make_problem(case, "cpu")
    exact, call = sample(case, problem, 8, peer.every_key), peer.prepare(problem).call
    forward_only = lacks_gradients(call, problem)
    assert (forward_only is not None) == (name == "flex-attention")
    mae, of_gradients = parity(call, problem, exact._replace(gradients=()) if forward_only else exact)
    assert mae < 1e-6
    assert of_gradients is None or of_gradients < 1e-5
