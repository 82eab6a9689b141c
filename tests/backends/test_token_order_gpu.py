"""Tiles of tokens that selected alike on a GPU: parity, NaN in what is not selected, and the bits of run after run."""

from __future__ import annotations

import pytest
import torch

from nsa_sel.backends.cupy_cuda import token_order
from nsa_sel.core.warm import reset
from nsa_sel.selection import Selection
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.checks import check_both, check_deterministic, check_poison
from tests.helpers.gpus import needs, needs_hopper

pytestmark = [pytest.mark.gpu, needs("cupy-cuda"), needs_hopper]


@pytest.mark.parametrize(
    ("h", "Dk", "Dv", "block"),
    [(16, 128, 128, 64), (4, 128, 128, 64), (4, 64, 64, 128), (5, 128, 64, 64), (12, 192, 128, 64), (32, 64, 128, 64), (8, 256, 256, 64)],
)
def test_tiles_of_tokens_that_selected_alike(
    monkeypatch: pytest.MonkeyPatch, started: list[str], h: int, Dk: int, Dv: int, block: int
) -> None:
    """A batch, a last stretch that is not full, rows that selected nothing, and positions of any order."""
    monkeypatch.setattr(token_order, "LEAST_TOKENS", 1)
    monkeypatch.setattr(token_order, "LEAST_ROWS", 1)
    reset()
    B, S, G, S_kv = 2, 1100, 3, 1300
    q, k, v = make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    ranges = make_blocks(B, S, G, S_kv, 6, block, device="cuda").ranges
    ranges[:, 200:230] = 0
    ranges[(ranges[..., 0] >= 256) & (ranges[..., 0] < 384)] = 0
    selection = Selection(ranges, block)
    check_both("cupy-cuda", q, k, v, selection)
    assert "ordered_union.cu" in started
    check_poison("cupy-cuda", q, k, v, selection)
    check_deterministic("cupy-cuda", q, k, v, selection, 3)
    positions = torch.randint(0, S_kv, (B, S), generator=torch.Generator().manual_seed(2)).cuda()
    check_both("cupy-cuda", q, k, v, Selection(ranges, block), q_pos=positions)
    reset()
