"""KV caches on a GPU: every backend, CUDA graphs over caches that change in place, no waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_sel.core import registry
from nsa_sel.oracle import oracle_forward
from nsa_sel.serving import selection_attention_with_kvcache
from tests.helpers.cache_cases import LENGTHS, Cache, check, gathered, make_cache, positions
from tests.helpers.cases import assert_within_twice_baseline, plain_torch
from tests.helpers.graphs import no_waiting

pytestmark = pytest.mark.gpu


def gpu_cache(page_size: int | None, **sizes: object) -> Cache:
    return make_cache(page_size=page_size, **{"dtype": torch.bfloat16, "device": "cuda", "Dk": 64, "Dv": 128, **sizes})  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [16, 24, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_many_rows_use_tma_where_pages_hold_whole_steps(
    page_size: int, dtype: torch.dtype, logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough rows to fill the GPU are not split; TMA needs Hopper or newer."""
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    check(gpu_cache(page_size, lengths=LENGTHS * 64, S_q=2, dtype=dtype), "triton-group")
    configs = [event["config"] for event in logged("sel.triton.kernel")]
    tma = torch.cuda.get_device_capability() >= (9, 0) and page_size % 16 == 0
    assert [config.split(":")[0].split("-wide")[0] for config in configs] == [f"triton-group/decode-{'blocks' if tma else 'pages'}"]


@pytest.mark.parametrize("page_size", [None, 16])
def test_calls_never_wait_for_the_device(page_size: int | None) -> None:
    cache = gpu_cache(page_size)
    for backend in ("triton-group", "sdpa-packed", None):
        selection_attention_with_kvcache(*cache, backend=backend)
        with no_waiting():
            selection_attention_with_kvcache(*cache, backend=backend)


def test_pools_may_have_more_than_two_to_the_31_elements() -> None:
    """The last pages of a pool that 32-bit offsets can't reach."""
    D, page_size = 128, 64
    pages = 2**31 // (D * page_size) + 8
    pool = torch.empty(pages, page_size, 1, D, dtype=torch.bfloat16, device="cuda")
    small = make_cache((150,), page_size, G=1, Dk=D, Dv=D, dtype=torch.bfloat16, device="cuda")
    assert small.block_table is not None
    pool[-6:] = small.k_cache
    far = small._replace(
        k_cache=pool, v_cache=pool, block_table=torch.where(small.block_table < 0, -1, small.block_table + pages - 6).int()
    )
    near = small._replace(v_cache=small.k_cache)
    k, v = gathered(near)
    exact, baseline = (of(near.q, k, v, near.selection.ranges, q_pos=positions(near)) for of in (oracle_forward, plain_torch))
    with_cuda = ("cupy-cuda",) if not registry.missing("cupy-cuda") else ()
    for backend in ("triton-group", "sdpa-packed", *with_cuda):
        o = selection_attention_with_kvcache(*far, backend=backend)
        assert_within_twice_baseline(o, exact[0], baseline[0], backend)
