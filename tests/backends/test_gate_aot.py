"""The Triton kernels of the gated sum, compiled for GPUs that are not here: nothing spills."""

from __future__ import annotations

import pytest

from tests.helpers.aot_process import compiled

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sm", [90, pytest.param(80, marks=pytest.mark.thorough)])
def test_gates_compile(sm: int) -> None:
    found = compiled("gate_aot.py", str(sm))
    each = ["gate_kernel", "raise_kernel", "delta_kernel", *["gate_backward_kernel"] * 2]
    assert [(kernel["sm"], kernel["kernel"]) for kernel in found] == [(sm, name) for name in each]
    assert all(kernel["spilled"] == 0 for kernel in found), found
