"""KV caches for tests, contiguous or in pages, in their own dtype or in e4m3; and calls over them, checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel import Selection, decisions, selection_attention_with_kvcache
from nsa_sel.oracle import oracle_forward
from nsa_sel.quantize import STORED
from nsa_sel.testing import dense_attention
from tests.helpers.cases import assert_forward, assert_within_twice_baseline
from tests.helpers.gpus import RERUNS, captured, replayed

LENGTHS = (0, 1, 9, 150)  # shorter than a block among them
SPARE = 3  # pages of a pool that no sequence has


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

    Blocks (or, with block None, ranges of 5 to 40 keys anywhere) are any of the first `room` keys, future ones among them, in any
    order; of three and more, but not of all, one is padding or behind all caches, and one a duplicate.
    """
    generator = torch.Generator().manual_seed(seed)
    B = len(lengths)
    q = torch.randn(B, S_q, G, h, Dk, generator=generator)
    whole = [torch.randn(B, room, G, D, generator=generator) for D in (Dk, Dv)]
    for b, length in enumerate(lengths):
        for x in whole:
            x[b, length:] = torch.nan
    if block is None:
        length = torch.randint(5, 41, (B, S_q, G, n), generator=generator)
        start = torch.randint(0, room // n - 40, (B, S_q, G, n), generator=generator) + torch.arange(n) * (room // n)
        selection = Selection(torch.stack((start, start + length), -1), None, 40 * n)
    else:
        order = torch.rand(B, S_q, G, room // block, generator=generator).argsort(-1)[..., :n]
        order[..., 0] = torch.where((order == 0).any(-1), order[..., 0], 0)  # every sequence has a key of the first block
        if 2 < n < room // block:
            order[..., 1] = torch.tensor((-1, 1 << 20))[torch.randint(2, order.shape[:-1], generator=generator)]
            order[..., -1] = order[..., 0]
        selection = Selection.from_blocks(order.int() if seed % 2 else order, block)
    table, caches = None, whole
    if page_size is not None:
        used = [-(-length // page_size) for length in lengths]
        table = shuffled_pages(used, -(-room // page_size), generator)
        caches = [torch.full((sum(used) + SPARE, page_size, *x.shape[2:]), torch.nan) for x in whole]
        for b, i in (table >= 0).nonzero().tolist():
            for cache, x in zip(caches, whole, strict=True):
                part = x[b, i * page_size : (i + 1) * page_size]
                cache[table[b, i], : len(part)] = part
    tensors = [x.to(dtype).to(device) for x in (q, *caches)]
    return Cache(
        *tensors, selection.to(device), torch.tensor(lengths, dtype=torch.int32, device=device), None if table is None else table.to(device)
    )


def shuffled_pages(used: Sequence[int], room: int, generator: torch.Generator) -> Tensor:
    """Return a block table [sequences,room] of so many pages each, of a pool of `SPARE` more, and -1 after a sequence's last."""
    order = iter(torch.randperm(sum(used) + SPARE, generator=generator).tolist())
    return torch.tensor([[next(order) if i < count else -1 for i in range(room)] for count in used], dtype=torch.int32)


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
    decision = decisions()[-1]
    assert backend is None or decision.forward == backend
    assert decision.request.page_size == (None if cache.block_table is None else cache.k_cache.shape[1])
    assert decision.request.S == cache.q.shape[1]
    assert_forward((o, lse), cache.q, *gathered(cache), cache.selection.ranges, q_pos=positions(cache))
    return o, lse


def replayed_with(
    first: Cache, other: Cache, backend: str | None, scales: Mapping[str, Tensor] = {}, other_scales: Mapping[str, Tensor] = {}
) -> list[Tensor]:  # fmt: skip
    """o and lse, which held NaN, of a graph that was captured over `first`, replayed with what `other` holds in its place; reruns are
    bit-equal."""

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
    return replayed(graph, outputs, RERUNS)


EACH = (None, "tensor", "head", "page")  # what has a scale of its own


class Pool(NamedTuple):
    """Keys or values [pages,page,G,D]: as they are stored, the numbers that they stand for in float64, and scales of e4m3."""

    stored: Tensor
    exact: Tensor
    scale: Tensor | None = None


def as_stored(x: Tensor, each: str | None, generator: torch.Generator) -> Pool:
    """Return x [pages,page,G,D] in e4m3 with random scales, which differ by a factor of 100."""
    pages, _, G, _ = x.shape
    shape = {None: (1,), "tensor": (1,), "head": (G,), "page": (pages, G)}[each]
    scale = (10 ** (torch.rand(shape, generator=generator, device=generator.device) * 2 - 2.5)).to(x.device)
    wide = torch.ones(1, 1, 1, 1, device=x.device) if each is None else scale.reshape(-1, 1, scale.shape[-1], 1)
    stored = (x / wide).clamp(-448, 448).to(STORED)
    return Pool(stored, stored.double() * wide.double(), scale if each else None)


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
        return self._replace(cache=self.cache._replace(q=q), exact=self.exact._replace(q=q))


def make_quantized(each: str | None, page_size: int | None = 16, *, dtype: torch.dtype = torch.float32, **sizes: Any) -> QuantizedCache:
    """`make_cache` in e4m3, q in `dtype`. Scales differ by a factor of 100. NaN, as a number and as a scale, where no sequence has a
    key."""
    plain, generator = make_cache(page_size=page_size, **sizes), torch.Generator().manual_seed(1)
    (k, v), plain = (as_stored(x, each, generator) for x in plain[1:3]), plain._replace(q=plain.q.to(dtype))
    scales = {f"{name}_scale": x.scale for name, x in (("k", k), ("v", v)) if x.scale is not None}
    for name, x in (("k_scale", plain.k_cache), ("v_scale", plain.v_cache)) if each == "page" else ():
        scales[name][x.isnan().all(3).all(2).all(1)] = torch.nan
    return QuantizedCache(
        plain._replace(k_cache=k.stored, v_cache=v.stored), scales, plain._replace(k_cache=k.exact, v_cache=v.exact)
    )  # fmt: skip


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
    o, lse = selection_attention_with_kvcache(*given.cache, **given.scales, return_lse=True, backend=backend)
    return o, lse


def check_nan_in_a_selected_key(given: QuantizedCache, run: Callable[[QuantizedCache], tuple[Tensor, Tensor]]) -> None:
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


def with_nan_in_unselected_keys(given: QuantizedCache) -> QuantizedCache:
    """Return the cache with NaN in keys and values that no row of their sequence and group selects, and as the scales of pages
    that have no others."""
    cache, scales = given.cache, dict(given.scales)
    table, (pages, slots, G, _) = cache.block_table, cache.k_cache.shape
    unselected = torch.ones(pages, slots, G, dtype=torch.bool, device=cache.q.device)
    for b, s, g, i in itertools.product(*map(range, cache.selection.ranges.shape[:4])):
        start, end = (int(x) for x in cache.selection.ranges[b, s, g, i])
        for key in range(max(start, 0), min(end, int(cache.cache_seqlens[b]))):
            page = b if table is None else int(table[b, key // slots])
            unselected[page, key if table is None else key % slots, g] = False
    assert bool(unselected[..., 0].any())
    stored = {}
    for name in ("k", "v"):
        stored[f"{name}_cache"] = getattr(cache, f"{name}_cache").clone()
        stored[f"{name}_cache"].view(torch.uint8)[unselected] = 0x7F  # NaN
        scale = scales[f"{name}_scale"]
        if scale.dim() == 2:
            scales[f"{name}_scale"] = scale.masked_fill(unselected.all(1), torch.nan)
    return given._replace(scales=scales).replaced(**stored)


def check_quantized(given: QuantizedCache, backend: str | None) -> tuple[Tensor, Tensor]:
    """o and lse, whose error is at most twice that of a float32 computation with the same numbers; the decision names the format."""
    cache = given.cache
    with torch.no_grad():
        o, lse = called(given, backend)
    decision = decisions()[-1]
    assert backend is None or decision.forward == backend
    assert (decision.request.quantized or "").startswith("e4m3")
    assert o.dtype == cache.q.dtype
    rows = cache.selection.ranges, None, positions(cache)
    q, (k, v) = cache.q, gathered(given.exact)
    exact, baseline = oracle_forward(q, k, v, *rows), dense_attention(q.float(), k.float(), v.float(), *rows)
    assert_within_twice_baseline(o, exact[0], baseline[0].to(o.dtype), "o")
    assert_within_twice_baseline(lse, exact[1], baseline[1], "lse")
    assert not o[lse == -torch.inf].any()
    return o, lse
