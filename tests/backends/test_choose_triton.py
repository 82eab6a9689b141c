"""Choosing blocks in Triton against the float64 oracle, in the interpreter and on a GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from msgspec.structs import replace

from nsa_sel.backends import choose_triton
from nsa_sel.backends._triton import choose_dkdv
from nsa_sel.backends._triton.choose_scores import importance
from nsa_sel.core.arguments import whole_blocks
from nsa_sel.core.call import Rule
from nsa_sel.core.ranges import sorted_blocks
from nsa_sel.settings.schema import KernelConfig
from tests.helpers.cases import make_grads
from tests.helpers.choose_cases import SMALL, check_both, check_gradients, make_choose_call, oracle, results


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for every program: float32, too, gets the tiles of 16 bits, but few keys at once, so that short
    sequences take several steps."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(choose_triton, "config_of", lambda call, kernel: replace(choose_triton.CONFIGS[kernel], block_l=16))


def test_triton_takes_positions_and_a_negative_scale() -> None:
    q_pos = torch.randint(-3, 50, (2, 13), generator=torch.Generator().manual_seed(0))
    call = make_choose_call((2, 13, 40, 2, 3, 16, 24, SMALL), q_pos=q_pos, scale=-0.3)
    check_both(choose_triton, call)


@pytest.mark.parametrize("rule", [SMALL, SMALL._replace(block_size=12), SMALL._replace(compress_block=4), SMALL._replace(block_size=128)])
def test_importance_carries_spills_from_step_to_step(rule: Rule) -> None:
    """Steps of one block, and of several; scores of visible blocks alone are written for certain."""
    call = make_choose_call((1, 40, 140, 1, 3, 16, 16, rule))
    exact = oracle(call)
    visible = (torch.arange(call.blocks) <= call.positions()[:, :, None, None] // rule.block_size).expand_as(exact.importance)
    for block_l in (4, 32):
        scores = torch.full(exact.importance.shape, math.nan)
        importance(call, exact.lse.float(), scores, KernelConfig(block_l=block_l, num_warps=4, num_stages=1, rows=128))
        torch.testing.assert_close(scores[visible].double(), exact.importance[visible], rtol=1e-5, atol=1e-6)


def test_chunks_of_scores_give_the_same_blocks() -> None:
    call = make_choose_call((2, 6, 60, 2, 2, 16, 16, SMALL))
    whole = choose_triton.forward(call)[2]
    row = 2 * 16 * 4  # bytes: two groups of 4 blocks, padded to 16
    for scratch in (1, 4 * row, 7 * row):
        assert torch.equal(choose_triton.forward(dataclasses.replace(call, scratch=scratch))[2], whole)


def test_blocks_are_the_best_of_the_importance() -> None:
    """Ties, too: with equal keys every piece has the same weight."""
    call = make_choose_call((1, 60, 60, 1, 4, 16, 16, SMALL))
    call.k = torch.zeros_like(call.k)
    _, lse, ranges = choose_triton.forward(call)
    scores = torch.zeros(1, 60, 1, call.blocks)
    importance(call, lse, scores, choose_triton.config_of(call, "choose/importance"))
    assert torch.equal(ranges, whole_blocks(sorted_blocks(scores, 4, 16, 1, 2, 60, None), 16))


@pytest.mark.parametrize("positions", ["implied", "given"])
def test_sections_of_rows_add_up(monkeypatch: pytest.MonkeyPatch, positions: str) -> None:
    call = make_choose_call((2, 37, 100, 1, 4, 16, 24, SMALL))
    call.q_pos = call.positions() if positions == "given" else None
    monkeypatch.setattr(choose_dkdv, "SHORTEST", 4)
    monkeypatch.setattr(choose_dkdv, "PROGRAMS", 16)
    assert choose_dkdv.sections_of(call, choose_triton.config_of(call, "choose/dkdv")).total == 4
    assert choose_dkdv.sections_of(dataclasses.replace(call, scratch=1), choose_triton.config_of(call, "choose/dkdv")).total == 1
    check_gradients(choose_triton.forward, choose_triton.backward, call)


def test_strides_of_inputs() -> None:
    call = make_choose_call((2, 9, 25, 2, 3, 16, 24, SMALL))
    do, _ = make_grads(call.q, call.v)
    expected = results(choose_triton, call, do, None)
    q = call.q.permute(3, 1, 0, 2, 4).contiguous().permute(2, 1, 3, 0, 4)
    k, v = (x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (call.k, call.v))
    do = do.permute(3, 1, 0, 2, 4).contiguous().permute(2, 1, 3, 0, 4)
    found = results(choose_triton, dataclasses.replace(call, q=q, k=k, v=v), do, None)
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
