"""Choose blocks for a few new tokens over compressed keys in pages, without gathering them; K and V are loaded once.

    attention    o and lse of all new tokens of a sequence, and each head's share of every block: what its weights add
                 to the block's score, relative to the largest logit so far
    importance   scores of blocks from the shares and lse (Eq. 8 to 10); then `top_n`

If few sequences would not fill the GPU, a sequence's compressed keys are cut into parts, one program each;
`importance_kernel` also joins them (combine.py). The device decides where parts end: tables have room for the longest
sequence, and a sequence's programs share the keys that it has.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.arguments import Dims, dims_of, options
from nsa_sel.backends._triton.choose_rows import Sizes, seen_keys, strides_of
from nsa_sel.backends._triton.combine import SMS_WHEN_INTERPRETED, combine_row, joined_lse
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.softmax import LN_2, LOWEST, finish_softmax, split_products, weights_step
from nsa_sel.backends._triton.tiles import cached_pointers, load_columns, load_split, row_pointers, store_columns, tile_size
from nsa_sel.backends._triton.top_n import chooses, top_n
from nsa_sel.core.call import ChooseCall, Rule, device_info
from nsa_sel.settings.schema import KernelConfig

MOST_ROWS = 64  # most new tokens of a sequence times heads of a group: they are one tile
MOST_PIECES = 32  # most pieces per block: a step of attention takes whole blocks
LEAST_KEYS = 64  # fewest keys per part, if the sequence has that many
MOST_PARTS = 64
PER_SM = 2  # programs per multiprocessor if there are few sequences
SHARES = 1024  # shares per program of `importance_kernel`


@triton.jit
def attention_kernel(
    q, k, v, table, q_pos, o, part_lse, shares, ends, strides, stride_table, sizes, parts, steps, scale_log2,
    dims: tl.constexpr, rule: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, PIECES: tl.constexpr, SLOTS: tl.constexpr,
    SKIPPED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute o and base-2 lse of one part of a sequence's keys, and each head's share of every block.

    Stores, for every step of BLOCKS blocks with the largest logit so far (`peak`, base 2):
        o       [B,S,G,h,Dv], or if SPLIT that of parts [rows,parts,Dv];  part_lse [rows,parts]
        shares  [B,G,S * h,steps * BLOCKS]: sums of p = 2^(logit - peak) over the compressed keys that begin in a block
                or in the one before it, each times the pieces of the block that it covers
        ends    [B,G,S * h,steps,2]: the peak, and the share that the step's last block adds to the next step's first,
                whose peak may differ

    Grid: one program per sequence, group and part.
    Tiles: q [ROWS, BLOCK_D + BLOCK_REST], k [BLOCKS * PIECES, BLOCK_D + BLOCK_REST], v [BLOCKS * PIECES, BLOCK_DV].
    Keys that no row of the sequence sees are not read. The table is read one step ahead, so that no step waits for it.
    """
    BLOCK_DV: tl.constexpr = dims.BLOCK_DV
    STEP: tl.constexpr = rule.block_size // rule.compress_stride
    REACH: tl.constexpr = rule.compress_block // rule.compress_stride
    number = tl.program_id(0)
    part, g, b = number % parts, (number // parts % sizes.G).to(tl.int64), (number // parts // sizes.G).to(tl.int64)
    row = tl.arange(0, ROWS)
    exists = row < sizes.S * dims.h
    s, head = tl.minimum(row // dims.h, sizes.S - 1).to(tl.int64), (row % dims.h).to(tl.int64)
    q_tile, q_rest = load_split(row_pointers(q, strides.q, b, g, s, head), exists, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
    seen = tl.where(exists, seen_keys(q_pos, strides.pos, b, s, sizes, rule), 0)
    end = tl.max(seen, 0)
    needed = tl.cdiv(end, BLOCKS * STEP)
    share = tl.cdiv(needed, parts)
    first, stop = part * share, tl.minimum((part + 1) * share, needed)

    r, block = tl.arange(0, BLOCKS * PIECES), tl.arange(0, BLOCKS)
    i = r % PIECES
    offset = r // PIECES * STEP + i + SKIPPED
    limit = tl.where(i < STEP, end + SKIPPED, 0)
    pages = table + b * stride_table
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    m = tl.full([ROWS], LOWEST, tl.float32)
    number = (b * sizes.G + g) * sizes.S * dims.h + row
    to_shares, to_ends = shares + number * steps * BLOCKS, ends + number * steps * 2
    piece = first * (BLOCKS * STEP) + offset
    coming = tl.load(pages + piece // SLOTS, mask=piece < limit, other=0)
    for step in range(first, stop):
        piece, page = step * (BLOCKS * STEP) + offset, coming
        coming = tl.load(pages + (piece + BLOCKS * STEP) // SLOTS, mask=piece + BLOCKS * STEP < limit, other=0)
        is_key = piece < limit
        k_rows, v_rows = cached_pointers(k, strides.k, b, g, piece, page, SLOTS), cached_pointers(v, strides.v, b, g, piece, page, SLOTS)
        k_tile, k_rest = load_split(k_rows, is_key, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
        v_tile = load_columns(v_rows, is_key, 0, dims.Dv, BLOCK_DV)
        # products, p: [ROWS, BLOCKS * PIECES]
        products = split_products(q_tile, q_rest, k_tile, k_rest, dims.BLOCK_REST)
        sees = is_key[None, :] & ((piece - SKIPPED)[None, :] < seen[:, None])
        p, alpha, l, m = weights_step(tl.where(sees, products, float("-inf")), True, l, m, scale_log2, v_tile.dtype)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee", out_dtype=acc.dtype)
        # own, spill: [ROWS, BLOCKS], shares of keys that begin in a block, in it and in the next block
        own = tl.sum((p * tl.minimum(REACH, STEP - i)[None, :]).reshape(ROWS, BLOCKS, PIECES), 2)
        spill = tl.sum((p * tl.maximum(REACH - STEP + i, 0)[None, :]).reshape(ROWS, BLOCKS, PIECES), 2)
        before = tl.gather(spill, tl.broadcast_to(tl.maximum(block - 1, 0)[None, :], ROWS, BLOCKS), 1)
        own += tl.where((block > 0)[None, :], before, 0.0)
        tl.store(to_shares[:, None] + (step * BLOCKS + block)[None, :], own, mask=exists[:, None])
        over = tl.sum(tl.where((block == BLOCKS - 1)[None, :], spill, 0.0), 1)
        tl.store(to_ends[:, None] + (2 * step + tl.arange(0, 2))[None, :], tl.join(m * scale_log2, over), mask=exists[:, None])

    o_tile, lse2 = finish_softmax(acc, l, m, scale_log2)
    to = ((b * sizes.S + s) * sizes.G + g) * dims.h + head
    tl.store(part_lse + to * parts + part, lse2, mask=exists)
    store_columns(o + (to * parts + part if SPLIT else to) * dims.Dv, o_tile, exists, 0, dims.Dv)


@triton.jit
def importance_kernel(
    part_lse, part_o, shares, ends, q_pos, o, lse, scores, stride_pos, sizes, rows, parts, steps, blocks,
    h: tl.constexpr, Dv: tl.constexpr, rule: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_DV: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Store scores [B,S,G,blocks], the sum of all heads' shares relative to lse (0 for blocks that the row does not
    see), and lse [B,S,G,h] from that of the parts. If o is in parts, also store o [B,S,G,h,Dv].

    Grid: one program per row [B,S,G] and STEPS steps of attention, then one per head of a row to join parts of o.
    Tile: shares [HEADS, STEPS, BLOCKS].
    """
    STEP: tl.constexpr = rule.block_size // rule.compress_stride
    number, tiles = tl.program_id(0).to(tl.int64), tl.cdiv(steps, STEPS)
    if number >= rows * tiles:
        combine_row(part_o, part_lse, o, number - rows * tiles, parts, Dv, PARTS, BLOCK_DV)
    else:
        row, first = number // tiles, (number % tiles).to(tl.int32) * STEPS
        g, s, b = row % sizes.G, row // sizes.G % sizes.S, row // sizes.G // sizes.S
        head, part = tl.arange(0, HEADS), tl.arange(0, PARTS)
        seen = seen_keys(q_pos, stride_pos, b, s, sizes, rule)
        at = (((b * sizes.G + g) * sizes.S + s) * h + head[:, None]) * steps  # a head's first step
        step, block, exists = first + tl.arange(0, STEPS), tl.arange(0, BLOCKS), (head < h)[:, None]
        inside = exists & (step * (BLOCKS * STEP) < seen)[None, :]
        carries = exists & ((step > 0) & (step * (BLOCKS * STEP) - STEP < seen))[None, :]  # the block before has a key that is seen
        is_part = exists & (part < parts)[None, :]
        # All loads come first: none waits for another.
        of_parts = tl.load(part_lse + (row * h + head[:, None]) * parts + part[None, :], mask=is_part, other=float("-inf"))
        end = ends + 2 * (at + step[None, :])
        peak = tl.load(end, mask=inside, other=0.0)
        from_step = shares + ((at + step[None, :]) * BLOCKS)[:, :, None]
        share = tl.load(from_step + block[None, None, :], mask=inside[:, :, None], other=0.0)
        last_peak, over = tl.load(end - 2, mask=carries, other=0.0), tl.load(end - 1, mask=carries, other=0.0)

        lse2, some = joined_lse(of_parts, 1)
        own = tl.sum(share * tl.exp2(peak - lse2)[:, :, None], 0)
        carried = tl.sum(over * tl.exp2(last_peak - lse2), 0)
        own += tl.where((block == 0)[None, :], carried[:, None], 0.0)
        at_block = step[:, None] * BLOCKS + block[None, :]
        tl.store(scores + row * blocks + at_block, own, mask=at_block < blocks)
        of_first = (head + first * HEADS < h)[:, None]  # steps; other programs leave it
        tl.store(lse + row * h + head[:, None], tl.where(some, lse2 * LN_2, float("-inf")), mask=of_first)


def takes(call: ChooseCall) -> bool:
    """Return whether the kernels take a call over pages: few rows, 16 or 32 bits, blocks that fit a step, and not too
    many for a program."""
    few = call.q.shape[1] * call.q.shape[3] <= MOST_ROWS and call.q.element_size() <= 4 and call.q.numel() > 0
    return few and call.rule.pieces <= MOST_PIECES and chooses(_blocks(call), call.rule.n)


def row_bytes(call: ChooseCall) -> int:
    """Return the most bytes of shares, ends of steps, and scores of a row of all groups."""
    _, _, G, h, _ = call.q.shape
    return G * _blocks(call) * (3 * h + 1) * 4


def _blocks(call: ChooseCall) -> int:
    """Return the blocks per sequence that scores and compressed keys need."""
    return max(call.blocks, -(-call.C // call.rule.pieces))


def choose(call: ChooseCall, config: KernelConfig, o: Tensor, lse: Tensor, ranges: Tensor) -> None:
    """Write o [B,S,G,h,Dv], lse [B,S,G,h] float32 and ranges [B,S,G,n,2], all contiguous, of a call over pages with a
    positive scale."""
    assert call.pages is not None
    B, S, G, h, _ = call.q.shape
    sizes, rows, parts = Sizes(S, call.C, G, call.start, 1, 0), B * S * G, _parts(call, B * G)
    blocks = max(1, config.block_l // tile_size(call.rule.pieces, 1))  # of a step
    steps = -(-_blocks(call) // blocks)
    part_lse, shares = lse.new_empty(lse.numel(), parts), lse.new_empty(lse.numel(), steps * blocks)
    ends, part_o = lse.new_empty(lse.numel(), steps, 2), o if parts == 1 else lse.new_empty(lse.numel(), parts, o.shape[-1])
    table, skipped = call.pages
    strides = strides_of(call)
    _attention(dims_of(call.q, call.v), call.rule, config, tile_size(S * h), blocks, call.k.shape[2], skipped, parts > 1).launch(
        B * G * parts,
        (call.q, call.k, call.v, table, call.q_pos, part_o, part_lse, shares, ends),
        (strides, table.stride(0), sizes, parts, steps, call.scale_log2()),
    )
    scores = lse.new_empty(B, S, G, call.blocks)
    kernel = _importance(h, o.shape[-1], call.rule, blocks, tile_size(parts, 1))
    kernel.launch(
        rows * (-(-steps // kernel.constants["STEPS"]) + (h if parts > 1 else 0)),
        (part_lse, part_o, shares, ends, call.q_pos, o, lse, scores),
        (strides.pos, sizes, rows, parts, steps, call.blocks),
    )
    top_n(scores, ranges, call.rule.block_size, call.rule.first, call.rule.local, call.start, call.q_pos, rows=1)


def _parts(call: ChooseCall, programs: int) -> int:
    """Return the programs per sequence and group that fill the GPU."""
    sms = device_info(call.q.device).sm_count if call.q.is_cuda else SMS_WHEN_INTERPRETED
    return max(1, min(MOST_PARTS, PER_SM * sms // max(1, programs), -(-call.C // LEAST_KEYS)))


@functools.lru_cache(REMEMBERED)
def _attention(
    dims: Dims, rule: Rule, config: KernelConfig, rows: int, blocks: int, slots: int, skipped: int, split: bool
) -> Kernel:  # fmt: skip
    tiles = {"ROWS": rows, "BLOCKS": blocks, "PIECES": tile_size(rule.pieces, 1)}
    pages: dict[str, Any] = {"SLOTS": slots, "SKIPPED": skipped, "SPLIT": split}
    return Kernel(attention_kernel, dims=dims, rule=rule.of_keys(), **tiles, **pages, **options(config))


@functools.lru_cache(REMEMBERED)
def _importance(h: int, Dv: int, rule: Rule, blocks: int, parts: int) -> Kernel:
    heads = tile_size(h, 1)
    tiles = {"HEADS": heads, "BLOCKS": blocks, "STEPS": max(1, SHARES // (heads * blocks)), "PARTS": parts, "BLOCK_DV": tile_size(Dv)}
    return Kernel(importance_kernel, h=h, Dv=Dv, rule=rule.of_keys(), **tiles, num_warps=4)
