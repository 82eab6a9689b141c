"""KV caches for tests: contiguous or in pages, their keys as the baseline wants them, and a call over them, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

import nsa_sel
from nsa_sel.selection import Selection
from nsa_sel.serving import selection_attention_with_kvcache
from tests.helpers.cases import assert_forward
from tests.helpers.graphs import captured, replayed

LENGTHS = (0, 1, 9, 150)  # shorter than a block among them
PAGES = (16, 32, 64, 128, 256)


class Cache(NamedTuple):
    """q [B,S_q,G,h,Dk], k_cache, v_cache [B,S_max,G,D] or [pages,page_size,G,D], lengths, table, a selection in logical positions."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    selection: Selection
    cache_seqlens: Tensor
    block_table: Tensor | None


def make_cache(
    lengths: tuple[int, ...] = LENGTHS,
    page_size: int | None = 16,
    *,
    S_q: int = 1,
    G: int = 2,
    h: int = 2,
    Dk: int = 16,
    Dv: int = 8,
    n: int = 3,
    block: int | None = 16,
    room: int = 192,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Cache:
    """Sequences with random pages of one pool. NaN wherever no sequence has a key; -1 in the table after its last page.

    Blocks (or, with block None, ranges of 5 to 40 keys anywhere) are any of the first `room` keys, future ones among them.
    """
    generator = torch.Generator().manual_seed(seed)
    B = len(lengths)
    q = torch.randn(B, S_q, G, h, Dk, generator=generator)
    whole = [torch.randn(B, room, G, D, generator=generator) for D in (Dk, Dv)]
    for b, length in enumerate(lengths):
        for x in whole:
            x[b, length:] = math.nan
    if block is None:
        length = torch.randint(5, 41, (B, S_q, G, n), generator=generator)
        start = torch.randint(0, room // n - 40, (B, S_q, G, n), generator=generator) + torch.arange(n) * (room // n)
        selection = Selection(torch.stack((start, start + length), -1), None, 40 * n)
    else:
        order = torch.rand(B, S_q, G, room // block, generator=generator).argsort(-1)[..., :n]
        order[..., 0] = torch.where((order == 0).any(-1), order[..., 0], 0)  # every sequence has a key of the first block
        selection = Selection.from_blocks(order.int(), block)
    table, caches = None, whole
    if page_size is not None:
        each = -(-room // page_size)
        used = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(used) + 3, generator=generator).int()
        table = torch.full((B, each), -1, dtype=torch.int32)
        caches = [torch.full((len(order), page_size, *x.shape[2:]), math.nan) for x in whole]
        taken = 0
        for b in range(B):
            for i in range(used[b]):
                table[b, i] = order[taken]
                for cache, x in zip(caches, whole, strict=True):
                    part = x[b, i * page_size : (i + 1) * page_size]
                    cache[order[taken], : len(part)] = part
                taken += 1
    tensors = [x.to(dtype).to(device) for x in (q, *caches)]
    return Cache(
        *tensors, selection.to(device), torch.tensor(lengths, dtype=torch.int32, device=device), None if table is None else table.to(device)
    )


def gathered(cache: Cache) -> tuple[Tensor, Tensor]:
    """k, v [B,G,S_kv,D] of every sequence, 0 where it has no key: what the baseline multiplies by 0."""
    k, v = cache.k_cache, cache.v_cache
    if cache.block_table is not None:
        k, v = (x[cache.block_table.long().clamp(min=0)].flatten(1, 2) for x in (k, v))
    there = torch.arange(k.shape[1], device=k.device) < cache.cache_seqlens.unsqueeze(1)
    k, v = (torch.where(there[:, :, None, None], x, 0).transpose(1, 2) for x in (k, v))
    return k, v


def positions(cache: Cache) -> Tensor:
    S_q = cache.q.shape[1]
    return cache.cache_seqlens.long().unsqueeze(1) + torch.arange(-S_q, 0, device=cache.q.device)


def check(cache: Cache, backend: str | None) -> tuple[Tensor, Tensor]:
    """o and lse, within twice the baseline's error of the oracle; the recorded decision names the backend and the pages."""
    with torch.no_grad():
        o, lse = selection_attention_with_kvcache(*cache, return_lse=True, backend=backend)
    decision = nsa_sel.decisions()[-1]
    assert backend is None or decision.forward == backend
    assert decision.request.page_size == (None if cache.block_table is None else cache.k_cache.shape[1])
    assert decision.request.S == cache.q.shape[1]
    assert_forward((o, lse), cache.q, *gathered(cache), cache.selection.ranges, q_pos=positions(cache))
    nothing = (positions(cache) < 0)[:, :, None, None]
    assert bool((o.masked_select(nothing.unsqueeze(-1)) == 0).all())
    assert bool((lse.masked_select(nothing) == -math.inf).all())
    return o, lse


def replayed_with(
    first: Cache, other: Cache, backend: str | None, scales: Mapping[str, Tensor] = {}, other_scales: Mapping[str, Tensor] = {}
) -> list[Tensor]:  # fmt: skip
    """o and lse, which held NaN, of a graph that was captured over `first`, replayed with what `other` holds in its place."""

    def call() -> tuple[Tensor, Tensor]:
        o, lse = selection_attention_with_kvcache(*first, **scales, return_lse=True, backend=backend)
        return o, lse

    with torch.no_grad():
        graph, outputs = captured(call)
    for name in ("q", "k_cache", "v_cache", "cache_seqlens", "block_table"):
        if getattr(first, name) is not None:
            getattr(first, name).copy_(getattr(other, name))
    first.selection.ranges.copy_(other.selection.ranges)
    for name, scale in scales.items():
        scale.copy_(other_scales[name])
    return replayed(graph, outputs)
