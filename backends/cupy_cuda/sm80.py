"""Launch the kernels for all GPUs from sm_80 on.

forward_rows.cu, dq_rows.cu  one CTA per query row; combine.cu merges the splits of a row
dkdv_tiles.cu                over the lists of key_to_rows.py
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import launch
from nsa_sel.backends.cupy_cuda.compiler import Constants, constants
from nsa_sel.backends.cupy_cuda.key_to_rows import key_value_gradients
from nsa_sel.backends.launcher.buffers import temporary, unwritten
from nsa_sel.backends.launcher.passes import outputs
from nsa_sel.core.call import Call

MOST_NAMED = 1 << 10  # words of a warp's bitmap of blocks, in static shared memory: see `launch.named_blocks`
TILE, STAGES = 16, 2  # keys per tile, buffers per team: key_tiles.cuh
MOST_SPLITS = 64  # per row
WITH_CLUSTERS = (90, 100)  # SMs whose clusters merge splits through shared memory; untested on consumer GPUs
MOST_CTAS = 8  # largest cluster on these GPUs
MOST_CLUSTER_TILES = 8  # most tiles per team in a cluster; with more, more splits than a cluster has CTAs may be faster
CTAS_PER_SM = 2  # rows are split until there are this many CTAs per multiprocessor, if they fit
NARROW = 272  # padded columns of a key plus its value up to which one warp holds dk and dv of 16 keys in registers


class RowShape(NamedTuple):
    """Division of a row among the warps of a CTA (key_tiles.cuh)."""

    head_warps: int
    teams: int
    registers: bool  # whether q (and do) stay in registers
    shared: int  # bytes of dynamic shared memory

    @property
    def threads(self) -> int:
        return 32 * self.head_warps * self.teams

    def head_tiles(self, h: int) -> int:
        """Return the CTAs that the heads of a row need."""
        return -(-h // (16 * self.head_warps))

    def macros(self) -> dict[str, int]:
        return {"TILE": TILE, "STAGES": STAGES, "TEAMS": self.teams, "HEAD_WARPS": self.head_warps, "Q_REGISTERS": int(self.registers)}


class RowPlan(NamedTuple):
    """The launch of forward_rows.cu for a class of calls."""

    macros: Constants
    shape: RowShape
    head_tiles: int
    splits: int  # CTAs per row
    combined: bool  # combine.cu merges the splits; otherwise there is one split, or a cluster merges them


def pitches(Dk: int, Dv: int) -> tuple[int, int]:
    """Return the row pitch, in elements, of keys and values in shared memory: KP and VP of mma.cuh."""
    return -(-Dk // 16) * 16 + 8, -(-Dv // 16) * 16 + 8


@functools.lru_cache(maxsize=1024)
def row_shape(h: int, Dk: int, Dv: int, longest: int, shared_memory: int, backward: bool) -> RowShape:
    """Return the shape of a CTA of forward_rows.cu or dq_rows.cu for rows of at most `longest` keys.

    Uses as many teams as tiles and shared memory allow.
    """
    key, value = pitches(Dk, Dv)
    head_warps = min(4, -(-h // 16))
    teams = 4 if head_warps == 1 else 1
    while teams > max(1, -(-longest // TILE)):
        teams //= 2
    # With more than 136 registers of operands and accumulators per thread, the compiler would spill.
    registers = (key + value + 2 * key if backward else key + 2 * value) // 4 <= 136
    while True:
        heads = 16 * head_warps
        own = 2 * heads * (key + value if backward else key)
        results = 4 * teams * heads * key if backward else 4 * teams * heads * (value + 2) + 8 * heads
        fixed = 8 * heads if backward else 0  # in `__shared__` variables
        shared = max(own + 2 * teams * STAGES * TILE * (key + value), results)
        if shared + fixed <= shared_memory:
            return RowShape(head_warps, teams, registers, shared)
        if teams > 1:
            teams //= 2
        elif head_warps > 1:
            head_warps //= 2
        else:
            launch.refuse_shared_memory(shared + fixed, shared_memory)


@functools.lru_cache(maxsize=1024)
def row_plan(
    rows: int, h: int, Dk: int, Dv: int, longest: int, bf16: bool, aligned: bool, sm: int | None, sm_count: int, shared_memory: int,
    page: int | None = None, one_page: bool = False, block: int = 0, named: int = 0, share: int = 1,
    packed: bool = False,
) -> RowPlan:  # fmt: skip
    """Return the launch for `rows` rows of at most `longest` keys, each split over enough CTAs to fill the GPU.

    page: of a cache, keys of a page, 0 without pages. one_page: whether each range lies within a page.
    block: keys per block, of rows that may name one twice, else 0. named: from `launch.named_blocks`.
    """
    shape = row_shape(h, Dk, Dv, longest, shared_memory - 4 * 4 * max(1, named), False)
    head_tiles = shape.head_tiles(h)
    tiles = -(-longest // (TILE * shape.teams))  # of a team
    per_sm = min(CTAS_PER_SM, (shared_memory + launch.SYSTEM) // (shape.shared + launch.SYSTEM))  # with more CTAs, some would wait
    splits = max(1, min(MOST_SPLITS, tiles, per_sm * sm_count // (rows * head_tiles)))
    cluster = 1
    if sm in WITH_CLUSTERS and tiles <= MOST_CLUSTER_TILES * MOST_CTAS:
        splits = cluster = 1 << min(splits, MOST_CTAS).bit_length() - 1
    combined = splits > cluster
    cache = {**launch.cache_macros(page, packed), **({"ONE_PAGE": 1} if one_page else {}), "SHARED_BY": share}
    if block:
        cache |= {"REPEATED_BLOCK": block, "NAMED_WORDS": named}
    macros = constants(
        BF16=int(bf16), DK=Dk, DV=Dv, ALIGNED=int(aligned), SPLIT=int(combined), CLUSTER=cluster, **shape.macros(), **cache
    )  # fmt: skip
    return RowPlan(macros, shape, head_tiles, splits, combined)


@functools.cache
def combine_macros(bf16: bool, Dv: int) -> Constants:
    return constants(BF16=int(bf16), DK=8, DV=Dv, ALIGNED=1, MOST_SPLITS=MOST_SPLITS)


def forward_rows(call: Call) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h]; the scale is positive."""
    q, device, facts = call.q, call.q.get_device(), call.device
    B, S, G, h, Dk = q.shape
    rows, Dv, bf16 = B * S * G, call.v.shape[3], q.dtype == torch.bfloat16
    page, block = launch.page_of(call), call.selection.block_size
    listed, named = launch.named_blocks(call, MOST_NAMED)
    problem = launch.problem(call, *listed)
    longest, aligned = call.selection.length_bound(call.S_kv), launch.aligned(call.q, call.k, call.v)
    macros, shape, head_tiles, splits, combined = row_plan(
        rows, h, Dk, Dv, longest, bf16, aligned, facts.sm, facts.sm_count, facts.shared_memory,
        page, bool(page and block and page % block == 0), 0 if named is None or block is None else block, named or 0,
        call.groups_per_selection, call.table_rows is not None,
    )  # fmt: skip
    o, lse = outputs(call)
    split_o, split_lse = o, lse
    if combined:
        split_o = temporary(call, q, rows * h * splits * Dv, dtype=torch.float32)
        split_lse = temporary(call, q, rows * h * splits, dtype=torch.float32)
    launch.start(
        "forward_rows.cu", macros, device, rows * head_tiles * splits, shape.threads, shape.shared,
        split_o.data_ptr(), split_lse.data_ptr(), splits, head_tiles, problem=problem, early=splits > 1,
    )  # fmt: skip
    if combined:
        launch.start(
            "combine.cu", combine_macros(bf16, Dv), device, -(-rows * h // 4), 128, 0,
            *launch.pointers(split_o, split_lse, o, lse), rows * h, splits,
        )  # fmt: skip
    return o, lse


def dq_rows(call: Call, ranges: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return dq [B,S,G,h,Dk], and delta [B,S,G,h] for dk and dv. o, lse and dlse are contiguous."""
    q = call.q
    B, S, G, h, Dk = q.shape
    dq, delta = unwritten(q, B, S, G, h, Dk), temporary(call, lse, B, S, G, h)
    shape = row_shape(h, Dk, call.v.shape[-1], call.selection.length_bound(call.k.shape[2]), call.device.shared_memory, True)
    head_tiles = shape.head_tiles(h)
    aligned, share = launch.aligned(q, call.k, call.v, do), call.groups_per_selection
    macros = launch.macros(call, aligned=aligned, SHARED_BY=share, **shape.macros())
    launch.start(
        "dq_rows.cu", macros, q.get_device(), B * S * G * head_tiles, shape.threads, shape.shared,
        *launch.strided(do), *launch.pointers(o, lse, dlse, dq, delta), head_tiles, problem=launch.problem(call, ranges),
    )  # fmt: skip
    return dq, delta


def tile_shape(call: Call) -> tuple[int, int, int, int]:
    """Return KEY_WARPS, COLUMN_WARPS, QUERIES of dkdv_tiles.cu, and its bytes of dynamic shared memory.

    Tiles have 64 keys, or the largest power of two that divides the block size.
    """
    columns, block = sum(pitches(call.q.shape[-1], call.v.shape[-1])), call.selection.block_size
    width = 64 if block is None or block % 16 else min(64, block & -block)
    queries = 32
    while True:
        shared = 2 * columns * (width + 2 * queries)
        fixed = 3 * 32 * queries  # in `__shared__` variables
        if shared + fixed <= call.device.shared_memory:
            return width // 16, 2 if columns > NARROW else 1, queries, shared
        if queries > 16:
            queries //= 2
        elif width > 16:
            width //= 2
        else:
            launch.refuse_shared_memory(shared + fixed, call.device.shared_memory)


def dkdv_tiles(call: Call, ranges: Tensor, lse: Tensor, do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return dk [B,G,S_kv,Dk] and dv [B,G,S_kv,Dv] from lse and delta [B,S,G,h]."""
    key_warps, column_warps, queries, shared = tile_shape(call)
    aligned = launch.aligned(call.q, call.k, call.v, do)
    tiles = {"KEY_WARPS": key_warps, "COLUMN_WARPS": column_warps, "QUERIES": queries}
    macros = launch.macros(call, aligned=aligned, SHARED_BY=call.groups_per_selection, **tiles)

    def start(ctas: int, lists: tuple[int, ...]) -> None:
        launch.start(
            "dkdv_tiles.cu", macros, call.q.get_device(), ctas, 32 * key_warps * column_warps, shared,
            *launch.strided(do), *launch.pointers(lse, delta), *lists, problem=launch.problem(call, ranges),
        )  # fmt: skip

    return key_value_gradients(call, 16 * key_warps, start)
