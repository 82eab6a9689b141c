"""Partial results of one row, computed by several programs over disjoint keys, joined by their log-sum-exp in a fixed order.

o = sum_i w_i o_i with w_i = 2^(lse_i - lse), lse = log2 sum_i 2^lse_i; a part that saw no key has lse_i = -inf and w_i = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_sel.backends._triton.steps import LN_2, LOWEST


@triton.jit
def combine_kernel(
    part_o, part_lse, o, lse, rows, parts, Dv: tl.constexpr, PARTS: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_ROWS: tl.constexpr
):  # fmt: skip
    """part_o [rows, parts, Dv] and part_lse [rows, parts] (base 2) in float32 -> o [rows, Dv], lse [rows] (natural); rows = B*S*G*h."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_DV)
    i = tl.arange(0, PARTS)
    inside = (row < rows)[:, None] & (i < parts)[None, :]
    part = tl.load(part_lse + row[:, None] * parts + i[None, :], mask=inside, other=float("-inf"))
    highest = tl.maximum(tl.max(part, 1), LOWEST)
    total = tl.sum(tl.exp2(part - highest[:, None]), 1)
    seen = total > 0
    row_lse = tl.where(seen, highest + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DV], part_o.dtype.element_ty)
    store = (row < rows)[:, None] & (d < Dv)[None, :]
    for j in range(parts):
        one = tl.load(part_lse + row * parts + j, mask=row < rows, other=float("-inf"))
        weight = tl.where(seen, tl.exp2(one - tl.where(seen, row_lse, 0.0)), 0.0)
        acc += weight[:, None] * tl.load(part_o + (row[:, None] * parts + j) * Dv + d[None, :], mask=store, other=0.0)
    tl.store(o + row[:, None] * Dv + d[None, :], acc.to(o.dtype.element_ty), mask=store)
    tl.store(lse + row, row_lse * LN_2, mask=row < rows)
