"""The documents are true: their code runs, what they name exists, and their tables say what the code, the profiles and the rows say."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import yaml

from nsa_sel.backends.specs import SPECS
from nsa_sel.bench.tune.committed_rows import read_rows
from nsa_sel.core import registry
from nsa_sel.core.dispatch import load_policy, select
from nsa_sel.core.request import DeviceInfo
from nsa_sel.settings.config import (
    CACHE_FLAG,
    CONFIG_FLAG,
    FLAGS,
    TEST_FLAG,
    Runtime,
    parse_config,
    parse_flag,
    settings_for,
    shipped_configs,
)
from tests.core.test_layering import FLOORS
from tests.helpers.paths import ROOT
from tests.helpers.policy_cases import (
    A100,
    B200,
    CPU,
    H100,
    H200,
    L40S,
    LONG,
    OFFERS,
    RTX3090,
    RTX4090,
    RTX5090,
    TOO_OLD,
    UNKNOWN,
    replace,
)

DOCUMENTS = (
    *("README.md", "PRD.md", "CONTRIBUTING.md"),
    *(f"docs/{name}.md" for name in ("pytorch", "varlen", "compat", "serving", "training", "distributed")),
)
TEXTS = {name: (ROOT / name).read_text() for name in DOCUMENTS}
FILE_ENDINGS = ("py", "yaml", "toml", "txt", "md", "json", "jsonl", "npz", "safetensors")
USAGE = {  # first column of the usage matrix -> what the policy is told
    "RTX 4090": RTX4090,
    "L40S": L40S,
    "A100": A100,
    "RTX 3090": RTX3090,
    "H100": H100,
    "H200": H200,
    "B200": B200,
    "RTX 5090": RTX5090,
    "unknown GPU": replace(UNKNOWN, sm=121),
    "CPU": CPU,
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


@pytest.mark.parametrize("document", DOCUMENTS)
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
    code = blocks(document, "python")
    assert code
    for number, block in enumerate(code, 1):
        module = re.match(r"# (\w+\.py)\n", block)
        if module:
            (packages / module[1]).write_text(block)
        exec(compile(block, f"{document}, python block {number}", "exec"), made.__dict__)


@pytest.mark.gpu
def test_code_for_pytorch_runs_on_a_gpu(packages: Path) -> None:
    test_code_runs("docs/pytorch.md", packages)


def test_configuration_is_valid() -> None:
    found = [block for document in DOCUMENTS for block in blocks(document, "yaml")]
    assert found
    for block in found:
        parse_config(block.encode(), "a document")


# Names


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_exist(document: str) -> None:
    """In backticks: what has a file's ending, or ends with a slash; profiles go by their bare names too. In links: all local ones."""
    prose = re.sub(r"^```.*?^```$", "", TEXTS[document], flags=re.MULTILINE | re.DOTALL)
    quoted = re.findall(rf"`((?:[\w.-]+/)+|(?:[\w.-]+/)*[\w.-]+\.(?:{'|'.join(FILE_ENDINGS)}))`", prose)
    links = [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]
    assert quoted or links or document.startswith("docs/")
    assert [name for name in quoted if not (ROOT / name).exists() and name not in shipped_configs()] == []
    assert [name for name in links if not (ROOT / document).parent.joinpath(name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_exist(document: str) -> None:
    modules = re.findall(r"python -m ([\w.]+)", TEXTS[document])
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    targets = re.findall(r"(?:`|^)make ([\w-]+)", TEXTS[document], flags=re.MULTILINE)
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:")).split()
    assert set(targets) <= set(phony)


def test_events_are_those_of_the_code() -> None:
    sources = [file.read_text() for folder in ("nsa_sel", "backends") for file in (ROOT / folder).rglob("*.py")]
    emitted = {name for source in sources for name in re.findall(r'"(sel(?:\.[a-z]+)+)"', source)}
    assert {bare(row["event"]) for row in table("event", "when")} == emitted


def test_floors_are_those_of_the_layering_test() -> None:
    rows = table("floor", "modules of `nsa_sel`", document="CONTRIBUTING.md")
    assert [names(row["modules of `nsa_sel`"]) for row in rows[:-1]] == [list(floor) for floor in FLOORS]


# Tables of PRD.md


def table(*headers: str, document: str = "PRD.md") -> list[dict[str, str]]:
    """The rows of the one table that begins with these headers, by header."""
    found = re.findall(rf"^\| {re.escape(' | '.join(headers))} \|.*\n(?:\|.*\n)+", TEXTS[document], flags=re.MULTILINE)
    assert len(found) == 1, f"{document} has {len(found)} tables that begin with {headers}"
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in found[0].splitlines())
    assert lines
    return [dict(zip(head, line, strict=True)) for line in lines]


def bare(cell: str) -> str:
    return cell.strip("` ")


def names(cell: str) -> list[str]:
    """The comma-separated names of a cell."""
    return [bare(part) for part in cell.split(",")]


def test_limits_are_those_of_the_specs() -> None:
    written = {
        (backend, place): tuple(names(row["dtypes"])) + tuple(row[h] for h in ("head dims: multiple of", "at most", "SM from", "backward"))
        for row in table("backend", "place")
        for backend in names(row["backend"])
        for place in names(row["place"])
    }
    real = {}
    for spec in SPECS:
        limits = spec.limits
        for place, dtypes in limits.dtypes.items():
            most = str(limits.head_dim_max) if limits.head_dim_max < 1 << 30 else "any"
            oldest = str(limits.min_sm) if limits.min_sm and place == "cuda" else "any"
            real[spec.name, place] = (*dtypes, str(limits.head_dim_multiple), most, oldest, "yes" if limits.backward else "no")
    assert written == real


def test_every_dependency_is_justified() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    groups = {"runtime": project["project"]["dependencies"], **extras, "build": project["build-system"]["requires"]}
    wanted = {(name_of(needed), group) for group, requirements in groups.items() for needed in requirements}
    written = {
        (package, group)
        for row in table("package", "for", "why")
        for package, group in zip_groups(names(row["package"]), names(row["for"].removeprefix("extras ").removeprefix("extra ")))
    }
    assert written == wanted
    assert all(row["why"] for row in table("package", "for", "why"))


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return found[0]


def zip_groups(packages: list[str], groups: list[str]) -> list[tuple[str, str]]:
    """One package may serve several groups, and several packages one group; as many of both go pair by pair."""
    if len(packages) == len(groups):
        return list(zip(packages, groups, strict=True))
    return [(package, group) for package in packages for group in groups]


def test_defaults_are_those_of_the_files() -> None:
    written = {(bare(row["file"]), bare(row["runtime value"])): row["value"] for row in table("runtime value", "file")}
    real = {}
    for file in (ROOT / "configs").rglob("*.yaml"):
        runtime = yaml.safe_load(file.read_text()).get("runtime", {})
        real |= {(file.relative_to(ROOT).as_posix(), field): shown(value) for field, value in runtime.items()}
    assert written == real
    assert {field for file, field in written if file == "configs/base.yaml"} == set(Runtime.__struct_fields__)


def shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else msgspec.json.encode(value).decode()


def test_flags_are_those_of_the_code() -> None:
    rows = {bare(row["flag"]): row for row in table("flag", "takes", "default")}
    assert list(rows) == [*(flag.name for flag in FLAGS), CONFIG_FLAG, CACHE_FLAG, TEST_FLAG]
    built_in = settings_for(TOO_OLD)
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


def pick(device: DeviceInfo, length: int) -> str | None:
    """The winner of both directions where all packages are at hand, or that it depends on the request's predicted times."""
    request = replace(LONG, max_length=length, needs_grad=True)
    decision = select(request, device, load_policy("default"), settings_for(device), OFFERS)
    if sum(prediction.direction == "forward" for prediction in decision.predictions) > 1:
        return "least predicted time"
    assert decision.forward == decision.backward
    return decision.forward


def test_figures_are_those_of_the_rows() -> None:
    for quoted in table("rows", "case", "direction"):
        (row,) = [
            row for row in read_rows(bare(quoted["rows"])) if all(row[field] == quoted[field] for field in ("case", "direction", "backend"))
        ]
        assert quoted["ms"] == f"{row['ms_median']:.3g}"
        assert quoted["workspace, bytes"] == str(row["workspace_bytes"] or "-")


def test_every_backend_and_the_open_question_are_in_the_requirements_document() -> None:
    assert [spec.name for spec in SPECS if f"`{spec.name}`" not in TEXTS["PRD.md"]] == []
    off = settings_for(RTX4090).triton_off
    assert off is not None
    for text in (off.rule, f"`{off.reopen}`", "## Selection Triton Usage", "0.064 ms at L = 64 and 0.065 ms at L = 1024"):
        assert text in TEXTS["PRD.md"]
