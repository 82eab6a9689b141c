"""Quantized keys and values (e4m3): converted in registers, and their scales applied to logits and weights, not to every number.

With stored numbers K, V and scales a, c (of a key's head, or of its page and head): logits s = (q K^T) a and o = sum_j p_j c_j V_j. Scales
of a head are factors of whole rows: of the products, and of the accumulator at the end. Scales of pages differ from key to key: a_j
multiplies column j of the products, and c_j / r the weights, where r is the largest scale so far: r / r_new shrinks the accumulator as a
new maximum does, so that weights of 16 bits never leave their range.

e4m3 is exact in float16, to which GPUs convert two numbers in one instruction, and in bfloat16, to which they do in several. So queries of
bfloat16 become float16, exactly: times a power of two per row.

Factors of 1 stand where there is nothing to multiply; the compiler drops them. (Triton 3.6 has no functions that return None.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_sel.backends._triton.softmax import products

_SMALLEST = tl.constexpr(1.0e-30)  # of the running scale: it divides


@triton.jit
def float16_rows(q_tile):
    """bfloat16 rows q_tile [BLOCK_H, BLOCK_D] as float16, times 2^8 / 2^e where the largest number of the row is in [2^e, 2^(e+1)), and
    2^e / 2^8 [BLOCK_H, 1]. Numbers below 2^-33 of the row's largest are rounded."""
    wide = q_tile.to(tl.float32)
    power = (tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(power > _SMALLEST, power, 1.0)
    return (wide * (256.0 / power)[:, None]).to(tl.float16), (power / 256.0)[:, None]


@triton.jit
def quantized_row(q_tile, k, k_scale, v_scale, of_cache, g, PAGE_SCALES: tl.constexpr):
    """q_tile as it multiplies keys, and the factors of its products and of its accumulator. Unquantized keys change nothing."""
    k_rate, v_rate = 1.0, 1.0
    if k.dtype.element_ty != q_tile.dtype:
        if q_tile.dtype == tl.bfloat16:
            q_tile, k_rate = float16_rows(q_tile)
        if PAGE_SCALES:
            v_rate = _SMALLEST
        elif k_scale is not None:
            k_rate *= tl.load(k_scale + g * of_cache.k_group)
            v_rate = tl.load(v_scale + g * of_cache.v_group)
    return q_tile, k_rate, v_rate


@triton.jit
def page_scales(k_scale, v_scale, of_cache, g, page, exists, PAGE_SCALES: tl.constexpr):
    """The scales of keys and of values in the pages `page`: two of [BLOCK_L], or two numbers of one page. 1 without scales of pages."""
    k_factor, v_factor = 1.0, 1.0
    if PAGE_SCALES:
        page = page.to(tl.int64)
        k_factor = tl.load(k_scale + page * of_cache.k_page + g * of_cache.k_group, mask=exists, other=0.0)
        v_factor = tl.load(v_scale + page * of_cache.v_page + g * of_cache.v_group, mask=exists, other=0.0)
    return k_factor, v_factor


@triton.jit
def step_logits(q_tile, k_tile, k_rate, k_factor):
    """The products q k^T [BLOCK_H, BLOCK_L] of a step's keys as stored, times their scales."""
    return products(q_tile, k_tile.to(q_tile.dtype)) * k_rate * k_factor


@triton.jit
def step_weights(v_factor, v_rate, PAGE_SCALES: tl.constexpr):
    """Of a step's values: the factors of their weights and of the accumulator, and the largest scale of a page so far."""
    weight, shrink = 1.0, 1.0
    if PAGE_SCALES:
        largest = tl.max(tl.abs(v_factor), 0) if v_factor.type.is_block() else tl.abs(v_factor)
        after = tl.maximum(v_rate, largest)
        weight, shrink, v_rate = v_factor / after, v_rate / after, after
    return weight, shrink, v_rate
