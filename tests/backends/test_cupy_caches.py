"""cupy-cuda over caches without a GPU: its portable kernels, emulated on the CPU, read lengths and block tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from nsa_sel.backends import cupy_cuda
from nsa_sel.backends.cupy_cuda import compiler, few_tokens, launch, sm90, token_order
from nsa_sel.core.call import Call
from nsa_sel.core.request import DeviceInfo
from nsa_sel.serving import selection_attention_with_kvcache
from nsa_sel.settings.config import settings_for
from tests.helpers import cuda as emulate
from tests.helpers.caches import LENGTHS, Cache, gathered, make_cache, positions
from tests.helpers.caches import check as check_public
from tests.helpers.cases import assert_forward
from tests.helpers.checks import new_memory_is_nan
from tests.helpers.cuda import BACKWARDS, EAGER, GPU, emulated, needs_compiler
from tests.helpers.gpus import needs, no_waiting

GARBAGE = 2**30  # in the block table, after a sequence's last page: a key there would be far outside of memory


def small_cache(page_size: int | None, **sizes: object) -> Cache:
    """Sizes that most tests share: every other one is compiled anew."""
    cache = make_cache(page_size=page_size, **{"dtype": torch.float16, "h": 3, "Dv": 24, **sizes})  # type: ignore[arg-type]
    if cache.block_table is not None:
        cache.block_table[cache.block_table < 0] = GARBAGE
    return cache


def call_of(cache: Cache, gpu: DeviceInfo = GPU) -> Call:
    k, v = (x.transpose(1, 2) for x in cache[1:3])
    selection, scale = cache.selection, cache.q.shape[-1] ** -0.5
    return Call(cache.q, k, v, selection, None, scale, settings_for(gpu), gpu, cache.cache_seqlens, cache.block_table)


def check(cache: Cache, gpu: DeviceInfo = GPU) -> tuple[Tensor, Tensor]:
    """o and lse are as close to the oracle as everywhere, from outputs that held NaN."""
    with new_memory_is_nan():
        found = cupy_cuda.forward(call_of(cache, gpu))
    known = cache if cache.block_table is None else cache._replace(block_table=cache.block_table % GARBAGE)
    assert_forward(found, cache.q, *gathered(known), cache.selection.ranges, q_pos=positions(cache))
    return found


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("block", "ordered"), [(4, False), (64, False), pytest.param(64, True, marks=pytest.mark.thorough)])
def test_tiles_without_steps_release_their_rows_once_all_lanes_have_them(
    monkeypatch: pytest.MonkeyPatch, block: int, ordered: bool
) -> None:
    """Sequences without keys, more tiles than CTAs. ordered: of tokens that selected alike."""
    emulated(monkeypatch, BACKWARDS | EAGER)
    if ordered:
        monkeypatch.setattr(token_order, "LEAST_TOKENS", 1)
        monkeypatch.setattr(token_order, "LEAST_ROWS", 1)
    cache = small_cache(64, S_q=19, h=16, Dk=64, Dv=64, n=9 if block == 4 else 2, block=block)
    check(cache)
    assert bool(token_order.stretch_of(call_of(cache))) == ordered


@needs_compiler
@pytest.mark.parametrize("sm", [86, 90])
def test_splits_of_a_row_read_pages(monkeypatch: pytest.MonkeyPatch, sm: int) -> None:
    emulated(monkeypatch)
    check(small_cache(16, lengths=(190,), G=1, n=12), msgspec.structs.replace(GPU, sm=sm))


@needs_compiler
def test_lengths_past_the_end_are_clamped(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated(monkeypatch)
    cache = small_cache(16, lengths=(192, 192))
    long = cache._replace(cache_seqlens=cache.cache_seqlens + 1000)
    assert all(map(torch.equal, cupy_cuda.forward(call_of(long)), check(cache)))


@needs_compiler
@pytest.mark.parametrize("lengths", [(70, 150, 3), (0, 1, 9)])
def test_the_union_of_a_tile_follows_lengths(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]) -> None:
    """Blocks that a row of the tile may see, and which of them all rows see whole."""
    emulated(monkeypatch)
    cache = small_cache(64, lengths=lengths, S_q=8)
    call = call_of(cache)
    plan = sm90.plan_of(call, 12)
    start, end = call.clamped_ranges()
    for number, (whole, count) in enumerate(plan.counts.tolist()):
        b, g = divmod(number, 2)
        seen = end[b, :, g] > start[b, :, g]
        wanted = sorted(set((start[b, :, g][seen] // 16).tolist()))
        assert plan.blocks[number * plan.capacity :][:count].tolist() == wanted
        assert whole == sum((block + 1) * 16 <= max(0, lengths[b] - 7) for block in wanted)


@needs_compiler
def test_another_length_makes_another_union(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated(monkeypatch)
    cache = small_cache(64, S_q=8)
    call = call_of(cache)
    first = sm90.plan_of(call, 12)
    assert sm90.plan_of(call, 12) is first
    cache.cache_seqlens[1] = 0
    assert sm90.plan_of(call, 12) is not first


@needs_compiler
def test_pages_of_parts_of_a_step_are_gathered() -> None:
    """TMA loads 64 keys of one page."""
    for page_size, fits in ((16, False), (64, True), (96, False), (128, True), (None, True)):
        assert sm90.steps_in_pages(call_of(small_cache(page_size))) == fits


def lists_of(monkeypatch: pytest.MonkeyPatch, call: Call, block: int) -> list[tuple[int, dict[int, int]]]:
    """For each sequence and group how many blocks are whole, and its blocks in the order of the list, each with a bit per token."""
    source = (Path(emulate.__file__).parent / "emulation" / "few_union.cu").read_text()
    headers = compiler.sources("forward_tiles.cu")
    monkeypatch.setattr(compiler, "sources", lambda name: {**headers, name: source})
    B, _, G = call.q.shape[:3]
    counts, entries = torch.zeros(B * G, 2, dtype=torch.int32), torch.zeros(B * G, few_tokens.MOST_ENTRIES, dtype=torch.int32)
    macros = launch.macros(call, BLOCK=block, **launch.cache_macros(launch.page_of(call)))
    problem = launch.problem(call, call.selection.disjoint_ranges())
    launch.start("few_union.cu", macros, 0, B * G, 256, 0, *launch.pointers(counts, entries), problem=problem)
    return [
        (whole, {entry >> 8: entry & 255 for entry in row[:count]})
        for (whole, count), row in zip(counts.tolist(), entries.tolist(), strict=True)
    ]


@needs_compiler
@pytest.mark.parametrize("mode", [0, BACKWARDS])
@pytest.mark.parametrize(("lengths", "S_q", "n"), [((150, 9, 64, 0), 4, 12), ((3, 1, 190), 8, 7), ((70,), 2, 1)])
def test_few_tokens_make_their_union(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], S_q: int, n: int, mode: int) -> None:
    """Every block that a token sees once, those that all tokens see whole first, with a bit for each token that selected it."""
    emulated(monkeypatch, mode)
    cache = small_cache(64, lengths=lengths, S_q=S_q, n=n)
    call = call_of(cache)
    start, end = call.clamped_ranges()
    for number, (whole, found) in enumerate(lists_of(monkeypatch, call, 16)):
        b, g = divmod(number, 2)
        wanted: dict[int, int] = {}
        for s in range(S_q):
            for i in range(n):
                if end[b, s, g, i] > start[b, s, g, i]:
                    block = int(start[b, s, g, i]) // 16
                    wanted[block] = wanted.get(block, 0) | 1 << s
        assert found == wanted
        lowest = max(0, lengths[b] - S_q + 1)
        assert [(block + 1) * 16 <= lowest for block in found] == [True] * whole + [False] * (len(found) - whole)


@needs_compiler
@pytest.mark.parametrize(
    ("changed", "takes"),
    [
        ({}, True),
        ({"S_q": 1}, False),
        ({"S_q": 9}, False),
        ({"page_size": 16}, False),
        ({"page_size": None}, True),
        ({"block": 32}, False),
        ({"lengths": (150,) * 49}, False),
        ({"h": 1}, False),
        ({"Dk": 80}, False),
        ({"S_q": 8, "h": 32}, False),
        ({"S_q": 8, "h": 16}, True),
    ],
)
def test_which_calls_read_the_union_of_their_tokens(changed: dict[str, Any], takes: bool) -> None:
    """2 to 8 tokens of a sequence, whole blocks of 64 keys, pages of whole steps, tiles for three quarters of the multiprocessors."""
    facts = {"lengths": (150,) * 50, "page_size": 64, "S_q": 4, "h": 16, "Dk": 64, "Dv": 128, "block": 64, "dtype": torch.float16}
    cache = make_cache(**{**facts, **changed})  # type: ignore[arg-type]
    assert few_tokens.supports(call_of(cache, msgspec.structs.replace(GPU, sm_count=132))) == takes


MANY = LENGTHS * 16  # sequences: more rows than half of the multiprocessors


def gpu_cache(page_size: int | None, **sizes: Any) -> Cache:
    """NaN wherever no sequence has a key."""
    return make_cache(
        page_size=page_size, **{"dtype": torch.bfloat16, "device": "cuda", "Dk": 128, "Dv": 128, "h": 16, "block": 64, **sizes}
    )


@pytest.mark.gpu
@needs("cupy-cuda")
@pytest.mark.parametrize("S_q", [1, 4])
@pytest.mark.parametrize("page_size", [None, 16, 64])
def test_a_step_is_one_launch_that_never_waits(page_size: int | None, S_q: int, started: list[str]) -> None:
    cache = gpu_cache(page_size, lengths=MANY, S_q=S_q)
    selection_attention_with_kvcache(*cache, backend="cupy-cuda")
    started.clear()
    with no_waiting():
        selection_attention_with_kvcache(*cache, backend="cupy-cuda")
    assert len(started) == 1


@pytest.mark.gpu
@needs("cupy-cuda")
@pytest.mark.parametrize("ahead", ["a kernel", "a copy", "two streams"])
@pytest.mark.parametrize("lengths", [LENGTHS, MANY])
def test_a_graph_may_have_anything_ahead_of_a_step(lengths: tuple[int, ...], ahead: str) -> None:
    """A kernel that is started early waits for what writes its queries."""
    cache = gpu_cache(64, lengths=lengths)
    wanted = check_public(cache, "cupy-cuda")
    q = torch.zeros_like(cache.q)
    half, rest = (x.clone() for x in (cache.q[: len(lengths) // 2], cache.q[len(lengths) // 2 :]))
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        if ahead == "two streams":
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                q[: len(half)].mul_(0).add_(half)
            q[len(half) :].mul_(0).add_(rest)
            torch.cuda.current_stream().wait_stream(side)
        else:
            for to, values in ((q[: len(half)], half), (q[len(half) :], rest)):
                to.copy_(values) if ahead == "a copy" else to.mul_(0).add_(values)
        found = selection_attention_with_kvcache(q, *cache[1:], return_lse=True, backend="cupy-cuda")
    for _ in range(3):
        q.fill_(9.0)
        graph.replay()
        assert all(map(torch.equal, found, wanted))
