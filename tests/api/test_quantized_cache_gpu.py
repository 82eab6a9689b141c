"""e4m3 caches on a GPU: every backend that reads them, NaN among the numbers, CUDA graphs over scales that change in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_sel.core import registry
from nsa_sel.serving import selection_attention_with_kvcache
from tests.helpers.cache_cases import LENGTHS
from tests.helpers.graphs import no_waiting
from tests.helpers.quantized_cases import EACH, QuantizedCache, check_quantized, make_quantized, replayed_with

_SM = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1] if torch.cuda.is_available() else 0
pytestmark = pytest.mark.gpu
NAMES = [
    name
    for name, backend in registry.backends().items()
    if "cuda" in backend.limits.dtypes and backend.limits.quantized.get("e4m3", 1000) <= _SM and not registry.missing(name)
    if backend.quantized_by is None  # those of whole steps alone: test_quantized_cuda_gpu.py
]


def gpu_cache(each: str | None, page_size: int | None, **sizes: Any) -> QuantizedCache:
    return make_quantized(each, page_size, **{"dtype": torch.bfloat16, "device": "cuda", "Dk": 64, "Dv": 128, **sizes})


@pytest.mark.parametrize(("page_size", "each"), [(None, None), (None, "head"), (16, "tensor"), (16, "page"), (64, None), (256, "page")])
@pytest.mark.parametrize("backend", NAMES)
def test_caches_match_the_oracle(backend: str, page_size: int | None, each: str | None) -> None:
    for S_q, block, h in ((1, 64, 16), (8, 32, 4)):
        check_quantized(gpu_cache(each, page_size, S_q=S_q, block=block, h=h), backend)
    check_quantized(gpu_cache(each, page_size, S_q=2, block=None, dtype=torch.float16), backend)


@pytest.mark.parametrize(("page_size", "each"), [(None, "head"), (24, "page"), (64, "head"), (64, "page")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_many_rows_use_tma_where_pages_hold_whole_steps(
    page_size: int | None, each: str, dtype: torch.dtype, logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    check_quantized(gpu_cache(each, page_size, lengths=LENGTHS * 64, S_q=2, block=32, dtype=dtype), "triton-group")
    configs = [event["config"] for event in logged("sel.triton.kernel")]
    tma = torch.cuda.get_device_capability() >= (9, 0) and page_size != 24
    assert [config.split(":")[0].split("-wide")[0] for config in configs] == [f"triton-group/decode-{'blocks' if tma else 'pages'}"]


@pytest.mark.parametrize("exponent", [-60, -8, 0, 12, 60])
def test_queries_of_any_magnitude_keep_their_digits(exponent: int) -> None:
    """Queries of bfloat16 are scaled to float16, numbers of a row that differ by 2^16 among them."""
    given = gpu_cache("head", 64, lengths=(150,), h=16)
    spread = 2.0 ** torch.arange(-16, 16, 32 / 64, device="cuda").round()
    q = (given.cache.q.float() * spread * 2.0**exponent).to(torch.bfloat16)
    scales = {name: scale * 2.0**-exponent / 64 if name == "k_scale" else scale for name, scale in given.scales.items()}
    exact = given.exact._replace(q=q, k_cache=given.exact.k_cache * 2.0**-exponent / 64)
    check_quantized(given._replace(cache=given.cache._replace(q=q), scales=scales, exact=exact), "triton-group")


@pytest.mark.parametrize("backend", NAMES)
def test_nan_reaches_the_rows_that_select_it_alone(backend: str) -> None:
    given = gpu_cache("page", 16, lengths=(40, 40))
    o, lse = check_quantized(given, backend)
    table = given.cache.block_table
    assert table is not None
    for name in ("k_cache", "v_cache"):
        stored = getattr(given.cache, name).clone()
        stored[table[0, 0].long(), 3, 0, 5] = torch.nan  # key 3 of the first sequence and group: its first block is always selected
        spoilt, spoilt_lse = selection_attention_with_kvcache(
            *given.cache._replace(**{name: stored}), **given.scales, return_lse=True, backend=backend
        )
        assert bool(spoilt[0, :, 0].isnan().any(-1).all())
        assert bool(spoilt_lse[0, :, 0].isnan().all()) == (name == "k_cache")
        for new, old in ((spoilt, o), (spoilt_lse, lse)):
            assert torch.equal(new[1], old[1])
            assert torch.equal(new[0, :, 1], old[0, :, 1])


@pytest.mark.parametrize(("page_size", "each"), [(None, "head"), (16, "page")])
@pytest.mark.parametrize("backend", NAMES)
def test_a_graph_follows_writes_into_its_inputs(backend: str, page_size: int | None, each: str) -> None:
    """Scales, lengths, tables, selections, queries and pages; o and lse held NaN. Bit-equal to an eager call."""
    first, other = (gpu_cache(each, page_size, lengths=lengths, seed=seed) for lengths, seed in ((LENGTHS, 0), ((150, 9, 0, 1), 1)))
    assert all(map(torch.equal, replayed_with(first, other, backend), check_quantized(other, backend)))


@pytest.mark.parametrize("each", EACH)
def test_calls_never_wait_for_the_device(each: str | None) -> None:
    given = gpu_cache(each, 16)
    for backend in (*NAMES, None):
        selection_attention_with_kvcache(*given.cache, **given.scales, backend=backend)
        with no_waiting():
            selection_attention_with_kvcache(*given.cache, **given.scales, backend=backend)
