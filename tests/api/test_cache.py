"""`NSACache` against the layer's own prefill: chunks, mixed lengths, drafts that are cut off, forks that diverge, pages of NaN."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel.errors import CacheFull
from tests.helpers.layer_cache import SIZES, Model, make_layer

pytestmark = pytest.mark.usefixtures("cheapest_backend")


def hidden(model: Model, *shape: int) -> Tensor:
    return torch.randn(*shape, model.layers[0].width, dtype=torch.float64).to(model.layers[0].q.weight)


def close(model: Model, got: Tensor, wanted: Tensor) -> None:
    tolerance = 1e-9 if got.dtype == torch.float64 else 1e-5 * float(wanted.abs().max())
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def in_chunks(model: Model, x: Tensor, chunks: list[int]) -> Tensor:
    """[B,S,width] of x, chunk by chunk, in new sequences."""
    sequences = [model.cache.open() for _ in x]
    parts = [torch.stack(model.step(sequences, list(part))) for part in x.split(chunks, 1)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("page_size", [8, 24])
@pytest.mark.parametrize("name", SIZES)
def test_chunks_of_any_size_equal_the_prefill(name: str, page_size: int) -> None:
    model = Model([make_layer(name), make_layer(name)], 24, page_size)
    x = hidden(model, 2, 45)
    wanted = model.prefill(x)
    for chunks in ([45], [1] * 5 + [3, 19, 1, 17], [7, 1, 8, 29]):
        close(model, in_chunks(model, x, chunks), wanted)
        for sequence in (*model.cache._sequences,):
            model.cache.free(sequence)
        assert model.cache.free_pages == model.cache.free_window_pages == 24


def test_token_by_token_in_float32() -> None:
    model = Model([make_layer("mlp", torch.float32)], 16, 8)
    x = hidden(model, 1, 45)
    close(model, in_chunks(model, x, [1] * 45), model.prefill(x))


def test_random_batches_drafts_and_forks() -> None:
    """Every output of every sequence that lives is that of the prefill of its tokens."""
    model, chance = Model([make_layer()], 40, 8, window_pages=24), random.Random(0)
    cache, tokens, found, full = model.cache, dict[int, Tensor](), dict[int, Tensor](), 0
    for _ in range(120):
        living, what = list(tokens), chance.random()
        if what < 0.15 or not living:
            a = cache.open()
            tokens[a] = found[a] = hidden(model, 0)
        elif what < 0.25:
            a = chance.choice(living)
            b = cache.fork(a)
            tokens[b], found[b] = tokens[a], found[a]
        elif what < 0.32:
            a = chance.choice(living)
            cache.free(a)
            close(model, found.pop(a), model.prefill(tokens.pop(a)[None])[0])
        elif what < 0.42:
            a = chance.choice(living)
            length = chance.randint(cache._of(a).shortest(), cache.length(a))
            cache.truncate(a, length)
            tokens[a], found[a] = tokens[a][:length], found[a][:length]
        else:
            batch = chance.sample(living, chance.randint(1, min(4, len(living))))
            rows = [hidden(model, chance.choice((0, 1, 1, 2, 3, 14))) for _ in batch]
            try:
                outputs = model.step(batch, rows)
            except CacheFull:
                full += 1
                continue
            for a, new, y in zip(batch, rows, outputs, strict=True):
                tokens[a], found[a] = torch.cat((tokens[a], new)), torch.cat((found[a], y))
        assert {a: cache.length(a) for a in tokens} == {a: len(x) for a, x in tokens.items()}
    assert full
    for a, x in tokens.items():
        close(model, found[a], model.prefill(x[None])[0])
        cache.free(a)
    assert (cache.free_pages, cache.free_window_pages) == (40, 24)


def test_a_cache_that_is_full_changes_nothing() -> None:
    model = Model([make_layer()], 4, 8)
    cache = model.cache
    a = cache.open()
    x = hidden(model, 1, 30)
    first = model.step([a], [x[0, :20]])[0]
    b = cache.fork(a)
    free = cache.free_pages, cache.free_window_pages
    with pytest.raises(CacheFull, match="pages = 4; nothing has changed"):
        cache.step([a, b], 5)
    assert (cache.free_pages, cache.free_window_pages) == free
    assert cache.length(a) == cache.length(b) == 20
    cache.free(b)
    close(model, torch.cat((first, model.step([a], [x[0, 20:]])[0]))[None], model.prefill(x))
    assert isinstance(CacheFull("pages", 4), nsa_sel.errors.NsaSelError)
