"""Choosing blocks in packed batches, by every backend: against the float64 oracle, and against a call for each sequence alone."""

from __future__ import annotations

import dataclasses
import math
from itertools import accumulate
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from msgspec.structs import replace

from nsa_sel.backends import choose_torch, choose_triton
from nsa_sel.backends._triton import choose_dkdv, choose_rows
from nsa_sel.core.call import ChooseCall, Rule
from tests.helpers.cases import make_grads
from tests.helpers.choose_cases import SMALL, check_both, check_unread, make_packed_call, oracle, results

BACKENDS = pytest.mark.parametrize("backend", [choose_torch, choose_triton], ids=["torch", "triton"])
MIXED = (5, 0, 1, 18, 8, 11)  # shorter than a compressed block of 8, empty, one row, one compressed key, and more; not multiples
CASES: dict[str, ChooseCall] = {
    "mixed": make_packed_call(MIXED, sizes=(1, 3, 16, 24)),
    "one-sequence": make_packed_call((18,), spare=0, sizes=(1, 4, 16, 16)),
    "nothing-but-padding": make_packed_call((0, 0), spare=9, sizes=(1, 2, 16, 16)),
    "two-groups": make_packed_call((2, 12), spare=1),
    "fewer-pieces-than-a-block": make_packed_call((13, 9), rule=SMALL._replace(block_size=12, n=3), sizes=(1, 6, 16, 16)),
}


@pytest.fixture(autouse=True)
def few_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short sequences take several steps, tiles and sections."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(choose_triton, "config_of", lambda call, kernel: replace(choose_triton.CONFIGS[kernel], block_l=16))
        monkeypatch.setattr(choose_dkdv, "SHORTEST", 8)


@BACKENDS
def test_packed_batches_in_float16_with_a_negative_scale(backend: ModuleType) -> None:
    call = make_packed_call((9, 2, 12), sizes=(1, 4, 16, 16), dtype=torch.float16, scale=-0.3)
    check_both(backend, call)


def test_the_oracle_of_a_packed_batch_is_that_of_each_sequence() -> None:
    call = CASES["mixed"]
    whole = oracle(call)
    for rows, _, sequence in call.each_sequence():
        alone = oracle(sequence)
        assert all(torch.equal(getattr(whole, name)[:, rows], getattr(alone, name)) for name in ("o", "lse", "blocks"))
        assert torch.equal(whole.importance[:, rows, :, : sequence.blocks], alone.importance)
    assert bool((whole.blocks[:, -3:] == -1).all())


@BACKENDS
def test_packed_batches_equal_a_call_for_each_sequence(backend: ModuleType) -> None:
    """Bit by bit but for dk and dv, whose sections differ."""
    call = make_packed_call((5, 0, 19, 10), sizes=(1, 3, 16, 24))
    do, dlse = make_grads(call.q, call.v)
    found = results(backend, call, do, dlse)
    for rows, keys, sequence in call.each_sequence():
        alone = results(backend, sequence, do[:, rows], dlse[:, rows])
        assert all(torch.equal(x[:, rows], y) for x, y in zip(found[:4], alone, strict=False))
        for x, y in zip(found[4:], alone[4:], strict=True):
            torch.testing.assert_close(x[:, :, keys], y, rtol=1e-5, atol=1e-5)


@BACKENDS
def test_padding_and_other_sequences_are_not_read(backend: ModuleType) -> None:
    """NaN in padding, in rows that see nothing, in unused keys, and in every second sequence; reruns are bit-equal."""
    call = make_packed_call((9, 1, 17), sizes=(1, 2, 16, 16))
    clean, (do, dlse) = check_unread(backend, call), make_grads(call.q, call.v)
    q, k, v = call.q.clone(), call.k.clone(), call.v.clone()
    others = list(call.each_sequence())
    for rows, keys, _ in others[::2]:
        q[:, rows], k[:, :, keys], v[:, :, keys] = math.nan, math.nan, math.nan
    found = results(backend, call.of(q, k, v), do, dlse)
    for rows, keys, _ in others[1::2]:
        assert all(torch.equal(x[:, rows], y[:, rows]) for x, y in zip(clean[:4], found, strict=False))
        assert all(torch.equal(x[:, :, keys], y[:, :, keys]) for x, y in zip(clean[4:], found[4:], strict=True))


def test_parts_of_the_rows_give_the_same_blocks() -> None:
    """Scores of a few rows at once: parts begin and end within sequences."""
    call = make_packed_call((1, 17, 9), sizes=(1, 2, 16, 16))
    whole = choose_triton.forward(call)[2]
    for rows in (5, 16):
        assert torch.equal(
            choose_triton.best_blocks(dataclasses.replace(call, scratch=rows * 16 * 4), choose_triton.attention(call)[1]), whole
        )


@triton.jit
def sequences_kernel(bounds, found, origin, most, N, TILE: tl.constexpr):
    number = tl.program_id(0)
    i = choose_rows.sequence_of(number, bounds, origin, most, N, TILE)
    begin, end = choose_rows.span_of(i, bounds, origin, most, N)
    tl.store(found + 3 * number, i)
    tl.store(found + 3 * number + 1, begin)
    tl.store(found + 3 * number + 2, end)


@pytest.mark.parametrize(
    ("lengths", "origin"),
    [((3,), 0), ((0, 9, 0, 0, 1, 4), 0), ((1, 30, 2), 7), ((1,) * 31, 0), ((3, 0) * 24, 0)],
    ids=["one", "empty", "from-a-row", "31", "48"],
)
def test_every_tile_finds_its_sequence(lengths: tuple[int, ...], origin: int) -> None:
    """Of four rows each; padding, of five rows, is sequence N. Rows count from `origin` on."""
    bounds = [0, *accumulate(lengths)]
    most, N = bounds[-1] + 5 - origin, len(lengths)
    tiles = most // 4 + N + 1
    found = torch.zeros(tiles, 3, dtype=torch.int32)
    sequences_kernel[(tiles,)](torch.tensor(bounds), found, origin, most, N, TILE=4)
    covered = set()
    for number, (i, begin, end) in enumerate(found.tolist()):
        wanted = max(0, bounds[i] - origin), most if i == N else max(0, bounds[i + 1] - origin)
        assert (begin, end) == wanted
        first = begin + 4 * (number - begin // 4 - i)
        covered |= {(i, row) for row in range(first, min(first + 4, end))}
    owners = {(i, row - origin) for i in range(N) for row in range(bounds[i], bounds[i + 1]) if row >= origin}
    assert covered == owners | {(N, row) for row in range(most - 5, most)}


def test_wrong_bounds_give_tiles_within_the_tensors() -> None:
    for bounds in ([0, 40, 20, 30], [0, 90, 200, 50], [-7, -3, 5, 9], [2**40, 1, 0, -(2**40)]):
        found = torch.zeros(12, 3, dtype=torch.int32)
        sequences_kernel[(12,)](torch.tensor(bounds), found, 0, 30, 3, TILE=4)
        i, begin, end = found.unbind(1)
        assert bool(((i >= 0) & (i <= 3) & (begin >= 0) & (begin <= end) & (end <= 30)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(2, 16, 128, 128), (1, 6, 192, 128)], ids=["h16", "h6-192-128"])
def test_packed_batches_match_the_oracle_on_a_gpu(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    call = make_packed_call((70, 0, 1, 31, 333, 32, 150, *(1, 0, 40) * 30), 20, Rule(), sizes, dtype, "cuda")
    check_both(choose_triton, call, 1e-4)


@pytest.mark.gpu
def test_packed_poison_and_reruns_on_a_gpu() -> None:
    call = make_packed_call((70, 0, 1, 31, 333, 32, 150) * 3, 20, Rule(), (2, 16, 128, 128), torch.bfloat16, "cuda")
    check_unread(choose_triton, call, reruns=10)
