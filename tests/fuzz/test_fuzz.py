"""150 cases of the fuzzer here, 150 more by make test-thorough, 300 on a GPU, and the ledger of 10,000: `python -m tests.fuzz --help`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.checks import run
from tests.fuzz.generators import GPU_STEP, KINDS, ON_CPU, case, digest

LEDGER = Path(__file__).parent / "ledger.jsonl"


@pytest.mark.parametrize("first", [*range(0, 150, 10), *(pytest.param(first, marks=pytest.mark.thorough) for first in range(150, 300, 10))])
def test_cases_are_right_or_refused(first: int) -> None:
    """One that fails is shown by `python -m tests.fuzz --first SEED`."""
    assert run(first, 10, "cpu")["failed"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 300, GPU_STEP))
def test_cases_on_a_gpu_are_right_or_refused(first: int) -> None:
    """One that fails is shown by `python -m tests.fuzz --device cuda --first SEED`. A chunk is of one size and one backend."""
    assert run(first, GPU_STEP, "cuda")["failed"] == []


def test_the_ledger_holds_10000_cases_and_no_failure() -> None:
    """Every kind of case was checked, and every backend ran in both directions."""
    rows = [json.loads(line) for line in LEDGER.read_text().splitlines()]
    assert [seed for row in rows for seed in range(row["first"], row["first"] + row["count"])] == list(range(10_000))
    assert [failure for row in rows for failure in row["failed"]] == []
    kinds, ran = (sum((Counter(row[name]) for row in rows), Counter()) for name in ("kinds", "ran"))
    assert kinds.total() == 10_000
    assert min(kinds[kind] for kind in KINDS) >= 100
    assert min(ran[f"{name} {way}"] for name in ON_CPU for way in ("forward", "backward")) >= 50
    assert min(ran["accepted"], ran["refused"]) >= 100
    assert {row["device"] for row in rows} == {"cpu"}
    assert len({row["commit"] for row in rows}) == 1


def test_the_ledger_is_of_these_cases() -> None:
    """The cases of some of its rows, made again, are those that were checked: else it is to be recorded anew."""
    for row in [json.loads(line) for line in LEDGER.read_text().splitlines()][::20]:
        assert digest(case(seed) for seed in range(row["first"], row["first"] + row["count"])) == row["digest"]
