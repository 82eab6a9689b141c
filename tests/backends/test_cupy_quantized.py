"""Hopper's kernel of whole blocks over e4m3 caches without a GPU: emulated, against the float64 oracle on the numbers that are stored."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from nsa_sel.backends import cupy_cuda
from nsa_sel.core.call import Call
from nsa_sel.oracle import oracle_forward
from nsa_sel.quantize import scales_of
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from tests.helpers.caches import Cache, QuantizedCache, gathered, large_keys, make_quantized, positions, shared_by_sequences, uneven_queries
from tests.helpers.cases import assert_within_twice_baseline, plain_torch
from tests.helpers.checks import new_memory_is_nan
from tests.helpers.cuda import BACKWARDS, EAGER, GPU, emulated, needs_compiler
from tests.helpers.gpus import noted

pytestmark = needs_compiler

GARBAGE = 2**30  # in the block table, after a sequence's last page
OF_PAGES: dict[str, Any] = {"each": "page", "page_size": 64, "dtype": torch.bfloat16, "Dk": 128, "Dv": 64}
OF_MANY_HEADS = {**OF_PAGES, "G": 1, "h": 17, "n": 5, "room": 640, "lengths": (37, 640)}  # an odd number of keys in a step
OF_TOKENS = {"S_q": 4, "room": 640, "lengths": (2, 600)}  # each token has blocks that others have not
OF_HEADS: dict[str, Any] = {"each": "head", "page_size": None, "dtype": torch.float16, "Dk": 64, "Dv": 128}


def small_cache(**sizes: Any) -> QuantizedCache:
    """NaN wherever no sequence has a key, as a number and as a page's scale."""
    given = make_quantized(**{"h": 3, "block": 64, "lengths": (0, 1, 150), **sizes})
    table = given.cache.block_table
    return given if table is None else given.replaced(block_table=torch.where(table < 0, GARBAGE, table))


def call_of(given: QuantizedCache, sm_count: int) -> Call:
    cache = given.cache
    paged, gpu = cache.block_table is not None, msgspec.structs.replace(GPU, sm_count=sm_count)
    scales = scales_of(cache.q, cache.k_cache, cache.v_cache, given.scales.get("k_scale"), given.scales.get("v_scale"), paged)
    k, v = (x.transpose(1, 2) for x in (cache.k_cache, cache.v_cache))
    scale, settings = cache.q.shape[-1] ** -0.5, settings_for(gpu)
    return Call(cache.q, k, v, cache.selection, None, scale, settings, gpu, cache.cache_seqlens, cache.block_table, scales=scales)


def forward(given: QuantizedCache, sm_count: int = GPU.sm_count) -> tuple[Tensor, Tensor]:
    """o and lse over memory that held NaN. More multiprocessors than a row for each: a cluster shares a row, and each token has its own."""
    call = call_of(given, sm_count)
    with new_memory_is_nan():
        return cupy_cuda.forward(call)


def check(given: QuantizedCache, sm_count: int = GPU.sm_count) -> tuple[Tensor, Tensor]:
    """`forward`, within twice the error of a float32 computation."""
    o, lse = forward(given, sm_count)
    rows = given.cache.selection.ranges, None, positions(given.cache)
    q, (k, v) = given.cache.q, gathered(given.exact)
    exact, baseline = oracle_forward(q, k, v, *rows), plain_torch(q.float(), k.float(), v.float(), *rows)
    assert_within_twice_baseline(o, exact[0], baseline[0].to(o.dtype), "o")
    assert_within_twice_baseline(lse, exact[1], baseline[1], "lse")
    return o, lse


@pytest.mark.parametrize(
    ("sizes", "sm_count", "kernel"),
    [
        (OF_PAGES, 2, "forward_blocks.cu"),
        (OF_HEADS, 2, "forward_blocks.cu"),
        (OF_MANY_HEADS, 4, "forward_blocks.cu"),
        ({**OF_PAGES, **OF_TOKENS}, 2, "forward_tokens.cu"),
        ({**OF_HEADS, **OF_TOKENS, "S_q": 5, "h": 8}, 2, "forward_tokens.cu"),
    ],
)
def test_caches_match_the_oracle_in_any_order(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], sm_count: int, kernel: str) -> None:
    """The same bits whichever thread or CTA runs first, and whenever copies arrive."""
    given, found = small_cache(**sizes), []
    for mode in (0, BACKWARDS | EAGER):
        emulated(monkeypatch, mode)
        started = noted(monkeypatch)
        found.append(check(given, sm_count))
        assert started == [kernel]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("sizes", [OF_PAGES, OF_HEADS])
@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_scales_may_be_zero_or_negative(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], factor: float) -> None:
    """The largest logit is that of the smallest product then."""
    emulated(monkeypatch)
    check(small_cache(**sizes, G=1).scaled(factor, -1.0))


@pytest.mark.parametrize("exponent", [-60, 60])
def test_queries_of_any_magnitude_keep_their_digits(monkeypatch: pytest.MonkeyPatch, exponent: int) -> None:
    """Queries of bfloat16 are scaled to float16."""
    emulated(monkeypatch)
    check(uneven_queries(small_cache(**OF_PAGES, G=1), exponent))


@pytest.mark.parametrize("sizes", [{}, OF_TOKENS])
def test_keys_may_be_larger_than_float16_has_numbers(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]) -> None:
    emulated(monkeypatch)
    check(large_keys(small_cache(**OF_HEADS, **sizes, G=1)), sm_count=2)


def without_blocks(cache: Cache, token: int) -> Cache:
    """The first sequence's token selects nothing."""
    ranges = cache.selection.ranges.clone()
    ranges[0, token] = 0
    return cache._replace(selection=Selection.from_ranges(ranges, cache.selection.block_size, disjoint=True))


@pytest.mark.parametrize(("sm_count", "kernel"), [(2, "forward_tokens.cu"), (16, "forward_blocks.cu"), (64, "forward_blocks.cu")])
@pytest.mark.parametrize("name", ["k_scale", "v_scale", "v_cache"])
def test_nan_never_reaches_rows_that_select_nothing(monkeypatch: pytest.MonkeyPatch, name: str, sm_count: int, kernel: str) -> None:
    """In a scale, or in a value that other tokens of the sequence select."""
    emulated(monkeypatch)
    started = noted(monkeypatch)
    given = small_cache(**{**OF_HEADS, **OF_TOKENS, "G": 1, "lengths": (300, 600)})
    given = given._replace(cache=without_blocks(given.cache, 0))
    if name == "v_cache":
        given.cache.v_cache[0, :64, 0, 3] = torch.nan
    else:
        given.scales[name].fill_(torch.nan)
    o, lse = forward(given, sm_count)
    assert set(started) == {kernel}
    assert bool((o[0, 0] == 0).all())
    assert bool((lse[0, 0] == -torch.inf).all())
    assert bool(o[0, 1:].isnan().any())


def test_nan_that_no_token_sees_of_a_block_that_it_selected_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 0 selected the first block and sees 63 of its keys; the others, which see all, selected the second."""
    emulated(monkeypatch)
    started = noted(monkeypatch)
    given = small_cache(**{**OF_HEADS, "S_q": 4, "room": 640, "lengths": (66, 600), "G": 1, "n": 1})
    ranges = given.cache.selection.ranges.clone()
    ranges[0, :, 0, 0] = torch.tensor([[0, 64], [64, 128], [64, 128], [64, 128]], dtype=ranges.dtype)
    given = given._replace(cache=given.cache._replace(selection=Selection.from_ranges(ranges, 64, disjoint=True)))
    o, _ = check(given, 2)
    given.cache.v_cache[0, 63] = torch.nan
    assert torch.equal(forward(given, 2)[0], o)
    assert set(started) == {"forward_tokens.cu"}


def test_a_cache_that_sequences_share_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA takes no stride of 0."""
    emulated(monkeypatch)
    check(shared_by_sequences(small_cache(**OF_HEADS, lengths=(150, 150, 150))))


@pytest.mark.parametrize(
    ("sizes", "sm_count", "tokens", "loads"),
    [
        ({**OF_PAGES, **OF_TOKENS}, 2, 4, 1),
        ({**OF_HEADS, **OF_TOKENS, "S_q": 5, "h": 8}, 2, 2, 1),
        ({**OF_PAGES, **OF_TOKENS}, 64, 1, 1),  # a CTA or a cluster for each token
        ({**OF_MANY_HEADS, "h": 65}, 4, 1, 2),  # 64 heads at once
    ],
)
def test_keys_that_a_tile_of_tokens_shares_are_loaded_once(sizes: dict[str, Any], sm_count: int, tokens: int, loads: int) -> None:
    call = call_of(small_cache(**sizes), sm_count)
    start, end = call.clamped_ranges()
    B, S, G, _ = start.shape
    rows = {(b, s, g): _keys(start[b, s, g], end[b, s, g]) for b in range(B) for s in range(S) for g in range(G)}
    tiles: dict[tuple[int, int, int], set[int]] = {}
    for (b, s, g), keys in rows.items():
        tiles.setdefault((b, s // tokens, g), set()).update(keys)
    selected = sum(map(len, rows.values()))
    wanted = loads * sum(map(len, tiles.values()))
    assert cupy_cuda.loaded_keys(call, selected, True) == wanted
    assert (wanted < selected) == (tokens > 1)
    assert cupy_cuda.loaded_keys(call, selected, False) == loads * selected


def _keys(start: Tensor, end: Tensor) -> set[int]:
    return {key for first, stop in zip(start.tolist(), end.tolist(), strict=True) for key in range(first, stop)}
