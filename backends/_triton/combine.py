"""Partial results of one row, computed by several programs over disjoint keys, joined by their log-sum-exp in a fixed order.

o = sum_i w_i o_i with w_i = 2^(lse_i - lse), lse = log2 sum_i 2^lse_i; a part that saw no key has lse_i = -inf and w_i = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_sel.backends._triton.steps import LN_2, LOWEST


@triton.jit
def combine_kernel(part_o, part_lse, o, lse, parts, Dv: tl.constexpr, PARTS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """part_o [rows, parts, Dv] and part_lse [rows, parts] (base 2) in float32 -> o [rows, Dv], lse [rows] (natural); rows = B*S*G*h.

    All parts of a row are read at once: one after another, each would wait for memory by itself."""
    row = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, PARTS), tl.arange(0, BLOCK_DV)
    part = tl.load(part_lse + row * parts + i, mask=i < parts, other=float("-inf"))
    there = (i < parts)[:, None] & (d < Dv)[None, :]
    parts_o = tl.load(part_o + (row * parts + i[:, None]) * Dv + d[None, :], mask=there, other=0.0)
    highest = tl.maximum(tl.max(part, 0), LOWEST)
    total = tl.sum(tl.exp2(part - highest), 0)
    seen = total != 0
    row_lse = tl.where(seen, highest + tl.log2(tl.where(seen, total, 1.0)), 0.0)
    o_row = tl.sum(tl.exp2(part - row_lse)[:, None] * parts_o, 0)
    tl.store(o + row * Dv + d, o_row.to(o.dtype.element_ty), mask=d < Dv)
    tl.store(lse + row, tl.where(seen, row_lse * LN_2, float("-inf")))
