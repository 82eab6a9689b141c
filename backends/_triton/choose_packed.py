"""Choose blocks for packed rows of several requests over caches: scores by tiles of a request's rows.

Requests of few rows are bound by reading index keys: `choose_few.py` scores those, each with its own parts of the keys.
All others have tiles of rows, as in `choose_logits.py`, over contiguous index keys or pages. How many tiles there are
only the GPU knows: `tile_starts_kernel` counts them, and the programs of a launch share them, each tile among as many as
there are. Both kernels skip the other's requests. Positions of rows are stored for `top_n`.
"""

from __future__ import annotations

import functools

import msgspec
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton import choose_few, choose_logits
from nsa_sel.backends._triton.arguments import Dims, dims_of, options
from nsa_sel.backends._triton.choose_few import Cache
from nsa_sel.backends._triton.choose_logits import head_queries, logit_steps
from nsa_sel.backends._triton.choose_rows import PROBES, keys_until, span_of, strides_of
from nsa_sel.backends._triton.combine import SMS_WHEN_INTERPRETED
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel, cached_kernel
from nsa_sel.backends._triton.tiles import aligned, descriptor
from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.core.call import ChooseCall, Pool, Rule, device_info
from nsa_sel.settings.schema import KernelConfig

REGISTERS, PER_SM = 1 << 16, 2  # registers of a multiprocessor, and programs that it runs at once
ROUNDS = 2  # a few tiles split their keys over programs until the GPU is filled this many times
COUNTED = 1024  # requests whose tiles are counted at once


@triton.jit
def tile_starts_kernel(cu, starts, T, start, requests, LEAST: tl.constexpr, TOKENS: tl.constexpr, COUNT: tl.constexpr):
    """Store the first tile of each request, and their number, to starts [requests + 1] int32. Requests of more than LEAST
    rows have tiles of TOKENS rows. One program."""
    total = 0
    for first in range(0, requests, COUNT):
        i = first + tl.arange(0, COUNT)  # [COUNT], as rows and tiles
        begin, end = span_of(tl.minimum(i, requests - 1), cu, start, T, requests)
        rows = tl.where(i < requests, end - begin, 0)
        tiles = tl.where(rows > LEAST, (rows + TOKENS - 1) // TOKENS, 0)
        tl.store(starts + i, total + tl.cumsum(tiles, 0) - tiles, mask=i < requests)
        total += tl.sum(tiles, 0)
    tl.store(starts + requests, total)


@triton.jit
def request_of_tile(tile, starts, requests):
    """Return the last request whose tiles begin at or before `tile`, of those that have tiles."""
    probe = tl.arange(0, PROBES)
    first, width = 0, requests
    while width > 1:
        step = (width + PROBES - 1) // PROBES
        reached = (probe * step < width) & (tl.load(starts + tl.minimum(first + probe * step, requests)) <= tile)
        passed = tl.maximum(tl.sum(reached.to(tl.int32), 0) - 1, 0) * step
        first += passed
        width = tl.minimum(step, width - passed)
    return first


@triton.jit
def packed_logits_kernel(
    q, k_desc, k, k_scale, block_table, lengths, cu, starts, scores, positions, strides, stride_scale, stride_table, stride_scores,
    T, start, C, G, blocks, room, entries, most_shares, scale,
    dims: tl.constexpr, rule: tl.constexpr, pool: tl.constexpr, cache: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store scores [T,G,blocks] of the requests that have tiles up to the block of each tile's last position, and their
    rows' positions [T] int32. Later scores stay uninitialized.

    Grid: any number of programs, at least one per tile and group. Tiles: q [TOKENS, BLOCK_D] per head, k [BLOCK_K,
    BLOCK_D]. TMA: k_desc loads keys, of whole pages; None: pointer loads.
    entries: of cu, one more than requests: never 1, which would be a constant, with which Triton 3.6 does not compile
    the search.
    """
    requests = entries - 1
    STEP: tl.constexpr = rule.block_size // rule.compress_stride
    PARTS: tl.constexpr = max(1, STEP // BLOCK_K)
    BLOCKS: tl.constexpr = max(1, BLOCK_K // STEP)
    total = tl.load(starts + requests)
    shares = tl.minimum(tl.maximum(tl.num_programs(0) // tl.maximum(total * G, 1), 1), most_shares)
    number, share = tl.program_id(0) // shares, tl.program_id(0) % shares
    g, tile = (number % G).to(tl.int64), total - 1 - number // G
    if tile < 0:
        return
    request = request_of_tile(tile, starts, requests)
    row0, end = span_of(request, cu, start, T, requests)
    row0 += (tile - tl.load(starts + request)) * TOKENS
    b = request.to(tl.int64)
    token = row0 + tl.arange(0, TOKENS)  # [TOKENS], as row, t and seen
    is_token = token < end
    row = tl.minimum(token, end - 1).to(tl.int64)
    t = tl.load(lengths + b * strides.pos[0]).to(tl.int64) + (start - tl.load(cu + request + 1) + row)
    t = tl.minimum(tl.maximum(t, -1), room - 1).to(tl.int32)
    tl.store(positions + row, t, mask=is_token & (g == 0) & (share == 0))
    seen = keys_until(t, C, rule)
    shared = g if strides.k[1] != 0 else 0 * g  # keys that all groups share have one group in the descriptor
    rate = 1.0
    if k_scale is not None and not cache.PAGE_SCALES:
        rate *= tl.load(k_scale + shared * stride_scale[1])
    queries, rates = head_queries(q, strides, 0, g, row, is_token, k.dtype.element_ty, rate, dims)

    last = tl.max(t, 0)
    visible = tl.minimum(tl.where(last < 0, 0, last // rule.block_size + 1), blocks)
    last_step = (visible + BLOCKS - 1) // BLOCKS
    each = (last_step + shares - 1) // shares * PARTS
    step = share * each
    last_step = tl.minimum(last_step * PARTS, step + each)
    whole = tl.maximum(tl.minimum(tl.min(seen, 0) // BLOCK_K, last_step), step)
    C = tl.max(seen, 0)
    table = block_table + b * stride_table if cache.PAGE > 0 else block_table
    out = scores + g * stride_scores[2] + row * stride_scores[1]
    own = tl.full([TOKENS], float("-inf"), tl.float32)
    own = logit_steps(
        step, whole, own, queries, rates, seen, k_desc, k, k_scale, table, out, is_token, strides, stride_scale, b, shared, C, blocks,
        scale, dims, rule, pool, cache, BLOCK_K, False,
    )  # fmt: skip
    logit_steps(
        whole, last_step, own, queries, rates, seen, k_desc, k, k_scale, table, out, is_token, strides, stride_scale, b, shared, C, blocks,
        scale, dims, rule, pool, cache, BLOCK_K, True,
    )  # fmt: skip


def takes(call: ChooseCall) -> bool:
    """Return whether `packed_scores` computes the scores of a call with requests."""
    return choose_few.takes(call) and not call.pool.softmax


def packed_scores(call: ChooseCall, scores: Tensor, few: KernelConfig, tiles: KernelConfig, positions: Tensor) -> bool:
    """Write the scores of every row's visible blocks, by call.pool, to `scores` [1,T,G,blocks] float32, and the rows'
    positions to `positions` [1,T] int32, -1 for padding. Later blocks may stay uninitialized.

    few, tiles: configs of `few_scores`, and of tiles of `rows` tokens and steps of block_l keys.

    Returns whether the next kernel may start early.
    """
    assert call.requests is not None
    least = choose_few.most_tokens(call)
    if call.requests.most <= least:
        return choose_few.few_scores(call, None, scores, few, positions)
    search = not choose_logits.takes(call)
    choose_few.few_scores(call, None, scores, few, positions, search)
    if not search:
        _scores_of_tiles(call, scores, tiles, positions, least)
    return False


def _scores_of_tiles(call: ChooseCall, scores: Tensor, config: KernelConfig, positions: Tensor, least: int) -> None:
    """Write the scores and positions of requests of more than `least` rows."""
    assert call.requests is not None
    (_, T, G), (table, _), cu, requests = call.q.shape[:3], call.pages or (None, 0), call.requests.cu, call.requests.number
    k_scale, page = None if call.scales is None else call.scales.k, 0 if table is None else call.k.shape[2]
    if page % config.block_l and page % (config.block_l // 2) == 0:  # TMA takes steps within a page
        config = msgspec.structs.replace(config, block_l=config.block_l // 2)
    starts = unwritten(cu, requests + 1)
    counter = cached_kernel(tile_starts_kernel, LEAST=least, TOKENS=config.rows, COUNT=COUNTED, num_warps=4)
    counter.launch(1, (cu, starts), (T, call.start, requests))
    cache = Cache(True, page, call.scales is not None and call.scales.page_keys > 0)
    kernel = _packed_logits(dims_of(call.q, call.v), call.rule, call.pool, cache, config)
    k = call.k if call.k.stride(1) else call.k[:, :1]
    by_tma = config.loads == "tma" and page % config.block_l == 0 and aligned(k)
    desc = descriptor(k, 1, 1, config.block_l, kernel.constants["dims"].BLOCK_D) if by_tma else None
    sms = device_info(call.q.device).sm_count if call.q.is_cuda else SMS_WHEN_INTERPRETED
    programs = max(ROUNDS * PER_SM * sms, (-(-T // config.rows) + min(requests, T // (least + 1))) * G)
    kernel.launch(
        programs,
        (call.q, desc, k, k_scale, table, call.lengths, cu, starts, scores, positions),
        (
            strides_of(call), (0, 0) if k_scale is None else k_scale.stride(), 0 if table is None else table.stride(0),
            scores.stride()[:3], T, call.start, call.C, G, scores.shape[3], call.blocks * call.rule.block_size, len(cu),
            max(1, call.C // choose_logits.LEAST_KEYS), call.scale,
        ),
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _packed_logits(dims: Dims, rule: Rule, pool: Pool, cache: Cache, config: KernelConfig) -> Kernel:
    tiles = {"TOKENS": config.rows, "BLOCK_K": config.block_l}
    registers = min(255, REGISTERS // (PER_SM * 32 * config.num_warps))
    return Kernel(
        packed_logits_kernel, dims=dims, rule=rule.of_keys(), pool=pool, cache=cache, **tiles, maxnreg=registers, **options(config)
    )  # fmt: skip
