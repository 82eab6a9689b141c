"""flash-linear-attention's plain functions, run from its wheel, against ours where the definitions agree.

They do for compressed keys of whole blocks that do not overlap: compress_block = compress_stride = block_size. Its window needs
flash-attn, which needs a GPU, and is compared in tests/api/test_window.py with a reference of our own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa_sel import compressed_attention, nsa_attention
from nsa_sel.compression import BlockMean

naive = pytest.importorskip("fla.ops.nsa.naive", reason="pip install fla-core")

B, S, G, h, D, BLOCK, N = 2, 150, 2, 3, 16, 16, 4  # the last block is not whole
SIZES = {"compress_block": BLOCK, "compress_stride": BLOCK, "block_size": BLOCK, "n": N}
SCALE = D**-0.5
ROUNDING = 2e-6  # fla computes in float32


@pytest.fixture(autouse=True)
def cheapest_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the selected branch: the one that compiles nothing."""
    monkeypatch.setenv("NSA_SEL_BACKEND", "sdpa-packed")


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """q [B,S,G,h,D], and k, v [B,S,G,D] as fla keeps them."""
    torch.manual_seed(0)
    return torch.randn(B, S, G, h, D), torch.randn(B, S, G, D), torch.randn(B, S, G, D)


def compressed(x: Tensor) -> Tensor:
    """[B,S/BLOCK,G,D] in fla's layout."""
    return BlockMean(BLOCK, BLOCK)(x).transpose(1, 2)


def test_compressed_attention_and_its_blocks() -> None:
    q, k, v = inputs()
    k_cmp, v_cmp = compressed(k), compressed(v)
    wanted, wanted_lse = naive.naive_nsa_compression(q.flatten(2, 3), k_cmp, v_cmp, BLOCK, SCALE)
    indices = naive.naive_nsa_topk(q.flatten(2, 3), k_cmp, N, BLOCK, SCALE)
    o, selection, lse = compressed_attention(q, k_cmp.transpose(1, 2), v_cmp.transpose(1, 2), return_lse=True, **SIZES)
    assert torch.allclose(o.flatten(2, 3), wanted, rtol=0, atol=ROUNDING)
    assert torch.allclose(lse.flatten(2, 3), wanted_lse, rtol=0, atol=ROUNDING)
    last = S // BLOCK * BLOCK  # of later rows fla does not know the current block: it is not compressed
    assert torch.equal(sets(selection.block_indices[:, :last]), sets(indices[:, :last]))


def sets(indices: Tensor) -> Tensor:
    """Block indices in ascending order, padding first."""
    return indices.long().sort(-1).values


def test_the_layer_without_a_window() -> None:
    q, k, v = inputs()
    gates = torch.rand(B, S, G, h, 3)
    gates[..., 2] = 0
    rows = S // BLOCK * BLOCK
    q, k, v, gates = q[:, :rows], k[:, :rows], v[:, :rows], gates[:, :rows]
    k_cmp, v_cmp = compressed(k), compressed(v)
    heads = q.flatten(2, 3)
    selected = naive.naive_nsa_selection(heads, k, v, naive.naive_nsa_topk(heads, k_cmp, N, BLOCK, SCALE), BLOCK, SCALE)
    wanted = naive.naive_nsa_compression(heads, k_cmp, v_cmp, BLOCK, SCALE)[0] * gates[..., 0].flatten(2).unsqueeze(-1)
    wanted = wanted + selected * gates[..., 1].flatten(2).unsqueeze(-1)
    keys = (x.transpose(1, 2) for x in (k_cmp, v_cmp, k, v, k, v))
    o = nsa_attention(q, *keys, gates, window=8, **SIZES)
    assert torch.allclose(o.flatten(2, 3), wanted, rtol=0, atol=ROUNDING)
