"""cupy-cuda over caches on a GPU: which kernel serves which cache, and that it reads keys of the sequences alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_sel.serving import selection_attention_with_kvcache
from tests.helpers.cache_cases import LENGTHS, Cache, check, make_cache
from tests.helpers.gpus import needs
from tests.helpers.graphs import no_waiting

pytestmark = [pytest.mark.gpu, needs("cupy-cuda")]
MANY = LENGTHS * 16  # sequences: more rows than half of the multiprocessors


def gpu_cache(page_size: int | None, **sizes: Any) -> Cache:
    """NaN wherever no sequence has a key."""
    return make_cache(
        page_size=page_size, **{"dtype": torch.bfloat16, "device": "cuda", "Dk": 128, "Dv": 128, "h": 16, "block": 64, **sizes}
    )


@pytest.mark.parametrize("S_q", [1, 4])
@pytest.mark.parametrize("page_size", [None, 16, 64])
def test_a_step_is_one_launch_that_never_waits(page_size: int | None, S_q: int, started: list[str]) -> None:
    cache = gpu_cache(page_size, lengths=MANY, S_q=S_q)
    selection_attention_with_kvcache(*cache, backend="cupy-cuda")
    started.clear()
    with no_waiting():
        selection_attention_with_kvcache(*cache, backend="cupy-cuda")
    assert len(started) == 1


@pytest.mark.parametrize("ahead", ["a kernel", "a copy", "two streams"])
@pytest.mark.parametrize("lengths", [LENGTHS, MANY])
def test_a_graph_may_have_anything_ahead_of_a_step(lengths: tuple[int, ...], ahead: str) -> None:
    """A kernel that is started early waits for what writes its queries."""
    cache = gpu_cache(64, lengths=lengths)
    wanted = check(cache, "cupy-cuda")
    q = torch.zeros_like(cache.q)
    half, rest = (x.clone() for x in (cache.q[: len(lengths) // 2], cache.q[len(lengths) // 2 :]))
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        if ahead == "two streams":
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                q[: len(half)].mul_(0).add_(half)
            q[len(half) :].mul_(0).add_(rest)
            torch.cuda.current_stream().wait_stream(side)
        else:
            for to, values in ((q[: len(half)], half), (q[len(half) :], rest)):
                to.copy_(values) if ahead == "a copy" else to.mul_(0).add_(values)
        found = selection_attention_with_kvcache(q, *cache[1:], return_lse=True, backend="cupy-cuda")
    for _ in range(3):
        q.fill_(9.0)
        graph.replay()
        assert all(map(torch.equal, found, wanted))
