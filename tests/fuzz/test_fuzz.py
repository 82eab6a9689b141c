"""150 cases of the fuzzer here, 150 more by make test-thorough, 480 on a GPU, and the ledger of 10,000: `python -m tests.fuzz --help`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from nsa_sel.backends.specs import HOPPER_TILES
from tests.fuzz.checks import run
from tests.fuzz.generators import GPU_STEP, KINDS, ON_CPU, TILE_SIZES, case, digest
from tests.fuzz.tiles import Truth, dense

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


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.thorough) for first in range(10, 400, 10))])
def test_calls_of_triton_are_right_under_tight_bounds(first: int) -> None:
    """`python -m tests.fuzz --kind tiles --first SEED` shows one. Half of them select blocks of 4 or 8 keys."""
    assert run(first, 10, "cpu", "tiles")["failed"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", range(len(TILE_SIZES)))
def test_large_calls_on_a_gpu_are_right_or_refused(chunk: int) -> None:
    """`python -m tests.fuzz --device cuda --kind tiles --first SEED` shows one. Each chunk runs the kernels that it is for."""
    row = run(chunk * GPU_STEP, GPU_STEP, "cuda", "tiles")
    assert row["failed"] == []
    backend, h, Dk, Dv, block, _ = TILE_SIZES[chunk]
    wanted = {f"{backend} forward", f"{backend} backward"}
    if torch.cuda.get_device_capability() == (9, 0):
        if backend == "cuda-block":
            wanted |= {"block_partials.cu", "block_gradients.cu"}
        elif backend == "cupy-cuda" and HOPPER_TILES.gathers(h, Dk, Dv, block):
            wanted |= {"forward_gather.cu", "dq_gather.cu", "dkdv_groups.cu"}
    assert wanted <= row["ran"].keys()


def test_the_bounds_of_large_calls_show_one_key_of_many() -> None:
    """Which `assert_within_twice_baseline` of the dense baseline in 16 bits would not."""
    q, k, v, do = (torch.randn(1, *size, 64).bfloat16() for size in ((8, 1, 2), (1, 700), (1, 700), (8, 1, 2)))
    mask = torch.ones(1, 8, 1, 700, dtype=torch.bool)
    values = q, k, v, mask, do, torch.randn(1, 8, 1, 2), 0.125
    names, truth = ("o", "lse", "dq", "dk", "dv"), Truth(*values)
    truth.hold(dict(zip(names, dense(*values, exact=False), strict=True)), 1.0)
    mask = mask.clone()
    mask[0, 3, 0, 500] = False
    fewer = dense(q, k, v, mask, *values[4:], exact=False)
    for name, x in zip(names, fewer, strict=True):
        with pytest.raises(AssertionError, match=f"^{name}: "):
            truth.hold({name: x}, 1.0)


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
