"""The Triton kernels of choosing, compiled for GPUs that are not here: shared memory fits, no step of a loop spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow

KERNELS = {"forward_kernel", "importance_kernel", "top_n_kernel", "dq_kernel", "dkdv_kernel", "sum_sections_kernel"}
TENSOR_CORES = {"forward_kernel", "importance_kernel", "dq_kernel", "dkdv_kernel"}


def spills_allowed(kernel: dict[str, object]) -> int:
    """Bytes per thread. float32 runs without tensor cores, for parity; a row of few blocks keeps its masks in memory."""
    return 512 if kernel["shape"] == "h3-fp32" else 8 if kernel["kernel"] == "top_n_kernel" else 0


def compiled(sm: int, *shapes: str) -> list[dict[str, object]]:
    """Every kernel of the shapes, which must fit."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "tests/helpers/choose_aot.py", str(sm), *shapes]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["spilled"] <= spills_allowed(kernel), kernel
        assert kernel["looped"] == 0 or kernel["shape"] == "h3-fp32", kernel
    return found


@pytest.mark.parametrize(("sm", "shapes"), [(90, ("h16", "h8-64", "packed"))])
def test_choosing_fits(sm: int, shapes: tuple[str, ...]) -> None:
    found = compiled(sm, *shapes)
    assert {(kernel["shape"], kernel["kernel"]) for kernel in found} == {(shape, kernel) for shape in shapes for kernel in KERNELS}
    for kernel in found:
        assert kernel["wgmma"] == (kernel["kernel"] in TENSOR_CORES and kernel["shape"] != "h3-fp32"), kernel


@pytest.mark.parametrize(("sm", "shape"), [(90, "msa"), (80, "moba")])
def test_choosing_without_attention_fits(sm: int, shape: str) -> None:
    found = compiled(sm, shape)
    assert {kernel["kernel"] for kernel in found} == {"block_scores_kernel", "top_n_kernel"}
    for kernel in found:
        assert kernel["wgmma"] == kernel["tma"] == (sm == 90 and kernel["kernel"] == "block_scores_kernel"), kernel


def test_the_most_blocks_and_few_rows_over_pages_fit() -> None:
    top_n, *paged = compiled(90, "most-blocks", "pages", "pages-drafts")
    assert top_n["kernel"] == "top_n_kernel"
    assert [kernel["kernel"] for kernel in paged] == 2 * ["attention_kernel", "importance_kernel", "top_n_kernel"]
    assert all(kernel["spilled"] == 0 for kernel in (top_n, *paged))
    assert all(kernel["shared"] <= 99 << 10 for kernel in paged)  # on SM 8.6 and 8.9, too
