"""The lists of rows that CUDA kernels sort (cupy_cuda/key_to_rows.py): every tile's entries in ascending order, and the segments."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from nsa_sel.backends._triton.blocks import merged
from nsa_sel.backends._triton.key_to_rows import key_to_rows as key_to_rows_by_triton
from nsa_sel.backends.cupy_cuda import key_to_rows
from nsa_sel.core import registry
from nsa_sel.core.call import Call
from nsa_sel.core.check import check_call
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from tests.helpers.cases import make_blocks, make_qkv, make_spans
from tests.helpers.emulate import BACKWARDS, GPU, emulated, needs_compiler

LACKING = registry.missing("cupy-cuda")
SEGMENTS = key_to_rows.with_parts(32)


def call_of(B: int, S: int, G: int, S_kv: int, selection: Selection, q_pos: Tensor | None = None, device: str = "cpu") -> Call:
    q, k, v = make_qkv(B, S, G, 1, 8, 8, S_kv=S_kv, dtype=torch.float16, device=device)
    *checked, scale, q_pos = check_call(q, k, v, selection, None, q_pos)
    return Call(*checked, q_pos, scale, settings_for(GPU), GPU)


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


def block_0(S: int) -> Selection:
    """All rows select block 0, and nothing else."""
    return Selection(torch.tensor([0, 64]).expand(1, S, 1, 1, 2).contiguous(), 64)


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
        (1, 4500, 1, 4500, 64, 4500, lambda: block_0(4500)),
        (1, 40, 1, 20000, 16, 40, lambda: make_blocks(1, 40, 1, 20000, 4, 16)),  # more tiles than sort_scatter.cu takes at once
        (1, 300, 1, 70000, 16, 300, lambda: make_blocks(1, 300, 1, 70000, 16, 16)),  # and sort_count.cu: a chunk of two blocks
    ],
)
@pytest.mark.parametrize(("mode", "few"), [pytest.param(0, None, marks=pytest.mark.thorough), (BACKWARDS, None), (0, 0)])
def test_lists_hold_every_entry_of_a_tile_in_order(
    monkeypatch: pytest.MonkeyPatch, mode: int, few: int | None, B: int, S: int, G: int, S_kv: int, width: int, section: int,
    selection: object,
) -> None:  # fmt: skip
    """few: 0 where counts have a kernel of their own, however few they are."""
    emulated(monkeypatch, mode)
    if few is not None:
        monkeypatch.setattr(key_to_rows, "FEW_COUNTS", few)
    call = call_of(B, S, G, S_kv, selection())  # type: ignore[operator]
    entries, begins, segments, parts = (x.tolist() for x in key_to_rows.sort(call, width, call.reach(width), section, SEGMENTS))
    expected = lists_of(call, width, section)
    assert [entries[begin:end] for begin, end in pairwise(begins)] == expected
    numbers = [-(-len(x) // 32) for x in expected]
    assert segments == [0, *accumulate(numbers)]
    assert parts == [0, *accumulate(x if x > 1 else 0 for x in numbers)]


@needs_compiler
def test_lists_of_rows_in_any_position(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated(monkeypatch)
    q_pos = torch.randint(0, 200, (2, 50), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    call = call_of(2, 50, 1, 200, make_blocks(2, 50, 1, 200, 3, 64), q_pos)
    entries, begins = (x.tolist() for x in key_to_rows.sort(call, 64, 1, 50, SEGMENTS)[:2])
    assert [entries[begin:end] for begin, end in pairwise(begins)] == lists_of(call, 64, 50)


@needs_compiler
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize(
    ("B", "S", "G", "S_kv", "block"),
    [(2, 90, 2, 700, 256), (1, 300, 1, 1000, 512), (1, 70, 1, 330, 128), (1, 12, 2, 140_000, 4096)],  # a cut block; more lists than a round
)
def test_tiles_of_a_block_share_a_list(
    monkeypatch: pytest.MonkeyPatch, B: int, S: int, G: int, S_kv: int, block: int, positions: bool
) -> None:  # fmt: skip
    """A tile's is the block's from the first entry that is not over before the tile: in order, or first what ends first."""
    emulated(monkeypatch)
    q_pos = torch.randint(0, S_kv, (B, S), generator=torch.Generator().manual_seed(1)) if positions else None
    call = call_of(B, S, G, S_kv, make_blocks(B, S, G, S_kv, 3, block), q_pos)
    lists = key_to_rows.build_lists(call, 64, 1, block // 64, 32)
    assert (lists.reach, lists.block) == (1, block // 64)
    assert lists.entries is not None
    assert lists.entries.numel() == B * S * G * 3
    entries, begins, tiles = lists.entries.tolist(), lists.begins.tolist(), lists.tiles
    ends = [begins[i - i % tiles + min((i % tiles // lists.block + 1) * lists.block, tiles)] for i in range(lists.lists)]
    found = [entries[begin:end] for begin, end in zip(begins, ends, strict=False)]
    expected = [[entry // lists.block for entry in entries] for entries in lists_of(call, 64, S)]
    assert (list(map(sorted, found)) if positions else found) == expected
    numbers = [-(-len(x) // 32) for x in expected]
    assert lists.segments.tolist() == [0, *accumulate(numbers)]
    assert lists.parts.tolist() == [0, *accumulate(x if x > 1 else 0 for x in numbers)]


@needs_compiler
@pytest.mark.parametrize(("chunks", "segment"), [(1, 1), pytest.param(1, 4096, marks=pytest.mark.thorough), (3, 7), (200, 50)])
def test_segments_of_lists(monkeypatch: pytest.MonkeyPatch, chunks: int, segment: int) -> None:
    """Of more lists than a CTA takes at once, or more chunks."""
    emulated(monkeypatch)
    tiles, pairs = (2500, 2) if chunks < 200 else (35, 1)
    counts = torch.randint(0, 30, (pairs, chunks, tiles), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    summed = torch.cat((counts.flatten(), torch.zeros(key_to_rows.published(pairs * tiles), dtype=torch.int32)))
    begins, segments, parts = key_to_rows.sum_counts(summed, pairs * tiles, tiles, chunks, key_to_rows.with_parts(segment))
    assert torch.equal(summed[: counts.numel()].view_as(counts), counts.cumsum(1).int() - counts)
    lengths = counts.sum(1).flatten()
    assert torch.equal(begins.diff(), lengths)
    expected = -(-lengths // segment)
    assert torch.equal(segments.diff(), expected)
    assert torch.equal(parts.diff(), torch.where(expected > 1, expected, 0))
    assert begins[0] == segments[0] == parts[0] == 0


@pytest.mark.gpu
@pytest.mark.skipif(bool(LACKING), reason="; ".join(map(str, LACKING)))
@pytest.mark.parametrize(
    ("S", "S_kv", "section", "n", "block"),
    [(32768, 32768, 32768, 16, 64), (32768, 32768, 4096, 16, 64), (5000, 9000, 5000, 8, 128), (3000, 400_000, 3000, 16, 64)],
)
def test_lists_are_those_of_triton(S: int, S_kv: int, section: int, n: int, block: int) -> None:
    """Which sorts otherwise, by a sorting network."""
    scores = torch.randn(1, S, 2, -(-S_kv // block), generator=torch.Generator("cuda").manual_seed(3), device="cuda")
    call = call_of(1, S, 2, S_kv, Selection.from_scores(scores, n, block, first=1, local=2, S_kv=S_kv), device="cuda")
    theirs = key_to_rows_by_triton(call, 64, section, 2, 64)
    for _ in range(3):
        entries, begins, _, _ = key_to_rows.sort(call, 64, call.reach(64), section, SEGMENTS)
        ends = theirs.ends.view(-1, theirs.stretches)[:, -1]
        assert torch.equal(begins[1:], ends.long())
        assert torch.equal(entries[: int(begins[-1])], theirs.entries[: int(begins[-1])])


def test_merged_small_blocks_leave_out_blocks_before_key_0() -> None:
    ranges = torch.tensor([[[-4, 0], [4, 8]], [[-8, -4], [0, 0]]])[None, :, None]
    call = call_of(1, 2, 1, 16, Selection(ranges, 4, disjoint=True))
    tiles, bits = merged(call, 16)
    assert tiles.selection.ranges.squeeze().tolist() == [[0, 16], [0, 0]]
    assert bits is not None
    assert bits.squeeze()[0] == 0b10
