"""Backends called in other ways: over KV caches, and on packed batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from nsa_sel import selection_attention, selection_attention_varlen
from nsa_sel.bench.core.cases import KEYS_FIRST, Cache, Case, packed_bounds, with_cache
from nsa_sel.bench.core.contenders import Contender, Problem, Ready, ours
from nsa_sel.bench.core.peers import by_tokens
from nsa_sel.core import registry
from nsa_sel.core.request import Quantized
from nsa_sel.quantize import Each, quantize_e4m3
from nsa_sel.selection import Selection
from nsa_sel.serving import selection_attention_with_kvcache

# Caches

PAGE_SIZES = (16, 64, 256)
FORMATS: tuple[Quantized | None, ...] = (None, "e4m3/head")
READERS = tuple(name for name, backend in registry.backends().items() if backend.reads_caches)


def over_caches(backends: Sequence[str]) -> list[Contender]:
    """Return every backend over every cache: in one piece and in pages, in the inputs' dtype and in
    e4m3.
    """
    latest: list[Any] = [None, None]  # a problem with a cache, and its tensors: contenders that follow each other share them
    return [
        _over_cache(backend, Cache(size, KEYS_FIRST, quantized), latest)
        for quantized in FORMATS
        for size in (None, *PAGE_SIZES)
        for backend in backends
        if quantized is None or "e4m3" in registry.backends()[backend].limits.quantized
    ]


def _over_cache(backend: str, cache: Cache, latest: list[Any]) -> Contender:
    def prepare(problem: Problem) -> Ready:
        if latest[0] is None or latest[0][0] is not problem or latest[0][1] != cache:
            latest[1] = None  # frees memory first
            latest[:] = (problem, cache), make_cache(problem, cache)
        k_cache, v_cache, table, scales = latest[1]
        lengths = torch.full((len(problem.q),), problem.k.shape[2], dtype=torch.int32, device=problem.q.device)
        ranges, block = problem.selection.ranges, problem.selection.block_size

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            fresh = Selection(ranges, block, disjoint=True)
            o: Tensor = selection_attention_with_kvcache(q, k_cache, v_cache, fresh, lengths, table, backend=backend, **scales)
            return o

        return Ready(call, call)

    return Contender(with_cache(backend, cache), prepare, ours(backend).lacks, directions=("decode",))


def make_cache(problem: Problem, cache: Cache) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """Return a cache of a problem's keys and values, its block table (None in one piece), and its scales.

    Pages are in random order.
    """
    tensors, table = [x.detach().transpose(1, 2) for x in (problem.k, problem.v)], None  # [B,S_kv,G,D]
    if cache.page_size is not None:
        B, S_kv = tensors[0].shape[:2]
        order = torch.randperm(B * (S_kv // cache.page_size), generator=torch.Generator().manual_seed(0)).to(problem.k.device)
        table = order.int().view(B, -1)
        paged = [torch.unflatten(x, 1, (-1, cache.page_size)).flatten(0, 1) for x in tensors]
        tensors = [x[order.argsort()] for x in paged]  # page i is at order[i]
    scales: dict[str, Any] = {}
    if cache.quantized is not None:
        each = cast(Each, cache.quantized.partition("/")[2])
        (k, scales["k_scale"]), (v, scales["v_scale"]) = (quantize_e4m3(x, each) for x in tensors)
        tensors = [k, v]
    keys_first = cache.layout == KEYS_FIRST
    k, v = (x.contiguous() if keys_first else x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    return k, v, table, scales


# Packed batches. Sequences of mixed lengths lie end to end; plans and shifted ranges are built within the call.
# NAME           selection_attention_varlen: bounds on the device, align=False; block_aligned where sequences begin with
# blocks
#     NAME-each      a call of selection_attention for every sequence, its results joined: what a user does without it
# NAME-copied    selection_attention_varlen with align=True: k and v copied so that each sequence begins with a block


def on_packed_batches(case: Case, backends: Sequence[str]) -> list[Contender]:
    """Return every backend in every way that it supports."""
    odd = any(bound % case.block for bound in packed_bounds(case)[:-1])
    whole_blocks = [name for name, backend in registry.backends().items() if backend.limits.block_aligned_only]
    refused = {(name, "") for name in whole_blocks} if odd else {(name, "-copied") for name in backends}
    ways: dict[str, Callable[..., Ready]] = {"": _at_once, "-each": _one_by_one, "-copied": partial(_at_once, align=True)}
    return [
        ours(backend)._replace(name=backend + suffix, prepare=partial(way, backend, case), refuses=lambda case: None)
        for backend in backends
        for suffix, way in ways.items()
        if (backend, suffix) not in refused
    ]


def _in_sequences(problem: Problem, bounds: list[int]) -> Tensor:
    """Return the selection's ranges in positions of each row's own sequence."""
    ranges, cu = problem.selection.ranges, torch.tensor(bounds, device=problem.q.device)
    first = torch.repeat_interleave(cu[:-1], cu.diff()).to(ranges.dtype)
    return torch.where(ranges.diff(dim=-1) > 0, ranges - first[None, :, None, None, None], 0)


def _at_once(backend: str, case: Case, problem: Problem, align: bool = False) -> Ready:
    bounds = packed_bounds(case)
    ranges, cu = _in_sequences(problem, bounds), torch.tensor(bounds, dtype=torch.int32, device=problem.q.device)
    aligned = problem.selection.block_size is not None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        selection = Selection(ranges, case.block, disjoint=True)
        k, v = (x[0].transpose(0, 1) for x in (k, v))
        o: Tensor = selection_attention_varlen(q[0], k, v, selection, cu, backend=backend, block_aligned=aligned, align=align)
        return o.unsqueeze(0)

    return Ready(call, call, layout=by_tokens)


def _one_by_one(backend: str, case: Case, problem: Problem) -> Ready:
    bounds = packed_bounds(case)
    ranges = _in_sequences(problem, bounds)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for a, b in pairwise(bounds):
            selection = Selection(ranges[:, a:b], case.block, disjoint=True)
            parts.append(selection_attention(q[:, a:b], k[:, :, a:b], v[:, :, a:b], selection, backend=backend))
        return torch.cat(parts, 1)

    return Ready(call, call, layout=by_tokens)
