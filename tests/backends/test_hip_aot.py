"""A few of the Triton kernels, compiled for AMD GPUs that are not here. They have run on none (docs/kernels.md says what is missing)."""

from __future__ import annotations

import pytest

from tests.helpers.aot_process import compiled

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=pytest.mark.thorough)])
def test_the_kernels_of_decoding_compile_for_amd_and_fit(arch: str) -> None:
    found = compiled("hip_aot.py", arch, "triton-token", "decode-h16", "triton-group", "paged-16")
    assert [kernel["kernel"] for kernel in found] == ["forward_kernel", "combine_kernel", "forward_blocks_kernel"]
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["hsaco"] > 0, kernel
