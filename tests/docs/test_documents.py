"""The documents are true: their code runs, what they name exists, and their tables say what the code and the profiles say."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import nsa_sel
from nsa_sel.core import registry
from nsa_sel.core.decision import load_policy, make_decision
from nsa_sel.core.request import DeviceInfo
from nsa_sel.settings.config import parse_config, settings_for, shipped_configs
from nsa_sel.settings.flags import CACHE_FLAG, CONFIG_FLAG, FLAGS, TEST_FLAG, parse_flag
from tests.helpers import policy_cases as gpus
from tests.helpers.files import ROOT

TEXTS = {
    file.relative_to(ROOT).as_posix(): file.read_text() for file in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
}
HISTORY = "CHANGELOG.md"  # names files and modules of the past
PROSE = {name: re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL) for name, text in TEXTS.items()}
FILE_ENDINGS = ("py", "yaml", "toml", "txt", "md", "json", "jsonl", "npz", "safetensors")
OURS = re.compile(r"https://(?:github|raw\.githubusercontent)\.com/nsa-sel/nsa-sel/(?:blob/)?main/")  # links of a package index's page
USAGE = {  # first column of the usage matrix -> what the policy is told
    **{"RTX 4090": gpus.RTX4090, "L40S": gpus.L40S, "A100": gpus.A100, "RTX 3090": gpus.RTX3090, "H100": gpus.H100, "H200": gpus.H200},
    **{"B200": gpus.B200, "RTX 5090": gpus.RTX5090, "unknown GPU": gpus.replace(gpus.UNKNOWN, sm=121), "CPU": gpus.CPU},
}


# Code


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXTS[document], flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder whose modules and entry points are seen as installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.backends.cache_clear()
    yield tmp_path
    registry.backends.cache_clear()
    registry.missing.cache_clear()


@pytest.mark.parametrize("document", [name for name, text in TEXTS.items() if "```python\n" in text])
def test_code_runs(document: str, packages: Path) -> None:
    """Blocks share one namespace. One that begins with `# name.py` is that module too; toml blocks declare its entry points."""
    for block in blocks(document, "toml"):
        info = packages / "documented-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: documented\nVersion: 1.0\n")
        groups = tomllib.loads(block)["project"]["entry-points"]
        (info / "entry_points.txt").write_text(
            "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups.items())
        )
    made = ModuleType("document")
    sys.modules[made.__name__] = made  # where torch.compile looks for the globals of a function
    for number, block in enumerate(blocks(document, "python"), 1):
        module = re.match(r"# (\w+\.py)\n", block)
        if module:
            (packages / module[1]).write_text(block)
        exec(compile(block, f"{document}, python block {number}", "exec"), made.__dict__)


@pytest.mark.gpu
def test_code_for_pytorch_runs_on_a_gpu(packages: Path) -> None:
    test_code_runs("docs/pytorch.md", packages)


def test_configuration_is_valid() -> None:
    found = [block for document in TEXTS for block in blocks(document, "yaml")]
    assert found
    for block in found:
        parse_config(block.encode(), "a document")


# Names and links


@pytest.mark.parametrize("document", sorted(TEXTS.keys() - {HISTORY}))
def test_files_and_links_exist(document: str) -> None:
    """In backticks: what has a file's ending, or ends with a slash; profiles by their bare names, too. In links: files and anchors."""
    quoted = re.findall(rf"`((?:[\w.-]+/)+|(?:[\w.-]+/)*[\w.-]+\.(?:{'|'.join(FILE_ENDINGS)}))`", PROSE[document])
    generated = {"build/docs/"}
    assert [name for name in quoted if not (ROOT / name).exists() and name not in shipped_configs() and name not in generated] == []
    links = re.findall(r"\]\(([^)\s]+)\)", PROSE[document])
    assert [link for link in links if not resolves(link, ROOT / document)] == []


def resolves(link: str, document: Path) -> bool:
    """Whether a link leads to a file, and to a heading of it; links to other sites are not followed."""
    target, _, anchor = link.partition("#")
    if OURS.match(target):
        file = ROOT / OURS.sub("", target)
    elif "://" in target:
        return True
    else:
        file = (document.parent / target).resolve() if target else document
    return file.exists() and (not anchor or anchor in anchors(file.read_text()))


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_works_on_a_package_index() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", PROSE["README.md"])
    assert [link for link in links if "://" not in link] == []
    assert len(TEXTS["README.md"].splitlines()) <= 150


def test_every_document_is_in_the_index() -> None:
    index = PROSE["docs/index.md"]
    assert [name for name in TEXTS if name != "docs/index.md" and f"({os.path.relpath(name, 'docs')})" not in index] == []


@pytest.mark.parametrize("document", sorted(TEXTS.keys() - {HISTORY}))
def test_commands_and_names_exist(document: str) -> None:
    modules = re.findall(r"python -m (nsa_sel[\w.]*|tests[\w.]*)", TEXTS[document])
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    targets = re.findall(r"(?:`|^)make ([\w-]+)", TEXTS[document], flags=re.MULTILINE)
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:")).split()
    assert set(targets) <= set(phony)
    for name in re.findall(r"\bnsa_sel(?:\.\w+)+", PROSE[document].replace("python -m ", "")):
        assert exists(name), name


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parent, _, last = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(parent), last) or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_events_are_those_of_the_code() -> None:
    sources = [file.read_text() for folder in ("nsa_sel", "backends") for file in (ROOT / folder).rglob("*.py")]
    emitted = {name for source in sources for name in re.findall(r'"(sel(?:\.[a-z]+)+)"', source)}
    assert {bare(row["event"]) for row in table("event", "when")} == emitted


def test_the_api_reference_has_every_public_name(tmp_path: Path) -> None:
    """`make docs` with this Python, and without CuPy, Triton and Numba."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules.update(dict.fromkeys(('cupy', 'triton', 'numba')))")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")))}
    here = [f"BIN={Path(sys.executable).parent}", "--old-file=.venv/.installed", f"DOCS={tmp_path}"]
    done = subprocess.run(["make", "docs", *here], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "nsa_sel.html").read_text()
    assert [name for name in nsa_sel.__all__ if f'id="{name}"' not in page] == []
    assert {file.stem for file in (tmp_path / "nsa_sel").rglob("*.html")} >= {"compat", "distributed", "errors"}


# Tables


def table(*headers: str) -> list[dict[str, str]]:
    """The rows of the one table of all documents that begins with these headers, by header."""
    pattern = rf"^\| {re.escape(' | '.join(headers))} \|.*\n(?:\|.*\n)+"
    found = [match for text in TEXTS.values() for match in re.findall(pattern, text, flags=re.MULTILINE)]
    assert len(found) == 1, f"{len(found)} tables begin with {headers}"
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in found[0].splitlines())
    assert lines
    return [dict(zip(head, line, strict=True)) for line in lines]


def bare(cell: str) -> str:
    return cell.strip("` ")


def names(cell: str) -> list[str]:
    """The comma-separated names of a cell."""
    return [bare(part) for part in cell.split(",")]


def test_flags_are_those_of_the_code() -> None:
    rows = {bare(row["flag"]): row for row in table("flag", "takes", "default")}
    assert list(rows) == [*(flag.name for flag in FLAGS), CONFIG_FLAG, CACHE_FLAG, TEST_FLAG]
    built_in = settings_for(gpus.TOO_OLD)
    for flag in FLAGS:
        default, value = bare(rows[flag.name]["default"]), getattr(built_in, flag.field)
        assert value == (None if default == "unset" else parse_flag(flag, default)), flag.name
        for text in re.findall(r"`(\w+)`", rows[flag.name]["takes"]):
            parse_flag(flag, text)


def test_usage_matrix_is_what_the_policy_picks() -> None:
    rows = {row["device"]: row for row in table("device", "SM", "profile")}
    assert list(rows) == list(USAGE)
    for name, device in USAGE.items():
        row, settings = rows[name], settings_for(device)
        assert row["SM"] == str(device.sm or "-")
        least, decoding = settings.min_length("forward"), settings.min_length("decode")
        assert settings.min_length("backward") == least
        assert (bare(row["profile"]), row["min-L"]) == (
            settings.profile,
            f"{least}, decoding {decoding}" if decoding != least else str(least),
        )
        assert pick(device, least - 1) == bare(row["L below it"]), name
        assert pick(device, least) == bare(row["L from it on"]), name
    off = settings_for(gpus.RTX4090).triton_off
    assert off is not None
    assert f"`{off.reopen}`" in TEXTS["PRD.md"]


def pick(device: DeviceInfo, length: int) -> str | None:
    """The winner of both directions where all packages are at hand, or that it depends on the request's predicted times."""
    request = gpus.replace(gpus.LONG, max_length=length, needs_grad=True)
    decision = make_decision(request, device, load_policy("default"), settings_for(device), gpus.OFFERS)
    if sum(prediction.direction == "forward" for prediction in decision.predictions) > 1:
        return "least predicted time"
    assert decision.forward == decision.backward
    return decision.forward
