"""triton-block for large blocks: visit a block whole, so that each of its rows stores one partial result per block.

A block of VISITED_WHOLE keys or more has several tiles. Visited tile by tile, each row would store a partial per tile:
8 for a block of 512 keys (MoBA). Here a program takes a piece of the lists of whole blocks (key_to_rows.py with width =
block size), ROWS rows at a time, walks the block's keys with the online softmax, and stores o and lse once. Backward,
the same walk gives the (row, block)'s share of dq; dk and dv use lists of tiles (dkdv.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton import arguments
from nsa_sel.backends._triton.kernel import cached_kernel
from nsa_sel.backends._triton.key_to_rows import KeyToRows, list_start
from nsa_sel.backends._triton.rows import row_limit
from nsa_sel.backends._triton.softmax import LOG2_E, finish_softmax
from nsa_sel.backends._triton.tiles import kv_descriptors, load_split, row_pointers, store_columns
from nsa_sel.backends._triton.units import Unit, load_entries, piece_bounds, tile_width
from nsa_sel.backends._triton.walk import add_cut_steps, add_whole_steps, empty_dq, empty_sums, load_rows, store_dq
from nsa_sel.backends.specs import VISITED_WHOLE
from nsa_sel.core.call import Call


def is_large(call: Call) -> bool:
    """Return whether the call's blocks are visited whole."""
    return (call.selection.block_size or 0) >= VISITED_WHOLE


@triton.jit
def walk_block(
    sums, q, grad, descs, k, v, strides, b, g, first, limit, listed, c, dims: tl.constexpr, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr
):  # fmt: skip
    """Add the block that begins at key `first` to the sums of the listed rows (walk.py). limit: [ROWS], one past the
    last key that each row may see.

    If each listed row sees the whole block, its steps need no mask; else the keys up to the last that any row sees are
    masked. Two loops, because Triton miscompiles a product in a branch (docs/kernels.md, "Tried and dropped").
    """
    end = tl.minimum(first + WIDTH, tl.max(tl.where(listed, limit, 0), 0))
    steps = tl.where(tl.min(tl.where(listed, limit, first + WIDTH), 0) >= first + WIDTH, WIDTH // BLOCK_L, 0)
    cut = tl.where(steps > 0, end, first)
    b32, g32 = b.to(tl.int32), g.to(tl.int32)
    sums = add_whole_steps(
        sums, q, grad, descs, k, v, strides, b32, g32, first, 0, steps * BLOCK_L, limit, limit, 0, c, dims, BLOCK_L, False
    )  # fmt: skip
    sees = tl.where(listed, limit, 0)
    return add_cut_steps(sums, q, grad, k, v, strides, b, g, 0, cut, end, sees, sees, c, dims, BLOCK_L, False, True)


@triton.jit
def visit_kernel(
    q, k_desc, k_rest_desc, v_desc, k, v, q_pos, lse, do, delta, part, part_lse, entries, ends, piece_list,
    strides, stride_do, sizes, lists, scale, scale_log2,
    dims: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Compute the partials of every entry in one piece: `part` and base-2 `part_lse` [pairs, section, N, h].

    Forward (`do` is None), part is the partial o [pairs, section, N, h, Dv]. Backward, it is the share of
    dq = scale * ds k [pairs, section, N, h, Dk], and part_lse is None.

    Grid: one program per piece of the unit's lists.
    Tiles: q [ROWS, BLOCK_D + BLOCK_REST], do [ROWS, BLOCK_DV], k [BLOCK_L, BLOCK_D + BLOCK_REST], v [BLOCK_L, BLOCK_DV].
    ROWS are (entry, head) pairs of one list.
    TMA: k_desc, k_rest_desc and v_desc load whole steps, as in triton_tile.py.
    Masks: none if all ROWS see the whole block.
    """
    S, S_kv, G = sizes
    h: tl.constexpr = dims.h
    e, stop = piece_bounds(ends, lists, tl.program_id(0))
    if e < stop:
        number = tl.load(piece_list + tl.program_id(0))
        r = tl.arange(0, ROWS)
        while e < stop:
            bg = number // lists.tiles % lists.pairs_all
            e1 = tl.minimum(list_start(ends, number + 1, lists.stretches), stop)
            b, g, first = bg // G, bg % G, (number % lists.tiles * WIDTH).to(tl.int32)
            first_slot = ((bg - lists.first_pair) * lists.section - lists.first_row) * N * h
            pairs = (tl.maximum(e1 - e, 0) * h).to(tl.int32)
            for p0 in range(0, pairs, ROWS):
                pair = p0 + r  # [ROWS], as all row indices below
                listed = pair < pairs
                entry = load_entries(entries, e, pair, pairs, h)
                head = pair % h
                s = (entry // N).to(tl.int64)
                limit = row_limit(q_pos, strides.pos, b, s, S, S_kv)
                if do is None:
                    q_tile = load_split(row_pointers(q, strides.q, b, g, s, head), listed, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
                    acc, l, m = walk_block(
                        empty_sums(ROWS, dims.BLOCK_DV, part_lse.dtype.element_ty), q_tile, None, (k_desc, k_rest_desc, v_desc), k, v,
                        strides, b, g, first, limit, listed, scale_log2, dims, WIDTH, BLOCK_L,
                    )  # fmt: skip
                    o_tile, lse2 = finish_softmax(acc, l, m, scale_log2)  # [ROWS, BLOCK_DV], [ROWS]
                    slot = first_slot + entry.to(tl.int64) * h + head
                    store_columns(part + slot * dims.Dv, o_tile, listed, 0, dims.Dv)
                    tl.store(part_lse + slot, lse2, mask=listed)
                else:
                    q_tile, q_rest, do_tile = load_rows(None, None, q, do, strides, stride_do, b, g, 0, s, head, listed, dims, ROWS)
                    out = ((b * S + s) * G + g) * h + head
                    lse2 = tl.load(lse + out, mask=listed, other=float("inf")) * LOG2_E
                    delta_rows = tl.load(delta + out, mask=listed, other=0.0)
                    sums = walk_block(
                        empty_dq(ROWS, dims, lse.dtype.element_ty), (q_tile, q_rest), (do_tile, lse2, delta_rows),
                        (k_desc, k_rest_desc, v_desc), k, v, strides, b, g, first, limit, listed, scale_log2, dims, WIDTH, BLOCK_L,
                    )  # fmt: skip
                    slot = first_slot + entry.to(tl.int64) * h + head
                    store_dq(part + slot * dims.Dk, sums, scale, None, listed, dims)
            e = tl.maximum(e, e1)
            number += 1


def visit(
    call: Call, plan: KeyToRows, unit: Unit, part: Tensor, part_lse: Tensor | None,
    lse: Tensor | None = None, do: Tensor | None = None, delta: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch `visit_kernel`, which writes part [pairs, section, n, h, Dv or Dk] and part_lse [pairs, section, n, h] of a
    unit. lse, do, delta: of the backward pass."""
    heads, name = arguments.heads(call), "triton-tile/forward" if do is None else "triton-tile/dq"
    config = arguments.kernel_config(call, heads, name)
    dims, block_l, strides = arguments.split_dims(heads), tile_width(call, config), arguments.strides(call)
    tiles = {"N": call.selection.n, "WIDTH": plan.width, "ROWS": config.rows, "BLOCK_L": block_l}
    kernel = cached_kernel(visit_kernel, dims=dims, **tiles, **arguments.options(config))
    descriptors = kv_descriptors(call.k, call.v, dims, block_l, config.loads == "tma")
    stride_do = strides.q if do is None else do.stride()[:4]
    arguments.announced(call, heads, name, config, kernel).launch(
        plan.pieces,
        (call.q, *descriptors, call.k, call.v, call.q_pos, lse, do, delta, part, part_lse, plan.entries, plan.ends, unit.piece_list),
        (strides, stride_do, arguments.sizes(call), unit.lists, call.scale, call.scale_log2()),
    )


def tokens(call: Call) -> int:
    """Return the tokens per step of the forward visit, which share one load of the block's keys and values."""
    heads = arguments.heads(call)
    return max(1, call.settings.kernel("triton-tile/forward" + arguments.config_suffix(heads)).rows // heads.h)
