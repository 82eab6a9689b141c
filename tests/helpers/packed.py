"""Packed batches over caches for tests: rows of several requests end to end, checked against float64 over every request's keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel import Selection, decisions, selection_attention_with_kvcache
from nsa_sel.quantize import STORED
from nsa_sel.testing import dense_attention
from tests.helpers.caches import SPARE, Cache, Pool, as_stored, shuffled_pages
from tests.helpers.cases import assert_within_twice_baseline


def make_pool(sizes: tuple[int, ...], each: str | None, dtype: torch.dtype, generator: torch.Generator) -> Pool:
    """Return random numbers [pages,page,G,D]; each: what has a scale of its own in e4m3, "" for scales of 1, None for `dtype`."""
    x = torch.randn(sizes, generator=generator, device=generator.device)
    return Pool(x.to(dtype), x.to(dtype).double()) if each is None else as_stored(x, each or None, generator)


def poisoned(pool: Pool, unused: Tensor) -> Pool:
    """Return numbers that are NaN where unused [pages,page], and as the scales of pages without a key."""
    stored, scale = pool.stored.clone(), pool.scale
    if stored.dtype == STORED:
        stored.view(torch.uint8)[unused] = 0x7F
    else:
        stored[unused] = torch.nan
    if scale is not None and scale.dim() == 2:
        scale = scale.masked_fill(unused.all(1, keepdim=True), torch.nan)
    return pool._replace(stored=stored, scale=scale)


class Step(NamedTuple):
    """The arguments of a call over rows of R requests, and the same keys and values in float64."""

    cache: Cache  # q [T,G,h,Dk], pools or caches of R requests, a selection over [T,G]
    cu: Tensor  # [R+1]
    scales: dict[str, Tensor]
    exact: tuple[Tensor, Tensor]  # [pages,page,G,D], or [R,room,G,D]
    unused: Tensor  # [pages,page]: no request's keys

    def called(self, backend: str | None, **options: Any) -> tuple[Tensor, Tensor]:
        """Return o and lse, written to tensors that held NaN."""
        q, v = self.cache.q, self.cache.v_cache
        o = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:3], torch.nan, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        options |= {"cu_seqlens_q": self.cu, "out": o, "lse_out": lse, "return_lse": True, "backend": backend}
        before = o._version, lse._version
        found = selection_attention_with_kvcache(*self.cache, **self.scales, **options)
        assert (o._version > before[0], lse._version > before[1]) == (True, True)
        assert found[0] is o
        assert found[1] is lse
        return o, lse

    def requests(self, *pools: Tensor) -> Iterator[tuple[slice, int, list[Tensor]]]:
        """Yield the rows of each request that has some, its length, and its keys [length,G,D] in each pool."""
        table = self.cache.block_table
        for r, (bounds, length) in enumerate(zip(itertools.pairwise(self.cu.tolist()), self.cache.cache_seqlens.tolist(), strict=True)):
            pages = slice(r, r + 1) if table is None else table[r, : -(-length // pools[0].shape[1])].long()
            if bounds[0] < bounds[1]:
                yield slice(*bounds), length, [x[pages].flatten(0, 1)[:length] for x in pools]

    def check(self, backend: str | None, **options: Any) -> tuple[Tensor, Tensor]:
        """Check o and lse against float64, within twice the error of a plain computation with the same numbers."""
        with torch.no_grad():
            o, lse = self.called(backend, **options)
        assert backend in (None, decisions()[-1].forward)
        q, total, found, largest = self.cache.q, int(self.cu[-1]), [], 0.0
        assert bool((lse[total:] == -torch.inf).all())
        assert bool((o[lse == -torch.inf] == 0).all())
        ranges = self.cache.selection.ranges.reshape(len(q), -1, *self.cache.selection.ranges.shape[3:])
        plain = torch.promote_types(q.dtype, torch.float32) if self.cache.k_cache.dtype == STORED else q.dtype
        for rows, length, keys in self.requests(*self.exact):
            position = torch.arange(length - rows.stop + rows.start, length, device=q.device).unsqueeze(0)
            k, v = (x.new_zeros(1, x.shape[1], 1, x.shape[2]) if length == 0 else x.transpose(0, 1).unsqueeze(0) for x in keys)
            largest = max(largest, float(torch.einsum("sghd,gkd->sghk", q[rows].double().abs(), k[0].abs()).max()))
            for dtype in (torch.float64, plain):
                call = q[rows].unsqueeze(0).to(dtype), k.to(dtype), v.to(dtype)
                found += dense_attention(*call, ranges[rows].unsqueeze(0), None, position)
        if found:
            # A logit is off by some roundings of its terms, and o by as much relative to the values.
            off = 4 * (1 + q.shape[-1] ** -0.5 * largest)
            exact_o, exact_lse, plain_o, plain_lse = (torch.cat(found[i::4], 1).squeeze(0) for i in range(4))
            assert_within_twice_baseline(o[:total], exact_o, plain_o.to(o.dtype), "o", off * float(self.exact[1].abs().max()))
            assert_within_twice_baseline(lse[:total], exact_lse, plain_lse, "lse", off)
        return o, lse


def make_step(
    new: Sequence[int], lengths: Sequence[int], page_size: int | None, *, G: int, h: int, Dk: int, Dv: int, n: int, block: int | None,
    room: int = 192, spare: int = 0, each: str | None = None, one_pool: bool = False, one: bool = False, seed: int = 0,
    dtype: torch.dtype = torch.float32, device: str = "cpu", index_dtype: torch.dtype = torch.int32, table: Tensor | None = None,
    pools: tuple[Pool, Pool] | None = None,
) -> Step:  # fmt: skip
    """Return `new` rows of requests over caches of `lengths` keys, then `spare` rows of padding with NaN as q.

    The selection names blocks in any order, also twice, of other rows' futures, behind the cache, and none; or has ranges.

    Args:
        each: as of `make_pool`.
        one_pool: keys and values of a page lie side by side, heads before keys.
        one: one selection for all groups.
        table: [R, pages of a request], by default shuffled pages, -1 after a request's last.
        pools: of at least so many pages, by default random ones.
    """
    made, page, T = torch.Generator(device).manual_seed(seed), page_size or room, sum(new) + spare
    used = [-(-length // page) for length in lengths]
    if page_size is None:
        table = torch.arange(len(new), dtype=torch.int32).unsqueeze(1)  # a request's cache is its page
    elif table is None:
        table = shuffled_pages(used, -(-room // page), torch.Generator().manual_seed(seed))
    pages = len(new) if page_size is None else sum(used) + SPARE
    keys, values = pools or (make_pool((pages, page, G, D), each, dtype, made) for D in (Dk, Dv))
    unused = torch.ones(keys.stored.shape[:2], dtype=torch.bool)
    for row, length in zip(table.tolist(), lengths, strict=True):
        for first, number in zip(range(0, length, page), row, strict=False):
            unused[number, : length - first] = False
    unused = unused.to(device)
    spoilt = [poisoned(pool, unused) for pool in (keys, values)]
    k_cache, v_cache = (pool.stored for pool in spoilt)
    if one_pool:
        pool = torch.cat([x.view(torch.uint8) if x.dtype == STORED else x for x in (k_cache, v_cache)], -1).transpose(1, 2).contiguous()
        k_cache, v_cache = (x.transpose(1, 2) for x in pool.view(k_cache.dtype).split((Dk, Dv), -1))
    q = torch.randn(T, G, h, Dk, generator=made, device=device).to(dtype)
    q[sum(new) :] = torch.nan
    rows = (T, 1 if one else G, n)
    if block is None:
        start, width = (torch.randint(first, end, rows, generator=made, device=device) for first, end in ((-3, room), (0, 40)))
        selection = Selection.from_ranges(torch.stack((start, start + width), -1).to(index_dtype))
    else:
        blocks = torch.randint(-1, room // block + 2, rows, generator=made, device=device)
        blocks[..., 0] *= torch.rand(rows[:2], generator=made, device=device) < 0.5
        selection = Selection.from_blocks(blocks.to(index_dtype), block)
    cu, sizes = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, *itertools.accumulate(new)], [*lengths]))
    cache = Cache(q, k_cache, v_cache, selection, sizes, None if page_size is None else table.to(device))
    scales = {f"{name}_scale": pool.scale for name, pool in zip("kv", spoilt, strict=True) if pool.scale is not None}
    return Step(cache, cu, scales, (keys.exact, values.exact), unused)
