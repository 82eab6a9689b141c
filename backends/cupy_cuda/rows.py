"""Forward: one block a query row and up to 64 heads of a group; few rows are split among several blocks, of a cluster where there are
clusters (forward_rows.cu)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends._buffers import temporary, unwritten
from nsa_sel.backends.cupy_cuda import blocks, launch, tiles
from nsa_sel.backends.cupy_cuda.compiler import Constants, constants
from nsa_sel.core.call import Call
from nsa_sel.errors import BackendError

TILE, STAGES = 16, 2  # keys at once, and buffers of a team: walk.cuh
ROWS = launch.PROBLEM + "4q"  # Arguments of forward_rows.cu
MOST_PARTS = 64  # of a row
WITH_CLUSTERS = (90, 100)  # GPUs whose blocks may read each other's shared memory; of consumers' ones nobody has tried it
MOST_BLOCKS = 8  # of a cluster, on each of these GPUs
MOST_TURNS = 8  # tiles of a team of a cluster; with more, more parts than a cluster has blocks may be faster
BLOCKS_PER_SM = 2  # that rows are split into, where there are fewer


class Shape(NamedTuple):
    """How the threads of a block share the work (walk.cuh), and what the launch needs of it."""

    head_warps: int
    teams: int
    registers: bool  # whether q (and do) stay in registers
    shared: int  # bytes of dynamic shared memory

    @property
    def threads(self) -> int:
        return 32 * self.head_warps * self.teams

    def head_tiles(self, h: int) -> int:
        """Blocks that the heads of a row take."""
        return -(-h // (16 * self.head_warps))

    def macros(self) -> dict[str, int]:
        return {"TILE": TILE, "STAGES": STAGES, "TEAMS": self.teams, "HEAD_WARPS": self.head_warps, "Q_REGISTERS": int(self.registers)}


class RowPlan(NamedTuple):
    """How forward_rows is launched for calls of one kind."""

    macros: Constants
    shape: Shape
    head_tiles: int
    parts: int  # of a row: blocks
    split: bool  # whether the parts are written and combine.cu joins them; else they are one block, or a cluster's


def pitches(Dk: int, Dv: int) -> tuple[int, int]:
    """Numbers of a key's and a value's row in shared memory: KP and VP of common.cuh."""
    return -(-Dk // 16) * 16 + 8, -(-Dv // 16) * 16 + 8


@functools.lru_cache(maxsize=1024)
def shape_of(h: int, Dk: int, Dv: int, longest: int, shared_memory: int, backward: bool) -> Shape:
    """The shape of a block of forward_rows, or of dq_rows, for rows of at most `longest` keys: as many teams as there are tiles and
    shared memory for."""
    key, value = pitches(Dk, Dv)
    head_warps = min(4, -(-h // 16))
    teams = 4 if head_warps == 1 else 1
    while teams > max(1, -(-longest // TILE)):
        teams //= 2
    # Operands and accumulators that a thread holds: beyond 136 registers of them it would have to spill.
    registers = (key + value + 2 * key if backward else key + 2 * value) // 4 <= 136
    while True:
        heads = 16 * head_warps
        own = 2 * heads * (key + value if backward else key)
        results = 4 * teams * heads * key if backward else 4 * teams * heads * (value + 2) + 8 * heads
        fixed = 8 * heads if backward else 0  # in `__shared__` variables
        shared = max(own + 2 * teams * STAGES * TILE * (key + value), results)
        if shared + fixed <= shared_memory:
            return Shape(head_warps, teams, registers, shared)
        if teams > 1:
            teams //= 2
        elif head_warps > 1:
            head_warps //= 2
        else:
            raise BackendError(
                f"a block needs {shared + fixed} bytes of shared memory, device.shared_memory is {shared_memory}; allowed: at most that."
                " Remedy: use sdpa-packed."
            )


@functools.lru_cache(maxsize=1024)
def plan_of(
    rows: int, h: int, Dk: int, Dv: int, longest: int, bf16: bool, aligned: bool, sm: int | None, sm_count: int, shared_memory: int
) -> RowPlan:  # fmt: skip
    """The launch for `rows` rows of at most `longest` keys: each among as many blocks as fill the GPU, one where there are rows enough."""
    shape = shape_of(h, Dk, Dv, longest, shared_memory, False)
    head_tiles = shape.head_tiles(h)
    steps = -(-longest // (TILE * shape.teams))
    parts = max(1, min(MOST_PARTS, steps, BLOCKS_PER_SM * sm_count // (rows * head_tiles)))
    cluster = 1
    if sm in WITH_CLUSTERS and steps <= MOST_TURNS * MOST_BLOCKS:
        parts = cluster = 1 << min(parts, MOST_BLOCKS).bit_length() - 1
    split = parts > cluster
    macros = constants(BF16=int(bf16), DK=Dk, DV=Dv, ALIGNED=int(aligned), SPLIT=int(split), CLUSTER=cluster, **shape.macros())
    return RowPlan(macros, shape, head_tiles, parts, split)


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Keys that the forward loads: by tiles of tokens the union of their rows, else each row's, once for up to 64 heads; not counted, at
    most that."""
    if count and tiles.takes(call):
        return tiles.loaded_keys(call)
    return selected * -(-call.q.shape[3] // 64)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] and lse [B,S,G,h]; where the GPU and the call allow, by tiles of tokens or by bulk copies of blocks."""
    if call.scale < 0:
        return forward(call.with_positive_scale())
    if tiles.takes(call):
        return tiles.forward(call)
    if blocks.takes(call):
        return blocks.forward(call)
    q, device = call.q, call.q.get_device()
    B, S, G, h, Dk = q.shape
    _, _, S_kv, Dv = call.v.shape
    rows, bf16 = B * S * G, q.dtype == torch.bfloat16
    ranges = call.selection.disjoint_ranges()
    problem = launch.problem(call, ranges)
    longest, aligned = call.selection.length_bound(S_kv), launch.problem_aligned(call, problem)
    facts = call.device
    macros, shape, head_tiles, parts, split = plan_of(
        rows, h, Dk, Dv, longest, bf16, aligned, facts.sm, facts.sm_count, facts.shared_memory
    )  # fmt: skip
    o, lse = unwritten(q, B, S, G, h, Dv), unwritten(q, B, S, G, h, dtype=torch.float32)
    part_o, part_lse = o, lse
    if split:
        part_o = temporary(call, q, rows * h * parts * Dv, dtype=torch.float32)
        part_lse = temporary(call, q, rows * h * parts, dtype=torch.float32)
    launch.start(
        "forward_rows.cu", macros, device, rows * head_tiles * parts, shape.threads, shape.shared, ROWS,
        *problem, part_o.data_ptr(), part_lse.data_ptr(), parts, head_tiles,
    )  # fmt: skip
    if split:
        launch.start(
            "combine.cu", combining(bf16, Dv), device, -(-rows * h // 4), 128, 0, "6q",
            part_o.data_ptr(), part_lse.data_ptr(), o.data_ptr(), lse.data_ptr(), rows * h, parts,
        )  # fmt: skip
    return o, lse


@functools.cache
def combining(bf16: bool, Dv: int) -> Constants:
    """The constants of combine.cu."""
    return constants(BF16=int(bf16), DK=8, DV=Dv, ALIGNED=1, MOST_SPLITS=MOST_PARTS)
