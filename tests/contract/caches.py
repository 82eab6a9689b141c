"""Checks of decoding over a KV cache that every backend must pass: contiguous or in pages, in its own dtype or in e4m3."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nsa_sel.core import packed as core_packed
from nsa_sel.selection import Selection
from nsa_sel.serving import selection_attention_with_kvcache
from tests.contract.lanes import Lane, lanes, parameters
from tests.helpers.caches import (
    called,
    check,
    check_nan_in_a_selected_key,
    check_quantized,
    large_keys,
    make_cache,
    make_quantized,
    replayed_with,
    shared_by_sequences,
    uneven_queries,
    with_nan_in_unselected_keys,
)
from tests.helpers.checks import new_memory_is_nan
from tests.helpers.gpus import SM, captured, no_waiting, noted
from tests.helpers.packed import Step, make_step

LENGTHS = {"cpu": (0, 1, 9, 150), "interpreter": (0, 9, 150), "emulated": (0, 1, 9, 150), "cuda": (0, 1, 9, 150) * 17}


class Layout(NamedTuple):
    """Keys of a page, new tokens of a sequence, keys of a block, heads, columns; each: what has a scale of its own, in e4m3."""

    page: int | None
    S_q: int = 1
    block: int | None = 16
    h: int = 2
    Dk: int = 16
    Dv: int = 8
    each: str | None = None

    @property
    def name(self) -> str:
        scaled = "" if self.each is None else f"-{self.each}"
        return f"pages-{self.page}-S{self.S_q}-block-{self.block}-h{self.h}-{self.Dk}x{self.Dv}{scaled}"

    def sizes(self, lane: Lane) -> dict[str, Any]:
        facts = self._asdict()
        n = 6 if self.block == 8 else 1 if self.block == 128 else 3
        facts = {name: facts[name] for name in ("S_q", "block", "h", "Dk", "Dv")}
        G = 1 if self.S_q == 1 and self.each is None else 2  # few rows are split
        return {**facts, "G": G, "n": n, "page_size": self.page, "lengths": LENGTHS[lane.device], "dtype": lane.dtype, "device": lane.place}


ROWS = (Layout(None, 4), Layout(16), Layout(24, 2, None), Layout(64, 2, 32), Layout(64, 2, 128), Layout(256, 8, 64))
EMULATED = tuple(layout._replace(h=3, Dv=24) for layout in (Layout(None, 4), Layout(16), Layout(24, 2, None), Layout(64, 2, 128)))
TILES = (Layout(64, 15, 64, 16, 64, 64), Layout(64, 15, 128, 16, 64, 64), Layout(None, 15, 8, 16, 64, 64))
JOINED = (
    *(Layout(page, 1, block, h, 64, 64) for page, block, h in ((64, 64, 16), (64, 128, 16), (128, 128, 4), (256, 64, 3))),
    Layout(128, 1, 128, 16, 64, 64, "page"), Layout(128, 1, 64, 4, 64, 64, "head"),
)  # fmt: skip
SCALED = (
    Layout(None, 1, 16, each="head"), Layout(16, 2, 16, each="page"), Layout(64, 2, 32, each="page", Dv=16),
    Layout(24, 1, None, each="tensor"),
)  # fmt: skip
STEPS = (
    Layout(None, 1, 64, 3, 64, 128, "head"), Layout(64, 1, 64, 3, 128, 64, "page"), Layout(64, 4, 128, 3, 128, 64, "page"),
    Layout(None, 4, 64, 3, 64, 128, "head"),
)  # fmt: skip


def layouts(lane: Lane) -> list[Layout]:
    """Return the caches that a backend takes; those of the fallback's kind are gathered for it."""
    if lane.limits.block_aligned_only:
        return [Layout(None, 4, 64, 4, 64, 64)] if lane.backend.tiles else [Layout(None, 4)]
    found = [*EMULATED, *TILES] if lane.device == "emulated" else [*ROWS]
    return [*found, *TILES] if lane.device == "cuda" and lane.backend.tiles else found


def scaled(lane: Lane) -> list[Layout]:
    """Return the caches in e4m3 that a backend reads."""
    if "e4m3" not in lane.limits.quantized:
        return []
    return list(SCALED if lane.backend.quantized_by is None else STEPS)


def check_cache(lane: Lane, layout: Layout, patch: pytest.MonkeyPatch) -> None:
    """o and lse from new memory; a second call without waiting, and a replay of a graph, give the same bits."""
    cache = make_cache(**layout.sizes(lane))
    with new_memory_is_nan():
        wanted = check(cache, lane.name)
    if lane.device == "cuda":
        garbled, other = cache, make_cache(**{**layout.sizes(lane), "seed": 1})
        if cache.block_table is not None:  # pages that do not exist after every sequence's last one
            garbled = cache._replace(block_table=torch.where(cache.block_table < 0, 2**30, cache.block_table))
        with no_waiting():
            found = selection_attention_with_kvcache(*garbled, return_lse=True, backend=lane.name)
        assert all(map(torch.equal, found, wanted))
        assert all(map(torch.equal, replayed_with(cache, other, lane.name), check(other, lane.name)))


def check_lengths(lane: Lane, layout: Layout, patch: pytest.MonkeyPatch) -> None:
    """A selection that served other lengths gives what a new one gives."""
    cache = make_cache(**layout.sizes(lane))
    attended = lambda cache: selection_attention_with_kvcache(*cache, return_lse=True, backend=lane.name)  # noqa: E731
    with torch.no_grad():
        for _ in range(2):
            attended(cache)
        cache.cache_seqlens.copy_(cache.cache_seqlens * 3 // 4)
        fresh = cache._replace(selection=Selection(cache.selection.ranges.clone(), cache.selection.block_size, cache.selection.max_length))
        assert all(map(torch.equal, attended(cache), attended(fresh)))


def check_one_group(lane: Lane, layout: Layout, patch: pytest.MonkeyPatch) -> None:
    """A selection of one group for all groups gives the bits of its ranges for each of them."""
    cache = make_cache(**{**layout.sizes(lane), "G": 2})
    ranges, facts = cache.selection.ranges[:, :, :1].contiguous(), (cache.selection.block_size, cache.selection.max_length)
    one = cache._replace(selection=Selection(ranges, *facts))
    each = cache._replace(selection=Selection(ranges.expand(-1, -1, 2, -1, -1).contiguous(), *facts))
    assert all(map(torch.equal, check(one, lane.name), check(each, lane.name)))


def check_strides(lane: Lane, layout: Layout, patch: pytest.MonkeyPatch) -> None:
    """Pages of K between those of V, heads before keys: views, without copies."""
    cache = make_cache(**{**layout.sizes(lane), "Dv": layout.Dk})
    wanted = check(cache, lane.name)
    both = torch.stack((cache.k_cache, cache.v_cache), 1)
    by_heads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (cache.k_cache, cache.v_cache)]
    for k_cache, v_cache in (both.unbind(1), by_heads):
        assert all(map(torch.equal, check(cache._replace(k_cache=k_cache, v_cache=v_cache), lane.name), wanted))


def skip_without_e4m3(lane: Lane) -> None:
    """Skip a test where this GPU lacks kernels for e4m3."""
    steps = lane.backend.quantized_by
    if lane.device == "cuda" and (SM < lane.limits.quantized["e4m3"] or (steps is not None and steps.sm != SM)):
        pytest.skip("quantized-sm: this GPU has no kernels for e4m3")


def _spread(x: Tensor) -> Tensor:
    """The same numbers with other strides: every third of a larger tensor, columns first."""
    if x.dim() == 1:
        return torch.stack((x, x.neg(), x.neg()), 1).flatten()[::3] if x.numel() > 1 else x
    return torch.stack((x, x.neg(), x.neg())).permute(2, 0, 1).contiguous()[:, 0].t()


def check_scales(lane: Lane, layout: Layout, patch: pytest.MonkeyPatch) -> None:
    """e4m3 keys with scales of other strides than the values' scales; NaN in unselected keys and pages of nobody; graphs on a GPU."""
    skip_without_e4m3(lane)
    given = make_quantized(layout.each, **layout.sizes(lane))
    with new_memory_is_nan():
        wanted = check_quantized(given, lane.name)
    assert all(map(torch.equal, called(with_nan_in_unselected_keys(given), lane.name), wanted))
    spread = {**given.scales, "v_scale": _spread(given.scales["v_scale"])}
    assert all(map(torch.equal, check_quantized(given._replace(scales=spread), lane.name), wanted))
    if lane.device == "cuda":
        other = make_quantized(layout.each, **{**layout.sizes(lane), "seed": 1})
        with no_waiting():
            again = called(given, lane.name)
        assert all(map(torch.equal, again, wanted))
        found = replayed_with(given.cache, other.cache, lane.name, given.scales, other.scales)
        assert all(map(torch.equal, found, check_quantized(other, lane.name)))
    if lane.device in ("emulated", "cuda") and layout.S_q == 1 and layout.block is not None:  # its rows select the first block
        sizes = layout.sizes(lane)
        alike = make_quantized(layout.each, **{**sizes, "lengths": (layout.block, 150), "n": 2, "room": 192, "G": 2})
        check_nan_in_a_selected_key(alike, lambda given: called(given, lane.name))


def check_numbers(lane: Lane, what: str, patch: pytest.MonkeyPatch) -> None:
    """e4m3 with scales of 0 and negative ones, keys larger than float16 has numbers, one row's q spread over 2^32, a shared cache."""
    skip_without_e4m3(lane)
    least = 16 if lane.backend.quantized_by is None else 64  # keys of a block and columns
    for page, each in ((None, "head"), (least, "page")):
        layout = Layout(page, 4 if what == "tokens" else 1, least, 3, least, least, each)
        sizes = {**layout.sizes(lane), "G": 1, "lengths": (150, 150) if what == "shared" else (40, 150), "n": 2}
        if what == "spread":
            given = make_quantized(each, **{**sizes, "dtype": torch.bfloat16})
            for exponent in (-60, 60):
                check_quantized(uneven_queries(given, exponent), lane.name)
            continue
        given = make_quantized(each, **sizes)
        if what == "signs":
            for factor in (0.0, -1.0):
                check_quantized(given.scaled(factor, -1.0), lane.name)
        elif what != "shared":
            check_quantized(large_keys(given), lane.name)
        elif page is None:
            check_quantized(shared_by_sequences(given), lane.name)


def numbers_of(lane: Lane) -> list[str]:
    """Return which numbers a backend that reads e4m3 is given."""
    whats = ["large", "tokens", "shared", "signs"] if "e4m3" in lane.limits.quantized else []
    return [*whats, *["spread"] * (bool(whats) and lane.device in ("emulated", "cuda"))]


def check_packed(lane: Lane, layout: Layout, patch: pytest.MonkeyPatch) -> None:
    """Rows of several requests in one call: a prefill, a chunk with a prefix, drafts, decoding, no rows, no keys, one key, and padding."""
    if layout.each is not None:
        skip_without_e4m3(lane)
    facts = {name: value for name, value in layout.sizes(lane).items() if name not in ("S_q", "lengths")}
    new, lengths = (
        ((150, 70, 4, 1, 0, 1, 2, 1), (150, 170, 9, 150, 33, 1, 1, 0)) if lane.device == "cuda" else ((3, 2, 0, 1, 2), (3, 150, 33, 1, 1))
    )
    facts |= {"spare": 2, "each": layout.each, "room": max(192, 2 * (layout.block or 0)), "page_size": layout.page}
    for one_pool in (False, layout.page is not None):
        facts["one_pool"] = one_pool
        step = make_step(new, lengths, **facts, seed=int(one_pool))
        with new_memory_is_nan():
            wanted = step.check(lane.name)
        if lane.device == "cuda":
            check_packed_on_gpu(lane, step, wanted, make_step(new[::-1], lengths[::-1], **facts, seed=2))


def check_joined(lane: Lane, layout: Layout, patch: pytest.MonkeyPatch) -> None:
    """Rows of requests with many visit blocks, those of requests with few follow; a request that does not fit is one of few."""
    from nsa_sel.backends.cupy_cuda import packed

    patch.setattr(packed, "LEAST_ROWS", 1)
    files = noted(patch)
    new, lengths = (
        ((150, 0, 70, 1, 8, 9, 2), (150, 33, 250, 256, 8, 128, 1))
        if lane.device == "cuda"
        else ((12, 1, 0, 20, 9, 2), (150, 9, 7, 200, 9, 1))
    )
    facts = {name: value for name, value in layout.sizes(lane).items() if name not in ("S_q", "lengths")} | {
        "spare": 3,
        "room": 256,
        "n": 3,
        "each": layout.each,
    }
    if layout.each is not None:
        skip_without_e4m3(lane)
        facts["dtype"] = torch.bfloat16
    for room in (core_packed.MOST_JOINED, (256 + 128) << (layout.each is not None)):
        patch.setattr(core_packed, "MOST_JOINED", room)
        for index_dtype in (torch.int32, torch.int64):
            step = make_step(new, lengths, **facts, index_dtype=index_dtype, one=index_dtype == torch.int64)
            with new_memory_is_nan():
                wanted = step.check(lane.name)
            if lane.device == "cuda":
                check_packed_on_gpu(
                    lane, step, wanted, make_step(new[::-1], lengths[::-1], **facts, one=index_dtype == torch.int64, seed=2)
                )
    assert {"block_partials.cu", "forward_blocks.cu"} <= set(files)


def check_packed_on_gpu(lane: Lane, step: Step, wanted: tuple[Tensor, Tensor], other: Step) -> None:
    """A call without waiting, over a table of pages that do not exist behind the last ones, has the same bits; a graph follows writes."""
    table = step.cache.block_table
    garbled = step if table is None else step._replace(cache=step.cache._replace(block_table=torch.where(table < 0, 2**30, table)))
    with no_waiting():
        found = garbled.called(lane.name)
    assert all(map(torch.equal, found, wanted))
    graph, outputs = captured(lambda: step.called(lane.name))
    for name in ("q", "k_cache", "v_cache", "cache_seqlens", "block_table"):
        if getattr(step.cache, name) is not None:
            getattr(step.cache, name).copy_(getattr(other.cache, name))
    step.cu.copy_(other.cu)
    step.cache.selection.ranges.copy_(other.cache.selection.ranges)
    for name, scale in step.scales.items():
        scale.copy_(other.scales[name])
    graph.replay()
    assert all(map(torch.equal, outputs, other.check(lane.name)))


CHECKS: dict[str, tuple[Any, Any]] = {
    "cache": (check_cache, layouts),
    "lengths": (
        check_lengths,
        lambda lane: [x for x in layouts(lane) if x.page != 256] if lane.backend.reads_caches else layouts(lane)[:1],
    ),
    "one-group": (check_one_group, lambda lane: layouts(lane)[:3] if lane.slow else layouts(lane)),
    "strides": (check_strides, lambda lane: layouts(lane)[:2]),
    "scales": (check_scales, scaled),
    "numbers": (check_numbers, numbers_of),
    "joined": (check_joined, lambda lane: JOINED if lane.device in ("emulated", "cuda") and lane.name == "cupy-cuda" else []),
    "packed": (check_packed, lambda lane: [] if lane.limits.block_aligned_only else [*layouts(lane), *scaled(lane)]),
}


def cells(*devices: str) -> Any:
    """Return the mark that runs a test `(behavior, lane, what)` for all cells of these devices."""
    found = []
    for behavior, (_, whats) in CHECKS.items():
        for lane in lanes(*devices):
            for parameter in parameters([(lane, what) for what in whats(lane)]):
                found.append(pytest.param(behavior, *parameter.values, marks=parameter.marks, id=f"{behavior}-{parameter.id}"))
    return pytest.mark.parametrize(("behavior", "lane", "what"), found)
