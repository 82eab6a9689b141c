"""From rows to sel_triton_min_L: the rule on synthetic rows, the scripts that apply it, and what they write."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from nsa_sel.bench import sel_threshold_from_csv, threshold_optimizer
from nsa_sel.bench.core import cases, matrix, store
from nsa_sel.bench.core.matrix import from_csv, to_csv
from nsa_sel.bench.core.store import CPU_ROWS
from nsa_sel.bench.threshold_optimizer import decided, profile, sentence, thresholds
from nsa_sel.cli.app import app
from nsa_sel.errors import ArgumentError
from nsa_sel.settings.config import parse_config
from tests.helpers.files import ROOT, table_lines

FACTS = {"device": "a GPU", "driver": "1", "torch": "2", "triton": "3", "commit": "1102207", "command": "nsa-sel bench"}
Times = dict[int, tuple[float, float]]  # L -> ms of Triton and of packed SDPA


def rows_of(times: Times, spread: float = 0.01, dist: str = "few", direction: str = "fwd", **more: Any) -> Iterator[dict[str, Any]]:
    """Both sides of one case a length, percentiles `spread` to either side of the median."""
    for L, both in times.items():
        case = cases.span_case(dist, 64, 4, 64, 64, L)
        for backend, ms in zip(("triton-group", "sdpa-packed"), both, strict=True):
            found = {"ms_median": ms, "ms_p20": ms * (1 - spread), "ms_p80": ms * (1 + spread), "ms_ci_low": ms, "ms_ci_high": ms}
            yield {**case._asdict(), "direction": direction, "backend": backend, **found, "calls": 50, "mae": 1e-4, **FACTS, **more}


def only(rows: Any, **options: Any) -> threshold_optimizer.Threshold:
    (found,) = thresholds(rows, **options)
    return found


def test_the_margin_must_hold_at_every_longer_length() -> None:
    found = only(rows_of({16: (1, 9), 64: (1, 1.1), 256: (1, 1.3), 1024: (1, 9)}))
    assert (found.length, found.undecided) == (256, ())
    assert (found.closest.length, found.closest.sure_gain) == (256, pytest.approx(1.3 * 0.99 / 1.01))
    assert found.slowest.gain == 1.3
    assert "at least 1.2x faster than sdpa-packed in every case from L = 256; closest there, few-N64-H4-D64-Dv64-L256" in sentence(found)


def test_a_single_case_at_a_length_is_enough_to_forbid_it() -> None:
    times: Times = {64: (1, 2), 256: (1, 2), 1024: (1, 2)}
    assert only(rows_of(times)).length == 64
    assert only([*rows_of(times), *rows_of({256: (1, 1.19)}, dist="mixed")]).length == 1024
    assert only([*rows_of(times), *rows_of({1024: (2, 1)}, dist="mixed")]).length is None


def test_overlapping_spreads_are_undecided() -> None:
    noisy = only([*rows_of({16: (1, 1), 64: (1, 1.3)}, spread=0.2), *rows_of({256: (1, 1.3)})])
    assert (noisy.length, noisy.undecided) == (256, (64,))
    assert "undecided at L = 64" in sentence(noisy)
    alone = only(rows_of({64: (1, 1.3), 256: (1, 1.3)}, spread=0.2))
    assert (alone.length, alone.undecided, alone.slowest) == (None, (64, 256), None)
    assert "undecided, the spreads allow less than 1.2x where the medians reach it" in sentence(alone)
    never = only(rows_of({64: (1, 1.1), 256: (1, 1.1)}))
    assert (never.length, never.undecided) == (None, ())
    assert "is never 1.2x faster than sdpa-packed up to L = 256" in sentence(never)


def test_directions_are_apart_and_only_comparable_rows_count() -> None:
    rows = [
        *rows_of({64: (1, 2)}),
        *rows_of({64: (2, 1), 256: (1, 2)}, direction="bwd"),
        *rows_of({16: (9, 1)}, streams=4),
        *({**row, "error": "out of memory", "ms_median": None} for row in rows_of({1024: (9, 1)})),
        *({**row, "case": "random-8k-h4", "distribution": "random"} for row in rows_of({1024: (9, 1)})),
        *itertools.islice(rows_of({512: (9, 1)}), 1),  # one side alone
    ]
    assert [(found.direction, found.length, found.lengths) for found in thresholds(rows)] == [("fwd", 64, [64]), ("bwd", 256, [64, 256])]
    assert only([*rows_of({64: (9, 1)}), *rows_of({64: (1, 2)})]).length == 64  # measured again: the later one counts


def test_a_profile_sets_what_is_decided() -> None:
    rows = [row for way in ("fwd", "bwd", "decode") for row in rows_of({64: (1, 2)}, direction=way)]
    alike = profile(rows, decided(rows), "rows.jsonl")
    assert parse_config(alike.encode(), "a profile").runtime.sel_triton_min_L == {"forward": 64, "backward": 64, "decode": 64}
    for word in ("triton-group 1 ms (0.99 to 1.01) against sdpa-packed 2 ms (1.98 to 2.02)", "rows.jsonl", "a GPU", "commit 1102207"):
        assert word in yaml.safe_load(alike)["provenance"]
    some = [*rows, *rows_of({256: (1, 1)}, direction="bwd")]
    assert yaml.safe_load(profile(some, decided(some), ""))["runtime"] == {"sel_triton_min_L": {"forward": 64, "decode": 64}}
    nothing = list(rows_of({64: (1, 1)}))
    assert yaml.safe_load(profile(nothing, decided(nothing), ""))["runtime"] == {}


# Files


def test_csv_keeps_the_rows(tmp_path: Path) -> None:
    rows = [*rows_of({64: (1, 2)}), {**next(rows_of({256: (1, 2)})), "error": "out of memory", "quick": True}]
    del rows[-1]["ms_median"]
    (tmp_path / "rows.csv").write_text(to_csv(rows))
    read = from_csv(tmp_path / "rows.csv")
    assert read == rows  # a commit of digits and a driver stay text
    assert to_csv(read) == to_csv(rows)
    triton, packed, gone = matrix.with_derived(rows)
    assert (triton["L"], triton["speedup"], packed["speedup"], gone["speedup"]) == (64, 2.0, 1.0, None)
    assert triton["bytes"] == 2 * 64 * (64 * 128 + 4 * 128)  # 64 rows: 64 keys and values each, and q and o of 4 heads
    assert triton["gb_s"] == pytest.approx(triton["bytes"] / 1e6)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ArgumentError, match="without backend, block, case"):
        from_csv(tmp_path / "other.csv")
    (tmp_path / "other.csv").write_bytes(b"a,b\n\xff,2\n")
    with pytest.raises(ArgumentError, match=r"other\.csv .*invalid start byte.* measure again"):
        from_csv(tmp_path / "other.csv")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """rows.jsonl and the CSV files of a matrix."""
    dense = rows_of({64: (1, 1.1), 256: (1, 3)})
    varlen = [*rows_of({64: (1, 2), 256: (1, 4)}, dist="mixed"), *rows_of({64: (1, 2)}, dist="many")]
    store.append(tmp_path / "rows.jsonl", [*dense, *varlen])
    matrix.write(tmp_path, tmp_path)
    return tmp_path


def test_command_line_gives_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["threshold", *map(str, arguments)])

    report, config = folder / "report.md", folder / "min_l.yaml"
    for files in (("rows.jsonl",), ("dense.csv", "varlen.csv")):
        result = ask(*(folder / file for file in files), "--out", report, "--config", config)
        assert result.exit_code == 0, result.output
        assert "fwd: triton-group at least 1.2x faster than sdpa-packed in every case from L = 256" in result.output
        text = report.read_text()
        assert "**`sel_triton_min_L`, fwd: 256.**" in text
        (verdict,), dense, varlen = (table_lines(table) for table in text.split("\n\n") if table.startswith("|"))
        shown = ("direction", "min L", "undecided L", "cases", "least gain from there on")
        assert [verdict[name] for name in shown] == ["fwd", "256", "-", "5", "3.00x"]
        assert [(row["L"], row["cases"], row["least gain"], row["runs"]) for row in dense] == [
            ("64", "1", "1.10x", "packed"),
            ("256", "1", "3.00x", "Triton"),
        ]
        assert [(row["L"], row["cases"]) for row in varlen] == [("64", "2"), ("256", "1")]
        assert yaml.safe_load(config.read_text())["runtime"] == {"sel_triton_min_L": {"forward": 256}}
    assert "from L = 64, the least measured" in ask(folder / "rows.jsonl", "--margin", 1.05, "--out", report).output
    before = sorted(folder.iterdir())
    monkeypatch.chdir(folder)
    assert "written" not in ask("rows.jsonl").output
    sel_threshold_from_csv.main(Path("dense.csv"), Path("varlen.csv"), margin=1.2, backend="triton-group")
    assert sorted(folder.iterdir()) == before, "nothing is written unless told"
    for option in ("--out", "--config"):
        refused = ask(folder / "rows.jsonl", "--out", report, option, "/dev/null")
        assert refused.exit_code == 2
        assert f"{option} is /dev/null, a device; allowed: a regular file" in refused.output
    for bad, words in ((folder / "none.jsonl", "No such file"), (ROOT / CPU_ROWS, "measure on a GPU")):
        result = ask(bad, "--out", report)
        assert result.exit_code == 2
        assert isinstance(result.exception, SystemExit)
        assert words in result.output
