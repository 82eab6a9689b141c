"""Choosing in packed batches: locate a tile of rows or compressed keys (sequences.py), and return the sizes of its
sequence.

A program works with its sequence's sizes. Padding rows see nothing. For a part of the rows, `sizes.start` is the first
of them, and rows count from there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_sel.backends._triton.choose_rows import Sizes
from nsa_sel.backends._triton.rows import tile_rows
from nsa_sel.backends._triton.sequences import sequence_of, span_of

NOWHERE = tl.constexpr(-(1 << 40))  # a position that sees no key


@triton.jit
def sizes_of_sequence(i, cu, cu_cmp, sizes):
    """Return the first row of sequence i, its first compressed key, and its `Sizes`.

    In these sizes, S is where its rows end, and start + s is the position of row s in the sequence.
    """
    begin, end = span_of(i, cu, sizes.start, sizes.S, sizes.sequences)
    first, last = span_of(i, cu_cmp, 0, sizes.C, sizes.sequences)
    start = tl.where(i < sizes.sequences, sizes.start - tl.load(cu + i), NOWHERE)
    return begin, first, Sizes(end, last - first, sizes.G, start, sizes.tiles, sizes.sequences)


@triton.jit
def packed_tile(number, cu, cu_cmp, sizes, TOKENS: tl.constexpr):
    """Return the first row of tile `number` of TOKENS rows, its sequence's first key and sizes; no keys if it has no
    rows."""
    i = sequence_of(number, cu, sizes.start, sizes.S, sizes.sequences, TOKENS)
    begin, first, own = sizes_of_sequence(i, cu, cu_cmp, sizes)
    row = begin + (number - begin // TOKENS - i) * TOKENS
    empty = row >= own.S
    start, C = tl.where(empty, NOWHERE, own.start), tl.where(empty, 0, own.C)
    return row, first, Sizes(own.S, C, own.G, start, own.tiles, own.sequences)


@triton.jit
def last_row(s, cu, sizes):
    """Return the rows s, clamped to the last row of their sequence, or to row 0 if it has none."""
    s = tl.minimum(s, sizes.S - 1)
    return s if cu is None else tl.maximum(s, 0)


@triton.jit
def token_tile(number, cu, cu_cmp, sizes, TOKENS: tl.constexpr):
    """Do `packed_tile`; for a batch that is not packed, return the tile's first row, key 0 and the batch's sizes."""
    if cu is None:
        return number * TOKENS, 0, sizes
    else:
        return packed_tile(number, cu, cu_cmp, sizes, TOKENS)


@triton.jit
def key_tile(number, cu, cu_cmp, sizes, sections, BLOCK_K: tl.constexpr):
    """Return the first of the BLOCK_K keys of tile `number` within its sequence, and the sequence's first key, first
    row, sizes and rows per section."""
    if cu is None:
        return number * BLOCK_K, 0, 0, sizes, sections.rows
    else:
        i = sequence_of(number, cu_cmp, 0, sizes.C, sizes.sequences, BLOCK_K)
        begin, first, own = sizes_of_sequence(i, cu, cu_cmp, sizes)
        rows = tl.maximum(tl.cdiv(own.S - begin, sections.total), sections.rows)
        return (number - first // BLOCK_K - i) * BLOCK_K, first, begin, own, rows


@triton.jit
def locate_tile(program, cu, cu_cmp, sizes, h: tl.constexpr, TQ: tl.constexpr, ROWS: tl.constexpr):
    """Return b, g, s, head, index in [B,S,G,h] and existence as `tile_rows` does, then the sequence's first key and
    sizes."""
    if cu is None:
        b, g, _, s, _, head, out, exists = tile_rows(program, sizes.S, sizes.G, sizes.tiles, h, TQ, ROWS)
        return b, g, s, head, out, exists, 0, sizes
    else:
        b, g, _, s, bit, head, out, exists = tile_rows(program, sizes.S, sizes.G, sizes.tiles, h, TQ, ROWS)
        number = sizes.tiles - 1 - program // ((h + ROWS - 1) // ROWS) % sizes.tiles
        row, first, own = packed_tile(number, cu, cu_cmp, sizes, TQ)
        s = row + bit.to(tl.int32)
        exists = (bit < TQ) & (s < own.S) & (head < h)
        s = last_row(s, cu, own)
        out = (s.to(tl.int64) * sizes.G + g.to(tl.int64)) * h + head
        return b, g, s, head, out, exists, first, own
