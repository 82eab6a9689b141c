"""The shapes of shipped models (docs/models.md) on a GPU, for every fast backend: parity both ways, poison, 50 bit-equal reruns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel.selection import Selection
from tests.helpers.cases import assert_forward, make_blocks, make_qkv
from tests.helpers.poison import new_memory_is_nan

pytestmark = pytest.mark.gpu

# S, S_kv, groups of q, of k, h, Dk, Dv, n, block. Row counts that fill no tile; S_kv ends within a block.
MODELS = {
    "qsa": (45, 1030, 2, 2, 12, 256, 256, 100, 4),
    "qsa-8": (45, 1030, 2, 2, 12, 256, 256, 50, 8),
    "256": (45, 1030, 2, 2, 12, 256, 256, 6, 64),
    "nsa": (40, 1000, 4, 4, 16, 192, 128, 6, 64),
    "minimax-m3": (40, 1500, 4, 4, 16, 128, 128, 6, 128),
    "minicpm4": (40, 2000, 2, 2, 16, 128, 128, 20, 64),
    "moba": (45, 1600, 8, 2, 1, 128, 128, 3, 512),
}


def inputs(model: str, B: int = 1, S: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    rows, S_kv, groups, kv_groups, h, Dk, Dv, _, _ = MODELS[model]
    size: dict[str, Any] = {"B": B, "S": S or rows, "h": h, "Dk": Dk, "Dv": Dv, "S_kv": S_kv, "dtype": torch.bfloat16, "device": "cuda"}
    return make_qkv(G=groups, **size)[0], *make_qkv(G=kv_groups, seed=1, **size)[1:]


def selection_of(model: str, B: int = 1, S: int | None = None, n: int | None = None) -> Selection:
    rows, S_kv, groups, _, _, _, _, most, block = MODELS[model]
    return make_blocks(B, S or rows, groups, S_kv, n or most, block, device="cuda")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("B", [2, 80])
def test_decoding_by_the_policys_choice(model: str, B: int) -> None:
    q, k, v = inputs(model, B, 1)
    selection = selection_of(model, B, 1)
    with new_memory_is_nan():
        runs = [nsa_sel.selection_attention(q, k, v, selection, return_lse=True) for _ in range(50)]
    assert nsa_sel.decisions()[-1].forward not in (None, "sdpa-packed")
    assert_forward(runs[0], q, k, v, selection.ranges)
    assert all(torch.equal(x, y) for run in runs for x, y in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("model", ["qsa", "minimax-m3", "moba"])
@pytest.mark.parametrize("page", [16, 128])
def test_decoding_over_pages(model: str, page: int) -> None:
    S_kv = MODELS[model][1]
    q, k, v = inputs(model, 4, 1)
    selection, each = selection_of(model, 4, 1), -(-S_kv // page)
    lengths = torch.tensor([S_kv, S_kv // 2, 5, S_kv - 3], dtype=torch.int32, device="cuda")
    order = torch.randperm(4 * each, generator=torch.Generator().manual_seed(0)).cuda()
    padded = (torch.nn.functional.pad(x, (0, 0, 0, each * page - S_kv), value=float("nan")).transpose(1, 2) for x in (k, v))
    pools = [x.unflatten(1, (each, page)).flatten(0, 1)[order].contiguous() for x in padded]
    table = order.argsort().view(4, each).int()
    got = nsa_sel.selection_attention_with_kvcache(q, *pools, selection, lengths, table, return_lse=True)
    assert_forward(got, q, k, v, selection.ranges, q_pos=lengths[:, None].long() - 1)


def test_heads_that_select_for_themselves_copy_no_keys() -> None:
    """Beside o and what is rearranged (q and o), the peak stays far below a repeated K and V."""
    S, G, r, D = 4096, 2, 16, 128
    q = torch.randn(1, S, G * r, 1, D, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(1, G, 65536, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    selection = make_blocks(1, S, G * r, 65536, 2, 4096, device="cuda")
    nsa_sel.selection_attention(q, k, v, selection, backend="triton-tile")  # compiles, and caches the selection's rows
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    nsa_sel.selection_attention(q, k, v, selection, backend="triton-tile")
    repeated = 2 * r * k.numel() * k.element_size()
    assert torch.cuda.max_memory_allocated() - before < repeated / 4
