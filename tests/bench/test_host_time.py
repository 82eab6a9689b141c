"""The bench of host time: its parts, what it patches for a while, and that committed rows meet the targets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nsa_sel
from nsa_sel.bench.core import store
from nsa_sel.bench.core.contenders import PACKED
from nsa_sel.bench.questions import host_time
from nsa_sel.bench.questions.host_time import (
    CALLING,
    CHOSEN,
    MANY,
    NEW,
    NOTHING,
    ON_CALLING,
    UNOBSERVED,
    case_of,
    compiled_parts,
    measured,
    parts,
    prepared,
    standing_in,
    without_observing,
)
from nsa_sel.core import registry
from nsa_sel.errors import BackendError
from nsa_sel.telemetry import events
from tests.helpers.paths import ROOT

CASE = case_of("cpu")
COMMITTED = sorted((ROOT / "bench" / "results").glob("*/overhead.jsonl"))
DECISION_US, HOST_US = 3.0, 30.0  # the targets: a cached decision, and what a call takes beyond its backend


@pytest.mark.parametrize("needs_grad", [False, True])
def test_parts_do_what_they_say(needs_grad: bool) -> None:
    problem = prepared(CASE, "cpu", needs_grad)
    works = parts(problem, "numba")
    assert ("autograd" in works) == ("node" in works) == needs_grad
    whole, alone = works["call"](), works["backend"]()
    if needs_grad:
        for other in (alone, works["node"]()):
            assert all(map(lambda a, b: (a - b).abs().max() < 1e-6, whole, other))
        assert [x.shape for x in works["autograd"]()] == [x.shape for x in whole]
    else:
        assert (whole - alone).abs().max() < 1e-6
        assert torch.equal(works[NEW](), whole)
        assert torch.equal(works["many calls, new"](), works["many calls"]())
    assert works["decision, cached"]() is works["decide"]() is works["repeat"]().decision
    assert nsa_sel.decisions()[-1].override.source == "argument"  # type: ignore[union-attr]
    parts(problem, CHOSEN)["call"]()
    assert nsa_sel.decisions()[-1].override is None


def test_backends_that_refuse_say_so() -> None:
    with pytest.raises(BackendError, match=r"'numbat'.*did you mean 'numba'"):
        parts(prepared(CASE, "cpu", False), "numbat")


def test_patched_functions_are_restored() -> None:
    problem, functions, load = prepared(CASE, "cpu", False), vars(events).copy(), registry.load
    works = parts(problem, "numba")
    before = events.tallies()
    with without_observing():
        works["call"]()
    assert events.tallies() == before
    with standing_in():
        assert parts(problem, NOTHING)["call"]().shape == problem.q.shape
    assert registry.load == load
    assert all(vars(events)[name] is functions[name] for name in ("record", "count", "emit"))
    works["call"]()
    assert events.tallies() != before


@pytest.mark.parametrize(("needs_grad", "least"), [(False, "backend"), (True, "node")])
def test_differences_and_ratios_are_within_rounds(monkeypatch: pytest.MonkeyPatch, needs_grad: bool, least: str) -> None:
    clock = iter(range(1, 1000))
    monkeypatch.setattr(host_time, "microseconds", lambda *_: float(next(clock)))
    times = measured(prepared(CASE, "cpu", needs_grad), CHOSEN, rounds=3, calls=1)
    assert all(len(taken) == 3 for taken in times.values())
    for call, backend, beyond in zip(times["call"], times[least], times["beyond the backend"], strict=True):
        assert beyond == call - backend
    firsts = [a < b for a, b in zip(times["call"], times[UNOBSERVED], strict=True)]
    assert firsts == [True, False, True]  # they alternate in going first


def test_backward_passes_are_timed_on_the_calling_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    on = torch._C._is_multithreading_enabled
    monkeypatch.setattr(host_time, "microseconds", lambda *_: float(on()))
    for needs_grad in (False, True):
        times = measured(prepared(CASE, "cpu", needs_grad), CHOSEN, rounds=1, calls=1)
        moved = {name for name, taken in times.items() if taken == [0.0] and name.endswith(CALLING)}
        assert moved == ({name + CALLING for name in ON_CALLING} if needs_grad else set())
        assert times[NEW] == [1.0]


def test_what_each_further_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    more = MANY - 1
    eager = {"call": 10.0, "many calls": 10.0 + 3 * more, NEW: 20.0, "many calls, new": 20.0 + 5 * more, "backend": 4.0}
    graphs = {
        "graph": 50.0,
        "graph of many": 50.0 + 7 * more,
        "graph, new": 60.0,
        "graph of many, new": 60.0 + 9 * more,
        "empty graph": 20.0,
    }
    monkeypatch.setattr(host_time, "parts", lambda *_: {name: lambda us=us: us for name, us in eager.items()})
    monkeypatch.setattr(host_time, "compiled_parts", lambda *_: {name: lambda us=us: us for name, us in graphs.items()})
    monkeypatch.setattr(host_time, "microseconds", lambda work, *_: work())
    times = measured(prepared(CASE, "cpu", False), NOTHING, rounds=1, calls=1, compiler="eager")
    assert (times["further call"], times["further call, new"]) == ([3.0], [5.0])
    assert (times["further compiled call"], times["further compiled call, new"], times["compiling adds"]) == ([7.0], [9.0], [4.0])
    assert not {"many calls", "many calls, new", "graph of many", "graph of many, new"} & set(times)


@pytest.mark.parametrize("forced", [PACKED, None])
def test_compiled_parts_do_the_same(forced: str | None) -> None:
    problem = prepared(CASE, "cpu", False)
    works, eager = compiled_parts(problem, "eager", forced), parts(problem, forced or CHOSEN)
    for name, other in (("graph", "call"), ("graph of many", "many calls"), ("graph, new", NEW), ("graph of many, new", "many calls, new")):
        assert torch.equal(works[name](), eager[other]()), name
    assert (nsa_sel.decisions()[-1].override is None) == (forced is None)
    assert works["empty graph"]().shape == problem.q.shape


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, names = tmp_path / "overhead.jsonl", (NOTHING, CHOSEN, "numba")
    threads = torch.get_num_threads()
    host_time.main(out, rounds=2, calls=2, device="cpu", backends=",".join(names), compiler="eager", S=70)
    torch.set_num_threads(threads)
    rows = store.read(out)
    assert {(row["backend"], row["direction"]) for row in rows} == {(name, way) for name in names for way in ("fwd", "fwd+bwd")}
    assert {(row["S"], row["S_kv"]) for row in rows} == {(70, 70)}
    assert all(row["device"] and row["threads"] == 1 and row["command"] for row in rows)
    assert "observing, off" in capsys.readouterr().out
    of_parts = {(row["backend"], row["part"]) for row in rows}
    for name in names:
        assert {(name, "further call"), (name, "further call, new")} <= of_parts
    for part in ("graph", "graph, new", "empty graph", "further compiled call", "further compiled call, new", "compiling adds"):
        assert {(NOTHING, part), (CHOSEN, part)} <= of_parts
        assert ("numba", part) not in of_parts


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.parent.name)
def test_committed_rows_meet_the_targets(file: Path) -> None:
    rows = {(row["part"], row["backend"], row["direction"]): row for row in store.read(file)}
    assert rows["beyond the backend", NOTHING, "fwd"]["us_median"] <= HOST_US
    for (part, backend, _), row in rows.items():
        if part == "decision, cached":
            assert row["us_median"] <= DECISION_US, row
        if (part, backend) == ("observing, off", CHOSEN):
            assert row["ratio_p20"] <= 1 <= row["ratio_p80"], "observing costs a real call something, though it is off"
