"""One step of online softmax and of its gradients. All Triton kernels share these; they differ in which rows meet which
keys.

With logits s = scale * q k^T over the selected keys, L = log sum exp s, p = exp(s - L):
    forward    o = sum_j p_j v_j, held as (acc, l, m): o = acc / l, where acc and l are relative to the running maximum
               m
    backward   delta = sum(do * o) - dL,  ds = p * (do v^T - delta)
               dq = scale * ds k,  dk = scale * ds^T q,  dv = p^T do
Kernels compute in base 2 with c = scale * log2 e, because exp2 is one instruction. They store lse as a natural
logarithm. Accumulators are float32, or float64 for float64 inputs (only in the interpreter, for gradcheck). Shapes: M
query rows (or row-head pairs), N or BLOCK_L keys, l and m [M], acc [M, BLOCK_DV].
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_sel.backends._triton.tiles import load_columns

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Initial maximum, below any logit but finite: exp2(-inf - LOWEST) is 0, while exp2(-inf - -inf) would be NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def larger(a, b):
    """Return the maximum, as the combine function of a running maximum (associative_scan)."""
    return tl.maximum(a, b)


@triton.jit
def dot(a, b):
    """Return the matrix product a b in the accumulator's dtype."""
    ACC: tl.constexpr = tl.float64 if a.dtype == tl.float64 else tl.float32
    return tl.dot(a, b, input_precision="ieee", out_dtype=ACC)


@triton.jit
def products(a, b):
    """Return a b^T [M, N] for a [M, D] and b [N, D].

    float32 does not use tensor cores, where one sum over D would be a chain of D roundings. From D = 64 on, sum four
    parts.
    """
    M: tl.constexpr = a.shape[0]
    N: tl.constexpr = b.shape[0]
    D: tl.constexpr = a.shape[1]
    if a.dtype == tl.float32 and D >= 64:
        a0, a1 = tl.split(a.reshape(M, D // 2, 2))
        b0, b1 = tl.split(b.reshape(N, D // 2, 2))
        a00, a01 = tl.split(a0.reshape(M, D // 4, 2))
        b00, b01 = tl.split(b0.reshape(N, D // 4, 2))
        a10, a11 = tl.split(a1.reshape(M, D // 4, 2))
        b10, b11 = tl.split(b1.reshape(N, D // 4, 2))
        even = dot(a00, b00.T) - dot(-a01, b01.T)  # differences: see add_product
        odd = dot(a10, b10.T) - dot(-a11, b11.T)
        return even + odd
    else:
        return dot(a, b.T)


@triton.jit
def split_products(a, a_rest, b, b_rest, BLOCK_REST: tl.constexpr):
    """Return a b^T for operands whose columns `load_split` loaded as two tiles."""
    if BLOCK_REST > 0:
        b_rest = b_rest.T  # before the first product, so that both operands are in shared memory when it starts
        first = products(a, b)
        return tl.dot(a_rest, b_rest, first, input_precision="ieee", out_dtype=first.dtype)
    else:
        return products(a, b)


@triton.jit
def add_product(acc, a, b):
    """Return acc + a b. In float32 each step's product is summed separately: one chain over thousands of rows loses
    digits.

    Written as a difference, because the compiler merges a sum back into one chain.
    """
    if a.dtype == tl.float32:
        return acc - dot(-a, b)
    else:
        return tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def chosen_step(s, chosen, v, acc, l, m, c, weight=None, shrink=None):
    """Add the products s = q k^T [M, BLOCK_L] (-inf where masked) and the values v [BLOCK_L, BLOCK_DV] to (acc, l, m),
    only for the rows in `chosen` (one bool, or [M]).

    Other rows keep m and l. Their p becomes 0 by a shift of infinity, so masking whole rows has no per-element cost. If
    such a row has a non-finite s, its p and acc become NaN; `finish_softmax` drops acc of rows that were never chosen.

    weight, shrink: factors of p and of the previous acc, for scales of quantized values (group_ranges.py); None: 1.
    """
    p, alpha, l, m = weights_step(s, chosen, l, m, c, v.dtype)
    if weight is not None:
        p *= weight
        alpha *= shrink
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee", out_dtype=acc.dtype)
    return acc, l, m


@triton.jit
def weights_step(s, chosen, l, m, c, dtype: tl.constexpr):
    """Return p = 2^((s - m) c) [M, N] under the new maximum m, the factor [M] that rescales acc, and the new l and m
    [M]."""
    m_new = tl.where(chosen, tl.maximum(m, tl.max(s, 1)), m)
    alpha = tl.exp2((m - m_new) * c)
    p = powers(s, tl.where(chosen, m_new, float("inf")), c, dtype)
    return p, alpha, l * alpha + tl.where(chosen, tl.sum(p, 1), 0.0), m_new


@triton.jit
def powers(s, shift, c, dtype: tl.constexpr):
    """Return 2^((s - shift) * c) [M, N] for shift [M] and c = scale * log2 e > 0.

    s - shift is exact near the maximum, where precision matters; s * c is not. 16-bit outputs hide that error, so for
    them one multiply-add per element is enough. Rows without keys (shift = LOWEST, s = -inf) give 0: LOWEST * c may be
    -inf.
    """
    if dtype == tl.float16 or dtype == tl.bfloat16:
        return tl.exp2(s * c - tl.where(shift == LOWEST, 0.0, shift * c)[:, None])
    else:
        return tl.exp2((s - shift[:, None]) * c)


@triton.jit
def reciprocal(x):
    """Return 1 / x, correctly rounded. The GPU's default division may be off by two units in the last place."""
    one = x * 0.0 + 1.0
    if x.dtype == tl.float32:
        return tl.div_rn(one, x)
    else:
        return one / x


@triton.jit
def finish_softmax(acc, l, m, c):
    """Return o [M, BLOCK_DV] and base-2 lse [M] from (acc, l, m).

    Rows without keys (l = 0) give o = 0 and lse = -inf whatever acc holds. A NaN in l reaches both results.
    """
    seen = l != 0
    o = tl.where(seen[:, None], acc * reciprocal(tl.where(seen, l, 1.0))[:, None], 0.0)
    lse2 = tl.where(seen, m * c + tl.log2(tl.where(seen, l, 1.0)), float("-inf"))
    return o, lse2


@triton.jit
def row_delta(o, do_tile, dlse, row, exists, dims: tl.constexpr, dtype: tl.constexpr):
    """Return delta = sum(do * o) - dlse [M] for the rows with indices `row` [M] in o [rows, Dv]."""
    o_tile = load_columns(o + row * dims.Dv, exists, 0, dims.Dv, dims.BLOCK_DV)
    delta = tl.sum(o_tile.to(dtype) * do_tile.to(dtype), 1)
    if dlse is not None:
        delta -= tl.load(dlse + row, mask=exists, other=0.0)
    return delta


@triton.jit
def delta_and_lse(o, do_tile, lse, dlse, delta, row, exists, dims: tl.constexpr):
    """Return delta [M] and base-2 lse [M] of the rows. Also store delta for the dK/dV kernels."""
    delta_rows = row_delta(o, do_tile, dlse, row, exists, dims, delta.dtype.element_ty)
    lse2 = tl.load(lse + row, mask=exists, other=0.0) * LOG2_E
    tl.store(delta + row, delta_rows, mask=exists)
    return delta_rows, lse2


@triton.jit
def p_and_ds(s, do, v, lse2, delta, c, seen=None):
    """Return p = 2^(s c - lse2), 0 where `seen` is false, and ds = p * (do v^T - delta), both [M, N], from s = q
    k^T."""
    p = tl.exp2(s * c - lse2[:, None])
    if seen is not None:
        p = tl.where(seen, p, 0.0)
    return p, p * (products(do, v) - delta[:, None])
