"""The bench of other ways to choose: plain PyTorch chooses the blocks of the sources, and the table stands without rows, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa_sel.bench.core import plain_choosing
from nsa_sel.bench.core.plain_choosing import infllm_blocks, minimax_blocks, moba_blocks
from nsa_sel.bench.questions.ways_to_choose import WAYS, inputs_of, same, table
from tests.helpers.choosing_reference import assert_chosen, best, infllm_scores, moba_scores, msa_scores


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some rows, of which neither all rows nor a block are a multiple."""
    monkeypatch.setattr(plain_choosing, "SCORES", 8000)


def ascending(blocks: Tensor) -> Tensor:
    """With -1 last."""
    return blocks.where(blocks >= 0, 1 << 30).sort(-1).values.masked_fill(blocks.sort(-1, descending=True).values < 0, -1).int()


def test_plain_minimax() -> None:
    q, k, positions = randn(1, 96, 2, 1, 16), randn(1, 1, 96, 16, seed=1), torch.arange(96)[None]
    scores = msa_scores(q, k, positions, 16)
    assert_chosen(ascending(minimax_blocks(q, k, 16, 4)), scores, best(scores, positions, 16, 4, 0, 1))


@pytest.mark.parametrize(("block", "n"), [(8, 4), (48, 3)])
def test_plain_moba(block: int, n: int) -> None:
    """Also where rows may choose more blocks than there are."""
    q, k, positions = randn(1, 96, 2, 3, 16), randn(1, 2, 96, 16, seed=1), torch.arange(96)[None]
    scores = moba_scores(q, k, positions, block)
    assert_chosen(ascending(moba_blocks(q, k, block, n)), scores, best(scores, positions, block, n, 0, 1))


def test_plain_infllm() -> None:
    """Neighboring blocks tie where a mean touches both."""
    q, k, positions = randn(1, 128, 2, 3, 16), randn(1, 2, 128, 16, seed=1), torch.arange(128)[None]
    scores = infllm_scores(q, k, positions, coarse=True, block=16, l=8, d=4)
    found = ascending(infllm_blocks(q, k, 16, 5, 1, 2, size=8))
    assert_chosen(found, scores, best(scores, positions, 16, 5, 1, 2), slack=1e-6)


@pytest.mark.parametrize("name", WAYS)
def test_both_contenders_have_the_same_sizes(name: str) -> None:
    """The defaults of the calls."""
    way = WAYS[name]
    q, k = (x[..., :16].float() for x in inputs_of(way, 1024, "cpu"))
    ours, plain = way.ours(q, k).block_indices, way.torch(q, k)
    assert ours.shape == plain.shape
    assert same(ours, plain) > 0.99
    assert same(ours, torch.where(plain == 0, 99, plain)) < 0.9


def test_the_table_with_and_without_rows() -> None:
    empty = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table([]).splitlines()]
    assert len(empty) == 2 + 2 * len(WAYS)
    assert empty[2] == ["choose_blocks", "8k", "-", "-", "-", "-"]
    row = {"way": "choose_blocks", "S": 8192, "contender": "ours", "ms_median": 2.0, "ms_p20": 1.99, "ms_p80": 2.01}
    rows = [{**row, "ms_median": 9.0}, row, {**row, "contender": "torch", "ms_median": 5.0}, {**row, "way": "dense", "contender": "dense"}]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(rows).splitlines()]
    assert lines[2] == ["choose_blocks", "8k", "2", "5", "2.50x", "2"]
