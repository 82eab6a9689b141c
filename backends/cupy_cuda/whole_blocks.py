"""Launch forward_blocks.cu on Hopper: rows of blocks that share no keys with their neighbors, as in batched decoding.

A CTA, or a cluster of them, takes a row. No plan is launched.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import launch
from nsa_sel.backends.cupy_cuda.compiler import Constants, constants
from nsa_sel.backends.cupy_cuda.sm90 import KEYS, MOST_STAGES, loadable, mappable
from nsa_sel.backends.cupy_cuda.tensor_map import tensor_map
from nsa_sel.backends.launcher.buffers import outputs
from nsa_sel.backends.specs import HOPPER_STEPS, WIDEST
from nsa_sel.core.call import Call

CONSUMER_WARPS, LOADERS = 4, 4  # warps; those that load small blocks, else one (gathered_row.cuh)
# Cluster size -> percentage of a GPU's CTAs that can run in such clusters at once (cuOccupancyMaxActiveClusters, H200).
FITTING = {1: 100, 2: 100, 4: 91, 8: 91, 16: 85}
NO_MAPS = bytes(128), bytes(128)  # lanes copy small blocks
MOST_LISTED = 1 << 12  # small blocks of a row, whose list is in shared memory
MOST_NAMED = 1 << 12  # words of a bitmap of blocks, see `launch.named_blocks`
MANY_STEPS = 8  # steps per CTA, see `next_first`
UNDER_WAY = 1 << 16  # bytes of keys and values in flight per CTA if it has a multiprocessor to itself


class Plan(NamedTuple):
    """The launch of forward_blocks.cu: macros, CTAs, threads, bytes of dynamic shared memory."""

    macros: Constants
    ctas: int
    threads: int
    shared: int


def supports(call: Call) -> bool:
    """Return whether forward_blocks.cu computes this call on Hopper: rows of blocks of a multiple of 64 keys, or few
    rows of smaller blocks or wider keys."""
    (_, S, _, h, Dk), Dv, size = call.q.shape, call.v.shape[-1], call.selection.block_size
    page = None if call.block_table is None else call.k.shape[2]
    if call.device.sm != HOPPER_STEPS.sm or size is None or not HOPPER_STEPS.fit(S, h, Dk, Dv, size, page, call.scales is not None):
        return False
    if size % KEYS == 0:
        return mappable(call.k, call.v) and launch.aligned(call.q)
    return call.selection.n <= MOST_LISTED and launch.aligned(call.q, call.k, call.v)


def alone(call: Call) -> bool:
    """Return whether a CTA takes a row alone, without a cluster."""
    B, S, G, h, Dk = call.q.shape
    assert call.selection.block_size is not None, "supports"
    return (
        plan_facts(B * S * G * head_tiles(h), h, Dk + call.v.shape[-1], call.selection.n, call.selection.block_size, call.device.sm_count)[
            2
        ]
        == 1
    )


def head_tiles(h: int) -> int:
    """Return the CTAs of forward_blocks.cu that the heads of a row need."""
    return -(-h // (16 * CONSUMER_WARPS))


def clusters_at_once(cluster: int, ctas: int) -> int:
    """Return how many clusters of `cluster` CTAs run at once on a GPU that runs `ctas` CTAs at once.

    A cluster must fit in a GPC, whose number of multiprocessors is seldom a multiple of the cluster size.
    """
    return ctas * FITTING[cluster] // (100 * cluster)


def cluster_size(work: int, steps: int, ctas: int) -> int:
    """Return the CTAs of forward_blocks.cu per (row, heads): up to one per step, as long as all clusters run at once.

    Args:
        work: number of (row, heads).
        steps: steps of each.
        ctas: CTAs that the GPU runs at once.
    """
    return max(size for size in FITTING if size == 1 or (size <= steps and work <= clusters_at_once(size, ctas)))


def next_first(work: int, steps: int, cluster: int, ctas: int) -> bool:
    """Return whether the next kernel may start once all CTAs of forward_blocks.cu have started (NEXT_FIRST).

    Only if all of its CTAs have room; otherwise some would share multiprocessors while others are idle. And only if
    CTAs have many steps: a kernel that starts as CTAs end also shares some multiprocessors, which costs long CTAs more
    than a late start. Args: see `cluster_size`.
    """
    return 2 * work <= clusters_at_once(cluster, ctas) and steps > MANY_STEPS * cluster


def plan_facts(work: int, h: int, columns: int, n: int, block: int, sm_count: int) -> tuple[int, int, int]:
    """Return HEAD_WARPS, PER_SM and CLUSTER of forward_blocks.cu."""
    head_warps = min(CONSUMER_WARPS, 1 << (-(-h // 16) - 1).bit_length())
    per_sm = 1 if head_warps == CONSUMER_WARPS or columns > WIDEST else 2
    return head_warps, per_sm, cluster_size(work, -(-n * block // KEYS), per_sm * sm_count)


@functools.lru_cache(maxsize=1024)
def plan_of(
    work: int, h: int, Dk: int, Dv: int, n: int, block: int, bf16: bool, sm_count: int, shared_memory: int, page: int | None = None,
    page_scales: bool | None = None, named: int = 0, share: int = 1, packed: bool = False, listed: bool = False,
) -> Plan:  # fmt: skip
    """Return the launch of forward_blocks.cu for `work` (row, heads) of n blocks.

    Two CTAs per multiprocessor, or one if a warp holds all columns in registers, or keys are wide. As many stages as fit if all
    multiprocessors have two CTAs; otherwise fewer stages are faster, because loads in flight arrive together and then
    wait for their products. page_scales: from `page_scales_of`. named: from `launch.named_blocks`.
    """
    size, quantized = 2, {}
    if page_scales is not None:
        size, quantized = 1, {"E4M3": 1, "PAGE_SCALES": int(page_scales)}
    steps, small = -(-n * block // KEYS), block < KEYS
    head_warps, per_sm, cluster = plan_facts(work, h, Dk + Dv, n, block, sm_count)
    heads, step_bytes = 16 * head_warps, size * KEYS * (Dk + Dv)
    own_bytes = 1024 if page_scales is None else 1280  # `Shared`; for e4m3 it holds a factor per head
    own_bytes += 4 * named + 512 * small  # bitmap of blocks; keys of a step's blocks
    own_bytes += heads * (4 * Dv + 8 * cluster) if cluster > 1 else 0
    row_bytes = 2 * heads * (Dk + 8 + KEYS + 8) + own_bytes + 4 * n * small  # with q, p, and the list of small blocks
    stages = min(2 * MOST_STAGES // size, ((shared_memory + launch.SYSTEM) // per_sm - launch.SYSTEM - row_bytes) // step_bytes)
    if cluster > 1:
        stages = min(stages, -(-steps // cluster))
    if per_sm == 2 and (cluster > 1 or 10 * work < 9 * per_sm * sm_count):
        stages = min(stages, max(2, UNDER_WAY // step_bytes))
    macros = constants(
        BF16=int(bf16), DK=Dk, DV=Dv, ALIGNED=1, STAGES=stages, HEAD_WARPS=head_warps, PER_SM=per_sm, BLOCK=block, CLUSTER=cluster,
        NEXT_FIRST=int(next_first(work, steps, cluster, per_sm * sm_count)), SHARED_BYTES=own_bytes, NAMED_WORDS=named,
        LISTED=int(listed), **launch.cache_macros(page, packed), SHARED_BY=share, **quantized,
    )  # fmt: skip
    ctas = work * cluster if cluster > 1 else min(work, per_sm * sm_count)
    return Plan(macros, ctas, 32 * (CONSUMER_WARPS + (LOADERS if small else 1)), stages * step_bytes + row_bytes)


def page_scales_of(call: Call) -> bool | None:
    """Return whether scales are per page (PAGE_SCALES of stored_tiles.cuh); None if keys and values are not quantized."""
    return None if call.scales is None else call.scales.page_keys > 0


def step_map(x: Tensor) -> bytes:
    """Return the map of k or v for boxes of a step's keys by up to 128 bytes, without L2 promotion: no other CTA reads
    them soon."""
    return tensor_map(x, KEYS, min(x.shape[-1], 128 // x.element_size()), promoted=False)


def forward(call: Call, listed_rows: bool = False) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h]; the scale is positive. listed_rows: of a packed batch, write only the rows
    that it lists (packed.py)."""
    q, facts, selection = call.q, call.device, call.selection
    B, S, G, h, Dk = q.shape
    Dv = call.v.shape[-1]
    assert selection.block_size is not None, "supports"
    o, lse = outputs(call)
    work, (listed, named) = B * S * G * head_tiles(h), launch.named_blocks(call, MOST_NAMED)
    plan = plan_of(
        work, h, Dk, Dv, selection.n, selection.block_size, q.dtype == torch.bfloat16, facts.sm_count, facts.shared_memory,
        launch.page_of(call), page_scales_of(call), named or 0, call.groups_per_selection, call.table_rows is not None, listed_rows,
    )  # fmt: skip
    stored = () if selection.block_size < KEYS else (loadable(call.k), loadable(call.v))  # copies must live until the launch
    launch.start(
        "forward_blocks.cu", plan.macros, q.get_device(), plan.ctas, plan.threads, plan.shared,
        o.data_ptr(), lse.data_ptr(), head_tiles(h), work, *launch.scales(call), maps=tuple(map(step_map, stored)) or NO_MAPS,
        problem=launch.problem(call, *listed),
        early=S == 1 or plan.ctas > work,  # without clusters, rows that share blocks in L2 are slower
    )  # fmt: skip
    return o, lse
