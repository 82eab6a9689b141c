"""Compiled CPU loops: forward and dq row by row, dk and dv tile by tile of KV positions; no gather, bit-equal for any thread count.

Every product is written as an outer-product update over contiguous rows (`_multiply`), so keys and values are first copied
transposed, tile by tile, for the tiles that some row selects. Threads are torch's (`torch.set_num_threads`), run from a pool
of our own over kernels without the GIL: Numba's OpenMP layer spins against torch's, its workqueue layer aborts the process when
two threads call it, and both are chosen once for the whole process. Each output is computed by one thread in one order.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from nsa_sel.backends._numba.vectors import (
    add,
    broadcast,
    exp2,
    lanes,
    larger,
    largest,
    load,
    multiply,
    multiply_add,
    splat,
    store,
    subtract,
    total,
)
from nsa_sel.core import forks
from nsa_sel.core.call import Call

# Of NumPy's type: Numba compiles a function again for every Python number that it is called with by its value.
_ZERO, _ONE = np.int64(0), np.int64(1)
TILE = np.int64(64)  # KV positions: one tile of keys is 16 KiB at D = 64 in float32, half of a usual L1 cache
_BATCH = 64  # query rows x heads that a tile takes at a time for dk and dv
_SQUARE = 16  # side of the blocks in which tiles are transposed
_SMALL = 1 << 22  # multiply-adds under which waking threads costs more than it saves
_LOG2E, _LN2 = math.log2(math.e), math.log(2.0)

# reassoc is left out: explicit vectors need no licence to reorder, and the rounding trick of `exp2` would not survive it. So is arcp:
# versions of one loop would divide or multiply by the reciprocal, and which one runs depends on where memory happens to lie.
_jit = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})


@_jit
def _add_to(c, at, x):
    store(c, at, add(load(c, at), x))


@_jit
def _multiply(c, c_at, a, a_at, b, b_at, sizes):
    """c[i, j] += sum over l of a[i, l] b[l, j] for i, l, j under `sizes`. The arrays are flat: of the places c_at, a_at, b_at the
    first number is the offset of element [0, 0], the others are the strides; rows of c and b are contiguous.

    Eight independent sums hide the latency of a multiply-add: 4 rows by 2 vectors, and 1 row by 8 vectors for up to 3 rows left.
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


@_jit
def _list_rows(first, last, ranges, at, rows, fill, S, G, n, tiles):
    """For every KV head b * G + g and tile: count the query positions whose ranges touch the tile in `at`, or write them, ascending.

    The ranges are taken before the causal clamp, so that the lists hold for any positions.
    """
    seen = np.empty(tiles, np.int64)
    for head in range(first, last):
        b, g = head // G, head % G
        seen[:] = -1
        for s in range(S):
            r0 = ((b * S + s) * G + g) * n * 2
            for r in range(r0, r0 + 2 * n, 2):
                start, end = max(ranges[r], 0), min(ranges[r + 1], tiles * TILE)
                if start < end:
                    for tile in range(start // TILE, (end - 1) // TILE + 1):
                        if seen[tile] != s:
                            seen[tile] = s
                            if fill:
                                rows[at[head * tiles + tile]] = s
                            at[head * tiles + tile] += 1


@_jit
def _transpose_tiles(first, last, x, xt, slot, limit, x_step, G, tiles, D):
    """xt[slot, d, j] = x[b, g, tile * TILE + j, d] for the tiles that have a slot, up to the sequence's limit; zeros beyond."""
    for cell in range(first, last):
        if slot[cell] >= 0:
            head, tile = cell // tiles, cell % tiles
            x0 = head // G * x_step[0] + head % G * x_step[1] + tile * TILE * x_step[2]
            t0, filled = slot[cell] * D * TILE, max(0, min(TILE, limit[head // G] - tile * TILE))
            for d0 in range(0, D, _SQUARE):  # by squares: a cache line is filled while the lines that fill it are at hand
                for j0 in range(0, TILE, _SQUARE):
                    stop = min(filled, j0 + _SQUARE)
                    for d in range(d0, min(d0 + _SQUARE, D)):
                        for j in range(j0, stop):
                            xt[t0 + d * TILE + j] = x[x0 + j * x_step[2] + d]
                        for j in range(max(stop, j0), j0 + _SQUARE):
                            xt[t0 + d * TILE + j] = 0


@_jit
def _take_scores(s, lo, hi, first, last, h, Dv, top, mass, out):
    """A step of the online softmax: scores s [h, TILE] of keys lo to hi become weights; what was summed shrinks to a new maximum."""
    W = lanes(s)
    low = s.dtype.type(-np.inf)
    for head in range(h):
        at = head * TILE
        for j in range(first, lo):
            s[at + j] = low
        for j in range(hi, last):
            s[at + j] = low
        best = splat(low)
        for j in range(first, last, W):
            best = larger(load(s, at + j), best)
        peak = largest(best)
        if peak > top[head]:
            if top[head] > low:
                shrink = largest(exp2(splat(top[head] - peak)))
                mass[head] *= shrink
                for d in range(head * Dv, head * Dv + Dv):
                    out[d] *= shrink
            top[head] = peak
        # A maximum of -inf (infinite keys) must give weights of 0, not inf - inf.
        base, weights = splat(top[head] if top[head] > low else s.dtype.type(0)), splat(s.dtype.type(0))
        for j in range(first, last, W):
            p = exp2(subtract(load(s, at + j), base))
            weights = add(weights, p)
            store(s, at + j, p)
        mass[head] += total(weights)


@_jit
def _forward_rows(first, last, q, kt, v, ranges, position, slot, o, lse, log2_scale, q_step, v_step, sizes):
    """o and lse of rows first to last, in the order [B,G,S]: rows of one KV head that follow each other share blocks."""
    S, G, h, Dk, Dv, S_kv, n = sizes
    tiles, pair = (S_kv + TILE - 1) // TILE, 2 * lanes(q)
    query, s, out = np.empty(h * Dk, q.dtype), np.empty(h * TILE, q.dtype), np.empty(h * Dv, q.dtype)
    top, mass = np.empty(h, q.dtype), np.empty(h, q.dtype)
    for row in range(first, last):
        head, i = row // S, row % S
        b, g = head // G, head % G
        at = (b * S + i) * G + g
        limit = min(position[b * S + i] + 1, S_kv)
        _scaled(query, 0, q, b * q_step[0] + i * q_step[1] + g * q_step[2], q_step[3], h, Dk, log2_scale)
        top[:], mass[:], out[:] = -np.inf, 0, 0
        for r in range(at * n * 2, (at + 1) * n * 2, 2):
            start, end = max(ranges[r], 0), min(ranges[r + 1], limit)
            while start < end:
                tile = start // TILE
                lo, hi = start - tile * TILE, min(end - tile * TILE, TILE)
                left, right = lo // pair * pair, (hi + pair - 1) // pair * pair
                kt0 = slot[head * tiles + tile] * Dk * TILE + left
                s[:] = 0
                _multiply(s, (left, TILE), query, (_ZERO, Dk, _ONE), kt, (kt0, TILE), (h, Dk, right - left))
                _take_scores(s, lo, hi, left, right, h, Dv, top, mass, out)
                v0 = b * v_step[0] + g * v_step[1] + start * v_step[2]
                _multiply(out, (_ZERO, Dv), s, (lo, TILE, _ONE), v, (v0, v_step[2]), (h, hi - lo, Dv))
                start += hi - lo
        for m in range(h):
            seen = mass[m] != 0
            lse[at * h + m] = (top[m] + math.log2(mass[m])) * _LN2 if seen else -np.inf
            for d in range(Dv):
                o[(at * h + m) * Dv + d] = out[m * Dv + d] / mass[m] if seen else 0


@_jit
def _scaled(target, t0, x, x0, x_row, rows, cols, scale):
    """target [rows, cols] = scale * x."""
    for i in range(rows):
        for j in range(cols):
            target[t0 + i * cols + j] = scale * x[x0 + i * x_row + j]


@_jit
def _gradient_of_scores(s, dp, at, width, lse2, delta):
    """From scores s and dp = do.v of one row and head, in place: s becomes p, dp becomes p (dp - delta)."""
    W = lanes(s)
    log_sum, offset = splat(lse2), splat(delta)
    for j in range(at, at + width, W):
        p = exp2(subtract(load(s, j), log_sum))
        store(s, j, p)
        store(dp, j, multiply(p, subtract(load(dp, j), offset)))


@_jit
def _dq_rows(
    first, last, q, k, kt, vt, ranges, position, slot, o, lse, do, dlse, dq, delta, log2_scale, scale,
    q_step, k_step, o_step, lse_step, do_step, dlse_step, sizes,
):  # fmt: skip
    """dq of rows first to last, in the order [B,G,S], and delta [B,S,G,h] = do.o - dlse, which dk and dv need too."""
    S, G, h, Dk, Dv, S_kv, n = sizes
    tiles, pair = (S_kv + TILE - 1) // TILE, 2 * lanes(q)
    query, gradient, out = np.empty(h * Dk, q.dtype), np.empty(h * Dv, q.dtype), np.empty(h * Dk, q.dtype)
    s, dp, lse2 = np.empty(h * TILE, q.dtype), np.empty(h * TILE, q.dtype), np.empty(h, q.dtype)
    for row in range(first, last):
        head, i = row // S, row % S
        b, g = head // G, head % G
        at = (b * S + i) * G + g
        limit = min(position[b * S + i] + 1, S_kv)
        _scaled(query, 0, q, b * q_step[0] + i * q_step[1] + g * q_step[2], q_step[3], h, Dk, log2_scale)
        _scaled(gradient, 0, do, b * do_step[0] + i * do_step[1] + g * do_step[2], do_step[3], h, Dv, q.dtype.type(1))
        for m in range(h):
            o0 = b * o_step[0] + i * o_step[1] + g * o_step[2] + m * o_step[3]
            product = q.dtype.type(0)
            for d in range(Dv):
                product += gradient[m * Dv + d] * o[o0 + d]
            delta[at * h + m] = product - dlse[b * dlse_step[0] + i * dlse_step[1] + g * dlse_step[2] + m * dlse_step[3]]
            lse2[m] = lse[b * lse_step[0] + i * lse_step[1] + g * lse_step[2] + m * lse_step[3]] * _LOG2E
        out[:] = 0
        for r in range(at * n * 2, (at + 1) * n * 2, 2):
            start, end = max(ranges[r], 0), min(ranges[r + 1], limit)
            while start < end:
                tile = start // TILE
                lo, hi = start - tile * TILE, min(end - tile * TILE, TILE)
                left, right = lo // pair * pair, (hi + pair - 1) // pair * pair
                t0 = slot[head * tiles + tile] * TILE
                s[:], dp[:] = 0, 0
                _multiply(s, (left, TILE), query, (_ZERO, Dk, _ONE), kt, (t0 * Dk + left, TILE), (h, Dk, right - left))
                _multiply(dp, (left, TILE), gradient, (_ZERO, Dv, _ONE), vt, (t0 * Dv + left, TILE), (h, Dv, right - left))
                for m in range(h):
                    _gradient_of_scores(s, dp, m * TILE + left, right - left, lse2[m], delta[at * h + m])
                k0 = b * k_step[0] + g * k_step[1] + start * k_step[2]
                _multiply(out, (_ZERO, Dk), dp, (lo, TILE, _ONE), k, (k0, k_step[2]), (h, hi - lo, Dk))
                start += hi - lo
        _scaled(dq, at * h * Dk, out, 0, Dk, h, Dk, scale)


@_jit
def _mark(keep, k0, ranges, r0, n, tile0, width):
    """keep[k0 + j] = whether key tile0 + j, j < width, is in one of the n ranges; returns how many are."""
    marked = 0
    keep[k0 : k0 + TILE] = False
    for r in range(r0, r0 + 2 * n, 2):
        for j in range(max(ranges[r] - tile0, 0), min(ranges[r + 1] - tile0, width)):
            keep[k0 + j] = True
            marked += 1
    return marked


@_jit
def _dkdv_tiles(
    first, last, q, kt, vt, ranges, position, slot, at, rows, lse, do, delta, dk, dv, log2_scale,
    q_step, lse_step, do_step, sizes,
):  # fmt: skip
    """dk and dv of tiles first to last, in the order [B,G,tile]: each sums over the rows that touch it in ascending order."""
    S, G, h, Dk, Dv, S_kv, n = sizes
    tiles, batch = (S_kv + TILE - 1) // TILE, max(1, _BATCH // h)
    query, gradient = np.empty(batch * h * Dk, q.dtype), np.empty(batch * h * Dv, q.dtype)
    s, dp = np.empty(batch * h * TILE, q.dtype), np.empty(batch * h * TILE, q.dtype)
    taken, marked, keep = np.empty(batch, np.int64), np.empty(batch, np.int64), np.empty(batch * TILE, np.bool_)
    for cell in range(first, last):
        head, tile = cell // tiles, cell % tiles
        b, g, tile0 = head // G, head % G, tile * TILE
        width = min(TILE, S_kv - tile0)
        dk0, dv0 = (head * S_kv + tile0) * Dk, (head * S_kv + tile0) * Dv
        dk[dk0 : dk0 + width * Dk] = 0
        dv[dv0 : dv0 + width * Dv] = 0
        entry = at[cell]
        while entry < at[cell + 1]:
            count = 0
            while count < batch and entry < at[cell + 1]:
                i = rows[entry]
                entry += 1
                r0, seen = ((b * S + i) * G + g) * n * 2, min(width, position[b * S + i] + 1 - tile0)
                marked[count] = _mark(keep, count * TILE, ranges, r0, n, tile0, seen)
                if marked[count] > 0:
                    q0, do0 = b * q_step[0] + i * q_step[1] + g * q_step[2], b * do_step[0] + i * do_step[1] + g * do_step[2]
                    _scaled(query, count * h * Dk, q, q0, q_step[3], h, Dk, log2_scale)
                    _scaled(gradient, count * h * Dv, do, do0, do_step[3], h, Dv, q.dtype.type(1))
                    taken[count] = i
                    count += 1
            t0 = slot[cell] * TILE
            s[:], dp[:] = 0, 0
            _multiply(s, (_ZERO, TILE), query, (_ZERO, Dk, _ONE), kt, (t0 * Dk, TILE), (count * h, Dk, TILE))
            _multiply(dp, (_ZERO, TILE), gradient, (_ZERO, Dv, _ONE), vt, (t0 * Dv, TILE), (count * h, Dv, TILE))
            for c in range(count):
                lse0 = b * lse_step[0] + taken[c] * lse_step[1] + g * lse_step[2]
                for m in range(h):
                    log_sum = q.dtype.type(lse[lse0 + m * lse_step[3]] * _LOG2E)
                    row = (c * h + m) * TILE
                    _gradient_of_scores(s, dp, row, TILE, log_sum, delta[((b * S + taken[c]) * G + g) * h + m])
                    if marked[c] < TILE:
                        for j in range(TILE):
                            if not keep[c * TILE + j]:
                                s[row + j], dp[row + j] = 0, 0
            _multiply(dv, (dv0, Dv), s, (_ZERO, _ONE, TILE), gradient, (_ZERO, Dv), (width, count * h, Dv))
            _multiply(dk, (dk0, Dk), dp, (_ZERO, _ONE, TILE), query, (_ZERO, Dk), (width, count * h, Dk))
        for d in range(dk0, dk0 + width * Dk):
            dk[d] *= _LN2  # the queries were scaled by scale * log2(e)


class _Tiles(NamedTuple):
    """Which query positions touch which tile of keys, over [B,G,tile] in that order."""

    slot: np.ndarray  # [B*G*tiles] int64: the tile's number among those that any row touches, -1 for others
    at: np.ndarray  # [B*G*tiles + 1] int64: where a tile's list begins in rows
    rows: np.ndarray  # int32: query positions, ascending for each tile; empty when only the forward needed the plan


def _tiles(call: Call, ranges: np.ndarray, *, listed: bool) -> _Tiles:
    B, S, G = call.q.shape[:3]
    tiles, n = -(-call.k.shape[2] // TILE), call.selection.n

    def build() -> _Tiles:
        at, work = np.zeros(B * G * tiles + 1, np.int64), 8 * ranges.size
        nothing = np.empty(0, np.int32)
        _parallel(_list_rows, B * G, work, ranges, at[1:], nothing, False, S, G, n, tiles)
        slot = np.where(at[1:] > 0, np.cumsum(at[1:] > 0) - 1, -1)
        np.cumsum(at, out=at)
        rows = np.empty(at[-1] if listed else 0, np.int32)
        if listed:
            _parallel(_list_rows, B * G, work, ranges, at[:-1].copy(), rows, True, S, G, n, tiles)
        return _Tiles(slot, at, rows)

    plan: _Tiles = call.selection.plan(("numba", listed, call.k.shape[2]), build)
    return plan


def _parallel(kernel: Callable[..., None], items: int, work: int, *args: Any) -> None:
    """kernel(first, last, *args) over chunks of range(items) in torch's number of threads; work: multiply-adds in all."""
    threads = torch.get_num_threads() if work > _SMALL else 1
    chunk = -(-items // (1 if threads == 1 else 16 * threads))
    firsts = iter(range(0, items, chunk))

    def run() -> None:
        for first in firsts:
            kernel(first, min(first + chunk, items), *args)

    others = [_pool().submit(run) for _ in range(min(threads, -(-items // chunk)) - 1)]
    run()
    for other in others:
        if not other.cancel():
            other.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "nsa_sel")


forks.in_child(_pool.cache_clear)  # which has the pool but not its threads


def _flat(tensor: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, tuple[int, ...]]:
    """A tensor's memory as one line and its strides but the last, which is 1; a copy only for another dtype or last stride."""
    tensor = tensor.detach().to(dtype)
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        tensor = tensor.contiguous()
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)) + tensor.shape[-1]
    return tensor.as_strided((extent,), (1,)).numpy(), tensor.stride()[:-1]


class _Prepared(NamedTuple):
    """The arrays and numbers that forward and backward give to their kernels."""

    dtype: torch.dtype
    ranges: np.ndarray
    position: np.ndarray
    limit: np.ndarray  # [B]: no row of the sequence may see this key or a later one
    log2_scale: Any
    sizes: tuple[int, ...]
    work: int  # multiply-adds of one product over all rows


def _prepare(call: Call) -> _Prepared:
    B, S, G, h, Dk = call.q.shape
    S_kv, Dv = call.v.shape[2:]
    dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    ranges = call.selection.disjoint_ranges().to(torch.int64).view(-1).numpy()
    position = call.positions().contiguous().numpy()
    scale = (np.float64 if dtype == torch.float64 else np.float32)(call.scale * _LOG2E)
    work = B * S * G * h * call.selection.length_bound(S_kv) * max(Dk, Dv)
    return _Prepared(dtype, ranges, position.ravel(), position.max(1) + 1, scale, (S, G, h, Dk, Dv, S_kv, call.selection.n), work)


def _transposed(x: np.ndarray, x_step: tuple[int, ...], tiles: _Tiles, prepared: _Prepared, D: int) -> np.ndarray:
    _, G, _, _, _, S_kv, _ = prepared.sizes
    xt = np.empty((int(tiles.slot.max()) + 1) * D * TILE, x.dtype)
    _parallel(_transpose_tiles, tiles.slot.size, xt.size, x, xt, tiles.slot, prepared.limit, x_step, G, -(-S_kv // TILE), D)
    return xt


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] in q's dtype and lse [B,S,G,h] in float32, float64 for float64 inputs; 16-bit inputs are computed in float32."""
    ready = _prepare(call)
    tiles = _tiles(call, ready.ranges, listed=False)
    (q, q_step), (k, k_step), (v, v_step) = (_flat(tensor, ready.dtype) for tensor in (call.q, call.k, call.v))
    kt = _transposed(k, k_step, tiles, ready, call.k.shape[-1])
    shape = call.q.shape[:-1]
    o = call.q.new_empty(*shape, call.v.shape[-1], dtype=ready.dtype)
    lse = call.q.new_empty(shape, dtype=ready.dtype)
    _parallel(
        _forward_rows, shape[:3].numel(), 2 * ready.work, q, kt, v, ready.ranges, ready.position, tiles.slot,
        o.view(-1).numpy(), lse.view(-1).numpy(), ready.log2_scale, q_step, v_step, ready.sizes,
    )  # fmt: skip
    return o.to(call.q.dtype), lse


def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, shaped and typed as q, k, v, contiguous; do [B,S,G,h,Dv] of any strides, dlse [B,S,G,h] or None for zeros."""
    ready = _prepare(call)
    tiles = _tiles(call, ready.ranges, listed=True)
    (q, q_step), (k, k_step), (v, v_step) = (_flat(tensor, ready.dtype) for tensor in (call.q, call.k, call.v))
    (o_, o_step), (do_, do_step) = _flat(o, ready.dtype), _flat(do, ready.dtype)
    lse_, lse_step = _flat(lse.unsqueeze(-1), ready.dtype)
    dlse = lse.new_zeros(()).expand_as(lse) if dlse is None else dlse
    dlse_, dlse_step = _flat(dlse.unsqueeze(-1), ready.dtype)
    kt = _transposed(k, k_step, tiles, ready, call.k.shape[-1])
    vt = _transposed(v, v_step, tiles, ready, call.v.shape[-1])
    dq, dk, dv = (tensor.new_empty(tensor.shape, dtype=ready.dtype) for tensor in (call.q, call.k, call.v))
    delta = np.empty(lse.numel(), q.dtype)
    _parallel(
        _dq_rows, call.q.shape[:3].numel(), 3 * ready.work, q, k, kt, vt, ready.ranges, ready.position, tiles.slot,
        o_, lse_, do_, dlse_, dq.view(-1).numpy(), delta, ready.log2_scale, q.dtype.type(call.scale),
        q_step, k_step, o_step, lse_step, do_step, dlse_step, ready.sizes,
    )  # fmt: skip
    _parallel(
        _dkdv_tiles, tiles.slot.size, 4 * ready.work, q, kt, vt, ready.ranges, ready.position, tiles.slot, tiles.at, tiles.rows,
        lse_, do_, delta, dk.view(-1).numpy(), dv.view(-1).numpy(), ready.log2_scale, q_step, lse_step, do_step, ready.sizes,
    )  # fmt: skip
    dq, dk, dv = (gradient.to(call.q.dtype) for gradient in (dq, dk, dv))
    return dq, dk, dv
