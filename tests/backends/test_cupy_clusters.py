"""Hopper's kernel of whole blocks without a GPU: emulated with its TMA loads and barriers, for every number of CTAs that share a row."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import whole_blocks
from nsa_sel.core.call import Call
from nsa_sel.selection import Selection
from nsa_sel.serving import selection_attention_with_kvcache
from nsa_sel.settings.config import settings_for
from tests.helpers.caches import Cache, check, gathered, make_cache, positions
from tests.helpers.cases import assert_forward
from tests.helpers.checks import new_memory_is_nan
from tests.helpers.cuda import BACKWARDS, EAGER, GPU, emulated, needs_compiler
from tests.helpers.gpus import needs, needs_hopper

LENGTHS = (0, 1, 150, 640)  # without keys; of fewer steps than a cluster has CTAs


def cache_of(page_size: int | None, **sizes: object) -> Cache:
    """NaN wherever no sequence has a key."""
    facts = {"lengths": LENGTHS, "G": 1, "h": 3, "Dk": 64, "Dv": 64, "block": 64, "room": 640, "dtype": torch.float16}
    return make_cache(page_size=page_size, **{**facts, **sizes})  # type: ignore[arg-type]


def forward(cache: Cache, cluster: int) -> tuple[Tensor, Tensor]:
    """o and lse of four rows, checked, on a GPU that runs four clusters of so many CTAs at once."""
    gpu = msgspec.structs.replace(GPU, sm_count=-(-5 * cluster // 2))
    assert whole_blocks.cluster_size(4, cache.selection.n, 2 * gpu.sm_count) == cluster
    k, v = (x.transpose(1, 2) for x in cache[1:3])
    scale = cache.q.shape[-1] ** -0.5
    call = Call(cache.q, k, v, cache.selection, None, scale, settings_for(gpu), gpu, cache.cache_seqlens, cache.block_table)
    assert whole_blocks.supports(call)
    with new_memory_is_nan():
        found = whole_blocks.forward(call)
    assert_forward(found, cache.q, *gathered(cache), cache.selection.ranges, q_pos=positions(cache))
    return found


@needs_compiler
@pytest.mark.parametrize(("cluster", "page_size"), [(1, None), (2, 64), (8, 64)])
def test_rows_are_shared_in_any_order(monkeypatch: pytest.MonkeyPatch, cluster: int, page_size: int | None) -> None:
    """The same bits whichever thread or CTA runs first, and whenever its copies arrive."""
    cache, found = cache_of(page_size, n=max(3, cluster)), []
    for mode in (0, BACKWARDS | EAGER):
        emulated(monkeypatch, mode)
        found.append(forward(cache, cluster))
    assert all(map(torch.equal, *found))


@needs_compiler
def test_tokens_blocks_of_two_steps_and_many_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps than a warp looks at at once, and more heads than a warp has: 34 ranges of 128 keys over two CTAs."""
    emulated(monkeypatch, BACKWARDS)
    cache = cache_of(128, lengths=(200, 4480), S_q=2, h=17, n=34, block=128, room=4480)
    holes = cache.selection.ranges.clone()
    holes[:, :, :, 1:30] = 0
    forward(cache._replace(selection=Selection(holes, 128)), 2)


@pytest.mark.parametrize(
    ("work", "steps", "cluster", "first", "stages"),
    [
        (1, 8, 8, False, 1),
        (4, 16, 16, False, 1),
        (14, 32, 16, False, 2),
        (15, 32, 8, False, 2),
        (30, 32, 8, False, 2),
        (60, 32, 4, False, 2),
        (64, 16, 2, False, 2),
        (64, 32, 2, True, 2),  # both kernels find room, and CTAs have many steps
        (100, 32, 2, False, 2),
        (132, 16, 2, False, 2),
        (133, 16, 1, False, 2),
        (256, 16, 1, False, 3),  # all multiprocessors are full
        (5, 3, 2, False, 2),
    ],
)
def test_few_rows_are_shared_by_as_many_multiprocessors_as_run_at_once(
    work: int, steps: int, cluster: int, first: bool, stages: int
) -> None:
    """Of the H200's 132, two CTAs each."""
    plan = whole_blocks.plan_of(work, 16, 128, 128, steps, 64, True, 132, 227 << 10)
    macros = dict(plan.macros)
    assert (macros["CLUSTER"], macros["NEXT_FIRST"], macros["STAGES"]) == (cluster, first, stages)
    assert plan.ctas == work * cluster


LENGTHS_GPU = (0, 1, 9, 150, 600, 2048)  # of no key, one step, and fewer steps than a cluster has CTAs


@pytest.fixture(params=[1, 2, 4, 8, 16])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """CTAs of a row, whatever the sizes."""
    monkeypatch.setattr(whole_blocks, "cluster_size", lambda *sizes: request.param)
    whole_blocks.plan_of.cache_clear()
    yield request.param
    whole_blocks.plan_of.cache_clear()


def gpu_cache(page_size: int | None, **sizes: object) -> Cache:
    """NaN wherever no sequence has a key."""
    facts = {"lengths": LENGTHS_GPU, "h": 16, "Dk": 128, "Dv": 128, "n": 16, "block": 64, "room": 2048}
    return make_cache(page_size=page_size, dtype=torch.bfloat16, device="cuda", **{**facts, **sizes})  # type: ignore[arg-type]


@pytest.mark.gpu
@needs("cupy-cuda")
@needs_hopper
@pytest.mark.parametrize("first", [False, True])
def test_a_cluster_reads_a_cache(cluster: int, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits again, in pages or not, and where a graph starts every kernel before the one ahead has ended."""
    monkeypatch.setattr(whole_blocks, "next_first", lambda *sizes: first)
    for page_size, sizes in ((64, {}), (None, {}), (128, {"h": 8, "block": 128, "S_q": 3}), (64, {"h": 20, "Dk": 64, "n": 3})):
        cache = gpu_cache(page_size, **sizes)
        wanted = check(cache, "cupy-cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [selection_attention_with_kvcache(*cache, return_lse=True, backend="cupy-cuda") for _ in range(20)]
        for x in found:
            x[0].fill_(torch.nan)
        for _ in range(20):
            graph.replay()
        assert all(torch.equal(x, y) for pair in found for x, y in zip(pair, wanted, strict=True))


@pytest.mark.gpu
@needs("cupy-cuda")
@needs_hopper
def test_more_clusters_than_run_at_once(cluster: int) -> None:
    check(gpu_cache(64, lengths=LENGTHS_GPU * 30, n=5), "cupy-cuda")
