"""The mathematics of one step of selection attention, as Triton functions; the kernels decide which rows meet which keys.

With logits s = scale * q k^T over the selected keys, L = log sum exp s, p = exp(s - L):
    forward    o = sum_j p_j v_j, kept as (acc, l, m): o = acc / l, with everything relative to the running maximum m
    backward   delta = sum(do * o) - dL,  ds = p * (do v^T - delta)
               dq = scale * ds k,  dk = scale * ds^T q,  dv = p^T do
Kernels work in base 2, with c = scale * log2 e, because exp2 is one instruction; lse leaves them as a natural logarithm.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below any logit, yet finite: exp2(-inf - LOWEST) is 0 where exp2(-inf - -inf) would be NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def larger(a, b):
    """For running maxima."""
    return tl.maximum(a, b)


@triton.jit
def row_limit(q_pos, b, s, S, S_kv, stride_pb, stride_ps, HAS_POS: tl.constexpr, LENGTHS: tl.constexpr = False):
    """One past the last key that row s (or each of a vector of rows) may see: min(t + 1, S_kv). LENGTHS: q_pos holds the lengths of
    sequences, at whose ends their S rows stand."""
    if HAS_POS:
        t = tl.load(q_pos + b * stride_pb + s * stride_ps).to(tl.int64)
        if LENGTHS:
            t += s - S
        limit = tl.minimum(t + 1, S_kv).to(tl.int32)
    else:
        limit = S_kv - S + s + 1
    return tl.maximum(limit, 0)


@triton.jit
def clamp_range(start, end, limit):
    """[max(start, 0), min(end, limit)) as int32, empty ranges with end <= start; clamped before the cast: int64 may hold any bound."""
    start = tl.minimum(tl.maximum(start, 0), limit).to(tl.int32)
    end = tl.maximum(tl.minimum(end, limit), 0).to(tl.int32)
    return start, end


@triton.jit
def starts_and_lengths(row_ranges, first, n, limit, NP: tl.constexpr):
    """Ranges first .. first+NP of a row, clamped."""
    i = first + tl.arange(0, NP)
    start = tl.load(row_ranges + 2 * i, mask=i < n, other=0)
    end = tl.load(row_ranges + 2 * i + 1, mask=i < n, other=0)
    start, end = clamp_range(start, end, limit)
    return start, tl.maximum(end - start, 0)


@triton.jit
def walk_ranges(row_ranges, first, n, limit, NP: tl.constexpr):
    """Ranges first .. first+NP of a row laid end to end: key number w in [before, after) stands at position w + shift.

    So a kernel walks any mixture of ranges in full tiles, short and unaligned ones included.
    """
    start, length = starts_and_lengths(row_ranges, first, n, limit, NP)
    after = tl.cumsum(length, 0)
    before = after - length
    return start - before, before, after, tl.sum(length, 0)


@triton.jit
def walk_pages(row_ranges, first, n, limit, table, NP: tl.constexpr, PAGE: tl.constexpr):
    """`walk_ranges` where each range lies within one page: w + shift is the key's place among the keys of all pages, page * PAGE on.

    The pages are read once a range, while the rest of this is computed, not key by key. table: the sequence's row of the block table.
    """
    start, length = starts_and_lengths(row_ranges, first, n, limit, NP)
    page = page_of(start, length > 0, table, PAGE)
    after = tl.cumsum(length, 0)
    before = after - length
    return (page * PAGE + start % PAGE).to(tl.int32) - before, before, after, tl.sum(length, 0)


@triton.jit
def walk_keys(row_ranges, first, n, limit, table, NP: tl.constexpr, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr):
    """`walk_pages` where ONE_PAGE says that each range lies within one, else `walk_ranges`."""
    if ONE_PAGE:
        return walk_pages(row_ranges, first, n, limit, table, NP, PAGE)
    else:
        return walk_ranges(row_ranges, first, n, limit, NP)


@triton.jit
def positions_of(w, shift, before, after):
    """Key positions of the key numbers w [BLOCK_L] (any value where w is past the last key)."""
    here = (before[None, :] <= w[:, None]) & (w[:, None] < after[None, :])
    return w + tl.sum(tl.where(here, shift[None, :], 0), 1)


@triton.jit
def sequence_of(x, b, g, stride_b, stride_g, PAGE: tl.constexpr):
    """Where a sequence's keys (or values) of a group begin; b, g are int64. Where PAGE > 0 `key_offsets` adds their pages."""
    if PAGE > 0:
        return x + g * stride_g
    else:
        return x + b * stride_b + g * stride_g


@triton.jit
def page_of(position, exists, table, PAGE: tl.constexpr):
    """The pages that hold keys `position` of the sequence whose row of the block table is `table`; read are those of keys that exist."""
    return tl.load(table + position // PAGE, mask=exists, other=0)


@triton.jit
def key_offsets(position, page, stride_kb, stride_kn, stride_vb, stride_vn, PAGE: tl.constexpr):
    """How far the keys and the values at `position` [BLOCK_L] are from where their sequence begins (`sequence_of`); `page` counts where
    PAGE > 0."""
    if PAGE > 0:
        page, place = page.to(tl.int64), (position % PAGE).to(tl.int64)
        return page * stride_kb + place * stride_kn, page * stride_vb + place * stride_vn
    else:
        position = position.to(tl.int64)
        return position * stride_kn, position * stride_vn


@triton.jit
def split_blocks(row_ranges, n, limit, BLOCK: tl.constexpr, NP: tl.constexpr):
    """A row whose ranges are blocks of BLOCK keys: how many entries up to the last whole block, where that stands, and the block
    that the limit cuts (of disjoint blocks at most one), empty when none is cut."""
    i = tl.arange(0, NP)
    start = tl.load(row_ranges + 2 * i, mask=i < n, other=0)
    end = tl.load(row_ranges + 2 * i + 1, mask=i < n, other=0)
    start, end = clamp_range(start, end, limit)
    whole = end - start == BLOCK
    cut = (end > start) & (end - start < BLOCK)
    listed = tl.max(tl.where(whole, i + 1, 0), 0)
    last_whole = tl.max(tl.where(whole, start, 0), 0)
    return listed, last_whole, tl.max(tl.where(cut, start, 0), 0), tl.max(tl.where(cut, end, 0), 0)


@triton.jit
def whole_block(row_ranges, i, limit, last_whole, BLOCK: tl.constexpr):
    """Where to read for entry i, and whether it counts. A hole in the list (padding, the cut block) reads the last whole block
    again and adds nothing: a branch would stop the compiler from overlapping loads with arithmetic."""
    start, end = clamp_range(tl.load(row_ranges + 2 * i), tl.load(row_ranges + 2 * i + 1), limit)
    is_whole = end - start == BLOCK
    return tl.where(is_whole, start, last_whole), is_whole


@triton.jit
def products(a, b, ACC: tl.constexpr):
    """a b^T [M, N] of a [M, D] and b [N, D].

    In float32 a wide D is summed in four parts: the arithmetic units, which compute it, make one chain of D roundings.
    """
    M: tl.constexpr = a.shape[0]
    N: tl.constexpr = b.shape[0]
    D: tl.constexpr = a.shape[1]
    if a.dtype == tl.float32 and D >= 128:
        a0, a1 = tl.split(a.reshape(M, D // 2, 2))
        b0, b1 = tl.split(b.reshape(N, D // 2, 2))
        a00, a01 = tl.split(a0.reshape(M, D // 4, 2))
        b00, b01 = tl.split(b0.reshape(N, D // 4, 2))
        a10, a11 = tl.split(a1.reshape(M, D // 4, 2))
        b10, b11 = tl.split(b1.reshape(N, D // 4, 2))
        even = plain_products(a00, b00, ACC) - plain_products(-a01, b01, ACC)  # differences: see add_product
        odd = plain_products(a10, b10, ACC) - plain_products(-a11, b11, ACC)
        return even + odd
    else:
        return plain_products(a, b, ACC)


@triton.jit
def split_products(a, a_rest, b, b_rest, BLOCK_REST: tl.constexpr, ACC: tl.constexpr):
    """a b^T where a head dimension like 192 stands in two tiles, 128 and 64 columns wide; in one where BLOCK_REST is 0."""
    if BLOCK_REST > 0:
        return tl.dot(a_rest, b_rest.T, products(a, b, ACC), input_precision="ieee", out_dtype=ACC)
    else:
        return products(a, b, ACC)


@triton.jit
def load_columns(rows, exists, first: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Columns [first, first + WIDTH) of the rows that the pointers [M] begin; zeros past D and where a row does not exist."""
    d = first + tl.arange(0, WIDTH)
    return tl.load(rows[:, None] + d[None, :], mask=exists[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_columns(rows, x, exists, first: tl.constexpr, D: tl.constexpr):
    """Write x [M, WIDTH] to the columns from `first` on."""
    d = first + tl.arange(0, x.shape[1])
    tl.store(rows[:, None] + d[None, :], x.to(rows.dtype.element_ty), mask=exists[:, None] & (d < D)[None, :])


@triton.jit
def plain_products(a, b, ACC: tl.constexpr):
    """a b^T in one go."""
    return tl.dot(a, b.T, input_precision="ieee", out_dtype=ACC)


@triton.jit
def softmax_step(s, v, acc, l, m, c, ACC: tl.constexpr):
    """Take the products s = q k^T [M, BLOCK_L] (-inf where masked) and their values v [BLOCK_L, Dv] into (acc, l, m)."""
    return chosen_step(s, True, v, acc, l, m, c, ACC)


@triton.jit
def chosen_step(s, chosen, v, acc, l, m, c, ACC: tl.constexpr):
    """`softmax_step` where only the rows `chosen` (a bool, or one a row) take part.

    The others keep their maximum and l, and a shift of infinity makes their p = 0: a mask for whole rows costs nothing per element. Where
    such a row's own s is not finite p is NaN, and acc with it: `finish_softmax` drops that of rows that never took part.
    """
    m_new = tl.where(chosen, tl.maximum(m, tl.max(s, 1)), m)
    alpha = tl.exp2((m - m_new) * c)
    p = powers(s, tl.where(chosen, m_new, float("inf")), c, v.dtype)
    l = l * alpha + tl.where(chosen, tl.sum(p, 1), 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee", out_dtype=ACC)
    return acc, l, m_new


@triton.jit
def powers(s, shift, c, dtype: tl.constexpr):
    """2^((s - shift) * c) [M, N] for shift [M] and c = scale * log2 e > 0.

    The difference is exact where it matters, near the maximum, and s * c would not be: 16-bit results do not see it, and for
    them one multiply-add an element does.
    """
    if dtype == tl.float16 or dtype == tl.bfloat16:
        return tl.exp2(s * c - (shift * c)[:, None])
    else:
        return tl.exp2((s - shift[:, None]) * c)


@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded: the GPU's plain division may be off by two units in the last place."""
    one = x * 0.0 + 1.0
    if x.dtype == tl.float32:
        return tl.div_rn(one, x)
    else:
        return one / x


@triton.jit
def finish_softmax(acc, l, m, c):
    """o and lse in base 2 from (acc, l, m); rows that saw no key give 0 and -inf, whatever acc holds; NaN in l shows in both."""
    seen = l != 0
    o = tl.where(seen[:, None], acc * reciprocal(tl.where(seen, l, 1.0))[:, None], 0.0)
    lse2 = tl.where(seen, m * c + tl.log2(tl.where(seen, l, 1.0)), float("-inf"))
    return o, lse2


@triton.jit
def add_product(acc, a, b, ACC: tl.constexpr):
    """acc + a b. In float32 each step's product is summed by itself first: one chain over thousands of rows would lose digits.

    Written as a difference, because the compiler turns a sum back into one chain.
    """
    if a.dtype == tl.float32:
        return acc - tl.dot(-a, b, input_precision="ieee", out_dtype=ACC)
    else:
        return tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC)
