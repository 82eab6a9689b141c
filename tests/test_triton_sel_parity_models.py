"""The shapes of shipped models (docs/choosing.md), small, in the interpreter: tiny blocks with an unaligned tail, several groups of q for
each KV group. Their sizes are in test_triton_sel_parity_gpu.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_sel.backends import triton_group
from nsa_sel.backends._triton import dkdv
from nsa_sel.backends._triton.blocks import merged
from nsa_sel.core.request import DeviceInfo
from nsa_sel.errors import BackendError
from tests.helpers.cases import make_blocks, make_call, make_qkv
from tests.helpers.parity import attend, check_both

pytestmark = pytest.mark.slow  # in all: the interpreter knows no threads
small_blocks = pytest.mark.parametrize(("block", "n"), [(4, 9), (8, 5)])


@pytest.mark.parametrize(("B", "G", "D", "parts"), [(1, 2, 16, 5), (6, 1, 136, 2)])
def test_small_blocks_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch, B: int, G: int, D: int, parts: int) -> None:
    """Fewer rows than the interpreter's multiprocessors, and fewer than twice as many."""
    joined: list[int] = []
    combine = triton_group.combine
    monkeypatch.setattr(triton_group, "combine", lambda *of: (joined.append(of[-1]), combine(*of)))
    check_both("triton-group", *make_qkv(B=B, S=1, G=G, h=3, Dk=D, S_kv=250), make_blocks(B, 1, G, 250, 40, 4))
    assert joined == [parts]


@pytest.mark.parametrize(
    ("B", "D", "parts"), [(8, 256, 33), (64, 256, 4), (96, 256, 2), (132, 256, 2), (133, 256, 1), (64, 128, 1), (8, 128, 8)]
)
def test_few_warps_share_a_row_of_small_blocks_while_a_multiprocessor_has_room(B: int, D: int, parts: int) -> None:
    call = make_call(*make_qkv(B=1, S=1, G=2, h=12, Dk=D, S_kv=4096, dtype=torch.bfloat16), make_blocks(1, 1, 2, 4096, 512, 4))
    call.device = DeviceInfo(kind="cuda", sm=90, name="NVIDIA H100", sm_count=132, shared_memory=227 << 10)
    config = call.settings.kernel("triton-group/decode" + ("-widest" if D == 256 else ""))
    assert triton_group._split_parts(call, config, 2 * B) == parts


def test_other_small_blocks_are_refused_with_the_sizes_that_are_taken() -> None:
    with pytest.raises(BackendError, match=r"block-multiple .*4 or 8 or a multiple of 16"):
        attend("triton-tile", *make_qkv(S=4, G=1, h=2, Dk=16, S_kv=40), make_blocks(1, 4, 1, 40, 2, 5))


@small_blocks
def test_merged_blocks_name_each_tile_once_with_the_blocks_of_the_row(block: int, n: int) -> None:
    B, S, G, S_kv, width = 2, 6, 2, 150, 64
    selection = make_blocks(B, S, G, S_kv, n, block)
    call, bits = merged(make_call(*make_qkv(B=B, S=S, G=G, Dk=16, S_kv=S_kv), selection), width)
    assert bits is not None
    assert (call.selection.block_size, call.selection.n) == (width, min(n, 3))
    for row, tiles, marked in zip(
        selection.block_indices.flatten(0, 2).tolist(), call.selection.block_indices.flatten(0, 2).tolist(), bits.flatten(0, 2).tolist(),
        strict=True,
    ):  # fmt: skip
        named = [tile for tile in tiles if tile >= 0]
        assert len(set(named)) == len(named)
        each = width // block
        found = {tile * each + i for tile, mask in zip(tiles, marked, strict=True) if tile >= 0 for i in range(each) if mask >> i & 1}
        assert found == {j for j in row if j >= 0}


def test_gradients_of_small_blocks_list_a_row_once_for_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[Any] = []
    plan = dkdv.plan_within
    monkeypatch.setattr(dkdv, "plan_within", lambda call, *sizes: widths.append(call.selection.block_size) or plan(call, *sizes))
    check_both("triton-group", *make_qkv(S=3, G=1, h=2, Dk=16, S_kv=63), make_blocks(1, 3, 1, 63, 6, 4))
    assert widths
    assert all(width >= 16 for width in widths)


@pytest.mark.parametrize("backend", ["triton-group", "triton-tile", "triton-block"])
def test_each_head_selects_for_itself(backend: str) -> None:
    q, _, _ = make_qkv(S=5, G=4, h=1, Dk=16, S_kv=50)
    _, k, v = make_qkv(S=5, G=2, h=1, Dk=16, S_kv=50, seed=1)
    check_both(backend, q, k, v, make_blocks(1, 5, 4, 50, 2, 16))
