"""The rows of tiles of small blocks (cupy_cuda/block_tiles.py): every block in one slot, every row once, with bits of its blocks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from nsa_sel.backends.cupy_cuda import block_tiles
from nsa_sel.selection import Selection
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.cuda import BACKWARDS, call_of, emulated, needs_compiler


@needs_compiler
@pytest.mark.parametrize("mode", [pytest.param(0, marks=pytest.mark.thorough), BACKWARDS])
@pytest.mark.parametrize(
    ("B", "S", "G", "S_kv", "n", "block"),
    [
        (2, 70, 2, 150, 9, 4),  # tiles and blocks that the keys end within
        (1, 300, 1, 80000, 7, 32),  # more tiles than one table holds
        pytest.param(1, 40, 1, 80000, 30, 4, marks=pytest.mark.thorough),
    ],
)
def test_lists_hold_every_row_once(
    monkeypatch: pytest.MonkeyPatch, mode: int, B: int, S: int, G: int, S_kv: int, n: int, block: int
) -> None:  # fmt: skip
    emulated(monkeypatch, mode)
    q, k, v = make_qkv(B, S, G, 1, 8, 8, S_kv=S_kv, dtype=torch.float16)
    selection = Selection(make_blocks(B, S, G, S_kv, n, block).ranges.long(), block)  # 64 bits
    lists = block_tiles.block_lists_of(call_of(q, k, v, selection))
    blocks, tiles = -(-S_kv // block), -(-S_kv // 64)
    slots = lists.slots.view(B * G, -1)
    assert torch.equal(slots.sort(-1).values.clamp(max=blocks), torch.arange(slots.shape[1]).clamp(max=blocks).expand_as(slots))
    expected = torch.zeros(B, S, G, blocks + 1, dtype=torch.bool)
    expected.scatter_(3, torch.where(selection.block_indices < 0, blocks, selection.block_indices), True)
    found = torch.zeros_like(expected)
    for index, (begin, end) in enumerate(pairwise(lists.begins.tolist())):
        b, g = index // tiles // G, index // tiles % G
        rows, chosen = lists.entries[begin:end].long(), lists.chosen[begin:end]
        assert bool((rows.diff() > 0).all())
        assert bool((chosen != 0).all())
        for slot, number in enumerate(lists.slots[index].tolist()):
            found[b, rows, g, number] |= (chosen >> slot & 1).bool()
    assert torch.equal(found[..., :-1], expected[..., :-1])


@needs_compiler
def test_popular_blocks_share_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth block is selected by all rows: their tiles come first, in the order of positions, and list each row once."""
    emulated(monkeypatch)
    S = S_kv = 640
    q, k, v = make_qkv(1, S, 1, 1, 8, 8, S_kv=S_kv, dtype=torch.float16)
    popular = torch.arange(0, 160, 4)
    lists = block_tiles.block_lists_of(call_of(q, k, v, Selection.from_blocks(popular.expand(1, S, 1, 40), 4)))
    assert torch.equal(lists.slots.flatten()[:40].long(), popular)
    assert lists.begins.diff().tolist() == [S, S - 256, S - 512, 0, 0, 0, 0, 0, 0, 0]
