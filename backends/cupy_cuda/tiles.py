"""Hopper's kernels, which calls they take, and their launches: forward and dq by tiles of adjacent tokens (tiles.cuh), with their plan
(union_of.cu), dk and dv by the lists of KV tiles (dkdv_groups.cu)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends._buffers import temporary, unwritten
from nsa_sel.backends._loads import union_keys
from nsa_sel.backends.cupy_cuda import launch
from nsa_sel.backends.cupy_cuda.compiler import constants
from nsa_sel.backends.cupy_cuda.tensor_map import row_map, tensor_map
from nsa_sel.backends.specs import DQ_GROUPS, hopper_groups, on_hopper_tiles
from nsa_sel.core.call import Call

HOPPER = 90  # wgmma is this chip's alone
ROWS, KEYS, PANEL = 64, 64, 64 * 128  # rows of a group of warps, keys of a step, bytes of 64 rows of 64 columns
STATIC = 2048  # bytes of `__shared__` variables, and to the next multiple of 1024
MOST_STAGES = 6
MOST_SUMS = 128  # columns of dk that registers hold beside dv in dkdv_groups
CACHED = 24 * 2**20  # bytes of keys and values, of the 50 MiB of the L2 cache
STATISTICS = 12 * ROWS  # bytes of `__shared__` variables that a stage of dkdv_groups has
MAP, PLAN = "128s", "8q"
FORWARD = 3 * MAP + launch.PROBLEM + PLAN + "2q"  # Arguments of forward_tiles.cu
LISTS = 4 * MAP + launch.PROBLEM + "20q"  # of dkdv_groups.cu
DQ = 4 * MAP + launch.PROBLEM + PLAN + "10q"  # of dq_tiles.cu


class Shape(NamedTuple):
    """Groups of warps that compute, tokens of a tile, steps under way, and bytes of dynamic shared memory."""

    groups: int
    tokens: int
    stages: int
    shared: int


class Union(NamedTuple):
    """The lists of a plan: see union_of.cu."""

    blocks: Tensor  # [tiles of all * capacity] int32
    members: Tensor  # [tiles of all * capacity] int64
    counts: Tensor  # [tiles of all, 2] int32
    tiles: int  # of a batch entry and group
    capacity: int

    def arguments(self, call: Call, taken: Tensor | None) -> tuple[int, ...]:
        """The values of `Plan` (tiles.cuh); taken: a number that is zero, for one launch."""
        pointers = (self.blocks.data_ptr(), self.members.data_ptr(), self.counts.data_ptr())
        pairs = call.k.shape[0] * call.k.shape[1]
        together = max(1, min(pairs, CACHED // (2 * call.k.shape[2] * (call.k.shape[3] + call.v.shape[3]))))
        return *pointers, self.tiles, self.capacity, self.counts.shape[0], together, 0 if taken is None else taken.data_ptr()


@functools.lru_cache(maxsize=1024)
def shape_of(groups: int, h: int, Dk: int, Dv: int, columns: int, shared_memory: int) -> Shape:
    """Of groups that have 64 rows of so many columns each beside the steps of 64 keys and values."""
    of_group, of_step = PANEL * columns // 64, PANEL * (Dk + Dv) // 64
    stages = (shared_memory - STATIC - groups * of_group) // of_step
    return Shape(groups, groups * (ROWS // h), stages, groups * of_group + stages * of_step)


def takes(call: Call, *others: Tensor) -> bool:
    """Whether these kernels compute this call; `others` are read row by row as q, k and v are."""
    selection = call.selection
    if call.device.sm != HOPPER or selection.block_size is None:
        return False
    _, S, _, h, Dk = call.q.shape
    if not on_hopper_tiles(S, call.k.shape[2], h, Dk, call.v.shape[-1], selection.block_size):
        return False
    tensors = call.q, call.k, call.v, *others
    repeated = any(0 in x.stride() for x in tensors)  # no map has such a step
    return not repeated and launch.aligned(*tensors)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] and lse [B,S,G,h] of a call that it takes, with a positive scale."""
    q = call.q
    B, S, G, h, Dk = q.shape
    Dv = call.v.shape[-1]
    o, lse = unwritten(q, B, S, G, h, Dv), unwritten(q, B, S, G, h, dtype=torch.float32)
    ranges = call.selection.disjoint_ranges()
    shape = shape_of(hopper_groups(h, Dk), h, Dk, Dv, Dk, call.device.shared_memory)
    union = union_of(call, ranges, shape.tokens)
    tokens, taken = ROWS // h, _taken(call, union)
    _start(
        "forward_tiles.cu", call, shape, union, FORWARD,
        row_map(q, tokens), tensor_map(call.k, KEYS, 64), tensor_map(call.v, KEYS, 64), *launch.problem(call, ranges),
        *union.arguments(call, taken), o.data_ptr(), lse.data_ptr(),
    )  # fmt: skip
    return o, lse


def loaded_keys(call: Call) -> int:
    """Keys that the forward loads: the union of each tile's rows. Counted, which waits for the device."""
    h, Dk = call.q.shape[3:]
    shape = shape_of(hopper_groups(h, Dk), h, Dk, call.v.shape[-1], Dk, call.device.shared_memory)
    return union_keys(call, shape.tokens)


def query_gradient(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """dq [B,S,G,h,Dk], and delta [B,S,G,h] for dk and dv; o, lse and dlse contiguous."""
    q = call.q
    dq, delta = torch.empty_like(q, memory_format=torch.contiguous_format), temporary(call, lse, *lse.shape)
    ranges = call.selection.disjoint_ranges()
    h, Dk, Dv = *q.shape[3:], call.v.shape[-1]
    shape = shape_of(DQ_GROUPS, h, Dk, Dv, Dk + Dv, call.device.shared_memory)
    union = union_of(call, ranges, shape.tokens)
    tokens, taken = ROWS // h, _taken(call, union)
    _start(
        "dq_tiles.cu", call, shape, union, DQ,
        row_map(q, tokens), row_map(do, tokens), tensor_map(call.k, KEYS, 64), tensor_map(call.v, KEYS, 64),
        *launch.problem(call, ranges), *union.arguments(call, taken), *launch.strided(do), o.data_ptr(), lse.data_ptr(),
        0 if dlse is None else dlse.data_ptr(), dq.data_ptr(), delta.data_ptr(),
    )  # fmt: skip
    return dq, delta


def add_lists(call: Call, ranges: Tensor, lse: Tensor, do: Tensor, delta: Tensor, pieces: int, values: tuple[int, ...]) -> None:
    """dk and dv of the lists' pieces, `pieces` at most; `values`: the rest of the kernel's Arguments, from `entries` on."""
    q = call.q
    h, Dk, Dv = q.shape[3], q.shape[4], call.v.shape[-1]
    step = PANEL * (Dk + Dv) // 64
    each = (call.device.shared_memory + 1024) // 2 - STATIC - MOST_STAGES * STATISTICS  # of two blocks a multiprocessor
    stages = min(MOST_STAGES, each // step - 1)
    macros = constants(BF16=int(q.dtype == torch.bfloat16), DK=Dk, DV=Dv, ALIGNED=1, H=h, STAGES=stages)
    launch.start(
        "dkdv_groups.cu", macros, q.get_device(), pieces, 256, (stages + 1) * step, LISTS,
        row_map(q, 1), row_map(do, 1), tensor_map(call.k, KEYS, 64), tensor_map(call.v, KEYS, 64), *launch.problem(call, ranges),
        *launch.strided(do), lse.data_ptr(), delta.data_ptr(), *values, own=True,
    )  # fmt: skip


def _taken(call: Call, union: Union) -> Tensor | None:
    """Where blocks of threads count the tiles that they take beyond one each, zero; None where there are none."""
    if union.counts.shape[0] <= call.device.sm_count:
        return None
    taken = temporary(call, call.q, 1, dtype=torch.int32)
    launch.clear(taken.data_ptr(), 4, call.q.get_device())
    return taken


def _start(source: str, call: Call, shape: Shape, union: Union, fields: str, *values: object) -> None:
    """One block a multiprocessor, which takes tile after tile."""
    q, block = call.q, call.selection.block_size
    assert block is not None, "`takes` has said so"
    macros = constants(
        BF16=int(q.dtype == torch.bfloat16), DK=q.shape[4], DV=call.v.shape[-1], ALIGNED=1, H=q.shape[3], CONSUMERS=shape.groups,
        STAGES=shape.stages, BLOCK=block,
    )  # fmt: skip
    blocks = min(call.device.sm_count, union.counts.shape[0])
    launch.start(source, macros, q.get_device(), blocks, 128 * (shape.groups + 1), shape.shared, fields, *values, own=True)


def union_of(call: Call, ranges: Tensor, tokens: int) -> Union:
    """The plan for tiles of `tokens` rows, remembered in the selection as `lists_of` remembers its lists."""
    if call.capturing():
        return _build(call, ranges, tokens)
    key = ("cupy-cuda union", tokens, call.k.shape[2])
    plan: Union = call.selection.plan(key, lambda: _build(call, ranges, tokens), call.q_pos)
    return plan


def _build(call: Call, ranges: Tensor, tokens: int) -> Union:
    B, S, G, _, _ = call.q.shape
    n, block = call.selection.n, call.selection.block_size
    assert block is not None, "`takes` has said so"
    keys = -(-call.k.shape[2] // block)
    tiles, capacity = -(-S // tokens), min(tokens * n, keys)
    number, device = B * G * tiles, call.q.device
    blocks = torch.empty(number * capacity, dtype=torch.int32, device=device)
    members = torch.empty(number * capacity, dtype=torch.int64, device=device)
    counts = torch.empty(number, 2, dtype=torch.int32, device=device)
    shared = 8 << (keys - 1).bit_length()  # of a few sizes: a kernel is loaded anew for each
    launch.start(
        "tile_union.cu", constants(BF16=0, DK=8, DV=8, ALIGNED=1, TOKENS=tokens, BLOCK=block), call.q.get_device(), number, 128, shared,
        launch.PROBLEM + "5q", *launch.problem(call, ranges), blocks.data_ptr(), members.data_ptr(), counts.data_ptr(), tiles, capacity,
    )  # fmt: skip
    return Union(blocks, members, counts, tiles, capacity)
