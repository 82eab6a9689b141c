"""Quantized keys and values (e4m3): convert in registers, and apply scales to logits and probabilities instead of to
every element.

With stored K, V and scales a, c per head, or per page and head: logits s = (q K^T) a and o = sum_j p_j c_j V_j. Scales
per head multiply whole rows: the products, and the accumulator at the end. Scales per page differ between keys: a_j
multiplies column j of the products, and c_j / r multiplies p_j, where r is the largest scale so far. When r grows, r /
r_new rescales the accumulator, as a new softmax maximum does, so that 16-bit probabilities stay in range.

float16 and bfloat16 hold e4m3 exactly. GPUs convert two elements to float16 in one instruction, but need several for
bfloat16. So bfloat16 queries are converted to float16, times a power of two per row (`float16_rows`).

Functions return factors of 1 if there is nothing to multiply, which the compiler removes: Triton 3.6 functions cannot
return None.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_sel.backends._triton.softmax import products

_SMALLEST = tl.constexpr(1.0e-30)  # initial running scale; not 0, because it is a divisor


@triton.jit
def float16_rows(q_tile):
    """Return bfloat16 rows q_tile [BLOCK_H, BLOCK_D] as float16 times 2^8 / 2^e, and the inverse factors 2^e / 2^8
    [BLOCK_H, 1].

    The row's largest element is in [2^e, 2^(e+1)). Elements below 2^-33 of it are rounded, all others are exact.
    """
    wide = q_tile.to(tl.float32)
    power = (tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(power > _SMALLEST, power, 1.0)
    return (wide * (256.0 / power)[:, None]).to(tl.float16), (power / 256.0)[:, None]


@triton.jit
def quantized_row(q_tile, k, k_scale, v_scale, of_cache, g, PAGE_SCALES: tl.constexpr):
    """Return q_tile in the dtype that multiplies keys, and the factors of its products and of its accumulator (1 if not
    quantized)."""
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
    """Return the scales of keys and values in the pages `page`: [BLOCK_L] each, or scalars for one page. 1 without
    scales per page."""
    k_factor, v_factor = 1.0, 1.0
    if PAGE_SCALES:
        page = page.to(tl.int64)
        k_factor = tl.load(k_scale + page * of_cache.k_page + g * of_cache.k_group, mask=exists, other=0.0)
        v_factor = tl.load(v_scale + page * of_cache.v_page + g * of_cache.v_group, mask=exists, other=0.0)
    return k_factor, v_factor


@triton.jit
def step_logits(q_tile, k_tile, k_rate, k_factor):
    """Return the products q k^T [BLOCK_H, BLOCK_L] of a step's stored keys, times their scales."""
    return products(q_tile, k_tile.to(q_tile.dtype)) * k_rate * k_factor


@triton.jit
def step_weights(v_factor, v_rate, PAGE_SCALES: tl.constexpr):
    """Return the factors of a step's p and of the accumulator, and the largest page scale so far."""
    weight, shrink = 1.0, 1.0
    if PAGE_SCALES:
        largest = tl.max(tl.abs(v_factor), 0) if v_factor.type.is_block() else tl.abs(v_factor)
        after = tl.maximum(v_rate, largest)
        weight, shrink, v_rate = v_factor / after, v_rate / after, after
    return weight, shrink, v_rate
