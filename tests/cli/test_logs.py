"""nsa-sel replay and decisions: what they tell of a log, and of one that is wrong."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import nsa_sel
from nsa_sel.attention import selection_attention
from nsa_sel.core.decide import explain_request
from nsa_sel.core.request import DeviceInfo, example_request
from nsa_sel.errors import ArgumentError
from nsa_sel.telemetry import events
from nsa_sel.telemetry.log import read_log, replayed
from nsa_sel.telemetry.summary import summarise
from tests.helpers.command_line import SM89, ask, invoke, ranges_of, refused, tensors
from tests.helpers.paths import DATA


def leaves(value: Any, *path: Any) -> list[tuple[Any, ...]]:
    """The paths of all values below one; of a list, those of its first entry."""
    below = list(value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ())
    return [(*path, key) for key, _ in below] + [found for key, entry in below for found in leaves(entry, *path, key)]


class TestReplay:
    def test_unchanged_decisions_and_events(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        log = tmp_path / "decisions.jsonl"
        monkeypatch.setenv("NSA_DEBUG_LOG", str(log))
        held = tensors()
        selection_attention(held["q"], held["k"], held["v"], ranges_of(held["block_indices"]))
        events.emit("sel.timing", ms=1.0)
        nsa_sel.log_to(None)
        with log.open("a") as file:
            file.write(f"\n{explain_request(example_request(), SM89).to_json()}\n")
        result = invoke("replay", log)
        assert (result.exit_code, result.output) == (0, "2 decisions, 0 differ\n")
        assert ask("replay", log) == {"log": str(log), "decisions": 2, "torn_lines": [], "differing": []}

    def test_names_the_fields_that_differ(self, tmp_path: Path) -> None:
        log = tmp_path / "decisions.jsonl"
        record = json.loads(explain_request(example_request(), SM89).to_json())
        record["forward"] = "triton-group"
        log.write_text(f"{explain_request(example_request(), SM89).to_json()}\n{json.dumps(record)}\n")
        result = invoke("replay", log)
        assert result.exit_code == 1
        assert "line 2: triton-group on NVIDIA GeForce RTX 4090" in result.output
        assert "forward: recorded 'triton-group', replayed 'sdpa-packed'" in result.output
        change = {"field": "forward", "recorded": "triton-group", "replayed": "sdpa-packed"}
        assert ask("replay", log, exit_code=1)["differing"] == [{"line": 2, "changes": [change]}]

    def test_wrong_logs(self, tmp_path: Path) -> None:
        log = tmp_path / "log.jsonl"
        assert "LOG" in refused("replay", log)
        log.write_text('\n{"event": "sel.timing", "ms": 1}\n')
        assert "holds no decision" in refused("replay", log)
        recorded = explain_request(example_request(), SM89).to_json()
        for kept, remedy in (("", "pass a log that NSA_DEBUG_LOG wrote"), (recorded, "drop the line")):
            log.write_text(f'{kept}\n{{"case": "target", "backend": "numba"}}\n')
            message = " ".join(refused("replay", log).split())
            assert f"line 2 of {log} is no decision (Object missing required field `request`)" in message
            assert f"Remedy: {remedy}" in message
        for line in ("not json", '{"forward": "numba"}', '{"event": "sel.decision"}', "[]"):
            log.write_text(f"\n{line}\n")
            assert f"line 2 of {log} is no decision" in refused("replay", log)

    def test_torn_lines_are_passed_over_and_named(self, tmp_path: Path) -> None:
        log, whole = tmp_path / "log.jsonl", explain_request(example_request(), SM89).to_json()
        log.write_text(f'{whole}\n{whole[:200]}{whole}\n\n{whole}\n{{"event": "sel.timing", "backend": "num')
        result = invoke("replay", log)
        assert (result.exit_code, result.output) == (0, "2 decisions, 0 differ; skipped as torn: lines 2, 5 (2 in all)\n")
        assert ask("replay", log)["torn_lines"] == [2, 5]
        told = ask("decisions", log)
        assert (told["lines"], told["torn_lines"]) == (2, [2, 5])
        assert "2 lines, 2 sel.decision; skipped as torn: lines 2, 5" in invoke("decisions", log).output

    def test_a_line_ends_at_a_newline_alone(self, tmp_path: Path) -> None:
        log = tmp_path / "log.jsonl"
        event = {"event": "sel.backend.failed", "backend": "numba", "direction": "forward", "error": "a\u2028b\u0085c"}
        log.write_text(f"{json.dumps(event, ensure_ascii=False)}\n")
        assert ask("decisions", log)["lines"] == 1

    def test_any_value_in_the_place_of_any_other_is_a_clear_error(self, tmp_path: Path) -> None:
        """Fields of a decision in turn, with values of other types, too large, negative, empty."""
        log, recorded = tmp_path / "log.jsonl", json.loads(explain_request(example_request(needs_grad=True), SM89).to_json())
        recorded["settings"]["kernels"], recorded["offers"] = {}, recorded["offers"][:2]
        values = (None, 0, -1, 10**30, "", [], {"forward": 1}, 0.5)
        refused = []
        for path, value in ((path, value) for number, path in enumerate(leaves(recorded)) for value in values[number % 2 :: 2]):
            changed = copy.deepcopy(recorded)
            holder = functools.reduce(lambda found, key: found[key], path[:-1], changed)
            holder[path[-1]] = value
            log.write_text(json.dumps(changed))
            try:
                summarise(log)
                for line in read_log(log).lines:
                    replayed(log, line.number, line.decision)
            except ArgumentError as error:
                refused.append(str(error))
        assert len(refused) > 200
        assert all(message.startswith(f"line 1 of {log} is ") for message in refused)


class TestDecisions:
    def test_no_text_of_a_log_commands_the_terminal(self, tmp_path: Path) -> None:
        """Of C0 and C1 controls, and marks that reorder what is read: in words and in JSON, where they are the same text as before."""
        log, bad = tmp_path / "log.jsonl", "x\x1b]0;owned\x07\x9b2J\u202e\u2066\x7f\U000e0001\ufeff"
        event = {"event": "sel.backend.failed", "backend": bad, "direction": bad, "error": bad}
        log.write_text(f"{json.dumps(event)}\n{json.dumps({'event': bad})}\n")
        for options in ((), ("--json",)):
            output = invoke("decisions", log, *options).output
            assert not set(output) & set(bad.removeprefix("x")) - set("]0;owned2J")
            assert "x\\u001b]0;owned\\u0007\\u009b2J\\u202e\\u2066\\u007f\\udb40\\udc01\\ufeff" in "".join(output.split())
        assert ask("decisions", log)["failures"][0]["backend"] == bad

    def test_fields_of_a_wrong_type(self, tmp_path: Path) -> None:
        log = tmp_path / "log.jsonl"
        good = {"backend": "x", "direction": "y", "ms": 1.0, "mae": 0.0, "reference": "z", "source": "s", "flops": 1, "bytes": 2}
        for event, change in (
            ("sel.timing", {"ms": "fast"}), ("sel.timing", {"ms": None}), ("sel.timing", {"rows": []}), ("sel.timing", {"backend": {}}),
            ("sel.compare", {"mae": "a"}), ("sel.bwd", {"flops": 0.5}), ("sel.bwd", {"tflops": "many"}), ("sel.bwd", {"source": []}),
        ):  # fmt: skip
            log.write_text(json.dumps({"event": event, **good, **change}))
            message = " ".join(refused("decisions", log).split())
            assert f"line 1 of {log} is {event} whose {next(iter(change))} does not fit" in message
        for line, words in (('{"event": []}', "its event is []"), ("[" * 100_000, "nested too deeply"), ('{"a":' * 100_000, "nested")):
            log.write_text(line)
            for command in ("decisions", "replay"):
                assert words in refused(command, log)

    def test_sample_log(self) -> None:
        log = DATA / "sample_log.jsonl"
        result = invoke("decisions", log)
        assert result.exit_code == 0
        for text in ("failure of numba", "failed-before", "triton-group/dkdv", "slowest buckets", "worst MAE", "counted"):
            assert text in result.output
        told = ask("decisions", log, "--top", "1")
        assert (told["decisions"], len(told["buckets"])) == (6, 1)
        assert sum(told["events"].values()) == told["lines"]

    def test_predicted_times_are_one_rule(self, tmp_path: Path) -> None:
        log, h200 = tmp_path / "log.jsonl", DeviceInfo(kind="cuda", name="NVIDIA H200", sm=90, sm_count=132, shared_memory=232448)
        requests = [msgspec.structs.replace(example_request(needs_grad=True), B=B) for B in (1, 2)]
        log.write_text("".join(explain_request(request, h200).to_json() + "\n" for request in requests))
        (won,) = ask("decisions", log)["won"]
        assert won["calls"] == 2
        assert "ms" not in won["rule"]
        assert "(sm90_h200.yaml)" in won["rule"]

    def test_wrong_logs(self, tmp_path: Path) -> None:
        log = tmp_path / "log.jsonl"
        assert "LOG" in refused("decisions", log)
        log.write_text("\n")
        assert "is empty" in refused("decisions", log)
        log.write_text('\n{"event": "sel.timing", "backend": "numba", "ms": 1}\n')
        assert f"line 2 of {log} is sel.timing without direction" in refused("decisions", log)
        log.write_text("nonsense\n")
        assert "line 1" in ask("decisions", log, exit_code=2)["error"]
