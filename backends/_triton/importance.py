"""Compute the importance of selection blocks from q, compressed keys and lse, without storing p (NSA, Eq. 8 to 10).

p = 2^(c q.k - lse2) is computed transposed, [keys, heads x tokens] with the tokens of a head adjacent, so that in the
layout of a tensor-core accumulator the sum over heads stays within a thread. A compressed key covers `reach` pieces of
compress_stride keys. Pieces in its own block add to `own`, the others to the `spill` into the next block:

    importance[b] = own[b] + spill[b - 1]
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.arguments import Dims, options
from nsa_sel.backends._triton.choose_packed import last_row, token_tile
from nsa_sel.backends._triton.choose_rows import bounds_of, by_tma, dims_of, key_descriptors, seen_keys, sizes_of, strides_of
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.rows import row_position
from nsa_sel.backends._triton.softmax import LOG2_E, dot
from nsa_sel.backends._triton.tiles import key_pointers, load_split, row_pointers, tile_size
from nsa_sel.core.call import ChooseCall, Rule
from nsa_sel.settings.schema import KernelConfig


@triton.jit
def load_pieces(k_desc, k_rest_desc, k, strides, b, g, key, exists, first, dims: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the compressed keys `key` [BLOCK_K] as two column tiles (`load_split`); through TMA, BLOCK_K keys from
    `first` on."""
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    REST: tl.constexpr = dims.BLOCK_REST
    if k_desc is not None:
        k_tile = k_desc.load([b, g, first, 0]).reshape(BLOCK_K, BLOCK_D)
        k_rest = k_tile
        if REST > 0:
            k_rest = k_rest_desc.load([b, g, first, BLOCK_D]).reshape(BLOCK_K, REST)
        return k_tile, k_rest
    else:
        pointers = key_pointers(k, strides.k, b.to(tl.int64), g.to(tl.int64), key)
        return load_split(pointers, exists, dims.Dk, BLOCK_D, REST)


@triton.jit
def importance_kernel(
    q, k_desc, k_rest_desc, k, lse, q_pos, cu, cu_cmp, scores, positions, strides, stride_lse, stride_scores, sizes, blocks, scale_log2,
    dims: tl.constexpr, rule: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Store scores [B,S,G,blocks] up to the block of each tile's last position; later scores stay uninitialized.

    For a packed batch, also store the positions [1,S] int32 (-1 for padding), so that `top_n` need not search for each
    row's sequence.

    Grid: one program per tile of TOKENS rows, late tiles first.
    Tiles: q [HEADS * TOKENS, BLOCK_D], k [BLOCKS * PIECES, BLOCK_D], with a block's keys padded to PIECES, a power of
    two.
    TMA: k_desc and k_rest_desc load keys; None: pointer loads.
    Masks come after the sum over heads and drop keys that a row may not see, NaN included.
    """
    BLOCK_K: tl.constexpr = BLOCKS * PIECES
    REACH: tl.constexpr = rule.compress_block // rule.compress_stride
    STEP: tl.constexpr = rule.block_size // rule.compress_stride
    number = tl.program_id(0)
    row0, first_key, sizes = token_tile(sizes.tiles - 1 - number % sizes.tiles, cu, cu_cmp, sizes, TOKENS)
    b, g = number // sizes.tiles // sizes.G, number // sizes.tiles % sizes.G
    b64, g64 = b.to(tl.int64), g.to(tl.int64)

    column = tl.arange(0, HEADS * TOKENS)
    head, s = (column // TOKENS).to(tl.int64), row0 + column % TOKENS
    exists = (s < sizes.S) & (head < dims.h)
    s = last_row(s, cu, sizes).to(tl.int64)
    q_tile, q_rest = load_split(row_pointers(q, strides.q, b64, g64, s, head), exists, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
    q_columns, rest_columns = q_tile.T, q_rest.T  # transpose once: in the loop, each step would copy them to shared memory
    # Columns that do not exist get lse = +inf, hence p = 0.
    lse2 = tl.load(row_pointers(lse, stride_lse, b64, g64, s, head), mask=exists, other=float("inf")) * LOG2_E

    token = row0 + tl.arange(0, TOKENS)
    is_token = token < sizes.S
    row = last_row(token, cu, sizes).to(tl.int64)
    seen = seen_keys(q_pos, strides.pos, b64, row, sizes, rule)
    t = row_position(q_pos, strides.pos, b64, row, sizes.start)
    if positions is not None:  # noqa: SIM102 - a constant, then a number
        if g == 0:
            tl.store(positions + row, tl.maximum(t, -1).to(tl.int32), mask=is_token)
    t = tl.max(t, 0)
    end = tl.minimum(tl.where(t < 0, 0, t // rule.block_size + 1), blocks).to(tl.int32)

    r, block = tl.arange(0, BLOCK_K), tl.arange(0, BLOCKS)
    piece = tl.arange(0, PIECES)
    own_weight = tl.minimum(REACH, STEP - piece).to(tl.float32)[None, :, None]
    spill_weight = tl.maximum(REACH - STEP + piece, 0).to(tl.float32)[None, :, None]
    last = tl.broadcast_to(((block + BLOCKS - 1) % BLOCKS)[:, None], [BLOCKS, TOKENS])
    spilled = tl.zeros([BLOCKS, TOKENS], tl.float32)  # row 0: spill into the first block of this step
    out = scores + b64 * stride_scores[0] + g64 * stride_scores[2] + row * stride_scores[1]
    for first in range(0, end, BLOCKS):
        key = first * STEP + (r if PIECES == STEP else r // PIECES * STEP + r % PIECES)
        is_key = key < sizes.C if PIECES == STEP else (key < sizes.C) & (r % PIECES < STEP)
        k_tile, k_rest = load_pieces(
            k_desc, k_rest_desc, k, strides, b, g, first_key + key, is_key, first_key + first * STEP, dims, BLOCK_K
        )
        products = dot(k_tile, q_columns)
        if dims.BLOCK_REST > 0:
            products = tl.dot(k_rest, rest_columns, products, input_precision="ieee", out_dtype=products.dtype)
        p = tl.sum(tl.exp2(products * scale_log2 - lse2[None, :]).reshape(BLOCK_K, HEADS, TOKENS), 1)
        visible = tl.where(is_key, key, sizes.C)[:, None] < seen[None, :]
        p = tl.where(visible, p, 0.0).to(tl.float32).reshape(BLOCKS, PIECES, TOKENS)
        importance = tl.sum(p * own_weight, 1)
        if REACH > 1:
            spill = tl.gather(tl.sum(p * spill_weight, 1), last, 0)  # row 0: the last block's spill, for the next step
            importance += tl.where((block == 0)[:, None], spilled, spill)
            spilled = spill
        at = first + block
        tl.store(out[None, :] + at[:, None], importance, mask=(at < blocks)[:, None] & is_token[None, :])


def importance(call: ChooseCall, lse: Tensor, scores: Tensor, config: KernelConfig, positions: Tensor | None = None) -> None:
    """Write the importance of every row's visible blocks to `scores` [B,S,G,blocks] float32; later blocks may stay
    uninitialized.

    Args:
        call: with a positive scale and rule.reach <= rule.pieces.
        lse: [B,S,G,h].
        scores: with a contiguous last dimension.
        config: block_l compressed keys a step, `rows` columns of heads and tokens.
        positions: [1,S] int32, of a packed batch, or None: gets the rows' positions.
    """
    if scores.numel() == 0:
        return
    kernel = _kernel(dims_of(call), call.rule, config)
    sizes = sizes_of(call, kernel.constants["TOKENS"])
    pieces, blocks = kernel.constants["PIECES"], kernel.constants["BLOCKS"]
    tma = pieces == call.rule.pieces and by_tma(call, config)
    k_desc, k_rest_desc = key_descriptors(call, kernel.constants["dims"], blocks * pieces) if tma else (None, None)
    kernel.launch(
        call.q.shape[0] * sizes.G * sizes.tiles,
        (call.q, k_desc, k_rest_desc, call.k, lse, call.q_pos, *bounds_of(call), scores, positions),
        (strides_of(call), lse.stride(), scores.stride()[:3], sizes, call.blocks, call.scale_log2()),
    )


@functools.lru_cache(REMEMBERED)
def _kernel(dims: Dims, rule: Rule, config: KernelConfig) -> Kernel:
    heads, pieces = tile_size(dims.h, 1), tile_size(rule.pieces, 1)
    tiles = {"HEADS": heads, "TOKENS": max(1, config.rows // heads), "BLOCKS": max(1, config.block_l // pieces), "PIECES": pieces}
    return Kernel(importance_kernel, dims=dims, rule=rule.of_keys(), **tiles, **options(config))
