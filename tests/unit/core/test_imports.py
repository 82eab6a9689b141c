"""Check which module may import which, in fresh processes and in the import statements of every file, and what missing extras say."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nsa_sel
from tests.helpers.files import ROOT

LINKED = ("backends", "policies", "configs", "bench")
KERNEL_FRAMEWORKS = ("torch", "triton", "numba", "cupy")
CPU_CALLS = """
import torch, nsa_sel
q, k, v = (torch.randn(1, *shape, requires_grad=True) for shape in ((8, 2, 4, 16), (2, 64, 16), (2, 64, 16)))
selection = nsa_sel.Selection.from_blocks(torch.tensor([0, 1, 3]).expand(1, 8, 2, 3), 16)
nsa_sel.selection_attention(q, k, v, selection).sum().backward()
with torch.no_grad():
    nsa_sel.selection_attention(q[:, 0], k, v, selection.ranges[:, 0])
    nsa_sel.describe(nsa_sel.explain(q, k, v, selection))
"""
OTHER_CPU_CALLS = """
import torch.distributed as dist
from nsa_sel.compat import parallel_nsa, topk_sparse_attention
from nsa_sel.distributed import context_parallel_attention
flat = q[0], k[0].transpose(0, 1), v[0].transpose(0, 1)
blocks = torch.tensor([0, 1]).expand(1, 64, 2, 2)
rows = torch.randn(64, 2, 4, 16, requires_grad=True)
nsa_sel.selection_attention_varlen(rows, *flat[1:], nsa_sel.Selection.from_blocks(blocks, 16), [0, 24, 64]).sum().backward()
nsa_sel.varlen_positions([0, 24, 64], T=64)
parallel_nsa(rows.flatten(1, 2)[None], k.transpose(1, 2), v.transpose(1, 2), block_indices=blocks, block_size=16).sum().backward()
topk_sparse_attention(rows.flatten(1, 2), *flat[1:], blocks[0].transpose(0, 1), 16, [0, 64])
with torch.no_grad():
    caches = k.transpose(1, 2), v.transpose(1, 2)
    nsa_sel.selection_attention_with_kvcache(q, *caches, selection, torch.tensor([40], dtype=torch.int32))
    pages = [cache.reshape(4, 16, 2, 16) for cache in caches]
    table = torch.arange(4, dtype=torch.int32)[None]
    nsa_sel.selection_attention_with_kvcache(q, *pages, selection, torch.tensor([40], dtype=torch.int32), table)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
context_parallel_attention(q, k, v, selection).sum().backward()
dist.destroy_process_group()
"""


# Modules that users import by name, as README and docs/ show.
PUBLIC = (
    "attention", "varlen", "serving", "compat", "layer", "attention_layer", "rotary", "selection", "distributed", "oracle",
    "testing", "settings.warmup", "errors",
)  # fmt: skip


# Run each set of flags in a fork of one process, which has imported all but our modules, because those may read flags.
EACH = """
import json, os, sys
import msgspec, numba, torch.distributed, yaml
for flags in {flags!r}:
    child = os.fork()
    if child == 0:
        os.environ.update(flags)
        {calls}
        print(json.dumps(sorted(sys.modules)), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, flags
"""


def run(code: str) -> list[set[str]]:
    """Return the JSON lists of modules that `code` prints in a fresh process without NSA_* flags and Triton's interpreter."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("NSA_", "TRITON_"))}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines() if line.startswith('["')]  # Gloo prints "[Gloo] ..."


def loaded_by(code: str) -> set[str]:
    """sys.modules after `code`, in a fresh process."""
    return run(f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))")[-1]


@pytest.mark.parametrize(
    "code",
    [
        "import nsa_sel",
        "import nsa_sel.core.decision, nsa_sel.policies.default",
        "import nsa_sel.core.registry\nfor name in nsa_sel.core.registry.backends(): nsa_sel.core.registry.missing(name)",
        "from nsa_sel.settings.config import settings_for\n"
        "from nsa_sel.core.request import DeviceInfo\nsettings_for(DeviceInfo(kind='cuda', sm=90))",
        "import pathlib; from nsa_sel.telemetry.log import read_decisions\n"
        "for decision in read_decisions(pathlib.Path('tests/data/decisions.jsonl')): decision.replay()",
    ],
    ids=["package", "policies", "registry", "settings", "replay"],
)
def test_decisions_need_no_kernel_framework(code: str) -> None:
    loaded = loaded_by(code)
    assert "nsa_sel" in loaded
    assert not loaded.intersection((*KERNEL_FRAMEWORKS, *LINKED))


FLAGS = (
    {},
    {"NSA_USE_TRITON_SEL": "1", "NSA_TRITON_SEL_FORCE": "1", "NSA_SEL_TRITON_MIN_L": "0"},
    {"NSA_DEBUG_TRITON": "1", "NSA_DEBUG_TIMING": "1", "NSA_DEBUG_COMPARE": "1"},
)


def test_cpu_calls_never_import_triton() -> None:
    """Whatever the flags: plain, Triton wanted, debugging."""
    calls = (CPU_CALLS + OTHER_CPU_CALLS).replace("\n", "\n        ")
    for flags, loaded in zip(FLAGS, run(EACH.format(flags=FLAGS, calls=calls)), strict=True):
        assert "torch" in loaded
        assert not loaded.intersection(("triton", "cupy", "torch._dynamo", *LINKED)), flags
        for name in loaded:
            assert not name.startswith(("nsa_sel.backends.triton", "nsa_sel.backends._triton", "nsa_sel.backends.cupy")), flags


def test_importing_what_users_import_loads_no_compiler() -> None:
    """torch._dynamo takes two seconds to import, and brings Triton along."""
    loaded = loaded_by(f"import {', '.join(f'nsa_sel.{name}' for name in PUBLIC)}\nfor name in nsa_sel.__all__: getattr(nsa_sel, name)")
    assert {f"nsa_sel.{name}" for name in PUBLIC} <= loaded
    assert not loaded.intersection(("torch._dynamo", "triton", "numba", "cupy", *LINKED))


# Import statements


def modules() -> Iterator[tuple[str, Path]]:
    """Name below nsa_sel ("backends.specs", "" for the package itself) and file of every module of the package."""
    for folder in (ROOT / "nsa_sel", *(ROOT / name for name in LINKED)):
        for file in sorted(folder.rglob("*.py")):
            if file.is_relative_to(folder) and not any(part in LINKED for part in file.relative_to(folder).parts):
                parts = file.relative_to(folder).with_suffix("").parts
                below = (*((folder.name,) if folder.name in LINKED else ()), *(part for part in parts if part != "__init__"))
                yield ".".join(below), file


@functools.cache
def all_imports(file: Path) -> frozenset[str]:
    """The dotted names that a file imports, inside functions and for type checkers too: several tests read every file."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the room"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def files_of_modules() -> dict[str, Path]:
    """Every file of the tree by its full module name: the package's, the tests' and the examples'."""
    found = {f"nsa_sel.{name}".rstrip("."): file for name, file in modules()}
    for folder in ("tests", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = file
    return found


@functools.cache
def all_strings(file: Path) -> frozenset[str]:
    """The dotted strings of a file: any of them may name a module that is imported later."""
    strings = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
    return frozenset(text for text in strings if isinstance(text, str) and "." in text)


def imported(file: Path, names: Collection[str]) -> set[str]:
    """Return the `names` that a file imports, in function bodies and for type checkers too, or has in a string.

    `from package import module` means the module. The strings of backends/specs.py do not count: they name modules as an entry point of
    another package does.
    """
    targets = {target if target in names else target.rpartition(".")[0] for target in all_imports(file)}
    return (targets if file.match("backends/specs.py") else targets | all_strings(file)) & set(names)


def test_no_import_circle() -> None:
    files = files_of_modules()
    assert {"nsa_sel.errors", "nsa_sel.attention", "nsa_sel.backends.specs", "nsa_sel.policies.default", "tests.conftest"} <= set(files)
    TopologicalSorter({name: imported(file, files) - {name} for name, file in files.items()}).prepare()  # raises CycleError


DOORS = ("attention", "varlen", "serving", "layer", "compat", "distributed", "settings.warmup")


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("core", ("attention", "branches", "varlen", "serving", "layer", "compat", "distributed", "bench", "cli", "settings.warmup")),
        (
            "backends",
            ("policies", "core.decision", "core.decide", "core.run", "core.attend", "core.choose.", "core.registry", "attention"),
        ),
        ("policies", ("backends.triton", "backends._triton", "backends.cupy_cuda", "backends.numba_cpu", "backends.sdpa_packed")),
        ("settings", ("attention", "policies", "bench", "cli")),
        ("telemetry", ("attention", "policies", "bench", "cli")),
        *((door, tuple(f"{other}." for other in DOORS if other != door)) for door in DOORS),  # a door opens no other
    ],
)
def test_rooms_keep_to_themselves(room: str, forbidden: tuple[str, ...]) -> None:
    own = [(name, file) for name, file in modules() if f"{name}.".startswith(f"{room}.")]
    assert own
    for name, file in own:
        for target in all_imports(file):
            assert not f"{target}.".startswith(tuple(f"nsa_sel.{module}" for module in forbidden)), f"{name} imports {target}"


def test_the_oracle_shares_no_code() -> None:
    assert not any(target.startswith("nsa_sel") for target in all_imports(ROOT / "nsa_sel" / "oracle.py"))


def test_one_import_name() -> None:
    """`import backends` would make a second module object beside nsa_sel.backends."""
    files = files_of_modules().values()
    assert Path(__file__).resolve() in files
    assert not {file: wrong for file in files if (wrong := {x for x in all_imports(file) if x.split(".")[0] in LINKED})}


EXTRAS = ("numba", "typer", "click", "rich", "tabulate", "safetensors", "matplotlib", "PIL", "cupy")
LIGHT_CALL = """
q, k, v = (torch.randn(1, *shape, requires_grad=True) for shape in ((8, 2, 4, 16), (2, 64, 16), (2, 64, 16)))
selection = nsa_sel.Selection.from_blocks(torch.tensor([0, 1, 3]).expand(1, 8, 2, 3), 16)
"""


def run_without(code: str, blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """A fresh process in which these packages are not installed."""
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\nimport torch, nsa_sel\n"
    return subprocess.run([sys.executable, "-c", block + code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_attention_and_its_explanation_need_no_extra() -> None:
    done = run_without(
        LIGHT_CALL + "nsa_sel.selection_attention(q, k, v, selection).sum().backward()\n"
        "for name in nsa_sel.__all__: getattr(nsa_sel, name)\n"
        "print(nsa_sel.describe(nsa_sel.decisions()[-1]))",
        EXTRAS,
    )
    assert done.returncode == 0, done.stderr
    assert "forward   sdpa-packed" in done.stdout
    assert "Package numba is not installed. Run pip install 'nsa-sel[cpu]'" in done.stdout


MAIN = "from nsa_sel.__main__ import main; main()"
OF_CLI = "error: nsa-sel needs the package {}, which is not installed. Remedy: pip install 'nsa-sel[cli]'"
OF_DEMO = "error: nsa-sel demo needs the package {}, which is not installed. Remedy: pip install 'nsa-sel[report]'"
MISSING = [  # package, what needs it, fragment of the last line
    ("numba", LIGHT_CALL + "nsa_sel.selection_attention(q, k, v, selection, backend='numba')", "pip install 'nsa-sel[cpu]'"),
    *((name, MAIN, OF_CLI.format(name)) for name in ("typer", "rich", "tabulate")),
    *((name, f"sys.argv[1:] = ['demo']; {MAIN}", OF_DEMO.format(name)) for name in ("matplotlib", "safetensors")),
]
EACH_MISSING = """
import json, os, tempfile
for package, code, _ in {missing!r}:
    with tempfile.TemporaryFile("w+") as told:
        child = os.fork()
        if child == 0:
            os.dup2(told.fileno(), 2)
            sys.modules[package] = None
            exec(code)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        told.seek(0)
        print(json.dumps([status, told.read()]))
"""


def test_a_missing_extra_is_one_sentence_with_the_command() -> None:
    """Each in a child of one process, in which torch and nsa_sel alone are imported: as the test above shows, that needs no extra."""
    done = run_without(EACH_MISSING.format(missing=MISSING), ())
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for (package, code, words), (status, told) in zip(MISSING, results, strict=True):
        assert status != 0, package
        assert words in told.splitlines()[-1]
        assert "Traceback" not in told or MAIN not in code


def test_the_public_names_are_shown() -> None:
    assert dir(nsa_sel) == sorted([*nsa_sel.__all__, "__version__"])
    assert all(getattr(nsa_sel, name) for name in nsa_sel.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'selection_atention'; it has .*selection_attention"):
        _ = nsa_sel.selection_atention
