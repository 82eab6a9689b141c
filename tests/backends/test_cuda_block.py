"""cuda-block without a GPU: its kernels emulated on the CPU, between the plan, the join and the sums of Triton's interpreter."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel.backends import cuda_block
from nsa_sel.backends.cupy_cuda import key_to_rows, launch, sm90
from nsa_sel.oracle import oracle_forward
from nsa_sel.selection import Selection
from tests.helpers.cases import assert_forward, assert_gradients, make_blocks, make_grads, make_qkv, unused_keys
from tests.helpers.checks import new_memory_is_nan
from tests.helpers.cuda import BACKWARDS, EAGER, call_of, emulated, needs_compiler

FORWARD = ["shared_tiles.cu", "block_partials.cu", "join_partials.cu"]
BACKWARD = ["block_gradients.cu", "join_shares.cu", "sum_sections.cu"]
KERNELS = FORWARD + BACKWARD
WITHOUT_SHARES = [kernel for kernel in KERNELS if kernel != "join_shares.cu"]  # with less than 8 heads
HOPPERS = {"block_partials.cu", "join_partials.cu", "block_gradients.cu", "join_shares.cu"}  # kernels that load by TMA
pytestmark = [needs_compiler, pytest.mark.slow]  # a compiler, the interpreter, and thousands of emulated products


def rows(**sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    return make_qkv(**{"B": 1, "S": 80, "G": 2, "h": 4, "Dk": 64, "Dv": 64, "S_kv": 200, "dtype": torch.float16, **sizes})


def results(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, q_pos: Tensor | None = None, do: Tensor | None = None, poison: float = 0.0,
    **settings: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """o, lse, dq, dk, dv, checked against the oracle; the kernels find `poison` in all keys and values that no row reads."""
    own, lse = oracle_forward(q, k, v, selection.ranges, q_pos=q_pos)
    random_do, dlse = make_grads(q, v)
    do, dlse = random_do if do is None else do, torch.where(lse == float("-inf"), 0.0, dlse).float()
    unused = unused_keys(q, k, selection.ranges, q_pos).unsqueeze(-1)
    given = (q, torch.where(unused, poison, k), torch.where(unused, poison, v)) if poison else (q, k, v)
    call = call_of(*given, selection, q_pos, **settings)
    with new_memory_is_nan():
        outputs = cuda_block.forward(call)
        gradients = cuda_block.backward(call, own.to(q.dtype), lse.float(), do, dlse)
    assert_forward(outputs, q, k, v, selection.ranges, None, q_pos)
    assert_gradients(gradients, q, k, v, selection.ranges, do, dlse, None, q_pos)
    return *outputs, *gradients


@pytest.fixture(params=[pytest.param(0, marks=pytest.mark.thorough), BACKWARDS | EAGER])
def started(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The CUDA kernels that ran, emulated with either thread first; without those that sort, which run once for a selection."""
    emulated(monkeypatch, request.param)
    kernels, start = [], launch.start

    def recorded(source: str, *rest: Any, **own: Any) -> None:
        kernels.extend([source] * (source in KERNELS or source == "dkdv_groups.cu"))
        start(source, *rest, **own)

    monkeypatch.setattr(launch, "start", recorded)
    monkeypatch.setattr(cuda_block, "_streams", lambda _, count: [None] * count)
    return kernels


@pytest.mark.parametrize(("h", "S"), [(3, 40), pytest.param(1, 80, marks=pytest.mark.thorough)])
def test_large_blocks_are_visited_by_triton_and_dk_and_dv_are_sums_over_lists(started: list[str], h: int, S: int) -> None:
    """One partial for each row and block, for more rows than a step takes: before, within and after a block, in another order than their
    positions; a row that selects nothing; NaN in keys that nobody reads."""
    q, k, v = rows(S=S, G=1, h=h, S_kv=600)
    at = torch.randint(600, (S,), generator=torch.Generator().manual_seed(0))
    at[:3] = torch.tensor([3, 255, 256])
    ranges = make_blocks(1, S, 1, 600, 2, 256).ranges
    ranges[:, 7] = 0
    results(q, k, v, Selection(ranges, 256), q_pos=at, poison=float("nan"))
    assert started == ["dkdv_groups.cu"]


def test_lists_of_large_blocks_that_do_not_fit_are_of_a_pair_each_or_of_triton(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the lists has 2 entries, one for each of its blocks."""
    q, k, v = rows(S=20, G=2, h=1, S_kv=300)
    for most, kernels in ((2 * 20 * 2, 1), (20 * 2, 2), (20 * 2 - 1, 0)):
        monkeypatch.setattr(key_to_rows, "fit", lambda _, entries, most=most: entries <= most)
        results(q, k, v, make_blocks(1, 20, 2, 300, 2, 256))
        assert started == ["dkdv_groups.cu"] * kernels
        started.clear()


@pytest.mark.thorough
def test_large_blocks_in_units(started: list[str]) -> None:
    """Of some groups, then of sections of rows, with the same results."""
    q, k, v = rows(S=30, G=2, h=2, S_kv=600)
    whole = results(q, k, v, make_blocks(1, 30, 2, 600, 2, 256))
    for workspace in (24_000, 8_000):
        again = results(q, k, v, make_blocks(1, 30, 2, 600, 2, 256), workspace_bytes=workspace)
        assert all(torch.equal(x, y) for x, y in zip(again[:3], whole[:3], strict=True))
    assert started == ["dkdv_groups.cu"] * 3


@pytest.mark.parametrize("h", [1, pytest.param(4, marks=pytest.mark.thorough), 16])
def test_shared_tiles_and_partials(started: list[str], h: int) -> None:
    """Rows with both, and groups of tokens at a boundary of blocks or at the end, which share fewer."""
    S = 64 // h + 3
    q, k, v = rows(S=S, G=1, h=h, S_kv=600)
    results(q, k, v, make_blocks(1, S, 1, 600, 6, 64))
    assert started == (KERNELS if h >= 8 else WITHOUT_SHARES)


def test_a_selection_serves_calls_of_other_heads(started: list[str]) -> None:
    """Fewer heads, more tokens in 64 rows: other tiles are shared."""
    selection = make_blocks(1, 20, 1, 600, 6, 64)
    for h in (16, 4):
        results(*rows(S=20, G=1, h=h, S_kv=600), selection)
    assert started == KERNELS + WITHOUT_SHARES


@pytest.mark.parametrize(("h", "block"), [(1, 64), (16, 64), (8, 128)])
def test_a_tile_is_shared_if_all_tokens_of_64_rows_selected_it(monkeypatch: pytest.MonkeyPatch, h: int, block: int) -> None:
    emulated(monkeypatch)
    B, S, G, n, tokens, reach = 2, 70, 2, 5, 64 // h, block // 64
    q, k, v = rows(B=B, S=S, G=G, h=h, S_kv=900)
    left_out = torch.rand(B, S, G, n, 1, generator=torch.Generator().manual_seed(1)) < 0.1
    ranges = torch.where(left_out, 0, make_blocks(B, S, G, 900, n, block).ranges)
    call = call_of(q, k, v, Selection(ranges, block))
    masks, starts, ends = cuda_block._find_shared(call, reach, h), *call.clamped_ranges()
    some = [0, 0]
    for b, g, first in itertools.product(range(B), range(G), range(0, S, tokens)):
        reached = []
        for s in range(first, min(first + tokens, S)):
            keys = {i * reach + step: int(starts[b, s, g, i]) + 64 * step for i in range(n) for step in range(reach)}
            reached.append({key // 64: entry for entry, key in keys.items() if key < ends[b, s, g, entry // reach]})
        common = set.intersection(*map(set, reached))
        for s, tiles in enumerate(reached, first):
            shared = sum(1 << entry for tile, entry in tiles.items() if tile in common)
            assert (masks.shared[b, s, g], masks.listed[b, s, g]) == (shared, sum(1 << entry for entry in tiles.values()) - shared)
            some = [some[0] + (shared > 0), some[1] + (len(tiles) > len(common))]
    assert min(some) > 10


@pytest.mark.parametrize("started", [BACKWARDS | EAGER], indirect=True)
def test_sections_segments_and_lists_without_rows(monkeypatch: pytest.MonkeyPatch, started: list[str]) -> None:
    """Sums over sections of rows, in registers where a list has one segment; segments of a few entries; tiles that nobody selects."""
    monkeypatch.setattr(key_to_rows, "SHORTEST", 4)
    monkeypatch.setattr(cuda_block, "SEGMENTS_PER_SM", 16)
    monkeypatch.setattr(cuda_block, "LEAST_HEADS", 4)
    plans, order = [], cuda_block._order
    monkeypatch.setattr(cuda_block, "_order", lambda call, reach, *sizes: plans.append(sizes) or order(call, reach, *sizes))
    q, k, v = rows(S=40, G=2, h=4, S_kv=500)
    selection = make_blocks(1, 40, 2, 500, 3, 64)
    expected = results(q, k, v, selection)
    for one, other in zip(expected, results(q, k, v, Selection(selection.ranges, 64)), strict=True):
        assert torch.equal(one, other)
    monkeypatch.setattr(cuda_block, "L2_BYTES", 20_000)
    results(q, k, v, Selection(selection.ranges, 64))
    few = torch.where(torch.arange(40)[:, None, None, None] < 22, 0, selection.ranges)
    results(q, k, v, Selection(few, 64), workspace_bytes=300_000)
    assert [(section, pairs, segment) for section, pairs, segment, _ in plans] == [(40, 2, 8), (40, 2, 8), (16, 2, 4), (16, 1, 16)]
    for kernel in ("block_partials.cu", "join_partials.cu"):
        assert started.count(kernel) == 1 + 1 + 6 + 6  # a pair at a time, where there are several units
    for kernel in BACKWARD:
        assert started.count(kernel) == 1 + 1 + 3 + 6


@pytest.mark.parametrize("started", [BACKWARDS | EAGER], indirect=True)
def test_rows_of_more_entries_than_a_mask_has_bits(started: list[str]) -> None:
    """Without a mask, whose shift by an entry's number ends the emulation."""
    q, k, v = rows(S=2, G=1, h=16, S_kv=66 * 64)
    selection = make_blocks(1, 2, 1, 66 * 64, 66, 64)
    assert_forward(cuda_block.forward(call_of(q, k, v, selection)), q, k, v, selection.ranges)
    assert started == ["block_partials.cu"]


def test_gradients_of_a_constant(started: list[str]) -> None:
    """Autograd expands it: all strides are 0."""
    q, k, v = rows(S=5, G=1)
    results(q, k, v, make_blocks(1, 5, 1, 200, 3, 64), do=torch.ones((), dtype=torch.float16).expand(1, 5, 1, 4, 64))
    assert started == WITHOUT_SHARES


def test_gradients_that_begin_between_multiples_of_16_bytes(started: list[str]) -> None:
    """They are copied, though they are contiguous: no kernel reads them where they are."""
    q, k, v = rows(S=5, G=1)
    do = torch.ones(1 + 5 * 4 * 64, dtype=torch.float16)[1:].view(1, 5, 1, 4, 64)
    assert do.data_ptr() % 16
    assert sm90.loadable(do).data_ptr() % 16 == 0
    results(q, k, v, make_blocks(1, 5, 1, 200, 3, 64), do=do)
    assert started == WITHOUT_SHARES


def test_rows_and_keys_that_are_expanded(monkeypatch: pytest.MonkeyPatch, started: list[str]) -> None:
    """Their copies stay until the last kernel that reads them."""
    copies, loadable, start = [], sm90.loadable, launch.start

    def noted(x: Tensor) -> Tensor:
        found = loadable(x)
        copies.append(weakref.ref(found))
        return found

    def asserted(source: str, *rest: Any, **own: Any) -> None:
        assert source not in HOPPERS or all(copy() is not None for copy in copies[-4:])
        start(source, *rest, **own)

    monkeypatch.setattr(sm90, "loadable", noted)
    monkeypatch.setattr(launch, "start", asserted)
    q, k, v = rows(B=2, S=10, G=2, S_kv=300)
    results(q[:1].expand(2, -1, -1, -1, -1), k[:, :1].expand(-1, 2, -1, -1), v[:1].expand(2, -1, -1, -1), make_blocks(2, 10, 2, 300, 3, 64))
    assert started == WITHOUT_SHARES
    assert len(copies) == 3 + 4


def test_a_launch_that_fails_waits_for_the_other_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels may still write the partials, whose memory is free when the call ends."""
    monkeypatch.setattr(cuda_block, "L2_BYTES", 20_000)  # sections of 16 rows
    emulated(monkeypatch)
    start, stream, waited = launch.start, object(), []

    def fails(source: str, *rest: Any, **own: Any) -> None:
        if source == "join_partials.cu":
            raise RuntimeError("no such kernel")
        start(source, *rest, **own)

    class Current:
        wait_stream = waited.append

    monkeypatch.setattr(launch, "start", fails)
    monkeypatch.setattr(cuda_block, "_streams", lambda _, count: [None, stream])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Current)
    call = call_of(*rows(S=40, S_kv=200), make_blocks(1, 40, 2, 200, 3, 64))
    with pytest.raises(RuntimeError, match="no such kernel"):
        cuda_block.forward(call)
    assert waited == [stream]


def test_loaded_keys_count_a_tile_once_for_each_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once for four tokens, those of 64 rows, that all select it."""
    monkeypatch.setattr(cuda_block, "STEPS", 2)  # segments of 8 entries
    monkeypatch.setattr(cuda_block, "L2_BYTES", 80_000)  # sections of 16 rows
    q, k, v = rows(S=42, G=1, h=16, Dk=64, S_kv=200)
    selection = make_blocks(1, 42, 1, 200, 3, 64)
    call = call_of(q, k, v, selection)
    assert cuda_block._sizes(call, 1).section == 16
    expected, shared, chosen = 0, 0, selection.ranges[0, :, 0]
    for first in range(0, 42, 16):
        for tile in range(0, 200, 64):
            listed = [s for s in range(first, min(first + 16, 42)) if any(start == tile < end for start, end in chosen[s].tolist())]
            seen = {s: min(64, 159 + s - tile) for s in listed}
            most, left = max(seen.values(), default=0), dict(seen)
            for group in (range(s, min(s + 4, 42)) for s in range(first, min(first + 16, 42), 4)):
                if all(s in seen for s in group):
                    expected += max(left.pop(s) for s in group)
                    shared += 1
            expected += min(-(-len(left) // 8) * most, sum(left.values()))
    assert shared
    assert cuda_block.loaded_keys(call, 5000, True) == expected
    assert cuda_block.loaded_keys(call, 5000, False) == 5000
