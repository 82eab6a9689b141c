"""The Triton kernels of the gated sum, compiled for GPUs that are not here: nothing spills."""

from __future__ import annotations

import pytest

from tests.helpers.aot_process import compiled

pytestmark = pytest.mark.slow


def test_gates_compile() -> None:
    found = compiled("gate_aot.py", "80", "90")
    each = ["gate_kernel", "raise_kernel", "delta_kernel", *["gate_backward_kernel"] * 2]
    assert [(kernel["sm"], kernel["kernel"]) for kernel in found] == [(sm, name) for sm in (80, 90) for name in each]
    assert all(kernel["spilled"] == 0 for kernel in found), found
