"""The backend cuda-block: triton-block with TMA and wgmma kernels for Hopper (kernels/block_partials.cu,
kernels/block_gradients.cu).

Blocks are visited as tiles of 64 keys. In the forward pass a block of 128 keys is one tile, which halves its partial
results. Units are triton-block's. Triton kernels also compute calls that the CUDA kernels do not take (`takes`), merge
partials for some head counts (`_joins`), sum dq for few heads, and visit large blocks, except for dk and dv
(dkdv_groups.cu). Lists and their segments come from key_to_rows.py. NaN spreads as in triton-block.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends import triton_block
from nsa_sel.backends._loads import lists_of
from nsa_sel.backends._triton.key_to_rows import KeyToRows
from nsa_sel.backends._triton.large_blocks import is_large
from nsa_sel.backends._triton.units import Unit, units, workspace_beside_plan
from nsa_sel.backends.cupy_cuda import launch, sm90
from nsa_sel.backends.cupy_cuda.compiler import Constants
from nsa_sel.backends.cupy_cuda.key_to_rows import KeyToRows as SegmentedLists
from nsa_sel.backends.cupy_cuda.key_to_rows import lists_fit, most_segments, segment_length, sort
from nsa_sel.backends.launcher.buffers import temporary, unwritten
from nsa_sel.backends.launcher.cuda_driver import thread
from nsa_sel.backends.launcher.passes import backward_of_any_scale, cached_by_class, forward_of_any_scale, outputs
from nsa_sel.backends.launcher.replay import kept_plan
from nsa_sel.backends.specs import HOPPER_LISTS, VISITED_KEYS
from nsa_sel.core.call import Call

__all__ = ["backward", "forward", "loaded_keys"]

WIDTH = sm90.KEYS  # keys per tile of the backward pass
KEYS_SUMMED = 8  # keys per CTA of sum_sections.cu
L2_BYTES = 36 * 2**20  # bytes of q and do per section, of 50 MiB of L2: rows are read once per selected block
LONGEST = 2048  # most entries per segment in the backward pass
SEGMENTS_PER_SM = 2  # backward pass: order_segments.cu balances few segments, which need few partial sums
# Most entries per row for join_partials.cu and join_shares.cu (one mask bit each), and their CTAs per multiprocessor.
MASK_BITS, JOIN_PER_SM, SHARES_PER_SM = 64, 4, 3
LEAST_HEADS = 8  # backward pass: with fewer heads the visit is bound by copying rows, so shared tiles gain nothing
STREAMS = 2  # forward pass
# Packed batches of up to so many rows are replayed, so all that they allocate is less than MOST_BYTES (replay.py); bytes of their partials.
REPLAYED_ROWS, REPLAYED_BYTES = 8192, 3 << 28
PER_SM, WARPGROUPS, STEPS = 2, 2, 32  # block_partials.cu: CTAs per multiprocessor; warpgroups; steps per segment


class Shared(NamedTuple):
    """Masks of the rows' entries [B,S,G] int64 from shared_tiles.cu: those that the join kernel computes, and all
    others."""

    shared: Tensor
    listed: Tensor


@forward_of_any_scale
def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h]."""
    if not takes(call) or is_large(call):
        return triton_block.forward(call)
    width = tile_keys(call)
    lists, *cuts = _cut_lists(call, width, _sizes(call, width), _partials(call)[1])
    q, k, v = map(sm90.loadable, (call.q, call.k, call.v))  # copies stay until the end
    maps = sm90.listed_maps(k, v, q, keys=width)
    if not _joins(call, width, lists.section):
        return triton_block.joined_partials(call, lists, _visits(call, lists, cuts, maps, None))
    return _joined(call, lists, cuts, maps, sm90.adjacent_maps(k, v, q), _shared(call, width))


def _visits(
    call: Call, lists: KeyToRows, cuts: list[Tensor], maps: tuple[bytes, ...], listed: Tensor | None
) -> Callable[..., None]:  # fmt: skip
    """Return the `visit` of `triton_block.joined_partials`, for the entries in the mask `listed`, or all.

    visit(..., early=True): the previous kernel of the stream is a join of this pass, so programmatic dependent launch
    is safe.
    """
    (macros, segment, shared), device = _partials(call), call.q.get_device()
    segments = most_segments(lists.pairs * lists.section * call.selection.n * lists.reach, segment, lists.pairs * lists.tiles)
    counters = None
    if call.block_table is not None:  # CTAs take several
        segments = min(segments, PER_SM * call.device.sm_count)
        counters = temporary(call, call.q, call.q.shape[2] * -(-call.q.shape[1] // lists.section), dtype=torch.int32)
        launch.clear(counters.data_ptr(), 4 * counters.numel(), device)

    def counter_of(unit: Unit) -> int:
        return 0 if counters is None else counters.data_ptr() + 4 * (unit.lists.first_list // unit.lists.tiles)

    problem = launch.problem(call, call.disjoint_ranges())

    def visit(unit: Unit, part_o: Tensor, part_lse: Tensor, early: bool = False) -> None:
        launch.start(
            "block_partials.cu", macros, device, segments, 128 * WARPGROUPS, shared, lists.entries.data_ptr(), lists.reach,
            *launch.pointers(listed, *cuts), segment, *unit.lists, *launch.pointers(part_o, part_lse), counter_of(unit),
            *launch.joined_factors(call), maps=maps, problem=problem, early=early,
        )  # fmt: skip

    return visit


def _joined(
    call: Call, lists: KeyToRows, cuts: list[Tensor], maps: tuple[bytes, ...], join_maps: tuple[bytes, ...], masks: Shared
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and lse, computed by block_partials.cu and join_partials.cu.

    Several units alternate between two streams, so that one reads partials at memory speed while the other multiplies,
    and neither waits for the other's last CTAs. On one stream, kernels use programmatic dependent launch: the join
    multiplies before it needs partials.
    """
    q, h = call.q, call.q.shape[3]
    turns = _turns(call, lists)
    lists = lists._replace(pairs=lists.pairs // turns)
    o, lse = outputs(call)
    sizes = (lists.pairs, lists.section, call.selection.n * lists.reach, h)
    parts = [(temporary(call, o, *sizes, o.shape[4]), temporary(call, lse, *sizes)) for _ in range(turns)]
    visit, problem = _visits(call, lists, cuts, maps, masks.listed), launch.problem(call, call.disjoint_ranges())
    streams, early = _streams(q, turns), turns == 1
    try:
        for i, unit in enumerate(units(call, lists)):
            turn = i % turns
            with torch.cuda.stream(streams[turn]):
                visit(unit, *parts[turn], early=early and i > 0)
                _start_join(
                    "join_partials.cu", call, lists.width, unit, masks, *parts[turn], o, lse, maps=join_maps, problem=problem, early=early,
                    more=launch.joined_factors(call),
                )  # fmt: skip
    finally:  # also if a launch fails, because the partials are freed then
        for stream in filter(None, streams):
            torch.cuda.current_stream(q.device).wait_stream(stream)
    return o, lse


def _start_join(
    source: str, call: Call, width: int, unit: Unit, masks: Shared, *tensors: Tensor, more: Sequence[int] = (), **others: Any
) -> None:  # fmt: skip
    """Launch the kernel that computes a unit's rows over the tiles that their tokens share, and adds the partials of
    all others."""
    (macros, shared), tokens = _join(call, source, width), sm90.ROWS // call.q.shape[3]
    launch.start(
        source, macros, call.q.get_device(), unit.rows.pairs * -(-unit.rows.rows // tokens), 128, shared, call.reach(width),
        *launch.pointers(*masks), *unit.rows, *launch.pointers(*tensors), *more, **others,
    )  # fmt: skip


def _turns(call: Call, lists: KeyToRows) -> int:
    """Return how many streams the units alternate between, each with its share of the partials' memory. Packed batches
    that take less than the host have one, because their passes are then replayed."""
    B, S, G = call.q.shape[:3]
    if call.block_table is not None and S <= REPLAYED_ROWS:
        return 1
    return min(STREAMS, lists.pairs) if lists.pairs * lists.section < B * S * G else 1


def _streams(like: Tensor, count: int) -> list[torch.cuda.Stream | None]:
    """Return None (the current stream) and further streams that wait for it. A pass with several streams is never
    replayed."""
    if count > 1 and thread.recording is not None:
        thread.recording.refused = True
    others = [_stream(like.device, threading.get_ident(), i) for i in range(1, count)]
    for stream in others:
        stream.wait_stream(torch.cuda.current_stream(like.device))
    return [None, *others]


@functools.lru_cache(maxsize=64)
def _stream(device: torch.device, thread: int, number: int) -> torch.cuda.Stream:
    """Return a stream of this thread only, because another thread may be capturing a CUDA graph."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, no-any-return]


def _shared(call: Call, width: int) -> Shared:
    masks: Shared = kept_plan(call, ("cuda-block shared",), _find_shared, width, call.q.shape[3]).value
    return masks


def _find_shared(call: Call, width: int, h: int) -> Shared:
    q, reach = call.q, call.reach(width)
    B, S, G = q.shape[:3]
    shared, listed = (unwritten(q, B, S, G, dtype=torch.int64) for _ in range(2))
    macros = launch.integer_macros(H=h, EACH=call.selection.n * reach, SHARED_BY=call.groups_per_selection, TILE=width)
    launch.start(
        "shared_tiles.cu", macros, q.get_device(), B * G * -(-S // 64), 128, 0,
        reach, *launch.pointers(shared, listed), problem=launch.problem(call, call.disjoint_ranges()),
    )  # fmt: skip
    return Shared(shared, listed)


@backward_of_any_scale
def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv from one visit of every KV block, and a sum over each row's ranges for dq."""
    if not takes(call) or (is_large(call) and not (sm90.mappable(call.q, call.k, call.v) and lists_fit(call, WIDTH))):
        return triton_block.backward(call, o, lse, do, dlse)
    if is_large(call):
        dq, delta = triton_block.dq_of_large(call, o, lse, do, dlse)
        return dq, *sm90.dkdv_groups(call, lse, sm90.loadable(do), delta)
    q, k, v, S = call.q, call.k, call.v, call.q.shape[1]
    loaded = [sm90.loadable(x) for x in (k, v, q, do)]  # do may be an expanded constant; copies live until the end
    do = loaded[3]
    sizes, device = _sizes(call, WIDTH), q.get_device()
    lists, *cuts = _cut_lists(call, WIDTH, sizes, sizes.segment)
    (order,) = kept_plan(call, ("cuda-block order",), _order, lists.reach, *sizes).value
    parts = [temporary(call, lse, sizes.parts, WIDTH, x.shape[3]) for x in (k, v)]
    sums = [temporary(call, lse, lists.pairs, lists.tiles, WIDTH, x.shape[3]) if lists.section < S else None for x in (k, v)]
    dk, dv = unwritten(k, *k.shape), unwritten(v, *v.shape)
    maps, problem = sm90.step_maps(*loaded), launch.problem(call, call.disjoint_ranges())
    joins = _joins(call, WIDTH, lists.section) and q.shape[3] >= LEAST_HEADS and sizes.segment <= LONGEST
    masks = _shared(call, WIDTH) if joins else None
    visiting, summing, shared = _constants(call, LONGEST if joins else 0)

    def visit(unit: Unit, delta: Tensor, part_dq: Tensor, dq: Tensor) -> None:
        rows, count = unit.rows, unit.lists.end_list - unit.lists.first_list
        to = (
            *launch.pointers(*cuts), sizes.segment, *unit.lists,
            rows.first_row > 0, rows.first_row + rows.rows == S, *launch.pointers(*parts, *sums, dk, dv),
        )  # fmt: skip
        launch.start(
            "block_gradients.cu", visiting, device, sizes.parts, 256, shared,
            *launch.strided(do), *launch.pointers(lse, delta, lists.entries), lists.reach, *to,
            *launch.pointers(part_dq, order, masks.listed if masks else None), maps=maps, problem=problem,
        )  # fmt: skip
        if masks:
            _start_join("join_shares.cu", call, WIDTH, unit, masks, part_dq, lse, delta, dq, maps=maps[:4], problem=problem, early=True)
        launch.start("sum_sections.cu", summing, device, count * (WIDTH // KEYS_SUMMED), 128, 0, *to, problem=problem)

    return triton_block.sum_of_shares(call, o, lse, do, dlse, lists, visit, summed=joins)[0], dk, dv


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Return how many keys the forward loads: a tile once per segment of its row list, and once per group of tokens
    that share it.

    Without `count`, return an upper bound.
    """
    if not takes(call) or is_large(call):
        return triton_block.loaded_keys(call, selected, count)
    if not count:
        return selected
    width = tile_keys(call)
    section, segment = _sizes(call, width).section, _partials(call)[1]
    lists = lists_of(call, section, width)
    rows, reads, loaded = lists.rows, lists.selected, 0
    if _joins(call, width, section):
        (B, S, G), tokens, tiles = call.q.shape[:3], sm90.ROWS // call.q.shape[3], -(-call.S_kv // width)
        pairs = B * G * tiles
        groups = lists_of(call, tokens, width)
        shared = groups.rows == (S - groups.number // pairs * tokens).clamp(max=tokens)
        of_list = groups.number // pairs * tokens // section * pairs + groups.number % pairs
        at = torch.searchsorted(lists.number, of_list[shared])
        rows = rows.index_add(0, at, -groups.rows[shared])
        reads = reads.index_add(0, at, -groups.selected[shared])
        loaded = int(groups.keys[shared].sum())
    return loaded + int(torch.minimum(-(-rows // segment) * lists.keys, reads).sum())


def tile_keys(call: Call) -> int:
    """Return the keys per tile of the forward pass of a call that the CUDA kernels compute."""
    assert call.selection.block_size is not None, "takes"
    page = 0 if call.block_table is None else call.k.shape[2]
    return next(width for width in VISITED_KEYS if call.selection.block_size % width == 0 == page % width)


@cached_by_class
def takes(call: Call) -> bool:
    """Return whether the CUDA kernels compute this call."""
    (h, Dk), Dv = call.q.shape[3:], call.v.shape[3]
    fits = HOPPER_LISTS.fits_few(h, Dk, Dv, call.selection.block_size)
    return fits and call.device.sm == HOPPER_LISTS.sm and launch.aligned(call.q, call.k, call.v)


@cached_by_class
def _constants(call: Call, segment: int) -> tuple[Constants, Constants, int]:
    """Return the macros of both backward kernels, and the bytes of dynamic shared memory of block_gradients.cu.

    The latter are those of dkdv_groups.cu plus a tile of ds. segment: SEGMENT of block_gradients.cu.
    """
    shape = sm90.group_shape(call.q.shape[4], call.v.shape[3], call.device, sm90.PANEL)
    visiting = launch.macros(call, H=call.q.shape[3], STAGES=shape.stages, SEGMENT=segment)
    return visiting, launch.macros(call, KEYS=KEYS_SUMMED), shape.shared


@cached_by_class
def _partials(call: Call) -> tuple[Constants, int, int]:
    """Return the macros of block_partials.cu, most entries per segment, and bytes of dynamic shared memory (a tile,
    stages of q)."""
    (h, Dk), Dv, width = call.q.shape[3:], call.v.shape[3], tile_keys(call)
    segment, q_bytes, tile_bytes = STEPS * (sm90.ROWS // h), sm90.PANEL * Dk // 64, 2 * width * (Dk + Dv)
    of_cta = (call.device.shared_memory + launch.SYSTEM) // PER_SM - launch.SYSTEM - sm90.STATIC - 4 * segment
    stages = (of_cta - tile_bytes) // (WARPGROUPS * q_bytes)
    return (
        launch.macros(call, H=h, TILE=width, STAGES=stages, STEPS=STEPS, **launch.joined_macros(call)),
        segment,
        tile_bytes + WARPGROUPS * stages * q_bytes,
    )


def _joins(call: Call, width: int, section: int) -> bool:
    """Return whether join_partials.cu merges: 64 rows are whole tokens of one section, and a mask holds the entries of
    a row."""
    S, h = call.q.shape[1], call.q.shape[3]
    aligned = section >= S or section % (sm90.ROWS // h) == 0
    return sm90.ROWS % h == 0 and aligned and call.selection.n * call.reach(width) <= MASK_BITS


@cached_by_class
def _join(call: Call, source: str, width: int) -> tuple[Constants, int]:
    """Return the macros of a join kernel and its bytes of dynamic shared memory (rows and a tile, or stages)."""
    (h, Dk), Dv = call.q.shape[3:], call.v.shape[3]
    per_sm, columns, tiles = (JOIN_PER_SM, Dv, 2 * Dk + Dv) if source == "join_partials.cu" else (SHARES_PER_SM, Dk, 2 * (Dk + Dv))
    ring_bytes = sm90.PANEL * columns // 64  # 64 rows
    ring = ((call.device.shared_memory + launch.SYSTEM) // per_sm - launch.SYSTEM - sm90.STATIC) // ring_bytes
    each, share = call.selection.n * call.reach(width), call.groups_per_selection
    macros = launch.macros(call, H=h, EACH=each, SHARED_BY=share, TILE=width, PER_SM=per_sm, RING=ring, **launch.joined_macros(call))
    return macros, max(ring * ring_bytes, sm90.PANEL * tiles // 64)


class Sizes(NamedTuple):
    """Rows per section, (batch entry, group) pairs per unit, most entries per segment, most segments per unit."""

    section: int
    pairs: int
    segment: int
    parts: int


@cached_by_class
def _sizes(call: Call, width: int) -> Sizes:
    """Return units whose q and do per pair fit L2_BYTES, and whose shares of dq, partial sums and sums fit the
    workspace.

    The partials of o and lse also fit, so that both passes share their lists.
    """
    B, S, G, h, Dk = call.q.shape
    entries, columns, tiles = call.selection.n * call.reach(width), Dk + call.v.shape[3], -(-call.S_kv // width)
    size, tile_bytes, workspace = call.q.element_size(), 4 * width * columns, workspace_beside_plan(call, width)
    if call.block_table is not None:  # no backward pass follows; few of a joined sequence's tiles exist
        tile_bytes, workspace = 0, min(workspace, REPLAYED_BYTES) if S <= REPLAYED_ROWS else workspace
    share_bytes = entries * h * max(Dk * size, call.v.shape[3] * size + 4)  # of a row
    most = max((3 * workspace // 4 - tiles * tile_bytes) // share_bytes, workspace // 8 // share_bytes, 1)
    fitting = min(most, max(1, L2_BYTES // (h * columns * size)))
    section = S if fitting >= S else triton_block.even_section(S, fitting)

    def of(pairs: int) -> Sizes:
        segment = segment_length(call, width, pairs * section * entries, LONGEST, SEGMENTS_PER_SM)
        return Sizes(section, pairs, segment, most_segments(pairs * section * entries, segment, pairs * tiles))

    def used(sizes: Sizes) -> int:
        sums = sizes.pairs * tiles if section < S else 0
        return sizes.pairs * section * share_bytes + (sizes.parts + sums) * tile_bytes

    pairs = B * G
    while pairs > 1 and used(of(pairs)) > workspace:
        pairs = -(-pairs // 2)
    return of(pairs)


def _order(call: Call, reach: int, section: int, pairs: int, segment: int, parts: int) -> tuple[Tensor]:
    """Return the order in which block_gradients.cu takes the segments of each unit.

    Pairs whose q and do fit the L2 cache together come together, and among their segments long ones come first. reach:
    part of the key.
    """
    (B, S, G, h, Dk), Dv = call.q.shape, call.v.shape[3]
    lists, begins, segments = _cut_lists(call, WIDTH, Sizes(section, pairs, segment, parts), segment)
    cut = SegmentedLists(None, begins, segments, segments, begins.shape[0] - 1, lists.tiles, reach, segment)
    units = -(-S // section) * -(-B * G // pairs)
    stretch = sm90.STRETCH_BYTES // (section * h * (Dk + Dv) * call.q.element_size())
    stretch = max(1, min(stretch, pairs), -(-pairs // sm90.MOST_STRETCHES))
    return (sm90.order_segments(call, cut, parts * units, units, B * G, pairs, 0, 0, stretch, BY_UNITS=1),)


def _cut_lists(call: Call, width: int, sizes: Sizes, segment: int) -> tuple[KeyToRows, Tensor, Tensor]:
    """Return the lists for tiles of `width` keys, which both passes share if it is WIDTH, and `begins` and `segments` of
    key_to_rows.cuh for segments of at most `segment` entries."""
    reach, forward = call.reach(width), _partials(call)[1]
    numbers = (width, sizes.section, forward, sizes.segment, reach)
    entries, begins, *segments = kept_plan(call, ("cuda-block lists",), _sort, *numbers).value
    # Triton's kernels read none of these lists.
    lists = KeyToRows(entries, begins, None, width, -(-call.S_kv // width), reach, 1, *sizes[:2], piece=0, pieces=0)
    return lists, begins, segments[segment != forward]


def _sort(call: Call, width: int, section: int, forward: int, backward: int, reach: int) -> tuple[Tensor, ...]:
    """Build the lists for sections of `section` rows, with segments of `forward` and of `backward` entries."""
    return sort(call, width, reach, section, ((forward, False), (backward, False)), call.q.shape[2])
