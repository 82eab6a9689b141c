"""Check plans of CUDA kernels, made by kernels that run on the CPU: lists of rows, tiles of small blocks, and unions."""

from __future__ import annotations

import dataclasses
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from nsa_sel.backends import cupy_cuda
from nsa_sel.backends._triton.blocks import merged
from nsa_sel.backends.cupy_cuda import block_tiles, few_tokens, key_to_rows, launch, sm90, token_order, whole_blocks
from nsa_sel.backends.specs import HOPPER_TILES
from nsa_sel.core.call import Call
from nsa_sel.errors import BackendError
from nsa_sel.selection import Selection
from tests.helpers.caches import make_cache
from tests.helpers.cases import make_blocks, make_qkv, make_spans
from tests.helpers.cuda import BACKWARDS, GPU, cache_call, call_of, emulated, needs_compiler, order_few

SEGMENTS = key_to_rows.with_parts(32)


# Lists of rows


def rows_call(B: int, S: int, G: int, S_kv: int, selection: Selection, q_pos: Tensor | None = None) -> Call:
    q, k, v = make_qkv(B, S, G, 1, 8, 8, S_kv=S_kv, dtype=torch.float16)
    return call_of(q, k, v, selection, q_pos)


def lists_of(call: Call, width: int, section: int) -> list[list[int]]:
    """All lists, from a plain loop over the ranges."""
    B, S, G = call.q.shape[:3]
    n, reach, tiles = call.selection.n, call.reach(width), -(-call.k.shape[2] // width)
    start, end = (x.tolist() for x in call.clamped_ranges())
    lists: list[list[int]] = [[] for _ in range(-(-S // section) * B * G * tiles)]
    for b, s, g, i in torch.cartesian_prod(*map(torch.arange, (B, S, G, n))).tolist():
        first, stop = start[b][s][g][i], end[b][s][g][i]
        for tile in range(first // width, -(-stop // width) if stop > first else 0):
            lists[((s // section * B + b) * G + g) * tiles + tile].append((s * n + i) * reach + tile - first // width)
    return lists


def padded(selection: Selection) -> Selection:
    """Without the first ranges of every third row; int64, and bounds that int32 does not hold."""
    ranges = selection.ranges.long()
    ranges[:, ::3, :, :2] = 0
    ranges[:, -1, :, -1, 1] += 1 << 40
    return Selection(ranges, 64, disjoint=True)


@needs_compiler
@pytest.mark.parametrize(
    ("B", "S", "G", "S_kv", "width", "section", "selection"),
    [
        (2, 36, 2, 70, 16, 36, lambda: make_blocks(2, 36, 2, 70, 3, 32)),  # two tiles of a block
        (1, 300, 2, 1300, 64, 128, lambda: make_blocks(1, 300, 2, 1300, 16, 64)),  # sections of 2048 entries, the last one shorter
        (1, 300, 1, 1300, 64, 300, lambda: padded(make_blocks(1, 300, 1, 1300, 16, 64))),  # a chunk and a part
        (1, 70, 1, 1300, 64, 70, lambda: make_blocks(1, 70, 1, 1300, 4, 128)),
        (2, 36, 2, 70, 16, 20, lambda: Selection.from_ranges(make_spans("mixed", 2, 36, 2, 70, 20))),  # a tile in several ranges of a row
        (1, 4500, 1, 4500, 64, 4500, lambda: Selection(torch.tensor([0, 64]).repeat(1, 4500, 1, 1, 1), 64)),  # all rows, block 0
        (1, 40, 1, 20000, 16, 40, lambda: make_blocks(1, 40, 1, 20000, 4, 16)),  # more tiles than sort_scatter.cu takes at once
        (1, 300, 1, 70000, 16, 300, lambda: make_blocks(1, 300, 1, 70000, 16, 16)),  # and sort_count.cu: a chunk of two blocks
    ],
)
@pytest.mark.parametrize(("mode", "few"), [pytest.param(0, None, marks=pytest.mark.thorough), (BACKWARDS, None), (0, 0)])
def test_lists_hold_every_entry_of_a_tile_in_order(
    monkeypatch: pytest.MonkeyPatch, mode: int, few: int | None, B: int, S: int, G: int, S_kv: int, width: int, section: int,
    selection: object,
) -> None:  # fmt: skip
    """few: 0 where counts have a kernel of their own, however few they are; there rows are in any position."""
    emulated(monkeypatch, mode)
    if few is not None:
        monkeypatch.setattr(key_to_rows, "FEW_COUNTS", few)
    q_pos = torch.randint(0, S_kv, (B, S), dtype=torch.int32, generator=torch.Generator().manual_seed(1)) if few == 0 else None
    call = rows_call(B, S, G, S_kv, selection(), q_pos)  # type: ignore[operator]
    entries, begins, segments, parts = (
        x.tolist() for x in key_to_rows.sort(call, width, call.reach(width), section, SEGMENTS, call.q.shape[2])
    )
    expected = lists_of(call, width, section)
    assert [entries[begin:end] for begin, end in pairwise(begins)] == expected
    numbers = [-(-len(x) // 32) for x in expected]
    assert segments == [0, *accumulate(numbers)]
    assert parts == [0, *accumulate(x if x > 1 else 0 for x in numbers)]


# Segments of lists


@needs_compiler
def test_a_list_of_rows_that_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated(monkeypatch)
    q, k, v = make_qkv(2, 8, 2, 3, 16, 24, S_kv=70, dtype=torch.float16)
    call = call_of(q, k, v, Selection.from_ranges(make_spans("few", 2, 8, 2, 70, 30)))
    monkeypatch.setattr(key_to_rows, "BYTES", 1 << 30)
    with pytest.raises(BackendError, match=r"needs \d+ bytes.*allowed: \d+ .*Remedy"):
        cupy_cuda.backward(call, torch.zeros(2, 8, 2, 3, 24).half(), torch.zeros(2, 8, 2, 3), torch.zeros(2, 8, 2, 3, 24).half(), None)


# Tiles of small blocks


@needs_compiler
@pytest.mark.parametrize("mode", [pytest.param(0, marks=pytest.mark.thorough), BACKWARDS])
@pytest.mark.parametrize(
    ("B", "S", "G", "S_kv", "n", "block"),
    [
        (2, 70, 2, 150, 9, 4),  # tiles and blocks that the keys end within
        (1, 300, 1, 80000, 7, 32),  # more tiles than one table holds
        pytest.param(1, 40, 1, 80000, 30, 4, marks=pytest.mark.thorough),
    ],
)
def test_lists_hold_every_row_once(
    monkeypatch: pytest.MonkeyPatch, mode: int, B: int, S: int, G: int, S_kv: int, n: int, block: int
) -> None:  # fmt: skip
    emulated(monkeypatch, mode)
    q, k, v = make_qkv(B, S, G, 1, 8, 8, S_kv=S_kv, dtype=torch.float16)
    selection = Selection(make_blocks(B, S, G, S_kv, n, block).ranges.long(), block)  # 64 bits
    lists = block_tiles.block_lists_of(call_of(q, k, v, selection))
    blocks, tiles = -(-S_kv // block), -(-S_kv // 64)
    slots = lists.slots.view(B * G, -1)
    assert torch.equal(slots.sort(-1).values.clamp(max=blocks), torch.arange(slots.shape[1]).clamp(max=blocks).expand_as(slots))
    expected = torch.zeros(B, S, G, blocks + 1, dtype=torch.bool)
    expected.scatter_(3, torch.where(selection.block_indices < 0, blocks, selection.block_indices), True)
    found = torch.zeros_like(expected)
    for index, (begin, end) in enumerate(pairwise(lists.begins.tolist())):
        b, g = index // tiles // G, index // tiles % G
        rows, chosen = lists.entries[begin:end].long(), lists.chosen[begin:end]
        assert bool((rows.diff() > 0).all())
        assert bool((chosen != 0).all())
        for slot, number in enumerate(lists.slots[index].tolist()):
            found[b, rows, g, number] |= (chosen >> slot & 1).bool()
    assert torch.equal(found[..., :-1], expected[..., :-1])


@needs_compiler
def test_popular_blocks_share_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth block is selected by all rows: their tiles come first, in the order of positions, and list each row once."""
    emulated(monkeypatch)
    S = S_kv = 640
    q, k, v = make_qkv(1, S, 1, 1, 8, 8, S_kv=S_kv, dtype=torch.float16)
    popular = torch.arange(0, 160, 4)
    lists = block_tiles.block_lists_of(call_of(q, k, v, Selection.from_blocks(popular.expand(1, S, 1, 40), 4)))
    assert torch.equal(lists.slots.flatten()[:40].long(), popular)
    assert lists.begins.diff().tolist() == [S, S - 256, S - 512, 0, 0, 0, 0, 0, 0, 0]


def test_merged_small_blocks_leave_out_blocks_before_key_0() -> None:
    ranges = torch.tensor([[[-4, 0], [4, 8]], [[-8, -4], [0, 0]]])[None, :, None]
    tiles, bits = merged(rows_call(1, 2, 1, 16, Selection(ranges, 4, disjoint=True)), 16)
    assert tiles.selection.ranges.squeeze().tolist() == [[0, 16], [0, 0]]
    assert bits.squeeze()[0] == 0b10


# Unions of tiles


def selected_blocks(call: Call, block: int) -> list[list[list[set[int]]]]:
    """By batch entry, token and group."""
    start, end = (x.tolist() for x in call.clamped_ranges())
    B, S, G = call.q.shape[:3]

    def of_row(b: int, s: int, g: int) -> set[int]:
        return {first // block for first, last in zip(start[b][s][g], end[b][s][g], strict=True) if last > first}

    return [[[of_row(b, s, g) for g in range(G)] for s in range(S)] for b in range(B)]


def in_order(whole: list[int], partial: list[int], members: dict[int, int], own: int) -> list[int]:
    """Blocks in the order of a list for two consumers of `own` tokens each: of both, of the first alone, of the second alone."""
    of_first = [bool(members[key] & (1 << own) - 1) for key in whole]
    alone = [2 * (not first) + (first and not members[key] >> own) for key, first in zip(whole, of_first, strict=True)]
    return [key for kind in (0, 1, 2) for key, own_kind in zip(whole, alone, strict=True) if own_kind == kind] + partial


def check_union(call: Call, plan: Any, tokens: int, block: int, rows_of: Any, lengths: tuple[int, ...] | None = None) -> int:
    """Every block that a token of the tile may see once, those that all see whole first, with a bit for each token that selected it.

    They ascend, or are in the order of two consumers that gather steps (`in_order`).

    Returns:
        The keys that the tiles load.
    """
    B, S, G = call.q.shape[:3]
    ends = call.positions() + 1 if lengths is None else torch.tensor(lengths)[:, None] + torch.arange(1 - S, 1)
    selected, limits = selected_blocks(call, block), ends.clamp(0, call.k.shape[2] if lengths is None else 1 << 30).tolist()
    assert plan.tiles == -(-S // tokens)
    assert plan.rows.itemsize == max(1, 1 << (tokens - 1).bit_length() - 3)
    loaded = 0
    for number in range(B * G * plan.tiles):
        b, g, first = number // plan.tiles // G, number // plan.tiles % G, number % plan.tiles * tokens
        rows, members = rows_of(b, g, first), dict[int, int]()
        for r, s in enumerate(rows):
            for number_of_block in selected[b][s][g] if s < S else ():
                members[number_of_block] = members.get(number_of_block, 0) | 1 << r
        lowest = min(limits[b][s] for s in rows if s < S)
        highest = {key: max(limits[b][s] for r, s in enumerate(rows) if bits >> r & 1) for key, bits in members.items()}
        loaded += sum(min(block, highest[key] - key * block) for key in members)
        whole, count = plan.counts[number].tolist()
        found = slice(number * plan.capacity, number * plan.capacity + count)
        listed = sorted(members)
        assert whole == sum((key + 1) * block <= lowest for key in members)
        if block < sm90.KEYS and tokens == 2 * (own := sm90.ROWS // call.q.shape[3]):
            listed = in_order(listed[:whole], listed[whole:], members, own)
        assert plan.blocks[found].tolist() == listed
        assert [bits % 2 ** (8 * plan.rows.itemsize) for bits in plan.rows[found].tolist()] == [members[key] for key in listed]
    return loaded


@needs_compiler
@pytest.mark.parametrize(("tokens", "n", "block", "h"), [(12, 5, 16, 2), (48, 16, 16, 2), (64, 3, 32, 2), (10, 24, 4, 12), (24, 5, 16, 5)])
@pytest.mark.parametrize("rows", ["implied", "given", "lengths"])
def test_the_union_of_a_tile(monkeypatch: pytest.MonkeyPatch, tokens: int, n: int, block: int, h: int, rows: str) -> None:
    """Positions of rows follow from S_kv, are given, or end a sequence of a cache."""
    emulated(monkeypatch, BACKWARDS)
    B, S, G, S_kv, lengths = 2, 70, 2, 300, None
    if rows == "lengths":
        lengths = (150, 9)
        call = cache_call(make_cache(lengths, 64, S_q=S, h=h, Dv=16, n=3, block=block, dtype=torch.float16))
    else:
        q, k, v = make_qkv(B, S, G, h, 16, 16, S_kv=S_kv, dtype=torch.float16)
        q_pos = torch.randint(0, S_kv, (B, S), generator=torch.Generator().manual_seed(1)) if rows == "given" else None
        call = call_of(q, k, v, make_blocks(B, S, G, S_kv, n, block), q_pos)
    check_union(call, sm90.plan_of(call, tokens), tokens, block, lambda b, g, first: range(first, min(first + tokens, S)), lengths)


@needs_compiler
@pytest.mark.parametrize(("backward", "n", "S_kv"), [(False, 5, 700), (True, 5, 700), (False, 8, 5000)])
def test_the_union_of_tokens_in_order(monkeypatch: pytest.MonkeyPatch, backward: bool, n: int, S_kv: int) -> None:
    """A last stretch that is not full, rows that selected nothing, any positions, and more shared blocks than bits: unions are smaller."""
    order_few(monkeypatch)
    emulated(monkeypatch, BACKWARDS)
    B, S, G, h = 2, 150, 2, 16
    q, k, v = make_qkv(B, S, G, h, 64, 64, S_kv=S_kv, dtype=torch.float16)
    q_pos = torch.randint(0, S_kv, (B, S), generator=torch.Generator().manual_seed(1)) if backward else None
    ranges = make_blocks(B, S, G, S_kv, n, 64).ranges
    ranges[:, 20:23] = 0
    call = call_of(q, k, v, Selection(ranges, 64), q_pos)
    stretch, tokens = token_order.stretch_of(call), HOPPER_TILES.tokens(h, 64, backward)
    plan = sm90.plan_of(call, tokens, stretch)
    order = plan.order.flatten(2)
    rows_of = lambda b, g, first: [first // stretch * stretch + int(x) for x in order[b, g, first : first + tokens]]  # noqa: E731
    loaded = check_union(call, plan, tokens, 64, rows_of)
    in_text = lambda b, g, first: range(first, min(first + tokens, S))  # noqa: E731
    assert loaded < check_union(call, sm90.plan_of(call, tokens), tokens, 64, in_text)
    if not backward:
        assert sm90.loaded_keys(call) == loaded


def test_stretches_are_whole_tiles_of_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    order_few(monkeypatch)
    call_sizes = [(h, Dk) for h in range(4, 33) for Dk in (64, 128, 192, 256)]
    for h, Dk in call_sizes:
        q, k, v = make_qkv(1, 70, 1, h, Dk, 64, S_kv=70, dtype=torch.float16)
        stretch = token_order.stretch_of(call_of(q, k, v, make_blocks(1, 70, 1, 70, 1, 64)))
        assert 0 < stretch < 255
        assert all(stretch % HOPPER_TILES.tokens(h, Dk, backward) == 0 for backward in (False, True))


@pytest.mark.parametrize(
    ("S", "G", "h", "block", "stretch"),
    [
        *((8191, 9, 4, 64, None), (8192, 7, 4, 64, None), (8192, 11, 3, 64, None), (8192, 1, 33, 64, None), (8192, 8, 4, 16, None)),
        *((8192, 8, 4, 64, 192), (8192, 2, 16, 64, 96), (8192, 3, 12, 128, 90)),
    ],
)
def test_which_calls_have_an_order(monkeypatch: pytest.MonkeyPatch, S: int, G: int, h: int, block: int, stretch: int | None) -> None:
    """None where finding it takes longer than is saved, of few heads and of one token a warpgroup, and of blocks that steps gather."""
    q, k, v = make_qkv(1, S, G, h, 64, 64, S_kv=S, dtype=torch.float16)
    call = call_of(q, k, v, Selection(torch.zeros(1, S, G, 1, 2, dtype=torch.int32), block))
    assert token_order.stretch_of(call) == stretch


def test_no_order_of_more_blocks_than_shared_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    order_few(monkeypatch)
    q, k, v = make_qkv(1, 70, 1, 4, 64, 64, S_kv=70, dtype=torch.float16)
    of_few, of_many = (Selection(torch.zeros(1, 70, 1, n, 2, dtype=torch.int32), 64) for n in (16, 1000))
    assert token_order.stretch_of(call_of(q, k, v, of_few)) == 192
    assert token_order.stretch_of(call_of(q, k, v, of_many)) is None


# Which kernels run, and how rows are shared


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
    assert few_tokens.supports(cache_call(cache, msgspec.structs.replace(GPU, sm_count=132))) == takes


def test_keys_4_gib_apart_are_read_row_by_row() -> None:
    """Copies of gathered steps multiply a key's number by the bytes from key to key in 32 bits."""
    call = call_of(*make_qkv(1, 64, 1, 12, 64, 64, S_kv=64, dtype=torch.float16), make_blocks(1, 64, 1, 64, 3, 4))
    for step, fits in (((1 << 31) - 8, True), (1 << 31, False)):
        far = torch.empty_strided(call.k.shape, (step * 64, step * 64, step, 1), dtype=torch.float16, device="meta")
        assert sm90.supports_tiles(dataclasses.replace(call, k=far)) == fits


def test_pages_of_parts_of_a_step_are_gathered() -> None:
    """TMA loads 64 keys of one page."""
    for page_size, fits in ((16, False), (64, True), (96, False), (128, True), (None, True)):
        assert sm90.steps_in_pages(cache_call(make_cache(page_size=page_size, h=3, Dv=24, dtype=torch.float16))) == fits


@pytest.mark.parametrize(
    ("work", "steps", "cluster", "first", "stages"),
    [
        (1, 8, 8, False, 1),
        (4, 16, 16, False, 1),
        (14, 32, 16, False, 2),
        (15, 32, 8, False, 2),
        (30, 32, 8, False, 2),
        (60, 32, 4, False, 2),
        (64, 16, 2, False, 2),
        (64, 32, 2, True, 2),  # both kernels find room, and CTAs have many steps
        (100, 32, 2, False, 2),
        (132, 16, 2, False, 2),
        (133, 16, 1, False, 2),
        (256, 16, 1, False, 3),  # all multiprocessors are full
        (5, 3, 2, False, 2),
    ],
)
def test_few_rows_are_shared_by_as_many_multiprocessors_as_run_at_once(
    work: int, steps: int, cluster: int, first: bool, stages: int
) -> None:
    """The H200 has 132, each with two CTAs."""
    plan = whole_blocks.plan_of(work, 16, 128, 128, steps, 64, True, 132, 227 << 10)
    macros = dict(plan.macros)
    assert (macros["CLUSTER"], macros["NEXT_FIRST"], macros["STAGES"]) == (cluster, first, stages)
    assert plan.ctas == work * cluster


@pytest.mark.parametrize(
    ("strides", "first", "expected"),
    [
        ((64, 64, 16, 1), 0, True),
        ((64, 3, 16, 1), 0, True),  # a step along a dimension of one element is never taken
        ((64, 3, 20, 1), 0, False),
        ((68, 64, 16, 1), 0, False),
        ((64, 64, 16, 1), 4, False),
    ],
)
def test_rows_begin_at_multiples_of_16_bytes(strides: tuple[int, ...], first: int, expected: bool) -> None:
    whole, x = torch.zeros(2, 4, 2, 4, 16, dtype=torch.float16), torch.zeros(160, dtype=torch.float16)
    x = x.as_strided((2, 1, 4, 16), strides, first)
    assert launch.aligned(whole, x) == launch.aligned(x, whole) == expected
