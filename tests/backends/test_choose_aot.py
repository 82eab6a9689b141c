"""The Triton kernels of choosing, compiled for GPUs that are not here: shared memory fits, no step of a loop spills."""

from __future__ import annotations

import pytest

from tests.helpers.aot_process import compiled

pytestmark = pytest.mark.slow

KERNELS = {"forward_kernel", "importance_kernel", "top_n_kernel", "dq_kernel", "dkdv_kernel", "sum_sections_kernel"}
TENSOR_CORES = {"forward_kernel", "importance_kernel", "dq_kernel", "dkdv_kernel"}


def spills_allowed(kernel: dict[str, object]) -> int:
    """Bytes per thread: a row of few blocks keeps its masks in memory."""
    return 8 if kernel["kernel"] == "top_n_kernel" else 0


# Attention and its choice; a choice without attention; few rows over pages. The others have the same kernels of other sizes and bounds, or
# for 8.0.
SOME = ("h16", "msa", "pages")
OTHERS = ("h8-64", "most-blocks", "packed", "pages-drafts", "80", "moba")


@pytest.mark.parametrize("asked", [SOME, pytest.param(OTHERS, marks=pytest.mark.thorough)])
def test_choosing_fits(asked: tuple[str, ...]) -> None:
    """In one process."""
    found = compiled("choose_aot.py", "90", *asked)
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["spilled"] <= spills_allowed(kernel), kernel
        assert kernel["looped"] == 0, kernel
    of = {shape: [kernel for kernel in found if kernel["shape"] == shape] for shape in asked if not shape.isdigit()}
    assert len(found) == sum(map(len, of.values()))
    for shape, kernels in of.items():
        if shape in ("msa", "moba"):  # without attention
            sm = 80 if shape == "moba" else 90
            assert {(kernel["kernel"], kernel["sm"]) for kernel in kernels} == {("block_scores_kernel", sm), ("top_n_kernel", sm)}
            for kernel in kernels:
                assert kernel["wgmma"] == kernel["tma"] == (sm == 90 and kernel["kernel"] == "block_scores_kernel"), kernel
        elif shape == "most-blocks":
            assert [(kernel["kernel"], kernel["spilled"]) for kernel in kernels] == [("top_n_kernel", 0)]
        elif shape.startswith("pages"):
            assert [kernel["kernel"] for kernel in kernels] == ["attention_kernel", "importance_kernel", "top_n_kernel"]
            for kernel in kernels:
                assert kernel["spilled"] == 0, kernel
                assert kernel["shared"] <= 99 << 10, kernel  # on SM 8.6 and 8.9, too
        else:
            assert {kernel["kernel"] for kernel in kernels} == KERNELS
            assert all(kernel["wgmma"] == (kernel["kernel"] in TENSOR_CORES) for kernel in kernels), kernels
