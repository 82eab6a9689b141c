"""Launch forward_tokens.cu on Hopper for few new tokens per sequence over an e4m3 cache.

A tile of tokens loads the union of their blocks once. Its CTA builds the union itself (few_tokens.cuh), so no plan
kernel is launched.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import launch, sm90
from nsa_sel.backends.cupy_cuda.compiler import Constants, constants
from nsa_sel.backends.cupy_cuda.few_tokens import MOST_ENTRIES
from nsa_sel.backends.cupy_cuda.whole_blocks import page_scales_of, step_map
from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.backends.specs import E4M3_TILE_ROWS
from nsa_sel.core.call import Call
from nsa_sel.core.request import FEW_TOKENS

ROWS, CONSUMER_WARPS = E4M3_TILE_ROWS, 4  # plus one producer warp
PER_SM = 2  # CTAs per multiprocessor


class Plan(NamedTuple):
    """The launch of forward_tokens.cu: macros, tiles of a (b, g), threads, bytes of dynamic shared memory."""

    macros: Constants
    tiles: int
    threads: int
    shared: int


def supports(call: Call) -> bool:
    """Return whether forward_tokens.cu computes this call of `Backend.quantized_by`.

    Requires tiles for three quarters of the multiprocessors and at most 8 heads. Otherwise forward_blocks.cu is faster:
    it uses a CTA or a cluster per token, which share blocks in the L2 cache.
    """
    B, S, G, h, _ = call.q.shape
    if call.scales is None or not 1 < S <= FEW_TOKENS or 2 * h > ROWS:
        return False
    tokens = tile_tokens(S, h)
    return tokens * call.selection.n <= MOST_ENTRIES and 4 * B * G * -(-S // tokens) > 3 * call.device.sm_count


def tile_tokens(S: int, h: int) -> int:
    """Return the tokens per tile: all tokens of a sequence, or as many as fit."""
    return min(S, ROWS // h)


@functools.lru_cache(maxsize=1024)
def plan_of(S: int, h: int, Dk: int, Dv: int, block: int, bf16: bool, shared_memory: int, page: int | None, page_scales: bool) -> Plan:
    """Return the launch, with as many stages as fit in shared memory."""
    tokens = tile_tokens(S, h)
    row_bytes, step_bytes = 2 * ROWS * (Dk + 8 + sm90.KEYS + 8), sm90.KEYS * (Dk + Dv)
    stages = min(2 * sm90.MOST_STAGES, ((shared_memory + sm90.SYSTEM) // PER_SM - 2 * sm90.STATIC - row_bytes) // step_bytes)
    macros = constants(
        BF16=int(bf16), DK=Dk, DV=Dv, ALIGNED=1, E4M3=1, PAGE_SCALES=int(page_scales), H=h, TOKENS=tokens, STAGES=stages,
        PER_SM=PER_SM, BLOCK=block, **launch.cache_macros(page),
    )  # fmt: skip
    threads = max(MOST_ENTRIES, 32 * (CONSUMER_WARPS + 1))  # a thread for each entry of the union
    return Plan(macros, -(-S // tokens), threads, stages * step_bytes + row_bytes)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h]; the scale is positive."""
    q, block = call.q, call.selection.block_size
    (B, S, G, h, Dk), Dv = q.shape, call.v.shape[3]
    assert block is not None, "Backend.quantized_by"
    o, lse = unwritten(q, B, S, G, h, Dv), unwritten(q, B, S, G, h, dtype=torch.float32)
    bf16, page, page_scales = q.dtype == torch.bfloat16, launch.page_of(call), bool(page_scales_of(call))
    plan = plan_of(S, h, Dk, Dv, block, bf16, call.device.shared_memory, page, page_scales)
    stored = (sm90.loadable(call.k), sm90.loadable(call.v))
    launch.start(
        "forward_tokens.cu", plan.macros, q.get_device(), B * G * plan.tiles, plan.threads, plan.shared,
        o.data_ptr(), lse.data_ptr(), plan.tiles, *launch.scales(call), maps=tuple(map(step_map, stored)),
        problem=launch.problem(call, call.disjoint_ranges()), early=True,
    )  # fmt: skip
    return o, lse
