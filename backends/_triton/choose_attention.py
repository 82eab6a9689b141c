"""Attention of every row to the compressed keys that it sees, and its dq, with the online softmax of softmax.py.

A tile of adjacent rows and their h heads walks the compressed keys from the first on: without a mask while all rows of
the tile see them (through TMA if it fits), then with a mask in steps of TAIL keys up to the last key that any row sees.
Later keys are not read.

Within a tile 0 * NaN is NaN: a NaN or infinity in a key or value that one row sees may reach other rows of the tile
that see any key.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_sel.backends._triton.arguments import Dims, options
from nsa_sel.backends._triton.choose_packed import locate_tile
from nsa_sel.backends._triton.choose_rows import (
    bounds_of,
    by_tma,
    dims_of,
    key_descriptors,
    programs_of,
    seen_keys,
    sizes_of,
    strides_of,
    tile_tokens,
    value_descriptor,
)
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.softmax import (
    LN_2,
    LOG2_E,
    LOWEST,
    add_product,
    finish_softmax,
    p_and_ds,
    row_delta,
    softmax_step,
    split_products,
)
from nsa_sel.backends._triton.tiles import load_columns, load_kv, load_split, load_whole, row_pointers, store_columns, store_split
from nsa_sel.core.call import ChooseCall, Rule
from nsa_sel.settings.schema import KernelConfig

TAIL = 32  # keys per masked step


@triton.jit
def tile_limits(q_pos, stride_pos, b, s, exists, sizes, rule: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the compressed keys that each row sees [ROWS], those in whole steps of BLOCK_K that all rows see, and the
    maximum."""
    seen = tl.where(exists, seen_keys(q_pos, stride_pos, b, s, sizes, rule), 0)
    fewest = tl.min(tl.where(exists, seen, sizes.C), 0)
    return seen, fewest // BLOCK_K * BLOCK_K, tl.max(seen, 0)


@triton.jit
def forward_kernel(
    q, k_desc, k_rest_desc, v_desc, k, v, q_pos, cu, cu_cmp, o, lse, strides, sizes, scale_log2,
    dims: tl.constexpr, rule: tl.constexpr, TQ: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_K: tl.constexpr,
):  # fmt: skip
    """Compute o = softmax(scale * q k^T) v and lse for one tile's rows and heads.

    Grid: one program per tile of TQ tokens; where h > ROWS, one program per ROWS heads. Late tiles come first.
    Tiles: q [ROWS, BLOCK_D + BLOCK_REST], k [BLOCK_K, BLOCK_D + BLOCK_REST], v [BLOCK_K, BLOCK_DV]; TAIL_K keys per
    masked step.
    TMA: k_desc, k_rest_desc and v_desc load unmasked steps; None: pointer loads.
    """
    ACC: tl.constexpr = lse.dtype.element_ty
    BLOCK_DV: tl.constexpr = dims.BLOCK_DV
    b, g, s, head, out, exists, first, own = locate_tile(tl.program_id(0), cu, cu_cmp, sizes, dims.h, TQ, ROWS)
    b64, g64, s64 = b.to(tl.int64), g.to(tl.int64), s.to(tl.int64)
    q_tile, q_rest = load_split(row_pointers(q, strides.q, b64, g64, s64, head), exists, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
    seen, whole, end = tile_limits(q_pos, strides.pos, b64, s64, exists, own, rule, BLOCK_K)

    acc = tl.zeros([ROWS, BLOCK_DV], ACC)
    l = tl.zeros([ROWS], ACC)
    m = tl.full([ROWS], LOWEST, ACC)
    for c in range(0, whole, BLOCK_K):
        k_tile, k_rest, v_tile = load_whole(k_desc, k_rest_desc, v_desc, k, v, strides, b, g, first + c, dims, BLOCK_K)
        logits = split_products(q_tile, q_rest, k_tile, k_rest, dims.BLOCK_REST)  # [ROWS, BLOCK_K]
        acc, l, m = softmax_step(logits, v_tile, acc, l, m, scale_log2)
    for c in range(whole, end, TAIL_K):
        key = c + tl.arange(0, TAIL_K)
        k_tail, k_rest, v_tail = load_kv(k, v, strides, b64, g64, first + key, key < end, dims)
        logits = split_products(q_tile, q_rest, k_tail, k_rest, dims.BLOCK_REST)  # [ROWS, TAIL_K]
        logits = tl.where(key[None, :] < seen[:, None], logits, float("-inf"))
        acc, l, m = softmax_step(logits, v_tail, acc, l, m, scale_log2)

    o_tile, lse_rows = finish_softmax(acc, l, m, scale_log2)
    store_columns(o + out * dims.Dv, o_tile, exists, 0, dims.Dv)
    tl.store(lse + out, lse_rows * LN_2, mask=exists)


@triton.jit
def dq_kernel(
    q, k_desc, k_rest_desc, v_desc, k, v, q_pos, cu, cu_cmp, o, lse, do, dlse, dq, facts, strides, stride_do, sizes, scale, scale_log2,
    dims: tl.constexpr, rule: tl.constexpr, TQ: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_K: tl.constexpr,
):  # fmt: skip
    """Compute dq = scale * ds k for one tile's rows and heads; store facts [B,G,2,S,h] of the rows for dk and dv.

    Facts are delta = sum(do * o) - dlse and base-2 lse, in a layout with the rows and heads of a group adjacent.
    Grid, tiles and TMA are those of `forward_kernel`.
    """
    ACC: tl.constexpr = lse.dtype.element_ty
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    REST: tl.constexpr = dims.BLOCK_REST
    b, g, s, head, out, exists, first, own = locate_tile(tl.program_id(0), cu, cu_cmp, sizes, dims.h, TQ, ROWS)
    b64, g64, s64 = b.to(tl.int64), g.to(tl.int64), s.to(tl.int64)
    q_tile, q_rest = load_split(row_pointers(q, strides.q, b64, g64, s64, head), exists, dims.Dk, BLOCK_D, REST)
    do_tile = load_columns(row_pointers(do, stride_do, b64, g64, s64, head), exists, 0, dims.Dv, dims.BLOCK_DV)
    delta = row_delta(o, do_tile, dlse, out, exists, dims, ACC)
    lse2 = tl.load(lse + out, mask=exists, other=0.0) * LOG2_E
    facts += ((b64 * sizes.G + g64) * 2 * sizes.S + s64) * dims.h + head
    tl.store(facts, delta, mask=exists)
    tl.store(facts + sizes.S * dims.h, lse2, mask=exists)
    seen, whole, end = tile_limits(q_pos, strides.pos, b64, s64, exists, own, rule, BLOCK_K)

    acc = tl.zeros([ROWS, BLOCK_D], ACC)
    rest = tl.zeros([ROWS, REST], ACC) if REST > 0 else acc
    for c in range(0, whole, BLOCK_K):
        k_tile, k_rest, v_tile = load_whole(k_desc, k_rest_desc, v_desc, k, v, strides, b, g, first + c, dims, BLOCK_K)
        logits = split_products(q_tile, q_rest, k_tile, k_rest, REST)
        p, ds = p_and_ds(logits, do_tile, v_tile, lse2, delta, scale_log2)
        acc = add_product(acc, ds.to(k_tile.dtype), k_tile)
        if REST > 0:
            rest = add_product(rest, ds.to(k_tile.dtype), k_rest)
    for c in range(whole, end, TAIL_K):
        key = c + tl.arange(0, TAIL_K)
        k_tail, k_rest, v_tail = load_kv(k, v, strides, b64, g64, first + key, key < end, dims)
        logits = split_products(q_tile, q_rest, k_tail, k_rest, REST)
        p, ds = p_and_ds(logits, do_tile, v_tail, lse2, delta, scale_log2, key[None, :] < seen[:, None])
        acc = add_product(acc, ds.to(k_tail.dtype), k_tail)
        if REST > 0:
            rest = add_product(rest, ds.to(k_tail.dtype), k_rest)
    # A row without keys has p = 0, but a NaN or infinity in its q, do or dlse turns 0 * NaN into NaN: write zeros.
    saw = (lse2 != float("-inf"))[:, None]
    store_split(dq + out * dims.Dk, tl.where(saw, acc * scale, 0.0), tl.where(saw, rest * scale, 0.0), exists, dims.Dk, REST)


def forward(call: ChooseCall, o: Tensor, lse: Tensor, config: KernelConfig) -> None:
    """Launch the forward kernel, which writes o [B,S,G,h,Dv] and lse [B,S,G,h], both contiguous. The scale is
    positive."""
    if lse.numel() == 0:
        return
    kernel = _forward(dims_of(call), call.rule, config)
    kernel.launch(
        programs_of(call, config.rows),
        (*_inputs(call, kernel, config), o, lse),
        (strides_of(call), sizes_of(call, kernel.constants["TQ"]), call.scale_log2()),
    )


def dq(call: ChooseCall, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, to: Tensor, facts: Tensor, config: KernelConfig) -> None:
    """Launch `dq_kernel`, which writes dq to `to` [B,S,G,h,Dk], and facts [B,G,2,S,h]. All but q, k, v and do are
    contiguous."""
    if lse.numel() == 0:
        return
    kernel = _dq(dims_of(call), call.rule, config)
    sizes = sizes_of(call, kernel.constants["TQ"])
    kernel.launch(
        programs_of(call, config.rows),
        (*_inputs(call, kernel, config), o, lse, do, dlse, to, facts),
        (strides_of(call), do.stride()[:4], sizes, call.scale, call.scale_log2()),
    )


def _inputs(call: ChooseCall, kernel: Kernel, config: KernelConfig) -> tuple[Tensor | TensorDescriptor | None, ...]:
    """Return the tensors that both kernels read. Descriptors are None for pointer loads of k and v."""
    descriptors: tuple[TensorDescriptor | None, ...] = (None, None, None)
    if by_tma(call, config):
        dims, block_k = kernel.constants["dims"], kernel.constants["BLOCK_K"]
        descriptors = *key_descriptors(call, dims, block_k), value_descriptor(call, dims, block_k)
    return call.q, *descriptors, call.k, call.v, call.q_pos, *bounds_of(call)


@functools.lru_cache(REMEMBERED)
def _forward(dims: Dims, rule: Rule, config: KernelConfig) -> Kernel:
    return Kernel(forward_kernel, **_constants(dims, rule, config))


@functools.lru_cache(REMEMBERED)
def _dq(dims: Dims, rule: Rule, config: KernelConfig) -> Kernel:
    return Kernel(dq_kernel, **_constants(dims, rule, config))


def _constants(dims: Dims, rule: Rule, config: KernelConfig) -> dict[str, Any]:
    tiles = {"TQ": tile_tokens(dims.h, config.rows), "ROWS": config.rows, "BLOCK_K": config.block_l, "TAIL_K": min(TAIL, config.block_l)}
    return {"dims": dims, "rule": rule.of_keys(), **tiles, **options(config)}
