"""Packed batches over caches for tests: rows of several requests end to end, checked against the oracle row by row."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel import Selection, decisions, selection_attention_with_kvcache
from nsa_sel.oracle import oracle_forward
from nsa_sel.testing import dense_attention
from tests.helpers.caches import Cache, gathered, make_cache, make_quantized, positions
from tests.helpers.cases import assert_within_twice_baseline


class Step(NamedTuple):
    """The arguments of a call over rows of R requests, and the same cache in numbers that are exact."""

    cache: Cache  # q [T,G,h,Dk], pools or caches of R requests, a selection over [T,1,G]
    cu: Tensor  # [R+1]
    scales: dict[str, Tensor]
    exact: tuple[Tensor, Tensor]

    def called(self, backend: str | None, **options: Any) -> tuple[Tensor, Tensor]:
        """Return o and lse, written to tensors that held NaN."""
        q, v = self.cache.q, self.cache.v_cache
        wide = torch.promote_types(q.dtype, torch.float32)
        given = [
            torch.full((*q.shape[:3], *rest), torch.nan, dtype=dtype, device=q.device)
            for rest, dtype in (((v.shape[3],), q.dtype), ((), wide))
        ]
        found = selection_attention_with_kvcache(
            *self.cache, **self.scales, cu_seqlens_q=self.cu, out=given[0], lse_out=given[1], return_lse=True, backend=backend, **options
        )  # fmt: skip
        assert all(x is y for x, y in zip(found, given, strict=True))
        return given[0], given[1]

    def rows(self) -> Cache:
        """Return the cache as sequences of one token: its rows."""
        cache, cu = self.cache, self.cu.tolist()
        spare = len(cache.q) - cu[-1]
        request = [r for r, (first, end) in enumerate(itertools.pairwise(cu)) for _ in range(first, end)] + [0] * spare
        keys = [
            n - (end - first) + i + 1
            for n, (first, end) in zip(cache.cache_seqlens.tolist(), itertools.pairwise(cu), strict=True)
            for i in range(end - first)
        ]
        keys = torch.tensor([max(0, n) for n in keys] + [0] * spare, device=cache.q.device)
        k, v = self.exact if cache.block_table is not None else (x[request] for x in self.exact)
        table = None if cache.block_table is None else cache.block_table[request]
        return Cache(cache.q.unsqueeze(1), k, v, cache.selection, keys, table)

    def check(self, backend: str | None, **options: Any) -> tuple[Tensor, Tensor]:
        """Check o and lse against the oracle, within twice the error of a plain computation with the same numbers."""
        with torch.no_grad():
            o, lse = self.called(backend, **options)
        decision = decisions()[-1]
        assert backend is None or decision.forward == backend
        rows = self.rows()
        given, (k, v) = (rows.selection.ranges, None, positions(rows)), gathered(rows)
        wide = torch.promote_types(rows.q.dtype, torch.float32) if self.scales or k.dtype != rows.q.dtype else rows.q.dtype
        exact, baseline = oracle_forward(rows.q, k, v, *given), dense_attention(rows.q.to(wide), k.to(wide), v.to(wide), *given)
        # A logit is off by some roundings of its terms, and o by as much relative to the values.
        off = 4 * (
            1
            + rows.q.shape[-1] ** -0.5
            * float(torch.einsum("bsghd,bgkd->bsghk", rows.q.nan_to_num().abs().double(), k.abs().double()).max())
        )
        assert_within_twice_baseline(o.unsqueeze(1), exact[0], baseline[0].to(o.dtype), "o", off * float(v.abs().max()))
        assert_within_twice_baseline(lse.unsqueeze(1), exact[1], baseline[1], "lse", off)
        nothing = rows.cache_seqlens == 0
        assert bool((o[nothing] == 0).all())
        assert bool((lse[nothing] == -torch.inf).all())
        return o, lse


def make_step(
    new: tuple[int, ...], lengths: tuple[int, ...], page_size: int | None, *, spare: int = 0, each: str | None = None,
    one_pool: bool = False,
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, index_dtype: torch.dtype = torch.int32, one: bool = False,
    **sizes: Any,
) -> Step:  # fmt: skip
    """Return `new` rows of requests over caches of `lengths` keys, then `spare` rows of padding with NaN as q.

    The selection names blocks in any order, also twice, of other rows' futures, behind the cache, and none; or has ranges.

    Args:
        each: what has a scale of its own in e4m3; "" for scales of 1; None for a cache of `dtype`.
        one_pool: keys and values of a page lie side by side, heads before keys.
        one: one selection for all groups.
        sizes: G, h, Dk, Dv, n, block, room of `make_cache`.
    """
    generator, facts = torch.Generator().manual_seed(seed), {"page_size": page_size, "seed": seed, **sizes, "n": 1, "block": 1}
    scales: dict[str, Tensor] = {}
    if each is None:
        plain = make_cache(lengths, dtype=dtype, device=device, **facts)
        exact = plain
    else:
        plain, scales, exact = make_quantized(each or None, lengths=lengths, dtype=dtype, device=device, **facts)
    (_, _, G, h, Dk), T, n, block = plain.q.shape, sum(new) + spare, sizes["n"], sizes["block"]
    q = torch.randn(T, G, h, Dk, generator=generator)
    q[sum(new) :] = torch.nan
    rows = (T, 1 if one else G, n)
    if block is None:
        start = torch.randint(-3, sizes.get("room", 192), rows, generator=generator)
        spans = torch.stack((start, start + torch.randint(0, 40, rows, generator=generator)), -1)
        selection = Selection.from_ranges(spans.to(index_dtype).to(device))
    else:
        blocks = torch.randint(-1, sizes.get("room", 192) // block + 2, rows, generator=generator)
        blocks[..., 0] = torch.where(torch.rand(rows[:2], generator=generator) < 0.5, 0, blocks[..., 0])
        selection = Selection.from_blocks(blocks.to(index_dtype).to(device), block)
    k_cache, v_cache = plain.k_cache, plain.v_cache
    if one_pool:
        pool = torch.cat([x.view(torch.uint8) if each is not None else x for x in (k_cache, v_cache)], -1).transpose(1, 2).contiguous()
        pool = pool.view(k_cache.dtype)
        k_cache, v_cache = (x.transpose(1, 2) for x in pool.split((k_cache.shape[3], v_cache.shape[3]), -1))
    cu = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32, device=device)
    cache = plain._replace(q=q.to(dtype).to(device), k_cache=k_cache, v_cache=v_cache, selection=selection)
    return Step(cache, cu, scales, (exact.k_cache, exact.v_cache))
