"""The bench of the host's share: its parts, what it replaces for a while, and that committed rows meet the targets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import nsa_sel
from nsa_sel import attention
from nsa_sel.bench.questions import host_time
from nsa_sel.bench.questions.host_time import (
    CHOSEN,
    FURTHER,
    MANY,
    NOTHING,
    compiled_parts,
    decided,
    make_problem,
    measured,
    parts,
    standing_in,
    without_observing,
)
from nsa_sel.core import known, ops, registry
from nsa_sel.errors import BackendError
from nsa_sel.telemetry import events
from tests.helpers.paths import ROOT

RESULTS = ROOT / "bench" / "results"
COMMITTED = sorted(RESULTS.glob("*/overhead.jsonl"))
DECISION_US, HOST_US = 3.0, 30.0  # the targets: a cached decision, and what a call takes beyond its backend


@pytest.mark.parametrize("needs_grad", [False, True])
def test_parts_do_what_they_say(needs_grad: bool) -> None:
    problem = make_problem("cpu", needs_grad)
    works = parts(problem, "numba")
    assert ("autograd" in works) == ("node" in works) == needs_grad
    whole, alone = works["call"](), works["backend"]()
    if needs_grad:
        for other in (alone, works["node"]()):
            assert all(map(lambda a, b: (a - b).abs().max() < 1e-6, whole, other))
    else:
        assert (whole - alone).abs().max() < 1e-6
    assert works["decision, cached"]() is works["decide"]()
    assert nsa_sel.decisions()[-1].override.source == "argument"  # type: ignore[union-attr]
    parts(problem, CHOSEN)["call"]()
    assert nsa_sel.decisions()[-1].override is None


def test_backends_that_refuse_say_so() -> None:
    with pytest.raises(BackendError, match=r"'numbat'.*did you mean 'numba'"):
        parts(make_problem("cpu", False), "numbat")


def test_what_is_replaced_comes_back() -> None:
    problem, load = make_problem("cpu", False), registry.load
    works = parts(problem, "numba")
    before = events.tallies()
    with without_observing():
        works["call"]()
    assert events.tallies() == before
    with standing_in():
        assert parts(problem, NOTHING)["call"]().shape == problem.q.shape
    assert (attention.events, registry.load) == (events, load)  # type: ignore[attr-defined]
    works["call"]()
    assert events.tallies() != before


@pytest.mark.parametrize(("needs_grad", "least"), [(False, "backend"), (True, "node")])
def test_differences_and_ratios_are_within_rounds(monkeypatch: pytest.MonkeyPatch, needs_grad: bool, least: str) -> None:
    clock = iter(range(1, 1000))
    monkeypatch.setattr(host_time, "microseconds", lambda *_: float(next(clock)))
    times = measured(make_problem("cpu", needs_grad), CHOSEN, rounds=3, calls=1)
    assert all(len(taken) == 3 for taken in times.values())
    for call, backend, beyond in zip(times["call"], times[least], times["beyond the backend"], strict=True):
        assert beyond == call - backend
    firsts = [a < b for a, b in zip(times["call"], times["call, without observing"], strict=True)]
    assert firsts == [True, False, True]  # they take turns at going first


def test_what_each_further_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, more = attention.begin, MANY - 1
    # What each takes, and how much of it is checking and deciding.
    fake = {"call": (10.0, 1.0), "many calls": (10.0 + 3 * more, 1.0 + more), "graph": (50.0, 2.0), "empty graph": (20.0, 0.0)}
    fake["graph of many"] = 50.0 + 6 * more, 2.0 + 1.5 * more

    def work(name: str) -> Callable[[], float]:
        return lambda: fake[name][0] - (fake[name][1] if attention.begin is not begin else 0)

    monkeypatch.setattr(host_time, "parts", lambda *_: {"call": work("call"), "backend": lambda: 4.0})
    monkeypatch.setattr(host_time, "compiled_parts", lambda *_: {name: work(name) for name in fake if name != "call"})
    monkeypatch.setattr(host_time, "microseconds", lambda work, *_: work())
    times = measured(make_problem("cpu", False), NOTHING, rounds=1, calls=1, compiler="eager")
    assert (times["further call"], times["further compiled call"], times["compiling adds"]) == ([3.0], [6.0], [3.0])
    assert (times["deciding"], times["deciding, compiled"], times["op"]) == ([1.0], [1.5], [2.5])
    # What follows from them is what counts.
    assert not {"many calls", "graph of many", "call, decided", "many calls, decided", "graph, decided"} & set(times)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_decided_calls_do_the_same(needs_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem("cpu", needs_grad)
    works = compiled_parts(problem, "eager")
    wanted = works["many calls"]()
    begin, begin_op = attention.begin, ops._begin
    with decided(problem), monkeypatch.context() as patch:
        patch.setattr(attention, "decide", None)
        patch.setattr(known, "recall", None)
        for name in ("many calls", "graph of many"):
            got = works[name]()
            assert all(map(torch.equal, got, wanted)) if needs_grad else torch.equal(got, wanted)
    assert (attention.begin, ops._begin) == (begin, begin_op)


def test_compiled_parts_do_the_same() -> None:
    problem = make_problem("cpu", False)
    works = compiled_parts(problem, "eager")
    assert torch.equal(works["graph"](), parts(problem, attention.FALLBACK)["call"]())
    assert torch.equal(works["graph of many"](), works["many calls"]())
    assert works["empty graph"]().shape == problem.q.shape


def test_rows(tmp_path: Path) -> None:
    out = tmp_path / "overhead.jsonl"
    app = typer.Typer()
    app.command()(host_time.main)
    only = [part for name in (NOTHING, CHOSEN, "numba") for part in ("--backend", name)]
    result = CliRunner().invoke(
        app, ["--out", str(out), "--rounds", "2", "--calls", "2", "--device", "cpu", "--compiler", "eager", "--S", "70", *only]
    )
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["backend"] for row in rows} == {NOTHING, CHOSEN, "numba"}
    assert {row["direction"] for row in rows} == {"fwd", "fwd+bwd"}
    assert {(row["S"], row["S_kv"]) for row in rows} == {(70, 70)}
    assert all(row["device"] and row["threads"] == 1 and row["command"] for row in rows)
    assert "observing, off" in result.output
    by_part = {(row["backend"], row["direction"], row["part"]): row for row in rows}
    for direction in ("fwd", "fwd+bwd"):
        for part in ("graph", "empty graph", *FURTHER, "compiling adds", "op", "deciding", "deciding, compiled"):
            assert (NOTHING, direction, part) in by_part
            assert (CHOSEN, direction, part) not in by_part


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.parent.name)
def test_committed_rows_meet_the_targets(file: Path) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["part"] == "decision, cached":
            assert row["us_median"] <= DECISION_US, row
    (beyond,) = [row for row in rows if selects(row, NOTHING, "fwd", "beyond the backend")]
    assert beyond["us_median"] <= HOST_US
    for row in rows:
        if row["part"] == "observing, off" and row["backend"] == CHOSEN:
            assert row["ratio_p20"] <= 1 <= row["ratio_p80"], "observing costs a real call something, though it is off"


def test_there_are_committed_rows() -> None:
    assert "cpu" in [file.parent.name for file in COMMITTED]


def selects(row: dict[str, Any], backend: str, direction: str, part: str) -> bool:
    return (row["backend"], row["direction"], row["part"]) == (backend, direction, part)
