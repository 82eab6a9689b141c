"""Tiles of tokens that selected alike, in place of adjacent ones: when Hopper's kernels take them, and their lists.

A warpgroup computes the union of its tokens' blocks. Selections that a model was trained with flicker from token to token, so that the
union of adjacent ones is far from any token's own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import launch
from nsa_sel.backends.specs import HOPPER_TILES
from nsa_sel.core.call import Call

STRETCH, WARPGROUPS = 96, 12  # tokens of a stretch, about; those of so many warpgroups, if they are more
HEADS = (4, 32)  # fewer have too few warpgroups in a stretch, with more a warpgroup has one token
LEAST_TOKENS = 8192  # of a sequence: the first ones select most of the blocks that they see
LEAST_ROWS = 1 << 18  # tokens x groups x heads, from which on what it saves takes longer than finding it
THREADS = 128  # of ordered_union.cu
MOST_SHARED = 128 << 10  # bytes of shared memory of its CTAs


def stretch_of(call: Call) -> int | None:
    """Tokens of a stretch: whole tiles of both passes, which share its order. None: tiles take adjacent tokens."""
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
    """Bytes of dynamic shared memory of ordered_union.cu."""
    blocks, ranges = -(-call.S_kv // block), stretch * call.selection.n
    return 4 * blocks + min(blocks, ranges) * (4 * -(-stretch // 32) + 2) + 2 * ranges


def start_union(call: Call, stretch: int, tokens: int, *values: int) -> None:
    """Start ordered_union.cu for tiles of so many tokens. values: what follows `Problem` in its `Arguments`."""
    block = call.selection.block_size
    assert block is not None, "stretch_of"
    lengths = {} if call.lengths is None else launch.cache_macros(0)  # lists know no pages
    macros = launch.integer_macros(
        ORDER_TOKENS=stretch, TOKENS=tokens, TQ=HOPPER_TILES.warpgroup_rows // call.q.shape[3], BLOCK=block, **lengths
    )
    shared = 1 << (_shared(call, stretch, block) - 1).bit_length()  # of a few sizes: a kernel is loaded anew for each
    B, S, G = call.q.shape[:3]
    launch.start(
        "ordered_union.cu", macros, call.q.get_device(), B * G * -(-S // stretch), THREADS, shared, *values,
        problem=launch.problem(call, call.disjoint_ranges()),
    )  # fmt: skip


def places(order: Tensor, S: int) -> Tensor:
    """The place of each token among those of its batch entry and group, [B,S,G], from the order [B,G,stretches,stretch]."""
    first = order.shape[3] * torch.arange(order.shape[2], device=order.device).unsqueeze(-1)
    return (order.long().argsort(-1) + first).flatten(2)[..., :S].transpose(1, 2)
