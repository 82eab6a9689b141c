"""Backward: dq by rows (dq_rows.cu); dk and dv by KV tiles over the rows that chose them, in ascending order (dkdv_tiles.cu)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends._buffers import temporary, unwritten
from nsa_sel.backends.cupy_cuda import launch, tiles
from nsa_sel.backends.cupy_cuda.compiler import constants
from nsa_sel.backends.cupy_cuda.lists import Lists, lists_of, most_parts, piece_within
from nsa_sel.backends.cupy_cuda.rows import pitches, shape_of
from nsa_sel.core.call import Call
from nsa_sel.errors import BackendError

NARROW = 272  # numbers of a key's and a value's row together up to which one warp holds 16 keys' dk and dv in registers
DO_STRIDES = "4q"


class TileShape(NamedTuple):
    """How a block shares a KV tile (dkdv_tiles.cu)."""

    key_warps: int
    column_warps: int
    pairs: int
    shared: int  # bytes of dynamic shared memory

    @property
    def width(self) -> int:
        """Keys of a tile."""
        return 16 * self.key_warps

    @property
    def threads(self) -> int:
        return 32 * self.key_warps * self.column_warps

    def macros(self) -> dict[str, int]:
        return {"KEY_WARPS": self.key_warps, "COLUMN_WARPS": self.column_warps, "QUERIES": self.pairs}


def tile_shape_of(call: Call) -> TileShape:
    """The shape of a block of dkdv_tiles: tiles of 64 keys, or of the largest power of two that divides the blocks."""
    columns, block = sum(pitches(call.q.shape[-1], call.v.shape[-1])), call.selection.block_size
    width = 64 if block is None or block % 16 else min(64, block & -block)
    pairs = 32
    while True:
        shared = 2 * columns * (width + 2 * pairs)
        fixed = 3 * 32 * pairs  # in `__shared__` variables
        if shared + fixed <= call.device.shared_memory:
            return TileShape(width // 16, 2 if columns > NARROW else 1, pairs, shared)
        if pairs > 16:
            pairs //= 2
        elif width > 16:
            width //= 2
        else:
            raise BackendError(
                f"a block needs {shared + fixed} bytes of shared memory, device.shared_memory is {call.device.shared_memory};"
                " allowed: at most that. Remedy: use sdpa-packed."
            )


def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, shaped and typed as q, k, v."""
    if call.scale < 0:
        dq, dk, dv = backward(call.with_positive_scale(), o, lse, do, dlse)
        return -dq, dk, dv
    o, lse, ranges = o.contiguous(), lse.contiguous(), call.selection.disjoint_ranges()
    dlse = None if dlse is None else dlse.contiguous()
    on_hopper = tiles.takes(call, do)
    if on_hopper:
        dq, delta = tiles.query_gradient(call, o, lse, do, dlse)
    else:
        dq, delta = query_gradient(call, ranges, o, lse, do, dlse)
    return dq, *key_value_gradients(call, ranges, lse, do, delta, on_hopper)


def query_gradient(call: Call, ranges: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """dq [B,S,G,h,Dk] by rows, and delta [B,S,G,h] for dk and dv."""
    q, device = call.q, call.q.get_device()
    B, S, G, h, Dk = q.shape
    dq, delta = unwritten(q, B, S, G, h, Dk), temporary(call, lse, B, S, G, h)
    longest = call.selection.length_bound(call.k.shape[2])
    shape = shape_of(h, Dk, call.v.shape[-1], longest, call.device.shared_memory, True)
    head_tiles = shape.head_tiles(h)
    launch.start(
        "dq_rows.cu", constants(**launch.type_facts(call, do), **shape.macros()), device,
        B * S * G * head_tiles, shape.threads, shape.shared, launch.PROBLEM + "11q",
        *launch.problem(call, ranges), *launch.strided(do), o.data_ptr(), lse.data_ptr(), 0 if dlse is None else dlse.data_ptr(),
        dq.data_ptr(), delta.data_ptr(), head_tiles,
    )  # fmt: skip
    return dq, delta


def key_value_gradients(call: Call, ranges: Tensor, lse: Tensor, do: Tensor, delta: Tensor, on_hopper: bool) -> tuple[Tensor, Tensor]:
    """dk [B,G,S_kv,Dk] and dv [B,G,S_kv,Dv] from lse and delta [B,S,G,h]."""
    k, v, device, shape = call.k, call.v, call.q.get_device(), tile_shape_of(call)
    B, G, S_kv, Dk = k.shape
    Dv = v.shape[-1]
    reach = call.reach(shape.width)
    piece = piece_within(call, shape.width, reach)
    lists: Lists = lists_of(call, ranges, shape.width, reach, piece)
    parts = most_parts(lists.capacity, piece)
    part_dk = temporary(call, k, parts, shape.width, Dk, dtype=torch.float32)
    part_dv = temporary(call, k, parts, shape.width, Dv, dtype=torch.float32)
    dk, dv = unwritten(k, B, G, S_kv, Dk), unwritten(v, B, G, S_kv, Dv)
    facts = launch.type_facts(call, do)
    rest = (
        lists.entries.data_ptr(), lists.begins.data_ptr(), lists.pieces.data_ptr(), lists.parts.data_ptr(),
        lists.number, lists.tiles, lists.each, reach, piece,
        part_dk.data_ptr(), part_dv.data_ptr(), dk.data_ptr(), dv.data_ptr(),
    )  # fmt: skip
    if on_hopper and Dk <= tiles.MOST_SUMS:
        tiles.add_lists(call, ranges, lse, do, delta, lists.most_pieces, rest)
    else:
        launch.start(
            "dkdv_tiles.cu", constants(**facts, **shape.macros()), device,
            lists.most_pieces, shape.threads, shape.shared, launch.PROBLEM + "20q",
            *launch.problem(call, ranges), *launch.strided(do), lse.data_ptr(), delta.data_ptr(), *rest,
        )  # fmt: skip
    launch.start(
        "sum_parts.cu", constants(BF16=facts["BF16"], DK=Dk, DV=Dv, ALIGNED=1, KEY_WARPS=shape.key_warps), device,
        lists.number * (shape.width // 8), 128, 0, "8q",
        lists.pieces.data_ptr(), lists.parts.data_ptr(), part_dk.data_ptr(), part_dv.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        S_kv, lists.tiles,
    )  # fmt: skip
    return dk, dv
