"""Quantized KV caches for tests: stored numbers with scales, what they stand for, and a call over them, checked."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

import nsa_sel
from nsa_sel.core.quantized import STORED
from nsa_sel.oracle import oracle_forward
from nsa_sel.serving import selection_attention_with_kvcache
from tests.helpers.cache_cases import Cache, gathered, make_cache, positions
from tests.helpers.cases import assert_within_twice_baseline, plain_torch
from tests.helpers.graphs import captured, replayed

EACH = (None, "tensor", "head", "page")  # what has a scale of its own


class QuantizedCache(NamedTuple):
    """A cache with e4m3 keys and values, its scales, and the same cache with the numbers that they stand for, in float64."""

    cache: Cache
    scales: dict[str, Tensor]
    exact: Cache

    def replaced(self, **changes: Any) -> QuantizedCache:
        """With other fields of the cache; the exact one's keys and values stay."""
        return self._replace(cache=self.cache._replace(**changes))


def make_quantized(each: str | None, page_size: int | None = 16, *, dtype: torch.dtype = torch.float32, **sizes: Any) -> QuantizedCache:
    """`make_cache` in e4m3, q in `dtype`. Scales differ by a factor of 100. NaN, as a number and as a scale, where no sequence has a
    key."""
    plain = make_cache(page_size=page_size, **sizes)
    pages, _, G, _ = plain.k_cache.shape
    generator = torch.Generator().manual_seed(1)
    stored, exact, scales = [], [], {}
    for name, x in (("k", plain.k_cache), ("v", plain.v_cache)):
        shape = {None: (1,), "tensor": (1,), "head": (G,), "page": (pages, G)}[each]
        scale = 10 ** (torch.rand(shape, generator=generator) * 2 - 2.5).to(x.device)
        wide = torch.ones_like(scale) if each is None else scale
        wide = wide.reshape(-1, 1, wide.shape[-1], 1)
        stored.append((x / wide).clamp(-448, 448).to(STORED))
        exact.append(stored[-1].double() * wide.double())
        if each == "page":
            scale[x.isnan().all(3).all(2).all(1)] = math.nan
        if each is not None:
            scales[f"{name}_scale"] = scale
    q = plain.q.to(dtype)
    return QuantizedCache(
        plain._replace(q=q, k_cache=stored[0], v_cache=stored[1]), scales, plain._replace(q=q, k_cache=exact[0], v_cache=exact[1])
    )


def large_keys(given: QuantizedCache) -> QuantizedCache:
    """Keys 2^17 times as large, which float16 would have as infinity, values 2^12 times, queries a 2^14th."""
    factors = {"k": 2.0**17, "v": 2.0**12}
    q = given.cache.q * 2.0**-14
    exact = given.exact._replace(q=q, **{f"{name}_cache": getattr(given.exact, f"{name}_cache") * x for name, x in factors.items()})
    assert float(exact.k_cache.nan_to_num().abs().max()) > 65504
    scales = {f"{name}_scale": given.scales[f"{name}_scale"] * x for name, x in factors.items()}
    return QuantizedCache(given.cache._replace(q=q), scales, exact)


def check_quantized(given: QuantizedCache, backend: str | None) -> tuple[Tensor, Tensor]:
    """o and lse, whose error is at most twice that of a float32 computation with the same numbers; the decision names the format."""
    cache = given.cache
    with torch.no_grad():
        o, lse = selection_attention_with_kvcache(*cache, **given.scales, return_lse=True, backend=backend)
    decision = nsa_sel.decisions()[-1]
    assert backend is None or decision.forward == backend
    assert (decision.request.quantized or "").startswith("e4m3")
    assert o.dtype == cache.q.dtype
    rows = cache.selection.ranges, None, positions(cache)
    q, (k, v) = cache.q, gathered(given.exact)
    exact, baseline = oracle_forward(q, k, v, *rows), plain_torch(q.float(), k.float(), v.float(), *rows)
    assert_within_twice_baseline(o, exact[0], baseline[0].to(o.dtype), "o")
    assert_within_twice_baseline(lse, exact[1], baseline[1], "lse")
    nothing = (positions(cache) < 0)[:, :, None, None]
    assert bool((o.masked_select(nothing.unsqueeze(-1)) == 0).all())
    assert bool((lse.masked_select(nothing) == -math.inf).all())
    return o, lse


def replayed_with(first: QuantizedCache, other: QuantizedCache, backend: str) -> list[Tensor]:
    """o and lse, which held NaN, of a graph that was captured over `first`, replayed with what `other` holds in its place."""

    def call() -> tuple[Tensor, Tensor]:
        o, lse = selection_attention_with_kvcache(*first.cache, **first.scales, return_lse=True, backend=backend)
        return o, lse

    with torch.no_grad():
        graph, outputs = captured(call)
    for name in ("q", "k_cache", "v_cache", "cache_seqlens", "block_table"):
        if getattr(first.cache, name) is not None:
            getattr(first.cache, name).copy_(getattr(other.cache, name))
    first.cache.selection.ranges.copy_(other.cache.selection.ranges)
    for name, scale in first.scales.items():
        scale.copy_(other.scales[name])
    return replayed(graph, outputs)
