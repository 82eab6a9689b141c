"""Hopper's forward kernel for many rows of whole blocks that share no keys with their neighbours, as of a batch that decodes: blocks
of threads stay and take row after row, each with up to 64 heads of a group (forward_blocks.cu)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends._buffers import unwritten
from nsa_sel.backends.cupy_cuda import launch
from nsa_sel.backends.cupy_cuda.compiler import Constants, constants
from nsa_sel.backends.cupy_cuda.tensor_map import tensor_map
from nsa_sel.backends.cupy_cuda.tiles import HOPPER, KEYS, MAP, PANEL
from nsa_sel.core.call import Call

WARPS = 4  # that compute; one more copies
RESERVED = 2048  # bytes of shared memory a block: the system's, and `__shared__` variables to the next multiple of 1024
MOST_STAGES = 6
BLOCKS = 2 * MAP + launch.PROBLEM + "4q"  # Arguments of forward_blocks.cu


class Plan(NamedTuple):
    """How forward_blocks is launched for calls of one kind."""

    macros: Constants
    per_sm: int  # blocks of threads a multiprocessor
    shared: int  # bytes of dynamic shared memory


def head_tiles(h: int) -> int:
    """Blocks of threads that the heads of a row take."""
    return -(-h // (16 * WARPS))


def takes(call: Call) -> bool:
    """Whether this kernel computes this call: rows enough for most multiprocessors, of blocks of 64 keys or a multiple."""
    size, device = call.selection.block_size, call.device
    B, S, G, h, Dk = call.q.shape
    if device.sm != HOPPER or size is None or size % KEYS or 2 * B * S * G * head_tiles(h) <= device.sm_count:
        return False
    if Dk not in (64, 128) or call.v.shape[-1] not in (64, 128):
        return False
    repeated = any(0 in x.stride() for x in (call.k, call.v))  # no map has such a step
    return not repeated and launch.aligned(call.q, call.k, call.v)


@functools.lru_cache(maxsize=1024)
def plan_of(h: int, Dk: int, Dv: int, bf16: bool, alone: bool, shared_memory: int) -> Plan:
    """As many stages as memory is left for; two blocks of threads a multiprocessor, one where there are no more (`alone`), or where a warp
    has all columns in registers."""
    head_warps = min(WARPS, 1 << (-(-h // 16) - 1).bit_length())
    per_sm = 1 if alone or head_warps == WARPS else 2
    of_heads, of_step = 2 * 16 * head_warps * (Dk + 8 + KEYS + 8), PANEL * (Dk + Dv) // 64  # bytes: q and p; keys and values
    stages = min(MOST_STAGES, ((shared_memory + 1024) // per_sm - RESERVED - of_heads) // of_step)
    macros = constants(BF16=int(bf16), DK=Dk, DV=Dv, ALIGNED=1, STAGES=stages, HEAD_WARPS=head_warps, PER_SM=per_sm)
    return Plan(macros, per_sm, stages * of_step + of_heads)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] and lse [B,S,G,h] of a call that it takes, with a positive scale."""
    q, k, v = call.q, call.k, call.v
    B, S, G, h, Dk = q.shape
    Dv = v.shape[-1]
    o, lse = unwritten(q, B, S, G, h, Dv), unwritten(q, B, S, G, h, dtype=torch.float32)
    programs, sms = B * S * G * head_tiles(h), call.device.sm_count
    plan = plan_of(h, Dk, Dv, q.dtype == torch.bfloat16, programs <= sms, call.device.shared_memory)
    ranges = call.selection.disjoint_ranges()
    blocks = min(programs, plan.per_sm * sms)
    maps = (tensor_map(x, KEYS, 64, promoted=False) for x in (k, v))
    launch.start(
        "forward_blocks.cu", plan.macros, q.get_device(), blocks, 32 * (WARPS + 1), plan.shared, BLOCKS,
        *maps, *launch.problem(call, ranges), o.data_ptr(), lse.data_ptr(), head_tiles(h), programs, own=True,
    )  # fmt: skip
    return o, lse
