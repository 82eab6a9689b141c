"""The Triton kernels of choosing, compiled for GPUs that are not here: shared memory fits, no step of a loop spills."""

from __future__ import annotations

import pytest

from tests.helpers.aot_process import compiled

pytestmark = pytest.mark.slow

KERNELS = {"forward_kernel", "importance_kernel", "top_n_kernel", "dq_kernel", "dkdv_kernel", "sum_sections_kernel"}
TENSOR_CORES = {"forward_kernel", "importance_kernel", "dq_kernel", "dkdv_kernel"}


def spills_allowed(kernel: dict[str, object]) -> int:
    """Bytes per thread. float32 runs without tensor cores, for parity; a row of few blocks keeps its masks in memory."""
    return 512 if kernel["shape"] == "h3-fp32" else 8 if kernel["kernel"] == "top_n_kernel" else 0


def test_choosing_fits() -> None:
    """In one process."""
    attention, others = ("h16", "h8-64", "packed"), ("msa", "most-blocks", "pages", "pages-drafts")
    found = compiled("choose_aot.py", "90", *attention, *others, "80", "moba")
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["spilled"] <= spills_allowed(kernel), kernel
        assert kernel["looped"] == 0 or kernel["shape"] == "h3-fp32", kernel
    of = {shape: [kernel for kernel in found if kernel["shape"] == shape] for shape in (*attention, *others, "moba")}
    assert len(found) == sum(map(len, of.values()))
    for shape in attention:
        assert {kernel["kernel"] for kernel in of[shape]} == KERNELS
        assert all(kernel["wgmma"] == (kernel["kernel"] in TENSOR_CORES) for kernel in of[shape]), of[shape]
    for shape, sm in (("msa", 90), ("moba", 80)):  # without attention
        assert {(kernel["kernel"], kernel["sm"]) for kernel in of[shape]} == {("block_scores_kernel", sm), ("top_n_kernel", sm)}
        for kernel in of[shape]:
            assert kernel["wgmma"] == kernel["tma"] == (sm == 90 and kernel["kernel"] == "block_scores_kernel"), kernel
    assert [kernel["kernel"] for kernel in of["most-blocks"]] == ["top_n_kernel"]
    few_rows = ["attention_kernel", "importance_kernel", "top_n_kernel"]
    for shape in ("pages", "pages-drafts"):
        assert [kernel["kernel"] for kernel in of[shape]] == few_rows
    for kernel in (*of["most-blocks"], *of["pages"], *of["pages-drafts"]):
        assert kernel["spilled"] == 0, kernel
        assert kernel["shape"] == "most-blocks" or kernel["shared"] <= 99 << 10, kernel  # on SM 8.6 and 8.9, too
