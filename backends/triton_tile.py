"""triton-tile: one program per tile of adjacent query rows. The program loads each selected K/V block once for the
whole tile.

Neighboring tokens select nearly the same blocks (docs/kernels.md). A tile holds TQ tokens times h heads, which fill the
64 rows of a tensor-core tile, and walks the union of their blocks (_triton/blocks.py). Rows that did not select a
block are masked by shifting their logits to -inf (softmax.chosen_step), at no per-element cost.
    whole blocks  visible to every row of the tile up to their last key: no mask; loaded through TMA on sm_90 and newer,
                  through pointers on older GPUs
    cut blocks    cut for some row by the causal clamp or by the end of the cache: pointer loads and a per-element mask
    small blocks  fewer than 16 keys: one step takes several of them, whole or cut, with pointer loads and a per-element
                  mask
Backward: dQ uses the same walk. dK and dV visit the exact rows that select each block (_triton/dkdv.py), without a
union.

Within a tile 0 * NaN is NaN: a NaN or infinity in a key or value that one row sees may reach the other rows of the
tile, except rows that select nothing. A NaN in a row's own q or do stays in that row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._loads import union_keys
from nsa_sel.backends._slices import by_parts
from nsa_sel.backends._triton import arguments
from nsa_sel.backends._triton.blocks import MOST_ROWS, block_union, tile_bytes
from nsa_sel.backends._triton.dkdv import key_value_gradients
from nsa_sel.backends._triton.kernel import cached_kernel
from nsa_sel.backends._triton.rows import row_limit, tile_rows
from nsa_sel.backends._triton.softmax import LN_2, delta_and_lse, finish_softmax, split_products
from nsa_sel.backends._triton.tiles import (
    kv_descriptors,
    load_kv,
    load_split,
    load_whole,
    row_pointers,
    store_columns,
)
from nsa_sel.backends._triton.units import tile_width
from nsa_sel.backends._triton.walk import add_cut_steps, add_step, empty_dq, empty_sums, load_rows, store_dq
from nsa_sel.backends.launcher.buffers import outputs
from nsa_sel.backends.launcher.passes import backward_of_any_scale, forward_of_any_scale
from nsa_sel.core.call import Call
from nsa_sel.settings.schema import KernelConfig

SORTED = 2048  # most entries per tile that the plan sorts: rows with more ranges get smaller tiles


@triton.jit
def selects(chosen, bit):
    """Return whether row `bit` selects the block: bit r of `chosen` is set if row r of the tile does."""
    return ((chosen >> bit) & 1) != 0


@triton.jit
def gather_keys(
    k, v, blocks, row_bits, i, stop, bit, limit, strides, b, g,
    dims: tl.constexpr, BLOCK: tl.constexpr, BLOCK_L: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Load K and V of the small blocks in entries i, i + 1, ... that fill BLOCK_L keys; return which rows see each key,
    too.

    CUT: limits cut some of the blocks. Keys that no row sees may hold NaN, so they are not loaded.
    """
    w = tl.arange(0, BLOCK_L)
    entry = i + w // BLOCK  # [BLOCK_L]
    listed = entry < stop  # [BLOCK_L]
    position = tl.load(blocks + entry, mask=listed, other=0) * BLOCK + w % BLOCK  # [BLOCK_L]
    sees = selects(tl.load(row_bits + entry, mask=listed, other=0)[None, :], bit[:, None])  # [ROWS, BLOCK_L]
    if CUT:
        sees &= position[None, :] < limit[:, None]
        listed = tl.max(sees.to(tl.int32), 0) > 0
    k_tile, k_rest, v_tile = load_kv(k, v, strides, b, g, position, listed, dims)
    return k_tile, k_rest, v_tile, sees


@triton.jit
def walk_union(
    sums, q, grad, descs, k, v, blocks, row_bits, counts, q_pos, tile, capacity, b, g, s, bit, exists, strides, sizes, c,
    dims: tl.constexpr, BLOCK: tl.constexpr, BLOCK_L: tl.constexpr, TAIL_L: tl.constexpr,
):  # fmt: skip
    """Add the blocks of the list of tile number `tile` to the sums of its rows (walk.py).

    s, bit, exists: [ROWS], each row, its bit in `row_bits`, and whether it exists.
    Entries [0, whole) are visible to every row up to their last key; entries [whole, total) may be cut for some row.
    """
    blocks += tile.to(tl.int64) * capacity
    row_bits += tile.to(tl.int64) * capacity
    whole, total = tl.load(counts + 2 * tile), tl.load(counts + 2 * tile + 1)
    limit = row_limit(q_pos, strides.pos, b.to(tl.int64), s, sizes[0], sizes[1])  # [ROWS]
    REST: tl.constexpr = dims.BLOCK_REST
    STEPS: tl.constexpr = BLOCK // BLOCK_L
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    if BLOCK < BLOCK_L:
        for cut in tl.static_range(2):
            stop = total if cut else whole
            for i in range(whole if cut else 0, stop, BLOCK_L // BLOCK):
                k_tile, k_rest, v_tile, sees = gather_keys(
                    k, v, blocks, row_bits, i, stop, bit, limit, strides, b64, g64, dims, BLOCK, BLOCK_L, cut
                )  # fmt: skip
                logits = split_products(q[0], q[1], k_tile, k_rest, REST)  # [ROWS, BLOCK_L]
                sums = add_step(sums, grad, logits, (k_tile, k_rest, v_tile), c, REST, sees)
    else:
        # Read the list one step ahead: a TMA load cannot start until its block number has arrived.
        block, chosen = tl.load(blocks), tl.load(row_bits)
        for step in range(0, whole * STEPS):
            at = block * BLOCK + step % STEPS * BLOCK_L
            kv = load_whole(descs[0], descs[1], descs[2], k, v, strides, b, g, at, dims, BLOCK_L)
            selected = selects(chosen, bit)  # [ROWS]
            coming = tl.minimum((step + 1) // STEPS, whole - 1)
            block, chosen = tl.load(blocks + coming), tl.load(row_bits + coming)
            logits = split_products(q[0], q[1], kv[0], kv[1], REST)  # [ROWS, BLOCK_L]
            sums = add_step(sums, grad, logits, kv, c, REST, None, selected)
        for i in range(whole, total):
            # Keys that no row sees may hold NaN and are not loaded.
            high = tl.where(exists & selects(tl.load(row_bits + i), bit), limit, 0)  # [ROWS], 0 without the block
            first = tl.load(blocks + i) * BLOCK
            end = tl.minimum(first + BLOCK, tl.max(high, 0))
            sums = add_cut_steps(sums, q, grad, k, v, strides, b64, g64, 0, first, end, None, high, c, dims, TAIL_L, False)
    return sums


@triton.jit
def forward_kernel(
    q, k_desc, k_rest_desc, v_desc, k, v, blocks, rows, counts, q_pos, o, lse, strides, sizes, tiles, capacity, scale_log2,
    dims: tl.constexpr, BLOCK: tl.constexpr, TQ: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr, TAIL_L: tl.constexpr,
):  # fmt: skip
    """Compute o = softmax(scale * q k^T) v and lse for one tile's rows and heads, over the union of the rows' blocks.

    Grid: one program per tile of TQ tokens; where h > ROWS, one program per ROWS heads of the tile.
    Tiles: q [ROWS, BLOCK_D + BLOCK_REST], k [BLOCK_L, BLOCK_D + BLOCK_REST], v [BLOCK_L, BLOCK_DV]; TAIL_L keys per
    step in cut blocks.
    TMA: k_desc, k_rest_desc (second column tile of k) and v_desc load whole blocks; None: pointer loads.
    """
    S, _, G = sizes
    b, g, tile, s, bit, head, out, exists = tile_rows(tl.program_id(0), S, G, tiles, dims.h, TQ, ROWS, dims.SHARE)
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    q_rows = row_pointers(q, strides.q, b64, g64, s.to(tl.int64), head)  # [ROWS]
    q_tile = load_split(q_rows, exists, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)  # [ROWS, BLOCK_D], [ROWS, BLOCK_REST]
    sums = empty_sums(ROWS, dims.BLOCK_DV, lse.dtype.element_ty)
    acc, l, m = walk_union(
        sums, q_tile, None, (k_desc, k_rest_desc, v_desc), k, v, blocks, rows, counts, q_pos, tile, capacity, b, g, s, bit, exists,
        strides, sizes, scale_log2, dims, BLOCK, BLOCK_L, TAIL_L,
    )  # fmt: skip
    o_tile, lse2 = finish_softmax(acc, l, m, scale_log2)  # [ROWS, BLOCK_DV], [ROWS]
    store_columns(o + out * dims.Dv, o_tile, exists, 0, dims.Dv)
    tl.store(lse + out, lse2 * LN_2, mask=exists)


@triton.jit
def dq_kernel(
    q, k_desc, k_rest_desc, v_desc, k, v, blocks, rows, counts, q_pos, o, lse, do, dlse, dq, delta,
    strides, stride_do, sizes, tiles, capacity, scale, scale_log2,
    dims: tl.constexpr, BLOCK: tl.constexpr, TQ: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr, TAIL_L: tl.constexpr,
):  # fmt: skip
    """Compute dq = scale * ds k for one tile's rows and heads; store delta = sum(do * o) - dlse [B,S,G,h] for the dK/dV
    kernel.

    Grid, tiles and TMA are those of `forward_kernel`; do is [ROWS, BLOCK_DV].
    """
    S, _, G = sizes
    b, g, tile, s, bit, head, out, exists = tile_rows(tl.program_id(0), S, G, tiles, dims.h, TQ, ROWS, dims.SHARE)
    b64, g64, s64 = b.to(tl.int64), g.to(tl.int64), s.to(tl.int64)
    q_tile, q_rest, do_tile = load_rows(None, None, q, do, strides, stride_do, b64, g64, 0, s64, head, exists, dims, ROWS)
    delta_rows, lse2 = delta_and_lse(o, do_tile, lse, dlse, delta, out, exists, dims)  # [ROWS]
    sums = empty_dq(ROWS, dims, lse.dtype.element_ty)
    sums = walk_union(
        sums, (q_tile, q_rest), (do_tile, lse2, delta_rows), (k_desc, k_rest_desc, v_desc), k, v, blocks, rows, counts, q_pos, tile,
        capacity, b, g, s, bit, exists, strides, sizes, scale_log2, dims, BLOCK, BLOCK_L, TAIL_L,
    )  # fmt: skip
    has_keys = lse2 != float("-inf")  # [ROWS]
    store_dq(dq + out * dims.Dk, sums, scale, has_keys, exists, dims)


@forward_of_any_scale
def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h]."""
    o, lse = outputs(call)
    _launch(call, forward_kernel, "triton-tile/forward", o, lse)
    return o, lse


@backward_of_any_scale
def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv: dq per tile of rows; dk and dv per KV block, summed in ascending order over the rows that
    select it."""
    dq, delta = arguments.row_gradients(call, lse)
    _launch(call, dq_kernel, "triton-tile/dq", o, lse, do, dlse, dq, delta)
    dk, dv = key_value_gradients(call, arguments.heads(call), lse, do, delta, "triton-tile/dkdv")
    return dq, dk, dv


def _launch(call: Call, function: object, name: str, *tensors: Tensor | None) -> None:
    """Launch a kernel with the config `name` over all tiles, in parts if their plan would exceed the workspace.

    tensors: o and lse of `forward_kernel`; or o, lse, do, dlse, dq and delta of `dq_kernel`.
    """
    heads, block = arguments.heads(call), call.selection.block_size
    assert block is not None, "Limits.block_aligned_only keeps other selections out"
    config = arguments.kernel_config(call, heads, name)
    dims, block_l, tokens = arguments.split_dims(heads), tile_width(call, config), _tile_tokens(heads, call.selection.n, config)
    tiles = {"BLOCK": block, "TQ": tokens, "ROWS": config.rows, "BLOCK_L": block_l, "TAIL_L": min(32, block_l)}
    kernel = cached_kernel(function, dims=dims, **tiles, **arguments.options(config))

    def start(part: Call, *tensors: Tensor | None) -> None:
        plan = block_union(part, tokens)
        descriptors = kv_descriptors(part.k, part.v, dims, block_l, config.loads == "tma")
        inputs = part.q, *descriptors, part.k, part.v, plan.blocks, plan.rows, plan.counts, part.q_pos
        do = tensors[2] if len(tensors) > 2 else None
        of_do = () if do is None else (do.stride()[:4],)
        scales = (part.scale_log2(),) if do is None else (part.scale, part.scale_log2())
        numbers = (arguments.strides(part), *of_do, arguments.sizes(part), plan.tiles, plan.capacity, *scales)
        programs = plan.programs * heads.share * -(-heads.h // config.rows)
        arguments.announced(part, heads, name, config, kernel).launch(programs, (*inputs, *tensors), numbers)

    by_parts(call, tokens, tile_bytes(call, tokens), start, *tensors)


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Return how many keys the forward loads: each tile's union, once per tile of heads. Without `count`, return an
    upper bound."""
    heads = arguments.heads(call)
    config = call.settings.kernel("triton-tile/forward" + arguments.config_suffix(heads))
    keys = union_keys(call, _tile_tokens(heads, call.selection.n, config)) if count else selected
    return keys * -(-heads.h // config.rows)


def _tile_tokens(heads: arguments.Heads, n: int, config: KernelConfig) -> int:
    """Return TQ: as many tokens as fill the tensor-core tile with their heads, limited by what the plan can sort and
    mark."""
    return max(1, min(MOST_ROWS, config.rows // heads.h, SORTED // n))
