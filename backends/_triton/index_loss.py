"""The indexer's KL loss and its gradients, KV tile by KV tile (nsa_sel/index_loss.py).

For a row and its visible selected keys j, with base-2 logits of the index branch s_j = index_scale * log2 e * iq.ik_j:

    P_j     = mean over the h heads of 2^(scale * log2 e * q.k_j - lse2)      the main attention's probabilities
    pi_j    = 2^(s_j - L),  L = log2 sum 2^s_j                                the indexer's probabilities
    loss    = sum_j P_j (log P_j - log pi_j)
    ds_j    = weight (pi_j - P_j)       diq = index_scale sum_j ds_j ik_j     dik_j = index_scale sum over rows of ds_j iq

Three passes, over the row lists of key_to_rows.py:
    lse_kernel     for every (row, tile) the log-sum-exp of its index logits, which join_lse_kernel joins to L
    loss_kernel    for every (row, tile) its share of loss and of diq; for every piece of a tile's list, its sum of dik
    sum_rows_kernel, sum_keys_kernel    add these in the order of tiles and of pieces: no atomics, bit-equal

Without a selection (dense) the same kernels' steps take adjacent rows (index_loss_dense.py).

The products q k^T of all heads dominate, and are computed once. Products are transposed, keys by (head, row) pairs, with
the rows of a head adjacent: the sum over heads then adds registers of one thread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton import arguments
from nsa_sel.backends._triton.dkdv import part_number
from nsa_sel.backends._triton.key_to_rows import list_start
from nsa_sel.backends._triton.rows import load_range, row_limit
from nsa_sel.backends._triton.softmax import LN_2, LOG2_E, LOWEST, add_product, dot, split_products
from nsa_sel.backends._triton.tiles import (
    MIN_TILE,
    key_pointers,
    load_columns,
    load_split,
    row_pointers,
    store_columns,
    store_split,
    tile_size,
)
from nsa_sel.backends._triton.units import highest_limit, list_tile, piece_bounds
from nsa_sel.backends._triton.walk import empty_dq
from nsa_sel.backends.triton_block import slot_logits, slot_used, unit_rows
from nsa_sel.core import call as calls
from nsa_sel.core.call import Call
from nsa_sel.settings.schema import KernelConfig

REDUCED = 4  # rows per program of the kernels that add shares of rows
KEYS = 16  # keys per program of the kernels that add partial sums of index keys


@triton.jit
def entry_keys(
    ranges, bits, q_pos, stride_pos, entry, b, g, s, listed, sizes,
    N: tl.constexpr, REACH: tl.constexpr, WHOLE: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Return which keys the rows s [E] of a tile's list see: [low, high), and bits of blocks (unused without `bits`).

    WHOLE: a row's range covers its tile up to the causal clamp. SHARE: groups that share the ranges of a row.
    """
    S, S_kv, G = sizes
    limit = row_limit(q_pos, stride_pos, b, s, S, S_kv)
    of_row = ((b * S + s) * G + g) // SHARE * N
    if WHOLE:
        low, high = entry * 0, tl.where(listed, limit, 0)
    else:
        low, high = load_range(ranges + (of_row + entry // REACH % N) * 2, limit, listed)
    chosen = low if bits is None else tl.load(bits + of_row + entry % N, mask=listed, other=0)
    return low, high, chosen


@triton.jit
def visible_keys(bounds, q_pos, stride_pos, b, s, listed, sizes):
    """Return the keys [low, high) that the rows s [E] see without a selection.

    bounds: of a packed batch, [2,S], where each row's sequence begins and ends (S and 0 in padding); else None.
    """
    S, S_kv, _ = sizes
    high = tl.where(listed, row_limit(q_pos, stride_pos, b, s, S, S_kv), 0)
    low = high * 0 if bounds is None else tl.load(bounds + s, mask=listed, other=0)
    return low, high


@triton.jit
def rows_at(entries, e, at, listed, EACH: tl.constexpr):
    """Return the entries and the rows [E] at index `at` from e on: of a list, or rows e, e + 1, ... if `entries` is
    None."""
    if entries is None:
        row = tl.where(listed, e + at, e).to(tl.int64)
        return row, row
    else:
        entry = tl.load(entries + e + at, mask=listed, other=0)
        return entry, (entry // EACH).to(tl.int64)


@triton.jit
def sees(key, within, low, high, chosen, HAS_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return whether rows see keys; the arguments broadcast. within: index of the key in its tile."""
    seen = (key >= low) & (key < high)
    if HAS_BITS:
        seen &= ((chosen >> (within // BLOCK)) & 1) != 0
    return seen


@triton.jit
def lse_kernel(
    index_q, index_k, ranges, bits, q_pos, part_lse, entries, ends, piece_list, strides, sizes, lists, c,
    dims: tl.constexpr, N: tl.constexpr, REACH: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Compute the base-2 log-sum-exp of index logits for every entry of one piece of the unit's lists.

    Grid: one program per piece. Tiles: index keys [BLOCK_L, Di], loaded once per list; index queries [ROWS, Di].
    """
    S, S_kv, G = sizes
    e, stop = piece_bounds(ends, lists, tl.program_id(0))
    if e < stop:
        number = tl.load(piece_list + tl.program_id(0))
        while e < stop:
            e1 = tl.minimum(list_start(ends, number + 1, lists.stretches), stop)
            if e < e1:
                bg, b, g, column = list_tile(number, lists, G, BLOCK_L)
                k_rows = key_pointers(index_k, strides.k, b, g, column)
                k_tile, k_rest = load_split(k_rows, column < S_kv, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
                first_slot = ((bg - lists.first_pair) * lists.section - lists.first_row) * (N * REACH)
                count = (e1 - e).to(tl.int32)
                for i in range(0, count, ROWS):
                    at = i + tl.arange(0, ROWS)
                    listed = at < count
                    entry, s = rows_at(entries, e, at, listed, N * REACH)
                    q_rows = row_pointers(index_q, strides.q, b, g, s, 0)
                    q_tile, q_rest = load_split(q_rows, listed, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
                    low, high, chosen = entry_keys(
                        ranges, bits, q_pos, strides.pos, entry, b, g, s, listed, sizes, N, REACH, WHOLE, dims.SHARE
                    )  # fmt: skip
                    seen = sees(
                        column[None, :], tl.arange(0, BLOCK_L)[None, :], low[:, None], high[:, None], chosen[:, None], bits is not None,
                        BLOCK,
                    )  # fmt: skip
                    logits = split_products(q_tile, q_rest, k_tile, k_rest, dims.BLOCK_REST) * c  # [ROWS, BLOCK_L]
                    logits = tl.where(seen, logits, float("-inf"))
                    m = tl.maximum(tl.max(logits, 1), LOWEST)  # [ROWS]
                    l = tl.where(listed, tl.sum(tl.exp2(logits - m[:, None]), 1), 1.0)
                    tl.store(part_lse + first_slot + entry, m + tl.log2(l), mask=listed)
            e = e1
            number += 1


@triton.jit
def join_lse_kernel(
    part_lse, ranges, q_pos, index_lse, stride_pos, sizes, unit,
    dims: tl.constexpr, N: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Join the shares of R rows to index_lse [B,S,G], in base 2; -inf for rows without keys. Grid: one program per R rows
    of the unit."""
    ACC: tl.constexpr = index_lse.dtype.element_ty
    out, row, limit, first_slot, exists = unit_rows(q_pos, stride_pos, sizes, unit, N * REACH, dims, R)
    m = tl.full([R], LOWEST, ACC)
    l = tl.zeros([R], ACC)
    for i in range(0, N * REACH, CHUNK):
        _, logits = slot_logits(part_lse, ranges, row, limit, first_slot, exists, i, dims, N, REACH, WIDTH, CHUNK)
        top = tl.max(tl.maximum(logits, m[:, None]), 1)
        l = l * tl.exp2(m - top) + tl.sum(tl.exp2(logits - top[:, None]), 1)
        m = top
    has_keys = l != 0.0
    tl.store(index_lse + out, tl.where(has_keys, m + tl.log2(tl.where(has_keys, l, 1.0)), float("-inf")), mask=exists)


@triton.jit
def mass_of_heads(
    q, lse, k_tile, k_rest, entries, e, i, count, first_head, b, g, stride_q, sizes, c,
    dims: tl.constexpr, EACH: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Return the sum over HEADS heads from first_head on of the main attention's probabilities [BLOCK_L, E]."""
    S, _, G = sizes
    r = tl.arange(0, E * HEADS)  # [E * HEADS], as the row indices below; the rows of a head are adjacent
    listed = i + r % E < count
    _, s = rows_at(entries, e, i + r % E, listed, EACH)
    head = first_head + r // E
    exists = listed & (head < dims.h)
    q_tile, q_rest = load_split(row_pointers(q, stride_q, b, g, s, head), exists, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
    lse2 = tl.load(lse + ((b * S + s) * G + g) * dims.h + head, mask=exists, other=float("inf")) * LOG2_E
    logits = split_products(k_tile, k_rest, q_tile, q_rest, dims.BLOCK_REST)  # [BLOCK_L, E * HEADS]
    p = tl.exp2(logits * c - lse2[None, :])
    return tl.sum(p.reshape(k_tile.shape[0], HEADS, E), 1)


@triton.jit
def list_loss(
    q, lse, index_q, k_tiles, index_tiles, finite_tiles, ranges, bits, q_pos, index_lse, weights, part_loss, part_dq, entries, e, count,
    first_slot, each, b, g, column, strides, index_strides, sizes, c, index_c, index_scale,
    dims: tl.constexpr, index_dims: tl.constexpr, N: tl.constexpr, REACH: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    E: tl.constexpr, HEADS: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Store the shares of loss and diq of entries [e, e + count) of a tile's list, or of these rows if `entries` is None
    (dense); return dik / index_scale (two column tiles), summed over them.

    A step takes E entries with all h heads, HEADS heads at a time. ranges: of the selection, or bounds if dense. each:
    slots from one entry to the next.
    """
    S, _, G = sizes
    EACH: tl.constexpr = N * REACH
    PARTS: tl.constexpr = (dims.h + HEADS - 1) // HEADS
    REST: tl.constexpr = index_dims.BLOCK_REST
    L: tl.constexpr = column.shape[0]
    # Differences of probabilities would be subnormal in float16.
    UP: tl.constexpr = 4096.0 if index_q.dtype.element_ty == tl.float16 else 1.0
    sums = empty_dq(L, index_dims, lse.dtype.element_ty)
    for i in range(0, count, E):
        at = i + tl.arange(0, E)  # [E], as the row indices below
        listed = at < count
        entry, s = rows_at(entries, e, at, listed, EACH)
        iq_rows = row_pointers(index_q, index_strides.q, b, g, s, 0)
        iq_tile, iq_rest = load_split(iq_rows, listed, index_dims.Dk, index_dims.BLOCK_D, REST)  # [E, Di]
        mass = tl.zeros([L, E], lse.dtype.element_ty)
        if UNROLLED:
            for part in tl.static_range(PARTS):
                mass += mass_of_heads(
                    q, lse, k_tiles[0], k_tiles[1], entries, e, i, count, part * HEADS, b, g, strides.q, sizes, c, dims, EACH, E, HEADS
                )  # fmt: skip
        else:
            for part in range(PARTS):
                mass += mass_of_heads(
                    q, lse, k_tiles[0], k_tiles[1], entries, e, i, count, part * HEADS, b, g, strides.q, sizes, c, dims, EACH, E, HEADS
                )  # fmt: skip
        if entries is None:
            low, high = visible_keys(ranges, q_pos, strides.pos, b, s, listed, sizes)
            chosen = low
        else:
            low, high, chosen = entry_keys(
                ranges, bits, q_pos, strides.pos, entry, b, g, s, listed, sizes, N, REACH, WHOLE, index_dims.SHARE
            )  # fmt: skip
        within = tl.arange(0, L)[:, None]
        seen = sees(column[:, None], within, low[None, :], high[None, :], chosen[None, :], bits is not None, BLOCK)  # [L, E]
        row = (b * S + s) * G + g
        lse2 = tl.load(index_lse + row, mask=listed, other=0.0)
        log_pi = split_products(index_tiles[0], index_tiles[1], iq_tile, iq_rest, REST) * index_c - lse2[None, :]  # [L, E]
        # Hidden keys may be NaN: select by the mask instead of multiplying by it.
        mass = tl.where(seen, mass * (1.0 / dims.h), 0.0)  # P
        share = tl.where(mass == 0.0, 0.0, mass * (tl.log2(tl.where(mass == 0.0, 1.0, mass)) - log_pi))  # [L, E]
        slot = first_slot + entry * each  # [E]
        tl.store(part_loss + slot, tl.sum(share, 0) * LN_2, mask=listed)
        if part_dq is not None:
            ds = tl.where(seen, tl.exp2(log_pi), 0.0) - mass  # [L, E]
            if weights is not None:
                ds *= tl.load(weights + row, mask=listed, other=0.0)[None, :]
            ds = (ds * UP).to(iq_tile.dtype)
            sums = add_product(sums[0], ds, iq_tile), add_product(sums[1], ds, iq_rest) if REST > 0 else sums[1]
            scale = index_scale / UP
            store_transposed(part_dq + slot * index_dims.Dk, dot(finite_tiles[0].T, ds) * scale, listed, 0, index_dims.Dk)
            if REST > 0:
                rest = dot(finite_tiles[1].T, ds) * scale
                store_transposed(part_dq + slot * index_dims.Dk, rest, listed, index_dims.BLOCK_D, index_dims.Dk)
    return sums[0] / UP, sums[1] / UP


@triton.jit
def store_transposed(rows, x, exists, first: tl.constexpr, D: tl.constexpr):
    """Store x [WIDTH, E] to columns [first, min(first + WIDTH, D)) of the rows at pointers `rows` [E] that exist."""
    d = first + tl.arange(0, x.shape[0])
    tl.store(rows[None, :] + d[:, None], x.to(rows.dtype.element_ty), mask=exists[None, :] & (d < D)[:, None])


@triton.jit
def finite(x):
    """Return x with 0 in place of NaN and infinities."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def loss_kernel(
    q, k, lse, index_q, index_k, ranges, bits, q_pos, index_lse, weights, part_loss, part_dq, part_dk, entries, ends, piece_list,
    strides, index_strides, sizes, lists, c, index_c, index_scale,
    dims: tl.constexpr, index_dims: tl.constexpr, N: tl.constexpr, REACH: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    BY_ENTRY: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr, BLOCK_L: tl.constexpr, UNROLLED: tl.constexpr, STRICT: tl.constexpr,
):  # fmt: skip
    """Compute the shares of loss and diq of one piece of the unit's lists, and the sums of dik of each list in it.

    Grid: one program per piece. Tiles: k [BLOCK_L, Dk] and index_k [BLOCK_L, Di], loaded once per list; q
    [E * HEADS, Dk] and index_q [E, Di] per step.

    part_dq, part_dk: None for the loss alone.
    weights: [B,S,G], the gradient of each row's loss; None for ones.
    STRICT: keys of a tile that no row sees, but some could, may hold NaN.
    """
    S, S_kv, G = sizes
    e, stop = piece_bounds(ends, lists, tl.program_id(0))
    if e < stop:
        number = tl.load(piece_list + tl.program_id(0))
        while e < stop:
            e1 = tl.minimum(list_start(ends, number + 1, lists.stretches), stop)
            if e < e1:
                bg, b, g, column = list_tile(number, lists, G, BLOCK_L)
                # Keys that no row may see can hold NaN, which ds ik would spread to diq.
                reachable = column < highest_limit(entries, q_pos, strides.pos, e, e1, b, S, S_kv, N * REACH)
                k_rows = key_pointers(k, strides.k, b, g, column)
                k_tiles = load_split(k_rows, reachable, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
                ik_rows = key_pointers(index_k, index_strides.k, b, g, column)
                index_tiles = load_split(ik_rows, reachable, index_dims.Dk, index_dims.BLOCK_D, index_dims.BLOCK_REST)
                finite_tiles = (finite(index_tiles[0]), finite(index_tiles[1])) if STRICT else index_tiles
                first_slot = ((bg - lists.first_pair) * lists.section - lists.first_row) * (N * REACH)
                sums = list_loss(
                    q, lse, index_q, k_tiles, index_tiles, finite_tiles, ranges, bits, q_pos, index_lse, weights, part_loss, part_dq,
                    entries, e, (e1 - e).to(tl.int32), first_slot, 1, b, g, column, strides, index_strides, sizes, c, index_c, index_scale,
                    dims, index_dims, N, REACH, WHOLE, BLOCK, E, HEADS, UNROLLED,
                )  # fmt: skip
                if part_dk is not None:
                    first = e - list_start(ends, lists.first_list, lists.stretches)
                    part = part_number(number, lists, tl.program_id(0), first, 1, BY_ENTRY) * BLOCK_L + tl.arange(0, BLOCK_L)
                    to_dk = part_dk + part * index_dims.Dk
                    store_split(to_dk, sums[0] * index_scale, sums[1] * index_scale, part >= 0, index_dims.Dk, index_dims.BLOCK_REST)
            e = e1
            number += 1


@triton.jit
def sum_rows_kernel(
    part_loss, part_dq, ranges, q_pos, loss, dq, stride_pos, sizes, unit,
    dims: tl.constexpr, N: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Add the shares of R rows in the order of their tiles: loss [B,S,G] and, if not None, dq [B,S,G,Di].

    Grid: one program per R rows of the unit.
    """
    ACC: tl.constexpr = part_loss.dtype.element_ty
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    out, row, limit, slot, exists = unit_rows(q_pos, stride_pos, sizes, unit, N * REACH, dims, R)
    total = tl.zeros([R], ACC)
    acc = tl.zeros([R, BLOCK_D], ACC)
    for i in range(0, N * REACH):
        used = slot_used(ranges, row, i, limit, exists, N, REACH, WIDTH)
        total += tl.load(part_loss + slot + i, mask=used, other=0.0)
        if dq is not None:
            acc += load_columns(part_dq + (slot + i) * dims.Dk, used, 0, dims.Dk, BLOCK_D).to(ACC)
    tl.store(loss + out, total, mask=exists)
    if dq is not None:
        store_columns(dq + out * dims.Dk, acc, exists, 0, dims.Dk)


@triton.jit
def sum_keys_kernel(
    part_dk, dk, ends, stride_dk, S_kv, G, lists, first_item,
    dims: tl.constexpr, BLOCK_L: tl.constexpr, ROWS: tl.constexpr, SHARED: tl.constexpr, BY_ENTRY: tl.constexpr,
):  # fmt: skip
    """Add the unit's partial sums of index keys to dk [B,G,S_kv,Di], or [B,1,S_kv,Di] if SHARED, in the order of groups
    and pieces.

    Grid: one program per ROWS of the BLOCK_L keys of a tile of an item: a batch entry if SHARED, else a pair b*G + g.
    """
    PIECES: tl.constexpr = BLOCK_L // ROWS
    tile = tl.program_id(0) // PIECES % lists.tiles
    item = first_item + (tl.program_id(0) // PIECES // lists.tiles).to(tl.int64)
    within = tl.program_id(0) % PIECES * ROWS + tl.arange(0, ROWS)
    column = tile * BLOCK_L + within
    exists = column < S_kv
    end_pair = lists.first_pair + (lists.end_list - lists.first_list) // lists.tiles
    first, last = item, item + 1
    to_dk = dk + item // G * stride_dk[0] + item % G * stride_dk[1]
    if SHARED:
        first, last = tl.maximum(item * G, lists.first_pair), tl.minimum((item + 1) * G, end_pair)
        to_dk = dk + item * stride_dk[0]
    to_dk += column.to(tl.int64) * stride_dk[2]
    unit_begin = list_start(ends, lists.first_list, lists.stretches)
    acc = load_columns(to_dk, exists, 0, dims.Dk, dims.BLOCK_D)
    for pair in range(first, last):
        number = (lists.first_list + (pair - lists.first_pair) * lists.tiles + tile).to(tl.int64)
        begin = list_start(ends, number, lists.stretches) - unit_begin
        end = list_start(ends, number + 1, lists.stretches) - unit_begin
        if begin < end:
            for i in range(begin // lists.piece, (end - 1) // lists.piece + 1):
                part = part_number(number, lists, i, tl.maximum(begin, i * lists.piece), 1, BY_ENTRY) * BLOCK_L + within
                acc += load_columns(part_dk + part * dims.Dk, exists, 0, dims.Dk, dims.BLOCK_D)
    store_columns(to_dk, acc, exists, 0, dims.Dk)


class Results(NamedTuple):
    """The results of the kernels. Gradients are None if only the loss is asked for."""

    loss: Tensor  # [B,S,G], in lse's dtype
    dq: Tensor | None  # [B,S,G,Di]
    dk: Tensor | None  # [B,G,S_kv,Di] or [B,1,S_kv,Di], in lse's dtype; passes add to it


class Work(NamedTuple):
    """The arguments of a pass.

    Attributes:
        main, indexer: the logits of both (`IndexLossCall.main`, `index`).
        lse: [B,S,G,h], contiguous.
        weights: [B,S,G], contiguous, or None.
        config: block_l keys of a tile; rows: (head, row) pairs per product, and rows per step of the log-sum-exp.
        unrolled: up to so many products of a step are unrolled, so that loads for the next step overlap with them.
    """

    main: Call
    indexer: Call
    lse: Tensor
    weights: Tensor | None
    config: KernelConfig
    unrolled: int

    def steps(self) -> dict[str, Any]:
        """Return the constants of the kernels that compute the loss."""
        heads, config = arguments.heads(self.main), self.config
        at_once = min(tile_size(heads.h, 1), config.rows // MIN_TILE)
        return {
            "dims": arguments.split_dims(heads), "index_dims": self.index_dims(), "E": config.rows // at_once, "HEADS": at_once,
            "UNROLLED": heads.h <= self.unrolled * at_once, **arguments.options(config),
        }  # fmt: skip

    def index_dims(self) -> arguments.Dims:
        return arguments.split_dims(arguments.heads(self.indexer))

    def numbers(self) -> tuple[tuple[Any, ...], tuple[float, ...]]:
        """Return what the same kernels take first, strides and sizes, and last, factors of logits."""
        main, index = self.main, self.indexer
        factors = main.scale * calls.LOG2_E, index.scale * calls.LOG2_E, index.scale
        return (arguments.strides(main), arguments.strides(index), arguments.sizes(index)), factors


def items_of(first_pair: int, pairs: int, G: int, dk: Tensor) -> tuple[int, int, bool]:
    """Return the first item whose index keys these pairs add to, the number of items, and whether an item is a batch entry,
    whose groups share keys, instead of a pair."""
    if dk.shape[1] > 1 or G == 1:
        return first_pair, pairs, False
    first = first_pair // G
    return first, (first_pair + pairs - 1) // G + 1 - first, True
