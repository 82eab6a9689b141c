"""The report: derived from the committed rows, figures or reasons in every panel, and the numbers of the rows."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.contenders import DENSE, PACKED
from nsa_sel.bench.core.environment import ROOT
from nsa_sel.bench.core.markdown import factor
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.report import document, report
from nsa_sel.bench.report.policy import MAPS, picks
from nsa_sel.bench.report.summary import indexed, performance_table, speed_up
from nsa_sel.bench.tune import regret
from nsa_sel.bench.tune.committed_rows import H200_ROWS, read_rows
from nsa_sel.cli.app import app
from nsa_sel.core import registry
from nsa_sel.errors import ArgumentError
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.devices import GPUS

FOLDER = ROOT / report.REPORT
FIGURES = ("speedup", "decision-map", "regret", "thresholds")
PANELS = ("verdict", "speedup", "times", "roofline", *FIGURES[1:])


@cache
def committed() -> report.Report:
    """The report of the committed rows: made once."""
    return report.report(report.read(report.committed_rows()))


@cache
def committed_text() -> str:
    return (FOLDER / report.DOCUMENT).read_text()


def cells(text: str) -> list[tuple[str, ...]]:
    """The lines of all tables of a document."""
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines() if line.startswith("|")]


# The committed report


def test_every_panel_has_its_figure_or_its_table() -> None:
    (section,) = committed().sections
    assert section.device == "NVIDIA H200"
    assert tuple(panel.name for panel in section.panels) == PANELS
    for panel in section.panels:
        assert not panel.missing
        assert (panel.figure is not None) == (panel.name in FIGURES)
        assert panel.tables
        assert committed_text().count(f"## {panel.title}\n") == 1


def test_the_committed_report_is_derived_from_the_rows() -> None:
    """The text whole; pictures differ with the version of matplotlib: each is there, and in the text once."""
    assert committed_text() == committed().document(), "run make report"
    images, of_readme = ([f"{name}{ending}.png" for name in names for ending in ("", "-dark")] for names in (FIGURES, ("layer",)))
    assert {file.name for file in FOLDER.iterdir()} == {report.DOCUMENT, *images, *of_readme}
    assert sorted(re.findall(r'(?:src|srcset)="(.*?)"', committed_text())) == sorted(images)


def test_three_sentences_and_three_pictures_come_first() -> None:
    opening = committed_text()[: committed_text().index("\n## ")]
    assert len(re.findall(r"^- .*\.$", opening, re.MULTILINE)) == 3
    assert re.findall(r'src="(.*?)"', opening) == [f"{name}.png" for name in report.FIRST]
    assert all(len(alt) > 20 for alt in re.findall(r'alt="(.*?)"', committed_text()))


def test_numbers_are_those_of_the_rows() -> None:
    lines, rows = cells(committed_text()), read_rows(H200_ROWS)
    gains = [gain for found in indexed(report.read(report.committed_rows()).rows).values() if (gain := speed_up(found)) is not None]
    assert f"faster than dense attention in {sum(gain > 1 for gain in gains)} of {len(gains)} measured pairs" in committed_text()
    (curve,) = (line for line in lines if line[:3] == ("fwd+bwd", "real", "1"))
    assert curve[-1].endswith(f"8k {factor(speed_up(indexed(rows)['real-8k-h1', 'fwd+bwd']))}")
    assert set(cells(performance_table(rows))) <= set(lines)
    settings = settings_for(GPUS["h200"])
    cost_rows = [row for row in rows if row["backend"] != DENSE and row["direction"] != "fwd+bwd"]
    assert regret.summary(regret.choices(cost_rows, settings, "counted")) in committed_text()


def test_the_map_is_the_policys(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the RTX 4090 the ADR leaves packed SDPA alone; on the H200 the drawing says what `nsa-sel explain` says where all is installed."""
    monkeypatch.setattr(registry, "missing", lambda name: ())
    assert {name for chart in MAPS for line in picks(GPUS["rtx4090"], chart) for name in line} == {"sdpa-packed"}
    answer = CliRunner().invoke(app, ["explain", "--device", "h200", "--S", "8192", "--h", "16", "--needs-grad", "--json"])
    decision = json.loads(answer.stdout)
    for chart, direction in zip(MAPS[:2], ("forward", "backward"), strict=True):
        assert picks(GPUS["h200"], chart)[4][3] == decision[direction]


# Rows of others


def row(case: cases.Case, direction: str, backend: str, ms: float, **more: Any) -> Row:
    times = {"ms_median": ms, "ms_p20": ms * 0.99, "ms_p80": ms * 1.01}
    return {**case._asdict(), "direction": direction, "backend": backend, **times, "device": "a new GPU", "torch": "2.11", **more}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def write(file: Path, *lines: Row | str) -> Path:
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_lines_without_a_measurement_are_counted(file: Path) -> None:
    good = row(cases.prefill("random", 8192, 16), "fwd", "triton-tile", 1.0)
    bad = [{**good, "error": "OutOfMemoryError: no memory", "ms_median": None}, {"case": "other", "ms_median": 1.0}]
    found = report.read([write(file, good, "", *bad)])
    assert ([entry["ms_median"] for entry in found.rows], found.left_out) == ([1.0], 2)
    assert "1 rows from rows.jsonl; 2 without a time are left out." in report.report(found).document()


def test_a_panel_without_partners_says_so(file: Path) -> None:
    """Rows of one backend: nothing to compare with, and a device that nobody knows; every panel but two gives its reason."""
    some = [row(case, "fwd", "triton-tile", 1.0) for case in (cases.prefill("random", 8192, 16), cases.threshold_cases()[0])]
    (section,) = report.report(report.read([write(file, *some)])).sections
    assert [panel.name for panel in section.panels if not panel.missing] == ["times", "roofline"]
    assert all(panel.missing.count(".") >= 1 and panel.figure is None for panel in section.panels if panel.missing)
    roof = section.panels[PANELS.index("roofline")]
    assert "left out" in roof.text
    assert "of the roof" not in roof.tables[0].text


def test_files_add_up(file: Path, tmp_path: Path) -> None:
    case, out = cases.prefill("random", 8192, 16), tmp_path / "out"
    first = write(file, row(case, "fwd", "triton-tile", 1.0), row(case, "fwd", DENSE, 3.0))
    second = write(tmp_path / "more.jsonl", row(case, "fwd", PACKED, 40.0), row(case, "bwd", "triton-tile", 2.0) | {"ms_median": None})
    answer = CliRunner().invoke(app, ["report", str(first), str(second), "--out", str(out), "--json"])
    written = json.loads(answer.stdout)
    assert (written["rows"], written["left_out"]) == (3, 1)
    assert [name for name in written["files"] if name.endswith(".png")] == ["speedup.png", "speedup-dark.png"]
    assert all((out / name).stat().st_size for name in written["files"])
    text = (out / report.DOCUMENT).read_text()
    assert all(f"faster than {other} in 1 of 1 measured pairs" in text for other in ("dense attention", "packed SDPA"))
    assert ("fwd", "random", "16", "below 8k", "8k 3.00x") in cells(text)


def test_rows_of_a_cpu(file: Path, tmp_path: Path) -> None:
    """numba is ours too; what has no partner is said, and that there is no figure."""
    case = cases.span_case("few", 64, 4, 64, 64, 64, "float32")
    write(
        file, row(case, "fwd", "numba", 1.0), row(case, "fwd", PACKED, 4.0), row(case, "bwd", "numba", 3.0), row(case, "bwd", PACKED, 2.0)
    )
    answer = CliRunner().invoke(app, ["report", str(file), "--out", str(tmp_path / "out")])
    assert answer.exit_code == 0, answer.output
    assert "no figure, and so no PNG" in answer.output
    text = " ".join((tmp_path / "out" / report.DOCUMENT).read_text().split())
    assert "“Ours” is the fastest of numba in each case and direction" in text
    assert "Ours is faster than packed SDPA in 1 of 2 measured pairs of case and direction." in text
    assert "No case has rows of ours and of dense attention." in text
    write(file, row(case, "fwd", PACKED, 4.0))
    (section,) = report.report(report.read([file])).sections
    assert [sentence.startswith("No case has rows of ours") for sentence in section.sentences] == [True, False, True]


def test_two_devices_have_their_own_panels(file: Path) -> None:
    case = cases.prefill("random", 8192, 16)
    lines = [row(case, "fwd", backend, ms * factor, device=device) for device, factor in (("one", 1.0), ("two", 2.0))
             for backend, ms in (("triton-tile", 1.0), (DENSE, 4.0 / factor))]  # fmt: skip
    made = report.report(report.read([write(file, *lines)]))
    assert [section.device for section in made.sections] == ["one", "two"]
    assert [name for name, _, _ in made.pictures()] == ["speedup", "speedup-2"]
    assert {("fwd", "random", "16", "below 8k", f"8k {gain}.00x") for gain in (4, 2)} <= set(cells(made.document()))


@pytest.mark.parametrize(("lines", "words"), [(["{not JSON", "{}"], "line 1 of"), ([], "Remedy: measure some"), (None, "No such file")])
def test_mistakes_are_explained(file: Path, lines: list[Row | str] | None, words: str) -> None:
    if lines is not None:
        write(file, *lines)
    result = CliRunner().invoke(app, ["report", str(file), "--out", str(file.parent / "out")])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    with pytest.raises(ArgumentError):
        report.write([file], file.parent / "out")


def test_text_of_rows_cannot_become_markup() -> None:
    table = document.table_of_texts(["head"], [["<script>alert(1)</script>"], ["a | b\nc <br>"]], 1)
    assert "<" not in table
    assert table.splitlines()[-1].split() == ["|", "a", "\\|", "b", "c", "&lt;br&gt;", "|"]
