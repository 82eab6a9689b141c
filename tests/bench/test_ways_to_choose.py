"""The bench of other ways to choose: plain PyTorch chooses as ours does, and the table stands without rows, too."""

from __future__ import annotations

import pytest
import torch

from nsa_sel.bench.core import plain_choosing
from nsa_sel.bench.questions.ways_to_choose import WAYS, inputs_of, same, table


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some rows, of which neither all rows nor a block are a multiple."""
    monkeypatch.setattr(plain_choosing, "SCORES", 8000)


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
