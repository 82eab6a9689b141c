"""Scores of blocks from q, index keys and lse, without storing p: NSA's importance, and other pools.

With x[i] the largest of a group's heads, or their sum, of the logits c q.k[i], of max(c q.k[i], 0), or of the weights
2^(c q.k[i] - lse2):

    score[b] = largest of x[i] over the keys that touch block b, or their sum, each times the pieces of b that it covers

NSA's importance (Eq. 8 to 10) is the sum of weights over heads and keys.

Logits are computed transposed, [keys, heads x tokens] with the tokens of a head adjacent, so that in the layout of a
tensor-core accumulator reductions over heads and keys stay within a thread or a warp. A key covers `reach` pieces of
compress_stride keys. Pieces in its own block add to `own`, the others to the `spill` into the next block, which is
carried along the keys:

    score[b] = own[b] + spill[b - 1], or the larger of the two
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.arguments import Dims, dims_of, options
from nsa_sel.backends._triton.choose_rows import (
    bounds_of,
    last_row,
    seen_keys,
    sizes_of,
    strides_of,
    token_tile,
)
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.rows import row_position
from nsa_sel.backends._triton.softmax import LOG2_E, dot
from nsa_sel.backends._triton.tiles import aligned, key_descriptors, key_pointers, load_split, row_pointers, tile_size
from nsa_sel.core.call import NSA_POOL, ChooseCall, Pool, Rule
from nsa_sel.settings.schema import KernelConfig


@triton.jit
def query_columns(q, cu, strides, b, g, row0, sizes, dims: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Load q of the tile of TOKENS rows from `row0` on, transposed once: in the loop, each step would copy it to shared
    memory.

    Returns s, head and existence of the columns [HEADS * TOKENS], and q in two row tiles: [BLOCK_D, HEADS * TOKENS] and
    [BLOCK_REST, HEADS * TOKENS].
    """
    column = tl.arange(0, HEADS * TOKENS)
    head, s = (column // TOKENS).to(tl.int64), row0 + column % TOKENS
    exists = (s < sizes.S) & (head < dims.h)
    s = last_row(s, cu, sizes).to(tl.int64)
    q_tile, q_rest = load_split(row_pointers(q, strides.q, b, g, s, head), exists, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
    return s, head, exists, q_tile.T, q_rest.T


@triton.jit
def key_products(
    q_columns, rest_columns, k_desc, k_rest_desc, k, strides, b, g, key, exists, first, dims: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return the products k q^T [BLOCK_K, HEADS * TOKENS] of the index keys `key` [BLOCK_K]. TMA loads the BLOCK_K keys
    from `first` on instead."""
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    REST: tl.constexpr = dims.BLOCK_REST
    if k_desc is not None:
        k_tile = k_desc.load([b, g, first, 0]).reshape(BLOCK_K, BLOCK_D)
        k_rest = k_tile
        if REST > 0:
            k_rest = k_rest_desc.load([b, g, first, BLOCK_D]).reshape(BLOCK_K, REST)
    else:
        pointers = key_pointers(k, strides.k, b.to(tl.int64), g.to(tl.int64), key)
        k_tile, k_rest = load_split(pointers, exists, dims.Dk, BLOCK_D, REST)
    products = dot(k_tile, q_columns)
    if REST > 0:
        products = tl.dot(k_rest, rest_columns, products, input_precision="ieee", out_dtype=products.dtype)
    return products


MOST_BLOCKS = 32  # most blocks per step, because the addresses of their scores take registers
PROGRAMS, LEAST_STEPS = 512, 8  # fewer programs share the blocks of their rows, each with this many steps at least


@triton.jit
def over_heads(products, lse2, scale, dims: tl.constexpr, pool: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Return x [keys, TOKENS] from the products q.k [keys, HEADS * TOKENS]. Logits are not scaled yet; the scale is
    positive."""
    if pool.softmax:
        x = tl.exp2(products * scale - lse2[None, :]).reshape(products.shape[0], HEADS, TOKENS)
    else:
        x = products.reshape(products.shape[0], HEADS, TOKENS)
    if pool.relu:
        x = tl.maximum(x, 0.0)
    if pool.heads_max:
        if HEADS != dims.h:
            x = tl.where((tl.arange(0, HEADS) < dims.h)[None, :, None], x, float("-inf"))
        return tl.max(x, 1)
    else:
        return tl.sum(x, 1)


@triton.jit
def join(a, b, pool: tl.constexpr):
    """Combine scores of the same blocks from different keys."""
    return tl.maximum(a, b) if pool.block_max else a + b


@triton.jit
def over_pieces(x, weight, least, pool: tl.constexpr):
    """Reduce x [BLOCKS, PIECES, TOKENS] to [BLOCKS, TOKENS]. weight [PIECES]: how many pieces of the block a key
    covers."""
    weight = weight[None, :, None]
    if pool.block_max:
        return tl.max(tl.where(weight > 0, x, least), 1)
    else:
        return tl.sum(x * weight.to(tl.float32), 1)


@triton.jit
def block_totals(
    x, part, own, pending, spilled, least, rule: tl.constexpr, pool: tl.constexpr, BLOCKS: tl.constexpr, PIECES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Add the index keys of a step, x [BLOCKS * PIECES, TOKENS], to the scores of its blocks.

    Returns the totals [BLOCKS, TOKENS], which are whole after the last of the PARTS steps of a block, and own, pending
    and spilled as of `score_steps`, for the next step.
    """
    TOKENS: tl.constexpr = x.shape[1]
    REACH: tl.constexpr = rule.compress_block // rule.compress_stride
    STEP: tl.constexpr = rule.block_size // rule.compress_stride
    block = tl.arange(0, BLOCKS)
    x = x.to(tl.float32).reshape(BLOCKS, PIECES, TOKENS)
    inside = part * PIECES + tl.arange(0, PIECES)
    mine = over_pieces(x, tl.minimum(REACH, STEP - inside), least, pool) if REACH > 1 else over_pieces(x, inside * 0 + 1, least, pool)
    own = mine if PARTS == 1 else tl.where(part == 0, mine, join(own, mine, pool))
    total = own
    if REACH > 1:
        spill = over_pieces(x, tl.maximum(REACH - STEP + inside, 0), least, pool)
        pending = spill if PARTS == 1 else tl.where(part == 0, spill, join(pending, spill, pool))
        if BLOCKS > 1:
            before = tl.broadcast_to(((block + BLOCKS - 1) % BLOCKS)[:, None], [BLOCKS, TOKENS])
            earlier = tl.gather(pending, before, 0)  # row 0: the last block's spill, for the next step
            total = join(own, tl.where((block == 0)[:, None], spilled, earlier), pool)
            spilled = earlier
        else:
            total = join(own, spilled, pool)
            spilled = tl.where(part == PARTS - 1, pending, spilled)
    return total, own, pending, spilled


@triton.jit
def scaled_totals(total, at, seen, scale, rule: tl.constexpr, pool: tl.constexpr):
    """Return the scores [BLOCKS, TOKENS] of the blocks `at` [BLOCKS]: logits times their scale, and of sums -inf where a
    row sees none of a block's keys."""
    if not pool.softmax:
        total *= scale
        if not pool.block_max:
            REACH: tl.constexpr = rule.compress_block // rule.compress_stride
            STEP: tl.constexpr = rule.block_size // rule.compress_stride
            some = tl.maximum(at * STEP - REACH + 1, 0)[:, None] < seen[None, :]
            total = tl.where(some, total, float("-inf"))
    return total


@triton.jit
def score_steps(
    steps, last_step, own, pending, spilled, q_columns, rest_columns, lse2, seen, k_desc, k_rest_desc, k, first_key, out, is_token,
    strides, b, g, sizes, blocks, scale, dims: tl.constexpr, rule: tl.constexpr, pool: tl.constexpr, HEADS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCKS: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Score the blocks of the steps [steps, last_step) and write those that are complete.

    own [BLOCKS, TOKENS]: scores of the current blocks from their own keys so far.
    pending: contributions of these keys to the next blocks.
    spilled: contributions of earlier keys to the current blocks, in row 0 if a step holds several blocks.
    """
    BLOCK_K: tl.constexpr = BLOCKS * PIECES
    STEP: tl.constexpr = rule.block_size // rule.compress_stride
    LEAST: tl.constexpr = float("-inf") if pool.block_max and not pool.softmax else 0.0
    block = tl.arange(0, BLOCKS)
    r = tl.arange(0, BLOCK_K)
    for i in range(steps, last_step):
        part = i % PARTS
        first = i // PARTS * BLOCKS
        piece = part * PIECES + r % PIECES  # [BLOCK_K], as key
        key = (first + r // PIECES) * STEP + piece
        is_key = (key < sizes.C) & (piece < STEP)
        products = key_products(
            q_columns, rest_columns, k_desc, k_rest_desc, k, strides, b, g, first_key + key, is_key,
            first_key + first * STEP + part * PIECES, dims, BLOCK_K,
        )  # fmt: skip
        x = over_heads(products, lse2, scale, dims, pool, HEADS, TOKENS)  # [BLOCK_K, TOKENS]
        if MASKED:
            x = tl.where(tl.where(is_key, key, sizes.C)[:, None] < seen[None, :], x, LEAST)
        total, own, pending, spilled = block_totals(x, part, own, pending, spilled, LEAST, rule, pool, BLOCKS, PIECES, PARTS)
        at = first + block
        total = scaled_totals(total, at, seen, scale, rule, pool)
        done = at < blocks if PARTS == 1 else at + (PARTS - 1 - part) * blocks < blocks
        tl.store(out[None, :] + at[:, None], total, mask=done[:, None] & is_token[None, :])
    return own, pending, spilled


@triton.jit
def block_scores_kernel(
    q, k_desc, k_rest_desc, k, lse, q_pos, cu, cu_cmp, scores, positions, strides, stride_lse, stride_scores, sizes, blocks, shares, scale,
    dims: tl.constexpr, rule: tl.constexpr, pool: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
    PIECES: tl.constexpr, PARTS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Store scores [B,S,G,blocks] up to the block of each tile's last position; later scores stay uninitialized.

    For a packed batch, also store the positions [1,S] int32 (-1 for padding), so that `top_n` need not search for each
    row's sequence.

    Grid: `shares` programs per tile of TOKENS rows, late tiles first; several only if no index key touches two blocks.
    Tiles: q [HEADS * TOKENS, BLOCK_D + BLOCK_REST], k [BLOCKS * PIECES, BLOCK_D + BLOCK_REST]. The keys of a block are
    padded to PARTS * PIECES; PIECES is a power of two.
    TMA: k_desc and k_rest_desc load keys; None: pointer loads.
    Masks come after the sum over heads and drop keys that a row may not see, NaN included. APART: steps whose keys all
    rows see take none.
    scale: the logits' scale, times log2 e for softmax weights.
    """
    STEP: tl.constexpr = rule.block_size // rule.compress_stride
    LEAST: tl.constexpr = float("-inf") if pool.block_max and not pool.softmax else 0.0
    number, share = tl.program_id(0) // shares, tl.program_id(0) % shares
    row0, first_key, sizes = token_tile(sizes.tiles - 1 - number % sizes.tiles, cu, cu_cmp, sizes, TOKENS)
    b, g = number // sizes.tiles // sizes.G, number // sizes.tiles % sizes.G
    b64, g64 = b.to(tl.int64), g.to(tl.int64)

    s, head, exists, q_columns, rest_columns = query_columns(q, cu, strides, b64, g64, row0, sizes, dims, HEADS, TOKENS)
    lse2 = tl.zeros([HEADS * TOKENS], tl.float32)
    if pool.softmax:  # columns that do not exist and rows without keys get lse = +inf, hence weight 0
        lse_columns = tl.load(row_pointers(lse, stride_lse, b64, g64, s, head), mask=exists, other=float("inf")).to(tl.float32)
        lse2 = tl.where(lse_columns == float("-inf"), float("inf"), lse_columns) * LOG2_E

    token = row0 + tl.arange(0, TOKENS)  # [TOKENS], as row, seen and t
    is_token = token < sizes.S
    row = last_row(token, cu, sizes).to(tl.int64)
    seen = seen_keys(q_pos, strides.pos, b64, row, sizes, rule)
    t = row_position(q_pos, strides.pos, b64, row, sizes.start)
    if positions is not None:  # noqa: SIM102 - a constant, then a number
        if g == 0:
            tl.store(positions + row, tl.maximum(t, -1).to(tl.int32), mask=is_token)
    t = tl.max(t, 0)
    end = tl.minimum(tl.where(t < 0, 0, t // rule.block_size + 1), blocks).to(tl.int32)
    last_step = (end + BLOCKS - 1) // BLOCKS
    each = (last_step + shares - 1) // shares * PARTS
    step = share * each
    last_step = tl.minimum(last_step * PARTS, step + each)
    whole = step
    if APART and PARTS * PIECES == STEP:  # steps are contiguous
        whole = tl.maximum(tl.minimum(tl.min(seen, 0) // (BLOCKS * PIECES), last_step), step)

    out = scores + b64 * stride_scores[0] + g64 * stride_scores[2] + row * stride_scores[1]
    shared = g if strides.k[1] != 0 else 0  # keys that all groups share have one group in the descriptor
    own = tl.full([BLOCKS, TOKENS], LEAST, tl.float32)
    pending, spilled = own, own
    if APART:
        own, pending, spilled = score_steps(
            step, whole, own, own, own, q_columns, rest_columns, lse2, seen, k_desc, k_rest_desc, k, first_key, out, is_token, strides, b,
            shared, sizes, blocks, scale, dims, rule, pool, HEADS, TOKENS, BLOCKS, PIECES, PARTS, False,
        )  # fmt: skip
    score_steps(
        whole, last_step, own, pending, spilled, q_columns, rest_columns, lse2, seen, k_desc, k_rest_desc, k, first_key, out, is_token,
        strides, b, shared, sizes, blocks, scale, dims, rule, pool, HEADS, TOKENS, BLOCKS, PIECES, PARTS, True,
    )  # fmt: skip


def block_scores(
    call: ChooseCall, lse: Tensor | None, scores: Tensor, config: KernelConfig, positions: Tensor | None = None
) -> None:  # fmt: skip
    """Write the scores of every row's visible blocks, by call.pool, to `scores` [B,S,G,blocks] float32.

    Later blocks may stay uninitialized.

    Args:
        call: with a positive scale and rule.reach <= rule.pieces.
        lse: [B,S,G,h] for a pool with softmax, else None.
        scores: with a contiguous last dimension.
        config: block_l index keys a step, `rows` columns of heads and tokens.
        positions: [1,S] int32, of a packed batch, or None: gets the rows' positions.
    """
    if scores.numel() == 0:
        return
    kernel = _scores_kernel(dims_of(call.q, call.v), call.rule, call.pool, config)
    constants = kernel.constants
    sizes = sizes_of(call, constants["TOKENS"])
    dense = constants["PARTS"] * constants["PIECES"] == call.rule.pieces
    tma = dense and config.loads == "tma" and aligned(call.k)
    k = call.k if call.k.stride(1) else call.k[:, :1]  # keys that all groups share have one group in the descriptor
    descriptors = key_descriptors(k, constants["dims"], constants["BLOCKS"] * constants["PIECES"], tma)
    programs, shares = call.q.shape[0] * sizes.G * sizes.tiles, 1
    if call.rule.reach == 1:
        shares = max(1, min(PROGRAMS // programs, call.blocks // (LEAST_STEPS * constants["BLOCKS"])))
    kernel.launch(
        programs * shares,
        (call.q, *descriptors, call.k, lse, call.q_pos, *bounds_of(call), scores, positions),
        (
            strides_of(call), (0, 0, 0, 0) if lse is None else lse.stride(), scores.stride()[:3], sizes, call.blocks, shares,
            call.scale_log2() if call.pool.softmax else call.scale,
        ),
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _scores_kernel(dims: Dims, rule: Rule, pool: Pool, config: KernelConfig) -> Kernel:
    heads, pieces = tile_size(dims.h, 1), min(tile_size(rule.pieces, 1), config.block_l)
    tiles = {"HEADS": heads, "TOKENS": max(1, config.rows // heads), "BLOCKS": min(MOST_BLOCKS, config.block_l // pieces)}
    pieces_of = {"PIECES": pieces, "PARTS": -(-rule.pieces // pieces), "APART": pool != NSA_POOL}
    return Kernel(block_scores_kernel, dims=dims, rule=rule.of_keys(), pool=pool, **tiles, **pieces_of, **options(config))
