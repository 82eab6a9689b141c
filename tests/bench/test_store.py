"""Rows on disk and runs that are interrupted: spreads, resuming, memory that runs out, torn lines."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from nsa_sel.bench.core import environment, markdown, session, store, timing
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import PACKED, ours
from nsa_sel.bench.core.session import Job, run
from nsa_sel.bench.core.store import RowFile
from nsa_sel.bench.core.timing import Timing, milliseconds, spread
from nsa_sel.bench.report import summary
from nsa_sel.bench.tune.cost_fit import is_cost_row
from nsa_sel.errors import ArgumentError
from tests.helpers.paths import ROOT

TINY = Case("tiny", "random", 1, 32, 32, 2, 2, 16, 8, 3, 16, "float32")
QUIET = Console(quiet=True)


def test_times_that_scatter_are_marked_where_they_are_quoted() -> None:
    def row(p20: float, p80: float) -> dict[str, Any]:
        return {"case": "real-8k-h1", "direction": "fwd", "backend": "triton-tile", "ms_median": 1.0, "ms_p20": p20, "ms_p80": p80}

    near, far = row(0.91, 1.1), row(0.91, 1.12)
    assert (markdown.ms(near), markdown.ms(far)) == ("1", "1†")
    assert markdown.with_note(summary.performance_table([near])).count("†") == 0
    assert markdown.with_note(summary.performance_table([far])).endswith("† a time that scatters: " + markdown.MARK_NOTE.partition(": ")[2])
    of_curve = [far | {"direction": "bwd"}, near | {"direction": "bwd", "backend": "dense-cudnn", "ms_median": 2.0}]
    assert "8k 2.00x†" in summary.breakeven_table(of_curve)
    assert "8k 2.00x |" in summary.breakeven_table([near | {"direction": "bwd"}, of_curve[1]])
    del far["ms_p20"]
    assert markdown.ms(far) == "1"


# Times


def test_a_bootstrap_interval_covers_the_true_median_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    found = [spread(generator.exponential(size=51).tolist()) for _ in range(200)]
    covered = np.mean([times.ci_low <= np.log(2) <= times.ci_high for times in found])
    assert 0.90 <= covered <= 0.99
    assert all(times.ci_low <= times.median <= times.ci_high for times in found)
    assert found[0] == spread(np.random.default_rng(0).exponential(size=51).tolist())  # seeded: the same again
    assert spread([3.0, 1.0, 2.0])[:3] == pytest.approx((2.0, 1.4, 2.6))


def test_as_many_calls_are_timed_as_asked_for_and_slow_ones_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SETTLE", 0)
    made: list[None] = []
    times = milliseconds(lambda: made.append(None), device="cpu", timing=Timing(calls=11, warmup=5))
    assert (times.calls, len(made)) == (11, timing.LEAST_CALLS + 5 + 11)
    monkeypatch.setattr(timing, "MOST_SECONDS", 0.02)
    slow = milliseconds(lambda: time.sleep(0.02), device="cpu", timing=Timing(calls=50))  # each takes as long, or longer
    assert slow.calls == timing.LEAST_CALLS
    assert 20 <= slow.p20 <= slow.median <= slow.p80


def test_clocks_and_temperature_are_read_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    answers = iter(["1980, 3201, 41", "[N/A], 3201, 55"])

    def output(*command: str) -> str:
        asked.append(command)
        return next(answers)

    monkeypatch.setattr(environment, "_output", output)
    monkeypatch.setattr(environment, "STATE_SECONDS", 7200.0)  # the two readings may be far apart on a busy machine
    monkeypatch.setattr(environment, "_last_state", (-7200.0, {}))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"uuid": "12-34"})())
    assert environment.gpu_state() == environment.gpu_state() == {"sm_mhz": 1980, "memory_mhz": 3201, "temperature_c": 41}
    assert len(asked) == 1
    assert asked[0][:3] == ("nvidia-smi", "-i", "GPU-12-34")
    assert not any(word.startswith(("-ac", "-lgc", "--lock", "--applications", "-rac", "-rgc")) for word in asked[0])
    monkeypatch.setattr(environment, "STATE_SECONDS", 0.0)
    assert environment.gpu_state() == {"sm_mhz": None, "memory_mhz": 3201, "temperature_c": 55}
    assert set(environment.gpu_state("cpu").values()) == {None}


def test_the_command_is_free_of_machine_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/bin/nsa-sel", "bench", "--out", "/home/me/rows", "--csv=/home/me/x.csv", "--only", "a b"])
    assert environment.stamp("cpu")["command"] == "nsa-sel bench --out rows --csv=x.csv --only 'a b'"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench/questions/speed.py"), "--quick"])
    assert environment.stamp("cpu")["command"] == "python -m nsa_sel.bench.questions.speed --quick"
    monkeypatch.setattr(sys, "argv", ["/home/me/examples/train.py"])
    assert environment.stamp("cpu")["command"] == "python examples/train.py"


def test_the_commit_names_changes_but_not_those_of_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of other code are not taken for rows of this one; rows that are added do not make their own run another one."""
    for name in ("code.py", "bench/results/rows.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "first")):
        subprocess.run(("git", *command), cwd=tmp_path, check=True)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    clean = environment.stamp("cpu")["commit"]
    (tmp_path / "bench/results/rows.jsonl").write_text("1\n2\n")
    assert environment.stamp("cpu")["commit"] == clean
    (tmp_path / "code.py").write_text("2\n")
    changed = environment.stamp("cpu")["commit"]
    assert changed.startswith(f"{clean}+")
    assert environment.stamp("cpu")["commit"] == changed
    (tmp_path / "code.py").write_text("3\n")
    assert environment.stamp("cpu")["commit"] not in (clean, changed)
    (tmp_path / "unpacked").mkdir()
    monkeypatch.setattr(environment, "ROOT", tmp_path / "unpacked")
    assert environment.stamp("cpu")["commit"] == "not a checkout", "the repository around the folder is another's"


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
    assert not {row["direction"] for row in gone} & {direction for _, direction in summary.indexed(rows)}


def test_old_rows_are_read_and_count_as_measured() -> None:
    """Keys were added since; nothing that a committed row lacks is needed."""
    for name in ("h200/selection.jsonl", "cpu/numba_vs_sdpa.jsonl"):
        rows = store.read(ROOT / "bench/results" / name)
        assert store.measured(rows) == rows
        assert len({store.key(row) for row in rows}) == len(rows)


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


def test_what_cannot_be_written_leaves_no_part(tmp_path: Path) -> None:
    file, limits = tmp_path / "rows.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    store.append(file, [{"a": 1}])
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))  # a write beyond it writes a part, then fails
    try:
        with pytest.raises(OSError, match="too large"):
            store.append(file, [{"filler": "x" * 100}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.read(file) == [{"a": 1}]
