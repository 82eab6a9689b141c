"""Check 150 random cases on a CPU, 150 more by make test-thorough, and 480 on a GPU; `python -m tests.fuzz --first SEED` checks one."""

from __future__ import annotations

import pytest

from tests.fuzz.cases import GPU_SIZES, GPU_STEP, ON_GPU, case
from tests.fuzz.checks import check, check_packed

CHUNKS = [
    *(pytest.param("cpu", first) for first in range(0, 150, 10)),
    *(pytest.param("cpu", first, marks=pytest.mark.thorough) for first in range(150, 300, 10)),
    *(pytest.param("cuda", first, marks=pytest.mark.gpu) for first in range(0, GPU_STEP * len(GPU_SIZES) * len(ON_GPU), GPU_STEP)),
]
STEPS = [
    *(pytest.param("cpu", first) for first in range(0, 200, 20)),
    *(pytest.param("cuda", first, marks=pytest.mark.gpu) for first in range(0, 100, 20)),
]


@pytest.mark.parametrize(("device", "first"), STEPS)
def test_packed_steps_are_right(device: str, first: int) -> None:
    """200 mixed steps over caches on a CPU, and 100 on a GPU; `--kind packed` checks others."""
    for seed in range(first, first + 20):
        try:
            check_packed(seed, device)
        except Exception as error:
            error.add_note(f"python -m tests.fuzz --kind packed --device {device} --first {seed}")
            raise


@pytest.mark.parametrize(("device", "first"), CHUNKS)
def test_cases_are_right_or_refused(device: str, first: int) -> None:
    for seed in range(first, first + 10):
        try:
            check(case(seed, device))
        except Exception as error:
            error.add_note(f"python -m tests.fuzz --device {device} --first {seed}")
            raise
