"""Split rows: with few rows, several programs each walk a share of a row's keys, and their results are joined in a fixed order.

o = sum_i w_i o_i with w_i = 2^(lse_i - lse), lse = log2 sum_i 2^lse_i; a part that saw no key has lse_i = -inf and w_i = 0.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.softmax import LN_2, LOWEST
from nsa_sel.backends._triton.tiles import tile_size
from nsa_sel.core.call import Call

SMS_WHEN_INTERPRETED = 4  # few, so that tests split rows without running many programs


@triton.jit
def joined_lse(part, AXIS: tl.constexpr):
    """lse in base 2 of rows from that of their parts along AXIS, whose size becomes 1, and whether any part saw a key; 0 without."""
    highest = tl.maximum(tl.max(part, AXIS, keep_dims=True), LOWEST)
    total = tl.sum(tl.exp2(part - highest), AXIS, keep_dims=True)
    seen = total != 0
    return tl.where(seen, highest + tl.log2(tl.where(seen, total, 1.0)), 0.0), seen


@triton.jit
def combine_row(part_o, part_lse, o, row, parts, Dv: tl.constexpr, PARTS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Write o of a row; returns its lse in base 2 and whether it saw a key, each [1]."""
    i, d = tl.arange(0, PARTS), tl.arange(0, BLOCK_DV)
    part = tl.load(part_lse + row * parts + i, mask=i < parts, other=float("-inf"))
    exists = (i < parts)[:, None] & (d < Dv)[None, :]
    parts_o = tl.load(part_o + (row * parts + i[:, None]) * Dv + d[None, :], mask=exists, other=0.0)
    row_lse, seen = joined_lse(part, 0)
    o_row = tl.sum(tl.exp2(part - row_lse)[:, None] * parts_o, 0)
    tl.store(o + row * Dv + d, o_row.to(o.dtype.element_ty), mask=d < Dv)
    return row_lse, seen


@triton.jit
def combine_kernel(part_o, part_lse, o, lse, parts, Dv: tl.constexpr, PARTS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """part_o [rows, parts, Dv] and part_lse [rows, parts] (base 2) in float32 -> o [rows, Dv], lse [rows] (natural); rows = B*S*G*h.

    One program per row. It loads all parts at once: one after another, each would wait for memory by itself."""
    row = tl.program_id(0).to(tl.int64)
    row_lse, seen = combine_row(part_o, part_lse, o, row, parts, Dv, PARTS, BLOCK_DV)
    tl.store(lse + row + tl.arange(0, 1), tl.where(seen, row_lse * LN_2, float("-inf")))


def multiprocessors(call: Call) -> int:
    """Of the GPU; a few in the interpreter."""
    return SMS_WHEN_INTERPRETED if call.device.kind == "cpu" else call.device.sm_count


def split_parts(call: Call, programs: int, at_once: int, least: int) -> int:
    """Into how many programs each row is split so that few rows still fill the GPU, which runs `at_once` of them side by side: 1 when
    there are enough rows. A program walks at least `least` keys of a row that may have so many."""
    parts = min(64, at_once // max(1, programs))
    if parts <= 1:
        return 1
    return max(1, min(parts, -(-call.selection.length_bound(call.S_kv) // least)))


def combine(part_o: Tensor, part_lse: Tensor, o: Tensor, lse: Tensor, parts: int) -> None:
    """Join the partials [rows, parts, Dv] and [rows, parts] of split rows into o and lse."""
    _combine(o.shape[-1], tile_size(parts, 1)).launch(lse.numel(), (part_o, part_lse, o, lse), (parts,))


@functools.lru_cache(REMEMBERED)
def _combine(Dv: int, PARTS: int) -> Kernel:
    block_dv = tile_size(Dv)
    num_warps = min(4, max(1, PARTS * block_dv // 1024))  # 32 numbers per thread, where there are so many
    return Kernel(combine_kernel, Dv=Dv, PARTS=PARTS, BLOCK_DV=block_dv, num_warps=num_warps)
