"""The Triton kernels of sliding windows, compiled for GPUs that are not here: shared memory fits, nothing spills on Hopper."""

from __future__ import annotations

import itertools

import pytest

from tests.helpers.aot_process import compiled

pytestmark = pytest.mark.slow


def test_windows_fit() -> None:
    """8.6 has the least shared memory, 9.0 has TMA and WGMMA."""
    found = compiled("window_aot.py", "86,90", "h16")
    names = ("forward_kernel", "dq_kernel", "dkdv_kernel")
    assert {(kernel["sm"], kernel["kernel"]) for kernel in found} == set(itertools.product((86, 90), names))
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["sm"] < 90 or (kernel["spilled"] == 0 and kernel["wgmma"] and kernel["tma"]), kernel
