"""Launch forward_tiles.cu on Hopper for few new tokens per sequence, or forward_tokens.cu over an e4m3 cache: a tile
holds all tokens of a sequence and group, or, over an e4m3 cache, as many as fit.

The tile's CTA builds the union of the tokens' blocks itself (few_tokens.cuh) and loads it once, so no plan kernel is
launched.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import launch, sm90
from nsa_sel.backends.cupy_cuda.compiler import Constants, constants
from nsa_sel.backends.cupy_cuda.tensor_map import row_map, tensor_map
from nsa_sel.backends.cupy_cuda.whole_blocks import page_scales_of, step_map
from nsa_sel.backends.launcher.buffers import outputs
from nsa_sel.backends.specs import E4M3_TILE_ROWS, HOPPER_TILES
from nsa_sel.core.call import Call
from nsa_sel.core.request import FEW_TOKENS

MOST_ENTRIES, MOST_CONSUMERS = 192, 3  # ranges of a sequence's tokens (few_tokens.cuh); warpgroups per tile


E4M3_CONSUMER_WARPS = 4  # of forward_tokens.cu, plus one producer warp
E4M3_PER_SM = 2  # its CTAs per multiprocessor


class Plan(NamedTuple):
    """The launch of forward_tiles.cu for few tokens: macros, threads, bytes of dynamic shared memory."""

    macros: Constants
    threads: int
    shared: int


def supports(call: Call) -> bool:
    """Return whether forward_tiles.cu computes this call with one tile per sequence and group.

    Requires tiles for three quarters of the multiprocessors, because the load bandwidth of one multiprocessor is
    limited. With fewer, forward_blocks.cu is faster: it uses a CTA or a cluster per token, and the tokens' CTAs share
    their blocks in the L2 cache.
    """
    (B, S, G, h, Dk), device, size = call.q.shape, call.device, call.selection.block_size
    if device.sm != sm90.SM or not 1 < S <= FEW_TOKENS or S * call.selection.n > MOST_ENTRIES or 4 * B * G <= 3 * device.sm_count:
        return False
    return (
        HOPPER_TILES.fits_few(h, Dk, call.v.shape[3], size)
        and consumers_of(S, h) <= MOST_CONSUMERS
        and sm90.steps_in_pages(call)
        and sm90.mappable(call.q, call.k, call.v)
    )


def consumers_of(S: int, h: int) -> int:
    """Return how many consumer warpgroups hold all tokens of a sequence."""
    return -(-S // (sm90.ROWS // h))


@functools.lru_cache(maxsize=1024)
def plan_of(
    S: int, h: int, Dk: int, Dv: int, block: int, bf16: bool, alone: bool, shared_memory: int, page: int | None, share: int
) -> Plan:
    """Return the launch of forward_tiles.cu with one tile per sequence.

    Two CTAs per multiprocessor; one if there are no more CTAs than that (`alone`) or if a tile has several consumers.
    """
    consumers = consumers_of(S, h)
    per_sm = 1 if alone or consumers > 1 else 2
    q_bytes, step_bytes = consumers * sm90.PANEL * Dk // 64, sm90.PANEL * (Dk + Dv) // 64
    stages = ((shared_memory + 1024) // per_sm - sm90.STATIC - q_bytes) // step_bytes
    macros = constants(
        BF16=int(bf16), DK=Dk, DV=Dv, ALIGNED=1, H=h, CONSUMERS=consumers, STAGES=stages, Q_STAGES=1, BLOCK=block, FEW_TOKENS=1,
        SHARED_BY=share, **launch.cache_macros(page),
    )  # fmt: skip
    return Plan(macros, 128 * (consumers + 1), q_bytes + stages * step_bytes)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h]; the scale is positive."""
    q, v, block = call.q, call.v, call.selection.block_size
    (B, S, G, h, Dk), Dv, sm_count = q.shape, v.shape[3], call.device.sm_count
    assert block is not None, "supports"
    o, lse = outputs(call)
    bf16, alone = q.dtype == torch.bfloat16, B * G <= sm_count
    plan = plan_of(S, h, Dk, Dv, block, bf16, alone, call.device.shared_memory, launch.page_of(call), call.groups_per_selection)
    lists = (0, 0, 0, 1, 0, B * G, 1, 0, 0)  # `TilePlan` (tile_plan.cuh): a tile per CTA, whose list is not in memory
    launch.start(
        "forward_tiles.cu", plan.macros, q.get_device(), B * G, plan.threads, plan.shared, *lists, o.data_ptr(), lse.data_ptr(),
        maps=(row_map(q, sm90.ROWS // h), tensor_map(call.k, sm90.KEYS, 64, promoted=False), tensor_map(v, sm90.KEYS, 64, promoted=False)),
        problem=launch.problem(call, *call.listed()), early=True,
    )  # fmt: skip
    return o, lse


class TokensPlan(NamedTuple):
    """The launch of forward_tokens.cu: macros, tiles of a (b, g), threads, bytes of dynamic shared memory."""

    macros: Constants
    tiles: int
    threads: int
    shared: int


def supports_e4m3(call: Call) -> bool:
    """Return whether forward_tokens.cu computes this call of `Backend.quantized_by`.

    Requires tiles for three quarters of the multiprocessors and at most 8 heads. Otherwise forward_blocks.cu is faster:
    it uses a CTA or a cluster per token, which share blocks in the L2 cache.
    """
    B, S, G, h, _ = call.q.shape
    if call.scales is None or not 1 < S <= FEW_TOKENS or 2 * h > E4M3_TILE_ROWS:
        return False
    tokens = tile_tokens(S, h)
    return tokens * call.selection.n <= MOST_ENTRIES and 4 * B * G * -(-S // tokens) > 3 * call.device.sm_count


def tile_tokens(S: int, h: int) -> int:
    """Return the tokens per tile: all tokens of a sequence, or as many as fit."""
    return min(S, E4M3_TILE_ROWS // h)


@functools.lru_cache(maxsize=1024)
def plan_of_e4m3(
    S: int, h: int, Dk: int, Dv: int, block: int, bf16: bool, shared_memory: int, page: int | None, page_scales: bool, share: int
) -> TokensPlan:  # fmt: skip
    """Return the launch of forward_tokens.cu, with as many stages as fit in shared memory."""
    tokens = tile_tokens(S, h)
    row_bytes, step_bytes = 2 * E4M3_TILE_ROWS * (Dk + 8 + sm90.KEYS + 8), sm90.KEYS * (Dk + Dv)
    stages = min(2 * sm90.MOST_STAGES, ((shared_memory + launch.SYSTEM) // E4M3_PER_SM - 2 * sm90.STATIC - row_bytes) // step_bytes)
    macros = constants(
        BF16=int(bf16), DK=Dk, DV=Dv, ALIGNED=1, E4M3=1, PAGE_SCALES=int(page_scales), H=h, TOKENS=tokens, STAGES=stages,
        PER_SM=E4M3_PER_SM, BLOCK=block, SHARED_BY=share, **launch.cache_macros(page),
    )  # fmt: skip
    threads = max(MOST_ENTRIES, 32 * (E4M3_CONSUMER_WARPS + 1))  # a thread for each entry of the union
    return TokensPlan(macros, -(-S // tokens), threads, stages * step_bytes + row_bytes)


def forward_e4m3(call: Call) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h]; the scale is positive."""
    q, block = call.q, call.selection.block_size
    (B, S, G, h, Dk), Dv = q.shape, call.v.shape[3]
    assert block is not None, "Backend.quantized_by"
    o, lse = outputs(call)
    bf16, page, page_scales = q.dtype == torch.bfloat16, launch.page_of(call), bool(page_scales_of(call))
    plan = plan_of_e4m3(S, h, Dk, Dv, block, bf16, call.device.shared_memory, page, page_scales, call.groups_per_selection)
    stored = (sm90.loadable(call.k), sm90.loadable(call.v))
    launch.start(
        "forward_tokens.cu", plan.macros, q.get_device(), B * G * plan.tiles, plan.threads, plan.shared,
        o.data_ptr(), lse.data_ptr(), plan.tiles, *launch.scales(call), maps=tuple(map(step_map, stored)),
        problem=launch.problem(call, *call.listed()), early=True,
    )  # fmt: skip
    return o, lse
