"""loss-triton: the indexer's KL loss by KV tiles, with its gradients in the same pass.

    _triton/index_loss.py          kernels over row lists of KV tiles; the sort of the selection (_triton/key_to_rows.py)
                                   is that of dK and dV of attention
    _triton/index_loss_dense.py    without a selection

Shares of loss and of diq per (row, tile) live in temporaries within runtime.workspace_bytes: rows and groups that do not
fit at once are separate units, and rows whose lists do not fit are separate slices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_sel.backends._slices import LEAST_ROWS, slices
from nsa_sel.backends._triton import arguments
from nsa_sel.backends._triton.blocks import merged
from nsa_sel.backends._triton.index_loss import (
    KEYS,
    REDUCED,
    Results,
    Work,
    items_of,
    join_lse_kernel,
    loss_kernel,
    lse_kernel,
    sum_keys_kernel,
    sum_rows_kernel,
)
from nsa_sel.backends._triton.index_loss_dense import add_dense
from nsa_sel.backends._triton.kernel import cached_kernel
from nsa_sel.backends._triton.key_to_rows import KeyToRows, plan_bytes, room
from nsa_sel.backends._triton.tiles import tile_size
from nsa_sel.backends._triton.units import Unit, most_partials, plan_within, tile_width, units, workspace_beside_plan
from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.backends.triton_block import even_section
from nsa_sel.core.call import Call, IndexLossCall
from nsa_sel.settings.schema import KernelConfig

HOPPER = KernelConfig(block_l=128, num_warps=8, num_stages=2, rows=64), 4  # and `Work.unrolled`
HOPPER_NARROW = {  # head dims up to NARROW, by whether all visible keys count. 8 warps take 1.4 and 2.5 times as long there
    True: (KernelConfig(block_l=128, num_warps=4, num_stages=2, rows=64), 2),
    False: (KernelConfig(block_l=64, num_warps=4, num_stages=3, rows=128), 1),
}
NARROW = 64
LARGE = 200 << 10  # bytes of shared memory that a CTA of `HOPPER` takes
CONFIGS = {  # they fit 99 KiB of shared memory
    "": KernelConfig(block_l=64, num_warps=4, num_stages=2, rows=64),
    "wide": KernelConfig(block_l=32, num_warps=4, num_stages=1, rows=32),
    "float32": KernelConfig(block_l=16, num_warps=4, num_stages=1, rows=16),
}


def forward(call: IndexLossCall, with_gradients: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return loss [B,S,G] and, with gradients of its sum, dq [B,S,G,Di] and dk in lse's dtype, shaped as index_k."""
    return _run(call, None, with_gradients)


def backward(call: IndexLossCall, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return dq and dk of sum(weights * loss); weights [B,S,G] in lse's dtype."""
    _, dq, dk = _run(call, weights, True)
    return dq, dk  # type: ignore[return-value]


def config_of(main: Call, index: Call, dense: bool) -> tuple[KernelConfig, int]:
    """Return the config for the heads of both on the device of the call, and `Work.unrolled`. dense: without a selection."""
    if main.q.element_size() > 2:
        return CONFIGS["float32"], 0
    if any(arguments.config_suffix(arguments.heads(call)) for call in (main, index)):
        return CONFIGS["wide"], 0
    if main.device.shared_memory < LARGE:
        return CONFIGS[""], 0
    narrow = max(main.q.shape[4], index.q.shape[4]) <= NARROW
    return HOPPER_NARROW[dense] if narrow else HOPPER


def _run(call: IndexLossCall, weights: Tensor | None, with_gradients: bool) -> Results:
    loss = torch.zeros_like(call.lse[..., 0])
    results = Results(loss, None, None)
    if with_gradients:
        dk = torch.zeros(call.index_k.shape, dtype=loss.dtype, device=loss.device)
        results = Results(loss, unwritten(call.index_q, *call.index_q.shape), dk)
    main, index = call.main(), call.index()
    work = Work(main, index, call.lse, weights, *config_of(main, index, call.selection is None))
    if call.selection is None:
        add_dense(work, call.bounds, results)
        return results
    rows = _rows_at_once(index, tile_width(index, work.config))
    if rows is None:
        _add_rows(work, results)
        return results
    each = (slices(x, slice(None), slice(None), rows) for x in (main, index))
    for (of_main, at), (of_index, _) in zip(*each, strict=True):
        part = Results(loss[at].contiguous(), None if results.dq is None else results.dq[at].contiguous(), results.dk)
        own_weights = None if weights is None else weights[at].contiguous()
        _add_rows(work._replace(main=of_main, indexer=of_index, lse=call.lse[at].contiguous(), weights=own_weights), part)
        loss[at] = part.loss
        if results.dq is not None and part.dq is not None:
            results.dq[at] = part.dq
    return results


def _rows_at_once(index: Call, width: int) -> int | None:
    """Return the rows of a slice whose lists take a quarter of the workspace; None if those of all rows take no more than
    half."""
    B, S, G = index.q.shape[:3]
    entries, tiles = index.selection.n * index.reach(width), -(-index.k.shape[2] // width)
    if plan_bytes(S, B * G, entries, tiles) <= room(index) // 2:
        return None
    return max(1, room(index) // 4 // (16 * B * G * entries) // LEAST_ROWS) * LEAST_ROWS


def _plan(index: Call, width: int, with_gradients: bool) -> KeyToRows:
    """Return the plan of units whose shares of loss and dq fit the workspace next to the plan, and a quarter of it for
    partial sums of dk."""
    B, S, G, _, Di = index.q.shape
    row_bytes = index.selection.n * index.reach(width) * (Di * index.q.element_size() * with_gradients + 8)
    workspace = workspace_beside_plan(index, width)
    parts = workspace // 4 if with_gradients else 0
    section, pairs = S, min(B * G, (workspace - parts) // row_bytes // S)
    if not pairs:
        section, pairs = even_section(S, max(1, (workspace - parts) // row_bytes)), 1
    return plan_within(index, width, section, pairs, parts or 1 << 62)


def _add_rows(work: Work, results: Results) -> None:
    """Compute loss and dq of all rows over their selected keys, and add to dk."""
    main, lse, config, width = work.main, work.lse, work.config, tile_width(work.indexer, work.config)
    index, bits = merged(work.indexer, width)
    plan, n, block = _plan(index, width, results.dq is not None), index.selection.n, index.selection.block_size
    whole, small = block is not None and block % width == 0, work.indexer.selection.block_size if bits is not None else 0
    lists = {"N": n, "REACH": plan.reach, "WHOLE": whole, "BLOCK": small, "BLOCK_L": width}
    shares, index_lse = (plan.pairs, plan.section, n * plan.reach), unwritten(lse, *lse.shape[:3])
    part_lse, part_loss, part_dq, part_dk = unwritten(lse, *shares), unwritten(lse, *shares), None, None
    partials = most_partials(plan.section * n * plan.reach, plan.pairs, plan.tiles, plan.piece)
    by_entry = partials < plan.pieces + plan.pairs * plan.tiles
    if results.dq is not None:
        part_dq, part_dk = unwritten(index.q, *shares, index.k.shape[3]), unwritten(lse, partials, width, index.k.shape[3])
    lse_of = cached_kernel(lse_kernel, dims=work.index_dims(), **lists, ROWS=config.rows, num_warps=4, num_stages=2)
    strict = bits is not None or (not whole and n > 1)
    loss_of = cached_kernel(loss_kernel, **work.steps(), **lists, BY_ENTRY=by_entry, STRICT=strict)
    of_rows = index.disjoint_ranges(), bits, index.q_pos
    (strides, index_strides, sizes), factors = work.numbers()
    for unit in units(index, plan):
        of_lists = plan.entries, plan.ends, unit.piece_list
        numbers = index_strides, sizes, unit.lists, factors[1]
        lse_of.launch(plan.pieces, (index.q, index.k, *of_rows, part_lse, *of_lists), numbers)
        _join(index, plan, unit, part_lse, index_lse)
        loss_of.launch(
            plan.pieces,
            (main.q, main.k, lse, index.q, index.k, *of_rows, index_lse, work.weights, part_loss, part_dq, part_dk, *of_lists),
            (strides, index_strides, sizes, unit.lists, *factors),
        )
        _sum_unit(index, plan, unit, part_loss, part_dq, part_dk, by_entry, results)


def _join(index: Call, plan: KeyToRows, unit: Unit, part_lse: Tensor, index_lse: Tensor) -> None:
    """Launch `join_lse_kernel` for one unit."""
    n = index.selection.n
    lists = {"N": n, "REACH": plan.reach, "WIDTH": plan.width, "R": REDUCED, "CHUNK": min(32, tile_size(n * plan.reach, 1))}
    join = cached_kernel(join_lse_kernel, dims=arguments.dims(arguments.heads(index)), **lists, num_warps=1)
    join.launch(
        -(-(unit.rows.pairs * unit.rows.rows) // REDUCED),
        (part_lse, index.disjoint_ranges(), index.q_pos, index_lse),
        (arguments.position_strides(index), arguments.sizes(index), unit.rows),
    )


def _sum_unit(
    index: Call, plan: KeyToRows, unit: Unit, part_loss: Tensor, part_dq: Tensor | None, part_dk: Tensor | None, by_entry: bool,
    results: Results,
) -> None:  # fmt: skip
    """Launch the kernels that add one unit's shares."""
    sizes, dims = arguments.sizes(index), arguments.dims(arguments.heads(index))
    lists = {"N": index.selection.n, "REACH": plan.reach, "WIDTH": plan.width, "R": REDUCED}
    cached_kernel(sum_rows_kernel, dims=dims, **lists, num_warps=1).launch(
        -(-(unit.rows.pairs * unit.rows.rows) // REDUCED),
        (part_loss, part_dq, index.disjoint_ranges(), index.q_pos, results.loss, results.dq),
        (arguments.position_strides(index), sizes, unit.rows),
    )
    if results.dk is None:
        return
    first, items, shared = items_of(unit.rows.first_pair, unit.rows.pairs, sizes[2], results.dk)
    keys = min(KEYS, plan.width)
    summed = {"BLOCK_L": plan.width, "ROWS": keys, "SHARED": shared, "BY_ENTRY": by_entry}
    cached_kernel(sum_keys_kernel, dims=dims, **summed, num_warps=4).launch(
        items * plan.tiles * (plan.width // keys),
        (part_dk, results.dk, plan.ends),
        (results.dk.stride()[:3], sizes[1], sizes[2], unit.lists, first),
    )
