"""Forward and backward parity of the Triton backends in the interpreter, on CPU tensors: the matrix of the GPU tests, few rows."""

from __future__ import annotations

import itertools

import pytest
import torch

from nsa_sel.oracle import oracle_forward
from nsa_sel.selection import Selection
from tests.helpers.cases import DISTRIBUTIONS, cut_spans, make_blocks, make_qkv, make_spans
from tests.helpers.pairwise import pairwise
from tests.helpers.parity import attend, check_both, check_forward

pytestmark = pytest.mark.slow  # in all: the interpreter knows no threads
RANGES = ("triton-group", "triton-token")
BLOCKS = ("triton-tile", "triton-block")  # of whole blocks alone
every = pytest.mark.parametrize("backend", [*RANGES, *BLOCKS])
DIMS = [(64, 64), (64, 128), (128, 64), (128, 128)]
LENGTHS, HEADS = [64, 128, 256, 512], [2, 8]
# Any two of (distribution, L, head dims, heads) meet in a case; make test-thorough and make gpu-test-full run the whole product.
USUAL = [
    *pairwise(["triton-group"], DISTRIBUTIONS, LENGTHS, DIMS, HEADS),
    *pairwise(["triton-token"], DISTRIBUTIONS, [64, 256], [(64, 128)], [2]),
]
MATRIX = [
    *USUAL,
    *(pytest.param(*case, marks=pytest.mark.thorough)
      for case in itertools.product(RANGES, DISTRIBUTIONS, LENGTHS, DIMS, HEADS) if case not in USUAL),
    *((name, block, L, dims, h) for name in BLOCKS
      for (L, block), dims, h in pairwise([(64, 64), (128, 16), (256, 32), (512, 128)], DIMS, [2, 8])),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "kind", "L", "dims", "h"), MATRIX)
def test_forward_matrix(backend: str, kind: str | int, L: int, dims: tuple[int, int], h: int) -> None:
    """kind: of spans, or the size of blocks."""
    q, k, v = make_qkv(S=2, G=1, h=h, Dk=dims[0], Dv=dims[1], S_kv=L + 88, seed=L + dims[0] + h)
    if isinstance(kind, int):
        selection = make_blocks(1, 2, 1, L + 88, L // kind, kind)
    else:
        selection = cut_spans(kind, 1, 2, 1, L + 88, L)
    check_forward(backend, q, k, v, selection)
    o, exact = attend(backend, q, k, v, selection)[0], oracle_forward(q, k, v, selection.ranges)[0]
    assert float((o.double() - exact).abs().mean()) <= 1e-6


# Heads of triton-token are programs of their own: 16 of them are no other case than 12, and 70 neither.
@pytest.mark.parametrize(
    ("backend", "h"), [(name, h) for name in (*RANGES, *BLOCKS) for h in (1, 3, 6, 12, 16, 70) if name != "triton-token" or h <= 12]
)
def test_gradients_for_any_number_of_heads(backend: str, h: int) -> None:
    """70 heads take more than one tile; 70 rows of one head take a whole tile and a ragged one."""
    S, S_kv, block = (70 if h == 1 else 3, 80, 16) if backend in BLOCKS else (3, 40, 8)
    q, k, v = make_qkv(S=S, G=1, h=h, Dk=16, Dv=32, S_kv=S_kv, seed=h)
    check_both(backend, q, k, v, make_blocks(1, S, 1, S_kv, 3, block))


@every
@pytest.mark.parametrize(("Dk", "Dv"), [(8, 8), (8, 16), (16, 8), (24, 40), (192, 128), (256, 256)])
def test_gradients_for_any_head_dim(backend: str, Dk: int, Dv: int) -> None:
    q, k, v = make_qkv(S=2, G=2, h=2, Dk=Dk, Dv=Dv, S_kv=36, seed=Dk)
    check_both(backend, q, k, v, make_blocks(1, 2, 2, 36, 2, 16))


@every
def test_half_precision(backend: str) -> None:
    q, k, v = make_qkv(S=6, G=1, h=4, Dk=32, Dv=16, S_kv=50, dtype=torch.float16)
    check_both(backend, q, k, v, make_blocks(1, 6, 1, 50, 3, 16))


@every
def test_batch_of_transposed_views_and_unaligned_ranges(backend: str) -> None:
    q, k, v = make_qkv(B=2, S=3, G=2, h=2, Dk=16, Dv=24, S_kv=77)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))  # a [B,S_kv,G,D] cache
    spans = Selection.from_ranges(make_spans("mixed", 2, 3, 2, 77, 20))
    check_both(backend, q, k, v, make_blocks(2, 3, 2, 77, 3, 16) if backend in BLOCKS else spans)


@pytest.mark.parametrize("backend", RANGES)
def test_more_ranges_than_one_walk(backend: str) -> None:
    ranges = (2 * torch.arange(70)[:, None] + torch.tensor([0, 1])).int().expand(1, 3, 1, 70, 2)
    q, k, v = make_qkv(S=3, G=1, h=2, Dk=16, S_kv=150)
    check_both(backend, q, k, v, Selection.from_ranges(ranges))


@every
@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_blocks_wider_and_narrower_than_a_step(backend: str, block_size: int) -> None:
    q, k, v = make_qkv(S=2, G=1, h=2, Dk=16, S_kv=300, seed=block_size)
    check_both(backend, q, k, v, make_blocks(1, 2, 1, 300, 3, block_size))


@every
def test_decode_equals_the_last_row_of_prefill(backend: str) -> None:
    q, k, v = make_qkv(B=2, S=20, G=1, h=4, Dk=16, S_kv=70)
    ranges = make_blocks(2, 20, 1, 70, 3, 16).ranges
    rows = 20 if backend in BLOCKS else 2  # of 4 heads: more than a tile of 64
    decoded = attend(backend, q[:, -1], k, v, Selection.from_ranges(ranges[:, -1], 16))[0]
    whole = attend(backend, q[:, -rows:], k, v, Selection.from_ranges(ranges[:, -rows:], 16))[0]
    torch.testing.assert_close(decoded, whole[:, -1], atol=2e-6, rtol=0)
    check_forward(backend, q[:, -1:], k, v, Selection.from_ranges(ranges[:, -1:], 16))


@every
def test_equal_queries_give_equal_heads(backend: str) -> None:
    q, k, v = make_qkv(S=4, G=2, h=1, Dk=16, S_kv=40)
    o = attend(backend, q.expand(1, 4, 2, 5, 16), k, v, make_blocks(1, 4, 2, 40, 2, 16))[0]
    assert torch.equal(o, o[..., :1, :].expand_as(o))


@every
def test_positions(backend: str) -> None:
    q, k, v = make_qkv(B=2, S=4, G=1, h=2, Dk=16, S_kv=70)
    positions = torch.tensor([[3, 69, 0, 20], [7, 7, 60, 1]])
    if backend in RANGES:
        check_both(backend, q, k, v, Selection.from_ranges(make_spans("few", 2, 4, 1, 70, 24)), q_pos=positions)
    check_both(backend, q, k, v, make_blocks(2, 4, 1, 70, 3, 16), q_pos=positions)
    check_both(backend, q, k, v, make_blocks(2, 4, 1, 70, 2, 32 if backend in BLOCKS else 8), q_pos=positions[0].int())


@every
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scale(backend: str, scale: float) -> None:
    q, k, v = make_qkv(S=4, G=1, h=2, Dk=16, S_kv=40, requires_grad=True)
    selection = make_blocks(1, 4, 1, 40, 2, 16)
    results = []
    for name in (backend, "sdpa-packed"):
        o, lse = attend(name, q, k, v, selection, scale=scale)
        results.append((o, lse, *torch.autograd.grad(o.square().sum() + lse.sum(), (q, k, v))))
    mine, wanted = results
    torch.testing.assert_close(mine[:2], wanted[:2], atol=2e-6, rtol=0)
    torch.testing.assert_close(mine[2:], wanted[2:], atol=4e-6, rtol=0)  # sums over rows and heads
