"""Check the wheel: its files, its dependencies, and what it can do away from the checkout."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import nsa_sel
from tests.helpers.files import ROOT

pytestmark = pytest.mark.slow
NOT_SOURCE = (".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist", "demo-output", "report-output")
RESULTS = "nsa_sel/bench/results/"  # measured rows: in the repository, in no package
DATA = "nsa_sel/bench/data/"  # in the wheel only the small file


# Runs in the installed environment: everything is imported, the data is found, one call gives the oracle's result, and the program runs.
USE = """
import importlib, pathlib, pkgutil, runpy, sys
import torch
import nsa_sel

home = pathlib.Path(nsa_sel.__file__).parent
assert home.is_relative_to(sys.argv[1]), f"nsa_sel comes from {home}"
for module in pkgutil.walk_packages(nsa_sel.__path__, "nsa_sel."):
    found = importlib.import_module(module.name)
    assert pathlib.Path(found.__file__).is_relative_to(home), f"{module.name} comes from {found.__file__}"

from nsa_sel.settings.config import shipped_configs
from nsa_sel.oracle import oracle_forward
from nsa_sel.core.registry import backends

assert {"base.yaml", "cpu.yaml", "sm89_rtx4090.yaml"} <= set(shipped_configs())
assert "sdpa-packed" in backends()
assert [file.name for file in (home / "bench" / "data").iterdir()] == ["smollm2_maps.npz"]
from nsa_sel.cli import demo
assert not demo.TRACE.exists()
assert demo.synthetic_problem()[-1] == {"synthetic": True}

q, k, v = torch.randn(1, 4, 1, 2, 8), torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
ranges = torch.tensor([0, 4]).expand(1, 4, 1, 1, 2)
o = nsa_sel.selection_attention(q, k, v, ranges, backend="sdpa-packed")  # Numba would compile for seconds
torch.testing.assert_close(o.double(), oracle_forward(q, k, v, ranges)[0], rtol=0, atol=1e-6)

sys.argv = ["nsa-sel", "--version"]
runpy.run_module("nsa_sel", run_name="__main__")  # as python -m nsa_sel
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the files of the sdist alone."""
    folder = tmp_path_factory.mktemp("packaging")
    # A copy: setuptools would take in what earlier builds left in the checkout, and leave its own.
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    # Without --sdist or --wheel, the wheel is built from the unpacked sdist.
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)], folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def run(command: list[str], folder: Path) -> str:
    """Return the output of a command run in `folder` without PYTHON* and NSA_* variables. Fail the test if it fails."""
    env = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "NSA_", "TRITON_"))}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"in {folder}: {' '.join(command)}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done.stdout


def package_files() -> set[str]:
    """Every file of the package as the checkout has it, links followed: "nsa_sel/backends/specs.py"."""
    files = set()
    for folder, folders, names in os.walk(ROOT / "nsa_sel", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        files |= {(Path(folder) / name).relative_to(ROOT).as_posix() for name in names}
    return {name for name in files if not name.startswith((RESULTS, DATA)) or name == f"{DATA}smollm2_maps.npz"}


def test_wheel_has_every_file_and_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.endswith("/")}
        sizes = {info.filename: info.file_size for info in file.infolist() if not info.filename.endswith((".py", ".cu", ".cuh"))}
    assert sum(sizes.values()) <= 1 << 20, sizes
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - metadata == package_files()
    assert any(name.endswith("licenses/LICENSE") for name in metadata)


def test_installed_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = str(home / "bin" / "python")
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).strip())
    # Dependencies are this environment's. Its .pth files, the editable install's among them, are not read this way.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", "--no-compile", str(wheel)], tmp_path)
    (tmp_path / "use.py").write_text(USE)
    assert run([python, "-I", "use.py", str(site)], tmp_path) == f"nsa-sel {nsa_sel.__version__}\n"
    assert "Usage" in run([str(home / "bin" / "nsa-sel"), "-h"], tmp_path)


def test_metadata_names_version_and_light_dependencies(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        metadata = email.message_from_bytes(file.read(f"nsa_sel-{nsa_sel.__version__}.dist-info/METADATA"))
    needed = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert {re.split(r"[^\w-]", text)[0] for text in needed} == {"torch", "triton", "numpy", "msgspec", "PyYAML"}
    assert metadata["Version"] == nsa_sel.__version__
    (every,) = (text for text in metadata.get_all("Requires-Dist", []) if "extra == 'all'" in text.replace('"', "'"))
    optional = set(metadata.get_all("Provides-Extra", []))
    assert set(re.split(r"[][,]", every)[1:-1]) == optional - {"all", "cuda12", "docs", "dev"}


def test_lowest_constraints_are_the_bounds_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ("cpu", "cli", "report", "serve", "cuda13")
    wanted = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    bounds = {name: bound for text in wanted for name, bound in re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", text)}
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert bounds.keys() | {"pytest"} == pins.keys()
    for name, bound in bounds.items():
        assert f"{pins[name]}.0.0".startswith(f"{bound}."), name
