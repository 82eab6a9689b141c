"""Rows of a packed batch over caches: which keys of which request each sees, and their selections as those of one
sequence that holds the keys of all requests with many rows.

rows [T+1,4] int32 has, for row i: the keys that it sees, its request, the first key of its request in that sequence (-1
if the request has few rows, or does not fit), and the i-th of the rows without one, whose number is in the last row.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.tiles import tile_size
from nsa_sel.quantize import Scales

ROWS, BOUNDS = 32, 32
COMPARED = 2048  # pairs of a row's blocks per program of `join_rows`
LEAST = tl.constexpr(1e-30)  # factor in place of 0, for which masked logits would be NaN


@triton.jit
def packed_rows_kernel(
    cu_seqlens, lengths, rows, stride_lengths, T, R, S_kv, unit, room, FEW: tl.constexpr, ROWS: tl.constexpr, BOUNDS: tl.constexpr,
):  # fmt: skip
    """Write rows.

    Grid: one program per ROWS rows, which compares them with the bounds of all requests, BOUNDS at a time.

    unit, room: a request begins at a multiple of `unit` keys and fits if it ends within `room` keys.
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS], and all that is of rows
    keys, request, begin, rank = i * 0, i * 0, i * 0, i
    joined, listed = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)  # keys and rows of the requests so far
    for first in range(0, R, BOUNDS):
        r = first + tl.arange(0, BOUNDS)  # [BOUNDS], and all that is of requests
        start = tl.load(cu_seqlens + r, mask=r < R, other=2**31 - 1).to(tl.int64)
        end = tl.load(cu_seqlens + r + 1, mask=r < R, other=2**31 - 1).to(tl.int64)
        length = tl.load(lengths + r * stride_lengths, mask=r < R, other=0).to(tl.int64)
        many = end - start > FEW
        needed = tl.where(many, (tl.minimum(tl.maximum(length, 0), S_kv) + unit - 1) // unit * unit, 0)
        stop = joined + tl.cumsum(needed, 0)
        fits = many & (stop <= room)
        rest = tl.where(fits, 0, end - start)
        own = (start[None, :] <= i[:, None]) & (i[:, None] < end[None, :])  # [ROWS, BOUNDS]
        keys += tl.sum(tl.where(own, (length - end)[None, :], 0), 1)
        request += tl.sum(tl.where(own, r[None, :], 0), 1)
        begin += tl.sum(tl.where(own & fits[None, :], (stop - needed + 1)[None, :], 0), 1)
        rank += tl.sum(tl.where(own, -start[None, :], 0) + tl.where(end[None, :] <= i[:, None], rest[None, :], 0), 1)
        joined += tl.sum(needed, 0)
        listed += tl.sum(rest, 0)
    last = tl.load(cu_seqlens + R).to(tl.int64)
    exists, padding = i < T, i >= last
    keys = tl.where(padding, 0, tl.minimum(tl.maximum(keys + i + 1, 0), S_kv))  # position + 1
    rank = tl.where(padding, listed + i - last, rank)
    tl.store(rows + 4 * i, keys.to(tl.int32), mask=exists)
    tl.store(rows + 4 * i + 1, request.to(tl.int32), mask=exists)
    tl.store(rows + 4 * i + 2, (begin - 1).to(tl.int32), mask=exists)
    tl.store(rows + 4 * rank + 3, i.to(tl.int32), mask=exists & (begin == 0))
    tl.store(rows + 4 * T + 3, (listed + T - last).to(tl.int32), mask=tl.program_id(0) == 0)


def packed_rows(cu_seqlens: Tensor, lengths: Tensor, rows: Tensor, S_kv: int, unit: int, room: int, few: int) -> None:
    """Fill rows [T+1,4] from cu_seqlens [R+1] int32, contiguous, and lengths [R]. S_kv: most keys of a request; unit,
    room: see the kernel; few: most rows of a request that is not joined."""
    T, R = len(rows) - 1, len(lengths)
    _rows_kernel(few).launch(-(-T // ROWS), (cu_seqlens, lengths, rows), (lengths.stride(0), T, R, S_kv, unit, room))


@functools.lru_cache(REMEMBERED)
def _rows_kernel(few: int) -> Kernel:
    return Kernel(packed_rows_kernel, FEW=few, ROWS=ROWS, BOUNDS=BOUNDS, num_warps=4)


@triton.jit
def join_rows_kernel(
    listed, rows, block_table, ranges, positions, pages, stride_table, total, G, N: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, INDEXED: tl.constexpr, FIRST: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the distinct blocks of rows [T,G] as ranges of the joined sequence, the rows' positions in it, and the pages
    of the blocks; no ranges for rows without a place in it.

    Grid: one program per ROWS of the `total` rows. Programs that name the same block store the same page, plus FIRST.

    listed: block indices [T,G,N] if INDEXED, else ranges [T,G,N,2].
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    exists, t, i = row < total, row // G, tl.arange(0, NP)
    keys = tl.load(rows + 4 * t, mask=exists, other=0)
    request = tl.load(rows + 4 * t + 1, mask=exists, other=0).to(tl.int64)
    begin = tl.load(rows + 4 * t + 2, mask=exists, other=-1)
    at = row[:, None] * N + i[None, :]  # [ROWS, NP]
    inside = exists[:, None] & (i < N)[None, :]
    if INDEXED:
        block = tl.load(listed + at, mask=inside, other=-1).to(tl.int64)
    else:
        first, end = tl.load(listed + 2 * at, mask=inside, other=0), tl.load(listed + 2 * at + 1, mask=inside, other=0)
        block = tl.where(end > first, first // BLOCK, -1).to(tl.int64)
    seen = (block >= 0) & (block < ((keys + BLOCK - 1) // BLOCK)[:, None]) & (begin >= 0)[:, None]
    block = tl.where(seen, block, -1).to(tl.int32)
    same = (block[:, :, None] == block[:, None, :]) & (i[None, None, :] < i[None, :, None])  # [ROWS, NP, NP]
    seen = seen & (tl.max(same.to(tl.int32), 2) == 0)
    start = begin[:, None] + block * BLOCK
    tl.store(ranges + 2 * at, tl.where(seen, start, 0), mask=inside)
    tl.store(ranges + 2 * at + 1, tl.where(seen, start + BLOCK, 0), mask=inside)
    for skipped in tl.static_range(0, BLOCK, PAGE):
        key = block * BLOCK + skipped
        stored = seen & (key < keys[:, None])
        page = tl.load(block_table + (request * stride_table)[:, None] + key // PAGE, mask=stored, other=0)
        tl.store(pages + (begin[:, None] + key) // PAGE, page + FIRST, mask=stored)
    position = tl.where(begin >= 0, tl.maximum(begin + keys - 1, 0), 0)
    tl.store(positions + t, position, mask=exists & (row % G == 0))


def join_rows(
    listed: Tensor, indexed: bool, rows: Tensor, block_table: Tensor, to: tuple[Tensor, Tensor, Tensor], block: int, page: int,
    first: int = 0,
) -> None:  # fmt: skip
    """Fill `to`: ranges [T,G,n,2] int32, positions [T] int32 and pages int32, from listed [T,1,G,n] or [T,1,G,n,2]. first: the
    number of page 0."""
    T, _, G, n = listed.shape[:4]
    kernel = _join_kernel(n, block, page, indexed, first)
    kernel.launch(-(-T * G // kernel.constants["ROWS"]), (listed, rows, block_table, *to), (block_table.stride(0), T * G, G))


@functools.lru_cache(REMEMBERED)
def _join_kernel(n: int, block: int, page: int, indexed: bool, first: int) -> Kernel:
    width = tile_size(n, 1)
    rows = max(1, COMPARED // width // width)
    return Kernel(join_rows_kernel, N=n, BLOCK=block, PAGE=page, INDEXED=indexed, FIRST=first, NP=width, ROWS=rows, num_warps=4)


@triton.jit
def widen_pages_kernel(
    pages, k, v, k_scale, v_scale, k_to, v_to, factors, strides_k, strides_v, k_factors, v_factors, G,
    PAGE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy the pages of e4m3 numbers that are named to 16-bit ones, in their order, and their scales to factors [pages,G,2];
    that of keys is made positive, and its sign multiplies the keys.

    Grid: one program per group of a joined page; pages: their numbers from 1, 0 for those that nobody reads.
    strides_k, strides_v: of [pages,G,PAGE]; k_factors, v_factors: of scales [pages,G].
    """
    number, g = (tl.program_id(0) // G).to(tl.int64), (tl.program_id(0) % G).to(tl.int64)
    page = tl.load(pages + number).to(tl.int64) - 1
    if page < 0:
        return
    k_factor = 1.0 if k_scale is None else tl.load(k_scale + page * k_factors[0] + g * k_factors[1])
    v_factor = 1.0 if v_scale is None else tl.load(v_scale + page * v_factors[0] + g * v_factors[1])
    sign, size = tl.where(k_factor < 0, -1.0, 1.0), tl.abs(k_factor)
    at = factors + 2 * (number * G + g)
    tl.store(at, tl.where(size < LEAST, LEAST, size))
    tl.store(at + 1, v_factor)
    column = tl.arange(0, COLUMNS)[None, :]
    for first in tl.static_range(0, PAGE, KEYS):
        key = first + tl.arange(0, KEYS)[:, None].to(tl.int64)  # [KEYS, 1]
        to = (number * G + g) * PAGE + key
        x = tl.load(k + page * strides_k[0] + g * strides_k[1] + key * strides_k[2] + column, mask=column < DK)
        tl.store(k_to + to * DK + column, (sign * x.to(tl.float16)).to(k_to.dtype.element_ty), mask=column < DK)
        x = tl.load(v + page * strides_v[0] + g * strides_v[1] + key * strides_v[2] + column, mask=column < DV)
        tl.store(v_to + to * DV + column, x.to(tl.float16).to(v_to.dtype.element_ty), mask=column < DV)


def widen_pages(pages: Tensor, k: Tensor, v: Tensor, scales: Scales, to: tuple[Tensor, Tensor, Tensor]) -> None:
    """Fill `to`: k and v [joined pages,G,page,D] of 16 bits, and factors [joined pages,G,2] float32, from pages [joined pages]
    int32 and e4m3 caches [pages,G,page,D]."""
    _, G, page, Dk = k.shape
    kernel = _widen_kernel(page, Dk, v.shape[3])
    strides = [(0, 0) if x is None else x.stride() if scales.page_keys else (0, x.stride(1)) for x in (scales.k, scales.v)]
    kernel.launch(pages.numel() * G, (pages, k, v, scales.k, scales.v, *to), (k.stride()[:3], v.stride()[:3], *strides, G))


@functools.lru_cache(REMEMBERED)
def _widen_kernel(page: int, Dk: int, Dv: int) -> Kernel:
    return Kernel(widen_pages_kernel, PAGE=page, DK=Dk, DV=Dv, KEYS=64, COLUMNS=tile_size(max(Dk, Dv), 1), num_warps=4)
