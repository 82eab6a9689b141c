"""The Triton kernels of a cache's new tokens, compiled for a GPU that is not here: they fit every GPU, and nothing spills."""

from __future__ import annotations

import pytest

from tests.helpers.aot_process import compiled

pytestmark = pytest.mark.slow


def test_append_and_compression_fit() -> None:
    found = compiled("cache_aot.py", "90", "many")
    assert [kernel["kernel"] for kernel in found] == ["append_kernel", "hidden_kernel", "out_kernel"]
    for kernel in found:
        assert kernel["shared"] <= 99 << 10, kernel  # of SM 8.6 and 8.9
        assert kernel["spilled"] == 0, kernel
