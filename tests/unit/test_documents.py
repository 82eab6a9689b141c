"""Run the code of the documents."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from nsa_sel.settings.config import parse_config
from tests.helpers.files import ROOT

TEXTS = {
    file.relative_to(ROOT).as_posix(): file.read_text() for file in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
}


# Code


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXTS[document], flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_registry: None) -> Path:
    """A folder whose modules and entry points are seen as installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


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


def anchors(text: str) -> set[str]:
    """GitHub's anchors of the headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", TEXTS)
def test_links_lead_to_headings(document: str) -> None:
    links = re.findall(r"\]\((https://github.com/nsa-sel/nsa-sel/blob/main/)?([^()#:]*)#([^()]+)\)", TEXTS[document])
    for of_root, path, anchor in links:
        target = (ROOT if of_root else (ROOT / document).parent) / path if path else ROOT / document
        assert anchor in anchors(target.read_text()), f"{path}#{anchor}"


@pytest.mark.gpu
def test_code_for_pytorch_runs_on_a_gpu(packages: Path) -> None:
    test_code_runs("docs/pytorch.md", packages)


def test_configuration_is_valid() -> None:
    found = [block for document in TEXTS for block in blocks(document, "yaml")]
    assert found
    for block in found:
        parse_config(block.encode(), "a document")
