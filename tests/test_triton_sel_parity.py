"""Forward and backward parity of the Triton backends in the interpreter, on CPU tensors: the matrix of REQUIREMENTS 8, few rows."""

from __future__ import annotations

import pytest
import torch

from nsa_sel.selection import Selection
from tests.helpers.cases import make_blocks, make_qkv, make_spans
from tests.helpers.parity import attend, check_both, check_forward

pytestmark = pytest.mark.slow  # in all: the interpreter knows no threads
BACKENDS = ("triton-group", "triton-token")


@pytest.mark.parametrize("kind", ["few", "many", "mixed"])
@pytest.mark.parametrize("h", [2, 8])
@pytest.mark.parametrize(("Dk", "Dv"), [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("L", [64, 128, 256, 512])
def test_forward_matrix(L: int, Dk: int, Dv: int, h: int, kind: str) -> None:
    q, k, v = make_qkv(S=2, G=1, h=h, Dk=Dk, Dv=Dv, S_kv=L + 88, seed=L + Dk + h)
    check_forward("triton-group", q, k, v, Selection.from_ranges(make_spans(kind, 1, 2, 1, L + 88, L)))


@pytest.mark.parametrize("kind", ["few", "many", "mixed"])
@pytest.mark.parametrize("L", [64, 256])
def test_forward_matrix_by_token(L: int, kind: str) -> None:
    q, k, v = make_qkv(S=2, G=1, h=2, Dk=64, Dv=128, S_kv=L + 88, seed=L)
    check_forward("triton-token", q, k, v, Selection.from_ranges(make_spans(kind, 1, 2, 1, L + 88, L)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("h", [1, 3, 6, 12])
def test_gradients_for_any_number_of_heads(backend: str, h: int) -> None:
    q, k, v = make_qkv(S=10, G=1, h=h, Dk=16, Dv=32, S_kv=40, seed=h)
    check_both(backend, q, k, v, make_blocks(1, 10, 1, 40, 3, 8))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("Dk", "Dv"), [(8, 8), (8, 16), (16, 8), (24, 40), (192, 128), (256, 256)])
def test_gradients_for_any_head_dim(backend: str, Dk: int, Dv: int) -> None:
    q, k, v = make_qkv(S=4, G=2, h=2, Dk=Dk, Dv=Dv, S_kv=36, seed=Dk)
    check_both(backend, q, k, v, make_blocks(1, 4, 2, 36, 2, 16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision(backend: str) -> None:
    q, k, v = make_qkv(S=6, G=1, h=4, Dk=32, Dv=16, S_kv=50, dtype=torch.float16)
    check_both(backend, q, k, v, make_blocks(1, 6, 1, 50, 3, 16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_of_unaligned_ranges_and_transposed_views(backend: str) -> None:
    q, k, v = make_qkv(B=3, S=5, G=2, h=2, Dk=16, Dv=24, S_kv=45)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))  # a [B,S_kv,G,D] cache
    check_both(backend, q, k, v, Selection.from_ranges(make_spans("mixed", 3, 5, 2, 45, 20)))


def test_more_heads_than_one_tile() -> None:
    q, k, v = make_qkv(S=3, G=1, h=70, Dk=16, S_kv=40)
    check_both("triton-group", q, k, v, make_blocks(1, 3, 1, 40, 2, 16))


def test_more_ranges_than_one_walk() -> None:
    ranges = (2 * torch.arange(70)[:, None] + torch.tensor([0, 1])).int().expand(1, 3, 1, 70, 2)
    q, k, v = make_qkv(S=3, G=1, h=2, Dk=16, S_kv=150)
    for backend in BACKENDS:
        check_both(backend, q, k, v, Selection.from_ranges(ranges))


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_wider_and_narrower_than_a_step(backend: str) -> None:
    for block_size in (16, 128):
        q, k, v = make_qkv(S=3, G=1, h=2, Dk=16, S_kv=300, seed=block_size)
        check_both(backend, q, k, v, make_blocks(1, 3, 1, 300, 3, block_size))


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_equals_the_last_row_of_prefill(backend: str) -> None:
    q, k, v = make_qkv(B=2, S=70, G=2, h=4, Dk=16, S_kv=70)
    selection = make_blocks(2, 70, 2, 70, 3, 16)
    last = Selection.from_ranges(selection.ranges[:, -1])
    decoded = attend(backend, q[:, -1], k, v, last)[0]
    whole = attend(backend, q[:, -2:], k, v, Selection.from_ranges(selection.ranges[:, -2:]))[0]
    torch.testing.assert_close(decoded, whole[:, -1], atol=2e-6, rtol=0)
    check_forward(backend, q[:, -1:], k, v, Selection.from_ranges(selection.ranges[:, -1:]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_queries_give_equal_heads(backend: str) -> None:
    q, k, v = make_qkv(S=4, G=2, h=1, Dk=16, S_kv=40)
    o = attend(backend, q.expand(1, 4, 2, 5, 16), k, v, make_blocks(1, 4, 2, 40, 2, 16))[0]
    assert torch.equal(o, o[..., :1, :].expand_as(o))


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions(backend: str) -> None:
    q, k, v = make_qkv(B=2, S=4, G=1, h=2, Dk=16, S_kv=40)
    positions = torch.tensor([[3, 39, 0, 20], [7, 7, 30, 1]])
    check_both(backend, q, k, v, Selection.from_ranges(make_spans("few", 2, 4, 1, 40, 24)), q_pos=positions)
    check_both(backend, q, k, v, make_blocks(2, 4, 1, 40, 2, 8), q_pos=positions[0].int())
