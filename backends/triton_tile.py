"""triton-tile: one program per tile of adjacent rows, which loads every block that any of them chose once, for all of them.

Neighbouring tokens choose nearly the same blocks (docs/kernels.md), so a tile of TQ rows and h heads, TQ * h = 64 rows of the matrix
unit, walks the union of their blocks (_triton/union.py): K and V travel once for the tile, and a row that did not choose a block
takes no part in its step (steps.chosen_step), at no cost per element.
    whole blocks  every row of the tile sees them to their last key: no mask; bulk copies on sm_90 and newer, pointers before
    cut blocks    the causal clamp, or the end of the cache, cuts them for some row: pointers, and a mask for every element
Backward: dQ by the same walk; dK and dV over the exact rows that chose each block (_triton/dkdv.py), which costs no union.

Within a tile, 0 * NaN is NaN: a NaN or infinity in a key or value that one row sees may reach the other rows of its tile, but none
that selects nothing. What a row's own q and do hold stays with that row.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_sel.backends._buffers import temporary
from nsa_sel.backends._loads import union_keys
from nsa_sel.backends._triton import launch
from nsa_sel.backends._triton.dkdv import key_value_gradients
from nsa_sel.backends._triton.start import REMEMBERED, Launch
from nsa_sel.backends._triton.steps import (
    LN_2,
    LOG2_E,
    LOWEST,
    add_product,
    chosen_step,
    finish_softmax,
    load_columns,
    products,
    row_limit,
    softmax_step,
    split_products,
    store_columns,
)
from nsa_sel.backends._triton.union import MOST_ROWS, union
from nsa_sel.core.call import Call
from nsa_sel.settings.schema import KernelConfig

SORTED = 2048  # entries of one tile that the plan sorts: more ranges a row make smaller tiles


@triton.jit
def tile_rows(pid, S, G, tiles, h: tl.constexpr, TQ: tl.constexpr, ROWS: tl.constexpr):
    """Where program pid works: batch entry, group, tile number, and of its ROWS rows the position s, bit, head, and whether they
    exist. Late tiles, which see the most blocks, start first."""
    HEAD_TILES: tl.constexpr = (h + ROWS - 1) // ROWS
    head0 = pid % HEAD_TILES * ROWS
    pid = pid // HEAD_TILES
    i = tiles - 1 - pid % tiles
    b, g = pid // tiles // G, pid // tiles % G
    r = tl.arange(0, ROWS)
    bit = r // h if TQ > 1 else r * 0
    head = r % h if TQ > 1 else head0 + r
    s = i * TQ + bit
    exists = (bit < TQ) & (s < S) & (head < h)
    return b, g, (b * G + g) * tiles + i, tl.minimum(s, S - 1), bit.to(tl.int64), head, exists


@triton.jit
def whole_tile(
    desc, x, b, g, c, stride_b, stride_g, stride_n,
    first: tl.constexpr, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Rows [c, c + BLOCK_L) of k or v, all of which exist, columns [first, first + BLOCK_D): by a bulk copy or by pointers."""
    if BULK:
        return desc.load([b, g, c, first]).reshape(BLOCK_L, BLOCK_D)
    else:
        position = (c + tl.arange(0, BLOCK_L)).to(tl.int64)
        rows = x + b.to(tl.int64) * stride_b + g.to(tl.int64) * stride_g + position * stride_n
        return load_columns(rows, position >= 0, first, D, BLOCK_D)


@triton.jit
def forward_kernel(
    q, k_desc, k_rest_desc, v_desc, k, v, blocks, rows, counts, q_pos, o, lse,
    stride_qb, stride_qs, stride_qg, stride_qh, stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_pb, stride_ps,
    S, S_kv, G, tiles, capacity, scale_log2,
    h: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, HAS_POS: tl.constexpr, ACC: tl.constexpr, BULK: tl.constexpr, BLOCK: tl.constexpr,
    TQ: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr,
    TAIL_L: tl.constexpr,
):  # fmt: skip
    """o and lse of one tile's rows and heads."""
    STEPS: tl.constexpr = BLOCK // BLOCK_L
    b, g, tile, s, bit, head, exists = tile_rows(tl.program_id(0), S, G, tiles, h, TQ, ROWS)
    b64, g64, s64, head64 = b.to(tl.int64), g.to(tl.int64), s.to(tl.int64), head.to(tl.int64)
    q_rows = q + b64 * stride_qb + g64 * stride_qg + (s64 * stride_qs + head64 * stride_qh)
    q_tile = load_columns(q_rows, exists, 0, Dk, BLOCK_D)
    q_rest = load_columns(q_rows, exists, BLOCK_D, Dk, BLOCK_REST) if BLOCK_REST > 0 else q_tile
    blocks += tile.to(tl.int64) * capacity
    rows += tile.to(tl.int64) * capacity
    whole, total = tl.load(counts + 2 * tile), tl.load(counts + 2 * tile + 1)

    acc = tl.zeros([ROWS, BLOCK_DV], ACC)
    l = tl.zeros([ROWS], ACC)
    m = tl.full([ROWS], LOWEST, ACC)
    # The list is read one step ahead: a copy cannot start before its block is known.
    block, chosen = tl.load(blocks), tl.load(rows)
    for step in range(0, whole * STEPS):
        c = block * BLOCK + step % STEPS * BLOCK_L
        k_tile = whole_tile(k_desc, k, b, g, c, stride_kb, stride_kg, stride_kn, 0, Dk, BLOCK_L, BLOCK_D, BULK)
        k_rest = k_tile
        if BLOCK_REST > 0:
            k_rest = whole_tile(k_rest_desc, k, b, g, c, stride_kb, stride_kg, stride_kn, BLOCK_D, Dk, BLOCK_L, BLOCK_REST, BULK)
        v_tile = whole_tile(v_desc, v, b, g, c, stride_vb, stride_vg, stride_vn, 0, Dv, BLOCK_L, BLOCK_DV, BULK)
        takes_part = ((chosen >> bit) & 1) != 0
        coming = tl.minimum((step + 1) // STEPS, whole - 1)
        block, chosen = tl.load(blocks + coming), tl.load(rows + coming)
        logits = split_products(q_tile, q_rest, k_tile, k_rest, BLOCK_REST, ACC)
        acc, l, m = chosen_step(logits, takes_part, v_tile, acc, l, m, scale_log2, ACC)

    limit = row_limit(q_pos, b64, s, S, S_kv, stride_pb, stride_ps, HAS_POS)
    k_base, v_base = k + b64 * stride_kb + g64 * stride_kg, v + b64 * stride_vb + g64 * stride_vg
    for i in range(whole, total):
        takes_part = exists & (((tl.load(rows + i) >> bit) & 1) != 0)
        sees = tl.where(takes_part, limit, 0)
        c0 = tl.load(blocks + i) * BLOCK
        end = tl.minimum(c0 + BLOCK, tl.max(sees, 0))  # keys that none of the rows sees may hold NaN
        for c in range(c0, end, TAIL_L):
            position = c + tl.arange(0, TAIL_L)
            k_rows, v_rows = k_base + position.to(tl.int64) * stride_kn, v_base + position.to(tl.int64) * stride_vn
            k_tail = load_columns(k_rows, position < end, 0, Dk, BLOCK_D)
            k_rest = load_columns(k_rows, position < end, BLOCK_D, Dk, BLOCK_REST) if BLOCK_REST > 0 else k_tail
            v_tail = load_columns(v_rows, position < end, 0, Dv, BLOCK_DV)
            logits = split_products(q_tile, q_rest, k_tail, k_rest, BLOCK_REST, ACC)
            logits = tl.where(position[None, :] < sees[:, None], logits, float("-inf"))
            acc, l, m = softmax_step(logits, v_tail, acc, l, m, scale_log2, ACC)

    o_tile, lse_rows = finish_softmax(acc, l, m, scale_log2)
    out = ((b64 * S + s64) * G + g64) * h + head64
    store_columns(o + out * Dv, o_tile, exists, 0, Dv)
    tl.store(lse + out, lse_rows * LN_2, mask=exists)


@triton.jit
def dq_kernel(
    q, k_desc, k_rest_desc, v_desc, k, v, blocks, rows, counts, q_pos, o, lse, do, dlse, dq, delta,
    stride_qb, stride_qs, stride_qg, stride_qh, stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_pb, stride_ps,
    stride_dob, stride_dos, stride_dog, stride_doh, S, S_kv, G, tiles, capacity, scale, scale_log2,
    h: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, HAS_POS: tl.constexpr, HAS_DLSE: tl.constexpr, ACC: tl.constexpr,
    BULK: tl.constexpr, BLOCK: tl.constexpr, TQ: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr, TAIL_L: tl.constexpr,
):  # fmt: skip
    """dq of one tile's rows and heads, and delta = sum(do * o) - dlse [B,S,G,h] for the KV side."""
    STEPS: tl.constexpr = BLOCK // BLOCK_L
    b, g, tile, s, bit, head, exists = tile_rows(tl.program_id(0), S, G, tiles, h, TQ, ROWS)
    b64, g64, s64, head64 = b.to(tl.int64), g.to(tl.int64), s.to(tl.int64), head.to(tl.int64)
    q_rows = q + b64 * stride_qb + g64 * stride_qg + (s64 * stride_qs + head64 * stride_qh)
    q_tile = load_columns(q_rows, exists, 0, Dk, BLOCK_D)
    q_rest = load_columns(q_rows, exists, BLOCK_D, Dk, BLOCK_REST) if BLOCK_REST > 0 else q_tile
    do_rows = do + b64 * stride_dob + g64 * stride_dog + (s64 * stride_dos + head64 * stride_doh)
    do_tile = load_columns(do_rows, exists, 0, Dv, BLOCK_DV)
    out = ((b64 * S + s64) * G + g64) * h + head64
    o_tile = load_columns(o + out * Dv, exists, 0, Dv, BLOCK_DV)
    delta_rows = tl.sum(o_tile.to(ACC) * do_tile.to(ACC), 1)
    if HAS_DLSE:
        delta_rows -= tl.load(dlse + out, mask=exists, other=0.0)
    tl.store(delta + out, delta_rows, mask=exists)
    lse_rows = tl.load(lse + out, mask=exists, other=0.0) * LOG2_E
    blocks += tile.to(tl.int64) * capacity
    rows += tile.to(tl.int64) * capacity
    whole, total = tl.load(counts + 2 * tile), tl.load(counts + 2 * tile + 1)

    acc = tl.zeros([ROWS, BLOCK_D], ACC)
    rest = tl.zeros([ROWS, BLOCK_REST], ACC) if BLOCK_REST > 0 else acc
    block, chosen = tl.load(blocks), tl.load(rows)
    for step in range(0, whole * STEPS):
        c = block * BLOCK + step % STEPS * BLOCK_L
        k_tile = whole_tile(k_desc, k, b, g, c, stride_kb, stride_kg, stride_kn, 0, Dk, BLOCK_L, BLOCK_D, BULK)
        k_rest = k_tile
        if BLOCK_REST > 0:
            k_rest = whole_tile(k_rest_desc, k, b, g, c, stride_kb, stride_kg, stride_kn, BLOCK_D, Dk, BLOCK_L, BLOCK_REST, BULK)
        v_tile = whole_tile(v_desc, v, b, g, c, stride_vb, stride_vg, stride_vn, 0, Dv, BLOCK_L, BLOCK_DV, BULK)
        takes_part = ((chosen >> bit) & 1) != 0
        coming = tl.minimum((step + 1) // STEPS, whole - 1)
        block, chosen = tl.load(blocks + coming), tl.load(rows + coming)
        s2 = split_products(q_tile, q_rest, k_tile, k_rest, BLOCK_REST, ACC) * scale_log2
        dp = products(do_tile, v_tile, ACC)
        p = tl.exp2(s2 - tl.where(takes_part, lse_rows, float("inf"))[:, None])
        ds = p * (dp - delta_rows[:, None])
        acc = add_product(acc, ds.to(k_tile.dtype), k_tile, ACC)
        if BLOCK_REST > 0:
            rest = add_product(rest, ds.to(k_tile.dtype), k_rest, ACC)

    limit = row_limit(q_pos, b64, s, S, S_kv, stride_pb, stride_ps, HAS_POS)
    k_base, v_base = k + b64 * stride_kb + g64 * stride_kg, v + b64 * stride_vb + g64 * stride_vg
    for i in range(whole, total):
        takes_part = exists & (((tl.load(rows + i) >> bit) & 1) != 0)
        sees = tl.where(takes_part, limit, 0)
        c0 = tl.load(blocks + i) * BLOCK
        end = tl.minimum(c0 + BLOCK, tl.max(sees, 0))
        for c in range(c0, end, TAIL_L):
            position = c + tl.arange(0, TAIL_L)
            k_rows, v_rows = k_base + position.to(tl.int64) * stride_kn, v_base + position.to(tl.int64) * stride_vn
            k_tail = load_columns(k_rows, position < end, 0, Dk, BLOCK_D)
            k_rest = load_columns(k_rows, position < end, BLOCK_D, Dk, BLOCK_REST) if BLOCK_REST > 0 else k_tail
            v_tail = load_columns(v_rows, position < end, 0, Dv, BLOCK_DV)
            logits = split_products(q_tile, q_rest, k_tail, k_rest, BLOCK_REST, ACC)
            p = tl.where(position[None, :] < sees[:, None], tl.exp2(logits * scale_log2 - lse_rows[:, None]), 0.0)
            dp = products(do_tile, v_tail, ACC)
            ds = p * (dp - delta_rows[:, None])
            acc = add_product(acc, ds.to(k_tail.dtype), k_tail, ACC)
            if BLOCK_REST > 0:
                rest = add_product(rest, ds.to(k_tail.dtype), k_rest, ACC)
    # A row that saw no key has p = 0, which NaN or infinity in its q, do or dlse would make NaN.
    saw = (lse_rows != float("-inf"))[:, None]
    store_columns(dq + out * Dk, tl.where(saw, acc * scale, 0.0), exists, 0, Dk)
    if BLOCK_REST > 0:
        store_columns(dq + out * Dk, tl.where(saw, rest * scale, 0.0), exists, BLOCK_D, Dk)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] and lse [B,S,G,h]."""
    if call.scale < 0:  # kernels keep the largest product, which must belong to the largest logit
        return forward(call.with_positive_scale())
    heads = launch.heads(call)
    config = launch.kernel_config(call, heads, "triton-tile/forward")
    kernel = _forward_launch(heads, call.selection.n, _block(call), config)
    o, lse = launch.outputs(call)
    plan = union(call, kernel.constants["TQ"])
    B, S, G, _, _ = call.q.shape
    kernel.start(
        B * G * plan.tiles * -(-heads.h // config.rows),
        (call.q, *_descriptors(call, kernel.constants), call.k, call.v, plan.blocks, plan.rows, plan.counts, call.q_pos, o, lse),
        (*launch.strides(call), S, call.k.shape[2], G, plan.tiles, plan.capacity, call.scale_log2()),
    )
    return o, lse


def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; dq by tiles, dk and dv by KV blocks over the rows that chose them, in ascending row order."""
    if call.scale < 0:
        dq, dk, dv = backward(call.with_positive_scale(), o, lse, do, dlse)
        return -dq, dk, dv
    heads = launch.heads(call)
    config = launch.kernel_config(call, heads, "triton-tile/dq")
    kernel = _dq_launch(heads, call.selection.n, _block(call), config, dlse is not None)
    B, S, G, _, _ = call.q.shape
    dq, delta = torch.empty_like(call.q, memory_format=torch.contiguous_format), temporary(call, lse, *lse.shape)
    dlse = None if dlse is None else dlse.contiguous()
    plan = union(call, kernel.constants["TQ"])
    kernel.start(
        B * G * plan.tiles * -(-heads.h // config.rows),
        (call.q, *_descriptors(call, kernel.constants), call.k, call.v, plan.blocks, plan.rows, plan.counts, call.q_pos, o, lse, do, dlse,
         dq, delta),
        (*launch.strides(call), *do.stride()[:4], S, call.k.shape[2], G, plan.tiles, plan.capacity, call.scale, call.scale_log2()),
    )  # fmt: skip
    dk, dv = key_value_gradients(call, heads, lse, do, delta, launch.kernel_config(call, heads, "triton-tile/dkdv"))
    return dq, dk, dv


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Keys that the forward loads: the union of each tile's rows, once a tile of heads; not counted, at most what the rows select."""
    heads = launch.heads(call)
    config = call.settings.kernel("triton-tile/forward" + launch.heads_class(heads))
    tokens = _facts(heads, call.selection.n, _block(call), config)["TQ"]
    return (union_keys(call, tokens) if count else selected) * -(-heads.h // config.rows)


@functools.lru_cache(REMEMBERED)
def _forward_launch(heads: launch.Heads, n: int, block: int, config: KernelConfig) -> Launch:
    return Launch(forward_kernel, **_facts(heads, n, block, config), num_warps=config.num_warps, num_stages=config.num_stages)


@functools.lru_cache(REMEMBERED)
def _dq_launch(heads: launch.Heads, n: int, block: int, config: KernelConfig, has_dlse: bool) -> Launch:
    facts = _facts(heads, n, block, config)
    return Launch(dq_kernel, HAS_DLSE=has_dlse, **facts, num_warps=config.num_warps, num_stages=config.num_stages)


def _facts(heads: launch.Heads, n: int, block: int, config: KernelConfig) -> dict[str, Any]:
    """The compile-time facts of both kernels. TQ: as many rows as fill the matrix unit's tile with their heads, and as the plan can
    sort and mark."""
    TQ = max(1, min(MOST_ROWS, config.rows // heads.h, SORTED // n))
    block_l = min(config.block_l, block & -block)
    tiles = {"BULK": config.loads == "tma", "BLOCK": block, "TQ": TQ, "ROWS": config.rows, "BLOCK_L": block_l, "TAIL_L": min(32, block_l)}
    return {**launch.split_facts(heads), **tiles}


def _block(call: Call) -> int:
    block = call.selection.block_size
    assert block is not None, "Limits.block_aligned_only keeps other selections out"
    return block


def _descriptors(call: Call, facts: dict[str, Any]) -> tuple[TensorDescriptor | None, TensorDescriptor | None, TensorDescriptor | None]:
    if not facts["BULK"]:
        return None, None, None
    block_l, rest = facts["BLOCK_L"], facts["BLOCK_REST"]
    k = launch.descriptor(call.k, block_l, facts["BLOCK_D"])
    return k, launch.descriptor(call.k, block_l, rest) if rest else None, launch.descriptor(call.v, block_l, facts["BLOCK_DV"])
