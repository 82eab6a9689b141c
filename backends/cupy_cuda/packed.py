"""Launch Hopper's kernels for a packed batch over pages: the rows of requests with many visit blocks as in cuda-block, and
those of requests with few (decoding, drafts), which share little, are taken one by one.

The former requests are joined to one sequence: its block table has their pages, and their rows' selections and positions
are moved there (_triton/packed_rows.py). Of e4m3 caches, the pages that rows named are copied as 16-bit numbers, which are
exact; their scales multiply logits and weights. All sizes are static bounds, so that the host never waits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from nsa_sel.backends._triton.large_blocks import is_large
from nsa_sel.backends._triton.packed_rows import join_rows, widen_pages
from nsa_sel.backends.cupy_cuda import cuda_block, launch, sm90, whole_blocks
from nsa_sel.backends.launcher.buffers import temporary, unwritten
from nsa_sel.core.call import Call
from nsa_sel.core.packed import joined_keys
from nsa_sel.core.request import FEW_TOKENS
from nsa_sel.quantize import Scales
from nsa_sel.selection import Selection

LEAST_ROWS = 256  # with fewer, lists of rows take longer than they save


def supports(call: Call) -> bool:
    """Return whether blocks are visited: many rows of 16 bits, some of one request, over blocks and pages of whole steps;
    of e4m3 caches, rows in bfloat16, whose partial results hold any scale."""
    T, block, page = len(call.q), call.selection.block_size, call.k.shape[2]
    if call.table_rows is None or call.most_rows <= FEW_TOKENS or T < LEAST_ROWS or block is None:
        return False
    if call.scales is not None and (call.q.dtype != torch.bfloat16 or 2 * _widened_bytes(call) > call.settings.workspace_bytes):
        return False
    fits = block % sm90.KEYS == 0 == page % sm90.KEYS and call.selection.n * (block // sm90.KEYS) <= cuda_block.MASK_BITS
    if not fits or is_large(call) or not whole_blocks.supports(call) or not cuda_block.takes(call):
        return False
    return _joined_keys(call) > 0 and sm90.mappable(call.q) and whole_blocks.alone(call)


def _joined_keys(call: Call) -> int:
    """Return the keys of the joined sequence at most."""
    assert call.block_table is not None, "packed batches have one"
    unit = math.lcm(call.k.shape[2], call.selection.block_size or 1)
    return joined_keys(len(call.q), len(call.block_table), call.S_kv, unit, call.scales is not None)


def _widened_bytes(call: Call) -> int:
    """Return the bytes of a joined sequence's keys and values in 16 bits."""
    return 2 * _joined_keys(call) * call.k.shape[1] * (call.k.shape[3] + call.v.shape[3])


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return o [T,1,G,h,Dv] and lse [T,1,G,h]; the scale is positive."""
    o, lse = (x.transpose(0, 1) for x in cuda_block.forward(_joined(call)))
    return whole_blocks.forward(replace(call, out=(o, lse)), listed_rows=True)


def _joined(call: Call) -> Call:
    """Return the call of the joined sequence, q [1,T,G,h,Dk]; rows of other requests select nothing."""
    q, (T, _, groups, n), page = call.q, call.selection.listed.shape[:4], call.k.shape[2]
    block, table, rows = call.selection.block_size, call.block_table, call.lengths
    assert block is not None, "supports"
    assert table is not None, "packed batches have one"
    assert rows is not None, "packed batches have them"
    ranges = unwritten(q, 1, T, groups, n, 2, dtype=torch.int32)
    positions, pages = (unwritten(q, 1, count, dtype=torch.int32) for count in (T, _joined_keys(call) // page))
    indices = call.selection.indices
    listed = (call.selection.ranges if indices is None else indices).contiguous()
    if call.scales is not None:
        launch.clear(pages.data_ptr(), pages.nbytes, q.get_device())
    join_rows(listed, indices is not None, rows, table, (ranges, positions, pages), block, page, int(call.scales is not None))
    o, lse = (None if x is None else x.transpose(0, 1) for x in call.out)
    return replace(
        call, q=q.transpose(0, 1), selection=Selection(ranges, block, disjoint=True), q_pos=positions, lengths=None, block_table=pages,
        table_rows=None, most_rows=1, out=(o, lse), **(_widened(call, pages) if call.scales is not None else {}),
    )  # fmt: skip


def _widened(call: Call, pages: Tensor) -> dict[str, Any]:
    """Return what a call over e4m3 pages has after the named ones were copied: 16-bit keys and values, and factors."""
    (_, G, page, Dk), Dv, count = call.k.shape, call.v.shape[3], pages.numel()
    k, v = (temporary(call, call.q, count, G, page, D) for D in (Dk, Dv))
    factors = temporary(call, call.q, count, G, 2, dtype=torch.float32)
    assert call.scales is not None, "of e4m3"
    widen_pages(pages.view(-1), call.k, call.v, call.scales, (k, v, factors))
    left = min(call.settings.workspace_bytes, cuda_block.REPLAYED_BYTES) - _widened_bytes(call)
    settings = msgspec.structs.replace(call.settings, workspace_bytes=left)
    return {"k": k, "v": v, "scales": Scales(factors, None, page, "page"), "settings": settings}
