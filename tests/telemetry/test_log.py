"""Logs are small and complete: settings are written once per target, and every decision is read back whole."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

import nsa_sel
from nsa_sel.core.request import Request
from nsa_sel.errors import ArgumentError
from nsa_sel.telemetry import events
from nsa_sel.telemetry.log import decision_events, read_decisions
from tests.helpers.files import DATA
from tests.helpers.policy_cases import CPU, H100, H200, LONG, RTX4090, SHORT, decide, replace

DECISIONS = [
    decide(SHORT, H100),
    decide(replace(LONG, needs_grad=True), RTX4090, backend="triton-group"),
    decide(SHORT, CPU, backend="no-such-backend"),
    nsa_sel.explain_request(replace(SHORT, needs_grad=True), H200),
]


def write(log: Path, *requests: Request) -> list[str]:
    """Log a call of each request and return the names of the log's events."""
    nsa_sel.log_to(str(log))
    for request in requests:
        events.record(decide(request, H100), request)
    nsa_sel.log_to(None)
    return [json.loads(line)["event"] for line in log.read_text().splitlines() if line]


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: f"{decision.device.name}-{decision.forward}")
def test_a_decision_is_read_back_whole(tmp_path: Path, decision: nsa_sel.Decision) -> None:
    log = tmp_path / "log.jsonl"
    nsa_sel.log_to(str(log))
    events.record(decision, decision.request)
    nsa_sel.log_to(None)
    assert read_decisions(log) == [decision] == [nsa_sel.Decision.from_json(decision.to_json())]
    assert nsa_sel.decisions()[-1] is decision
    assert len(log.read_bytes().splitlines()[-1]) <= 2048


def test_decisions_of_the_committed_log_are_small() -> None:
    sizes = [len(line) for line in (DATA / "decisions.jsonl").read_bytes().splitlines() if b'"event":"sel.decision"' in line]
    assert 0 < max(sizes) <= 2048


def test_settings_are_written_once_to_each_target(tmp_path: Path) -> None:
    once = ["sel.settings", "sel.decision", "sel.decision"]
    assert write(tmp_path / "a.jsonl", SHORT, LONG) == once
    assert write(tmp_path / "b.jsonl", SHORT, LONG) == once
    assert write(tmp_path / "a.jsonl", SHORT)[3:] == ["sel.settings", "sel.decision"], "a later process may append"


def test_equal_values_from_another_source_are_other_settings() -> None:
    decision, written = decide(SHORT, H100), set[str]()
    moved = replace(decision, settings=replace(decision.settings, sources={"autotune": "NSA_SEL_AUTOTUNE"}))
    names = [name for logged in (decision, moved, decision) for name, _ in decision_events(logged, written)]
    assert names == ["sel.settings", "sel.decision", "sel.settings", "sel.decision", "sel.decision"]


def test_a_line_cut_short_by_a_crash_costs_no_other_line(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    write(log, SHORT)
    log.write_bytes(log.read_bytes()[:-100])
    nsa_sel.log_to(str(log))
    events.record(decide(LONG, H100), LONG)
    nsa_sel.log_to(None)
    log.write_bytes(b'{"event": "\xff"}\n' + log.read_bytes())
    assert read_decisions(log) == [decide(LONG, H100)]


@pytest.mark.parametrize(("field", "value"), [("verdicts", {"numba": [[7], []]}), ("verdicts", []), ("reasons", [3]), ("request", None)])
def test_a_line_that_is_not_a_decision_is_named(tmp_path: Path, field: str, value: object) -> None:
    log = tmp_path / "log.jsonl"
    (name, settings), (_, fields) = decision_events(decide(SHORT, H100), set())
    fields["decision"] = {**msgspec.json.decode(fields["decision"]), field: value}
    log.write_bytes(b"\n".join(msgspec.json.encode(line) for line in ({"event": name, **settings}, {"event": "sel.decision", **fields})))
    with pytest.raises(ArgumentError, match=f"line 2 of {log} is not a decision"):
        read_decisions(log)
    log.write_bytes(log.read_bytes().splitlines()[1])
    with pytest.raises(ArgumentError, match=r"line 1 of .* keep the sel.settings lines when you cut a log"):
        read_decisions(log)
