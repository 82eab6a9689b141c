"""The matrix over L on a CPU: cases and their spans, every flag, the files; `nsa-sel bench` and the peers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nsa_sel.bench import command, sel_threshold_from_csv
from nsa_sel.bench.core import matrix, store
from nsa_sel.bench.core.cases import Case, length_of, make_selection, span_case
from nsa_sel.bench.core.command_line import program
from nsa_sel.bench.core.matrix import SEED, SEED_DECODE, from_csv
from nsa_sel.bench.core.timing import Timing
from nsa_sel.bench.questions import speed
from nsa_sel.cli.app import app
from nsa_sel.errors import ArgumentError
from tests.helpers.files import table_lines

QUIET = Console(quiet=True)


# Cases


@pytest.mark.parametrize("L", [16, 128, 1024])
def test_distributions_are_the_requirements(L: int) -> None:
    """few: n = 1, [(0, L)]; many: n = 8 equal spans; mixed: n in {2, 4, 8}, random spans that sum to L."""
    few, many, mixed = (make_selection(span_case(dist, 64, 2, 16, 8, L), "cpu") for dist in ("few", "many", "mixed"))
    assert few.ranges.unique(dim=1).tolist() == [[[[[0, L]]]]]
    assert many.ranges.shape[-2] == 8
    assert bool((many.ranges.diff(dim=-1) == L // 8).all())
    assert many.block_size == (L // 8 if L >= 128 else None)
    lengths = mixed.ranges.diff(dim=-1)[0, :, 0, :, 0]
    assert set((lengths > 0).sum(-1).tolist()) == {2, 4, 8}
    assert bool((lengths.sum(-1) == L).all())
    assert len(lengths.unique(dim=0)) > 32  # random, each row its own


def test_the_seed_matrix_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "able", lambda contenders, device, tell: tuple(contenders))

    def jobs(decode: bool, **more: Any) -> list[Any]:
        options = {**(SEED_DECODE if decode else SEED), **more}
        return matrix.jobs("cuda", decode=decode, timing=Timing(calls=50), backends="", console=QUIET, **options)

    found = jobs(False)
    assert {job.case.S for job in found} == {64, 256, 1024}
    assert {job.case.h for job in found} == {4, 8}
    assert {(job.case.Dk, job.case.Dv) for job in found} == {(64, 64), (64, 128), (128, 64), (128, 128)}
    assert {length_of(*(getattr(job.case, x) for x in ("case", "n", "block"))) for job in found} == {16, 32, 64, 128, 256, 512, 1024}
    assert len({job.case.case for job in found}) == len(found) == 3 * 2 * 4 * 7 * 3
    assert all((job.timing.calls, job.timing.warmup, job.directions) == (50, 5, ("fwd", "bwd")) for job in found)
    names = {(job.case.distribution, job.case.block): [contender.name for contender in job.contenders] for job in found}
    assert names["few", 0] == names["many", 0] == names["mixed", 0] == ["triton-token", "triton-group", "sdpa-packed"]
    for block in (16, 32, 64, 128):  # eight of them from L = 128 on
        assert names["many", block] == ["triton-token", "triton-group", "triton-tile", "triton-block", "sdpa-packed"]
    assert len(names) == 3 + 4
    decode = jobs(True)
    assert {(job.case.S, job.case.h, job.case.block, job.case.n) for job in decode} == {(1, h, 64, n) for h in (2, 4) for n in (8, 16)}
    assert [contender.name for contender in decode[0].contenders] == ["triton-token", "triton-group", "sdpa-packed", "dense-cudnn"]
    assert jobs(False, N="64")[0].case.dtype == "bfloat16"
    for bad, words in (
        ({"N": "0"}, "--N is '0'"),
        ({"dist": "some"}, "--dist is some"),
        ({"L_list": "9000"}, "--L_list is 9000"),
        ({"L_list": "16,33"}, "--L_list is 33; allowed: multiples of 8"),
    ):
        with pytest.raises(ArgumentError, match=words):
            jobs(False, **bad)
    with pytest.raises(ArgumentError, match="--L_list is 32, 100; allowed: multiples of 64"):
        jobs(True, L_list="64,32,100")


# Flags


def script(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `python -m nsa_sel.bench.bench_sel_triton` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["bench_sel_triton.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        program(command.bench)
    return int(ended.value.code or 0)


def test_every_flag_on_a_cpu(instant: list[Timing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    sizes = ("--N", 8, "--H", 2, "--D", 16, "--Dv", "8,16", "--L_list", "16,40", "--dist", "few,mixed")
    flags = ("--iters", 7, "--warmup", 2, "--streams", 1, "--csv", tmp_path / "all.csv", "--out", tmp_path / "out")
    assert script(monkeypatch, *sizes, *flags) == 0
    assert set(instant) == {Timing(calls=7, warmup=2)}
    said = capsys.readouterr()
    assert "triton-group is left out: needs a GPU" in said.err
    shown = table_lines(said.out.split("\n\n")[3].strip())
    assert [shown[-1][x] for x in ("case", "direction", "backend", "ms", "95% CI", "20th to 80th", "calls", "against packed")] == [
        *("mixed-N8-H2-D16-Dv16-L40", "bwd", "numba", "2†", "1.5 to 2.5", "1 to 3", "7", "1.00x")
    ]
    rows = store.read(tmp_path / "out" / "rows.jsonl")
    assert len(rows) == 2 * 2 * 2 * 2 * 2  # Dv, L, dist, direction, backend
    assert {(row["backend"], row["direction"], row["iters"], row["warmup"], row["streams"]) for row in rows} == {
        (backend, way, 7, 2, 1) for backend in ("sdpa-packed", "numba") for way in ("fwd", "bwd")
    }
    assert all(row["mae"] < 1e-6 for row in rows)
    dense, varlen = (from_csv(tmp_path / "out" / name) for name in ("dense.csv", "varlen.csv"))
    assert ({row["n"] for row in dense}, min(row["n"] for row in varlen)) == ({1}, 8)
    assert len(from_csv(tmp_path / "all.csv")) == len(dense) + len(varlen) == len(rows)
    assert "| few-N8-H2-D16-Dv8-L16" in (tmp_path / "out" / "report.md").read_text()

    decoding = ("--decode", "--N", 3, "--H", 2, "--D", 16, "--Dv", 8, "--L_list", 64)
    assert script(monkeypatch, *decoding, *flags) == 0
    assert {row["direction"] for row in from_csv(tmp_path / "out" / "decode.csv")} == {"decode"}
    assert {row["direction"] for row in from_csv(tmp_path / "all.csv")} == {"decode"}  # the command's own rows
    assert len(from_csv(tmp_path / "out" / "dense.csv")) == len(dense)
    before = len(instant)
    assert script(monkeypatch, *sizes, *flags) == 0
    assert len(instant) == before  # nothing was measured again
    assert [row["case"] for row in from_csv(tmp_path / "all.csv")] == [row["case"] for row in rows]

    assert script(monkeypatch, "--streams", 2) == 2
    assert "error: --streams is 2; allowed: 1 on a CPU" in capsys.readouterr().err
    assert script(monkeypatch, "--device", "tpu") == 2
    assert "--device is 'tpu'; allowed: auto, cuda, cpu" in capsys.readouterr().err


# Commands


def bench(tmp_path: Path, *arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", "--out", str(tmp_path), *map(str, arguments)])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick runs of one tiny case a kind."""
    sizes = {**matrix.QUICK, "N": "8", "H": "2", "D": "16", "Dv": "16", "L_list": "16", "dist": "few"}
    monkeypatch.setattr(matrix, "QUICK", sizes)
    monkeypatch.setattr(matrix, "QUICK_DECODE", {**sizes, "L_list": "64"})
    quick = [
        Case("tiny", "random", 1, 64, 64, 2, 2, 16, 16, 2, 16, "bfloat16"),
        Case("one", "random", 2, 1, 64, 2, 2, 16, 16, 2, 16, "bfloat16"),
    ]
    monkeypatch.setattr(speed, "QUICK", speed.QUICK._replace(cases=quick))


@pytest.mark.usefixtures("instant", "tiny")
def test_nsa_sel_bench_measures_both_matrices(tmp_path: Path) -> None:
    result = bench(tmp_path, "--quick")
    assert result.exit_code == 0, result.output
    assert {file.name for file in tmp_path.iterdir()} == {"rows.jsonl", "dense.csv", "decode.csv", "report.md"}
    assert {row["direction"] for row in store.read(tmp_path / "rows.jsonl")} == {"fwd", "bwd", "decode"}
    suites = bench(tmp_path, "--quick", "--suite", "performance", "--only", "tiny", "--backends", "sdpa-packed")
    assert suites.exit_code == 0, suites.output
    assert [row["direction"] for row in store.read(tmp_path / "suites.jsonl")] == ["fwd", "bwd", "fwd+bwd"]
    for arguments, words in ((("--suite", "performance"), "pass --quick"), (("--suite", "speed"), "--suite is speed")):
        refused = bench(tmp_path, *arguments)
        assert refused.exit_code == 2
        assert isinstance(refused.exception, SystemExit)
        assert words in refused.output


def test_flags_that_a_measurement_does_not_use_are_refused(tmp_path: Path) -> None:
    for decode in (("--decode",), ("--decode", 1)):
        unused = bench(tmp_path, *decode, "--dist", "few")
        assert (unused.exit_code, "--dist is 'few'; allowed: none with --decode" in unused.output) == (2, True)
    refused = bench(tmp_path, "--suite", "performance", "--quick", "--dist", "few", "--decode", 1)
    assert refused.exit_code == 2
    assert "--dist, --decode" in refused.output


@pytest.mark.usefixtures("instant")
def test_the_playbooks_commands_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The seeds' names: a CSV of one span a row, one of several, and the threshold with its report; on a CPU numba
    stands for Triton.
    """
    monkeypatch.chdir(tmp_path)
    sizes = ("--N", 8, "--H", 2, "--D", 16, "--Dv", 8, "--L_list", "16,64", "--iters", 5, "--warmup", 1, "--streams", 1)
    for dist, file in (("few", "dense.csv"), ("many,mixed", "varlen.csv")):
        assert script(monkeypatch, *sizes, "--dist", dist, "--csv", file) == 0
    assert script(monkeypatch, *sizes[:-8], "--L_list", 64, "--iters", 5, "--decode", 1, "--csv", "decode.csv") == 0
    assert [len(from_csv(Path(name))) for name in ("dense.csv", "varlen.csv", "decode.csv")] == [8, 16, 2]
    assert {row["distribution"] for row in from_csv(Path("varlen.csv"))} == {"many", "mixed"}
    capsys.readouterr()
    asked = ("--dense", "dense.csv", "--varlen", "varlen.csv", "--margin", "1.2", "--out", "selection_report.md")
    for backend, code in ((("--backend", "numba"), 0), ((), 2)):
        monkeypatch.setattr(sys, "argv", ["sel_threshold_from_csv.py", *asked, *backend])
        with pytest.raises(SystemExit) as ended:
            sel_threshold_from_csv.program(sel_threshold_from_csv.main)
        assert int(ended.value.code or 0) == code
    assert "measure on a GPU: nsa-sel bench" in capsys.readouterr().err  # Triton is not timed on a CPU
    text = Path("selection_report.md").read_text()
    assert "# From which L numba pays" in text
    shown = [table_lines(part) for part in text.split("\n\n") if part.startswith("|")]
    assert [[(row["direction"], row["L"], row["cases"]) for row in part] for part in shown[1:]] == [
        [(way, L, cases) for L in ("16", "64")] for cases in "12" for way in ("fwd", "bwd")
    ]
