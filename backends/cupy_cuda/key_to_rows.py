"""Invert the selection for dk and dv: list for every tile of keys the rows that selected any of them, in ascending
order.

A counting sort (kernels/sort.cuh) fixes the order of every list. Long lists are split into segments, one CTA each,
because every row may have selected block 0. All sizes are static bounds, so nothing here synchronizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import launch
from nsa_sel.backends.launcher.buffers import temporary, unwritten
from nsa_sel.backends.launcher.replay import kept_plan
from nsa_sel.core.call import Call, ChooseCall
from nsa_sel.errors import BackendError

SHORTEST = 32  # fewest entries per segment: with fewer, loading the tile and storing partial sums dominates
LONGEST, SEGMENTS_PER_SM = 1024, 4  # most entries per segment for one head; segments per multiprocessor
BYTES = 12  # bytes per entry: its tile, the entry, and its share of the counts
SORTED = 4096  # entries that sort_scatter.cu sorts at once; half as many if there are few
FEW_COUNTS, FEW_TILES = 2048, 512  # up to these sizes sort_scatter.cu sums the counts itself
SUM_CTAS = 4096  # CTAs of sum_parts.cu: enough for any GPU
Kinds = tuple[tuple[int, bool], tuple[int, bool]]  # of segments: entries at most, and whether those of lists with one do not count


class KeyToRows(NamedTuple):
    """The lists: `KeyToRows` and `Segment` of key_to_rows.cuh say what they hold."""

    entries: (
        Tensor | None
    )  # [B * G * S * n * reach] int32, G: groups of the selection; unwritten past the last list's end; None: arithmetic (dkdv_groups.cu)
    begins: Tensor  # [lists + 1] int64
    segments: Tensor  # [lists + 1] int64
    parts: Tensor  # [lists + 1] int64
    lists: int
    tiles: int  # of one batch entry and group
    reach: int
    segment: int  # entries, at most
    block: int = 1  # tiles of a block whose rows are listed once, for all of its tiles

    def arguments(self) -> tuple[int, ...]:
        return (*launch.pointers(*self[:4]), *self[4:])

    def capacity(self) -> int:
        """Entries of all lists at most, those of a block in the list of each of its tiles."""
        assert self.entries is not None, "in memory"
        return self.entries.shape[0] * self.block


def most_segments(entries: int, segment: int, lists: int) -> int:
    """Return a bound on the number of segments of `lists` lists."""
    return min(entries, entries // segment + lists)


def most_parts(entries: int, segment: int, lists: int) -> int:
    """A bound on the segments of those of `lists` lists that have several: such a list is longer than a segment, and
    has less than one segment more than its entries fill."""
    return max(1, min(entries, entries // segment + min(lists, entries // segment)))


def segment_length(
    call: Call, width: int, entries: int, most: int, per_sm: int, lists: int | None = None, entry_bytes: float = BYTES
) -> int:  # fmt: skip
    """Entries of a segment: few enough to give every multiprocessor `per_sm` and for balance, and enough for the
    segments' float32 parts to fit the workspace beside the lists. most: of one head. lists: how many; None: as many as
    there may be segments."""
    h, Dk = call.q.shape[3:]
    part_bytes = 4 * width * (Dk + call.v.shape[-1])
    longest = max(256, min(most, 4096 // h))  # longer if a row brings fewer heads: each segment writes its part
    segment = SHORTEST
    while segment < longest and entries > segment * per_sm * call.device.sm_count:
        segment *= 2
    bound = call.settings.workspace_bytes
    budget = max(bound - entry_bytes * entries, bound // 8)
    while most_parts(entries, segment, entries if lists is None else lists) * part_bytes > budget and 2 * segment * h < 2**31:
        segment *= 2
    return segment


def lists_of(call: Call, width: int) -> KeyToRows:
    """Return the lists for tiles of `width` keys, cached in the selection."""
    lists: KeyToRows = kept_plan(call, ("cupy-cuda lists",), build_lists, *numbers_of_lists(call, width)).value
    return lists


def numbers_of_lists(call: Call, width: int) -> tuple[int, int, int, int]:
    """Return the arguments of `build_lists` for tiles of `width` keys."""
    B, S, G = call.q.shape[:3]
    reach, block = call.reach(width), call.tiles_of_block(width)
    segment = segment_length(call, width, B * G * S * call.selection.n * reach, LONGEST, SEGMENTS_PER_SM, entry_bytes=BYTES / block)
    return width, reach // block, block, segment


def build_lists(call: Call, width: int, reach: int, block: int, segment: int) -> KeyToRows:
    (B, S), G = call.q.shape[:2], call.selection.groups
    tiles, kinds = -(-call.k.shape[2] // width), with_parts(segment)
    found = sort(call, width, reach, S, kinds, G)
    lists = KeyToRows(*found, B * G * tiles, tiles, reach, segment, block)
    if block > 1:
        launch.start(
            "cut_blocks.cu", launch.integer_macros(), call.q.get_device(), 1, 1024, 0,
            *lists.arguments(), *_segments(found[2:], kinds), early=True,
        )  # fmt: skip
    return lists


def fit(call: Call, entries: int) -> bool:
    """Return whether lists of `entries` entries stay within runtime.workspace_bytes."""
    return BYTES * entries <= max(call.settings.workspace_bytes, 1 << 20) and entries < 2**31


def lists_fit(call: Call, width: int, pairs: int = 1) -> bool:
    """Return True if the lists of `pairs` (batch entry, group) for tiles of `width` keys fit the workspace."""
    return fit(call, pairs * call.q.shape[1] * call.selection.n * call.reach(width) // call.tiles_of_block(width))


def with_parts(segment: int) -> Kinds:
    """Return the kinds of segments that `KeyToRows` counts."""
    return (segment, False), (segment, True)


def sort(call: Call, width: int, reach: int, section: int, kinds: Kinds, G: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The lists for tiles of `width` keys and sections of so many rows: by sections, in each by (batch entry, group),
    in each by tiles. reach: entries of a range, for the tiles that it may meet; 1: for the last of them. G: groups of q,
    or those of the selection.

    Returns:
        Entries [B * G * S * n * reach] int32, list after list, and what `sum_counts` returns.
    """
    q, n, on = call.q, call.selection.n, call.q.get_device()
    B, S = q.shape[:2]
    tiles, parts = -(-call.S_kv // width), B * G * -(-S // section)  # parts: sections of all (batch entry, group)
    capacity, lists = B * G * S * n * reach, parts * tiles
    block = SORTED if capacity > SORTED * call.device.sm_count else SORTED // 2
    # Counts take no more memory than the lists. A joined sequence has lists for few of its tiles: there, up to eight times as much.
    chunk = block * -(-tiles // (block if call.block_table is None else 8 * block))
    chunks = -(-min(section, S) * n * reach // chunk)
    if not fit(call, capacity) or lists * chunks >= 2**31:
        raise BackendError(
            f"the list of rows of every KV tile needs {BYTES * capacity} bytes, because any of the {n} ranges of a row may span"
            f" {reach} tiles; allowed: {call.settings.workspace_bytes} (runtime.workspace_bytes). Remedy: build the Selection from"
            " blocks, pass max_length=, call selection.measure(), or raise runtime.workspace_bytes."
        )
    few = block < SORTED and lists * chunks <= FEW_COUNTS and tiles <= FEW_TILES
    tile_of, entries = (unwritten(q, capacity, dtype=torch.int32) for _ in range(2))
    counts = unwritten(q, lists * chunks + (0 if few else published(lists)), dtype=torch.int32)
    numbers = (S * n * reach, reach, tiles, B * G, section * n * reach, chunk, chunks)
    ranges = call.disjoint_ranges()
    problem = launch.plan_problem(call, ranges) if G == call.selection.groups else launch.problem(call, ranges)
    count = launch.integer_macros(WIDTH=width, RANGE_BYTES=ranges.element_size(), SHARED_BY=G // call.selection.groups)
    scatter = launch.integer_macros(EACH=block // 256, FEW=int(few))
    launch.start(
        "sort_count.cu", count, on, parts * chunks, 256, 0,
        *numbers, *launch.pointers(tile_of, counts), 0 if few else published(lists) // 4, problem=problem,
    )  # fmt: skip
    sums = _sums(counts, lists) if few else sum_counts(counts, lists, tiles, chunks, kinds)
    launch.start(
        "sort_scatter.cu", scatter, on, parts * chunks, 256, 0,
        *numbers, *launch.pointers(tile_of, counts, sums[0], entries), *_segments(sums[1:], kinds), early=True,
    )  # fmt: skip
    return entries, *sums


def _sums(like: Tensor, lists: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized begins, and segments of each kind, [lists + 1] int64."""
    begins, first, second = (unwritten(like, lists + 1, dtype=torch.int64) for _ in range(3))
    return begins, first, second


def _segments(before: tuple[Tensor, Tensor], kinds: Kinds) -> tuple[int, ...]:
    """Return the values of `Segments` (sort.cuh) for each kind."""
    (longest, several), (other_longest, other_several) = kinds
    return before[0].data_ptr(), longest, several, before[1].data_ptr(), other_longest, other_several


def published(lists: int) -> int:
    """Numbers that CTAs of sum_counts.cu publish, beside their counts: four for each 32 lists."""
    return 4 * -(-lists // 32)


def sum_counts(counts: Tensor, lists: int, tiles: int, chunks: int, kinds: Kinds) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each list begins, and for each kind the number of segments in the lists before it: [lists + 1] int64
    each.

    Args:
        counts: [lists / tiles, chunks, tiles], and `published(lists)` zeros; int32. Counts become those of the chunks
            before.
        lists, tiles, chunks: how many.
        kinds: of segments.
    """
    sums = _sums(counts, lists)
    launch.start(
        "sum_counts.cu", launch.integer_macros(), counts.get_device(), -(-lists // 32), 512, 0, *launch.pointers(counts, sums[0]),
        lists, tiles, chunks, *_segments(sums[1:], kinds), early=True,
    )  # fmt: skip
    return sums


def key_value_gradients(call: Call, width: int, start: Callable[[int, tuple[int, ...]], None]) -> tuple[Tensor, Tensor]:
    """dk [B,G,S_kv,Dk] and dv [B,G,S_kv,Dv]. start(ctas, values): the kernel over the lists of tiles of `width` keys,
    given the values of its `KeyToRows` and `KeyGradients`."""
    return list_gradients(call, lists_of(call, width), width, start)


def list_gradients(
    call: Call, lists: KeyToRows, width: int, start: Callable[[int, tuple[int, ...]], None], blocks: tuple[Tensor, ...] = ()
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same over lists in memory. blocks: the tensors of `BlockTiles` (key_to_rows.cuh), if tiles are of small
    blocks."""
    entries, share = lists.capacity(), call.groups_per_selection
    parts = share * most_parts(entries, lists.segment, lists.lists)
    ctas = share * most_segments(entries, lists.segment, lists.lists)
    return write_gradients(call, lists, width, parts, lambda values: start(ctas, values), blocks, share)


def write_gradients(
    call: Call | ChooseCall, lists: KeyToRows, width: int, parts: int, start: Callable[[tuple[int, ...]], None],
    blocks: tuple[Tensor, ...] = (), share: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk [B,G,S_kv,Dk] and dv [B,G,S_kv,Dv]. start(values): the kernel over the lists, whose segments have `parts`
    parts or fewer, given the values of its `KeyToRows` and `KeyGradients`. blocks: as of `list_gradients`. share: groups that
    share the lists."""
    k, v = call.k, call.v
    part_dk, part_dv = (temporary(call, x, parts, width, x.shape[3], dtype=torch.float32) for x in (k, v))
    dk, dv = unwritten(k, *k.shape), unwritten(v, *v.shape)
    gradients = launch.pointers(part_dk, part_dv, dk, dv)
    start((*lists.arguments(), *gradients))
    keys = 8 if lists.lists * (width // 8) >= SUM_CTAS else 2
    small = {"SMALL_BLOCK": width // blocks[1].shape[1]} if blocks else {}
    launch.start(
        "sum_parts.cu", launch.macros(call, KEY_WARPS=width // 16, KEYS=keys, SHARED_BY=share, **small), k.get_device(),
        share * lists.lists * (width // keys),
        128, 0, *launch.pointers(lists.segments, lists.parts), *gradients, k.shape[2], lists.tiles,
        *launch.pointers(*(blocks or (None, None))),
    )  # fmt: skip
    return dk, dv
