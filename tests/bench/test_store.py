"""Rows on disk and runs that are interrupted: spreads, resuming, memory that runs out, torn lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from nsa_sel.bench.core import environment, session, store
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import PACKED, ours
from nsa_sel.bench.core.session import Job, run
from nsa_sel.bench.core.store import RowFile
from nsa_sel.bench.core.timing import Timing
from nsa_sel.bench.tune.cost_fit import is_cost_row
from nsa_sel.errors import ArgumentError
from tests.helpers.files import ROOT

TINY = Case("tiny", "random", 1, 32, 32, 2, 2, 16, 8, 3, 16, "float32")
QUIET = Console(quiet=True)


# Times


def test_the_command_is_free_of_machine_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/bin/nsa-sel", "bench", "--out", "/home/me/rows", "--csv=/home/me/x.csv", "--only", "a b"])
    assert environment.stamp("cpu")["command"] == "nsa-sel bench --out rows --csv=x.csv --only 'a b'"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench/questions/speed.py"), "--quick"])
    assert environment.stamp("cpu")["command"] == "python -m nsa_sel.bench.questions.speed --quick"
    monkeypatch.setattr(sys, "argv", ["/home/me/examples/train.py"])
    assert environment.stamp("cpu")["command"] == "python examples/train.py"


# Runs


def job(*directions: str, case: Case = TINY, **more: Any) -> Job:
    return Job(case, (ours(PACKED), ours("numba")), directions or ("fwd", "bwd"), 4, more=more)


def test_what_stands_in_the_file_is_not_measured_again(instant: list[Timing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    first = run([job("fwd")], out, "cpu", QUIET)
    assert (len(instant), len(first)) == (2, 2)
    out.write_bytes(out.read_bytes() + b'{"case": "tiny", "b')  # as a kill in the middle of a line leaves it
    both = run([job()], out, "cpu", QUIET)
    assert (len(instant), len(both)) == (4, 4)  # bwd alone was new
    assert {(row["backend"], row["direction"]) for row in both} == {(b, d) for b in (PACKED, "numba") for d in ("fwd", "bwd")}
    assert run([job()], out, "cpu", QUIET) == both
    assert len(instant) == 4
    assert len(store.read(out)) == 4
    run([job(streams=2)], out, "cpu", QUIET)
    assert len(instant) == 8
    monkeypatch.setenv("NSA_SEL_COMMIT", "def5678")
    run([job()], out, "cpu", QUIET)
    assert (len(instant), len(store.read(out))) == (12, 12)
    assert {row["commit"] for row in store.of_last_environment(store.read(out))} == {"def5678"}


@pytest.mark.parametrize("where", ["inputs", "parity", "bwd"])
def test_cases_out_of_memory_have_rows_and_are_passed_over(
    instant: list[Timing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    error = torch.OutOfMemoryError if where != "bwd" else lambda text: RuntimeError(f"DefaultCPUAllocator: can't allocate memory: {text}")

    def fail(*_: Any, **__: Any) -> None:
        raise error("you tried to allocate 8 TB")

    target = {"inputs": (session, "make_problem"), "parity": (session, "parity"), "bwd": (session.torch.autograd, "grad")}[where]
    if where == "bwd":
        monkeypatch.setattr(session, "parity", lambda *_, **__: (0.0, 0.0))
    out = tmp_path / "rows.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(*target, fail)
        rows = run([job(), job(case=TINY._replace(case="second", S=16))], out, "cpu", QUIET)
    gone = [row for row in rows if "error" in row]
    assert len(rows) == 8
    assert len(gone) == (4 if where == "bwd" else 8)
    for row in gone:
        assert (row["error"], row["error_in"], row["commit"]) == ("out of memory", where, "abc1234")
        assert "ms_median" not in row
        assert row["direction"] == "bwd" or where != "bwd"
    before = len(instant)
    assert len(run([job()], out, "cpu", QUIET)) == 4  # not tried again
    assert len(instant) == before
    # Nobody who reads rows takes them for measurements.
    assert len(store.measured(rows)) == len(rows) - len(gone)
    assert not any(is_cost_row(row) for row in gone)


# Files


def test_a_torn_last_line_is_dropped_with_a_word(tmp_path: Path) -> None:
    file, told = tmp_path / "rows.jsonl", []
    store.append(file, [{"a": 1}, {"a": 2}])
    whole = file.read_bytes()
    for length in range(1, len(whole) + 1):
        file.write_bytes(whole[:length])
        kept = store.read(file)
        told.clear()
        store.mend(file, told.append)
        assert store.read(file) == kept  # reading and mending agree
        assert len(told) == (length not in (len(whole), len(whole) - 1, whole.index(b"\n"), whole.index(b"\n") + 1))
        assert all(word.startswith("rows.jsonl: dropped") for word in told)
        store.append(file, [{"a": 3}])
        assert store.read(file) == [*kept, {"a": 3}]
    store.mend(tmp_path / "none.jsonl", told.append)
    assert not (tmp_path / "none.jsonl").exists()


def test_a_bad_line_elsewhere_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ArgumentError, match=r"line 2 of .*restore the line, or drop it"):
        store.read(file)
    with pytest.raises(ArgumentError, match="No such file"):
        store.read(tmp_path / "none.jsonl")


def test_a_row_file_knows_what_is_done_and_mends_before_it_adds(tmp_path: Path) -> None:
    file, told = tmp_path / "folder" / "rows.jsonl", list[str]()
    rows = RowFile(file, lambda row: row["a"], tell=told.append)
    assert rows.add({"a": 1, "b": 2}) == {"a": 1, "b": 2}
    torn = file.read_bytes() + b'{"a": 3, "b'
    file.write_bytes(torn)
    again = RowFile(file, lambda row: row["a"], tell=told.append)
    assert ({"a": 1} in again, {"a": 3} in again, again[{"a": 1}]["b"]) == (True, False, 2)
    assert file.read_bytes() == torn, "reading changes nothing"
    again.add({"a": 1, "b": 4})
    assert store.read(file) == [{"a": 1, "b": 2}, {"a": 1, "b": 4}]
    assert again.of([{"a": 3}, {"a": 1}]) == RowFile(file, lambda row: row["a"]).of([{"a": 1}]) == [{"a": 1, "b": 4}]
    assert [word.startswith("rows.jsonl: dropped") for word in told] == [True]


def test_files_of_the_cache_folder_are_the_users_own_and_bad_lines_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    store.append(file, [{"a": 1}], owner_only=True)
    assert file.stat().st_mode & 0o777 == 0o600
    with file.open("a") as opened:
        opened.write("no row\n[]\n")
    with pytest.raises(ArgumentError, match="line 2 of"):
        RowFile(file)
    assert RowFile(file, strict=False, owner_only=True).unreadable == 2
    file.chmod(0o666)
    for fails in (lambda: RowFile(file, owner_only=True), lambda: store.append(file, [{"a": 1}], owner_only=True)):
        with pytest.raises(OSError, match="may be written by other users"):
            fails()
