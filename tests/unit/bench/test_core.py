"""Check what benches share: parity with the oracle, runs, and rows on disk."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from nsa_sel.bench.core import session, store
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import (
    DENSE,
    PACKED,
    dense,
    make_problem,
    ours,
)
from nsa_sel.bench.core.session import Job, measured_rows, parity, run, sample, wanted
from nsa_sel.bench.core.store import RowFile
from nsa_sel.bench.core.timing import Timing, WrongResult
from nsa_sel.bench.tune.cost_fit import is_cost_row
from nsa_sel.errors import ArgumentError
from tests.helpers.files import ROOT

TINY = Case("tiny", "random", 1, 64, 64, 2, 2, 16, 8, 3, 16, "float32")
QUIET = Console(quiet=True)


# Parity


@pytest.mark.parametrize("B", [1, 5])
def test_right_results_pass(B: int) -> None:
    problem = make_problem(case := TINY._replace(B=B), "cpu")
    mae, of_gradients = parity(ours(PACKED).prepare(problem).call, problem, sample(case, problem, 8))
    assert mae < 1e-6
    assert of_gradients < 1e-5
    assert parity(dense().prepare(problem).call, problem, sample(case, problem, 8, every_key=True))[0] < 1e-6


class Wrong(torch.autograd.Function):
    """Spoils one of q's, k's and v's gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, which: int, how: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        ctx.spoil = which, how
        return q.clone(), k.clone(), v.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        which, how = ctx.spoil
        return *(how(x) if i == which else x for i, x in enumerate(gradients)), None, None


@pytest.mark.parametrize("which", [0, 1, 2])
def test_wrong_gradients_and_unwritten_values_are_reported(which: int) -> None:
    problem = make_problem(TINY, "cpu")
    right, exact = ours(PACKED).prepare(problem).call, sample(TINY, problem, 8)

    def spoilt(how: Callable[[Tensor], Tensor]) -> tuple[float, float | None]:
        return parity(lambda q, k, v: right(*Wrong.apply(q, k, v, which, how)), problem, exact)

    with pytest.raises(WrongResult, match=rf"^{('dq', 'dk', 'dv')[which]} is .* off in the mean"):
        spoilt(lambda x: x * 1.5)
    assert 1e-5 < (spoilt(lambda x: x * 1.0005)[1] or 0) < 1e-3
    with pytest.raises(WrongResult, match=r"not written|is not 0"):
        spoilt(lambda x: torch.where(x == 0, math.nan, x))
    if which:
        with pytest.raises(WrongResult, match="is not 0"):
            spoilt(lambda x: x + 1)
    decoding = make_problem(case := TINY._replace(S=1), "cpu")
    with pytest.raises(WrongResult, match="not written"):
        parity(lambda q, k, v: torch.empty(1, 1, 2, 2, 8), decoding, sample(case, decoding, 1))


# Runs


KEYS = {
    *("case", "distribution", "B", "S", "S_kv", "G", "h", "Dk", "Dv", "n", "block", "dtype", "direction", "backend"),
    *("ms_median", "ms_p20", "ms_p80", "mae", "workspace_bytes", "device", "driver", "torch", "triton", "commit", "command"),
    *("ms_ci_low", "ms_ci_high", "calls", "numba", "threads"),
}


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("contender", [ours(PACKED), dense()], ids=lambda contender: contender.name)
@pytest.mark.parametrize("S", [64, 1])
def test_rows_have_the_agreed_keys(contender: Any, S: int) -> None:
    directions = ("fwd", "bwd", "fwd+bwd") if S > 1 else ("decode",)
    job = Job(TINY._replace(S=S), (contender,), directions, 8)
    rows = list(measured_rows(job, [row | store.stamp("cpu") for row in wanted(job)], "cpu", pytest.fail))
    assert [row["direction"] for row in rows] == list(directions)
    for row in rows:
        assert set(row) == KEYS
        assert (row["ms_median"], row["ms_p20"], row["ms_p80"], row["commit"]) == (2.0, 1.0, 3.0, "abc1234")
        assert (row["ms_ci_low"], row["ms_ci_high"], row["calls"]) == (1.5, 2.5, 7)
        assert (row["mae"] is None) == (contender.name == DENSE)


@pytest.mark.usefixtures("instant")
def test_failures_are_told_and_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    job = Job(TINY, (ours("unheard-of"), ours(PACKED)), ("fwd", "bwd"), 8)
    rows = list(measured_rows(job, wanted(job), "cpu", told.append))
    assert [(row["backend"], row["direction"]) for row in rows] == [(PACKED, "fwd"), (PACKED, "bwd")]
    assert [words.startswith("tiny unheard-of: BackendError: ") for words in told] == [True]

    def wrong(*_: Any, **__: Any) -> None:
        raise WrongResult("dk is not 0")

    monkeypatch.setattr(session, "parity", wrong)
    assert list(measured_rows(job._replace(contenders=(ours(PACKED),)), wanted(job), "cpu", told.append)) == []
    assert told[1:] == ["tiny sdpa-packed: WrongResult: dk is not 0"]
    peer = ours(PACKED)._replace(peer=True)
    rows = list(measured_rows(job._replace(contenders=(peer,)), wanted(job), "cpu", told.append))
    assert [(row["wrong"], row["mae"]) for row in rows] == [("dk is not 0", None)] * 2


def two(*directions: str, case: Case = TINY, **more: Any) -> Job:
    return Job(case, (ours(PACKED), ours("numba")), directions or ("fwd", "bwd"), 4, more=more)


def test_rows_in_the_file_are_not_measured_again(instant: list[Timing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    run([two("fwd")], out, "cpu", QUIET)
    assert len(instant) == 2
    out.write_bytes(out.read_bytes() + b'{"case": "tiny", "b')  # as a kill in the middle of a line leaves it
    both = run([two()], out, "cpu", QUIET)
    assert (len(instant), len(both)) == (4, 4)
    assert run([two()], out, "cpu", QUIET) == both
    assert len(store.read(out)) == 4
    assert len(instant) == 4
    run([two(streams=2)], out, "cpu", QUIET)
    assert len(instant) == 8
    monkeypatch.setenv("NSA_SEL_COMMIT", "def5678")
    run([two()], out, "cpu", QUIET)
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
        rows = run([two(), two(case=TINY._replace(case="second", S=16))], out, "cpu", QUIET)
    gone = [row for row in rows if "error" in row]
    assert (len(rows), len(gone)) == (8, 4 if where == "bwd" else 8)
    for row in gone:
        assert (row["error"], row["commit"]) == ("out of memory", "abc1234")
        assert not is_cost_row(row)
    before = len(instant)
    assert len(run([two()], out, "cpu", QUIET)) == 4  # not tried again
    assert len(instant) == before
    assert len(store.measured(rows)) == len(rows) - len(gone)


# Files


def test_the_command_is_free_of_machine_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/bin/nsa-sel", "bench", "--out", "/home/me/rows", "--csv=/home/me/x.csv", "--only", "a b"])
    assert store.stamp("cpu")["command"] == "nsa-sel bench --out rows --csv=x.csv --only 'a b'"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench/questions/speed.py"), "--quick"])
    assert store.stamp("cpu")["command"] == "python -m nsa_sel.bench.questions.speed --quick"


def test_a_bad_line_elsewhere_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ArgumentError, match=r"line 2 of .*restore the line, or drop it"):
        store.read(file)
    with pytest.raises(ArgumentError, match="No such file"):
        store.read(tmp_path / "none.jsonl")


def test_files_of_the_cache_folder_belong_to_the_user(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    store.append(file, [{"a": 1}], owner_only=True)
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o666)
    for fails in (lambda: RowFile(file, owner_only=True), lambda: store.append(file, [{"a": 1}], owner_only=True)):
        with pytest.raises(OSError, match="may be written by other users"):
            fails()
