"""What is read from Nsight Compute's pages, and names of kernels from torch's profiler."""

from __future__ import annotations

import csv
import io

import pytest

from nsa_sel.bench.core.environment import ROOT
from nsa_sel.bench.questions.kernel_counters import PROFILED, case_of, counters
from nsa_sel.bench.questions.kernel_times import short


def test_what_is_profiled_exists() -> None:
    for profiled in PROFILED:
        assert case_of(profiled.case).S > 1 or profiled.direction == "fwd"
        if profiled.backend.startswith(("cupy-cuda", "cuda-block")):
            source = ROOT / f"backends/cupy_cuda/kernels/{profiled.function}.cu"
            assert f" {profiled.function}(const __grid_constant__ " in source.read_text()


def test_counters_and_rules_are_read() -> None:
    page = io.StringIO()
    writer = csv.writer(page, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Metric Name", "Metric Unit", "Metric Value", "Rule Description"])
    writer.writerow(["0", "Duration", "ms", "1,700.5", ""])
    writer.writerow(["0", "SM Frequency", "hz", "1,760,000,000.5", ""])
    writer.writerow(["0", "Registers Per Thread", "register/thread", "168", ""])
    writer.writerow(["0", "Dynamic Shared Memory Per Block", "byte/block", "512", ""])
    rule = "Shared is the highest-utilized pipeline (50.5%) based on cycles. It's dominated by its Tensor (FP) sub-pipeline."
    writer.writerow(["0", "", "", "", rule])
    stall = "each warp of this workload spends 5.7 cycles being stalled waiting for a barrier. This stall type represents about 43.2% of"
    writer.writerow(["0", "", "", "", stall])
    found = counters("==PROF== Connected\n" + page.getvalue())
    assert found == {
        "duration_us": 1700500.0, "sm_ghz": 1.76, "registers": 168, "shared_kbyte": 0.51, "busiest_pipe": "Tensor (FP)",
        "busiest_pipe_pct": 50.5,
        "stall": "waiting for a barrier", "stall_pct": 43.2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("forward_kernel", "forward_kernel"),
        ("void at_cuda_detail::cub::DeviceScanKernel<int, 3>(int)", "DeviceScanKernel"),
        ("void at::native::vectorized_elementwise_kernel<4, Fill>(int)", "vectorized_elementwise_kernel"),
    ],
)
def test_names_of_kernels(name: str, expected: str) -> None:
    assert short(name) == expected
