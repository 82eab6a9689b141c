"""Map programs to query rows, and rows to the keys they select: limits, clamped ranges, walks over ranges and blocks.

`limit` is one past the last key that a row may see, min(t + 1, S_kv). `row_ranges` points to a row's n ranges (start,
end).

With REPEATS, ranges are blocks of which a row may name one several times: the first entry that names it counts, all
others are empty. Every entry is compared with those before it. Without, ranges of a row are disjoint.
"""

from __future__ import annotations

import triton
import triton.language as tl

COMPARED = tl.constexpr(128)  # blocks that a step of small blocks is compared with at once


@triton.jit
def locate_row(number, S, G):
    """Return b and g (int64), s, and the index in [B,S,G] of query row `number`, counted in the order [B,G,S]."""
    s = number % S
    b = (number // S // G).to(tl.int64)
    g = (number // S % G).to(tl.int64)
    return b, g, s, (b * S + s) * G + g


@triton.jit
def tile_rows(program, S, G, tiles, h: tl.constexpr, TQ: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr = 1):
    """Return b, g and the tile number of `program` in a plan that SHARE groups share, and of its ROWS rows s, bit, head,
    index in [B,S,G,h], and whether they exist.

    bit: the row's token within the tile, which is its bit in the tile's block list. Each of the last five is [ROWS].
    Late tiles, which see the most blocks, start first.
    """
    HEAD_TILES: tl.constexpr = (h + ROWS - 1) // ROWS
    head0 = program % HEAD_TILES * ROWS
    number = program // HEAD_TILES
    i = tiles - 1 - number % tiles
    b, g = number // tiles // G, number // tiles % G
    r = tl.arange(0, ROWS)
    bit = r // h if TQ > 1 else r * 0
    head = r % h if TQ > 1 else head0 + r
    s = i * TQ + bit
    exists = (bit < TQ) & (s < S) & (head < h)
    s = tl.minimum(s, S - 1)
    out = ((b.to(tl.int64) * S + s.to(tl.int64)) * G + g.to(tl.int64)) * h + head.to(tl.int64)
    return b, g, (b * G + g) // SHARE * tiles + i, s, bit.to(tl.int64), head.to(tl.int64), out, exists


@triton.jit
def row_limit(q_pos, stride_pos, b, s, S, S_kv, LENGTHS: tl.constexpr = False):
    """Return min(t + 1, S_kv) for row s (or a vector of rows) at position t.

    LENGTHS: q_pos holds sequence lengths, and the S rows are the last ones of their sequence.
    """
    if q_pos is not None:
        t = tl.load(q_pos + b * stride_pos[0] + s * stride_pos[1]).to(tl.int64)
        if LENGTHS:
            t += s - S
        limit = tl.maximum(tl.minimum(t + 1, S_kv), 0).to(tl.int32)  # clamp in int64: a position may exceed int32
    else:
        limit = tl.maximum(S_kv - S + s + 1, 0)
    return limit


@triton.jit
def row_position(q_pos, stride_pos, b, s, start):
    """Return the position (int64) of row s or of a vector of rows: from q_pos, or start + s if q_pos is None."""
    if q_pos is not None:
        return tl.load(q_pos + b * stride_pos[0] + s * stride_pos[1]).to(tl.int64)
    else:
        return start + s.to(tl.int64)


@triton.jit
def clamp_range(start, end, limit):
    """Return [max(start, 0), min(end, limit)) as int32; empty ranges have end <= start. Clamp in int64: bounds may
    exceed int32."""
    start = tl.minimum(tl.maximum(start, 0), limit).to(tl.int32)
    end = tl.maximum(tl.minimum(end, limit), 0).to(tl.int32)
    return start, end


@triton.jit
def load_range(pointer, limit, exists):
    """Return the clamped (start, end) at each pointer, (0, 0) where `exists` is false."""
    return clamp_range(tl.load(pointer, mask=exists, other=0), tl.load(pointer + 1, mask=exists, other=0), limit)


@triton.jit
def starts_and_lengths(row_ranges, first, n, limit, NP: tl.constexpr, REPEATS: tl.constexpr = False):
    """Return starts and lengths [NP] of ranges first, ..., first + NP - 1 of a row, clamped."""
    i = first + tl.arange(0, NP)
    start, end = load_range(row_ranges + 2 * i, limit, i < n)
    length = tl.maximum(end - start, 0)
    if REPEATS:
        length = tl.where(is_repeated(row_ranges, i, start, first + NP, n, limit, min(NP, 16)), 0, length)
    return start, length


@triton.jit
def is_repeated(row_ranges, i, start, last, n, limit, NP: tl.constexpr):
    """Return whether an entry before i [N] of a row, all of them before `last`, names the block that begins at `start`
    [N], too. NP: entries that are compared at once."""
    again = i < 0
    for first in range(0, last, NP):
        j = first + tl.arange(0, NP)
        other, end = load_range(row_ranges + 2 * j, limit, j < n)
        other = tl.where(end > other, other, -1)
        same = (start[:, None] == other[None, :]) & (j[None, :] < i[:, None])  # [N, NP]
        again |= tl.max(same.to(tl.int32), 1) > 0
    return again


@triton.jit
def walk_ranges(
    row_ranges, first, n, limit, NP: tl.constexpr, table=None, PAGE: tl.constexpr = 0,
    REPEATS: tl.constexpr = False,
):  # fmt: skip
    """Concatenate ranges first, ..., first + NP - 1 of a row: key number w in [before, after) has position w + shift.

    A kernel can then walk ranges of any length and alignment in full tiles of keys.
    PAGE > 0: each range lies within one page of `table`, the sequence's row of the block table, which is read once per
    range; w + shift is the index page * PAGE + offset in the page pool.
    Returns shift, before, after [NP] and the number of keys.
    """
    start, length = starts_and_lengths(row_ranges, first, n, limit, NP, REPEATS)
    if PAGE > 0:
        page = page_of(start, length > 0, table, PAGE)
        start = (page * PAGE + start % PAGE).to(tl.int32)
    after = tl.cumsum(length, 0)
    before = after - length
    return start - before, before, after, tl.sum(length, 0)


@triton.jit
def count_keys(row_ranges, n, limit, NP: tl.constexpr, REPEATS: tl.constexpr = False):
    """Return how many keys a row selects."""
    total = 0
    for first in range(0, n, NP):
        _, length = starts_and_lengths(row_ranges, first, n, limit, NP, REPEATS)
        total += tl.sum(length, 0)
    return total


@triton.jit
def share_of(split, splits, total, BLOCK_L: tl.constexpr):
    """Return the key numbers [low, high) that program `split` of `splits` walks, out of `total`, in whole tiles of
    BLOCK_L."""
    share = tl.cdiv(tl.cdiv(total, BLOCK_L), splits) * BLOCK_L
    low = split * share
    return low, low + share


@triton.jit
def positions_of(w, shift, before, after):
    """Return the key positions [BLOCK_L] of the key numbers w; undefined where w is past the last key."""
    # [BLOCK_L, NP]: the range that holds each key number
    here = (before[None, :] <= w[:, None]) & (w[:, None] < after[None, :])
    return w + tl.sum(tl.where(here, shift[None, :], 0), 1)


@triton.jit
def block_keys(
    row_ranges, first, stop, limit, n, BLOCK: tl.constexpr, BLOCK_L: tl.constexpr,
    REPEATS: tl.constexpr = False,
):  # fmt: skip
    """Return positions [BLOCK_L] of the key numbers from `first` on, a multiple of BLOCK_L, and whether they exist, for
    a row whose ranges are blocks of BLOCK keys.

    Every range, empty or not, takes BLOCK key numbers, so key number // BLOCK is the range and no search is needed.
    """
    EACH: tl.constexpr = 1 if BLOCK & (BLOCK - 1) else BLOCK  # keys of a range that are adjacent in a step
    UNITS: tl.constexpr = BLOCK_L // EACH
    w = first + tl.arange(0, UNITS) * EACH
    i = w // BLOCK  # [UNITS], as start and end
    start, end = load_range(row_ranges + 2 * i, limit, w < stop)
    if REPEATS:
        last = tl.minimum((first + BLOCK_L) // BLOCK + 1, n)
        end = tl.where(is_repeated(row_ranges, i, start, last, n, limit, COMPARED), start, end)
    position = (start + w % BLOCK)[:, None] + tl.arange(0, EACH)[None, :]  # [UNITS, EACH]
    valid = position < end[:, None]
    return position.reshape(BLOCK_L), valid.reshape(BLOCK_L)


@triton.jit
def table_row(block_table, q_pos, strides, of_cache, b, PACKED: tl.constexpr):
    """Return a pointer to sequence b's row of the block table. PACKED: that of its request, which follows its length in
    q_pos."""
    request = tl.load(q_pos + b * strides.pos[0] + 1).to(tl.int64) if PACKED else b
    return block_table + request * of_cache.table


@triton.jit
def page_of(position, exists, table, PAGE: tl.constexpr):
    """Return the page of each key `position`. table: a sequence's row of the block table, read only where the key
    exists."""
    return tl.load(table + position // PAGE, mask=exists, other=0)


@triton.jit
def split_blocks(row_ranges, n, limit, BLOCK: tl.constexpr, NP: tl.constexpr):
    """Split a row of blocks of BLOCK keys into whole blocks and the one that the limit cuts (at most one, which may be
    named several times).

    Returns the starts of whole blocks [NP], -1 for other entries; the number of entries up to the last whole one; the
    largest start of a whole block; and [start, end) of the cut block (empty if none).
    """
    i = tl.arange(0, NP)
    start, end = load_range(row_ranges + 2 * i, limit, i < n)
    whole = end - start == BLOCK
    cut = (end > start) & (end - start < BLOCK)
    listed = tl.max(tl.where(whole, i + 1, 0), 0)
    last_whole = tl.max(tl.where(whole, start, 0), 0)
    starts = tl.where(whole, start, -1)
    return starts, listed, last_whole, tl.max(tl.where(cut, start, 0), 0), tl.max(tl.where(cut, end, 0), 0)


@triton.jit
def new_entries(starts, NP: tl.constexpr):
    """Return bit i (int64) for each entry i < 64 whose block no earlier entry of `starts` [NP] names; for more entries
    see `is_new`."""
    if NP > 64:
        return tl.full([], -1, tl.int64)
    i = tl.arange(0, NP)
    same = (starts[:, None] == starts[None, :]) & (i[None, :] < i[:, None])  # [NP, NP]
    return tl.sum(tl.where(tl.max(same.to(tl.int32), 1) == 0, tl.full([], 1, tl.int64) << i.to(tl.int64), 0), 0)


@triton.jit
def is_new(starts, bits, i, start, NP: tl.constexpr):
    """Return whether entry i, a whole block that begins at `start`, is the first of `starts` [NP] that names it.

    bits: of `new_entries`.
    """
    if NP <= 64:
        return (bits >> i) & 1 != 0
    return tl.max(((starts == start) & (tl.arange(0, NP) < i)).to(tl.int32), 0) == 0
