"""The Triton kernels of sliding windows, compiled for GPUs that are not here: shared memory fits, nothing spills on Hopper."""

from __future__ import annotations

import pytest

from tests.helpers.aot_process import compiled

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sm", [pytest.param(86, marks=pytest.mark.thorough), 90])
def test_windows_fit(sm: int) -> None:
    """8.6 has the least shared memory, 9.0 has TMA and WGMMA."""
    found = compiled("window_aot.py", str(sm), "h16")
    assert {(kernel["sm"], kernel["kernel"]) for kernel in found} == {(sm, f"{name}_kernel") for name in ("forward", "dq", "dkdv")}
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert sm < 90 or (kernel["spilled"] == 0 and kernel["wgmma"] and kernel["tma"]), kernel
