"""Reorder tokens so that a tile holds tokens with similar selections: decide when Hopper's tile kernels do so, and
build the lists.

A warpgroup computes the union of its tokens' blocks. Selections of trained models vary from token to token, so that the
union of adjacent tokens is much larger than any token's selection.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import launch
from nsa_sel.backends.specs import HOPPER_TILES
from nsa_sel.core.call import Call

STRETCH, WARPGROUPS = 96, 12  # approximate tokens per stretch, at least the tokens of so many warpgroups
HEADS = (4, 32)  # with fewer heads a stretch has too few warpgroups; with more, a warpgroup has one token
LEAST_TOKENS = 8192  # per sequence: early tokens select most of the blocks that they see, so reordering gains nothing
LEAST_ROWS = 1 << 18  # tokens x groups x heads, below which finding the order costs more than it saves
THREADS = 128  # block size of ordered_union.cu
MOST_SHARED = 128 << 10  # largest shared memory of its CTAs, in bytes


def stretch_of(call: Call) -> int | None:
    """Return the tokens per stretch (whole tiles of both passes, which share the order), or None for tiles of adjacent
    tokens."""
    B, S, G, h, Dk = call.q.shape
    block = call.selection.block_size
    if S < LEAST_TOKENS or B * G * S * h < LEAST_ROWS or not HEADS[0] <= h <= HEADS[1]:
        return None
    if block is None or block % HOPPER_TILES.block_multiple:
        return None
    tiles = math.lcm(HOPPER_TILES.tokens(h, Dk), HOPPER_TILES.tokens(h, Dk, backward=True))
    stretch = max(STRETCH, WARPGROUPS * (HOPPER_TILES.warpgroup_rows // h)) // tiles * tiles
    return stretch if _shared(call, stretch, block) <= MOST_SHARED else None


def _shared(call: Call, stretch: int, block: int) -> int:
    """Return the bytes of dynamic shared memory that ordered_union.cu needs."""
    blocks, ranges = -(-call.S_kv // block), stretch * call.selection.n
    return 4 * blocks + min(blocks, ranges) * (4 * -(-stretch // 32) + 2) + 2 * ranges


def start_union(call: Call, stretch: int, tokens: int, *values: int) -> None:
    """Launch ordered_union.cu for tiles of `tokens` tokens. values: its `Arguments` after `Problem`."""
    block = call.selection.block_size
    assert block is not None, "stretch_of"
    lengths = {} if call.lengths is None else launch.cache_macros(0)  # lists do not depend on pages
    macros = launch.integer_macros(
        ORDER_TOKENS=stretch, TOKENS=tokens, TQ=HOPPER_TILES.warpgroup_rows // call.q.shape[3], BLOCK=block, **lengths
    )
    shared = 1 << (_shared(call, stretch, block) - 1).bit_length()  # round up, because each size loads another kernel
    (B, S), G = call.q.shape[:2], call.selection.groups
    launch.start(
        "ordered_union.cu", macros, call.q.get_device(), B * G * -(-S // stretch), THREADS, shared, *values,
        problem=launch.plan_problem(call, call.union_ranges()),
    )  # fmt: skip


def places(order: Tensor, S: int) -> Tensor:
    """Return the position [B,S,G] of each token in the order [B,G,stretches,stretch] of its batch entry and group."""
    first = order.shape[3] * torch.arange(order.shape[2], device=order.device).unsqueeze(-1)
    return (order.long().argsort(-1) + first).flatten(2)[..., :S].transpose(1, 2)
