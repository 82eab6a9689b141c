"""Online softmax and its gradients for one step of selection attention; the kernels decide which rows meet which keys.

With logits s = scale * q k^T over the selected keys, L = log sum exp s, p = exp(s - L):
    forward    o = sum_j p_j v_j, kept as (acc, l, m): o = acc / l, with everything relative to the running maximum m
    backward   delta = sum(do * o) - dL,  ds = p * (do v^T - delta)
               dq = scale * ds k,  dk = scale * ds^T q,  dv = p^T do
Kernels work in base 2, with c = scale * log2 e, because exp2 is one instruction; lse leaves them as a natural logarithm.
Accumulators are float32, or float64 for float64 inputs (the interpreter, for gradcheck).
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_sel.backends._triton.tiles import load_columns

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below any logit, yet finite: exp2(-inf - LOWEST) is 0 where exp2(-inf - -inf) would be NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def larger(a, b):
    """For running maxima."""
    return tl.maximum(a, b)


@triton.jit
def dot(a, b):
    """a b in the accumulator's type."""
    ACC: tl.constexpr = tl.float64 if a.dtype == tl.float64 else tl.float32
    return tl.dot(a, b, input_precision="ieee", out_dtype=ACC)


@triton.jit
def products(a, b):
    """a b^T [M, N] of a [M, D] and b [N, D].

    float32 does not run on tensor cores and would be one chain of D roundings: from 64 on, D is summed in four parts.
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
    """a b^T of tiles from `load_split`."""
    if BLOCK_REST > 0:
        b_rest = b_rest.T  # before the first product: both operands are in shared memory when it starts
        first = products(a, b)
        return tl.dot(a_rest, b_rest, first, input_precision="ieee", out_dtype=first.dtype)
    else:
        return products(a, b)


@triton.jit
def add_product(acc, a, b):
    """acc + a b. In float32 each step's product is summed by itself first: one chain over thousands of rows would lose digits.

    Written as a difference, because the compiler turns a sum back into one chain.
    """
    if a.dtype == tl.float32:
        return acc - dot(-a, b)
    else:
        return tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def softmax_step(s, v, acc, l, m, c, weight=None, shrink=None):
    """Take the products s = q k^T [M, BLOCK_L] (-inf where masked) and their values v [BLOCK_L, Dv] into (acc, l, m)."""
    return chosen_step(s, True, v, acc, l, m, c, weight, shrink)


@triton.jit
def chosen_step(s, chosen, v, acc, l, m, c, weight=None, shrink=None):
    """`softmax_step` for the rows `chosen` (a bool, or one per row) alone.

    The others keep m and l, and a shift of infinity makes their p = 0: masking whole rows costs nothing per element. Where such a
    row's own s is not finite p is NaN, and acc with it: `finish_softmax` drops acc of rows that never took part.

    weight, shrink: factors of p beside v, and of acc before it, None for 1 (scales of quantized values, quantized.py).
    """
    p, alpha, l, m = weights_step(s, chosen, l, m, c, v.dtype)
    if weight is not None:
        p *= weight
        alpha *= shrink
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee", out_dtype=acc.dtype)
    return acc, l, m


@triton.jit
def weights_step(s, chosen, l, m, c, dtype: tl.constexpr):
    """p = 2^((s - m) c) [M, N] with the new maximum m, the factor of acc before it, and the new l and m of `chosen_step`."""
    m_new = tl.where(chosen, tl.maximum(m, tl.max(s, 1)), m)
    alpha = tl.exp2((m - m_new) * c)
    p = powers(s, tl.where(chosen, m_new, float("inf")), c, dtype)
    return p, alpha, l * alpha + tl.where(chosen, tl.sum(p, 1), 0.0), m_new


@triton.jit
def powers(s, shift, c, dtype: tl.constexpr):
    """2^((s - shift) * c) [M, N] for shift [M] and c = scale * log2 e > 0.

    The difference is exact where it matters, near the maximum, and s * c would not be: 16-bit results do not show it, and for
    them one multiply-add per element does.
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
def row_delta(o, do_tile, dlse, row, exists, dims: tl.constexpr, dtype: tl.constexpr):
    """delta = sum(do * o) - dlse of the rows `row` [M] of o [rows, Dv]."""
    o_tile = load_columns(o + row * dims.Dv, exists, 0, dims.Dv, dims.BLOCK_DV)
    delta = tl.sum(o_tile.to(dtype) * do_tile.to(dtype), 1)
    if dlse is not None:
        delta -= tl.load(dlse + row, mask=exists, other=0.0)
    return delta


@triton.jit
def delta_and_lse(o, do_tile, lse, dlse, delta, row, exists, dims: tl.constexpr):
    """delta of the rows, which is also stored for the dK/dV kernels, and their lse in base 2."""
    delta_rows = row_delta(o, do_tile, dlse, row, exists, dims, delta.dtype.element_ty)
    lse2 = tl.load(lse + row, mask=exists, other=0.0) * LOG2_E
    tl.store(delta + row, delta_rows, mask=exists)
    return delta_rows, lse2


@triton.jit
def p_and_ds(s, do, v, lse2, delta, c, seen=None):
    """p = 2^(s c - lse2), 0 where not seen, and ds = p * (do v^T - delta) [M, N] from the products s = q k^T."""
    p = tl.exp2(s * c - lse2[:, None])
    if seen is not None:
        p = tl.where(seen, p, 0.0)
    return p, p * (products(do, v) - delta[:, None])
