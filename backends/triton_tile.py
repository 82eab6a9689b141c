"""triton-tile: one program per tile of adjacent rows, which loads every block that any of them selects once, for all of them.

Neighboring tokens select nearly the same blocks (docs/kernels.md), so a tile of TQ rows and h heads, TQ * h = 64 rows of the tensor-core
tile, walks the union of their blocks (_triton/block_union.py). Rows that did not select a block are masked by shifting their logits to
-inf (softmax.chosen_step), at no cost per element.
    whole blocks  every row of the tile sees them to their last key: no mask; TMA on sm_90 and newer, pointers before
    cut blocks    the causal clamp, or the end of the cache, cuts them for some row: pointers, and a mask for every element
    small blocks  of fewer than 16 keys: as many as fill a step, whole or cut, by pointers and with a mask for every element
Backward: dQ by the same walk; dK and dV over the exact rows that select each block (_triton/dkdv.py), which costs no union.

Within a tile, 0 * NaN is NaN: a NaN or infinity in a key or value that one row sees may reach the other rows of its tile, but none
that selects nothing. What a row's own q and do hold stays with that row.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_sel.backends._common import backward_of_any_scale, forward_of_any_scale
from nsa_sel.backends._loads import union_keys
from nsa_sel.backends._slices import by_parts
from nsa_sel.backends._triton import arguments
from nsa_sel.backends._triton.block_union import MOST_ROWS, BlockUnion, block_union, tile_bytes
from nsa_sel.backends._triton.dkdv import key_value_gradients
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.rows import row_limit, tile_rows
from nsa_sel.backends._triton.softmax import (
    LN_2,
    LOWEST,
    add_product,
    chosen_step,
    delta_and_lse,
    finish_softmax,
    p_and_ds,
    softmax_step,
    split_products,
)
from nsa_sel.backends._triton.tiles import MIN_TILE, load_columns, load_kv, load_split, load_whole, row_pointers, store_columns, store_split
from nsa_sel.backends._triton.tma import descriptor
from nsa_sel.core.call import Call
from nsa_sel.settings.schema import KernelConfig

SORTED = 2048  # entries of one tile that the plan sorts: more ranges per row make smaller tiles


@triton.jit
def tile_list(blocks, rows, counts, tile, capacity):
    """A tile's list of blocks and their rows, how many of them are whole for every row, and how many there are."""
    at = tile.to(tl.int64) * capacity
    return blocks + at, rows + at, tl.load(counts + 2 * tile), tl.load(counts + 2 * tile + 1)


@triton.jit
def selects(chosen, bit):
    """Whether each row selects the block whose rows are the bits of `chosen`."""
    return ((chosen >> bit) & 1) != 0


@triton.jit
def cut_block(blocks, rows, i, bit, exists, limit, BLOCK: tl.constexpr):
    """Entry i, a cut block: its first key, one past the last that any row sees (keys after it may hold NaN), and each row's limit."""
    sees = tl.where(exists & selects(tl.load(rows + i), bit), limit, 0)
    first = tl.load(blocks + i) * BLOCK
    return first, tl.minimum(first + BLOCK, tl.max(sees, 0)), sees


@triton.jit
def gather_keys(
    k, v, blocks, rows, i, stop, bit, limit, strides, b, g,
    dims: tl.constexpr, BLOCK: tl.constexpr, BLOCK_L: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """K and V of the small blocks of the entries i, i + 1 ... that fill BLOCK_L keys, and which rows see each key [ROWS, BLOCK_L].

    CUT: limits cut some of the blocks. Keys that no row sees may hold NaN, and are not loaded.
    """
    w = tl.arange(0, BLOCK_L)
    entry = i + w // BLOCK
    listed = entry < stop
    position = tl.load(blocks + entry, mask=listed, other=0) * BLOCK + w % BLOCK
    sees = selects(tl.load(rows + entry, mask=listed, other=0)[None, :], bit[:, None])
    if CUT:
        sees &= position[None, :] < limit[:, None]
        listed = tl.max(sees.to(tl.int32), 0) > 0
    k_tile, k_rest, v_tile = load_kv(k, v, strides, b, g, position, listed, dims)
    return k_tile, k_rest, v_tile, sees


@triton.jit
def forward_kernel(
    q, k_desc, k_rest_desc, v_desc, k, v, blocks, rows, counts, q_pos, o, lse, strides, sizes, tiles, capacity, scale_log2,
    dims: tl.constexpr, BLOCK: tl.constexpr, TQ: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr, TAIL_L: tl.constexpr,
):  # fmt: skip
    """o and lse of one tile's rows and heads.

    Grid: one program per tile of TQ rows, and of ROWS heads where h > ROWS. Tiles: q [ROWS, BLOCK_D + BLOCK_REST], k [BLOCK_L, same] and
    v [BLOCK_L, BLOCK_DV], TAIL_L keys in cut blocks. TMA: k_desc, k_rest_desc (the second tile of k) and v_desc; None: pointers.
    """
    S, S_kv, G = sizes
    ACC: tl.constexpr = lse.dtype.element_ty
    BLOCK_DV: tl.constexpr = dims.BLOCK_DV
    STEPS: tl.constexpr = BLOCK // BLOCK_L
    b, g, tile, s, bit, head, out, exists = tile_rows(tl.program_id(0), S, G, tiles, dims.h, TQ, ROWS)
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    q_rows = row_pointers(q, strides.q, b64, g64, s.to(tl.int64), head)
    q_tile, q_rest = load_split(q_rows, exists, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
    blocks, rows, whole, total = tile_list(blocks, rows, counts, tile, capacity)

    acc = tl.zeros([ROWS, BLOCK_DV], ACC)
    l = tl.zeros([ROWS], ACC)
    m = tl.full([ROWS], LOWEST, ACC)
    limit = row_limit(q_pos, strides.pos, b64, s, S, S_kv)
    if BLOCK < BLOCK_L:
        for cut in tl.static_range(2):
            stop = total if cut else whole
            for i in range(whole if cut else 0, stop, BLOCK_L // BLOCK):
                k_tile, k_rest, v_tile, sees = gather_keys(
                    k, v, blocks, rows, i, stop, bit, limit, strides, b64, g64, dims, BLOCK, BLOCK_L, cut
                )  # fmt: skip
                logits = split_products(q_tile, q_rest, k_tile, k_rest, dims.BLOCK_REST)
                acc, l, m = softmax_step(tl.where(sees, logits, float("-inf")), v_tile, acc, l, m, scale_log2)
    else:
        # The list is read one step ahead: a TMA load cannot start before its block is read.
        block, chosen = tl.load(blocks), tl.load(rows)
        for step in range(0, whole * STEPS):
            c = block * BLOCK + step % STEPS * BLOCK_L
            k_tile, k_rest, v_tile = load_whole(k_desc, k_rest_desc, v_desc, k, v, strides, b, g, c, dims, BLOCK_L)
            selected = selects(chosen, bit)
            coming = tl.minimum((step + 1) // STEPS, whole - 1)
            block, chosen = tl.load(blocks + coming), tl.load(rows + coming)
            logits = split_products(q_tile, q_rest, k_tile, k_rest, dims.BLOCK_REST)
            acc, l, m = chosen_step(logits, selected, v_tile, acc, l, m, scale_log2)

        for i in range(whole, total):
            first, end, sees = cut_block(blocks, rows, i, bit, exists, limit, BLOCK)
            for c in range(first, end, TAIL_L):
                position = c + tl.arange(0, TAIL_L)
                k_tail, k_rest, v_tail = load_kv(k, v, strides, b64, g64, position, position < end, dims)
                logits = split_products(q_tile, q_rest, k_tail, k_rest, dims.BLOCK_REST)
                logits = tl.where(position[None, :] < sees[:, None], logits, float("-inf"))
                acc, l, m = softmax_step(logits, v_tail, acc, l, m, scale_log2)

    o_tile, lse_rows = finish_softmax(acc, l, m, scale_log2)
    store_columns(o + out * dims.Dv, o_tile, exists, 0, dims.Dv)
    tl.store(lse + out, lse_rows * LN_2, mask=exists)


@triton.jit
def dq_kernel(
    q, k_desc, k_rest_desc, v_desc, k, v, blocks, rows, counts, q_pos, o, lse, do, dlse, dq, delta,
    strides, stride_do, sizes, tiles, capacity, scale, scale_log2,
    dims: tl.constexpr, BLOCK: tl.constexpr, TQ: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr, TAIL_L: tl.constexpr,
):  # fmt: skip
    """dq = scale * ds k of one tile's rows and heads, and delta = sum(do * o) - dlse [B,S,G,h] for the KV side.

    Grid, tiles and TMA as in `forward_kernel`.
    29 arguments: 16 tensors and descriptors, each with an address of its own.
    """
    S, S_kv, G = sizes
    ACC: tl.constexpr = lse.dtype.element_ty
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    REST: tl.constexpr = dims.BLOCK_REST
    STEPS: tl.constexpr = BLOCK // BLOCK_L
    b, g, tile, s, bit, head, out, exists = tile_rows(tl.program_id(0), S, G, tiles, dims.h, TQ, ROWS)
    b64, g64, s64 = b.to(tl.int64), g.to(tl.int64), s.to(tl.int64)
    q_tile, q_rest = load_split(row_pointers(q, strides.q, b64, g64, s64, head), exists, dims.Dk, BLOCK_D, REST)
    do_tile = load_columns(row_pointers(do, stride_do, b64, g64, s64, head), exists, 0, dims.Dv, dims.BLOCK_DV)
    delta_rows, lse2 = delta_and_lse(o, do_tile, lse, dlse, delta, out, exists, dims)
    blocks, rows, whole, total = tile_list(blocks, rows, counts, tile, capacity)

    acc = tl.zeros([ROWS, BLOCK_D], ACC)
    rest = tl.zeros([ROWS, REST], ACC) if REST > 0 else acc
    limit = row_limit(q_pos, strides.pos, b64, s, S, S_kv)
    if BLOCK < BLOCK_L:
        for cut in tl.static_range(2):
            stop = total if cut else whole
            for i in range(whole if cut else 0, stop, BLOCK_L // BLOCK):
                k_tile, k_rest, v_tile, sees = gather_keys(
                    k, v, blocks, rows, i, stop, bit, limit, strides, b64, g64, dims, BLOCK, BLOCK_L, cut
                )  # fmt: skip
                logits = split_products(q_tile, q_rest, k_tile, k_rest, REST)
                _, ds = p_and_ds(logits, do_tile, v_tile, lse2, delta_rows, scale_log2, sees)
                acc = add_product(acc, ds.to(k_tile.dtype), k_tile)
                if REST > 0:
                    rest = add_product(rest, ds.to(k_tile.dtype), k_rest)
    else:
        block, chosen = tl.load(blocks), tl.load(rows)
        for step in range(0, whole * STEPS):
            c = block * BLOCK + step % STEPS * BLOCK_L
            k_tile, k_rest, v_tile = load_whole(k_desc, k_rest_desc, v_desc, k, v, strides, b, g, c, dims, BLOCK_L)
            selected = selects(chosen, bit)
            coming = tl.minimum((step + 1) // STEPS, whole - 1)
            block, chosen = tl.load(blocks + coming), tl.load(rows + coming)
            logits = split_products(q_tile, q_rest, k_tile, k_rest, REST)
            _, ds = p_and_ds(logits, do_tile, v_tile, tl.where(selected, lse2, float("inf")), delta_rows, scale_log2)
            acc = add_product(acc, ds.to(k_tile.dtype), k_tile)
            if REST > 0:
                rest = add_product(rest, ds.to(k_tile.dtype), k_rest)

        for i in range(whole, total):
            first, end, sees = cut_block(blocks, rows, i, bit, exists, limit, BLOCK)
            for c in range(first, end, TAIL_L):
                position = c + tl.arange(0, TAIL_L)
                k_tail, k_rest, v_tail = load_kv(k, v, strides, b64, g64, position, position < end, dims)
                logits = split_products(q_tile, q_rest, k_tail, k_rest, REST)
                _, ds = p_and_ds(logits, do_tile, v_tail, lse2, delta_rows, scale_log2, position[None, :] < sees[:, None])
                acc = add_product(acc, ds.to(k_tail.dtype), k_tail)
                if REST > 0:
                    rest = add_product(rest, ds.to(k_tail.dtype), k_rest)
    # A row that saw no key has p = 0, which NaN or infinity in its q, do or dlse would make NaN.
    saw = (lse2 != float("-inf"))[:, None]
    store_split(dq + out * dims.Dk, tl.where(saw, acc * scale, 0.0), tl.where(saw, rest * scale, 0.0), exists, dims.Dk, REST)


@forward_of_any_scale
def forward(call: Call) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] and lse [B,S,G,h]."""
    heads = arguments.heads(call)
    config = arguments.kernel_config(call, heads, "triton-tile/forward")
    kernel = _forward(heads, call.selection.n, _block(call), config)

    def start(call: Call, o: Tensor, lse: Tensor) -> None:
        plan = block_union(call, kernel.constants["TQ"])
        arguments.announced(call, heads, "triton-tile/forward", config, kernel).launch(
            plan.programs * -(-heads.h // config.rows),
            (*_inputs(call, kernel, config, plan), o, lse),
            (arguments.strides(call), arguments.sizes(call), plan.tiles, plan.capacity, call.scale_log2()),
        )

    o, lse = arguments.outputs(call)
    by_parts(call, kernel.constants["TQ"], tile_bytes(call, kernel.constants["TQ"]), start, o, lse)
    return o, lse


@backward_of_any_scale
def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; dq by tiles, dk and dv by KV blocks over the rows that select them, in ascending row order."""
    heads = arguments.heads(call)
    config = arguments.kernel_config(call, heads, "triton-tile/dq")
    kernel = _dq(heads, call.selection.n, _block(call), config)

    def start(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, dq: Tensor, delta: Tensor) -> None:
        plan = block_union(call, kernel.constants["TQ"])
        arguments.announced(call, heads, "triton-tile/dq", config, kernel).launch(
            plan.programs * -(-heads.h // config.rows),
            (*_inputs(call, kernel, config, plan), o, lse, do, dlse, dq, delta),
            (arguments.strides(call), do.stride()[:4], arguments.sizes(call), plan.tiles, plan.capacity, call.scale, call.scale_log2()),
        )

    dq, delta = arguments.row_gradients(call, lse)
    by_parts(call, kernel.constants["TQ"], tile_bytes(call, kernel.constants["TQ"]), start, o, lse, do, dlse, dq, delta)
    dk, dv = key_value_gradients(call, heads, lse, do, delta, "triton-tile/dkdv")
    return dq, dk, dv


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Keys that the forward loads: the union of each tile's rows, once per tile of heads; not counted, at most what the rows select."""
    heads = arguments.heads(call)
    config = call.settings.kernel("triton-tile/forward" + arguments.config_suffix(heads))
    keys = union_keys(call, _tile_tokens(heads, call.selection.n, config)) if count else selected
    return keys * -(-heads.h // config.rows)


@functools.lru_cache(REMEMBERED)
def _forward(heads: arguments.Heads, n: int, block: int, config: KernelConfig) -> Kernel:
    return Kernel(forward_kernel, **_constants(heads, n, block, config))


@functools.lru_cache(REMEMBERED)
def _dq(heads: arguments.Heads, n: int, block: int, config: KernelConfig) -> Kernel:
    return Kernel(dq_kernel, **_constants(heads, n, block, config))


def _constants(heads: arguments.Heads, n: int, block: int, config: KernelConfig) -> dict[str, Any]:
    """Of both kernels."""
    block_l = config.block_l if block < MIN_TILE else min(config.block_l, block & -block)
    tiles = {"BLOCK": block, "TQ": _tile_tokens(heads, n, config), "ROWS": config.rows, "BLOCK_L": block_l, "TAIL_L": min(32, block_l)}
    return {"dims": arguments.split_dims(heads), **tiles, **arguments.options(config)}


def _tile_tokens(heads: arguments.Heads, n: int, config: KernelConfig) -> int:
    """TQ: as many rows as fill the tensor-core tile with their heads, and as the plan can sort and mark."""
    return max(1, min(MOST_ROWS, config.rows // heads.h, SORTED // n))


def _block(call: Call) -> int:
    block = call.selection.block_size
    assert block is not None, "Limits.block_aligned_only keeps other selections out"
    return block


def _inputs(call: Call, kernel: Kernel, config: KernelConfig, plan: BlockUnion) -> tuple[Tensor | TensorDescriptor | None, ...]:
    """The tensors that both kernels read; descriptors of k, the second tile of k, and v are None where pointers load them."""
    descriptors: tuple[TensorDescriptor | None, ...] = (None, None, None)
    if config.loads == "tma":
        dims, block_l = kernel.constants["dims"], kernel.constants["BLOCK_L"]
        rest = descriptor(call.k, block_l, dims.BLOCK_REST) if dims.BLOCK_REST else None
        descriptors = descriptor(call.k, block_l, dims.BLOCK_D), rest, descriptor(call.v, block_l, dims.BLOCK_DV)
    return call.q, *descriptors, call.k, call.v, plan.blocks, plan.rows, plan.counts, call.q_pos
