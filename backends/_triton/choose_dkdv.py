"""Compute dk and dv of attention to compressed keys without atomics: a program takes a tile of keys and a section of
the rows.

dv = sum p^T do, dk = scale * sum ds^T q over rows and heads (softmax.py). Products are transposed: p is [keys, rows].
There are far fewer compressed keys than rows, so tiles of keys alone would not fill a GPU. Each section stores float32
partial sums, and a second kernel adds them in the order of the sections.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.arguments import Dims, dims_of, options
from nsa_sel.backends._triton.choose_rows import bounds_of, key_tile, seen_keys, sizes_of, strides_of, tiles_of
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.softmax import products, split_products
from nsa_sel.backends._triton.tiles import load_columns, load_kv, row_descriptors, store_columns
from nsa_sel.backends._triton.walk import add_rows_step, empty_dkdv, load_rows, store_dkdv
from nsa_sel.core.call import ChooseCall, Rule
from nsa_sel.settings.schema import KernelConfig

PROGRAMS = 4096  # programs that keep any GPU busy; about half are idle, because their rows see none of their keys
SHORTEST = 128  # fewest rows per section; twice as many for fewer heads than FEW_HEADS
FEW_HEADS = 16


class Sections(NamedTuple):
    """Sections, as kernels take them: `total` sections of `rows` rows, `tiles` tiles of keys, `pairs` = B * G.

    In a packed batch every sequence has up to `total` sections of its own, none shorter than `rows`.
    """

    total: int
    rows: int
    tiles: int
    pairs: int


@triton.jit
def first_row(key, start, rule: tl.constexpr):
    """Return the first row that sees compressed key `key` if positions are implied."""
    return tl.maximum(key.to(tl.int64) * rule.compress_stride + rule.compress_block - 1 - start, 0)


@triton.jit
def add_rows(
    sums, kv, q_desc, do_desc, q, do, facts, q_pos, b, g, key, first, low, high, strides, stride_do, sizes, own, scale_log2,
    dims: tl.constexpr, rule: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the contribution of rows [low, high) to the sums (dk / scale in two tiles, dv) of the keys `key` [BLOCK_K]
    from `first` on.

    A step takes ROWS (row, head) pairs, so that any number of heads fills the tensor cores. MASKED: some row may not
    see some key; with implied positions, all rows see the first key. Without MASKED, all steps are full if h divides
    ROWS. TMA also loads rows from `high` on, which are masked; it is not used for them in a packed batch, where they
    may belong to another sequence.
    """
    FULL: tl.constexpr = ROWS % dims.h == 0 and not MASKED
    h: tl.constexpr = dims.h
    REST: tl.constexpr = dims.BLOCK_REST
    k_tile, k_rest, v_tile = kv
    r = tl.arange(0, ROWS)
    facts += (b * sizes.G + g) * 2 * sizes.S * h
    if q_pos is None:
        begin = tl.minimum(first_row(key, own.start, rule), own.S).to(tl.int32)  # computed once, instead of seen_keys per step
    for pair0 in range(low * h, high * h, ROWS):
        pair = pair0 + r  # [ROWS], as all row indices below
        exists = None if FULL else pair < high * h
        s, head = tl.minimum(pair // h, high - 1).to(tl.int64), (pair % h).to(tl.int64)
        if q_pos is not None:
            seen = seen_keys(q_pos, strides.pos, b, s, sizes, rule)
            exists = exists & (seen > first)  # other rows may hold NaN and are not loaded
        q_tile, q_rest, do_tile = load_rows(q_desc, do_desc, q, do, strides, stride_do, b, g, pair0 // h, s, head, exists, dims, ROWS)
        logits = split_products(k_tile, k_rest, q_tile, q_rest, REST)  # [BLOCK_K, ROWS]
        # Rows that do not exist get lse = +inf, hence p = 0. Loading after the products takes fewer registers.
        lse2 = tl.load(facts + sizes.S * h + pair, mask=exists, other=None if FULL else float("inf"))
        logits = logits * scale_log2 - lse2[None, :]
        if MASKED:
            visible = begin[:, None] <= (pair // h)[None, :] if q_pos is None else key[:, None] < seen[None, :]
            logits = tl.where(visible, logits, float("-inf"))
        p = tl.exp2(logits)  # [BLOCK_K, ROWS]
        dp = products(v_tile, do_tile)  # [BLOCK_K, ROWS]
        delta_rows = tl.load(facts + pair, mask=exists, other=None if FULL else 0.0)
        ds = p * (dp - delta_rows[None, :])
        if MASKED and q_pos is not None:  # a value that no row sees may be NaN
            ds = tl.where(visible, ds, 0.0)
        ds = ds.to(q_tile.dtype)
        sums = add_rows_step(sums, p.to(do_tile.dtype), ds, (q_tile, q_rest), do_tile, REST)
    return sums


@triton.jit
def dkdv_kernel(
    q, q_desc, do_desc, k, v, q_pos, cu, cu_cmp, do, facts, part_dk, part_dv, strides, stride_do, sizes, sections, scale, scale_log2,
    dims: tl.constexpr, rule: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute part_dk, part_dv [sections, B*G, C, D]: the sums of one section of rows for one tile of keys.

    With implied positions, sections whose rows see none of the keys store nothing.

    Grid: one program per section, pair b*G + g and tile of keys; tiles innermost, late sections first.
    Tiles: k and v [BLOCK_K, D], loaded once; q and do [ROWS, D] per step.
    TMA: q_desc and do_desc load q and do; None: pointer loads.
    """
    number = tl.program_id(0)
    first, first_key, row0, own, rows = key_tile(number % sections.tiles, cu, cu_cmp, sizes, sections, BLOCK_K)
    pair = number // sections.tiles % sections.pairs
    section = sections.total - 1 - number // sections.tiles // sections.pairs
    b, g = (pair // sizes.G).to(tl.int64), (pair % sizes.G).to(tl.int64)
    low, high = row0 + section * rows, tl.minimum(row0 + (section + 1) * rows, own.S)
    begin, whole = low, high  # rows [begin, whole) may not see all keys; rows [whole, high) form full steps
    if q_pos is None:
        begin = tl.maximum(low, tl.minimum(first_row(first, own.start, rule), high)).to(tl.int32)
        last = tl.minimum(first + BLOCK_K, own.C) - 1
        whole = tl.maximum(begin, tl.minimum(first_row(last, own.start, rule), high)).to(tl.int32)
        if ROWS % dims.h == 0:
            whole += (high - whole) % (ROWS // dims.h)
    if (begin < high) | (q_pos is not None):
        key = first + tl.arange(0, BLOCK_K)
        # With implied positions, keys that no row sees are not loaded: they may hold NaN.
        is_seen = key < own.C if q_pos is not None else (key < own.C) & (first_row(key, own.start, rule) < own.S)
        kv = load_kv(k, v, strides, b, g, first_key + key, is_seen, dims)
        sums = add_rows(
            empty_dkdv(BLOCK_K, dims, facts.dtype.element_ty), kv, q_desc if cu is None else None, do_desc if cu is None else None, q, do,
            facts, q_pos, b, g, key, first, begin, whole, strides, stride_do, sizes, own, scale_log2, dims, rule, ROWS, True,
        )  # fmt: skip
        if q_pos is None:
            sums = add_rows(
                sums, kv, q_desc, do_desc, q, do, facts, q_pos, b, g, key, first, whole, high, strides, stride_do, sizes, own,
                scale_log2, dims, rule, ROWS, False,
            )  # fmt: skip
        part = (section * sections.pairs + pair).to(tl.int64) * sizes.C + first_key + first
        row = tl.arange(0, BLOCK_K)
        to_dk, to_dv = part_dk + part * dims.Dk + row * dims.Dk, part_dv + part * dims.Dv + row * dims.Dv
        store_dkdv(to_dk, to_dv, sums, scale, row < own.C - first, dims)


@triton.jit
def sum_sections_kernel(
    part_dk, part_dv, q_pos, cu, cu_cmp, dk, dv, sizes, sections,
    dims: tl.constexpr, rule: tl.constexpr, BLOCK_K: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add the partial sums in the order of the sections: dk [B*G, C, Dk] and dv [B*G, C, Dv]; zeros for keys that no
    row sees.

    Grid: one program per pair and KEYS of the BLOCK_K keys of a tile.
    """
    PIECES: tl.constexpr = BLOCK_K // KEYS
    BLOCK_DV: tl.constexpr = dims.BLOCK_DV
    number = tl.program_id(0)
    tile = number // PIECES % sections.tiles
    bg = (number // PIECES // sections.tiles).to(tl.int64)
    first, first_key, row0, own, rows = key_tile(tile, cu, cu_cmp, sizes, sections, BLOCK_K)
    key = first + number % PIECES * KEYS + tl.arange(0, KEYS)
    exists = key < own.C
    COLUMNS: tl.constexpr = dims.BLOCK_D if dims.BLOCK_REST == 0 else 2 * dims.BLOCK_D  # 128 + 64 take 256
    dk_acc = tl.zeros([KEYS, COLUMNS], part_dk.dtype.element_ty)
    dv_acc = tl.zeros([KEYS, BLOCK_DV], part_dk.dtype.element_ty)
    section = 0
    total = sections.total
    if q_pos is None:
        begin = first_row(first, own.start, rule)
        if cu is not None:  # sections of one sequence; keys that no row sees have none
            total = tl.where(begin < own.S, tl.cdiv(own.S - row0, rows), 0)
            begin = tl.minimum(begin, own.S) - row0
        section = (begin // rows).to(tl.int32)
    for i in range(section, total):
        row = (i * sections.pairs + bg) * sizes.C + first_key + key
        dk_acc += load_columns(part_dk + row * dims.Dk, exists, 0, dims.Dk, COLUMNS)
        dv_acc += load_columns(part_dv + row * dims.Dv, exists, 0, dims.Dv, BLOCK_DV)
    out = bg * sizes.C + first_key + key
    store_columns(dk + out * dims.Dk, dk_acc, exists, 0, dims.Dk)
    store_columns(dv + out * dims.Dv, dv_acc, exists, 0, dims.Dv)


def dkdv(call: ChooseCall, do: Tensor, facts: Tensor, config: KernelConfig) -> tuple[Tensor, Tensor]:
    """Return dk [B,G,C,Dk] and dv [B,G,C,Dv] from `facts` [B,G,2,S,h] of the rows (`runs.dq_kernel`). The scale is
    positive.

    Partial sums take at most four times the call's scratch, unless one section needs more.
    """
    dk, dv = (x.new_empty(x.shape) for x in (call.k, call.v))
    if facts.numel() == 0 or call.k.shape[2] == 0:
        return dk.zero_(), dv.zero_()
    sections = sections_of(call, config)
    sizes, dims = sizes_of(call, 1), dims_of(call.q, call.v)
    part_dk, part_dv = (facts.new_empty(sections.total, *x.shape) for x in (call.k, call.v))
    # Not for a single tile of keys that is not full: with one compressed key and one group, Triton 3.6's assembler
    # crashes.
    by_tma = config.loads == "tma" and call.q_pos is None and call.k.shape[2] >= config.block_l
    descriptors = row_descriptors(call.q, do, dims, config.rows, by_tma)
    _dkdv(dims, call.rule, config).launch(
        sections.total * sections.tiles * sections.pairs,
        (call.q, *descriptors, call.k, call.v, call.q_pos, *bounds_of(call), do, facts, part_dk, part_dv),
        (strides_of(call), do.stride()[:4], sizes, sections, call.scale, call.scale_log2()),
    )
    total = _sum_sections(dims, call.rule, config.block_l)
    total.launch(
        sections.tiles * sections.pairs * (config.block_l // total.constants["KEYS"]),
        (part_dk, part_dv, call.q_pos, *bounds_of(call), dk, dv),
        (sizes, sections),
    )
    return dk, dv


def sections_of(call: ChooseCall, config: KernelConfig) -> Sections:
    """Return as many sections as give PROGRAMS programs, fit in memory, and are not too short."""
    B, S, G = call.q.shape[:3]
    C = call.k.shape[2]
    tiles = tiles_of(call, C, config.block_l)
    size = B * G * C * (call.k.shape[3] + call.v.shape[3]) * 4
    shortest = SHORTEST if call.q.shape[3] >= FEW_HEADS else 2 * SHORTEST
    count = max(1, min(-(-PROGRAMS // (tiles * B * G)), 4 * call.scratch // size, S // shortest))
    if call.sequences is not None:
        return Sections(count, shortest, tiles, B * G)
    rows = -(-S // count)
    return Sections(-(-S // rows), rows, tiles, B * G)


@functools.lru_cache(REMEMBERED)
def _dkdv(dims: Dims, rule: Rule, config: KernelConfig) -> Kernel:
    return Kernel(dkdv_kernel, dims=dims, rule=rule.of_keys(), ROWS=config.rows, BLOCK_K=config.block_l, **options(config))


@functools.lru_cache(REMEMBERED)
def _sum_sections(dims: Dims, rule: Rule, block_k: int) -> Kernel:
    return Kernel(sum_sections_kernel, dims=dims, rule=rule.of_keys(), BLOCK_K=block_k, KEYS=min(16, block_k), num_warps=4)
