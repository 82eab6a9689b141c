"""Compiled loops of the numba backend: o, lse and dq one query row at a time, dk and dv one tile of keys at a time.

Every matrix product is an outer-product update over contiguous rows (`_multiply`), so tiles of keys and values that any
row selects are first copied transposed. One thread computes each output in a fixed order, so results do not depend on
the thread count.

Arrays are flat, because Numba would compile the loops again for every memory layout. An operand that may be strided is
a pair (memory, strides of all dimensions but the last, whose stride is 1). Loops take items [first, last) of the chunk
that a thread works on.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.extending import overload

from nsa_sel.backends._numba.vectors import add, broadcast, lanes, larger, largest, load, multiply_add, splat, store, total
from nsa_sel.errors import warn

# NumPy integers, because Numba would compile `_multiply` again for every value of a Python literal.
_ZERO, _ONE = np.int64(0), np.int64(1)
TILE = np.int64(64)  # keys per tile; a tile is 16 KiB at D = 64 in float32, half of a typical L1 cache
_BATCH = 64  # (query row, head) pairs per step of dk and dv
_SQUARE = 16  # side of the square blocks in which tiles are transposed
LOG2E, _LN2 = math.log2(math.e), math.log(2.0)

# No reassoc: it would break the rounding trick of `_exp2`. No arcp: the vector and scalar versions of a loop could then
# divide differently, and memory addresses decide which version runs. Sums of products call vectors.multiply_add.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}


def jit(function):
    """Apply numba.njit with an on-disk cache, or without one if no cache folder is writable (read-only install, no
    home)."""
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        _warn_of_no_folder()
        return numba.njit(**_OPTIONS)(function)


@functools.cache  # once per process
def _warn_of_no_folder() -> None:
    warn("numba compiles for seconds in each process, as it can write its cache nowhere. Remedy: set NUMBA_CACHE_DIR to a writable folder")


class Problem(NamedTuple):
    """Sizes and inputs that all kernels of a call share."""

    S: int
    G: int
    h: int
    Dk: int
    Dv: int
    S_kv: int
    n: int
    tiles: int  # of TILE keys in a sequence
    log2_scale: Any  # scale * log2(e), in the dtype of accumulation
    share: int  # groups that share the ranges of a row: G or 1
    ranges: np.ndarray  # [B,S,G/share,n,2] int64, not causally clamped
    repeats: bool  # forward: ranges are blocks, of which a row may name one several times
    position: np.ndarray  # [B,S] int64
    slot: np.ndarray  # [B,G,tiles] int64: the tile's index among the tiles that any row selects from, -1 for others


@jit
def _add_to(c, at, x):
    store(c, at, add(load(c, at), x))


@jit
def _multiply(c, c_at, a, a_at, b, b_at, sizes):
    """Add a matrix product: c[i, j] += sum over l of a[i, l] b[l, j], with (rows, depth, cols) = sizes.

    Arrays are flat. c_at, a_at, b_at hold the offset of element [0, 0], then the strides; rows of c and b are
    contiguous. Eight independent sums hide the latency of a multiply-add: 4 rows by 2 vectors, and 1 row by 8 vectors
    for the last 1 to 3 rows.
    """
    (c0, c_row), (a0, a_row, a_step), (b0, b_row), (rows, depth, cols) = c_at, a_at, b_at, sizes
    W = lanes(c)
    zero = splat(c.dtype.type(0))
    fours, pairs, whole = rows // 4 * 4, cols // (2 * W) * (2 * W), cols // W * W
    for j in range(0, pairs, 2 * W):
        for i in range(0, fours, 4):
            x0, x1, x2, x3, y0, y1, y2, y3 = zero, zero, zero, zero, zero, zero, zero, zero
            at0 = a0 + i * a_row
            at1, at2, at3, bt = at0 + a_row, at0 + 2 * a_row, at0 + 3 * a_row, b0 + j
            for _ in range(depth):
                x, y = load(b, bt), load(b, bt + W)
                p0, p1, p2, p3 = broadcast(a, at0), broadcast(a, at1), broadcast(a, at2), broadcast(a, at3)
                x0, y0 = multiply_add(p0, x, x0), multiply_add(p0, y, y0)
                x1, y1 = multiply_add(p1, x, x1), multiply_add(p1, y, y1)
                x2, y2 = multiply_add(p2, x, x2), multiply_add(p2, y, y2)
                x3, y3 = multiply_add(p3, x, x3), multiply_add(p3, y, y3)
                at0, at1, at2, at3, bt = at0 + a_step, at1 + a_step, at2 + a_step, at3 + a_step, bt + b_row
            ct = c0 + i * c_row + j
            for x, y in ((x0, y0), (x1, y1), (x2, y2), (x3, y3)):
                _add_to(c, ct, x)
                _add_to(c, ct + W, y)
                ct += c_row
    for i in range(rows):
        j = pairs if i < fours else 0
        while j + 8 * W <= cols:
            x0, x1, x2, x3, x4, x5, x6, x7 = zero, zero, zero, zero, zero, zero, zero, zero
            at, bt = a0 + i * a_row, b0 + j
            for _ in range(depth):
                p = broadcast(a, at)
                x0, x1 = multiply_add(p, load(b, bt), x0), multiply_add(p, load(b, bt + W), x1)
                x2, x3 = multiply_add(p, load(b, bt + 2 * W), x2), multiply_add(p, load(b, bt + 3 * W), x3)
                x4, x5 = multiply_add(p, load(b, bt + 4 * W), x4), multiply_add(p, load(b, bt + 5 * W), x5)
                x6, x7 = multiply_add(p, load(b, bt + 6 * W), x6), multiply_add(p, load(b, bt + 7 * W), x7)
                at, bt = at + a_step, bt + b_row
            for x in (x0, x1, x2, x3, x4, x5, x6, x7):
                _add_to(c, c0 + i * c_row + j, x)
                j += W
        while j < whole:
            x, at, bt = zero, a0 + i * a_row, b0 + j
            for _ in range(depth):
                x, at, bt = multiply_add(broadcast(a, at), load(b, bt), x), at + a_step, bt + b_row
            _add_to(c, c0 + i * c_row + j, x)
            j += W
        for j in range(whole, cols):
            x = c.dtype.type(0)
            for l in range(depth):
                x += a[a0 + i * a_row + l * a_step] * b[b0 + l * b_row + j]
            c[c0 + i * c_row + j] += x


def _taylor(dtype, degree):
    """Return the Taylor coefficients of 2^r, highest power first."""
    return tuple(dtype(_LN2**power / math.factorial(power)) for power in range(degree, -1, -1))


_SERIES32, _SERIES64 = _taylor(np.float32, 7), _taylor(np.float64, 13)
_ROUND32, _ROUND64 = np.float32(1.5 * 2.0**23), np.float64(1.5 * 2.0**52)


def exp2(x):
    """Return 2^x for x below the largest exponent, within 2 units in the last place; 0 instead of subnormal results;
    NaN for NaN.

    2^x = 2^n 2^r with n = round(x): the Taylor series of 2^r for |r| <= 1/2, times a float built from the bits of n.
    Adding 1.5 * 2^(mantissa bits) rounds x to a whole number and leaves it in the lowest bits.
    """
    raise NotImplementedError("compiled code only")


@overload(exp2, jit_options=_OPTIONS)
def _exp2(x):
    def of_float32(x):
        shifted = x + _ROUND32
        r = x - (shifted - _ROUND32)
        y = _SERIES32[0]
        for c in _SERIES32[1:]:
            y = y * r + c
        power = np.int32((np.float32(shifted).view(np.int32) << np.int32(23)) + np.int32(127 << 23))
        return np.float32(0) if x < np.float32(-126) else y * power.view(np.float32)

    def of_float64(x):
        shifted = x + _ROUND64
        r = x - (shifted - _ROUND64)
        y = _SERIES64[0]
        for c in _SERIES64[1:]:
            y = y * r + c
        power = np.int64((np.float64(shifted).view(np.int64) << np.int64(52)) + np.int64(1023 << 52))
        return np.float64(0) if x < np.float64(-1022) else y * power.view(np.float64)

    return of_float32 if x.bitwidth == 32 else of_float64


@jit
def list_rows(first, last, ranges, at, rows, fill, S, G, share, n, tiles):
    """Count in `at` the query rows whose ranges touch a tile, for every KV head b * G + g and tile; if `fill`, list
    them in ascending order.

    Ranges are not causally clamped here, so the lists are valid for any positions.
    """
    seen = np.empty(tiles, np.int64)
    for head in range(first, last):
        b, g = head // G, head % G
        seen[:] = -1
        for s in range(S):
            r0 = ((b * S + s) * G + g) // share * n * 2
            for r in range(r0, r0 + 2 * n, 2):
                start, end = max(ranges[r], 0), min(ranges[r + 1], tiles * TILE)
                if start < end:
                    for tile in range(start // TILE, (end - 1) // TILE + 1):
                        if seen[tile] != s:
                            seen[tile] = s
                            if fill:
                                rows[at[head * tiles + tile]] = s
                            at[head * tiles + tile] += 1


@jit
def transpose_tiles(first, last, x, xt, limit, D, p):
    """Store xt[slot, d, j] = x[b, g, tile * TILE + j, d] for the tiles that have a slot; zeros from key `limit[b]`
    on."""
    x, x_step = x
    for cell in range(first, last):
        if p.slot[cell] >= 0:
            head, tile = cell // p.tiles, cell % p.tiles
            x0 = head // p.G * x_step[0] + head % p.G * x_step[1] + tile * TILE * x_step[2]
            t0, filled = p.slot[cell] * D * TILE, max(0, min(TILE, limit[head // p.G] - tile * TILE))
            for d0 in range(0, D, _SQUARE):  # square blocks use whole cache lines
                for j0 in range(0, TILE, _SQUARE):
                    stop = min(filled, j0 + _SQUARE)
                    for d in range(d0, min(d0 + _SQUARE, D)):
                        for j in range(j0, stop):
                            xt[t0 + d * TILE + j] = x[x0 + j * x_step[2] + d]
                        for j in range(max(stop, j0), j0 + _SQUARE):
                            xt[t0 + d * TILE + j] = 0


@jit
def _scaled(target, t0, x, x0, x_row, rows, cols, scale):
    """Store target [rows, cols] = scale * x."""
    for i in range(rows):
        for j in range(cols):
            target[t0 + i * cols + j] = scale * x[x0 + i * x_row + j]


@jit
def _offset(step, b, i, g):
    return b * step[0] + i * step[1] + g * step[2]


@jit
def _locate(row, p):
    """Return b, g, the index i in S, the offset in [B,S,G], and one past the last visible key of a row numbered in
    [B,G,S]."""
    head, i = row // p.S, row % p.S
    b, g = head // p.G, head % p.G
    return b, g, i, (b * p.S + i) * p.G + g, min(p.position[b * p.S + i] + 1, p.S_kv)


@jit
def _ranges_of(at, p):
    """Return where the ranges of the row at offset `at` in [B,S,G] begin."""
    r0 = at // p.share * p.n * 2
    return range(r0, r0 + p.n * 2, 2)


@jit
def _span(start, end, pair):
    """Return the tile of key `start`, the keys [lo, hi) of that tile in [start, end), and [lo, hi) widened to pairs of
    vectors."""
    tile = start // TILE
    lo, hi = start - tile * TILE, min(end - tile * TILE, TILE)
    return tile, lo, hi, lo // pair * pair, (hi + pair - 1) // pair * pair


@jit
def _is_repeated(ranges, first, r):
    """Return True if the range at r equals one of those before it from `first` on."""
    found = False
    for other in range(first, r, 2):
        found |= ranges[other] == ranges[r] and ranges[other + 1] == ranges[r + 1]
    return found


@jit
def _online_softmax(s, lo, hi, first, last, head, row_max, row_sum, out, Dv):
    """Do one online-softmax step of one head for keys [lo, hi): turn s [first, last) into p, and rescale earlier
    sums."""
    W, at = lanes(s), head * TILE
    low = s.dtype.type(-np.inf)
    for j in range(at + first, at + lo):
        s[j] = low
    for j in range(at + hi, at + last):
        s[j] = low
    best, weights = splat(low), splat(s.dtype.type(0))
    for j in range(at + first, at + last, W):
        best = larger(load(s, j), best)
    peak = largest(best)
    if peak > row_max[head]:
        if row_max[head] > low:
            shrink = exp2(row_max[head] - peak)
            row_sum[head] *= shrink
            for d in range(head * Dv, head * Dv + Dv):
                out[d] *= shrink
        row_max[head] = peak
    # A maximum of -inf (infinite keys) must give p = 0, not exp2(inf - inf).
    base = row_max[head] if row_max[head] > low else s.dtype.type(0)
    for j in range(np.uint64(at + first), np.uint64(at + last)):  # unsigned: LLVM does not vectorize a signed index
        s[j] = exp2(s[j] - base)
    for j in range(at + first, at + last, W):
        weights = add(weights, load(s, j))
    row_sum[head] += total(weights)


@jit
def forward_rows(first, last, q, kt, v, o, lse, p):
    """Compute o and lse of rows first to last. Rows are numbered in [B,G,S], so that neighbors share blocks in the
    cache.

    s = scale * q k^T, p = exp2(s - m), o = sum_j p_j v_j / l, lse = (m + log2 l) ln 2, tile by tile of keys.
    """
    (q, q_step), (v, v_step), h, Dk, Dv = q, v, p.h, p.Dk, p.Dv
    pair = 2 * lanes(q)
    query, s, out = np.empty(h * Dk, q.dtype), np.empty(h * TILE, q.dtype), np.empty(h * Dv, q.dtype)
    row_max, row_sum = np.empty(h, q.dtype), np.empty(h, q.dtype)
    for row in range(first, last):
        b, g, i, at, limit = _locate(row, p)
        _scaled(query, 0, q, _offset(q_step, b, i, g), q_step[3], h, Dk, p.log2_scale)
        row_max[:], row_sum[:], out[:] = -np.inf, 0, 0
        for r in _ranges_of(at, p):
            start, end = max(p.ranges[r], 0), min(p.ranges[r + 1], limit)
            if p.repeats and _is_repeated(p.ranges, at // p.share * p.n * 2, r):
                end = start
            while start < end:
                tile, lo, hi, left, right = _span(start, end, pair)
                kt0 = p.slot[row // p.S * p.tiles + tile] * Dk * TILE + left
                s[:] = 0
                _multiply(s, (left, TILE), query, (_ZERO, Dk, _ONE), kt, (kt0, TILE), (h, Dk, right - left))
                for head in range(h):
                    _online_softmax(s, lo, hi, left, right, head, row_max, row_sum, out, Dv)
                v0 = b * v_step[0] + g * v_step[1] + start * v_step[2]
                _multiply(out, (_ZERO, Dv), s, (lo, TILE, _ONE), v, (v0, v_step[2]), (h, hi - lo, Dv))
                start += hi - lo
        for m in range(h):
            filled = row_sum[m] != 0
            lse[at * h + m] = (row_max[m] + math.log2(row_sum[m])) * _LN2 if filled else -np.inf
            for d in range(Dv):
                o[(at * h + m) * Dv + d] = out[m * Dv + d] / row_sum[m] if filled else 0


@jit
def _gradient_of_scores(s, dp, at, width, lse2, delta):
    """Turn the logits s and dp = do v^T of one row and head, in place, into p = exp2(s - lse2) and ds = p (dp -
    delta)."""
    for j in range(np.uint64(at), np.uint64(at + width)):
        s[j] = exp2(s[j] - lse2)
    for j in range(np.uint64(at), np.uint64(at + width)):
        dp[j] = s[j] * (dp[j] - delta)


@jit
def dq_rows(first, last, q, k, kt, vt, o, lse, do, dlse, dq, delta, scale, p):
    """Compute dq = scale * ds k of rows first to last (numbered in [B,G,S]), and delta [B,S,G,h] = sum(do * o) -
    dlse."""
    (q, q_step), (k, k_step), (o, o_step), (do, do_step) = q, k, o, do
    (lse, lse_step), (dlse, dlse_step), h, Dk, Dv = lse, dlse, p.h, p.Dk, p.Dv
    pair = 2 * lanes(q)
    query, gradient, out = np.empty(h * Dk, q.dtype), np.empty(h * Dv, q.dtype), np.empty(h * Dk, q.dtype)
    s, dp, lse2 = np.empty(h * TILE, q.dtype), np.empty(h * TILE, q.dtype), np.empty(h, q.dtype)
    for row in range(first, last):
        b, g, i, at, limit = _locate(row, p)
        _scaled(query, 0, q, _offset(q_step, b, i, g), q_step[3], h, Dk, p.log2_scale)
        _scaled(gradient, 0, do, _offset(do_step, b, i, g), do_step[3], h, Dv, q.dtype.type(1))
        for m in range(h):
            o0 = _offset(o_step, b, i, g) + m * o_step[3]
            product = q.dtype.type(0)
            for d in range(Dv):
                product += gradient[m * Dv + d] * o[o0 + d]
            delta[at * h + m] = product - dlse[_offset(dlse_step, b, i, g) + m * dlse_step[3]]
            lse2[m] = lse[_offset(lse_step, b, i, g) + m * lse_step[3]] * LOG2E
        out[:] = 0
        for r in _ranges_of(at, p):
            start, end = max(p.ranges[r], 0), min(p.ranges[r + 1], limit)
            while start < end:
                tile, lo, hi, left, right = _span(start, end, pair)
                t0 = p.slot[row // p.S * p.tiles + tile] * TILE
                s[:], dp[:] = 0, 0
                _multiply(s, (left, TILE), query, (_ZERO, Dk, _ONE), kt, (t0 * Dk + left, TILE), (h, Dk, right - left))
                _multiply(dp, (left, TILE), gradient, (_ZERO, Dv, _ONE), vt, (t0 * Dv + left, TILE), (h, Dv, right - left))
                for m in range(h):
                    _gradient_of_scores(s, dp, m * TILE + left, right - left, lse2[m], delta[at * h + m])
                k0 = b * k_step[0] + g * k_step[1] + start * k_step[2]
                _multiply(out, (_ZERO, Dk), dp, (lo, TILE, _ONE), k, (k0, k_step[2]), (h, hi - lo, Dk))
                start += hi - lo
        _scaled(dq, at * h * Dk, out, 0, Dk, h, Dk, scale)


@jit
def _mark(keep, k0, ranges, r0, n, tile0, width):
    """Set keep[k0 + j] to whether key tile0 + j, j < width, is in one of the n ranges; return how many are."""
    marked = 0
    keep[k0 : k0 + TILE] = False
    for r in range(r0, r0 + 2 * n, 2):
        first, end = max(ranges[r], 0), max(ranges[r + 1], 0)  # clamp before subtracting: int64 min would overflow
        for j in range(max(first - tile0, 0), min(end - tile0, width)):
            keep[k0 + j] = True
            marked += 1
    return marked


@jit
def _gather_rows(entry, stop, rows, b, g, tile0, q, do, query, gradient, row_of, marked, keep, p):
    """Copy q (scaled) and do of the next listed rows that see keys of the tile; return their number and the next list
    entry."""
    (q, q_step), (do, do_step), h, Dk, Dv = q, do, p.h, p.Dk, p.Dv
    count = 0
    while count < len(row_of) and entry < stop:
        i = rows[entry]
        entry += 1
        r0, visible = ((b * p.S + i) * p.G + g) // p.share * p.n * 2, min(TILE, p.S_kv - tile0, p.position[b * p.S + i] + 1 - tile0)
        marked[count] = _mark(keep, count * TILE, p.ranges, r0, p.n, tile0, visible)
        if marked[count] > 0:
            _scaled(query, count * h * Dk, q, _offset(q_step, b, i, g), q_step[3], h, Dk, p.log2_scale)
            _scaled(gradient, count * h * Dv, do, _offset(do_step, b, i, g), do_step[3], h, Dv, q.dtype.type(1))
            row_of[count] = i
            count += 1
    return count, entry


@jit
def dkdv_tiles(first, last, q, kt, vt, at, rows, lse, do, delta, dk, dv, p):
    """Compute dk and dv of tiles first to last (numbered in [B,G,tile]), each summed in ascending order over its listed
    rows."""
    (lse, lse_step), h, Dk, Dv = lse, p.h, p.Dk, p.Dv
    batch, dtype = max(1, _BATCH // h), delta.dtype
    query, gradient = np.empty(batch * h * Dk, dtype), np.empty(batch * h * Dv, dtype)
    s, dp = np.empty(batch * h * TILE, dtype), np.empty(batch * h * TILE, dtype)
    row_of, marked, keep = np.empty(batch, np.int64), np.empty(batch, np.int64), np.empty(batch * TILE, np.bool_)
    for cell in range(first, last):
        head, tile = cell // p.tiles, cell % p.tiles
        b, g, tile0 = head // p.G, head % p.G, tile * TILE
        width = min(TILE, p.S_kv - tile0)
        dk0, dv0, t0 = (head * p.S_kv + tile0) * Dk, (head * p.S_kv + tile0) * Dv, p.slot[cell] * TILE
        dk[dk0 : dk0 + width * Dk] = 0
        dv[dv0 : dv0 + width * Dv] = 0
        entry = at[cell]
        while entry < at[cell + 1]:
            count, entry = _gather_rows(entry, at[cell + 1], rows, b, g, tile0, q, do, query, gradient, row_of, marked, keep, p)
            s[:], dp[:] = 0, 0
            _multiply(s, (_ZERO, TILE), query, (_ZERO, Dk, _ONE), kt, (t0 * Dk, TILE), (count * h, Dk, TILE))
            _multiply(dp, (_ZERO, TILE), gradient, (_ZERO, Dv, _ONE), vt, (t0 * Dv, TILE), (count * h, Dv, TILE))
            for c in range(count):
                for m in range(h):
                    lse2 = dtype.type(lse[_offset(lse_step, b, row_of[c], g) + m * lse_step[3]] * LOG2E)
                    row = (c * h + m) * TILE
                    _gradient_of_scores(s, dp, row, TILE, lse2, delta[((b * p.S + row_of[c]) * p.G + g) * h + m])
                    if marked[c] < TILE:
                        for j in range(TILE):
                            if not keep[c * TILE + j]:
                                s[row + j], dp[row + j] = 0, 0
            _multiply(dv, (dv0, Dv), s, (_ZERO, _ONE, TILE), gradient, (_ZERO, Dv), (width, count * h, Dv))
            _multiply(dk, (dk0, Dk), dp, (_ZERO, _ONE, TILE), query, (_ZERO, Dk), (width, count * h, Dk))
        for d in range(dk0, dk0 + width * Dk):
            dk[d] *= _LN2  # the queries were scaled by scale * log2(e)
