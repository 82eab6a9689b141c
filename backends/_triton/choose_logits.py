"""Scores of blocks from the logits of index keys: the largest of a block's logits, or of max(logit, 0), after the heads
of a group are reduced. Index keys touch one block each (MiniMax-M3's indexer, QSA's, MoBA's).

    score[s, b] = max over the index keys i of block b that row s sees of reduce over heads of scale q[s, head].k[i]

Logits are computed as [TOKENS, BLOCK_K], a product per head, so that sums over heads stay within a thread and maxima over
keys within four threads of a warp. `choose_scores.py` has the other pools, transposed.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.arguments import Dims, dims_of, options
from nsa_sel.backends._triton.choose_few import Cache, step_keys, step_pages
from nsa_sel.backends._triton.choose_rows import seen_keys, sizes_of, strides_of
from nsa_sel.backends._triton.group_ranges import float16_rows
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.rows import row_position
from nsa_sel.backends._triton.softmax import dot
from nsa_sel.backends._triton.tiles import aligned, key_descriptors, load_columns, row_pointers
from nsa_sel.core.call import ChooseCall, Pool, Rule, device_info
from nsa_sel.settings.schema import KernelConfig

MOST_HEADS = 4  # heads of a group, whose queries a program holds
SHARED = 200 << 10  # bytes of shared memory that a GPU needs; others run choose_scores.py, without wgmma as fast
LONG = 64  # index keys of a block from which a tile of one head is as wide
PROGRAMS, LEAST_KEYS = 512, 512  # fewer programs share the keys of their rows, each with this many at least


CONTIGUOUS = Cache(False, 0, False)


@triton.jit
def head_queries(q, strides, b, g, row, is_token, k_dtype: tl.constexpr, scale, dims: tl.constexpr):
    """Return the queries of each head [TOKENS, BLOCK_D] in the dtype that multiplies keys, and the factors of their
    products: `scale`, times [TOKENS, 1] of queries that became float16."""
    HEADS: tl.constexpr = dims.h
    queries, rates = (), ()
    for head in tl.static_range(0, HEADS):
        q_tile = load_columns(row_pointers(q, strides.q, b, g, row, head), is_token, 0, dims.Dk, dims.BLOCK_D)
        rate = scale
        if k_dtype != q_tile.dtype and q_tile.dtype == tl.bfloat16:
            q_tile, factor = float16_rows(q_tile)
            rate = factor * scale
        queries, rates = queries + (q_tile,), rates + (rate,)  # type: ignore[assignment]  # noqa: RUF005
    return queries, rates


@triton.jit
def reduced_logits(queries, rates, k_tile, factor, pool: tl.constexpr):
    """Return x [TOKENS, BLOCK_K]: q.k of each head's queries [TOKENS, BLOCK_D], not scaled yet, reduced over the heads.

    rates, factor: of the products of quantized keys, [TOKENS, 1] for each head and [1, BLOCK_K], or 1.
    """
    x = head_logits(queries[0], rates[0], k_tile, factor, pool)
    for head in tl.static_range(1, len(queries)):
        other = head_logits(queries[head], rates[head], k_tile, factor, pool)
        x = tl.maximum(x, other) if pool.heads_max else x + other
    return x


@triton.jit
def head_logits(q_tile, rate, k_tile, factor, pool: tl.constexpr):
    x = dot(q_tile, k_tile.to(q_tile.dtype).T) * rate * factor
    return tl.maximum(x, 0.0) if pool.relu else x


@triton.jit
def logit_steps(
    step, last_step, own, queries, rates, seen, k_desc, k, k_scale, table, out, is_token, strides, stride_scale, b, g, C, blocks, scale,
    dims: tl.constexpr, rule: tl.constexpr, pool: tl.constexpr, cache: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Score the BLOCK_K keys of each of the steps [step, last_step) and write the blocks that are complete.

    own [TOKENS]: the largest of the current block's keys so far, where a block of STEP keys takes several steps.
    C: keys that exist; the block table is read one step ahead.
    """
    STEP: tl.constexpr = rule.block_size // rule.compress_stride
    TOKENS: tl.constexpr = out.shape[0]
    BLOCKS: tl.constexpr = max(1, BLOCK_K // STEP)
    PARTS: tl.constexpr = max(1, STEP // BLOCK_K)
    PIECES: tl.constexpr = min(STEP, BLOCK_K)
    coming = step_pages(k_desc, table, step, C, STEP, BLOCKS, PIECES, PARTS, cache)
    for i in range(step, last_step):
        page, key = coming, i * BLOCK_K + tl.arange(0, BLOCK_K)
        coming = step_pages(k_desc, table, i + 1, C, STEP, BLOCKS, PIECES, PARTS, cache)
        k_tile, factor = step_keys(k_desc, k, k_scale, page, strides, stride_scale, b, g, key, key < C, i * BLOCK_K, dims, BLOCK_K, cache)
        if cache.PAGE_SCALES and k_desc is None:
            factor = factor.T
        x = reduced_logits(queries, rates, k_tile, factor, pool)
        if MASKED:
            x = tl.where(key[None, :] < seen[:, None], x, float("-inf"))
        if PARTS > 1:
            largest = tl.max(x, 1)
            own = largest if i % PARTS == 0 else tl.maximum(own, largest)
            tl.store(out + i // PARTS, own * scale, mask=is_token & (i % PARTS == PARTS - 1))
        elif BLOCKS == 1:
            tl.store(out + i, tl.max(x, 1) * scale, mask=is_token)
        else:
            total = x if STEP == 1 else tl.max(x.reshape(TOKENS, BLOCKS, STEP), 2)
            block = i * BLOCKS + tl.arange(0, BLOCKS)
            tl.store(out[:, None] + block[None, :], total * scale, mask=is_token[:, None] & (block < blocks)[None, :])
    return own


@triton.jit
def block_logits_kernel(
    q, k_desc, k, q_pos, scores, strides, stride_scores, sizes, blocks, shares, scale, dims: tl.constexpr, rule: tl.constexpr,
    pool: tl.constexpr, cache: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store scores [B,S,G,blocks] up to the block of each tile's last position; later scores stay uninitialized.

    Grid: `shares` programs per tile of TOKENS rows, late tiles first. Tiles: q [TOKENS, BLOCK_D] per head, k [BLOCK_K,
    BLOCK_D]. TMA: k_desc loads keys; None: pointer loads. Steps whose keys all rows see take no mask.
    """
    STEP: tl.constexpr = rule.block_size // rule.compress_stride
    PARTS: tl.constexpr = max(1, STEP // BLOCK_K)
    BLOCKS: tl.constexpr = max(1, BLOCK_K // STEP)
    number, share = tl.program_id(0) // shares, tl.program_id(0) % shares
    row0 = (sizes.tiles - 1 - number // sizes.G % sizes.tiles) * TOKENS
    g, b = number % sizes.G, number // sizes.G // sizes.tiles
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    token = row0 + tl.arange(0, TOKENS)  # [TOKENS], as row and seen
    is_token = token < sizes.S
    row = tl.minimum(token, sizes.S - 1).to(tl.int64)
    queries, rates = head_queries(q, strides, b64, g64, row, is_token, k.dtype.element_ty, 1.0, dims)
    seen = seen_keys(q_pos, strides.pos, b64, row, sizes, rule)
    t = tl.max(row_position(q_pos, strides.pos, b64, row, sizes.start), 0)
    end = tl.minimum(tl.where(t < 0, 0, t // rule.block_size + 1), blocks).to(tl.int32)
    last_step = (end + BLOCKS - 1) // BLOCKS
    each = (last_step + shares - 1) // shares * PARTS
    step = share * each
    last_step = tl.minimum(last_step * PARTS, step + each)
    whole = tl.maximum(tl.minimum(tl.min(seen, 0) // BLOCK_K, last_step), step)

    out = scores + b64 * stride_scores[0] + g64 * stride_scores[2] + row * stride_scores[1]
    shared = g64 if strides.k[1] != 0 else 0 * g64  # keys that all groups share have one group in the descriptor
    own = tl.full([TOKENS], float("-inf"), tl.float32)
    own = logit_steps(
        step, whole, own, queries, rates, seen, k_desc, k, None, None, out, is_token, strides, (0, 0), b64, shared, sizes.C, blocks, scale,
        dims, rule, pool, cache, BLOCK_K, False,
    )  # fmt: skip
    logit_steps(
        whole, last_step, own, queries, rates, seen, k_desc, k, None, None, out, is_token, strides, (0, 0), b64, shared, sizes.C, blocks,
        scale, dims, rule, pool, cache, BLOCK_K, True,
    )  # fmt: skip


def takes(call: ChooseCall) -> bool:
    """Return whether `block_logits` computes the scores of a call."""
    device, rule, pool, dims = device_info(call.q.device), call.rule, call.pool, dims_of(call.q, call.v)
    if call.sequences is not None or (device.kind != "cpu" and device.shared_memory < SHARED):
        return False
    largest = not pool.softmax and (pool.block_max or rule.pieces == 1) and rule.reach == 1
    return largest and rule.pieces.bit_count() == 1 and dims.h <= MOST_HEADS and dims.BLOCK_REST == 0


def name_of(call: ChooseCall) -> str:
    """Return the name of the kernel's config."""
    return "choose/logits-long" if call.q.shape[3] == 1 and call.rule.pieces >= LONG else "choose/logits"


def block_logits(call: ChooseCall, scores: Tensor, config: KernelConfig) -> None:
    """Write the scores of every row's visible blocks, by call.pool, to `scores` [B,S,G,blocks] float32, if `takes`.

    Later blocks may stay uninitialized.

    Args:
        call: with a positive scale.
        scores: with a contiguous last dimension.
        config: block_l index keys a step, `rows` tokens.
    """
    if scores.numel() == 0:
        return
    kernel = _logits_kernel(dims_of(call.q, call.v), call.rule, call.pool, config)
    constants = kernel.constants
    sizes = sizes_of(call, constants["TOKENS"])
    k = call.k if call.k.stride(1) else call.k[:, :1]  # keys that all groups share have one group in the descriptor
    desc = key_descriptors(k, constants["dims"], constants["BLOCK_K"], config.loads == "tma" and aligned(call.k))[0]
    programs, keys = call.q.shape[0] * sizes.G * sizes.tiles, call.blocks * call.rule.pieces
    shares = max(1, min(PROGRAMS // programs, keys // LEAST_KEYS))
    kernel.launch(
        programs * shares,
        (call.q, desc, call.k, call.q_pos, scores),
        (strides_of(call), scores.stride()[:3], sizes, call.blocks, shares, call.scale),
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _logits_kernel(dims: Dims, rule: Rule, pool: Pool, config: KernelConfig) -> Kernel:
    tiles = {"TOKENS": config.rows, "BLOCK_K": config.block_l}
    return Kernel(block_logits_kernel, dims=dims, rule=rule.of_keys(), pool=pool, cache=CONTIGUOUS, **tiles, **options(config))
