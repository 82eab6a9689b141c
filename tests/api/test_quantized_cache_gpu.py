"""e4m3 caches on a GPU: every backend that reads them, NaN among the numbers, CUDA graphs over scales that change in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_sel.core import registry
from tests.helpers.cache_cases import LENGTHS, replayed_with
from tests.helpers.graphs import no_waiting
from tests.helpers.quantized_cases import (
    EACH,
    QuantizedCache,
    called,
    check_quantized,
    make_quantized,
    uneven_queries,
)

_SM = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1] if torch.cuda.is_available() else 0
pytestmark = pytest.mark.gpu
# Backends by the least page, and block, that they read: whole steps (more of them in test_quantized_cuda_gpu.py), or any.
PAGES = {
    name: 16 if backend.quantized_by is None else 64
    for name, backend in registry.backends().items()
    if "cuda" in backend.limits.dtypes and backend.limits.quantized.get("e4m3", 1000) <= _SM and not registry.missing(name)
}


def gpu_cache(each: str | None, page_size: int | None, **sizes: Any) -> QuantizedCache:
    return make_quantized(each, page_size, **{"dtype": torch.bfloat16, "device": "cuda", "Dk": 64, "Dv": 128, **sizes})


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
@pytest.mark.parametrize("backend", PAGES)
def test_queries_of_any_magnitude_keep_their_digits(backend: str, exponent: int) -> None:
    """Queries of bfloat16 are scaled to float16."""
    check_quantized(uneven_queries(gpu_cache("head", 64, lengths=(150,), h=16, block=64), exponent), backend)


@pytest.mark.parametrize("each", ["head", "page"])
@pytest.mark.parametrize(("backend", "page_size"), PAGES.items())
def test_a_graph_follows_writes_into_its_inputs(backend: str, page_size: int, each: str) -> None:
    """Scales, lengths, tables, selections, queries and pages; o and lse held NaN. Bit-equal to an eager call."""
    sizes = {"page_size": page_size if each == "page" else None, "block": page_size}
    first, other = (gpu_cache(each, lengths=lengths, seed=seed, **sizes) for lengths, seed in ((LENGTHS, 0), ((150, 9, 0, 1), 1)))
    found = replayed_with(first.cache, other.cache, backend, first.scales, other.scales)
    assert all(map(torch.equal, found, check_quantized(other, backend)))


@pytest.mark.parametrize("each", EACH)
@pytest.mark.parametrize(("backend", "page_size"), [*PAGES.items(), (None, 16)])
def test_calls_never_wait_for_the_device(backend: str | None, page_size: int, each: str | None) -> None:
    given = gpu_cache(each, page_size, block=page_size)
    called(given, backend)
    with no_waiting():
        called(given, backend)
