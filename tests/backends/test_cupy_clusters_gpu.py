"""Clusters of every size that share a row of whole blocks, on Hopper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nsa_sel.backends.cupy_cuda import whole_blocks
from nsa_sel.serving import selection_attention_with_kvcache
from tests.helpers.cache_cases import Cache, check, make_cache
from tests.helpers.gpus import needs, needs_hopper

pytestmark = [pytest.mark.gpu, needs("cupy-cuda"), needs_hopper]

LENGTHS = (0, 1, 9, 150, 600, 2048)  # of no key, one step, and fewer steps than a cluster has CTAs


@pytest.fixture(params=[1, 2, 4, 8, 16])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """CTAs of a row, whatever the sizes."""
    monkeypatch.setattr(whole_blocks, "cluster_size", lambda *sizes: request.param)
    whole_blocks.plan_of.cache_clear()
    yield request.param
    whole_blocks.plan_of.cache_clear()


def gpu_cache(page_size: int | None, **sizes: object) -> Cache:
    """NaN wherever no sequence has a key."""
    facts = {"lengths": LENGTHS, "h": 16, "Dk": 128, "Dv": 128, "n": 16, "block": 64, "room": 2048}
    return make_cache(page_size=page_size, dtype=torch.bfloat16, device="cuda", **{**facts, **sizes})  # type: ignore[arg-type]


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


def test_more_clusters_than_run_at_once(cluster: int) -> None:
    check(gpu_cache(64, lengths=LENGTHS * 30, n=5), "cupy-cuda")
