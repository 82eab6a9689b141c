"""`nsa-sel report ROWS... --out FOLDER`: what measured rows say, as Markdown and PNGs.

`python -m nsa_sel.bench.report.report` writes docs/report/ from the committed rows of the H200. Every figure comes from the modules
that derive the documents' tables and the profiles: summary.py, regret.py, derive.py, roofline.py, and the policy itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nsa_sel.bench.core import store
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import DENSE, PACKED
from nsa_sel.bench.core.environment import ROOT
from nsa_sel.bench.core.markdown import MARK_NOTE
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.report.document import Panel, Section, Table, document, image_name, table_of_texts
from nsa_sel.bench.report.figures import DARK, LIGHT, png
from nsa_sel.bench.report.policy import decision_map, device_of, regrets, thresholds
from nsa_sel.bench.report.roofline import PEAKS
from nsa_sel.bench.report.speed import faster_in, pays_from, roof, speedup, times, verdict
from nsa_sel.bench.report.summary import OURS, ours_in
from nsa_sel.bench.threshold_optimizer import of_matrix
from nsa_sel.bench.tune.committed_rows import H200_ROWS
from nsa_sel.bench.tune.derive import length_rows
from nsa_sel.cli.output import output_file, output_folder, regular
from nsa_sel.errors import ArgumentError

REPORT = "docs/report"  # of the committed rows
DOCUMENT = "selection_report.md"
FIRST = ("speedup", "regret", "decision-map")  # panels whose pictures come first
NEEDED = (*Case._fields, "direction", "backend", "ms_median", "ms_p20", "ms_p80")
ENVIRONMENT = ("device", "driver", "torch", "triton", "commit", "command")


class Rows(NamedTuple):
    """What the files hold."""

    rows: list[Row]  # in the order of the files, each with its `file`
    left_out: int  # rows without a time, or of another bench


class Report(NamedTuple):
    """All that is written, before it is written."""

    title: str
    notes: list[str]
    sections: list[Section]
    facts: Table

    def document(self) -> str:
        return document(*self)

    def pictures(self) -> list[tuple[str, str, Panel]]:
        """The file name without its ending, and the device, of each panel with a figure."""
        return [
            (image_name(self.sections, section, panel), section.device, panel)
            for section in self.sections
            for panel in section.panels
            if panel.figure
        ]


def read(files: Sequence[Path]) -> Rows:
    """The measured rows of JSON-lines files. Raises ArgumentError for a line that is not JSON, and without any row."""
    names = [
        file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name for file in files
    ]  # committed files may share one
    every = [{**row, "file": name} for file, name in zip(files, names, strict=True) for row in store.read(file)]
    rows = [row for row in every if all(row.get(field) is not None for field in NEEDED)]
    if not rows:
        held = f"{', '.join(map(str, files))} (no measured row, {len(every)} left out)"
        remedy = "measure some: python -m nsa_sel.bench.questions.speed --out rows.jsonl"
        raise ArgumentError("ROWS", held, "files with measured rows", remedy)
    return Rows(rows, len(every) - len(rows))


def report(found: Rows) -> Report:
    """The report of some rows, a section a device."""
    devices: dict[str, list[Row]] = {}
    for row in found.rows:
        devices.setdefault(row.get("device") or "a device that the rows do not name", []).append(row)
    sections = []
    for device, rows in devices.items():
        sentences = faster_in(rows, DENSE), pays_from(rows), faster_in(rows, PACKED)
        sections.append(Section(device, sentences, FIRST, panels(device, rows)))
    files = ", ".join(dict.fromkeys(row["file"] for row in found.rows))
    notes = [
        f"Times are medians of whole calls, plans included. “Ours” is the fastest of {', '.join(ours_in(found.rows) or OURS)} in each case"
        f" and direction. Dense is full causal attention ({DENSE}), what a user has without selection; packed ({PACKED}) computes the same"
        " as ours with PyTorch alone. A factor below 1x means that the other one is faster.",
        MARK_NOTE,
        f"{len(found.rows)} rows from {files}; {found.left_out} without a time are left out.",
    ]
    return Report(f"Selection attention measured on {' and '.join(devices)}", notes, sections, _facts(found))


def panels(name: str, rows: list[Row]) -> tuple[Panel, ...]:
    """All panels of one device. The matrix of bench_sel_triton speaks for the thresholds; alone, for all."""
    device, suites = device_of(name), [row for row in rows if not of_matrix(row)] or rows
    policy = decision_map(name, device), regrets(name, device, suites), thresholds(device, rows)
    return verdict(suites), speedup(suites), times(suites), roof(suites, PEAKS.get(name)), *policy


def _facts(found: Rows) -> Table:
    """Where rows come from."""
    environments = Counter(tuple(str(row.get(field) or "-") for field in (*ENVIRONMENT, "file")) for row in found.rows)
    lines = [(count, *values) for values, count in environments.items()]
    return Table("Environments", table_of_texts(["rows", *ENVIRONMENT, "file"], lines, 8))


def write(files: Sequence[Path], out: Path) -> dict[str, Any]:
    """Write Markdown and PNGs into the folder `out`; what was written and read. Raises ArgumentError."""
    names = [DOCUMENT]
    text_file = output_file("--out", output_folder("--out", out) / DOCUMENT)
    found = read(files)
    made = report(found)
    try:
        text_file.write_text(made.document())
        for name, device, panel in made.pictures():
            for ending, theme in (("", LIGHT), ("-dark", DARK)):
                names.append(f"{name}{ending}.png")
                assert panel.figure is not None
                png(panel.figure, theme, regular("--out", out / names[-1]), title=f"{panel.title} ({device})")
    except OSError as error:
        raise ArgumentError("--out", f"{out} ({error.strerror})", "a folder that can be written", "choose another") from error
    missing = {panel.name: panel.missing for section in made.sections for panel in section.panels if panel.missing}
    return {"out": str(out), "files": names, "rows": len(found.rows), "left_out": found.left_out, "missing": missing}


def committed_rows() -> list[Path]:
    """The files of docs/report/: the suites of the H200, and all others that its thresholds come from."""
    return [ROOT / name for name in dict.fromkeys((H200_ROWS, *length_rows()))]


def text(written: dict[str, Any]) -> str:
    """What `write` did, in words."""
    lines = [f"{written['rows']} rows read, {written['left_out']} without a time left out"]
    lines += [f"{name}: {reason}" for name, reason in written["missing"].items()]
    if not any(name.endswith(".png") for name in written["files"]):
        lines.append("no figure, and so no PNG: figures are of the cases of the suites, which need a GPU")
    return "\n".join([*lines, f"written to {written['out']}: {', '.join(written['files'])}"])


if __name__ == "__main__":
    print(text(write(committed_rows(), ROOT / REPORT)))
