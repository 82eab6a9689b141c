"""Choose blocks for a few new tokens of each sequence: index keys are loaded once, contiguous or in pages.

A program scores a part of a sequence's blocks for all rows that share an index key: its tokens, and the groups whose
index key it is. There are as many parts as fill the GPU, and the device decides where they end, so that programs of a
short sequence share the keys that it has. `top_n` then chooses of the scores of all blocks, which are few here.

Quantized index keys (e4m3) become float16 or q's dtype in registers, as in group_ranges.py; scales multiply products.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import msgspec
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nsa_sel.backends._triton.arguments import Dims, dims_of, options
from nsa_sel.backends._triton.choose_rows import keys_until, sequence_of, span_of, strides_of
from nsa_sel.backends._triton.choose_scores import block_totals, join, over_heads, scaled_totals
from nsa_sel.backends._triton.combine import SMS_WHEN_INTERPRETED
from nsa_sel.backends._triton.group_ranges import float16_rows
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.rows import page_of, row_position
from nsa_sel.backends._triton.softmax import LOG2_E, dot
from nsa_sel.backends._triton.tiles import MIN_TILE, aligned, cached_pointers, descriptor, load_columns, row_pointers, tile_size
from nsa_sel.backends.launcher.cuda_driver import starts_early
from nsa_sel.core.call import ChooseCall, Pool, Rule, device_info
from nsa_sel.settings.schema import KernelConfig

MOST_TOKENS = 8  # most new tokens of a sequence
MOST_COLUMNS = 128  # most queries of a program: new tokens, groups that share an index key, and heads
TOGETHER, TOGETHER_PAIRS = 2, 4  # programs that a multiprocessor runs at once; with pairs of tiles, see `few_scores`
PAIR, PAIRS_COLUMNS = 128, 32  # index keys of such a block; most queries for which registers suffice
STEPS, MOST_ROUNDS = 32, 4  # steps of a program, if no more rounds of programs are needed


class Cache(NamedTuple):
    """Layout of index keys, the constexpr parameter `cache`."""

    LENGTHS: bool  # `positions` holds lengths of sequences instead
    PAGE: int  # index keys of a page; 0 if they are contiguous
    PAGE_SCALES: bool  # each page and group has a scale of its own


@triton.jit
def tile_of_request(number, cu, T, start, requests, ROWS: tl.constexpr, SEARCH: tl.constexpr):
    """Return the request of tile `number`, the tile's first row, its rows, and what to add to a row and the request's
    length to get the row's position. Request `requests` is the padding.

    cu: bounds of the requests. The T rows of a call count from row `start` of the batch.
    SEARCH: each request has tiles of ROWS rows (choose_rows.py). Else a tile for each; more rows than ROWS count as none.
    """
    if SEARCH:
        request = sequence_of(number, cu, start, T, requests, ROWS)
    else:
        request = number
    row, end = span_of(request, cu, start, T, requests)
    if SEARCH:
        row += (number - row // ROWS - request) * ROWS
    rows = end - row
    if SEARCH:
        rows = tl.minimum(rows, ROWS)
    else:
        rows = tl.where((rows > ROWS) & (request < requests), 0, rows)
    return request, row, rows, start - tl.load(cu + tl.minimum(request + 1, requests))


@triton.jit
def operand_order(x):
    """Return x [ROWS, D] with columns in an order that both operands of a product may take: column 16 c + 4 t + 2 i + j
    becomes 16 c + 8 i + 2 t + j. The float16 numbers that a thread multiplies are then four adjacent ones of e4m3, which
    it loads at once instead of two by two."""
    ROWS: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    return x.reshape(ROWS, D // 16, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, D)


@triton.jit
def owner_queries(
    q, lse, strides, stride_lse, b, owner, first, S, k_dtype: tl.constexpr, dims: tl.constexpr, softmax: tl.constexpr, SHARED: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Load the queries of an owner's columns, see `few_scores_kernel`, of the S rows from `first` on.

    Returns them [BLOCK_D, HEADS * TOKENS] in the dtype that multiplies keys; the factors of their products [1, HEADS *
    TOKENS], or 1; and with softmax their base-2 lse [HEADS * TOKENS]: +inf, hence weights of 0, for columns that do not
    exist and for rows without keys.
    """
    column = tl.arange(0, HEADS * TOKENS)  # [HEADS * TOKENS]
    head, token = (column // TOKENS).to(tl.int64), column % TOKENS
    exists = (token < S * SHARED) & (head < dims.h)
    s, g = (first + tl.maximum(tl.minimum(token // SHARED, S - 1), 0)).to(tl.int64), owner * SHARED + token % SHARED
    q_tile = load_columns(row_pointers(q, strides.q, b, g, s, head), exists, 0, dims.Dk, dims.BLOCK_D)
    rate, lse2 = 1.0, tl.zeros([HEADS * TOKENS], tl.float32)
    if k_dtype != q_tile.dtype and q_tile.dtype == tl.bfloat16:
        q_tile, factor = float16_rows(q_tile)
        rate = factor.T
    if k_dtype.primitive_bitwidth == 8:
        q_tile = operand_order(q_tile)
    if softmax:
        lse_columns = tl.load(row_pointers(lse, stride_lse, b, g, s, head), mask=exists, other=float("inf")).to(tl.float32)
        lse2 = tl.where(lse_columns == float("-inf"), float("inf"), lse_columns) * LOG2_E
    return q_tile.T, rate, lse2


@triton.jit
def part_of_steps(t, blocks, part, parts, rule: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr):
    """Return the first step of a part of the steps of BLOCKS blocks that rows at positions t see, and the one after its
    last."""
    last = tl.max(t, 0)
    end = tl.minimum(tl.where(last < 0, 0, last // rule.block_size + 1), blocks)
    steps = tl.cdiv(end, BLOCKS)
    each = tl.cdiv(steps, parts)
    return part * each * PARTS, tl.minimum(steps, (part + 1) * each) * PARTS


@triton.jit
def few_scores_kernel(
    q, k_desc, k, k_scale, block_table, lse, positions, cu, scores, row_positions, strides, stride_scale, stride_table, stride_lse,
    stride_scores, S, start, C, owners, blocks, room, parts, requests, scale,
    dims: tl.constexpr, rule: tl.constexpr, pool: tl.constexpr, cache: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCKS: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr,
    SEARCH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Store scores [B,S,G,blocks] up to the block of each sequence's last position; later scores stay uninitialized. If
    row_positions is not None, also store the positions [B,S] int32.

    Grid: one program per sequence, owner of index keys (SHARED groups), and part of the sequence's steps of BLOCKS
    blocks. With cu, q is [1,S,G,h,Dk] of `requests` requests, and one per `tile_of_request` instead.
    Tiles: q [HEADS * TOKENS, BLOCK_D], TILES times k [BLOCKS * PIECES, BLOCK_D] a step. Column head * TOKENS + token;
    token s * SHARED + i is new token s of the owner's i-th group. The keys of a block are padded to PARTS steps of
    TILES * PIECES. TILES = 2: BLOCKS = 1, and no key touches two blocks, so that scores of both tiles are joined first.
    TMA: k_desc loads keys, of whole tiles and pages; None: pointer loads. The block table is read one step ahead.
    Keys that no row sees are loaded only within the last step, and masked after the sum over heads, NaN included.
    room: keys of the longest sequence, to which positions are clamped. scale: of logits, times log2 e for softmax weights.
    """
    REACH: tl.constexpr = rule.compress_block // rule.compress_stride
    STEP: tl.constexpr = rule.block_size // rule.compress_stride
    BLOCK_K: tl.constexpr = BLOCKS * PIECES
    LEAST: tl.constexpr = float("-inf") if pool.block_max and not pool.softmax else 0.0
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    part, number = tl.program_id(0) % parts, tl.program_id(0) // parts
    owner, b = (number % owners).to(tl.int64), (number // owners).to(tl.int64)
    batch, first_row, rows = b, 0, S
    if cu is not None:
        b, first_row, rows, start = tile_of_request(b.to(tl.int32), cu, S, start, requests, ROWS, SEARCH)
        if b == requests:
            if (row_positions is not None) & (part == 0) & (owner == 0):
                store_no_positions(row_positions + first_row, rows, TOKENS)
            rows *= 0
        batch, b = tl.zeros([], tl.int64), tl.minimum(b, requests - 1).to(tl.int64)
    row, g, t, is_token = few_tokens(positions, strides.pos, b, owner, first_row, rows, start, room, SHARED, TOKENS, cache.LENGTHS)
    if row_positions is not None:
        tl.store(row_positions + batch * S + row, t, mask=is_token & (part == 0) & (g == 0))
    seen = keys_until(t, C, rule)  # [TOKENS]
    C = tl.max(seen, 0)
    first_step, last_step = part_of_steps(t, blocks, part, parts, rule, BLOCKS, PARTS)
    table = block_table + b * stride_table if cache.PAGE > 0 else block_table
    # The step before the first one computes what its keys add to the first block, and stores nothing.
    begin = tl.maximum(first_step - (PARTS if REACH > 1 else 0), 0)
    coming = step_pages(k_desc, table, begin * TILES, C, STEP, BLOCKS, PIECES, PARTS * TILES, cache)
    after = step_pages(k_desc, table, begin * TILES + TILES - 1, C, STEP, BLOCKS, PIECES, PARTS * TILES, cache)
    q_columns, rate, lse2 = owner_queries(
        q, lse, strides, stride_lse, batch, owner, first_row, rows, k.dtype.element_ty, dims, pool.softmax, SHARED, HEADS, TOKENS
    )
    if k_scale is not None and not cache.PAGE_SCALES:
        rate *= tl.load(k_scale + owner * stride_scale[1])

    out = scores + batch * stride_scores[0] + g * stride_scores[2] + row * stride_scores[1]
    r, block = tl.arange(0, BLOCK_K), tl.arange(0, BLOCKS)
    own = tl.full([BLOCKS, TOKENS], LEAST, tl.float32)
    pending, spilled = own, own
    for i in range(begin, last_step):
        page0, page1 = coming, after
        coming = step_pages(k_desc, table, (i + 1) * TILES, C, STEP, BLOCKS, PIECES, PARTS * TILES, cache)
        after = step_pages(k_desc, table, (i + 2) * TILES - 1, C, STEP, BLOCKS, PIECES, PARTS * TILES, cache)
        inner, first, x = i % PARTS, i // PARTS * BLOCKS, tl.full([BLOCK_K, TOKENS], LEAST, tl.float32)
        for j in tl.static_range(TILES):
            page, before = page0 if j == 0 else page1, (inner * TILES + j) * PIECES
            piece = before + r % PIECES  # [BLOCK_K], as key
            key = (first + r // PIECES) * STEP + piece
            is_key = (key < C) & (piece < STEP)
            k_tile, factor = step_keys(
                k_desc, k, k_scale, page, strides, stride_scale, b, owner, key, is_key, first * STEP + before, dims, BLOCK_K, cache
            )
            k_tile = operand_order(k_tile) if k_tile.dtype.primitive_bitwidth == 8 else k_tile
            products = dot(k_tile.to(q_columns.dtype), q_columns) * rate * factor  # [BLOCK_K, HEADS * TOKENS]
            x_tile = over_heads(products, lse2, scale, dims, pool, HEADS, TOKENS)  # [BLOCK_K, TOKENS]
            x = join(x, tl.where(tl.where(is_key, key, C)[:, None] < seen[None, :], x_tile, LEAST), pool)
        total, own, pending, spilled = block_totals(x, inner, own, pending, spilled, LEAST, rule, pool, BLOCKS, PIECES, PARTS)
        at = first + block
        total = scaled_totals(total, at, seen, scale, rule, pool)
        done = (at < blocks) & (inner == PARTS - 1) & (i >= first_step)
        tl.store(out[None, :] + at[:, None], total, mask=done[:, None] & is_token[None, :])


@triton.jit
def store_no_positions(to, rows, TOKENS: tl.constexpr):
    """Store -1, the position of padding, for `rows` rows."""
    for s in range(0, rows, TOKENS):
        row = s + tl.arange(0, TOKENS)
        tl.store(to + row, -1, mask=row < rows)


@triton.jit
def few_tokens(
    positions, stride_pos, b, owner, first_row, rows, start, room, SHARED: tl.constexpr, TOKENS: tl.constexpr, LENGTHS: tl.constexpr
):  # fmt: skip
    """Return the row, the group and the position of each token [TOKENS], and whether there is one; -1: a position without keys."""
    token = tl.arange(0, TOKENS)
    is_token = token < rows * SHARED
    row, g = (first_row + tl.maximum(tl.minimum(token // SHARED, rows - 1), 0)).to(tl.int64), owner * SHARED + token % SHARED
    if LENGTHS:
        t = tl.load(positions + b * stride_pos[0]).to(tl.int64) + (start + row)
    else:
        t = row_position(positions, stride_pos, b, row, start)
    t = tl.where(is_token, tl.minimum(tl.maximum(t, -1), room - 1), -1).to(tl.int32)
    return row, g, t, is_token


@triton.jit
def step_pages(
    k_desc, table, i, C, STEP: tl.constexpr, BLOCKS: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr, cache: tl.constexpr
):  # fmt: skip
    """Return the page of step i for TMA, or the page [BLOCK_K] of each of its keys; 0 without pages."""
    page = 0
    if cache.PAGE > 0:
        r = tl.arange(0, BLOCKS * PIECES)
        key = (i // PARTS * BLOCKS + r // PIECES) * STEP + i % PARTS * PIECES + r % PIECES
        if k_desc is not None:
            key = i // PARTS * BLOCKS * STEP + i % PARTS * PIECES
        page = page_of(key, key < C, table, cache.PAGE)
    return page


@triton.jit
def step_keys(
    k_desc, k, k_scale, page, strides, stride_scale, b, g, key, is_key, first, dims: tl.constexpr, BLOCK_K: tl.constexpr,
    cache: tl.constexpr,
):  # fmt: skip
    """Return the index keys of a step [BLOCK_K, BLOCK_D], and the factor of their products: [BLOCK_K, 1], or 1 without
    scales per page."""
    factor = 1.0
    if k_desc is not None:
        row = page if cache.PAGE > 0 else b.to(tl.int32)
        k_tile = k_desc.load([row, g.to(tl.int32), first % cache.PAGE if cache.PAGE > 0 else first, 0]).reshape(BLOCK_K, dims.BLOCK_D)
    else:
        k_tile = load_columns(cached_pointers(k, strides.k, b, g, key, page, cache.PAGE), is_key, 0, dims.Dk, dims.BLOCK_D)
    if cache.PAGE_SCALES:
        factor = tl.load(k_scale + page.to(tl.int64) * stride_scale[0] + g * stride_scale[1])
        if k_desc is None:
            factor = factor[:, None]
    return k_tile, factor


def takes(call: ChooseCall) -> bool:
    """Return whether the kernel takes a call: few new tokens, 16 or 32 bits, and no key that touches three blocks; of
    requests any number of rows, in tiles."""
    S, most = call.q.shape[1], most_tokens(call)
    if call.sequences is not None or call.q.element_size() > 4 or call.rule.reach > call.rule.pieces:
        return False
    return (S <= most or call.requests is not None) and most > 0


def most_tokens(call: ChooseCall) -> int:
    """Return the most new tokens of a sequence for which a program has columns, 0 for none."""
    return _most_tokens(call.q.shape[3], _shared(call))


@functools.lru_cache(REMEMBERED)
def _most_tokens(h: int, shared: int) -> int:
    return max((S for S in range(1, MOST_TOKENS + 1) if tile_size(S * shared, 1) * tile_size(h, 1) <= MOST_COLUMNS), default=0)


def few_scores(
    call: ChooseCall, lse: Tensor | None, scores: Tensor, config: KernelConfig, positions: Tensor | None, search: bool = False
) -> bool:  # fmt: skip
    """Write the scores of every row's visible blocks, by call.pool, to `scores` [B,S,G,blocks] float32, and the rows'
    positions to `positions` [B,S] int32 if it is given. Later blocks may stay uninitialized.

    Rows of requests: those of requests of at most `most_tokens` rows, and padding; with `search` all.

    Returns whether the kernel was started early (programmatic dependent launch), as the next one then may be.
    """
    (B, S, G), (table, _), shared, blocks = call.q.shape[:3], call.pages or (None, 0), _shared(call), scores.shape[3]
    cu, requests, rows = None, 0, S
    if call.requests is not None:
        cu, requests, rows = call.requests.cu, call.requests.number, min(call.requests.most, most_tokens(call))
        B = S // rows + requests if search else requests
    k_scale = None if call.scales is None else call.scales.k
    page = 0 if table is None else call.k.shape[2]
    half, stored, together = config.block_l // 2, call.k.dtype != call.q.dtype, TOGETHER
    pairs = stored and call.rule.reach == 1 and call.rule.pieces == config.block_l == PAIR  # a block is a step of two tiles
    if pairs and math.prod(columns_of(call.q.shape[3], rows * shared)) <= PAIRS_COLUMNS:
        together = TOGETHER_PAIRS
    if pairs or (page % config.block_l and (page % half == 0 or not stored)):  # TMA takes tiles within a page
        config = msgspec.structs.replace(config, block_l=half)
    cache = Cache(call.lengths is not None, page, call.scales is not None and call.scales.page_keys > 0)
    sms = device_info(call.q.device).sm_count if call.q.is_cuda else SMS_WHEN_INTERPRETED
    pieces = min(tile_size(call.rule.pieces, 1), config.block_l)
    programs, steps = B * (G // shared), -(-blocks * pieces // config.block_l)
    parts = parts_of(max(1, programs), max(1, steps), together * sms)
    early = call.q.is_cuda and programs * parts <= together * sms and starts_early(call.q.get_device())
    tile = rows, search, shared, early
    kernel = _few_scores(dims_of(call.q, call.v), call.rule, call.pool, cache, *tile, stored, config)
    tiles = kernel.constants
    step = tiles["BLOCKS"] * tiles["PIECES"]
    whole = tiles["PARTS"] * tiles["TILES"] * tiles["PIECES"] == call.rule.pieces and page % step == 0
    k = call.k if shared == 1 else call.k[:, :1]
    desc = descriptor(k, 1, 1, step, tiles["dims"].BLOCK_D) if whole and config.loads == "tma" and aligned(k) else None
    kernel.launch(
        (programs + (G // shared if requests else 0)) * parts,  # and the padding
        (call.q, desc, k, k_scale, table, lse, call.q_pos if call.lengths is None else call.lengths, cu, scores, positions),
        (
            strides_of(call), (0, 0) if k_scale is None else k_scale.stride(), 0 if table is None else table.stride(0),
            (0, 0, 0, 0) if lse is None else lse.stride(), scores.stride()[:3], S, call.start, call.C, G // shared, blocks,
            call.blocks * call.rule.block_size, parts, requests, call.scale_log2() if call.pool.softmax else call.scale,
        ),
    )  # fmt: skip
    return early


@functools.lru_cache(REMEMBERED)
def parts_of(programs: int, steps: int, together: int) -> int:
    """Return how many parts each of `programs` takes: the fewest that leave programs at most STEPS steps, or as few as
    possible, and at most a tenth of the GPU, which runs `together` programs at a time, idle in the last round."""
    counts = [max(1, rounds * together // programs) for rounds in range(1, MOST_ROUNDS + 1)]

    def cost(parts: int) -> tuple[float, float, int]:
        rounds = programs * parts / together
        return max(0.1, 1 - rounds / math.ceil(rounds)), max(STEPS, steps / parts), parts

    return min(steps, min(counts, key=cost))


def columns_of(h: int, tokens: int) -> tuple[int, int]:
    """Return HEADS and TOKENS of `few_scores_kernel`."""
    heads = tile_size(h, 1)
    return heads, max(tile_size(tokens, 1), MIN_TILE // heads)


def _shared(call: ChooseCall) -> int:
    """Return the groups that share an index key: all of them, or one."""
    return 1 if call.k.stride(1) else call.q.shape[2]


@functools.lru_cache(REMEMBERED)
def _few_scores(
    dims: Dims, rule: Rule, pool: Pool, cache: Cache, rows: int, search: bool, shared: int, early: bool, stored: bool,
    config: KernelConfig,
) -> Kernel:  # fmt: skip
    (heads, tokens), pieces = columns_of(dims.h, rows * shared), min(tile_size(rule.pieces, 1), config.block_l)
    dims = dims._replace(BLOCK_D=dims.BLOCK_D + (dims.BLOCK_D if dims.BLOCK_REST else 0), BLOCK_REST=0)  # one tile holds Dk
    tiles = {"SHARED": shared, "HEADS": heads, "TOKENS": tokens}
    parts = -(-rule.pieces // pieces)
    together = 1 + (stored and parts == 2 and rule.reach == 1)  # tiles of e4m3 share a step's latency
    tiles |= {"BLOCKS": config.block_l // pieces, "PIECES": pieces, "PARTS": parts // together, "EARLY": early}
    tiles |= {"ROWS": rows, "SEARCH": search, "TILES": together}
    started = {"launch_pdl": True} if early else {}
    return Kernel(few_scores_kernel, dims=dims, rule=rule.of_keys(), pool=pool, cache=cache, **tiles, **started, **options(config))
