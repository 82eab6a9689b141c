"""What runs with the core dependencies alone, and the one sentence about each missing extra."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import nsa_sel
from tests.helpers.files import ROOT

EXTRAS = ("numba", "typer", "click", "rich", "tabulate", "safetensors", "matplotlib", "PIL", "cupy", "prometheus_client")
CALL = """
q, k, v = (torch.randn(1, *shape, requires_grad=True) for shape in ((8, 2, 4, 16), (2, 64, 16), (2, 64, 16)))
selection = nsa_sel.Selection.from_blocks(torch.tensor([0, 1, 3]).expand(1, 8, 2, 3), 16)
"""


def run(code: str, blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """A fresh process in which these packages are not installed."""
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\nimport torch, nsa_sel\n"
    return subprocess.run([sys.executable, "-c", block + code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_attention_and_its_explanation_need_no_extra() -> None:
    done = run(
        CALL + "nsa_sel.selection_attention(q, k, v, selection).sum().backward()\n"
        "for name in nsa_sel.__all__: getattr(nsa_sel, name)\n"
        "print(nsa_sel.describe(nsa_sel.decisions()[-1]))",
        EXTRAS,
    )
    assert done.returncode == 0, done.stderr
    assert "forward   sdpa-packed" in done.stdout
    assert "package numba is not installed; pip install 'nsa-sel[cpu]'" in done.stdout


MAIN = "from nsa_sel.__main__ import main; main()"
OF_CLI = "error: nsa-sel needs the package {}, which is not installed. Remedy: pip install 'nsa-sel[cli]'"
OF_DEMO = "error: nsa-sel demo needs the package matplotlib, which is not installed. Remedy: pip install 'nsa-sel[report]'"
MISSING = [  # package, what needs it, fragment of the last line
    ("numba", CALL + "nsa_sel.selection_attention(q, k, v, selection, backend='numba')", "pip install 'nsa-sel[cpu]'"),
    *((name, MAIN, OF_CLI.format(name)) for name in ("typer", "rich", "tabulate", "safetensors")),
    ("matplotlib", f"sys.argv[1:] = ['demo']; {MAIN}", OF_DEMO),
]
EACH = """
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
    done = run(EACH.format(missing=MISSING), ())
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
