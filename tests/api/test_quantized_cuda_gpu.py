"""e4m3 caches by cupy-cuda on Hopper: every layout, scale, number of heads and of new tokens; NaN wherever nothing may be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_sel.selection import Selection
from tests.helpers.cache_cases import LENGTHS
from tests.helpers.gpus import needs, needs_hopper
from tests.helpers.quantized_cases import EACH, QuantizedCache, called, check_quantized, large_keys, make_quantized, shared_by_sequences

pytestmark = [pytest.mark.gpu, needs("cupy-cuda"), needs_hopper]
GARBAGE = 2**30  # after a sequence's last page: a key there would be far outside of memory


def gpu_cache(each: str | None, page_size: int | None, **sizes: Any) -> QuantizedCache:
    given = make_quantized(
        each, page_size, **{"dtype": torch.bfloat16, "device": "cuda", "h": 16, "Dk": 128, "Dv": 128, "block": 64, "room": 512, **sizes}
    )
    table = given.cache.block_table
    return given if table is None else given.replaced(block_table=torch.where(table < 0, GARBAGE, table))


def check(given: QuantizedCache) -> tuple[torch.Tensor, torch.Tensor]:
    """`check_quantized`, and the same bits again."""
    found = check_quantized(given, "cupy-cuda")
    assert all(map(torch.equal, found, called(given, "cupy-cuda")))
    return found


@pytest.mark.parametrize(
    ("S", "h", "D", "block", "page_size", "each"),
    [
        (4, 4, 128, 64, 64, "page"),
        (8, 3, 64, 128, None, "head"),
        (3, 8, 128, 64, 256, "page"),
        (8, 1, 128, 64, None, None),
    ],
)
def test_tiles_of_tokens(S: int, h: int, D: int, block: int, page_size: int | None, each: str | None, started: list[str]) -> None:
    """One tile of all tokens of a sequence, and several; sequences shorter than S among others."""
    given = gpu_cache(each, page_size, S_q=S, h=h, Dk=D, Dv=D, block=block, lengths=(0, 1, 7, 70, 575) * 11, room=640)
    o, lse = check(given)
    assert set(started) == {"forward_tokens.cu"}
    check(given.asked(given.cache.q.half()))
    for s in range(S):  # each token alone: of the last S_q, those before it
        one = given.replaced(
            q=given.cache.q[:, s : s + 1], selection=Selection(given.cache.selection.ranges[:, s : s + 1].contiguous(), block),
            cache_seqlens=(given.cache.cache_seqlens - (S - 1 - s)).clamp(min=0),
        )  # fmt: skip
        alone, alone_lse = called(one, "cupy-cuda")
        torch.testing.assert_close(alone[:, 0], o[:, s], rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(alone_lse[:, 0], lse[:, s], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [0.0, -1.0])
@pytest.mark.parametrize("each", ["head", "page"])
def test_scales_may_be_zero_or_negative(each: str, factor: float) -> None:
    """The largest logit is that of the smallest product then."""
    check(gpu_cache(each, 64, lengths=(150, 300)).scaled(factor, -1.0))


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 100.0, 1e30])
def test_scales_of_pages_may_have_any_size(factor: float) -> None:
    check(gpu_cache("page", 64, lengths=(150, 300)).scaled(v=factor))


@pytest.mark.parametrize(("page_size", "each"), [(None, "head"), (64, "page")])
@pytest.mark.parametrize("S_q", [1, 4, 12])
def test_keys_may_be_larger_than_float16_has_numbers(S_q: int, page_size: int | None, each: str) -> None:
    check(large_keys(gpu_cache(each, page_size, lengths=LENGTHS * 40, S_q=S_q, dtype=torch.float16)))


def test_a_cache_that_sequences_share_is_copied() -> None:
    """TMA takes no stride of 0."""
    check(shared_by_sequences(gpu_cache("head", None, lengths=(300, 300, 300))))


@pytest.mark.parametrize("each", EACH)
def test_a_step_is_one_launch(each: str | None, started: list[str]) -> None:
    given = gpu_cache(each, 64)
    called(given, "cupy-cuda")
    started.clear()
    called(given, "cupy-cuda")
    assert started == ["forward_blocks.cu"]
