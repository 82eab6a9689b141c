"""nsa-sel as a kernel of Hugging Face `kernels`: built, loaded by that library, and run where nsa_sel can't be imported."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_sel.hub.kernel import build, relocated
from tests.helpers.paths import ROOT

USE = """
import importlib, importlib.util, pkgutil, sys
from pathlib import Path

sys.modules["nsa_sel"] = None  # every import of it fails
import torch
from kernels import Device, LocalLayerRepository, Mode, get_local_kernel, kernelize, use_kernel_forward_from_hub, use_kernel_mapping
from kernels._rust import Digest, DigestAlgorithm, Metadata

home, oracle_file = map(Path, sys.argv[1:])
variant = home / "build" / "torch-universal"
Metadata.read_from_file(variant / "metadata.json").digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
kernel = get_local_kernel(home)
assert Path(kernel.__file__) == variant / "__init__.py"
spec = importlib.util.spec_from_file_location("oracle", oracle_file)
oracle = importlib.util.module_from_spec(spec)
spec.loader.exec_module(oracle)

q, k, v = (torch.randn(1, *shape, requires_grad=True) for shape in ((4, 2, 4, 16), (2, 96, 16), (2, 96, 16)))
do = torch.randn(q.shape)
blocks = torch.tensor([0, 2, 5]).expand(1, 4, 2, 3)
selection = kernel.Selection.from_blocks(blocks, 16)
tensors = [x.detach() for x in (q, k, v)]
expected = oracle.oracle_forward(*tensors, selection.ranges)[0], *oracle.oracle_backward(*tensors, selection.ranges, do)


def check(o, backend):
    # The result, its gradients, and who decided.
    for found, value in zip((o, *torch.autograd.grad(o, (q, k, v), do)), expected, strict=True):
        assert (found - value).abs().max() < 2e-5
    decision = kernel.decisions()[-1]
    assert type(decision) is sys.modules[f"{kernel.__name__}.core.decision"].Decision
    assert (decision.forward, decision.backward) == (backend, backend)


for backend in ("sdpa-packed", "triton-group"):
    check(kernel.selection_attention(q, k, v, selection, backend=backend), backend)
    assert sys.modules[f"{kernel.__name__}.backends.{backend.replace('-', '_')}"].__file__.startswith(str(home))

# A layer with the arguments of NSASelection takes its forward.
@use_kernel_forward_from_hub("Selected")
class Selected(torch.nn.Module):
    n, block_size, first, local, scale, backend = 3, 16, 1, 2, None, "sdpa-packed"

    def forward(self, q, k, v, scores=None, *, block_indices=None, q_pos=None, return_lse=False):
        raise AssertionError("not replaced")

with use_kernel_mapping({"Selected": {"cpu": LocalLayerRepository(home, layer_name="NSASelection")}}):
    layer = kernelize(Selected(), mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu")
check(layer(q, k, v, block_indices=blocks), "sdpa-packed")

# Ops of torch.library have the kernel's namespace.
compiled = torch.compile(kernel.selection_attention, fullgraph=True, backend="aot_eager")
check(compiled(q, k, v, selection, backend="sdpa-packed"), "sdpa-packed")
assert hasattr(torch.ops, kernel.__name__) and hasattr(getattr(torch.ops, kernel.__name__), "selection_forward")
assert not hasattr(torch.ops.nsa_sel, "selection_forward")

for module in pkgutil.walk_packages(kernel.__path__, f"{kernel.__name__}."):
    importlib.import_module(module.name)  # of what they import, nothing is missing

# Both in one process: no name of an op or of an entry is defined twice.
del sys.modules["nsa_sel"]
import nsa_sel

for module in pkgutil.walk_packages(kernel.__path__, "nsa_sel."):
    if module.name != "nsa_sel.layers" and not module.name.startswith(("nsa_sel.bench", "nsa_sel.cli")):
        importlib.import_module(module.name)
assert hasattr(torch.ops.nsa_sel, "selection_forward")
seen = len(nsa_sel.decisions())
both = [each.selection_attention(q, k, v, each.Selection.from_blocks(blocks, 16), backend="sdpa-packed") for each in (nsa_sel, kernel)]
assert torch.equal(*both)
assert len(nsa_sel.decisions()) == seen + 1
"""


def test_it_imports_itself_by_relative_names(tmp_path: Path) -> None:
    variant = build(tmp_path)
    sources = {file: file.read_text() for file in variant.rglob("*.py")}
    assert {"attention.py", "layers.py", "errors.py"} <= {file.name for file in sources}
    name = json.loads((variant / "metadata.json").read_text())["id"]
    assert name.isidentifier()
    for file, source in sources.items():
        modules = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and not node.level]
        assert not [module for module in modules if (module or "").startswith("nsa_sel")], file
        assert not re.search(r"ops\.nsa_sel|\"nsa_sel(::|\.)", source), file
    rooms = {"backends", "caching", "configs", "core", "policies", "settings", "telemetry"}
    assert {folder.name for folder in variant.iterdir() if folder.is_dir()} == rooms
    with pytest.raises(FileExistsError):
        build(tmp_path)
    assert (
        relocated("from nsa_sel.core import run\n    from nsa_sel import x", "core/ops.py", name)
        == "from ..core import run\n    from .. import x"
    )


def test_kernels_loads_it_where_nsa_sel_is_not_installed_and_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("kernels", reason="pip install kernels")
    build(tmp_path)
    own = {name: text for name, text in os.environ.items() if not name.startswith("NSA_")}
    environment = {**own, "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", USE, str(tmp_path), str(ROOT / "nsa_sel" / "oracle.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
