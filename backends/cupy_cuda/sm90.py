"""Launch Hopper's kernels (TMA, wgmma), and decide which calls they take.

forward_tiles.cu, dq_tiles.cu    tiles of tokens with the union of their blocks: adjacent tokens (tile_union.cu), or
tokens with similar
                                 selections (token_order.py)
forward_gather.cu, dq_gather.cu  the same for head dims of 256, or for blocks smaller than a step
dkdv_groups.cu                   dk and dv over the lists of key_to_rows.py, whose segments order_segments.cu orders
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends._loads import union_keys
from nsa_sel.backends._slices import by_parts, slices
from nsa_sel.backends.cupy_cuda import launch
from nsa_sel.backends.cupy_cuda.block_tiles import block_lists_of, list_bytes
from nsa_sel.backends.cupy_cuda.compiler import Constants
from nsa_sel.backends.cupy_cuda.key_to_rows import KeyToRows, build_lists, list_gradients, lists_fit, most_segments, numbers_of_lists
from nsa_sel.backends.cupy_cuda.tensor_map import key_group_map, row_map, tensor_map
from nsa_sel.backends.cupy_cuda.token_order import places, start_union, stretch_of
from nsa_sel.backends.launcher.buffers import bits_dtype, temporary, unwritten
from nsa_sel.backends.launcher.passes import cached_by_class, outputs
from nsa_sel.backends.launcher.replay import kept_plan
from nsa_sel.backends.specs import HOPPER_TILES
from nsa_sel.core.call import Call, ChooseCall, WindowCall
from nsa_sel.core.request import DeviceInfo

SM = 90  # only sm_90 has wgmma
ROWS, KEYS, PANEL = 64, 64, 64 * 128  # rows per consumer warpgroup, keys per step, bytes of 64 rows of 64 columns
BLOCK_NUMBER = torch.int16  # dtype of block numbers in a plan, read as unsigned
STATIC = 2048  # bytes of `__shared__` variables and reserved memory, rounded up to 1024
MOST_STAGES = 6  # most stages in dkdv_groups.cu, forward_gather.cu, forward_blocks.cu (e4m3: twice as many)
MOST_COLUMNS = 128  # most columns of dk or dv that fit one consumer's registers in dkdv_groups.cu
MOST_TILE_COLUMNS = 320  # most columns of keys plus values that fit two consumers' registers (TILE_STAYS)
L2_BYTES = 24 * 2**20  # share of the L2 cache (50 MiB) for keys and values
STRETCH_BYTES = 16 * 2**20  # bytes of q and do per stretch of order_segments.cu
MOST_STRETCHES = 256  # in order_segments.cu
STATISTICS = 16 * ROWS  # bytes of `__shared__` variables per stage of dkdv_groups.cu


class TileShape(NamedTuple):
    """Consumer warpgroups, tokens per tile, stages of keys and values, stages of q, and bytes of dynamic shared
    memory."""

    consumers: int
    tokens: int
    stages: int
    q_stages: int
    shared: int


class GroupShape(NamedTuple):
    """Threads per CTA of dkdv_groups.cu, stages of q and do, and bytes of dynamic shared memory."""

    threads: int
    stages: int
    shared: int


class TilePlan(NamedTuple):
    """The block lists of all tiles: fields of `TilePlan` in tile_plan.cuh."""

    blocks: Tensor | None  # [all tiles * capacity] unsigned 16 bits; None if visible keys are computed (BY_ARITHMETIC)
    rows: Tensor | None  # [all tiles * capacity], bit r: row r of the tile selected the block; smallest dtype that fits
    counts: Tensor | None  # [all tiles, 2] int32
    tiles: int  # per batch entry and group of the selection
    capacity: int
    counter: Tensor | None = None  # tile counter, one int32, zero between passes
    order: Tensor | None = None  # token order [B,G,stretches,stretch] uint8; None for tiles of adjacent tokens


def mappable(*tensors: Tensor) -> bool:
    """Return whether TMA can load the tensors: no stride of 0, and rows that begin at multiples of 16 bytes."""
    return not any(0 in x.stride() for x in tensors) and launch.aligned(*tensors)


def supports_tiles(call: Call, *others: Tensor) -> bool:
    """Return whether the tile kernels compute this call. others: further tensors that a backward pass loads through
    TMA."""
    return _fits_tiles(call, bool(others)) and mappable(*others)


@cached_by_class
def _fits_tiles(call: Call, backward: bool) -> bool:
    _, S, _, h, Dk = call.q.shape
    return (
        call.device.sm == SM
        and HOPPER_TILES.fits(S, call.S_kv, h, Dk, call.v.shape[-1], call.selection.block_size, backward)
        and steps_in_pages(call)
        and max(call.k.stride(2), call.v.stride(2)) < 1 << 31  # gather_steps.cuh multiplies bytes in 32 bits
        and mappable(call.q, call.k, call.v)
    )


def steps_in_pages(call: Call) -> bool:
    """Return whether each step's keys lie within one page, as TMA requires."""
    return call.block_table is None or call.k.shape[2] % KEYS == 0


@functools.lru_cache(maxsize=1024)
def tile_shape(consumers: int, h: int, Dk: int, Dv: int, q_stages: int, columns: int, shared_memory: int) -> TileShape:
    """Return the shape with as many stages of 64 keys and values as fit in shared memory.

    Each consumer also needs q_stages stages of q, and 64 rows of `columns` other columns.
    """
    row_bytes, step_bytes = consumers * PANEL * (q_stages * Dk + columns) // 64, PANEL * (Dk + Dv) // 64
    stages = (shared_memory - STATIC - row_bytes) // step_bytes
    return TileShape(consumers, min(64, consumers * (ROWS // h)), stages, q_stages, row_bytes + stages * step_bytes)


def forward_shape(q: Tensor, v: Tensor, device: DeviceInfo) -> TileShape:
    """Return the tile shape of forward_tiles.cu."""
    (h, Dk), Dv = q.shape[3:], v.shape[-1]
    exchanged = Dv if h == 1 else 0  # half of a float32 accumulator
    return tile_shape(HOPPER_TILES.warpgroups(h, Dk), h, Dk, Dv, 1, exchanged, device.shared_memory)


def gather_shape(q: Tensor, v: Tensor, device: DeviceInfo, backward: bool = False) -> TileShape:
    """Return the tile shape of forward_gather.cu, or of dq_gather.cu, which also holds do. stages: of keys; values have
    one less."""
    (h, Dk), Dv = q.shape[3:], v.shape[-1]
    consumers, k_bytes, v_bytes = HOPPER_TILES.warpgroups(h, Dk, backward), PANEL * Dk // 64, PANEL * Dv // 64
    row_bytes = consumers * (k_bytes + v_bytes * backward)
    values = min(MOST_STAGES - 1, (device.shared_memory - STATIC - row_bytes - k_bytes) // (k_bytes + v_bytes))
    return TileShape(consumers, HOPPER_TILES.tokens(h, Dk, backward), values + 1, 1, row_bytes + (values + 1) * k_bytes + values * v_bytes)


def gathers(call: Call) -> bool:
    """Return whether forward_gather.cu and dq_gather.cu compute the call, instead of forward_tiles.cu and
    dq_tiles.cu."""
    h, Dk = call.q.shape[3:]
    return HOPPER_TILES.gathers(h, Dk, call.v.shape[-1], call.selection.block_size)


def dq_shape(q: Tensor, v: Tensor, device: DeviceInfo, with_o: bool = False) -> TileShape:
    """Return the tile shape of dq_tiles.cu. with_o: o is in shared memory, too."""
    (h, Dk), Dv = q.shape[3:], v.shape[-1]
    q_stages = 2 if Dk <= 128 else 1  # wider tiles would leave only two stages of keys
    return tile_shape(HOPPER_TILES.warpgroups(h, Dk, backward=True), h, Dk, Dv, q_stages, Dv * (1 + with_o), device.shared_memory)


def key_maps(call: Call | ChooseCall | WindowCall, keys: int = KEYS) -> tuple[bytes, bytes]:
    """Return the TMA maps of k and v (or their pages) for tiles of `keys` keys."""
    return tensor_map(call.k, keys, 64), tensor_map(call.v, keys, 64)


def _tile_maps(call: Call) -> tuple[bytes, bytes]:
    """Return the TMA maps of k and v for the steps of tile kernels; for blocks smaller than a step, eight keys with all
    columns."""
    block = call.selection.block_size or KEYS
    return (key_group_map(call.k), key_group_map(call.v)) if 8 <= block < KEYS else key_maps(call, min(block, KEYS))


def forward_tiles(call: Call) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h]; the scale is positive."""
    o, lse = outputs(call)
    stretch = stretch_of(call)
    by_parts(call, *_plan_sizes(call, stretch), functools.partial(_forward, stretch), o, lse)
    return o, lse


def _forward(stretch: int | None, call: Call, o: Tensor, lse: Tensor) -> None:
    """Launch the forward kernel. stretch: `stretch_of` of the whole call; all of its parts must use the same."""
    q, gathered = call.q, gathers(call)
    source, shape_of = ("forward_gather.cu", gather_shape) if gathered else ("forward_tiles.cu", forward_shape)
    maps, shape = (row_map(q, _box_tokens(call, stretch)), *_tile_maps(call)), shape_of(q, call.v, call.device)
    _start_tiles(source, call, stretch, shape, maps, o.data_ptr(), lse.data_ptr())


def loaded_keys(call: Call) -> int:
    """Return how many keys the forward loads: the union of each tile's rows. Synchronizes with the device."""
    tokens, stretch = HOPPER_TILES.tokens(*call.q.shape[3:]), stretch_of(call)
    order = plan_of(call, tokens, stretch).order if stretch else None
    return union_keys(call, tokens, None if order is None else places(order, call.q.shape[1]))


def dq_tiles(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return dq [B,S,G,h,Dk], and delta [B,S,G,h] for dk and dv. o, lse and dlse are contiguous."""
    dq, delta = unwritten(call.q, *call.q.shape), temporary(call, lse, *lse.shape)
    stretch = stretch_of(call)
    by_parts(call, *_plan_sizes(call, stretch, backward=True), functools.partial(_dq, stretch), o, lse, do, dlse, dq, delta)
    return dq, delta


def _dq(
    stretch: int | None, call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, dq: Tensor, delta: Tensor
) -> None:  # fmt: skip
    q, box, gathered = call.q, _box_tokens(call, stretch), gathers(call)
    shape = gather_shape(q, call.v, call.device, backward=True) if gathered else dq_shape(q, call.v, call.device)
    maps, source = (row_map(q, box), row_map(do, box), *_tile_maps(call)), "dq_gather.cu" if gathered else "dq_tiles.cu"
    _start_tiles(source, call, stretch, shape, maps, *launch.pointers(o, lse, dlse, dq, delta))


def _box_tokens(call: Call, stretch: int | None) -> int:
    """Return the tokens per TMA box of q and do: a warpgroup's tokens, or one if they are not adjacent."""
    return 1 if stretch else ROWS // call.q.shape[3]


def _start_tiles(source: str, call: Call, stretch: int | None, shape: TileShape, maps: tuple[bytes, ...], *values: int) -> None:
    start_persistent(
        source, _tile_macros(call, shape, stretch), call, plan_of(call, shape.tokens, stretch), call.S_kv, call.device.sm_count, shape,
        *values, maps=maps, problem=launch.problem(call, call.union_ranges()),
    )  # fmt: skip


@cached_by_class
def _tile_macros(call: Call, shape: TileShape, stretch: int | None) -> Constants:
    block = call.selection.block_size
    assert block is not None, "supports_tiles"
    return launch.macros(
        call, H=call.q.shape[3], CONSUMERS=shape.consumers, STAGES=shape.stages, Q_STAGES=shape.q_stages, BLOCK=block,
        SHARED_BY=call.groups_per_selection, **launch.cache_macros(launch.page_of(call)), **({"ORDER_TOKENS": stretch} if stretch else {}),
    )  # fmt: skip


def start_persistent(
    source: str, macros: Constants, call: Call | ChooseCall | WindowCall, plan: TilePlan, S_kv: int, sm_count: int, shape: TileShape,
    *values: int, maps: tuple[bytes, ...], problem: tuple[Any, ...],
) -> None:  # fmt: skip
    """Launch a persistent tile kernel, with at most one CTA per multiprocessor.

    Args:
        source, macros, maps, problem: see `launch.start`.
        call: the call whose k and v are read.
        plan: the plan of its tiles.
        S_kv: keys per sequence.
        sm_count: the GPU's multiprocessor count.
        shape: the tile shape.
        values: the kernel's `Arguments` after `TilePlan` (tile_plan.cuh).
    """
    (B, _, G, _, Dk), Dv, device = call.q.shape, call.v.shape[3], call.q.get_device()
    all_tiles, interleaved = B * G * plan.tiles, max(1, min(B * G, L2_BYTES // (2 * S_kv * (Dk + Dv))))
    counter, listed = plan.counter, plan.counter is not None
    if all_tiles <= sm_count:
        counter = None
    elif counter is None:
        counter = temporary(call, call.q, 1, dtype=torch.int32)
        launch.clear(counter.data_ptr(), 4, device)
    launch.start(
        source, macros, device, min(sm_count, all_tiles), 128 * (shape.consumers + 1), shape.shared,
        *launch.pointers(*plan[:3]), plan.tiles, plan.capacity, all_tiles, interleaved, *launch.pointers(counter, plan.order), *values,
        maps=maps, problem=problem, early=listed,
    )  # fmt: skip


def _capacity(call: Call, tokens: int) -> int:
    """Return a bound on the blocks in the union of `tokens` rows."""
    assert call.selection.block_size is not None, "supports_tiles"
    return min(tokens * call.selection.n, -(-call.S_kv // call.selection.block_size))


def _plan_sizes(call: Call, stretch: int | None, backward: bool = False) -> tuple[int, int]:
    """Return the rows per unit of a pass (a tile, or a stretch of tiles), and the bytes of its plan for all groups.

    With a stretch, dq also needs the plan of the forward pass, whose token order it uses.
    """
    own, forward = (HOPPER_TILES.tokens(call.q.shape[3], call.q.shape[4], of_dq) for of_dq in (backward, False))
    rows = stretch or own
    lists = sum(
        _capacity(call, tokens) * (BLOCK_NUMBER.itemsize + bits_dtype(tokens).itemsize) * (rows // tokens)
        for tokens in ({own, forward} if stretch else {own})
    )
    return rows, call.selection.groups * lists


def plan_of(call: Call, tokens: int, stretch: int | None = None) -> TilePlan:
    """Return the plan for tiles of `tokens` rows, adjacent or reordered within stretches."""
    plan: TilePlan = kept_plan(call, ("cupy-cuda union", call.S_kv), _build, tokens, ROWS // call.q.shape[3], stretch).value
    return plan


def _build(call: Call, tokens: int, of_consumer: int, stretch: int | None) -> TilePlan:
    """Launch the kernel that builds the plan. of_consumer: tokens of a consumer; lists may be in the order of consumers."""
    q, block = call.q, call.selection.block_size
    (B, S), G = call.q.shape[:2], call.selection.groups
    assert block is not None, "supports_tiles"
    blocks_of_keys = -(-call.S_kv // block)
    assert blocks_of_keys <= 1 << 16, "TileKernels.blocks_max"
    tiles, capacity = -(-S // tokens), _capacity(call, tokens)
    all_tiles = B * G * tiles
    blocks = unwritten(q, all_tiles * capacity, dtype=BLOCK_NUMBER)
    rows = unwritten(q, all_tiles * capacity, dtype=bits_dtype(tokens))
    counts, counter = unwritten(q, all_tiles, 2, dtype=torch.int32), unwritten(q, 1, dtype=torch.int32)
    lists = launch.pointers(blocks, rows, counts, counter)
    if stretch is not None:
        order = unwritten(q, B, G, -(-S // stretch), stretch, dtype=torch.uint8)
        of_forward = HOPPER_TILES.tokens(*q.shape[3:])
        given = None if tokens == of_forward else plan_of(call, of_forward, stretch).order
        start_union(call, stretch, tokens, *lists, *launch.pointers(order, given), tiles, capacity)
        return TilePlan(blocks, rows, counts, tiles, capacity, counter, order)
    lengths = {} if call.lengths is None else launch.cache_macros(0)  # lists do not depend on pages
    shared = (4 if tokens <= 32 else 8) << (blocks_of_keys - 1).bit_length()  # round up, because each size loads another kernel
    threads = 512 if shared > 1 << 14 or tokens * call.selection.n > 512 else 128  # few CTAs fit, or many ranges per CTA
    macros = launch.integer_macros(TOKENS=tokens, TQ=of_consumer, BLOCK=block, UNION_THREADS=threads, **lengths)
    launch.start(
        "tile_union.cu", macros, call.q.get_device(), all_tiles, threads, shared, *lists, tiles, capacity,
        problem=launch.plan_problem(call, call.union_ranges()),
    )  # fmt: skip
    return TilePlan(blocks, rows, counts, tiles, capacity, counter)


def dkdv_groups(call: Call, lse: Tensor, do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return dk [B,G,S_kv,Dk] and dv [B,G,S_kv,Dv] from lse and delta [B,S,G,h]."""
    pairs = call.k.shape[0] * call.selection.groups  # each pair has its own lists
    if pairs > 1 and not (list_bytes(call)[1] if small_block(call) else lists_fit(call, KEYS, pairs)):
        return _by_pairs(call, lse, do, delta)
    q, (macros, shape, rows) = call.q, _groups(call)
    lists, blocks, order = _lists(call, rows)
    ranges = call.union_ranges() if blocks else call.disjoint_ranges()  # as of the lists

    def start(ctas: int, lists: tuple[int, ...]) -> None:
        launch.start(
            "dkdv_groups.cu", macros, q.get_device(), ctas, shape.threads, shape.shared,
            *launch.strided(do), *launch.pointers(lse, delta), *lists, *launch.pointers(order, *(blocks or (None, None))),
            maps=step_maps(call.k, call.v, q, do, keys=small_block(call) or KEYS),
            problem=launch.problem(call, ranges),
        )  # fmt: skip

    return list_gradients(call, lists, KEYS, start, blocks)


def _by_pairs(call: Call, lse: Tensor, do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return dk and dv, computed pair by pair (b, g), if the lists of all pairs exceed the workspace."""
    dk, dv = unwritten(call.k, *call.k.shape), unwritten(call.v, *call.v.shape)
    for b, g in itertools.product(range(call.k.shape[0]), range(call.k.shape[1])):
        at = slice(b, b + 1), slice(g, g + 1)
        for pair, rows in slices(call, *at, call.q.shape[1]):
            dk[at], dv[at] = dkdv_groups(pair, lse[rows].contiguous(), do[rows], delta[rows].contiguous())
    return dk, dv


def _lists(call: Call, rows: int) -> tuple[KeyToRows, tuple[Tensor, ...], Tensor]:
    """Return the lists of dkdv_groups.cu, the tensors of `BlockTiles` (key_to_rows.cuh) for small blocks, and the order
    of segments.

    Segments that begin within the same `rows` rows run together.
    """
    if small_block(call) is None:
        *lists, order = kept_plan(call, ("cupy-cuda ordered lists",), _ordered_lists, rows, *numbers_of_lists(call, KEYS)).value
        return KeyToRows(*lists), (), order
    small = block_lists_of(call)
    (order,) = kept_plan(call, ("cupy-cuda order",), _order, rows, small.segment).value
    return small.key_to_rows(), small.block_tiles(), order


def _ordered_lists(call: Call, rows: int, *numbers: int) -> tuple[Any, ...]:
    """Return the fields of `KeyToRows` and the order as one plan, so that one replay launches all kernels."""
    lists = build_lists(call, *numbers)
    return *lists, _order_of(call, lists, rows, call.selection.n * lists.reach)


def small_block(call: Call) -> int | None:
    """Return the block size if several blocks share a tile, else None."""
    size = call.selection.block_size
    return size if size is not None and size < KEYS else None


@cached_by_class
def _groups(call: Call) -> tuple[Constants, GroupShape, int]:
    """Return the macros and the shape of dkdv_groups.cu, and the rows per stretch of order_segments.cu."""
    (B, S, G, h, Dk), Dv = call.q.shape, call.v.shape[3]
    shape = group_shape(Dk, Dv, call.device)
    rows = max(STRETCH_BYTES // (h * (Dk + Dv) * call.q.element_size()), -(-B * G * S // MOST_STRETCHES))
    small = small_block(call)
    blocks = {} if small is None else {"SMALL_BLOCK": small}
    return launch.macros(call, H=h, STAGES=shape.stages, SHARED_BY=call.groups_per_selection, **blocks), shape, rows


def _order(call: Call, rows: int, segment: int) -> tuple[Tensor]:
    """Return the order of segments for small blocks. segment: their segment length, part of the plan's key."""
    return (_order_of(call, block_lists_of(call).key_to_rows(), rows, 1),)


def _order_of(call: Call, lists: KeyToRows, rows: int, each: int) -> Tensor:
    """Return the order of segments of `lists`. each: entries per row."""
    segments = most_segments(lists.capacity(), lists.segment, lists.lists)
    return order_segments(call, lists, segments, 1, 0, 0, call.q.shape[1], each, rows)


def order_segments(call: Call, lists: KeyToRows, segments: int, ctas: int, *values: int, **macros: int) -> Tensor:
    """Launch order_segments.cu; return list and number of every segment in processing order, [segments, 2] int32.

    values, macros: further arguments and macros of the kernel.
    """
    order = unwritten(call.q, segments, 2, dtype=torch.int32)
    launch.start(
        "order_segments.cu", launch.integer_macros(**macros), call.q.get_device(), ctas, 1024, 0,
        *lists.arguments(), *values, order.data_ptr(),
    )  # fmt: skip
    return order


def listed_maps(k: Tensor, v: Tensor, *rows: Tensor, keys: int = KEYS) -> tuple[bytes, ...]:
    """Return the TMA maps of `rows` (q, or q and do) for boxes of one listed token (row_steps.cuh), and of k and v for
    tiles of `keys` keys."""
    return *(row_map(x, 1) for x in rows), tensor_map(k, keys, 64), tensor_map(v, keys, 64)


def adjacent_maps(k: Tensor, v: Tensor, *rows: Tensor, keys: int = KEYS) -> tuple[bytes, ...]:
    """Return the TMA maps of `rows` for boxes of a step's adjacent tokens, and of k and v for tiles of `keys` keys."""
    return *(row_map(x, ROWS // x.shape[3]) for x in rows), tensor_map(k, keys, 64), tensor_map(v, keys, 64)


def step_maps(k: Tensor, v: Tensor, *rows: Tensor, keys: int = KEYS) -> tuple[bytes, ...]:
    """Return `adjacent_maps`, then maps of q and do for boxes of one token, for steps whose tokens are not adjacent."""
    return *adjacent_maps(k, v, *rows, keys=keys), *(row_map(x, 1) for x in rows)


def group_shape(Dk: int, Dv: int, device: DeviceInfo, others: int = 0) -> GroupShape:
    """Return the shape of CTAs of dkdv_groups.cu. others: bytes of shared memory per CTA for other uses.

    Either two CTAs per multiprocessor with one consumer each and the tile in shared memory; or, for wide keys, one CTA
    with two consumers, which exchange p and keep the tile in shared memory only if it does not fit their registers.
    """
    step_bytes, consumers = PANEL * (Dk + Dv) // 64, 1 if max(Dk, Dv) <= MOST_COLUMNS else 2
    others += step_bytes if consumers == 1 or Dk + Dv > MOST_TILE_COLUMNS else 0
    others += 4 * ROWS * KEYS if consumers == 2 else 0
    of_cta = (device.shared_memory + launch.SYSTEM) * consumers // 2 - STATIC - MOST_STAGES * STATISTICS - others
    stages = min(MOST_STAGES, of_cta // step_bytes)
    if Dk + Dv > MOST_TILE_COLUMNS:
        others += PANEL * (Dk // 64 - 2)  # q's third stage takes this, and two panels of the tile
    return GroupShape(128 * (consumers + 1), stages, stages * step_bytes + others)


def loadable(x: Tensor) -> Tensor:
    """Return x, copied if TMA cannot load it (a stride of 0, or rows that do not begin at multiples of 16 bytes)."""
    return x if mappable(x) else x.clone(memory_format=torch.contiguous_format)
