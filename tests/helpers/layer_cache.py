"""Caches for tests: layers whose steps are held against their own prefill, and NaN wherever nobody may read."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from nsa_sel import NSACache, NSAttention
from nsa_sel.caching.pools import CacheScales
from nsa_sel.caching.sequences import CachedSequence
from nsa_sel.projection import Parts
from nsa_sel.quantize import STORED, as_bytes, stored

SMALL: dict[str, Any] = {"window": 6, "compress_block": 8, "compress_stride": 4, "block_size": 8, "n": 4}
SIZES: dict[str, tuple[int, int, int, int, int | None, dict[str, Any]]] = {  # width, G, h, Dk, Dv, options
    "mlp": (10, 2, 2, 4, None, {}),
    "mean": (6, 1, 3, 4, 6, {"compression": "mean", "compress_block": 4, "window": 9}),
    "no-positions": (6, 2, 1, 2, 4, {"compress_stride": 2, "bias": True, "rotary": False}),
    "single-keys": (6, 1, 2, 2, 2, {"compression": "mean", "compress_block": 1, "compress_stride": 1, "block_size": 1, "window": 1}),
}


def make_layer(name: str = "mlp", dtype: torch.dtype = torch.float64, device: str = "cpu", **changed: Any) -> NSAttention:
    """A layer all of whose parameters are random; it takes no gradients."""
    *sizes, options = SIZES[name]
    torch.manual_seed(0)
    layer = NSAttention(*sizes, **{**SMALL, **options, **changed}, device=device, dtype=dtype)  # type: ignore[arg-type]
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer.requires_grad_(False)


def with_stored_keys(layer: NSAttention, scales: CacheScales, dtype: torch.dtype | None = None) -> NSAttention:
    """A copy in `dtype` that attends, without a cache, to the keys and values which a cache with these scales [G] would hold in e4m3.

    What it attends to is projected by `layer` in any case, so that copies of other dtypes attend to the same numbers.
    """
    other = copy.deepcopy(layer).to(dtype)

    def parts(x: Tensor, positions: Tensor | None, many: bool) -> Parts:
        made = layer._parts(x.to(layer.q.weight.dtype), positions, many)
        for name, scale in zip(("k_slc", "v_slc", "k_win", "v_win"), scales, strict=True):
            made = made._replace(**{name: stored(getattr(made, name), scale[:, None]).double() * scale[:, None].double()})
        return Parts(*(y.to(other.q.weight.dtype) for y in made))

    other._parts = parts  # type: ignore[method-assign]
    return other


def short_numbers(layer: NSAttention) -> NSAttention:
    """The layer with projections of few bits: of such x, products with any number of rows have the same keys, with the same rounding."""
    for module in (layer.q, layer.kv):
        module.weight.copy_(few_bits(module.weight))
    return layer


def few_bits(x: Tensor) -> Tensor:
    return (x * 32).round() / 32


def poison(cache: NSACache) -> None:
    """NaN in every page and position that no sequence may read, in all layers. The page after the last one is among them."""
    pages = torch.zeros(cache.pools.k.shape[1:3], dtype=torch.bool)
    pieces = torch.zeros(cache.pools.k_cmp.shape[1:3], dtype=torch.bool)
    recent = torch.zeros(cache.pools.k_win.shape[1:3], dtype=torch.bool)
    for sequence in cache._sequences.values():
        stride, size = cache.sizes.compress_stride, cache.sizes.page_size
        _mark(pages, sequence.all.held(), 0, sequence.length)
        _mark(pieces, sequence.all.held(), 0, sequence.length // stride)
        start = sequence.recent.first * size
        _mark(recent, sequence.recent.held(), _first_key(sequence) - start, sequence.length - start)
    for x, mask in zip(cache.pools, (pages, pages, pieces, pieces, *[recent] * 4), strict=True):
        as_bytes(x).masked_fill_(~mask.to(x.device)[None, :, :, None, None], 0x7F if x.dtype == STORED else math.nan)


def _first_key(sequence: CachedSequence) -> int:
    """Of the last keys that may be read: those before the shortest length to which the sequence may be cut."""
    return sequence.first_needed(max(sequence.min_length(), 1))


def _mark(mask: Tensor, held: Any, first: int, end: int) -> None:
    """Positions [first, end) of a sequence with these pages."""
    size = mask.shape[1]
    position = torch.arange(max(first, 0), max(end, first, 0))
    mask[torch.from_numpy(held.astype("int64"))[position // size], position % size] = True


class Model:
    """Layers one after the other with residuals, over a cache that is poisoned before every step."""

    def __init__(self, layers: list[NSAttention], pages: int, page_size: int, **options: Any) -> None:
        self.layers = layers
        self.cache = NSACache.of(layers, pages, page_size, **options)
        scales = self.cache.scales
        self.plain = layers if scales is None else [with_stored_keys(x, scales.layer(i)) for i, x in enumerate(layers)]

    def prefill(self, x: Tensor) -> Tensor:
        """[B,S,width] without the cache."""
        for layer in self.plain:
            x = x + layer(x)
        return x

    def step(self, sequences: list[int], rows: list[Tensor], **options: Any) -> list[Tensor]:
        """What the layers make of new tokens [tokens,width] of each sequence; rows without a token hold NaN, and give 0 in each layer."""
        step = self.cache.step(sequences, [len(x) for x in rows], **options)
        poison(self.cache)
        x = torch.full((len(rows), max(map(len, rows), default=0), self.layers[0].width), math.nan).to(self.layers[0].q.weight)
        for b, new in enumerate(rows):
            x[b, x.shape[1] - len(new) :] = new
        empty = ~step.is_token
        for i, layer in enumerate(self.layers):
            y = layer(x, cache=step[i])
            nothing = torch.zeros_like(y[empty]) if layer.out.bias is None else layer.out.bias.expand_as(y[empty])
            assert torch.equal(y[empty], nothing)
            x = x + y
        return [x[b, x.shape[1] - len(new) :] for b, new in enumerate(rows)]
