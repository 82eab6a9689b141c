"""Quantized KV caches for tests: stored numbers with scales, what they stand for, and a call over them, checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import nsa_sel
from nsa_sel.oracle import oracle_forward
from nsa_sel.quantize import STORED
from nsa_sel.serving import selection_attention_with_kvcache
from tests.helpers.cache_cases import Cache, gathered, make_cache, positions
from tests.helpers.cases import assert_within_twice_baseline, plain_torch

EACH = (None, "tensor", "head", "page")  # what has a scale of its own


class QuantizedCache(NamedTuple):
    """A cache with e4m3 keys and values, its scales, and the same cache with the numbers that they stand for, in float64."""

    cache: Cache
    scales: dict[str, Tensor]
    exact: Cache

    def replaced(self, **changes: Any) -> QuantizedCache:
        """With other fields of the cache; the exact one's keys and values stay."""
        return self._replace(cache=self.cache._replace(**changes))

    def scaled(self, k: float = 1.0, v: float = 1.0) -> QuantizedCache:
        """With scales that are so many times as large."""
        scales, exact = {}, {}
        for name, factor in (("k", k), ("v", v)):
            scales[f"{name}_scale"] = self.scales[f"{name}_scale"].double().mul(factor).float()
            exact[f"{name}_cache"] = getattr(self.exact, f"{name}_cache") * factor
        return self._replace(scales=scales, exact=self.exact._replace(**exact))

    def asked(self, q: Tensor) -> QuantizedCache:
        """With other queries."""
        return self._replace(cache=self.cache._replace(q=q), exact=self.exact._replace(q=q))


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
    large = given.scaled(2.0**17, 2.0**12).asked(given.cache.q * 2.0**-14)
    assert float(large.exact.k_cache.nan_to_num().abs().max()) > 65504
    return large


def uneven_queries(given: QuantizedCache, exponent: int) -> QuantizedCache:
    """Queries in bfloat16 times 2^exponent, numbers of a row that differ by 2^32, and keys that are smaller by as much."""
    spread = 2.0 ** torch.linspace(-16, 16, given.cache.q.shape[-1], device=given.cache.q.device).round()
    q = (given.cache.q.float() * spread * 2.0**exponent).to(torch.bfloat16)
    return given.scaled(2.0 ** (-exponent - 14)).asked(q)


def shared_by_sequences(given: QuantizedCache) -> QuantizedCache:
    """Every sequence has the first one's keys and values, by a stride of 0."""

    def first(cache: Cache) -> Cache:
        names = ("k_cache", "v_cache")
        return cache._replace(**{name: getattr(cache, name)[:1].expand(len(cache.q), -1, -1, -1) for name in names})

    return given._replace(cache=first(given.cache), exact=first(given.exact))


def called(given: QuantizedCache, backend: str | None) -> tuple[Tensor, Tensor]:
    """o and lse."""
    o, lse = selection_attention_with_kvcache(*given.cache, **given.scales, return_lse=True, backend=backend)
    return o, lse


def check_nan(given: QuantizedCache, run: Callable[[QuantizedCache], tuple[Tensor, Tensor]]) -> None:
    """NaN in a key or value of the last sequence's first block, which its rows select, reaches them alone: no other sequence or group."""
    (o, lse), table = run(given), given.cache.block_table
    page = -1 if table is None else int(table[-1, 0])
    for name in ("k_cache", "v_cache"):
        stored = getattr(given.cache, name).clone()
        stored[page, 3, 0, 5] = torch.nan
        spoilt, spoilt_lse = run(given.replaced(**{name: stored}))
        assert bool(spoilt[-1, :, 0].isnan().any(-1).all())
        assert bool(spoilt_lse[-1, :, 0].isnan().all()) == (name == "k_cache")
        for new, old in ((spoilt, o), (spoilt_lse, lse)):
            assert torch.equal(new[:-1], old[:-1])
            assert torch.equal(new[-1, :, 1], old[-1, :, 1])


def check_quantized(given: QuantizedCache, backend: str | None) -> tuple[Tensor, Tensor]:
    """o and lse, whose error is at most twice that of a float32 computation with the same numbers; the decision names the format."""
    cache = given.cache
    with torch.no_grad():
        o, lse = called(given, backend)
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
