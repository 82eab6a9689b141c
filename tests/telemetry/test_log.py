"""Logs are small and complete: settings once per target, and every decision is read back whole."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import nsa_sel
from nsa_sel.core.request import Request
from nsa_sel.errors import ArgumentError
from nsa_sel.telemetry import events
from nsa_sel.telemetry.log import decision_events, read_log
from tests.helpers.paths import DATA
from tests.helpers.policy_cases import CPU, H100, H200, LONG, RTX4090, SHORT, decide, replace

DECISIONS = [
    decide(SHORT, H100),
    decide(replace(LONG, needs_grad=True), H100),
    decide(replace(LONG, needs_grad=True), RTX4090, backend="triton-group"),
    decide(SHORT, CPU, backend="no-such-backend"),
    nsa_sel.explain_request(replace(SHORT, needs_grad=True), H200),
]


def write(log: Path, *requests: Request) -> list[str]:
    """The names of the events that the calls of these requests leave in a log."""
    nsa_sel.log_to(str(log))
    for request in requests:
        events.record(decide(request, H100), request)
    nsa_sel.log_to(None)
    return [line.event for line in read_log(log).lines]


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: f"{decision.device.name}-{decision.forward}")
def test_a_decision_is_read_back_whole(tmp_path: Path, decision: nsa_sel.Decision) -> None:
    log = tmp_path / "log.jsonl"
    nsa_sel.log_to(str(log))
    events.record(decision, decision.request)
    nsa_sel.log_to(None)
    settings, line = read_log(log).lines
    assert settings.fields["fingerprint"].startswith(decision.settings.fingerprint)
    assert line.decision == decision == nsa_sel.Decision.from_json(decision.to_json())
    assert nsa_sel.decisions()[-1] is decision
    assert len(log.read_bytes().splitlines()[-1]) <= 2048


@pytest.mark.parametrize("name", ["decisions.jsonl", "sample_log.jsonl"])
def test_committed_logs_are_small(name: str) -> None:
    sizes = [len(line) for line in (DATA / name).read_bytes().splitlines() if b'"event":"sel.decision"' in line]
    assert 0 < max(sizes) <= 2048
    fingerprints = [line.fields["fingerprint"] for line in read_log(DATA / name).lines if line.event == "sel.settings"]
    assert 0 < len(fingerprints) == len(set(fingerprints)) <= len(sizes)


def test_settings_are_written_once_to_each_target(tmp_path: Path) -> None:
    once = ["sel.settings", "sel.decision", "sel.decision"]
    assert write(tmp_path / "a.jsonl", SHORT, LONG) == once
    assert write(tmp_path / "b.jsonl", SHORT, LONG) == once
    assert write(tmp_path / "a.jsonl", SHORT) == [*once, "sel.settings", "sel.decision"], "a later process may append"


def test_equal_values_from_another_source_are_other_settings() -> None:
    decision, written = decide(SHORT, H100), set[str]()
    moved = replace(decision, settings=replace(decision.settings, sources={"autotune": "NSA_SEL_AUTOTUNE"}))
    names = [name for each in (decision, moved, decision) for name, _ in decision_events(each, written)]
    assert names == ["sel.settings", "sel.decision", "sel.settings", "sel.decision", "sel.decision"]


def test_a_decision_without_its_settings_is_a_clear_error(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    write(log, SHORT)
    log.write_bytes(log.read_bytes().splitlines()[1])
    words = (
        f"line 1 of {log} is a decision with settings .*, which no earlier line holds; .* keep the sel.settings lines when you cut a log"
    )
    with pytest.raises(ArgumentError, match=words):
        read_log(log)


def test_a_line_that_a_crash_cut_short_costs_no_later_one(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    write(log, SHORT)
    log.write_bytes(log.read_bytes()[:-100])
    assert write(log, LONG) == ["sel.settings", "sel.settings", "sel.decision"]
    assert read_log(log).torn == (2,)


def test_a_line_that_is_no_text_costs_no_other_one(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    write(log, SHORT)
    log.write_bytes(b'{"event": "\xff"}\n' + log.read_bytes())
    assert read_log(log).torn == (1,)
    log.write_bytes(b"\xff\n")
    with pytest.raises(ArgumentError, match=f"line 1 of {log} is no decision"):
        read_log(log)


@pytest.mark.parametrize(
    ("field", "value"),
    [("verdicts", {"numba": [[7], []]}), ("verdicts", {"numba": [0]}), ("verdicts", []), ("reasons", {}), ("reasons", [3]),
     ("predictions", {"forward": {"numba": "soon"}}), ("predictions", {"sideways": {"numba": 1}}), ("request", None)],
)  # fmt: skip
def test_a_short_decision_of_wrong_fields_names_its_line(tmp_path: Path, field: str, value: object) -> None:
    log = tmp_path / "log.jsonl"
    (name, settings), (_, fields) = decision_events(decide(SHORT, H100), set())
    fields["decision"] = {**msgspec.json.decode(fields["decision"]), field: value}
    log.write_bytes(b"\n".join(msgspec.json.encode(line) for line in ({"event": name, **settings}, {"event": "sel.decision", **fields})))
    with pytest.raises(ArgumentError, match=f"line 2 of {log} is no decision"):
        read_log(log)
