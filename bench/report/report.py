"""`nsa-sel report ROWS... --out FOLDER`: what measured rows say, as Markdown and PNGs.

`python -m nsa_sel.bench.report.report` writes docs/report/ from the committed rows of the H200. Every figure comes from the modules
that derive the documents' tables and the profiles: summary.py, regret.py, derive.py, roofline.py, and the policy itself.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import DENSE, PACKED
from nsa_sel.bench.core.environment import ROOT
from nsa_sel.bench.core.markdown import MARK_NOTE
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.report.document import Panel, Section, Table, document, image_name, table_of_texts
from nsa_sel.bench.report.figures import DARK, LIGHT, png
from nsa_sel.bench.report.policy import decision_map, device_of, regrets, thresholds
from nsa_sel.bench.report.roofline import PEAKS, Peaks
from nsa_sel.bench.report.speed import breakeven, faster_in, pays_from, roof, speedup_by_L, speedup_by_S, times, verdict
from nsa_sel.bench.report.summary import OURS, ours_in
from nsa_sel.bench.threshold_optimizer import of_matrix
from nsa_sel.bench.tune.committed_rows import H200_ROWS
from nsa_sel.bench.tune.derive import length_rows
from nsa_sel.cli.output import output_file, output_folder, regular
from nsa_sel.errors import ArgumentError

REPORT = "docs/report"  # of the committed rows
DOCUMENT = "selection_report.md"
FIRST = ("speedup", "break-even", "decision-map")  # panels whose pictures come first
NEEDED = (*Case._fields, "direction", "backend", "ms_p20", "ms_p80")
ENVIRONMENT = ("device", "driver", "torch", "triton", "commit", "command")


class LeftOut(NamedTuple):
    """A line that holds no measurement."""

    file: str
    line: int
    reason: str
    words: str  # the row's own about it


class Rows(NamedTuple):
    """What the files hold."""

    rows: list[Row]  # in the order of the files, each with its `file`
    left_out: list[LeftOut]


class Report(NamedTuple):
    """All that is written, before it is written."""

    title: str
    notes: list[str]
    sections: list[Section]
    facts: list[Table]

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
    """The measured rows of JSON-lines files; a line that is none is counted with its reason. Raises ArgumentError without any row."""
    rows: list[Row] = []
    left_out = []
    for file in files:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError("ROWS", f"{file} ({error})", "readable files of JSON lines", "mend the path") from error
        name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name  # committed files may share a name
        for number, line in enumerate(lines, 1):
            if line.strip():
                row, reason, words = _row(line)
                if row is None:
                    left_out.append(LeftOut(file.name, number, reason, words))
                else:
                    rows.append({**row, "file": name})
    if not rows:
        why = f", {_lines(left_out)} left out: {_counted(left.reason for left in left_out)}" if left_out else ""
        remedy = "measure some: python -m nsa_sel.bench.questions.speed --out rows.jsonl"
        raise ArgumentError("ROWS", f"{', '.join(map(str, files))} (no measured row{why})", "files with measured rows", remedy)
    return Rows(rows, left_out)


def _row(line: str) -> tuple[Row | None, str, str]:
    """The row, or None with the reason and what the line says about it."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return None, "not JSON", str(error)
    if not isinstance(row, dict):
        return None, "not an object", line[:60]
    name = " ".join(str(row[field]) for field in ("case", "direction", "backend") if field in row)
    if row.get("error"):
        return None, "an error", f"{name}: {row['error']}"
    missing = [field for field in ("ms_median", *NEEDED) if row.get(field) is None]
    if "ms_median" in missing:
        return None, "no ms_median", name
    if missing:
        return None, "not of this schema", f"{name}, without {', '.join(missing)}".lstrip(", ")
    times = [row[field] for field in ("ms_median", "ms_p20", "ms_p80")]
    if not all(isinstance(ms, int | float) and math.isfinite(ms) and ms > 0 for ms in times):
        return None, "no ms_median", f"{name}: {times}"
    return row, "", ""


def _counted(reasons: Iterable[str]) -> str:
    counts = Counter(reasons).items()
    return ", ".join(f"{count} with {reason}" if reason == "an error" else f"{count} {reason}" for reason, count in counts)


def _lines(left_out: Sequence[Any]) -> str:
    return f"{len(left_out)} line{'s' * (len(left_out) != 1)}"


def report(found: Rows, peaks: Peaks | None = None) -> Report:
    """The report of some rows, a section a device. `peaks`: of the devices; by default those on record."""
    devices: dict[str, list[Row]] = {}
    for row in found.rows:
        devices.setdefault(row.get("device") or "a device that the rows do not name", []).append(row)
    sections = []
    for device, rows in devices.items():
        sentences = faster_in(rows, DENSE), pays_from(rows), faster_in(rows, PACKED)
        sections.append(Section(device, sentences, FIRST, panels(device, rows, peaks or PEAKS.get(device))))
    files = ", ".join(dict.fromkeys(row["file"] for row in found.rows))
    reasons = f": {_counted(left.reason for left in found.left_out)}" if found.left_out else ""
    notes = [
        f"Times are medians of whole calls, plans included. “Ours” is the fastest of {', '.join(ours_in(found.rows) or OURS)} in each case"
        f" and direction. Dense is full causal attention ({DENSE}), what a user has without selection; packed ({PACKED}) computes the same"
        " as ours with PyTorch alone. A factor below 1x means that the other one is faster.",
        MARK_NOTE,
        f"{len(found.rows)} rows from {files}; {_lines(found.left_out)} left out{reasons}.",
    ]
    return Report(f"Selection attention measured on {' and '.join(devices)}", notes, sections, _facts(found))


def panels(name: str, rows: list[Row], peaks: Peaks | None) -> tuple[Panel, ...]:
    """All panels of one device. The matrix of bench_sel_triton speaks for the thresholds; alone, for all."""
    device, suites = device_of(name), [row for row in rows if not of_matrix(row)] or rows
    speed = verdict(suites), *(speedup_by_S(suites, over) for over in (DENSE, PACKED)), speedup_by_L(suites), breakeven(suites)
    policy = decision_map(name, device), regrets(name, device, suites), thresholds(device, rows)
    return (*speed, roof(suites, peaks), times(suites), *policy)


def _facts(found: Rows) -> list[Table]:
    """Where rows come from, whose they are, and what was left out."""
    environments = Counter(tuple(str(row.get(field) or "-") for field in (*ENVIRONMENT, "file")) for row in found.rows)
    backends = Counter(row["backend"] for row in found.rows)
    shown = (*OURS, DENSE, PACKED)
    uses = [(name, count, "all panels" if name in shown else "regret alone, where it has a cost model") for name, count in backends.items()]
    lines = [(count, *values) for values, count in environments.items()]
    facts = [
        Table("Environments", table_of_texts(["rows", *ENVIRONMENT, "file"], lines, 8)),
        Table("Rows by backend", table_of_texts(["backend", "rows", "shown in"], uses, 1)),
    ]
    if found.left_out:
        facts.append(Table("Lines left out", table_of_texts(["file", "line", "reason", "what it says"], found.left_out, 4)))
    return facts


def write(files: Sequence[Path], out: Path, copy_tbs: float | None = None, matmul_tflops: float | None = None) -> dict[str, Any]:
    """Write Markdown and PNGs into the folder `out`; what was written and read. Raises ArgumentError."""
    if (copy_tbs is None) != (matmul_tflops is None):
        given = "--copy-tbs" if matmul_tflops is None else "--matmul-tflops"
        raise ArgumentError(given, copy_tbs or matmul_tflops, "both peaks or none", "pass the other peak of the device too")
    peaks = Peaks(copy_tbs, matmul_tflops, "given with the command") if copy_tbs and matmul_tflops else None
    names = [DOCUMENT]
    text_file = output_file("--out", output_folder("--out", out) / DOCUMENT)
    found = read(files)
    made = report(found, peaks)
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
    left_out = [left._asdict() for left in found.left_out]
    return {"out": str(out), "files": names, "rows": len(found.rows), "left_out": left_out, "missing": missing}


def committed_rows() -> list[Path]:
    """The files of docs/report/: the suites of the H200, and all others that its thresholds come from."""
    return [ROOT / name for name in dict.fromkeys((H200_ROWS, *length_rows()))]


def text(written: dict[str, Any]) -> str:
    """What `write` did, in words."""
    lines = [f"{written['rows']} rows read, {_lines(written['left_out'])} left out"]
    lines += [f"  {left['file']} line {left['line']}, {left['reason']}: {left['words']}" for left in written["left_out"]]
    lines += [f"{name}: {reason}" for name, reason in written["missing"].items()]
    if not any(name.endswith(".png") for name in written["files"]):
        lines.append("no figure, and so no PNG: figures are of the cases of the suites, which need a GPU")
    return "\n".join([*lines, f"written to {written['out']}: {', '.join(written['files'])}"])


if __name__ == "__main__":
    print(text(write(committed_rows(), ROOT / REPORT)))
