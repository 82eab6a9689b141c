"""Merge partial results of split rows (split-KV): with few rows, several programs walk the keys of each row.

o = sum_i w_i o_i with w_i = 2^(lse_i - lse), lse = log2 sum_i 2^lse_i, summed in a fixed order. A split without keys
has lse_i = -inf and w_i = 0.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.softmax import LN_2, LOWEST
from nsa_sel.backends._triton.tiles import tile_size
from nsa_sel.backends.launcher.buffers import temporary
from nsa_sel.core.call import Call

SMS_WHEN_INTERPRETED = 4  # small, so that interpreter tests split rows with few programs


@triton.jit
def joined_lse(part, AXIS: tl.constexpr):
    """Return the base-2 lse merged over AXIS (kept with size 1), 0 for rows without keys, and whether the row has any
    key."""
    highest = tl.maximum(tl.max(part, AXIS, keep_dims=True), LOWEST)
    total = tl.sum(tl.exp2(part - highest), AXIS, keep_dims=True)
    seen = total != 0
    return tl.where(seen, highest + tl.log2(tl.where(seen, total, 1.0)), 0.0), seen


@triton.jit
def combine_row(part_o, part_lse, o, row, splits, Dv: tl.constexpr, SPLITS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Merge one row's splits and store its o; return its base-2 lse [1] and whether it has any key [1]."""
    i, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_DV)
    part = tl.load(part_lse + row * splits + i, mask=i < splits, other=float("-inf"))  # [SPLITS]
    exists = (i < splits)[:, None] & (d < Dv)[None, :]
    # [SPLITS, BLOCK_DV]
    tile = tl.load(part_o + (row * splits + i[:, None]) * Dv + d[None, :], mask=exists, other=0.0)
    row_lse, seen = joined_lse(part, 0)  # [1], [1]
    o_row = tl.sum(tl.exp2(part - row_lse)[:, None] * tile, 0)  # [BLOCK_DV]
    tl.store(o + row * Dv + d, o_row.to(o.dtype.element_ty), mask=d < Dv)
    return row_lse, seen


@triton.jit
def combine_kernel(part_o, part_lse, o, lse, splits, Dv: tl.constexpr, SPLITS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Merge part_o [rows, splits, Dv] and base-2 part_lse [rows, splits], float32, into o [rows, Dv] and lse [rows]
    (natural logarithm).

    Grid: one program per row of B*S*G*h. It loads all splits at once, to pay the memory latency once.
    """
    row = tl.program_id(0).to(tl.int64)
    row_lse, seen = combine_row(part_o, part_lse, o, row, splits, Dv, SPLITS, BLOCK_DV)
    tl.store(lse + row + tl.arange(0, 1), tl.where(seen, row_lse * LN_2, float("-inf")))


def multiprocessors(call: Call) -> int:
    """Return the GPU's multiprocessor count, or SMS_WHEN_INTERPRETED in the interpreter."""
    return SMS_WHEN_INTERPRETED if call.device.kind == "cpu" else call.device.sm_count


def count_splits(call: Call, programs: int, at_once: int, least: int) -> int:
    """Return the number of programs per row that fills the GPU; 1 if there are enough rows.

    Args:
        programs: programs without splitting.
        at_once: programs that the GPU runs concurrently.
        least: fewest keys per program, where a row can have that many.
    """
    splits = min(64, at_once // max(1, programs))
    if splits <= 1:
        return 1
    return max(1, min(splits, -(-call.selection.length_bound(call.S_kv) // least)))


def partials(call: Call, o: Tensor, lse: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Return what split rows write: part_o [rows, splits, Dv] and part_lse [rows, splits], or o and lse for one split."""
    if splits == 1:
        return o, lse
    return temporary(call, lse, lse.numel(), splits, o.shape[-1]), temporary(call, lse, lse.numel(), splits)


def combine(part_o: Tensor, part_lse: Tensor, o: Tensor, lse: Tensor, splits: int) -> None:
    """Launch the merge of `partials` into o and lse, if there are several splits."""
    if splits > 1:
        _combine(o.shape[-1], tile_size(splits, 1)).launch(lse.numel(), (part_o, part_lse, o, lse), (splits,))


@functools.lru_cache(REMEMBERED)  # decoding over a cache that grows is never replayed
def _combine(Dv: int, SPLITS: int) -> Kernel:
    block_dv = tile_size(Dv)
    num_warps = min(4, max(1, SPLITS * block_dv // 1024))  # up to 32 elements per thread
    return Kernel(combine_kernel, Dv=Dv, SPLITS=SPLITS, BLOCK_DV=block_dv, num_warps=num_warps)
