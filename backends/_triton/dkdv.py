"""Compute dK and dV without atomics, from the list of rows that select each KV tile (key_to_rows.py).

dv = sum p^T do, dk = scale * sum ds^T q over the rows and all h heads of the group (softmax.py). The lists are cut into
pieces of equal length, one program per piece. A program stores float32 partial sums for each tile in its piece, and a
second kernel adds them in the order of the pieces, so that the order of summation does not depend on which program runs
first. For triton-block the same pass also stores each (row, range)'s share of dq = scale * ds k, which triton_block.py
sums per row.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._slices import slices
from nsa_sel.backends._triton import arguments
from nsa_sel.backends._triton.blocks import merged
from nsa_sel.backends._triton.kernel import cached_kernel
from nsa_sel.backends._triton.key_to_rows import KeyToRows, list_start
from nsa_sel.backends._triton.rows import load_range, row_limit
from nsa_sel.backends._triton.softmax import LOG2_E, dot, p_and_ds, split_products
from nsa_sel.backends._triton.tiles import load_columns, load_kv, store_columns
from nsa_sel.backends._triton.units import (
    Slices,
    Unit,
    highest_limit,
    list_tile,
    load_entries,
    most_partials,
    piece_bounds,
    plan_within,
    slices_of,
    tile_width,
    units,
    workspace_beside_plan,
)
from nsa_sel.backends._triton.walk import add_rows_step, empty_dkdv, load_rows, store_dkdv
from nsa_sel.backends.launcher.buffers import temporary, unwritten
from nsa_sel.core.call import Call


@triton.jit
def partial_dkdv_kernel(
    q, k, v, ranges, bits, q_pos, lse, do, delta, part_dk, part_dv, part_dq, entries, ends, piece_list,
    strides, stride_do, sizes, lists, scale, scale_log2,
    dims: tl.constexpr, N: tl.constexpr, REACH: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    BY_ENTRY: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Compute partial sums of dk [BLOCK_L, Dk] and dv [BLOCK_L, Dv] for every list in one piece.

    Grid: one program per piece of the unit's lists, times TILES if the tiles of a block share a list.
    A program loads K and V of a tile once, through pointers. A step takes ROWS (entry, head) pairs, so that any number
    of heads fills the tensor cores.

    part_dq: if not None, receives each (entry, head)'s share of dq.
    WHOLE: every entry's range covers its tile up to the causal clamp. Only the first BLOCK_L rows of a list then need a
    mask, because rows ascend; with explicit q_pos, all rows of the tile's own list do.
    bits: if not None, which blocks of BLOCK keys a range selects within its tile (blocks.py).
    """
    S, S_kv, G = sizes
    piece = tl.program_id(0) // TILES
    e, stop = piece_bounds(ends, lists, piece)
    if e < stop:
        number = tl.load(piece_list + piece)
        r = tl.arange(0, ROWS)  # [ROWS], hoisted out of the loop over lists
        while e < stop:
            after = block_end(number, lists, TILES)
            if TILES > 1:  # the last block of a sequence may have fewer tiles
                number = tl.minimum(number - number % lists.tiles % TILES + tl.program_id(0) % TILES, after)
            list_begin = list_start(ends, number, lists.stretches)
            e1 = tl.minimum(list_start(ends, after, lists.stretches), stop)
            e = tl.maximum(e, list_begin)
            if e < e1:
                bg, b, g, column = list_tile(number, lists, G, BLOCK_L)
                reachable = S_kv
                if part_dq is not None:  # keys that no row may see can hold NaN, which ds k would spread to dq
                    reachable = highest_limit(entries, q_pos, strides.pos, e, e1, b, S, S_kv, N * REACH)
                kv = load_kv(k, v, strides, b, g, column, column < reachable, dims)
                masked_end = list_begin + BLOCK_L if q_pos is None else list_start(ends, number + 1, lists.stretches)
                sums = list_gradients(
                    q, kv, ranges, bits, q_pos, lse, do, delta, part_dq, entries, e, e1, masked_end, bg, b, g, column, r,
                    strides, stride_do, sizes, lists, scale, scale_log2, dims, N, REACH, WHOLE, BLOCK,
                )  # fmt: skip
                unit_begin = list_start(ends, lists.first_list, lists.stretches)
                part = part_number(number, lists, piece, e - unit_begin, TILES, BY_ENTRY) * BLOCK_L + tl.arange(0, BLOCK_L)
                store_dkdv(part_dk + part * dims.Dk, part_dv + part * dims.Dv, sums, scale, part >= 0, dims)
            e = e1
            number = after


@triton.jit
def list_gradients(
    q, kv, ranges, bits, q_pos, lse, do, delta, part_dq, entries, e, e1, masked_end, bg, b, g, column, r,
    strides, stride_do, sizes, lists, scale, scale_log2,
    dims: tl.constexpr, N: tl.constexpr, REACH: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return dk / scale (two column tiles, see `load_split`) and dv of one KV tile, summed over entries [e, e1) of its
    list.

    Also stores each entry's share of dq if part_dq is not None. masked_end: entries before it need a mask.
    """
    S, S_kv, G = sizes
    h: tl.constexpr = dims.h
    REST: tl.constexpr = dims.BLOCK_REST
    ALWAYS: tl.constexpr = (not WHOLE) or bits is not None
    k_tile, k_rest, v_tile = kv
    ROWS: tl.constexpr = r.shape[0]
    sums = empty_dkdv(k_tile.shape[0], dims, lse.dtype.element_ty)
    pairs = ((e1 - e) * h).to(tl.int32)
    masked = (tl.maximum(masked_end - e, 0) * h).to(tl.int32)
    first_out = (b * S * G + g) * h
    first_slot = ((bg - lists.first_pair) * lists.section - lists.first_row) * (N * REACH) * h
    # Prefetch the next step's entries, because the addresses of its rows depend on them.
    coming = load_entries(entries, e, r, pairs, h)
    for p0 in range(0, pairs, ROWS):
        pair = p0 + r  # [ROWS], as all row indices below
        listed = pair < pairs
        entry = coming
        coming = load_entries(entries, e, pair + ROWS, pairs, h)
        head = pair % h
        s = (entry // (N * REACH)).to(tl.int64)
        q_tile, q_rest, do_tile = load_rows(None, None, q, do, strides, stride_do, b, g, 0, s, head, listed, dims, ROWS)
        # Rows past the end of the list get lse = +inf, hence p = 0.
        out = first_out + s * G * h + head
        lse2 = tl.load(lse + out, mask=listed, other=float("inf")) * LOG2_E
        delta_rows = tl.load(delta + out, mask=listed, other=0.0)

        logits = split_products(q_tile, q_rest, k_tile, k_rest, REST)  # [ROWS, BLOCK_L]
        p, ds = p_and_ds(logits, do_tile, v_tile, lse2, delta_rows, scale_log2)  # [ROWS, BLOCK_L] both
        if ALWAYS or p0 < masked:
            limit = row_limit(q_pos, strides.pos, b, s, S, S_kv)
            if WHOLE:
                seen = listed[:, None] & (column[None, :] < limit[:, None])
                if bits is not None:
                    chosen = tl.load(bits + ((b * S + s) * G + g) // dims.SHARE * N + entry % N, mask=listed, other=0)
                    seen &= ((chosen[:, None] >> (column % column.shape[0] // BLOCK)[None, :]) & 1) != 0
            else:
                row = ((b * S + s) * G + g) // dims.SHARE
                start, end = load_range(ranges + (row * N + entry // REACH % N) * 2, limit, listed)
                seen = (column[None, :] >= start[:, None]) & (column[None, :] < end[:, None])
            # Hidden keys and values may be NaN, and p and ds with them: select by the mask instead of multiplying by
            # it.
            p = tl.where(seen, p, 0.0)
            ds = tl.where(seen, ds, 0.0)
        p, ds = p.to(do_tile.dtype), ds.to(q_tile.dtype)
        sums = add_rows_step(sums, p, ds, (q_tile, q_rest), do_tile, REST, True)
        if part_dq is not None:
            slot = part_dq + (first_slot + entry.to(tl.int64) * h + head) * dims.Dk
            store_columns(slot, dot(ds, k_tile) * scale, listed, 0, dims.Dk)
            if REST > 0:
                store_columns(slot, dot(ds, k_rest) * scale, listed, dims.BLOCK_D, dims.Dk)
    return sums


@triton.jit
def block_end(number, lists, TILES: tl.constexpr):
    """Return one past the last list of the block that list `number` belongs to."""
    if TILES == 1:
        return number + 1
    else:
        tile = number % lists.tiles
        return number - tile + tl.minimum((tile // TILES + 1) * TILES, lists.tiles)


@triton.jit
def part_number(number, lists, piece_in_unit, first_entry, TILES: tl.constexpr, BY_ENTRY: tl.constexpr):
    """Return the slot of a piece's partial sums for list `number`. Slots of a block's tiles are adjacent.

    The slot is block + piece, which is unique because each next part has a higher block or a higher piece. BY_ENTRY,
    for units with fewer entries than blocks plus pieces: the slot is the part's first entry.
    """
    block = number - lists.first_list
    if TILES > 1:
        block = block // lists.tiles * tl.cdiv(lists.tiles, TILES) + number % lists.tiles // TILES
    return (first_entry if BY_ENTRY else block + piece_in_unit) * TILES + number % lists.tiles % TILES


@triton.jit
def sum_parts_kernel(
    part_dk, part_dv, sum_dk, sum_dv, dk, dv, ends, S_kv, lists,
    dims: tl.constexpr, BLOCK_L: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    BY_ENTRY: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of each list in the order of the pieces and store dk [B*G, S_kv, Dk] and dv [B*G, S_kv, Dv].

    Grid: one program per ROWS of the BLOCK_L keys of a list. Tiles that no row selects get zeros.
    If rows are split into sections, all but the LAST accumulate in sum_dk and sum_dv [pairs, S_kv, D]; the FIRST starts
    from zero.
    """
    PIECES: tl.constexpr = BLOCK_L // ROWS
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    BLOCK_DV: tl.constexpr = dims.BLOCK_DV
    number = lists.first_list + tl.program_id(0).to(tl.int64) // PIECES
    within = tl.program_id(0) % PIECES * ROWS + tl.arange(0, ROWS)
    unit_begin = list_start(ends, lists.first_list, lists.stretches)
    begin = list_start(ends, number, lists.stretches) - unit_begin
    end = list_start(ends, block_end(number, lists, TILES), lists.stretches) - unit_begin
    column = number % lists.tiles * BLOCK_L + within
    exists = column < S_kv
    pair = number // lists.tiles % lists.pairs_all
    sums_row, row = (pair - lists.first_pair) * S_kv + column, pair * S_kv + column
    if FIRST:
        dk_acc = tl.zeros([ROWS, BLOCK_D], part_dk.dtype.element_ty)
        dv_acc = tl.zeros([ROWS, BLOCK_DV], part_dv.dtype.element_ty)
    else:
        dk_acc = load_columns(sum_dk + sums_row * dims.Dk, exists, 0, dims.Dk, BLOCK_D)
        dv_acc = load_columns(sum_dv + sums_row * dims.Dv, exists, 0, dims.Dv, BLOCK_DV)
    if begin < end:
        for i in range(begin // lists.piece, (end - 1) // lists.piece + 1):
            first_entry = tl.maximum(begin, i * lists.piece)
            part = part_number(number, lists, i, first_entry, TILES, BY_ENTRY) * BLOCK_L + within
            dk_acc += load_columns(part_dk + part * dims.Dk, exists, 0, dims.Dk, BLOCK_D)
            dv_acc += load_columns(part_dv + part * dims.Dv, exists, 0, dims.Dv, BLOCK_DV)
    if LAST:
        store_columns(dk + row * dims.Dk, dk_acc, exists, 0, dims.Dk)
        store_columns(dv + row * dims.Dv, dv_acc, exists, 0, dims.Dv)
    else:
        store_columns(sum_dk + sums_row * dims.Dk, dk_acc, exists, 0, dims.Dk)
        store_columns(sum_dv + sums_row * dims.Dv, dv_acc, exists, 0, dims.Dv)


class Gradients:
    """Output buffers: dk and dv, the partial sums of one unit, and float32 sums if several sections of rows add to
    them.

    sums: float32 sums of one pair, used in place of dk and dv when slices of its rows add to them.
    """

    def __init__(self, call: Call, plan: KeyToRows, lse: Tensor, sums: tuple[Tensor, Tensor] | None = None) -> None:
        B, S, G = call.q.shape[:3]
        _, _, S_kv, Dv = call.v.shape
        Dk = call.k.shape[3]
        blocks = -(-plan.tiles // plan.block)
        partials = most_partials(plan.section * call.selection.n * plan.reach, plan.pairs, blocks, plan.piece)
        self.by_entry = partials < plan.pieces + plan.pairs * blocks
        self.part_dk = temporary(call, lse, partials, plan.block, plan.width, Dk)
        self.part_dv = temporary(call, lse, partials, plan.block, plan.width, Dv)
        self.slice = sums is not None
        sections: tuple[Tensor | None, Tensor | None] = (None, None)
        if sums is None and plan.section < S:
            sections = temporary(call, lse, plan.pairs, S_kv, Dk), temporary(call, lse, plan.pairs, S_kv, Dv)
        self.sum_dk, self.sum_dv = sums or sections
        self.dk, self.dv = sums or (unwritten(call.k, B, G, S_kv, Dk), unwritten(call.v, B, G, S_kv, Dv))


def partial_unit(
    call: Call, heads: arguments.Heads, plan: KeyToRows, unit: Unit, lse: Tensor, do: Tensor, delta: Tensor, sums: Gradients,
    name: str, part_dq: Tensor | None = None, bits: Tensor | None = None, small: int = 0,
) -> None:  # fmt: skip
    """Launch `partial_dkdv_kernel` for one unit with the kernel config `name`.

    Args:
        part_dq: [pairs, section, n*reach, h, Dk] for the unit's shares of dq, or None.
        bits: which blocks of `small` keys each range selects (`blocks.merged`), or None.
    """
    block = call.selection.block_size
    whole = block is not None and block % plan.width == 0
    config = arguments.kernel_config(call, heads, name)
    lists = {"N": call.selection.n, "REACH": plan.reach, "TILES": plan.block, "WHOLE": whole, "BLOCK": small, "BY_ENTRY": sums.by_entry}
    tiles = {"ROWS": config.rows, "BLOCK_L": plan.width}
    partial = cached_kernel(partial_dkdv_kernel, dims=arguments.split_dims(heads), **lists, **tiles, **arguments.options(config))
    arguments.announced(call, heads, name, config, partial).launch(
        plan.pieces * plan.block,
        (call.q, call.k, call.v, call.disjoint_ranges(), bits, call.q_pos, lse, do, delta, sums.part_dk, sums.part_dv, part_dq,
         plan.entries, plan.ends, unit.piece_list),
        (arguments.strides(call), do.stride()[:4], arguments.sizes(call), unit.lists, call.scale, call.scale_log2()),
    )  # fmt: skip


def sum_unit(call: Call, heads: arguments.Heads, plan: KeyToRows, unit: Unit, sums: Gradients) -> None:
    """Launch `sum_parts_kernel`, which adds one unit's partial sums to dk and dv."""
    sizes = arguments.sizes(call)
    first, last = unit.rows.first_row == 0, unit.rows.first_row + unit.rows.rows == sizes[0]
    tiles = {"BLOCK_L": plan.width, "TILES": plan.block, "ROWS": min(16, plan.width)}
    parts = {"FIRST": first and not sums.slice, "LAST": last and not sums.slice, "BY_ENTRY": sums.by_entry}
    cached_kernel(sum_parts_kernel, dims=arguments.dims(heads), **tiles, **parts, num_warps=4).launch(
        (unit.lists.end_list - unit.lists.first_list) * (plan.width // tiles["ROWS"]),
        (sums.part_dk, sums.part_dv, sums.sum_dk, sums.sum_dv, sums.dk, sums.dv, plan.ends),
        (sizes[1], unit.lists),
    )


def key_value_gradients(
    call: Call, heads: arguments.Heads, lse: Tensor, do: Tensor, delta: Tensor, name: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dk [B,G,S_kv,Dk] and dv [B,G,S_kv,Dv] from lse and delta [B,S,G,h], with the kernel config `name`.

    Partial sums stay within runtime.workspace_bytes if those of one (batch entry, group) pair fit.
    """
    width = tile_width(call, arguments.kernel_config(call, heads, name))
    cut = slices_of(call, width)
    if cut is not None:
        return _by_slices(call, heads, lse, do, delta, name, width, cut)
    grads = _add_rows(call, heads, lse, do, delta, name, width)
    return grads.dk, grads.dv


def _add_rows(
    call: Call, heads: arguments.Heads, lse: Tensor, do: Tensor, delta: Tensor, name: str, width: int,
    sums: tuple[Tensor, Tensor] | None = None, budget: int | None = None,
) -> Gradients:  # fmt: skip
    """Compute dk and dv of a call, or of a slice that adds to `sums`.

    budget: bytes of the partial sums; by default what the plan leaves of the workspace.
    """
    B, S, G = call.q.shape[:3]
    small = call.selection.block_size or 0
    call, bits = merged(call, width)
    block = call.tiles_of_block(width)
    plan = plan_within(call, width, S, B * G, workspace_beside_plan(call, width, block) if budget is None else budget, block)
    grads = Gradients(call, plan, lse, sums)
    for unit in units(call, plan):
        partial_unit(call, heads, plan, unit, lse, do, delta, grads, name, bits=bits, small=0 if bits is None else small)
        sum_unit(call, heads, plan, unit, grads)
    return grads


def _by_slices(
    call: Call, heads: arguments.Heads, lse: Tensor, do: Tensor, delta: Tensor, name: str, width: int, cut: Slices
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dk and dv if the plan of all rows does not fit the workspace: process pairs one by one, each in slices of
    rows."""
    B, _, G = call.q.shape[:3]
    _, _, S_kv, Dv = call.v.shape
    sums = temporary(call, lse, 1, S_kv, heads.Dk), temporary(call, lse, 1, S_kv, Dv)
    dk, dv = unwritten(call.k, B, G, S_kv, heads.Dk), unwritten(call.v, B, G, S_kv, Dv)
    for b, g in itertools.product(range(B), range(G)):
        for x in sums:
            x.zero_()
        for part, at in slices(call, slice(b, b + 1), slice(g, g + 1), cut.rows):
            _add_rows(
                part, heads._replace(share=1), lse[at].contiguous(), do[at], delta[at].contiguous(), name, width, sums, cut.partial_bytes
            )
        dk[b, g], dv[b, g] = sums[0][0], sums[1][0]
    return dk, dv
