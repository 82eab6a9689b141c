"""Forward: one block a query row and up to 64 heads of a group; few rows are split among several blocks (forward_rows.cu)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import launch
from nsa_sel.backends.cupy_cuda.compiler import constants
from nsa_sel.call import Call
from nsa_sel.errors import BackendError

TILE, STAGES = 16, 2  # keys at once, and buffers of a team: walk.cuh
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


def pitches(call: Call) -> tuple[int, int]:
    """Numbers of a key's and a value's row in shared memory: KP and VP of common.cuh."""
    return -(-call.q.shape[-1] // 16) * 16 + 8, -(-call.v.shape[-1] // 16) * 16 + 8


def shape_of(call: Call, backward: bool) -> Shape:
    """The shape of a block of forward_rows, or of dq_rows: as many teams as there are tiles and shared memory for."""
    key, value = pitches(call)
    head_warps = min(4, -(-call.q.shape[3] // 16))
    tiles = -(-call.selection.length_bound(call.k.shape[2]) // TILE)
    teams = 4 if head_warps == 1 else 2
    while teams > max(1, tiles):
        teams //= 2
    # Operands and accumulators that a thread holds: beyond 128 registers of them it would have to spill.
    registers = (key + value + 2 * key if backward else key + 2 * value) // 4 <= 136
    while True:
        heads = 16 * head_warps
        own = 2 * heads * (key + value if backward else key)
        results = 4 * teams * heads * (key if backward else value)
        fixed = 8 * heads * (1 if backward else teams)  # in `__shared__` variables
        shared = max(own + 2 * teams * STAGES * TILE * (key + value), results)
        if shared + fixed <= call.device.shared_memory:
            return Shape(head_warps, teams, registers, shared)
        if teams > 1:
            teams //= 2
        elif head_warps > 1:
            head_warps //= 2
        else:
            raise BackendError(
                f"a block needs {shared + fixed} bytes of shared memory, device.shared_memory is {call.device.shared_memory};"
                " allowed: at most that. Remedy: use sdpa-packed."
            )


def split_parts(call: Call, shape: Shape) -> int:
    """Among how many blocks each row is split so that few rows still fill the GPU: 1 where there are rows enough."""
    B, S, G, h, _ = call.q.shape
    tiles = -(-call.selection.length_bound(call.k.shape[2]) // (TILE * shape.teams))
    return max(1, min(64, tiles, BLOCKS_PER_SM * call.device.sm_count // (B * S * G * shape.head_tiles(h))))


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] and lse [B,S,G,h]."""
    if call.scale < 0:
        return forward(launch.with_positive_scale(call))
    q, Dv, device = call.q, call.v.shape[-1], call.q.get_device()
    B, S, G, h, _ = q.shape
    o = torch.empty(B, S, G, h, Dv, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, S, G, h, dtype=torch.float32, device=q.device)
    shape = shape_of(call, backward=False)
    parts = split_parts(call, shape)
    ranges = call.selection.ranges.contiguous()
    facts = launch.type_facts(call)
    part_o, part_lse = o, lse
    if parts > 1:
        part_o = torch.empty(lse.numel(), parts, Dv, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(lse.numel(), parts, dtype=torch.float32, device=q.device)
    head_tiles = shape.head_tiles(h)
    launch.start(
        "forward_rows.cu", constants(**facts, **shape.macros(), SPLIT=int(parts > 1)), device,
        B * S * G * head_tiles * parts, shape.threads, shape.shared, launch.PROBLEM + "4q",
        *launch.problem(call, ranges), part_o.data_ptr(), part_lse.data_ptr(), parts, head_tiles,
    )  # fmt: skip
    if parts > 1:
        rows = lse.numel()
        launch.start(
            "combine.cu", constants(BF16=facts["BF16"], DK=8, DV=Dv, ALIGNED=1), device, -(-rows // 4), 128, 0, "6q",
            part_o.data_ptr(), part_lse.data_ptr(), o.data_ptr(), lse.data_ptr(), rows, parts,
        )  # fmt: skip
    return o, lse
