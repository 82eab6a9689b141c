"""Compressed keys: which of them a row sees, how tiles lie in a packed batch, and arguments of all their kernels.

`rule` is `nsa_sel.core.call.Rule`. A row sees the first compressed keys, up to a limit that follows from its
position.

In a packed batch a tile of rows or keys lies within one sequence, and a program works with its sequence's sizes. The
tiles of sequence i, which begins at row cu[i], begin at tile number cu[i] // TILE + i. This leaves room for all tiles,
because each sequence wastes less than one tile, and bounds their number by total // TILE + N + 1 on the host. A program
finds its sequence by searching `cu`, 32 entries at a time. Padding after the last sequence counts as sequence N; its
rows see nothing. For a part of the rows, `sizes.start` is the first of them, and rows count from there.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.arguments import Strides
from nsa_sel.backends._triton.rows import row_position, tile_rows
from nsa_sel.core.call import ChooseCall


class Sizes(NamedTuple):
    """As kernels take them."""

    S: int
    C: int
    G: int
    start: int  # position of row 0 if q_pos is None
    tiles: int  # tiles of rows
    sequences: int  # sequences of a packed batch, else 0


@triton.jit
def keys_until(t, C, rule: tl.constexpr):
    """Return how many of the C compressed keys of a sequence rows at positions t see (int32)."""
    past = t + 1 - rule.compress_block
    return tl.where(past >= 0, tl.minimum(past // rule.compress_stride + 1, C), 0).to(tl.int32)


@triton.jit
def seen_keys(q_pos, stride_pos, b, s, sizes, rule: tl.constexpr):
    """Return how many compressed keys the rows s see (int32)."""
    return keys_until(row_position(q_pos, stride_pos, b, s, sizes.start), sizes.C, rule)


def strides_of(call: ChooseCall) -> Strides:
    pos = (0, 0) if call.q_pos is None else call.q_pos.stride()
    if call.lengths is not None:
        pos = call.lengths.stride(0), 0
    return Strides(call.q.stride()[:4], call.k.stride()[:3], call.v.stride()[:3], pos)


def sizes_of(call: ChooseCall, tokens: int) -> Sizes:
    """Return `Sizes` for tiles of `tokens` rows."""
    _, S, G = call.q.shape[:3]
    sequences = 0 if call.sequences is None else len(call.sequences.rows) - 1
    return Sizes(S, call.k.shape[2], G, call.start, tiles_of(call, S, tokens), sequences)


def bounds_of(call: ChooseCall) -> tuple[Tensor | None, Tensor | None]:
    """Return where the sequences of a packed batch begin, in rows and in compressed keys, or (None, None)."""
    return (None, None) if call.sequences is None else (call.sequences.rows, call.sequences.keys)


def tiles_of(call: ChooseCall, total: int, size: int) -> int:
    """Return the tiles of `total` rows or keys; for a packed batch (tiles within one sequence, with padding) an upper
    bound."""
    return -(-total // size) if call.sequences is None else total // size + len(call.sequences.rows)


PROBES = tl.constexpr(32)  # entries per search step, one per thread of a warp


@triton.jit
def clamped(bounds, i, origin, most):
    """Return bounds[i] - origin as int32, clamped to [0, most] even if the bounds are wrong."""
    return tl.minimum(tl.maximum(tl.load(bounds + i) - origin, 0), most).to(tl.int32)


@triton.jit
def sequence_of(number, bounds, origin, most, sequences, TILE: tl.constexpr):
    """Return the last i in [0, sequences] whose tiles begin at or before tile `number`."""
    probe = tl.arange(0, PROBES)
    first = 0
    width = sequences + 1
    while width > 1:
        step = (width + PROBES - 1) // PROBES
        i = tl.minimum(first + probe * step, sequences)
        reached = (probe * step < width) & (clamped(bounds, i, origin, most) // TILE + i <= number)
        passed = tl.maximum(tl.sum(reached.to(tl.int32), 0) - 1, 0) * step
        first += passed
        width = tl.minimum(step, width - passed)
    return first


@triton.jit
def span_of(i, bounds, origin, most, sequences):
    """Return where sequence i begins and ends."""
    begin = clamped(bounds, i, origin, most)
    end = tl.where(i < sequences, clamped(bounds, tl.minimum(i + 1, sequences), origin, most), most)
    return begin, tl.maximum(begin, end)


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
def last_row(s, cu, sizes):
    """Return the rows s, clamped to the last row of their sequence, or to row 0 if it has none."""
    s = tl.minimum(s, sizes.S - 1)
    return s if cu is None else tl.maximum(s, 0)


@triton.jit
def token_tile(number, cu, cu_cmp, sizes, TOKENS: tl.constexpr):
    """Return the first row of tile `number` of TOKENS rows, its sequence's first key and sizes; no keys if it has no
    rows."""
    if cu is None:
        return number * TOKENS, 0, sizes
    else:
        i = sequence_of(number, cu, sizes.start, sizes.S, sizes.sequences, TOKENS)
        begin, first, own = sizes_of_sequence(i, cu, cu_cmp, sizes)
        row = begin + (number - begin // TOKENS - i) * TOKENS
        empty = row >= own.S
        start, C = tl.where(empty, NOWHERE, own.start), tl.where(empty, 0, own.C)
        return row, first, Sizes(own.S, C, own.G, start, own.tiles, own.sequences)


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
    b, g, _, s, bit, head, out, exists = tile_rows(program, sizes.S, sizes.G, sizes.tiles, h, TQ, ROWS)
    if cu is None:
        return b, g, s, head, out, exists, 0, sizes
    else:
        number = sizes.tiles - 1 - program // ((h + ROWS - 1) // ROWS) % sizes.tiles
        row, first, own = token_tile(number, cu, cu_cmp, sizes, TQ)
        s = row + bit.to(tl.int32)
        exists = (bit < TQ) & (s < own.S) & (head < h)
        s = last_row(s, cu, own)
        out = (s.to(tl.int64) * sizes.G + g.to(tl.int64)) * h + head
        return b, g, s, head, out, exists, first, own
