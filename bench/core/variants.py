"""Backends called in other ways: over KV caches, and on packed batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from nsa_sel import selection_attention, selection_attention_varlen
from nsa_sel.bench.core.cases import ORDERS, Cache, Case, packed_bounds, with_cache
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


CACHES = [Cache(size, quantized) for quantized in FORMATS for size in (None, *PAGE_SIZES)]
# The suite "steps" measures these: every order of memory, in one piece and, for MiniMax-M3, in its pages.
LAYOUTS = [Cache(size, quantized, order) for size in (None, 128) for quantized in FORMATS for order in ORDERS]
E4M3 = [cache for cache in LAYOUTS if cache.quantized and cache.page_size is None]


def over_caches(backends: Sequence[str], caches: Sequence[Cache] = CACHES) -> list[Contender]:
    """Return every backend over every cache: by default in one piece and in pages, in the inputs' dtype and in e4m3."""
    return [
        Contender(with_cache(backend, cache), partial(_over_cache, backend, cache), ours(backend).lacks, directions=("decode",))
        for cache in caches
        for backend in backends
        if cache.quantized is None or "e4m3" in registry.backends()[backend].limits.quantized
    ]


def _over_cache(backend: str, cache: Cache, problem: Problem) -> Ready:
    """Prepare a cache of the problem's keys and values, whose pages are in random order."""
    k_cache, v_cache = (x.detach().transpose(1, 2) for x in (problem.k, problem.v))  # [B,S_kv,G,D]
    B, S_kv = k_cache.shape[:2]
    options: dict[str, Any] = {"backend": backend, "block_table": None}
    if cache.page_size is not None:
        page = torch.randperm(B * (S_kv // cache.page_size), generator=torch.Generator().manual_seed(0)).to(problem.k.device)
        options["block_table"] = page.int().view(B, -1)
        paged = (torch.unflatten(x, 1, (-1, cache.page_size)).flatten(0, 1) for x in (k_cache, v_cache))
        k_cache, v_cache = (x[page.argsort()] for x in paged)  # page i is at page[i]
    if cache.quantized is not None:
        each = cast(Each, cache.quantized.partition("/")[2])
        k_cache, options["k_scale"] = quantize_e4m3(k_cache, each)
        v_cache, options["v_scale"] = quantize_e4m3(v_cache, each)
    Dk, dims = k_cache.shape[3], (0, 1, 2, 3) if cache.order == "keys first" else (0, 2, 1, 3)
    if cache.order == "one pool":
        pool = torch.cat((k_cache, v_cache), -1).permute(dims).contiguous().permute(dims)
        k_cache, v_cache = pool[..., :Dk], pool[..., Dk:]
    else:
        k_cache, v_cache = (x.permute(dims).contiguous().permute(dims) for x in (k_cache, v_cache))
    lengths = torch.full((B,), S_kv, dtype=torch.int32, device=problem.q.device)
    indices, block = problem.selection.block_indices, problem.selection.block_size
    assert block is not None, "caches are decoded over blocks"

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        fresh = Selection.from_blocks(indices, block)
        o: Tensor = selection_attention_with_kvcache(q, k_cache, v_cache, fresh, lengths, **options)
        return o

    return Ready(call, call)


# Packed batches. Sequences of mixed lengths lie end to end; plans and shifted ranges are built within the call.
# NAME         selection_attention_varlen: bounds on the device, align=False; block_aligned where sequences begin with blocks
# NAME-each    a call of selection_attention for every sequence, its results joined: what a user does without it
# NAME-copied  selection_attention_varlen with align=True: k and v copied so that each sequence begins with a block


def on_packed_batches(case: Case, backends: Sequence[str]) -> list[Contender]:
    """Return every backend in every way that it supports. Copies are for sequences that do not begin with blocks."""
    odd, found = any(bound % case.block for bound in packed_bounds(case)[:-1]), list[Contender]()
    for backend in backends:
        ways: dict[str, Callable[..., Ready]] = {"-each": _one_by_one}
        if odd:
            ways["-copied"] = partial(_at_once, align=True)
        if not odd or not registry.backends()[backend].limits.block_aligned_only:
            ways[""] = _at_once
        for suffix, prepare in ways.items():
            contender = ours(backend)._replace(name=backend + suffix, prepare=partial(prepare, backend, case))
            found.append(contender._replace(refuses=lambda case: None))
    return found


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
