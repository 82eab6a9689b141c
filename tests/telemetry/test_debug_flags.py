"""What NSA_DEBUG_LOG and the other NSA_DEBUG_* flags write, where to, and that nothing is made when nobody listens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import nsa_sel
from nsa_sel.core.request import example_request
from nsa_sel.errors import ConfigError
from nsa_sel.oracle import oracle_mask
from nsa_sel.telemetry import events as telemetry
from nsa_sel.telemetry.log import read_decisions
from tests.helpers.calls import last, problem

pytestmark = pytest.mark.usefixtures("plain_cpu")


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_debug_log_holds_json_lines_that_replay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    arguments = problem()
    nsa_sel.selection_attention(*arguments)
    monkeypatch.setenv("NSA_DEBUG_LOG", str(file))
    nsa_sel.selection_attention(*arguments)
    nsa_sel.selection_attention(*arguments)
    lines = [line for line in lines_of(file) if line["event"] == "sel.decision"]
    assert len(lines) == 2
    assert all(line["time"] > 0 for line in lines)
    assert lines[0]["request"]["S_kv"] == 40  # the exact call; the decision holds its class
    decision = read_decisions(file)[0]
    assert decision == last()
    assert decision.request.S_kv == 64
    assert decision.replay() == ()
    monkeypatch.delenv("NSA_DEBUG_LOG")
    nsa_sel.selection_attention(*arguments)
    nsa_sel.selection_attention(*problem(seed=3))
    assert len([line for line in lines_of(file) if line["event"] == "sel.decision"]) == 2


@pytest.mark.parametrize("flags", [("NSA_DEBUG_LOG",), ("NSA_DEBUG_TIMING", "NSA_DEBUG_COMPARE")])
def test_any_flag_that_asks_for_events_shows_each_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    """Once, although packed SDPA is compared with itself."""
    for flag in flags:
        monkeypatch.setenv(flag, "1")
    q, k, v, ranges = problem(requires_grad=True)
    nsa_sel.selection_attention(q, k, v, ranges).sum().backward()
    found = events_on(capsys.readouterr().err)
    assert [found.count(event) for event in ("sel.path", "sel.reads", "sel.bwd")] == [1, 1, 1]


def test_a_log_that_cannot_be_opened_leaves_the_previous_one(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    nsa_sel.log_to(str(file))
    with pytest.raises(ConfigError, match="target is"):
        nsa_sel.log_to(str(tmp_path / "missing" / "events.jsonl"))
    nsa_sel.selection_attention(*problem())
    assert [line["event"] for line in lines_of(file)] == ["sel.settings", "sel.decision"]


def test_debug_flags_add_events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    for flag in ("NSA_DEBUG_TRITON", "NSA_DEBUG_TIMING", "NSA_DEBUG_COMPARE"):
        monkeypatch.setenv(flag, "1")
    monkeypatch.setenv("NSA_DEBUG_LOG", str(file))
    q, k, v, ranges = problem(requires_grad=True)
    nsa_sel.selection_attention(q, k, v, ranges).sum().backward()
    found = {(line["event"], line.get("direction")): line for line in lines_of(file)}
    assert found["sel.timing", "forward"]["ms"] > 0
    assert found["sel.timing", "backward"]["backend"] == "sdpa-packed"
    assert found["sel.compare", "forward"]["mae"] == found["sel.compare", "backward"]["mae"] == 0
    reads = found["sel.reads", None]
    tokens = int(oracle_mask(ranges, 40, 12).sum())
    assert (reads["tokens"], reads["bytes"], reads["rows"]) == (tokens, tokens * (16 + 24) * 4, 48)


def events_on(stderr: str) -> list[str]:
    return [json.loads(line)["event"] for line in stderr.splitlines()]


@pytest.mark.parametrize(
    ("flag", "event"), [("NSA_DEBUG_TRITON", "sel.reads"), ("NSA_DEBUG_TIMING", "sel.timing"), ("NSA_DEBUG_COMPARE", "sel.compare")]
)
def test_debug_flags_alone_show_their_events_on_stderr(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, event: str
) -> None:
    arguments, log = problem(), tmp_path / "events.jsonl"

    def shown() -> list[str]:
        nsa_sel.selection_attention(*arguments)
        return events_on(capsys.readouterr().err)

    assert shown() == []
    monkeypatch.setenv(flag, "1")
    assert event in shown()
    monkeypatch.setenv("NSA_DEBUG_LOG", "off")  # says where to: nowhere
    assert shown() == []
    monkeypatch.setenv("NSA_DEBUG_LOG", str(log))
    assert shown() == []
    assert event in [line["event"] for line in lines_of(log)]
    monkeypatch.delenv("NSA_DEBUG_LOG")
    assert event in shown()
    monkeypatch.delenv(flag)
    assert shown() == []


def test_debug_flags_leave_it_to_who_listens_already(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    arguments, log = problem(), tmp_path / "events.jsonl"
    nsa_sel.log_to(str(log))
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    nsa_sel.selection_attention(*arguments)
    monkeypatch.delenv("NSA_DEBUG_TRITON")
    nsa_sel.selection_attention(*arguments)
    found = [line["event"] for line in lines_of(log)]
    assert [event for event in found if event != "sel.settings"] == ["sel.path", "sel.reads", "sel.decision", "sel.decision"]
    nsa_sel.log_to(None)
    assert not telemetry.listening()  # as before
    caplog.clear()
    caplog.set_level("INFO", logger="nsa_sel")
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    nsa_sel.selection_attention(*arguments)
    assert [record.getMessage() for record in caplog.records] == ["sel.path", "sel.reads", "sel.decision"]
    assert capsys.readouterr().err == ""


def test_a_log_holds_names_that_are_no_utf8(tmp_path: Path) -> None:
    nsa_sel.log_to(str(tmp_path / "log\udcff"))
    telemetry.emit("sel.tuned.ignored", file="/a/b\udcff", request=example_request())
    telemetry.emit("sel.tuned.loaded", file="/a/b")
    lines = lines_of(tmp_path / "log\udcff")
    assert [line["file"] for line in lines] == ["/a/b?", "/a/b"]
    assert lines[0]["request"]["Dk"] == example_request().Dk


def test_no_event_is_made_when_nobody_listens(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="nsa_sel")
    q, k, v, ranges = problem(requires_grad=True)
    nsa_sel.explain(q, k, v, ranges)  # settings are read once
    monkeypatch.setattr(telemetry, "emit", lambda *_, **__: pytest.fail("an event was made"))
    monkeypatch.setattr(msgspec.json, "encode", lambda *_, **__: pytest.fail("something was serialised"))
    nsa_sel.selection_attention(q, k, v, ranges).sum().backward()
