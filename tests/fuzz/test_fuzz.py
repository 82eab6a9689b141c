"""Check 150 random cases on a CPU, 150 more by make test-thorough, and 480 on a GPU; `python -m tests.fuzz --first SEED` checks one.
And steps of an engine: 200 on a CPU, 2,000 on a GPU by `pytest -m "gpu and slow" -n 8 tests/fuzz`."""

from __future__ import annotations

import pytest

from tests.fuzz.cases import GPU_SIZES, GPU_STEP, ON_GPU, case
from tests.fuzz.checks import check
from tests.fuzz.steps import ON_GPU as LAYOUTS
from tests.fuzz.steps import check_step

CHUNKS = [
    *(pytest.param("cpu", first) for first in range(0, 150, 10)),
    *(pytest.param("cpu", first, marks=pytest.mark.thorough) for first in range(150, 300, 10)),
    *(pytest.param("cuda", first, marks=pytest.mark.gpu) for first in range(0, GPU_STEP * len(GPU_SIZES) * len(ON_GPU), GPU_STEP)),
]
SLOW = (pytest.mark.gpu, pytest.mark.slow)
STEPS = [
    *(pytest.param("cpu", range(first, first + 20)) for first in range(0, 200, 20)),
    *(pytest.param("cuda", range(first, 2000, len(LAYOUTS)), marks=SLOW) for first in range(len(LAYOUTS))),  # one layout each
]


@pytest.mark.parametrize(("device", "seeds"), STEPS)
def test_steps_of_requests_are_right(device: str, seeds: range) -> None:
    for seed in seeds:
        try:
            check_step(seed, device)
        except Exception as error:
            error.add_note(f"python -m tests.fuzz --kind steps --device {device} --first {seed}")
            raise


@pytest.mark.parametrize(("device", "first"), CHUNKS)
def test_cases_are_right_or_refused(device: str, first: int) -> None:
    for seed in range(first, first + 10):
        try:
            check(case(seed, device))
        except Exception as error:
            error.add_note(f"python -m tests.fuzz --device {device} --first {seed}")
            raise
