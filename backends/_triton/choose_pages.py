"""Choosing blocks of a few new tokens over compressed keys in pages: nothing is gathered, and K and V are read once.

    attention    o and lse of all new tokens of a sequence, and their logits [B,G,S * h,C]: an eighth of a key's bytes for 16 heads
    importance   scores of blocks from logits and lse (Eq. 8 to 10); then `top_n`

A sequence's compressed keys are cut into parts, one program each, where few sequences would not fill the GPU (combine.py). Where parts end
is the device's decision: tables have room for the longest sequence, and the keys that a sequence has are shared by its programs.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.arguments import Dims, options
from nsa_sel.backends._triton.choose_rows import Sizes, dims_of, seen_keys, strides_of
from nsa_sel.backends._triton.combine import SMS_WHEN_INTERPRETED, combine
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.softmax import LN_2, LOG2_E, LOWEST, finish_softmax, softmax_step, split_products
from nsa_sel.backends._triton.tiles import cached_pointers, load_columns, load_split, row_pointers, store_columns, tile_size
from nsa_sel.core.choose_call import ChooseCall, Rule
from nsa_sel.core.facts import device_info
from nsa_sel.settings.schema import KernelConfig

MOST_ROWS = 64  # new tokens of a sequence times heads of a group: one tile
LEAST_KEYS = 128  # of a part, where a sequence has as many
MOST_PARTS = 64
PER_SM = 2  # programs for every multiprocessor, where there are few sequences
IMPORTANCE_TILE = 4096  # logits of a program


@triton.jit
def attention_kernel(
    q, k, v, table, q_pos, o, lse, logits, strides, stride_table, sizes, parts, scale_log2,
    dims: tl.constexpr, rule: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, SLOTS: tl.constexpr, SKIPPED: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """o [B,S,G,h,Dv] and lse; if SPLIT those of parts, [rows,parts,Dv] and [rows,parts] in base 2. Logits [B,G,S * h,C] in base 2.

    Grid: one program per sequence, group and part. Tiles: q [ROWS, BLOCK_D + BLOCK_REST], k [BLOCK_K, same], v [BLOCK_K, BLOCK_DV]. Keys
    that no row of the sequence sees are not read.
    """
    BLOCK_DV: tl.constexpr = dims.BLOCK_DV
    number = tl.program_id(0)
    part, g, b = number % parts, (number // parts % sizes.G).to(tl.int64), (number // parts // sizes.G).to(tl.int64)
    row = tl.arange(0, ROWS)
    exists = row < sizes.S * dims.h
    s, head = tl.minimum(row // dims.h, sizes.S - 1).to(tl.int64), (row % dims.h).to(tl.int64)
    q_tile, q_rest = load_split(row_pointers(q, strides.q, b, g, s, head), exists, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
    seen = tl.where(exists, seen_keys(q_pos, strides.pos, b, s, sizes, rule), 0)
    end = tl.max(seen, 0)
    share = tl.cdiv(tl.cdiv(end, BLOCK_K), parts) * BLOCK_K
    end = tl.minimum(end, (part + 1) * share)

    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    m = tl.full([ROWS], LOWEST, tl.float32)
    out = logits + ((b * sizes.G + g) * sizes.S * dims.h + row) * sizes.C
    for c in range(part * share, end, BLOCK_K):
        key = c + tl.arange(0, BLOCK_K)
        is_key = key < end
        piece = key + SKIPPED
        page = tl.load(table + b * stride_table + piece // SLOTS, mask=is_key, other=0)
        k_rows, v_rows = cached_pointers(k, strides.k, b, g, piece, page, SLOTS), cached_pointers(v, strides.v, b, g, piece, page, SLOTS)
        k_tile, k_rest = load_split(k_rows, is_key, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
        v_tile = load_columns(v_rows, is_key, 0, dims.Dv, BLOCK_DV)
        products = split_products(q_tile, q_rest, k_tile, k_rest, dims.BLOCK_REST)
        products = tl.where(key[None, :] < seen[:, None], products, float("-inf"))
        tl.store(out[:, None] + key[None, :], products * scale_log2, mask=exists[:, None] & is_key[None, :])
        acc, l, m = softmax_step(products, v_tile, acc, l, m, scale_log2)

    o_tile, lse2 = finish_softmax(acc, l, m, scale_log2)
    to = ((b * sizes.S + s) * sizes.G + g) * dims.h + head
    if SPLIT:
        to = to * parts + part
        tl.store(lse + to, lse2, mask=exists)
    else:
        tl.store(lse + to, lse2 * LN_2, mask=exists)
    store_columns(o + to * dims.Dv, o_tile, exists, 0, dims.Dv)


@triton.jit
def importance_kernel(
    logits, lse, q_pos, scores, stride_pos, sizes, blocks, tiles,
    h: tl.constexpr, rule: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """scores [B,S,G,blocks]: the sum of p = 2^(logit - lse2) over a group's heads and the compressed keys that cover a block, each as often
    as it covers pieces of the block; 0 for blocks that the row does not see.

    Grid: one program per row [B,S,G] and tile of blocks. Tile: logits [HEADS, BLOCKS * PIECES] of the keys that begin in BLOCKS blocks, of
    which the first is another tile's: it gives what spills into the second.
    """
    REACH: tl.constexpr = rule.compress_block // rule.compress_stride
    STEP: tl.constexpr = rule.block_size // rule.compress_stride
    number = tl.program_id(0)
    row, first = (number // tiles).to(tl.int64), number % tiles * (BLOCKS - 1) - 1
    g, s, b = row % sizes.G, row // sizes.G % sizes.S, row // sizes.G // sizes.S
    head, r = tl.arange(0, HEADS), tl.arange(0, BLOCKS * PIECES)
    i = r % PIECES
    key = (first + r // PIECES) * STEP + i
    counted = (i < STEP) & (key >= 0) & (key < seen_keys(q_pos, stride_pos, b, s, sizes, rule))
    lse2 = tl.load(lse + row * h + head, mask=head < h, other=0.0) * LOG2_E
    lse2 = tl.where(lse2 == float("-inf"), 0.0, lse2)  # of rows that see no key
    at = logits + ((b * sizes.G + g) * sizes.S + s) * h * sizes.C
    x = tl.load(at + (head[:, None] * sizes.C + key[None, :]), mask=(head < h)[:, None] & counted[None, :], other=float("-inf"))
    p = tl.sum(tl.exp2(x - lse2[:, None]), 0)
    own = tl.sum((p * tl.minimum(REACH, STEP - i)).reshape(BLOCKS, PIECES), 1)
    block = tl.arange(0, BLOCKS)
    if REACH > 1:
        spill = tl.sum((p * tl.maximum(REACH - STEP + i, 0)).reshape(BLOCKS, PIECES), 1)
        own += tl.gather(spill, (block + BLOCKS - 1) % BLOCKS, 0)
    tl.store(scores + row * blocks + first + block, own, mask=(block > 0) & (first + block < blocks))


def takes(call: ChooseCall) -> bool:
    """Whether the kernels run for a call over pages: few rows, in 16 or 32 bits."""
    return call.q.shape[1] * call.q.shape[3] <= MOST_ROWS and call.q.element_size() <= 4 and call.q.numel() > 0


def choose(call: ChooseCall, config: KernelConfig, o: Tensor, lse: Tensor, scores: Tensor) -> None:
    """Write o [B,S,G,h,Dv], lse [B,S,G,h] and scores [B,S,G,blocks] float32, all contiguous, of a call over pages with a positive scale."""
    assert call.pages is not None
    B, S, G, h, _ = call.q.shape
    sizes = Sizes(S, call.C, G, 0, 1, 0)
    logits = lse.new_empty(B, G, S * h, call.C)
    parts = _parts(call, B * G)
    to_o, to_lse = (o, lse) if parts == 1 else (lse.new_empty(lse.numel(), parts, o.shape[-1]), lse.new_empty(lse.numel(), parts))
    table, skipped = call.pages
    slots = call.k.shape[2]
    _attention(dims_of(call), call.rule, config, tile_size(S * h), slots, skipped, parts > 1).launch(
        B * G * parts,
        (call.q, call.k, call.v, table, call.q_pos, to_o, to_lse, logits),
        (strides_of(call), table.stride(0), sizes, parts, call.scale_log2()),
    )
    if parts > 1:
        combine(to_o, to_lse, o, lse, parts)
    kernel = _importance(h, call.rule)
    tiles = -(-call.blocks // (kernel.constants["BLOCKS"] - 1))
    kernel.launch(B * S * G * tiles, (logits, lse, call.q_pos, scores), (strides_of(call).pos, sizes, call.blocks, tiles))


def _parts(call: ChooseCall, programs: int) -> int:
    """Programs of a sequence and group: so many that all of them fill the GPU."""
    sms = device_info(call.q.device).sm_count if call.q.is_cuda else SMS_WHEN_INTERPRETED
    return max(1, min(MOST_PARTS, PER_SM * sms // max(1, programs), -(-call.C // LEAST_KEYS)))


@functools.lru_cache(REMEMBERED)
def _attention(dims: Dims, rule: Rule, config: KernelConfig, rows: int, slots: int, skipped: int, split: bool) -> Kernel:
    pages: dict[str, Any] = {"SLOTS": slots, "SKIPPED": skipped, "SPLIT": split}
    return Kernel(attention_kernel, dims=dims, rule=rule.of_keys(), ROWS=rows, BLOCK_K=config.block_l, **pages, **options(config))


@functools.lru_cache(REMEMBERED)
def _importance(h: int, rule: Rule) -> Kernel:
    heads, pieces = tile_size(h, 1), tile_size(rule.pieces, 1)
    blocks = max(2, IMPORTANCE_TILE // (heads * pieces))
    return Kernel(importance_kernel, h=h, rule=rule.of_keys(), HEADS=heads, BLOCKS=blocks, PIECES=pieces, num_warps=4)
