"""A call over a paged cache as a plain call.

All pages of a pool become one sequence with the queries of all sequences as its rows. Ranges of positions in each sequence become
ranges of the pool, cut by the causal clamp and at the ends of pages. A block within one page stays one range.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nsa_sel.core.call import Call
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection


def over_the_pool(call: Call, block_table: Tensor) -> Call:
    """The call of one sequence, q [1,B*S,G,h,Dk] over k, v [1,G,keys of all pages,D]; only ranges are copied."""
    (k, page_keys), (v, v_page_keys) = _pool("k_cache", call.k), _pool("v_cache", call.v)
    if page_keys != v_page_keys:
        raise _odd_pages("v_cache", call.v, f"{page_keys} keys apart, as those of k_cache")
    ranges = pool_ranges(call, block_table, page_keys).flatten(0, 1).unsqueeze(0)
    rows = ranges.shape[1]
    last = torch.full((1, 1), k.shape[2] - 1, device=k.device).expand(1, rows)  # the ranges are clamped already
    selection = Selection(ranges, None, call.selection.length_bound(call.S_kv), disjoint=True)
    scales = call.scales
    if scales is not None and scales.page_keys:
        scales = scales._replace(page_keys=page_keys)
    q = call.q.flatten(0, 1).unsqueeze(0)
    return replace(call, q=q, k=k, v=v, selection=selection, q_pos=last, lengths=None, block_table=None, scales=scales)


def _pool(name: str, x: Tensor) -> tuple[Tensor, int]:
    """Pages x [pages,G,page_size,D] as one sequence [1,G,keys,D], and the distance of pages in keys.

    Other data, such as the pages of V, may be between those of K; no range selects it.
    """
    pages, G, page_size, D = x.shape
    page, group, key, _ = x.stride()
    if pages == 1:
        return x, page_size
    if page % key:
        raise _odd_pages(name, x, "a whole number of keys apart")
    page_keys = page // key
    return x.as_strided((1, G, (pages - 1) * page_keys + page_size, D), (0, group, key, 1)), page_keys


def _odd_pages(name: str, x: Tensor, allowed: str) -> ArgumentError:
    value = f"pages {x.stride(0)} elements and keys {x.stride(2)} elements apart"
    return ArgumentError(name, value, f"pages {allowed}, for a backend that reads no block table", "use triton-group, or copy the cache")


def pool_ranges(call: Call, block_table: Tensor, page_keys: int) -> Tensor:
    """Ranges [B,S,G,n * pieces,2] int64 of the pool, whose pages begin `page_keys` keys apart: the call's ranges after the causal clamp,
    cut at the ends of pages. Reads only the entries of the block table that the ranges reach."""
    page_size, block = call.k.shape[2], call.selection.block_size
    start, end = (x.unsqueeze(-1) for x in call.clamped_ranges())
    if block is not None and page_size % block == 0:
        pieces = 1
    else:  # the most pages that a range can overlap
        pieces = min(block_table.shape[1], (min(block or call.S_kv, call.selection.length_bound(call.S_kv)) - 2) // page_size + 2)
    page = start // page_size + torch.arange(pieces, device=start.device)  # [B,S,G,n,pieces], in the sequence
    low, high = torch.maximum(start, page * page_size), torch.minimum(end, (page + 1) * page_size)
    filled = high > low
    sequence = torch.arange(len(block_table), device=start.device).view(-1, 1, 1, 1, 1)
    pool_page = block_table[sequence, torch.where(filled, page, 0)].long()
    low, high = (torch.where(filled, x + pool_page * page_keys - page * page_size, 0) for x in (low, high))
    return torch.stack((low, high), -1).flatten(3, 4)
