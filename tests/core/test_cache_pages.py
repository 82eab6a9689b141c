"""The bookkeeping of `NSACache` by itself: 1000 random steps against lists of tokens, with nothing lost and nothing shared by mistake."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from nsa_sel.cache import NSACache
from nsa_sel.caching import extend, step_tensors
from nsa_sel.caching.pages import Pages
from nsa_sel.caching.sequences import CachedSequence
from nsa_sel.errors import CacheFull
from tests.helpers.layer import poison

BLOCK, STRIDE, PAGE, WINDOW = 8, 4, 8, 13


def new_cache(pages: int, window_pages: int) -> NSACache:
    """Two layers whose keys are the numbers of tokens."""
    sizes = {"compress_block": BLOCK, "compress_stride": STRIDE, "window": WINDOW}
    return NSACache(2, pages, PAGE, 1, 1, window_pages=window_pages, dtype=torch.float64, **sizes)  # type: ignore[arg-type]


def append(cache: NSACache, batch: list[int], rows: list[list[int]]) -> None:
    """A step in which tokens are their own keys, and a compressed key is the sum of what it covers."""
    step = cache.step(batch, [len(new) for new in rows])
    poison(cache)
    x = torch.full(step.positions.shape, math.nan, dtype=torch.float64)
    for b, new in enumerate(rows):
        x[b, x.shape[1] - len(new) :] = torch.tensor(new, dtype=torch.float64)
    for i in range(len(step)):
        layer = step[i]
        extend.append(layer.pools, layer.tensors, (x[..., None, None],) * 6)
        raw = extend.covered(layer.pools.k_raw, layer.tensors).flatten(1)
        if raw.shape[1] >= BLOCK:
            extend.put(layer.pools.k_cmp, layer.tensors.compressed_slot, raw.unfold(1, BLOCK, STRIDE).sum(-1)[..., None, None])


def check(cache: NSACache, sequence: CachedSequence, tokens: list[int]) -> None:
    """All keys, all compressed keys, and the last keys of a sequence, in both layers."""
    wanted = torch.tensor(tokens, dtype=torch.float64)
    assert sequence.length == len(tokens)
    first = sequence.first_needed(max(len(tokens), 1)) - sequence.recent.first * PAGE
    for i in range(2):
        pools = cache.pools.layer(i)
        assert torch.equal(_keys(pools.k, sequence.all.held())[: len(tokens)], wanted)
        recent = _keys(pools.k_win, sequence.recent.held())[: len(tokens) - sequence.recent.first * PAGE]
        assert torch.equal(recent[first:], wanted[len(wanted) - len(recent[first:]) :])
        assert len(recent[first:]) == min(len(tokens), WINDOW - 1)
        compressed = _keys(pools.k_cmp, sequence.all.held())[1 : len(tokens) // STRIDE]
        assert torch.equal(compressed, wanted.unfold(0, BLOCK, STRIDE).sum(-1) if len(tokens) >= BLOCK else wanted[:0])


def _keys(pool: Tensor, pages: object) -> Tensor:
    return pool[torch.as_tensor(pages).long()].flatten()


def test_a_thousand_random_steps_lose_nothing() -> None:
    cache, chance = new_cache(60, 40), random.Random(1)
    tokens, last, full = dict[int, list[int]](), 0, 0
    for number in range(1000):
        living, what = list(tokens), chance.random()
        if what < 0.12 or not living:
            tokens[cache.open()] = []
        elif what < 0.2:
            a = chance.choice(living)
            tokens[cache.fork(a)] = list(tokens[a])
        elif what < 0.27:
            a = chance.choice(living)
            cache.free(a)
            del tokens[a]
        elif what < 0.4:
            a = chance.choice(living)
            length = 0 if chance.random() < 0.1 else chance.randint(cache._of(a).min_length(), len(tokens[a]))
            cache.truncate(a, length)
            del tokens[a][length:]
        else:
            batch = chance.sample(living, chance.randint(1, min(5, len(living))))
            rows = [[(last := last + 1) for _ in range(chance.choice((0, 1, 1, 2, 7, 37)))] for _ in batch]
            try:
                append(cache, batch, rows)
            except CacheFull:
                full += 1
                rows = [[] for _ in batch]
                victim = chance.choice(living)
                cache.free(victim)
                del tokens[victim]
            for a, new in zip(batch, rows, strict=True):
                if a in tokens:
                    tokens[a] += new
        if number % 5 == 0:
            for a, wanted in tokens.items():
                check(cache, cache._of(a), wanted)
        held = {page for x in cache._sequences.values() for page in x.all.held().tolist()}
        recent = {page for x in cache._sequences.values() for page in x.recent.held().tolist()}
        assert (cache.free_pages, cache.free_window_pages) == (60 - len(held), 40 - len(recent))
    assert full > 5
    for a in list(tokens):
        cache.free(a)
    assert (cache.free_pages, cache.free_window_pages) == (60, 40)


def test_an_error_undoes_all_pages() -> None:
    """In their order, too: the next step takes the same ones."""
    pages = Pages("pages", 4)
    a, b = pages.take(), pages.take()
    pages.share(a)
    before = list(pages._free), list(pages._holders)

    def fail() -> None:
        with pages.all_or_nothing():
            pages.release(a)
            pages.release(b)
            for _ in range(5):
                pages.take()

    with pytest.raises(CacheFull):
        fail()
    assert (pages._free, pages._holders) == before


def test_bookkeeping_on_the_device_takes_less_than_two_bytes_a_key() -> None:
    for page_size in (16, 64):
        sizes = step_tensors.StepSizes(64, 1, 32768 // page_size, 1, 1, page_size, 32, 16, 512)
        memory, _ = step_tensors.allocate(sizes, torch.device("cpu"))
        assert memory.nbytes < 2 * 64 * 32768
