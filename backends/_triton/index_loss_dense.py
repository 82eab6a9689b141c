"""The indexer's KL loss over all visible keys, without row lists: the warm-up before sparse training.

Formulas and the step are those of index_loss.py. A program takes a tile of keys and a chunk of rows, in launches over a
section of rows, whose shares fit the workspace. No constant depends on the length, so that a new length compiles nothing.

A row sees the keys up to its position, in a packed batch from the beginning of its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton import arguments
from nsa_sel.backends._triton.index_loss import KEYS, REDUCED, Results, Work, items_of, list_loss, visible_keys
from nsa_sel.backends._triton.kernel import cached_kernel
from nsa_sel.backends._triton.softmax import LOWEST, split_products
from nsa_sel.backends._triton.tiles import key_pointers, load_columns, load_split, row_pointers, store_columns, store_split
from nsa_sel.backends.launcher.buffers import unwritten

CHUNK = 512  # rows per program


class Section(NamedTuple):
    """A launch over the rows [first_row, end_row) of the pairs b*G + g from first_pair on, as kernels take it.

    Shares are [pairs, rows, tiles], partial sums of index keys [pairs, chunks, tiles, BLOCK_L, Di].
    """

    first_pair: int
    pairs: int
    first_row: int
    end_row: int
    chunks: int
    tiles: int  # tiles of keys that any of the rows may see


@triton.jit
def dense_lse_kernel(
    index_q, index_k, bounds, q_pos, index_lse, strides, sizes, tiles, c, dims: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr
):  # fmt: skip
    """Compute index_lse [B,S,G], the base-2 log-sum-exp of index logits over all visible keys; -inf for rows without keys.

    Grid: one program per ROWS rows of a pair b*G + g; tiles: of rows.
    """
    S, S_kv, G = sizes
    pair, tile = tl.program_id(0) // tiles, tiles - 1 - tl.program_id(0) % tiles  # late rows, which see the most, first
    b, g = (pair // G).to(tl.int64), (pair % G).to(tl.int64)
    s = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
    exists = s < S
    s = tl.minimum(s, S - 1)
    q_tile, q_rest = load_split(row_pointers(index_q, strides.q, b, g, s, 0), exists, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
    low, high = visible_keys(bounds, q_pos, strides.pos, b, s, exists, sizes)
    m = tl.full([ROWS], LOWEST, index_lse.dtype.element_ty)
    l = tl.zeros([ROWS], index_lse.dtype.element_ty)
    first, end = tl.min(tl.where(low < high, low, S_kv), 0), tl.max(tl.where(low < high, high, 0), 0)
    for at in range(first // BLOCK_L * BLOCK_L, end, BLOCK_L):
        key = at + tl.arange(0, BLOCK_L)  # [BLOCK_L]
        k_rows = key_pointers(index_k, strides.k, b, g, key)
        k_tile, k_rest = load_split(k_rows, key < end, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
        logits = split_products(q_tile, q_rest, k_tile, k_rest, dims.BLOCK_REST) * c  # [ROWS, BLOCK_L]
        logits = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), logits, float("-inf"))
        top = tl.max(tl.maximum(logits, m[:, None]), 1)
        l = l * tl.exp2(m - top) + tl.sum(tl.exp2(logits - top[:, None]), 1)
        m = top
    has_keys = l != 0.0
    lse2 = tl.where(has_keys, m + tl.log2(tl.where(has_keys, l, 1.0)), float("-inf"))
    tl.store(index_lse + (b * S + s) * G + g, lse2, mask=exists)


@triton.jit
def rows_of_tile(bounds, q_pos, tile, sizes, BLOCK_L: tl.constexpr):
    """Return the rows [first, end) that may see keys of a tile."""
    S, S_kv, _ = sizes
    first, end = 0, S
    if q_pos is None:
        first = tl.maximum(tile * BLOCK_L - (S_kv - S), 0)
    if bounds is not None:  # rows are keys: up to the end of the sequence of the tile's last key
        key = tile * BLOCK_L + tl.arange(0, BLOCK_L)
        end = tl.max(tl.load(bounds + S + key, mask=key < S, other=0), 0)
    return first, end


@triton.jit
def rows_of_chunk(bounds, q_pos, tile, chunk, section, sizes, BLOCK_L: tl.constexpr, CHUNK: tl.constexpr):
    """Return the rows [first, end) of a chunk that may see keys of a tile; end <= first if there are none."""
    first, end = rows_of_tile(bounds, q_pos, tile, sizes, BLOCK_L)
    begin = section.first_row + chunk * CHUNK
    return tl.maximum(first, begin), tl.minimum(tl.minimum(end, begin + CHUNK), section.end_row)


@triton.jit
def dense_loss_kernel(
    q, k, lse, index_q, index_k, bounds, q_pos, index_lse, weights, part_loss, part_dq, part_dk,
    strides, index_strides, sizes, section, c, index_c, index_scale,
    dims: tl.constexpr, index_dims: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr, BLOCK_L: tl.constexpr, CHUNK: tl.constexpr,
    UNROLLED: tl.constexpr,
):  # fmt: skip
    """Compute the shares of loss and diq of a chunk of rows for a tile of keys, and their sum of dik.

    Grid: one program per pair, chunk of CHUNK rows and tile of keys; tiles innermost, which load the same rows.
    """
    S, S_kv, G = sizes
    tile = tl.program_id(0) % section.tiles
    chunk = tl.program_id(0) // section.tiles % section.chunks
    pair = tl.program_id(0) // section.tiles // section.chunks
    bg = (section.first_pair + pair).to(tl.int64)
    b, g = bg // G, bg % G
    first, end = rows_of_chunk(bounds, q_pos, tile, chunk, section, sizes, BLOCK_L, CHUNK)
    if first < end:
        column = tile * BLOCK_L + tl.arange(0, BLOCK_L)  # [BLOCK_L]
        # Keys that no row of the chunk sees may hold NaN, which ds ik would spread to diq.
        highest = 0
        for i in range(first, end, 128):
            s = i + tl.arange(0, 128)
            _, high = visible_keys(None, q_pos, strides.pos, b, tl.minimum(s, S - 1), s < end, sizes)
            highest = tl.maximum(highest, tl.max(high, 0))
        reachable = column < highest
        k_tiles = load_split(key_pointers(k, strides.k, b, g, column), reachable, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
        ik_rows = key_pointers(index_k, index_strides.k, b, g, column)
        index_tiles = load_split(ik_rows, reachable, index_dims.Dk, index_dims.BLOCK_D, index_dims.BLOCK_REST)
        first_slot = (pair.to(tl.int64) * (section.end_row - section.first_row) - section.first_row) * section.tiles + tile
        sums = list_loss(
            q, lse, index_q, k_tiles, index_tiles, index_tiles, bounds, None, q_pos, index_lse, weights, part_loss, part_dq,
            None, first, end - first, first_slot, section.tiles, b, g, column, strides, index_strides, sizes, c, index_c, index_scale,
            dims, index_dims, 1, 1, False, 0, E, HEADS, UNROLLED,
        )  # fmt: skip
        if part_dk is not None:
            part = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
            to_dk = part_dk + part * index_dims.Dk
            store_split(to_dk, sums[0] * index_scale, sums[1] * index_scale, part >= 0, index_dims.Dk, index_dims.BLOCK_REST)


@triton.jit
def dense_sum_rows_kernel(
    part_loss, part_dq, bounds, q_pos, loss, dq, stride_pos, sizes, section, dims: tl.constexpr, BLOCK_L: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Add the shares of R rows in the order of tiles: loss [B,S,G] and, if not None, dq [B,S,G,Di].

    Grid: one program per R rows of a pair of the section.
    """
    S, _, G = sizes
    ACC: tl.constexpr = part_loss.dtype.element_ty
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    rows = section.end_row - section.first_row
    per_pair = tl.cdiv(rows, R)
    pair = (tl.program_id(0) // per_pair).to(tl.int64)
    within = (tl.program_id(0) % per_pair * R + tl.arange(0, R)).to(tl.int64)  # [R]
    exists = within < rows
    b, g = (section.first_pair + pair) // G, (section.first_pair + pair) % G
    s = section.first_row + tl.minimum(within, rows - 1)
    low, high = visible_keys(bounds, q_pos, stride_pos, b, s, exists, sizes)
    first, end = tl.min(tl.where(low < high, low, 2147483647), 0), tl.max(tl.where(low < high, high, 0), 0)
    slot = (pair * rows + within) * section.tiles
    total = tl.zeros([R], ACC)
    acc = tl.zeros([R, BLOCK_D], ACC)
    for i in range(first // BLOCK_L, tl.cdiv(end, BLOCK_L)):
        used = exists & (i * BLOCK_L < high) & ((i + 1) * BLOCK_L > low)
        total += tl.load(part_loss + slot + i, mask=used, other=0.0)
        if dq is not None:
            acc += load_columns(part_dq + (slot + i) * dims.Dk, used, 0, dims.Dk, BLOCK_D).to(ACC)
    row = (b * S + s) * G + g
    tl.store(loss + row, total, mask=exists)
    if dq is not None:
        store_columns(dq + row * dims.Dk, acc, exists, 0, dims.Dk)


@triton.jit
def dense_sum_keys_kernel(
    part_dk, dk, bounds, q_pos, stride_dk, sizes, section, first_item,
    dims: tl.constexpr, BLOCK_L: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Add the section's partial sums of index keys to dk [B,G,S_kv,Di], or [B,1,S_kv,Di] if SHARED, in the order of groups
    and chunks.

    Grid: one program per ROWS of the BLOCK_L keys of a tile of an item: a batch entry if SHARED, else a pair b*G + g.
    """
    _, S_kv, G = sizes
    PIECES: tl.constexpr = BLOCK_L // ROWS
    tile = tl.program_id(0) // PIECES % section.tiles
    item = first_item + (tl.program_id(0) // PIECES // section.tiles).to(tl.int64)
    within = tl.program_id(0) % PIECES * ROWS + tl.arange(0, ROWS)
    column = tile * BLOCK_L + within
    exists = column < S_kv
    first, last = item, item + 1
    to_dk = dk + item // G * stride_dk[0] + item % G * stride_dk[1]
    if SHARED:
        first, last = tl.maximum(item * G, section.first_pair), tl.minimum((item + 1) * G, section.first_pair + section.pairs)
        to_dk = dk + item * stride_dk[0]
    to_dk += column.to(tl.int64) * stride_dk[2]
    acc = load_columns(to_dk, exists, 0, dims.Dk, dims.BLOCK_D)
    for pair in range(first, last):
        for chunk in range(0, section.chunks):
            begin, end = rows_of_chunk(bounds, q_pos, tile, chunk, section, sizes, BLOCK_L, CHUNK)
            if begin < end:
                part = ((pair - section.first_pair) * section.chunks + chunk) * section.tiles + tile
                acc += load_columns(part_dk + (part * BLOCK_L + within) * dims.Dk, exists, 0, dims.Dk, dims.BLOCK_D)
    store_columns(to_dk, acc, exists, 0, dims.Dk)


def add_dense(work: Work, bounds: Tensor | None, results: Results) -> None:
    """Compute loss and dq of all rows over their visible keys, and add to dk: in sections of rows whose shares fit the
    workspace."""
    main, index, lse, weights, config, _ = work
    (B, S, G, _, Di), width, q_pos = index.q.shape, config.block_l, index.q_pos
    index_lse, row_tiles = unwritten(lse, B, S, G), -(-S // config.rows)
    (strides, index_strides, sizes), factors = work.numbers()
    lse_of = cached_kernel(dense_lse_kernel, dims=work.index_dims(), ROWS=config.rows, BLOCK_L=width, num_warps=4, num_stages=2)
    tensors = index.q, index.k, bounds, q_pos, index_lse
    lse_of.launch(row_tiles * B * G, tensors, (index_strides, sizes, row_tiles, factors[1]))
    loss_of = cached_kernel(dense_loss_kernel, **work.steps(), BLOCK_L=width, CHUNK=CHUNK)
    for section in sections(work, results.dq is not None):
        shares = section.pairs, section.end_row - section.first_row, section.tiles
        part_loss, part_dq, part_dk = unwritten(lse, *shares), None, None
        if results.dq is not None:
            part_dq = unwritten(index.q, *shares, Di)
            part_dk = unwritten(lse, section.pairs, section.chunks, section.tiles, width, Di)
        loss_of.launch(
            section.pairs * section.chunks * section.tiles,
            (main.q, main.k, lse, index.q, index.k, bounds, q_pos, index_lse, weights, part_loss, part_dq, part_dk),
            (strides, index_strides, sizes, section, *factors),
        )
        sum_section(work, section, bounds, part_loss, part_dq, part_dk, results)


def sections(work: Work, gradients: bool) -> Iterator[Section]:
    """Yield the launches over all rows, in order. The shares of each fit the workspace, if those of CHUNK rows of a pair
    do."""
    index, width, accumulator = work.indexer, work.config.block_l, work.lse.element_size()
    (B, S, G, _, Di), S_kv = index.q.shape, index.k.shape[2]
    tiles = -(-S_kv // width)
    row_bytes = tiles * (accumulator + gradients * Di * (index.q.element_size() + accumulator * width / CHUNK))
    chunks = max(1, int(index.settings.workspace_bytes / (row_bytes * CHUNK)))  # chunks of all pairs together
    pairs = min(B * G, chunks)
    rows = min(S, chunks // pairs * CHUNK)
    for pair in range(0, B * G, pairs):
        for first in range(0, S, rows):
            end = min(S, first + rows)
            seen = tiles if index.q_pos is not None else -(-(S_kv - S + end) // width)
            yield Section(pair, min(pairs, B * G - pair), first, end, -(-(end - first) // CHUNK), seen)


def sum_section(
    work: Work, section: Section, bounds: Tensor | None, part_loss: Tensor, part_dq: Tensor | None, part_dk: Tensor | None,
    results: Results,
) -> None:  # fmt: skip
    """Launch the kernels that add one section's shares."""
    index, width = work.indexer, work.config.block_l
    sizes, dims, q_pos = arguments.sizes(index), arguments.dims(arguments.heads(index)), index.q_pos
    cached_kernel(dense_sum_rows_kernel, dims=dims, BLOCK_L=width, R=REDUCED, num_warps=1).launch(
        section.pairs * -(-(section.end_row - section.first_row) // REDUCED),
        (part_loss, part_dq, bounds, q_pos, results.loss, results.dq),
        (arguments.position_strides(index), sizes, section),
    )
    if results.dk is None:
        return
    first, items, shared = items_of(section.first_pair, section.pairs, sizes[2], results.dk)
    keys = min(KEYS, width)
    cached_kernel(dense_sum_keys_kernel, dims=dims, BLOCK_L=width, CHUNK=CHUNK, ROWS=keys, SHARED=shared, num_warps=4).launch(
        items * section.tiles * (width // keys), (part_dk, results.dk, bounds, q_pos), (results.dk.stride()[:3], sizes, section, first)
    )
