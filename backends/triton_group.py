"""triton-group: one program per query row and KV group, so that K and V are loaded once for all h heads.

Forward, three ways of one loop (steps.py has the mathematics):
    ranges  pointer loads; the row's ranges laid end to end, so that short and unaligned ranges fill whole tiles
    blocks  whole blocks through the tensor memory accelerator (sm_90 and newer), the block that holds t through pointers; of small pages
            all blocks through pointers
    split   few rows (decode), as `ranges`: the walk cut into parts, one program each, joined by log-sum-exp (combine.py)
Backward: dQ by the same walks as `ranges` and `blocks` (dq.py); dK and dV by visiting KV tiles (dkdv.py).
The h heads are the rows of the matrix-unit tiles, padded to 16; more than 64 heads take several programs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import msgspec
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_sel.backends._buffers import temporary
from nsa_sel.backends._triton import launch
from nsa_sel.backends._triton.dkdv import key_value_gradients
from nsa_sel.backends._triton.dq import dq_blocks_kernel, dq_kernel
from nsa_sel.backends._triton.start import REMEMBERED, Launch
from nsa_sel.backends._triton.steps import (
    LN_2,
    LOWEST,
    chosen_step,
    finish_softmax,
    key_offsets,
    page_of,
    positions_of,
    products,
    row_limit,
    sequence_of,
    softmax_step,
    split_blocks,
    walk_keys,
    walk_ranges,
    whole_block,
)
from nsa_sel.core.call import Call
from nsa_sel.settings.schema import KernelConfig

FULL = 8  # warps of a program that has a multiprocessor for itself
FEW_TOKENS = 8  # new tokens of a sequence, up to which a call is one step of decoding: its keys are of many sequences, and far apart


@triton.jit
def forward_ranges_kernel(
    q, k, v, ranges, q_pos, block_table, o, lse,
    stride_qb, stride_qs, stride_qg, stride_qh, stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_pb, stride_ps,
    stride_tb, S, S_kv, G, n, parts, scale_log2,
    h: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, HAS_POS: tl.constexpr, LENGTHS: tl.constexpr, PAGE: tl.constexpr,
    ONE_PAGE: tl.constexpr, SPLIT: tl.constexpr, ONE_WALK: tl.constexpr, ACC: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """o and lse of one row's heads; with SPLIT, the float32 partials [rows, parts, ...] of one part of the walk, lse in base 2; ONE_WALK:
    of a split row all ranges are walked at once. With LENGTHS, q_pos holds the sequences' lengths; k, v are pages [pages,G,PAGE,D] where
    PAGE > 0, and with ONE_PAGE each range lies within one."""
    HEAD_TILES: tl.constexpr = (h + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    part = pid % parts
    pid = pid // parts
    head0 = (pid % HEAD_TILES) * BLOCK_H
    pid = pid // HEAD_TILES
    s = pid % S
    b = (pid // S // G).to(tl.int64)
    g = (pid // S % G).to(tl.int64)
    row = (b * S + s) * G + g
    limit = row_limit(q_pos, b, s, S, S_kv, stride_pb, stride_ps, HAS_POS, LENGTHS)
    row_ranges = ranges + row * n * 2

    head = head0 + tl.arange(0, BLOCK_H).to(tl.int64)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    is_head = head < h
    q_rows = q + b * stride_qb + s.to(tl.int64) * stride_qs + g.to(tl.int64) * stride_qg + head[:, None] * stride_qh + d[None, :]
    q_tile = tl.load(q_rows, mask=is_head[:, None] & (d < Dk)[None, :], other=0.0)
    k_base = sequence_of(k, b, g, stride_kb, stride_kg, PAGE)
    v_base = sequence_of(v, b, g, stride_vb, stride_vg, PAGE)

    table = block_table + b * stride_tb if PAGE > 0 else block_table
    low, high = 0, S_kv
    if ONE_WALK:
        shift, before, after, total = walk_keys(row_ranges, 0, n, limit, table, NP, PAGE, ONE_PAGE)
    elif SPLIT:
        total = 0
        for first in range(0, n, NP):
            _, _, _, keys = walk_ranges(row_ranges, first, n, limit, NP)
            total += keys
    if SPLIT:  # this program's share of the walk over the row's keys, in whole tiles
        share = tl.cdiv(tl.cdiv(total, BLOCK_L), parts) * BLOCK_L
        low = part * share
        high = low + share

    acc = tl.zeros([BLOCK_H, BLOCK_DV], ACC)
    l = tl.zeros([BLOCK_H], ACC)
    m = tl.full([BLOCK_H], LOWEST, ACC)
    base = 0
    for first in range(0, n, NP):
        if ONE_WALK:
            keys = total
        else:
            shift, before, after, keys = walk_keys(row_ranges, first, n, limit, table, NP, PAGE, ONE_PAGE)
        begin, stop = tl.maximum(low - base, 0), tl.minimum(keys, high - base)
        if PAGE > 0 and not ONE_PAGE:
            w = begin + tl.arange(0, BLOCK_L)
            coming = positions_of(w, shift, before, after)
            coming_page = page_of(coming, w < stop, table, PAGE)
        for w0 in range(begin, stop, BLOCK_L):
            w = w0 + tl.arange(0, BLOCK_L)
            valid = w < stop
            if PAGE > 0 and not ONE_PAGE:  # where the next step's keys are is read a step ahead, or every step would wait for it
                k_at, v_at = key_offsets(coming, coming_page, stride_kb, stride_kn, stride_vb, stride_vn, PAGE)
                coming = positions_of(w + BLOCK_L, shift, before, after)
                coming_page = page_of(coming, w + BLOCK_L < stop, table, PAGE)
            else:
                position = positions_of(w, shift, before, after)
                page = position // PAGE if PAGE > 0 else position
                k_at, v_at = key_offsets(position, page, stride_kb, stride_kn, stride_vb, stride_vn, PAGE)
            k_tile = tl.load(k_base + k_at[:, None] + d[None, :], mask=valid[:, None] & (d < Dk)[None, :], other=0.0)
            logits = products(q_tile, k_tile, ACC)
            logits = tl.where(valid[None, :], logits, float("-inf"))
            v_tile = tl.load(v_base + v_at[:, None] + dv[None, :], mask=valid[:, None] & (dv < Dv)[None, :], other=0.0)
            acc, l, m = softmax_step(logits, v_tile, acc, l, m, scale_log2, ACC)
        base += keys

    o_tile, lse_rows = finish_softmax(acc, l, m, scale_log2)
    if not SPLIT:
        lse_rows = lse_rows * LN_2
    out = (row * h + head) * parts + part
    tl.store(o + out[:, None] * Dv + dv[None, :], o_tile.to(o.dtype.element_ty), mask=is_head[:, None] & (dv < Dv)[None, :])
    tl.store(lse + out, lse_rows, mask=is_head)


@triton.jit
def forward_blocks_kernel(
    q, k_desc, v_desc, k, v, ranges, q_pos, block_table, o, lse,
    stride_qb, stride_qs, stride_qg, stride_qh, stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_pb, stride_ps,
    stride_tb, S, S_kv, G, n, scale_log2,
    h: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, HAS_POS: tl.constexpr, LENGTHS: tl.constexpr, PAGE: tl.constexpr,
    BULK: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr, TAIL_L: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """o and lse of one row's heads; every range is one block of BLOCK keys. With BULK, k_desc, v_desc are descriptors of k, v
    [B,G,S_kv,D], or of pages [pages,G,PAGE,D], of which every one holds whole steps of BLOCK_L keys; else pointers read them.

    Bulk copies take whole blocks alone, since they cannot mask: of disjoint blocks at most one is cut (by t or by S_kv), and
    pointers read that one. A hole in the list (padding) reads the row's last whole block again and adds nothing: a branch
    would stop the compiler from overlapping loads with arithmetic.
    """
    HEAD_TILES: tl.constexpr = (h + BLOCK_H - 1) // BLOCK_H
    STEPS: tl.constexpr = BLOCK // BLOCK_L
    pid = tl.program_id(0)
    head0 = (pid % HEAD_TILES) * BLOCK_H
    pid = pid // HEAD_TILES
    s = pid % S
    b = pid // S // G
    g = pid // S % G
    row = (b.to(tl.int64) * S + s) * G + g
    limit = row_limit(q_pos, b.to(tl.int64), s, S, S_kv, stride_pb, stride_ps, HAS_POS, LENGTHS)
    row_ranges = ranges + row * n * 2

    head = head0 + tl.arange(0, BLOCK_H).to(tl.int64)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    is_head = head < h
    q_rows = (
        q + b.to(tl.int64) * stride_qb + s.to(tl.int64) * stride_qs + g.to(tl.int64) * stride_qg + head[:, None] * stride_qh + d[None, :]
    )
    q_tile = tl.load(q_rows, mask=is_head[:, None] & (d < Dk)[None, :], other=0.0)

    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    table = block_table + b64 * stride_tb if PAGE > 0 else block_table
    listed, last_whole, cut_start, cut_end = split_blocks(row_ranges, n, limit, BLOCK, NP)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], ACC)
    l = tl.zeros([BLOCK_H], ACC)
    m = tl.full([BLOCK_H], LOWEST, ACC)
    k_base = sequence_of(k, b64, g64, stride_kb, stride_kg, PAGE)
    v_base = sequence_of(v, b64, g64, stride_vb, stride_vg, PAGE)
    w = tl.arange(0, BLOCK_L)
    steps = listed * STEPS
    if PAGE > 0:
        coming, coming_whole = whole_block(row_ranges, 0, limit, last_whole, BLOCK)
        exists = steps > 0 if BULK else w < steps * BLOCK_L
        coming_page = page_of(coming if BULK else coming + w, exists, table, PAGE)
    for step in range(0, steps):
        if PAGE > 0:  # the next step's pages are read a step ahead, or every step would wait for them
            c, page, is_whole = coming, coming_page, coming_whole
            after = tl.minimum(step + 1, steps - 1)
            coming, coming_whole = whole_block(row_ranges, after // STEPS, limit, last_whole, BLOCK)
            coming += after % STEPS * BLOCK_L
            coming_page = page_of(coming if BULK else coming + w, exists, table, PAGE)
        else:
            c, is_whole = whole_block(row_ranges, step // STEPS, limit, last_whole, BLOCK)
            c += step % STEPS * BLOCK_L
            page = b
        if BULK:
            c = c % PAGE if PAGE > 0 else c
            k_tile = k_desc.load([page, g, c, 0]).reshape(BLOCK_L, BLOCK_D)
            logits = products(q_tile, k_tile, ACC)
            v_tile = v_desc.load([page, g, c, 0]).reshape(BLOCK_L, BLOCK_DV)
        else:
            k_at, v_at = key_offsets(c + w, page, stride_kb, stride_kn, stride_vb, stride_vn, PAGE)
            k_tile = tl.load(k_base + k_at[:, None] + d[None, :], mask=(d < Dk)[None, :], other=0.0)
            logits = products(q_tile, k_tile, ACC)
            v_tile = tl.load(v_base + v_at[:, None] + dv[None, :], mask=(dv < Dv)[None, :], other=0.0)
        acc, l, m = chosen_step(logits, is_whole, v_tile, acc, l, m, scale_log2, ACC)

    for c in range(cut_start, cut_end, TAIL_L):
        position = c + tl.arange(0, TAIL_L)
        valid = position < cut_end
        page_at = page_of(position, valid, table, PAGE) if PAGE > 0 else position
        k_at, v_at = key_offsets(position, page_at, stride_kb, stride_kn, stride_vb, stride_vn, PAGE)
        k_tile = tl.load(k_base + k_at[:, None] + d[None, :], mask=valid[:, None] & (d < Dk)[None, :], other=0.0)
        logits = products(q_tile, k_tile, ACC)
        logits = tl.where(valid[None, :], logits, float("-inf"))
        v_tile = tl.load(v_base + v_at[:, None] + dv[None, :], mask=valid[:, None] & (dv < Dv)[None, :], other=0.0)
        acc, l, m = softmax_step(logits, v_tile, acc, l, m, scale_log2, ACC)

    o_tile, lse_rows = finish_softmax(acc, l, m, scale_log2)
    out = row * h + head
    tl.store(o + out[:, None] * Dv + dv[None, :], o_tile.to(o.dtype.element_ty), mask=is_head[:, None] & (dv < Dv)[None, :])
    tl.store(lse + out, lse_rows * LN_2, mask=is_head)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] and lse [B,S,G,h]."""
    if call.scale < 0:  # kernels keep the largest product, which must belong to the largest logit
        return forward(call.with_positive_scale())
    B, S, G, _, _ = call.q.shape
    heads = launch.heads(call)
    programs, sms = B * S * G * _head_tiles(heads.h), launch.multiprocessors(call)
    if programs <= sms:
        config = launch.kernel_config(call, heads, "triton-group/decode")
        return _forward_ranges(call, heads, config, programs, _split_parts(call, config, programs))
    blocks = "triton-group/decode-blocks" if S <= FEW_TOKENS else "triton-group/forward-blocks"
    if _bulk_copies_fit(call, heads, blocks):
        return _forward_blocks(call, heads, launch.kernel_config(call, heads, blocks, bulk_copies=True), programs)
    if call.block_table is not None and _whole_blocks(call):
        config = launch.kernel_config(call, heads, "triton-group/decode-pages", bulk_copies=False)
        if config.num_stages > 2 and programs > 2 * sms:  # of two stages, three programs have room on a multiprocessor
            config = msgspec.structs.replace(config, num_stages=2)
        return _forward_blocks(call, heads, config, programs)
    ranges = "triton-group/decode-ranges" if S <= FEW_TOKENS or call.block_table is not None else "triton-group/forward"
    config = launch.kernel_config(call, heads, "triton-group/decode" if programs <= 2 * sms else ranges)
    return _forward_ranges(call, heads, config, programs, 1)


def _forward_blocks(call: Call, heads: launch.Heads, config: KernelConfig, programs: int) -> tuple[Tensor, Tensor]:
    o, lse = launch.outputs(call)
    _, S, G, _, _ = call.q.shape
    n = call.selection.n
    kernel = _blocks_launch(heads, _cache(call), n, _block(call), config)
    descriptors = _descriptors(call, kernel) if config.loads == "tma" else (None, None)
    kernel.start(
        programs,
        (call.q, *descriptors, call.k, call.v, *_index(call), o, lse),
        (*_steps(call), S, call.S_kv, G, n, call.scale_log2()),
    )
    return o, lse


def _forward_ranges(call: Call, heads: launch.Heads, config: KernelConfig, programs: int, parts: int) -> tuple[Tensor, Tensor]:
    if config.num_stages > 2 and call.selection.length_bound(call.S_kv) <= parts * config.block_l:  # one step has no next to fetch for
        config = msgspec.structs.replace(config, num_stages=2)
    o, lse = launch.outputs(call)
    if parts == 1:
        _launch_ranges(call, heads, config, programs, o, lse, 1)
        return o, lse
    part_o = temporary(call, lse, lse.numel(), parts, o.shape[-1])
    part_lse = temporary(call, lse, lse.numel(), parts)
    _launch_ranges(call, heads, config, programs, part_o, part_lse, parts)
    launch.combine(part_o, part_lse, o, lse, parts)
    return o, lse


def _split_parts(call: Call, config: KernelConfig, programs: int) -> int:
    """Programs of many warps fill a multiprocessor one by one, others two by two; none walks less than 32 keys."""
    at_once = launch.multiprocessors(call) * (1 if config.num_warps >= FULL else 2)
    return launch.split_parts(call, programs, at_once, max(32, config.block_l))


def _launch_ranges(call: Call, heads: launch.Heads, config: KernelConfig, programs: int, o: Tensor, lse: Tensor, parts: int) -> None:
    _, S, G, _, _ = call.q.shape
    walk = launch.walk_width(call)
    one_walk = parts > 1 and call.selection.n <= walk
    _ranges_launch(heads, _cache(call), config, walk, _one_page(call), parts > 1, one_walk).start(
        programs * parts,
        (call.q, call.k, call.v, *_index(call), o, lse),
        (*_steps(call), S, call.S_kv, G, call.selection.n, parts, call.scale_log2()),
    )


def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; dq by rows, dk and dv by KV tiles over the rows that chose them, in ascending row order."""
    if call.scale < 0:
        dq, dk, dv = backward(call.with_positive_scale(), o, lse, do, dlse)
        return -dq, dk, dv
    B, S, G, _, _ = call.q.shape
    n = call.selection.n
    heads = launch.heads(call)
    dq, delta = torch.empty_like(call.q, memory_format=torch.contiguous_format), temporary(call, lse, *lse.shape)
    dlse = None if dlse is None else dlse.contiguous()
    grid = B * S * G * _head_tiles(heads.h)
    tensors = (call.selection.disjoint_ranges(), call.q_pos, o, lse, do, dlse, dq, delta)
    numbers = (*launch.strides(call), *do.stride()[:4], S, call.k.shape[2], G, n, call.scale, call.scale_log2())
    if _bulk_copies_fit(call, heads, "triton-group/dq-blocks"):
        config = launch.kernel_config(call, heads, "triton-group/dq-blocks", bulk_copies=True)
        kernel = _dq_blocks_launch(heads, n, _block(call), config, dlse is not None)
        kernel.start(grid, (call.q, *_descriptors(call, kernel), call.k, call.v, *tensors), numbers)
    else:
        config = launch.kernel_config(call, heads, "triton-group/dq")
        kernel = _dq_launch(heads, config, launch.walk_width(call), dlse is not None)
        kernel.start(grid, (call.q, call.k, call.v, *tensors), numbers)
    dk, dv = key_value_gradients(call, heads, lse, do, delta, launch.kernel_config(call, heads, "triton-group/dkdv"))
    return dq, dk, dv


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Keys that the forward loads: each row's, once for up to 64 heads."""
    return selected * _head_tiles(call.q.shape[3])


class Cache(NamedTuple):
    """How a call's keys lie in a cache, as constants of the forward kernels."""

    LENGTHS: bool  # whether positions are counted from the sequences' lengths
    PAGE: int  # keys of a page, 0 where k and v hold whole sequences


def _cache(call: Call) -> Cache:
    return Cache(call.lengths is not None, 0 if call.block_table is None else call.k.shape[2])


def _index(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What says where a row's keys are: ranges, positions or lengths, and the block table."""
    return call.selection.disjoint_ranges(), call.q_pos if call.lengths is None else call.lengths, call.block_table


def _steps(call: Call) -> tuple[int, ...]:
    """`launch.strides`, and from a row of the block table to the next."""
    return *launch.strides(call), 0 if call.block_table is None else call.block_table.stride(0)


@functools.lru_cache(REMEMBERED)
def _ranges_launch(
    heads: launch.Heads, cache: Cache, config: KernelConfig, walk: int, one_page: bool, split: bool, one_walk: bool
) -> Launch:  # fmt: skip
    facts, tiles = {**launch.facts(heads), **cache._asdict()}, _rows_and_options(heads, config)
    ways = {"ONE_PAGE": one_page, "SPLIT": split, "ONE_WALK": one_walk}
    return Launch(forward_ranges_kernel, **facts, **ways, BLOCK_L=config.block_l, NP=walk, **tiles)


@functools.lru_cache(REMEMBERED)
def _blocks_launch(heads: launch.Heads, cache: Cache, n: int, block: int, config: KernelConfig) -> Launch:
    facts, tiles = {**launch.facts(heads), **cache._asdict()}, _block_tiles(n, block, config)
    return Launch(forward_blocks_kernel, **facts, BULK=config.loads == "tma", **tiles, **_rows_and_options(heads, config))


@functools.lru_cache(REMEMBERED)
def _dq_launch(heads: launch.Heads, config: KernelConfig, walk: int, has_dlse: bool) -> Launch:
    return Launch(dq_kernel, **launch.facts(heads), HAS_DLSE=has_dlse, BLOCK_L=config.block_l, NP=walk, **_rows_and_options(heads, config))


@functools.lru_cache(REMEMBERED)
def _dq_blocks_launch(heads: launch.Heads, n: int, block: int, config: KernelConfig, has_dlse: bool) -> Launch:
    tiles = _block_tiles(n, block, config)
    return Launch(dq_blocks_kernel, **launch.facts(heads), HAS_DLSE=has_dlse, **tiles, **_rows_and_options(heads, config))


def _block_tiles(n: int, block: int, config: KernelConfig) -> dict[str, int]:
    block_l = min(config.block_l, block)
    return {"BLOCK": block, "BLOCK_L": block_l, "TAIL_L": min(32, block_l), "NP": launch.tile(n, 1)}


def _rows_and_options(heads: launch.Heads, config: KernelConfig) -> dict[str, int]:
    block_h = _block_h(heads.h)
    return {"BLOCK_H": block_h, "num_warps": max(config.num_warps, block_h // 16), "num_stages": config.num_stages}


def _descriptors(call: Call, kernel: Launch) -> tuple[TensorDescriptor, TensorDescriptor]:
    facts = kernel.constants
    block_l = facts["BLOCK_L"]
    return launch.descriptor(call.k, block_l, facts["BLOCK_D"]), launch.descriptor(call.v, block_l, facts["BLOCK_DV"])


def _block(call: Call) -> int:
    block = call.selection.block_size
    assert block is not None, "bulk copies are taken for whole blocks alone"
    return block


def _whole_blocks(call: Call) -> bool:
    """Whether `forward_blocks_kernel` takes the selection: blocks in tiles of a power of two; it looks at all ranges of a row at once."""
    size = call.selection.block_size
    return size is not None and size >= launch.MIN_TILE and not size & (size - 1) and call.selection.n <= 1024


def _bulk_copies_fit(call: Call, heads: launch.Heads, kernel: str) -> bool:
    """Whether `kernel` takes whole blocks, each of its steps within a page, by bulk copies."""
    config = call.settings.kernel(kernel + launch.heads_class(heads))
    if config.loads != "tma" or not _whole_blocks(call):
        return False
    whole = call.block_table is None or call.k.shape[2] % min(config.block_l, _block(call)) == 0
    return whole and launch.bulk_copies_fit(call)


def _one_page(call: Call) -> bool:
    """Whether each range lies within a page, and numbers of 32 bits count the keys of all pages."""
    size, (pages, _, page, _) = call.selection.block_size, call.k.shape
    return call.block_table is not None and size is not None and page % size == 0 and pages * page < 2**31


def _block_h(h: int) -> int:
    return min(64, launch.tile(h))


def _head_tiles(h: int) -> int:
    """Programs that a row takes: those of more than 64 heads share them out."""
    return -(-h // _block_h(h))
