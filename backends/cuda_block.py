"""cuda-block: triton-block, which visits every KV block by TMA and wgmma on Hopper (kernels/block_partials.cu, kernels/block_gradients.cu).

Units are triton-block's; so are calls that the kernels do not take (`takes`), the join of some heads (`_joins`), the sum of dq of few, and
large blocks, but for dk and dv (dkdv_groups.cu). Other blocks are visited as tiles of 64 keys. Lists and their segments come from
cupy_cuda/key_to_rows.py. NaN as in triton-block.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends import triton_block
from nsa_sel.backends._buffers import temporary, unwritten
from nsa_sel.backends._common import backward_of_any_scale, forward_of_any_scale, known
from nsa_sel.backends._driver import thread
from nsa_sel.backends._loads import lists_of
from nsa_sel.backends._replay import kept_plan
from nsa_sel.backends._triton import arguments
from nsa_sel.backends._triton.key_to_rows import KeyToRows
from nsa_sel.backends._triton.large_blocks import is_large
from nsa_sel.backends._triton.units import Unit, units, workspace_beside_plan
from nsa_sel.backends.cupy_cuda import launch, sm90
from nsa_sel.backends.cupy_cuda.compiler import Constants
from nsa_sel.backends.cupy_cuda.key_to_rows import KeyToRows as SegmentedLists
from nsa_sel.backends.cupy_cuda.key_to_rows import lists_fit, most_segments, segment_length, sort
from nsa_sel.backends.specs import HOPPER_LISTS
from nsa_sel.core.call import Call

__all__ = ["backward", "forward", "loaded_keys"]

WIDTH = sm90.KEYS
KEYS_SUMMED = 8  # by a CTA of sum_sections.cu
L2_BYTES = 36 * 2**20  # of q and do of a section, of the L2 cache's 50 MiB: each row is read once for every block that it selects
LONGEST = 2048  # entries of a segment of the backward pass
SEGMENTS_PER_SM = 2  # of the backward pass: in the order of order_segments.cu few balance, and have few parts
MASK_BITS, JOIN_PER_SM, SHARES_PER_SM = 64, 4, 3  # entries of a row, at most, where CUDA joins; CTAs of join_partials.cu, join_shares.cu
LEAST_HEADS = 8  # of the backward pass: with fewer, copying rows bounds the visit, and shared tiles gain nothing
STREAMS = 2  # of the forward pass
PER_SM, WARPGROUPS, STEPS = 2, 2, 32  # of block_partials.cu: CTAs per multiprocessor; warpgroups; steps of a segment, which has no part


class Shared(NamedTuple):
    """Masks of the rows' entries [B,S,G] int64: those that the join attends to itself, and all others (shared_tiles.cu)."""

    shared: Tensor
    listed: Tensor


@forward_of_any_scale
def forward(call: Call) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] and lse [B,S,G,h]."""
    if not takes(call) or is_large(call):
        return triton_block.forward(call)
    lists, *cuts = _cut_lists(call, _sizes(call, call.reach(WIDTH)), _partials(call)[1])
    q, k, v = map(sm90.loadable, (call.q, call.k, call.v))  # copies stay until the end
    maps = sm90.listed_maps(k, v, q)
    if not _joins(call, lists.section):
        return triton_block.joined_partials(call, lists, _visits(call, lists, cuts, maps, None))
    return _joined(call, lists, cuts, maps, sm90.adjacent_maps(k, v, q), _shared(call, lists.reach))


def _visits(
    call: Call, lists: KeyToRows, cuts: list[Tensor], maps: tuple[bytes, ...], listed: Tensor | None
) -> Callable[..., None]:  # fmt: skip
    """visit(unit, part_o, part_lse): of `triton_block.joined_partials`, for the entries that are `listed`. early: the kernel ahead in the
    stream is a join of this pass."""
    (macros, segment, shared), device = _partials(call), call.q.get_device()
    segments = most_segments(lists.pairs * lists.section * call.selection.n * lists.reach, segment, lists.pairs * lists.tiles)
    problem = launch.problem(call, call.disjoint_ranges())

    def visit(unit: Unit, part_o: Tensor, part_lse: Tensor, early: bool = False) -> None:
        launch.start(
            "block_partials.cu", macros, device, segments, 128 * WARPGROUPS, shared, lists.entries.data_ptr(), lists.reach,
            *launch.pointers(listed, *cuts), segment, *unit.lists, *launch.pointers(part_o, part_lse), maps=maps, problem=problem,
            early=early,
        )  # fmt: skip

    return visit


def _joined(
    call: Call, lists: KeyToRows, cuts: list[Tensor], maps: tuple[bytes, ...], join_maps: tuple[bytes, ...], masks: Shared
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and lse by block_partials.cu and join_partials.cu. Where there are several units, halves of them take turns on two streams: one
    reads partials at memory speed while the other multiplies, and neither waits for the other's last CTAs. On one stream kernels start
    early: the join multiplies before it needs partials."""
    q, h = call.q, call.q.shape[3]
    turns = _turns(call, lists)
    lists = lists._replace(pairs=lists.pairs // turns)
    o, lse = arguments.outputs(call)
    sizes = (lists.pairs, lists.section, call.selection.n * lists.reach, h)
    parts = [(temporary(call, o, *sizes, o.shape[4]), temporary(call, lse, *sizes)) for _ in range(turns)]
    streams, early = _streams(q, turns), turns == 1
    visit = _visits(call, lists, cuts, maps, masks.listed)
    problem = launch.problem(call, call.disjoint_ranges())
    try:
        for i, unit in enumerate(units(call, lists)):
            turn = i % turns
            with torch.cuda.stream(streams[turn]):
                visit(unit, *parts[turn], early=early and i > 0)
                _start_join(
                    "join_partials.cu", call, lists.reach, unit, masks, *parts[turn], o, lse, maps=join_maps, problem=problem, early=early
                )
    finally:  # a launch that fails frees the partials, too
        for stream in filter(None, streams):
            torch.cuda.current_stream(q.device).wait_stream(stream)
    return o, lse


def _start_join(source: str, call: Call, reach: int, unit: Unit, masks: Shared, *tensors: Tensor, **others: Any) -> None:
    """The kernel that computes what the tiles that tokens share give a unit's rows, and adds partials of all else."""
    (macros, shared), tokens = _join(call, source), sm90.ROWS // call.q.shape[3]
    launch.start(
        source, macros, call.q.get_device(), unit.rows.pairs * -(-unit.rows.rows // tokens), 128, shared, reach,
        *launch.pointers(*masks), *unit.rows, *launch.pointers(*tensors), **others,
    )  # fmt: skip


def _turns(call: Call, lists: KeyToRows) -> int:
    """Streams whose units take turns, each with its share of the partials' memory."""
    B, S, G = call.q.shape[:3]
    return min(STREAMS, lists.pairs) if lists.pairs * lists.section < B * S * G else 1


def _streams(like: Tensor, count: int) -> list[torch.cuda.Stream | None]:
    """None, the current stream, and others that wait for it. A replay has one: a pass with others always runs as it is written."""
    if count > 1 and thread.recording is not None:
        thread.recording.refused = True
    others = [_stream(like.device, threading.get_ident(), i) for i in range(1, count)]
    for stream in others:
        stream.wait_stream(torch.cuda.current_stream(like.device))
    return [None, *others]


@functools.lru_cache(maxsize=64)
def _stream(device: torch.device, thread: int, number: int) -> torch.cuda.Stream:
    """A thread's own: another may be capturing a CUDA graph."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, no-any-return]


def _shared(call: Call, reach: int) -> Shared:
    found: Shared = kept_plan(call, ("cuda-block shared",), _find_shared, reach, call.q.shape[3]).value
    return found


def _find_shared(call: Call, reach: int, h: int) -> Shared:
    q, each = call.q, call.selection.n * reach
    B, S, G = q.shape[:3]
    shared, listed = (unwritten(q, B, S, G, dtype=torch.int64) for _ in range(2))
    launch.start(
        "shared_tiles.cu", launch.integer_macros(H=h, EACH=each), q.get_device(), B * G * -(-S // 64), 128, 0,
        reach, *launch.pointers(shared, listed), problem=launch.problem(call, call.disjoint_ranges()),
    )  # fmt: skip
    return Shared(shared, listed)


@backward_of_any_scale
def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from one visit of every KV block, and a sum over each row's ranges."""
    if not takes(call) or (is_large(call) and not (sm90.mappable(call.q, call.k, call.v) and lists_fit(call, WIDTH))):
        return triton_block.backward(call, o, lse, do, dlse)
    if is_large(call):
        dq, delta = triton_block.dq_of_large(call, o, lse, do, dlse)
        return dq, *sm90.dkdv_groups(call, call.disjoint_ranges(), lse, sm90.loadable(do), delta)
    q, k, v, S = call.q, call.k, call.v, call.q.shape[1]
    loaded = [sm90.loadable(x) for x in (k, v, q, do)]  # autograd expands a constant; copies stay until the end
    do = loaded[3]
    sizes, device = _sizes(call, call.reach(WIDTH)), q.get_device()
    lists, *cuts = _cut_lists(call, sizes, sizes.segment)
    (order,) = kept_plan(call, ("cuda-block order",), _order, lists.reach, *sizes).value
    parts = [temporary(call, lse, sizes.parts, WIDTH, x.shape[3]) for x in (k, v)]
    sums = [temporary(call, lse, lists.pairs, lists.tiles, WIDTH, x.shape[3]) if lists.section < S else None for x in (k, v)]
    dk, dv = unwritten(k, *k.shape), unwritten(v, *v.shape)
    maps, problem = sm90.step_maps(*loaded), launch.problem(call, call.disjoint_ranges())
    joins = _joins(call, lists.section) and q.shape[3] >= LEAST_HEADS and sizes.segment <= LONGEST
    masks = _shared(call, lists.reach) if joins else None
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
            _start_join(
                "join_shares.cu", call, lists.reach, unit, masks, part_dq, lse, delta, dq, maps=maps[:4], problem=problem, early=True
            )
        launch.start("sum_sections.cu", summing, device, count * (WIDTH // KEYS_SUMMED), 128, 0, *to, problem=problem)

    return triton_block.sum_of_shares(call, o, lse, do, dlse, lists, visit, summed=joins)[0], dk, dv


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Keys that the forward loads: a tile once for each segment of its list of rows, and once for adjacent tokens that share it; not
    counted, at most what the rows select."""
    if not takes(call) or is_large(call):
        return triton_block.loaded_keys(call, selected, count)
    if not count:
        return selected
    section, segment = _sizes(call, call.reach(WIDTH)).section, _partials(call)[1]
    lists = lists_of(call, section, WIDTH)
    rows, reads, loaded = lists.rows, lists.selected, 0
    if _joins(call, section):
        (B, S, G), tokens, tiles = call.q.shape[:3], sm90.ROWS // call.q.shape[3], -(-call.S_kv // WIDTH)
        pairs = B * G * tiles
        groups = lists_of(call, tokens, WIDTH)
        shared = groups.rows == (S - groups.number // pairs * tokens).clamp(max=tokens)
        of_list = groups.number // pairs * tokens // section * pairs + groups.number % pairs
        at = torch.searchsorted(lists.number, of_list[shared])
        rows = rows.index_add(0, at, -groups.rows[shared])
        reads = reads.index_add(0, at, -groups.selected[shared])
        loaded = int(groups.keys[shared].sum())
    return loaded + int(torch.minimum(-(-rows // segment) * lists.keys, reads).sum())


@known
def takes(call: Call) -> bool:
    """Whether the kernels compute this call."""
    (h, Dk), Dv = call.q.shape[3:], call.v.shape[3]
    fits = HOPPER_LISTS.fits_few(h, Dk, Dv, call.selection.block_size)
    return fits and call.device.sm == HOPPER_LISTS.sm and launch.aligned(call.q, call.k, call.v)


@known
def _constants(call: Call, segment: int) -> tuple[Constants, Constants, int]:
    """Constants of both kernels, and block_gradients.cu's bytes of dynamic shared memory: those of dkdv_groups.cu, and a tile of ds.
    segment: of its macros, the same for most calls."""
    shape = sm90.group_shape(call.q.shape[4], call.v.shape[3], call.device, sm90.PANEL)
    visiting = launch.macros(call, H=call.q.shape[3], STAGES=shape.stages, SEGMENT=segment)
    return visiting, launch.macros(call, KEYS=KEYS_SUMMED), shape.shared


@known
def _partials(call: Call) -> tuple[Constants, int, int]:
    """Constants of block_partials.cu, entries of a segment at most, and bytes of dynamic shared memory: a tile, and the stages of q."""
    h, Dk = call.q.shape[3:]
    segment, q_bytes, tile_bytes = STEPS * (sm90.ROWS // h), sm90.PANEL * Dk // 64, sm90.PANEL * (Dk + call.v.shape[3]) // 64
    of_cta = (call.device.shared_memory + sm90.SYSTEM) // PER_SM - sm90.SYSTEM - sm90.STATIC - 4 * segment
    stages = (of_cta - tile_bytes) // (WARPGROUPS * q_bytes)
    return launch.macros(call, H=h, STAGES=stages, STEPS=STEPS), segment, tile_bytes + WARPGROUPS * stages * q_bytes


def _joins(call: Call, section: int) -> bool:
    """Whether join_partials.cu joins: 64 rows are whole tokens within a section, and a mask holds the entries of a row."""
    S, h = call.q.shape[1], call.q.shape[3]
    aligned = section >= S or section % (sm90.ROWS // h) == 0
    return sm90.ROWS % h == 0 and aligned and call.selection.n * call.reach(WIDTH) <= MASK_BITS


@known
def _join(call: Call, source: str) -> tuple[Constants, int]:
    """Constants of a kernel that joins partials, and its bytes of dynamic shared memory: rows and a tile, or stages."""
    (h, Dk), Dv = call.q.shape[3:], call.v.shape[3]
    per_sm, columns, tiles = (JOIN_PER_SM, Dv, 2 * Dk + Dv) if source == "join_partials.cu" else (SHARES_PER_SM, Dk, 2 * (Dk + Dv))
    ring_bytes = sm90.PANEL * columns // 64  # 64 rows
    ring = ((call.device.shared_memory + sm90.SYSTEM) // per_sm - sm90.SYSTEM - sm90.STATIC) // ring_bytes
    macros = launch.macros(call, H=h, EACH=call.selection.n * call.reach(WIDTH), PER_SM=per_sm, RING=ring)
    return macros, max(ring * ring_bytes, sm90.PANEL * tiles // 64)


class Sizes(NamedTuple):
    """Rows of a section and (batch entry, group) pairs of a unit, entries of a segment, segments of a unit at most."""

    section: int
    pairs: int
    segment: int
    parts: int


@known
def _sizes(call: Call, reach: int) -> Sizes:
    """Units whose q and do of one pair fit L2_BYTES, and whose shares of dq, parts and sums fit the workspace together. So do the partials
    of o and lse, so that both passes share their lists."""
    B, S, G, h, Dk = call.q.shape
    entries, columns, tiles = call.selection.n * reach, Dk + call.v.shape[3], -(-call.k.shape[2] // WIDTH)
    size, tile_bytes, workspace = call.q.element_size(), 4 * WIDTH * columns, workspace_beside_plan(call, WIDTH)
    share_bytes = entries * h * max(Dk * size, call.v.shape[3] * size + 4)  # of a row
    most = max((3 * workspace // 4 - tiles * tile_bytes) // share_bytes, workspace // 8 // share_bytes, 1)
    fitting = min(most, max(1, L2_BYTES // (h * columns * size)))
    section = S if fitting >= S else triton_block.even_section(S, fitting)

    def of(pairs: int) -> Sizes:
        segment = segment_length(call, WIDTH, pairs * section * entries, LONGEST, SEGMENTS_PER_SM)
        return Sizes(section, pairs, segment, most_segments(pairs * section * entries, segment, pairs * tiles))

    def used(sizes: Sizes) -> int:
        sums = sizes.pairs * tiles if section < S else 0
        return sizes.pairs * section * share_bytes + (sizes.parts + sums) * tile_bytes

    pairs = B * G
    while pairs > 1 and used(of(pairs)) > workspace:
        pairs = -(-pairs // 2)
    return of(pairs)


def _order(call: Call, reach: int, section: int, pairs: int, segment: int, parts: int) -> tuple[Tensor]:
    """The order in which block_gradients.cu takes the segments: in each unit long ones first, of as many pairs together as have q and do
    in the L2 cache. reach: what else the lists follow from."""
    (B, S, G, h, Dk), Dv = call.q.shape, call.v.shape[3]
    lists, begins, segments = _cut_lists(call, Sizes(section, pairs, segment, parts), segment)
    cut = SegmentedLists(None, begins, segments, segments, begins.shape[0] - 1, lists.tiles, reach, segment)
    units = -(-S // section) * -(-B * G // pairs)
    stretch = sm90.STRETCH_BYTES // (section * h * (Dk + Dv) * call.q.element_size())
    stretch = max(1, min(stretch, pairs), -(-pairs // sm90.MOST_STRETCHES))
    return (sm90.order_segments(call, cut, parts * units, units, B * G, pairs, 0, 0, stretch, UNITS=1),)


def _cut_lists(call: Call, sizes: Sizes, segment: int) -> tuple[KeyToRows, Tensor, Tensor]:
    """The lists of both passes, and for one's segments of at most so many entries `begins` and `segments` of unit_lists.cuh."""
    reach, forward = call.reach(WIDTH), _partials(call)[1]
    numbers = (sizes.section, forward, sizes.segment, reach)
    entries, begins, *segments = kept_plan(call, ("cuda-block lists",), _sort, *numbers).value
    # Triton's kernels read none of these lists.
    lists = KeyToRows(entries, begins, None, WIDTH, -(-call.k.shape[2] // WIDTH), reach, 1, *sizes[:2], piece=0, pieces=0)
    return lists, begins, segments[segment != forward]


def _sort(call: Call, section: int, forward: int, backward: int, reach: int) -> tuple[Tensor, ...]:
    """Lists of sections of so many rows, and segments of so many entries."""
    return sort(call, WIDTH, reach, section, ((forward, False), (backward, False)))
