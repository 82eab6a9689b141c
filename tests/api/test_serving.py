"""Decoding over contiguous and paged KV caches, against the oracle on the gathered keys; Triton's kernels are interpreted."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nsa_sel
from nsa_sel.core import registry
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.oracle import oracle_forward
from nsa_sel.selection import Selection
from nsa_sel.serving import selection_attention_with_kvcache
from tests.helpers.caches import LENGTHS, Cache, check, gathered, make_cache, positions
from tests.helpers.cases import assert_gradients, assert_within_twice_baseline, make_grads, plain_torch
from tests.helpers.gpus import no_waiting


@pytest.mark.parametrize("page_size", [16, 24, 64])
def test_only_pages_of_whole_steps_use_tma(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many rows none is split. TMA loads blocks if pages hold whole steps; pointers load the rest."""
    from nsa_sel.backends import triton_group

    loads: list[str] = []
    real = triton_group._blocks
    monkeypatch.setattr(triton_group, "_blocks", lambda *given: (loads.append(given[-1].loads), real(*given))[1])
    check(make_cache(page_size=page_size, S_q=2, block=32), "triton-group")
    assert loads == ["tma" if page_size == 64 else "pointer"]


@pytest.mark.parametrize(("names", "block_l"), [(("pages", "pages-widest"), 32), (("blocks",), 16)], ids=["forced", "of other heads"])
def test_small_pages_never_use_tma(configure: Callable[[str], Path], names: tuple[str, ...], block_l: int) -> None:
    """Whatever a file says: a load of 32 keys (float32) would exceed a page of 16."""
    configs = [f"  triton-group/decode-{name}: {{loads: tma, block_l: {block_l}, num_warps: 1, num_stages: 1}}\n" for name in names]
    configure(f"provenance: a test\nkernels:\n{''.join(configs)}")
    check(make_cache(page_size=16, S_q=2, block=32), "triton-group")


@pytest.mark.parametrize("backend", ["sdpa-packed", "triton-group"])
def test_q_of_four_dimensions_is_one_token(backend: str) -> None:
    cache = make_cache((0, 20))
    o, lse = check(cache, backend)
    one = cache._replace(q=cache.q[:, 0])
    got = selection_attention_with_kvcache(*one, return_lse=True, backend=backend)
    assert torch.equal(got[0], o[:, 0])
    assert torch.equal(got[1], lse[:, 0])
    assert torch.equal(selection_attention_with_kvcache(*one, backend=backend), o[:, 0])


@pytest.mark.parametrize(("lengths", "sizes"), [((9, 150), (16, 64)), (LENGTHS, (32, 64))], ids=["split", "tma"])
def test_pages_are_bit_equal_to_a_contiguous_cache(lengths: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """With triton-group: rows are split equally, and TMA steps are equal where a page holds one."""
    G = 1 if len(lengths) == 2 else 2
    whole = check(make_cache(lengths, None, block=32, G=G), "triton-group")
    for page_size in sizes:
        paged = check(make_cache(lengths, page_size, block=32, G=G), "triton-group")
        assert all(torch.equal(a, b) for a, b in zip(paged, whole, strict=True))


def test_gradients_over_a_contiguous_cache() -> None:
    cache = make_cache((0, 2, 9, 130), page_size=None, S_q=4)
    q, k_cache, v_cache = (x.nan_to_num().requires_grad_() for x in cache[:3])
    cache = cache._replace(q=q, k_cache=k_cache, v_cache=v_cache)
    o, lse = selection_attention_with_kvcache(*cache, return_lse=True, backend="sdpa-packed")
    do, dlse = make_grads(q, v_cache)
    dlse = torch.where(lse.detach() == -math.inf, 0.0, dlse)
    got = torch.autograd.grad((o, lse), (q, k_cache, v_cache), (do, dlse))
    wanted = oracle_forward(*(x.detach() for x in (q, *gathered(cache))), cache.selection.ranges, q_pos=positions(cache))
    baseline = plain_torch(q, *gathered(cache), cache.selection.ranges, q_pos=positions(cache))
    assert_within_twice_baseline(o, wanted[0], baseline[0], "o")
    k, v = (x.detach().transpose(1, 2) for x in (k_cache, v_cache))
    got = (got[0], got[1].transpose(1, 2), got[2].transpose(1, 2))
    assert_gradients(got, q.detach(), k, v, cache.selection.ranges, do, dlse, q_pos=positions(cache))


def test_pages_refuse_gradients() -> None:
    cache = make_cache()
    for name in ("q", "k_cache", "v_cache"):
        wanted = cache._replace(**{name: getattr(cache, name).clone().requires_grad_()})
        with pytest.raises(ArgumentError, match=rf"^{name} is .* requires gradients.*no_grad"):
            selection_attention_with_kvcache(*wanted)
        with torch.no_grad():
            selection_attention_with_kvcache(*wanted)


def test_backends_of_whole_blocks_refuse_pages() -> None:
    for backend in ("triton-tile", "triton-block"):
        with pytest.raises(BackendError, match=r"request\.page_size"):
            selection_attention_with_kvcache(*make_cache(), backend=backend)
        check(make_cache((9, 70), page_size=None, S_q=4, G=1), backend)


def test_requests_with_and_without_pages_differ_only_in_page_size() -> None:
    import msgspec

    requests = []
    for page_size in (None, 64):
        check(make_cache(page_size=page_size), "triton-group")
        requests.append(nsa_sel.decisions()[-1].request)
    assert requests[0] == msgspec.structs.replace(requests[1], page_size=None)
    assert "pages of 64 keys" in nsa_sel.describe(nsa_sel.decisions()[-1])


def test_events_count_logical_positions_and_compare_with_pages(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    monkeypatch.setenv("NSA_DEBUG_COMPARE", "1")
    cache = make_cache(n=12, block=16)  # everything
    check(cache, "triton-group")
    assert logged("sel.triton.reads")[-1]["tokens"] == sum(LENGTHS) * 2
    assert logged("sel.compare")[-1]["mae"] < 1e-6


def test_the_fallback_reads_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()

    def broken(call: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(registry.load("numba"), "forward", broken)
    with pytest.warns(RuntimeWarning, match="sdpa-packed runs calls"):
        o = selection_attention_with_kvcache(*cache)
    assert nsa_sel.decisions()[-1].forward == "sdpa-packed"
    assert torch.equal(o, check(cache, "sdpa-packed")[0])


def test_empty_caches_give_empty_results() -> None:
    cache = make_cache((0, 0))
    check(cache, None)
    empty = cache._replace(block_table=cache.block_table[:, :0], q=cache.q[:, :0], selection=Selection(cache.selection.ranges[:, :0]))
    assert selection_attention_with_kvcache(*empty).shape == (2, 0, 2, 2, 8)
    no_sequences = Cache(cache.q[:0], *cache[1:3], Selection(cache.selection.ranges[:0]), cache.cache_seqlens[:0], cache.block_table[:0])
    assert selection_attention_with_kvcache(*no_sequences).shape == (0, 1, 2, 2, 8)


def test_warmup_runs_over_pages() -> None:
    (warmed,) = nsa_sel.warmup("cpu", [{"S": 1, "S_kv": 100, "page_size": 16, "dtype": "float32", "needs_grad": False}])
    assert warmed.forward == "numba"
    assert (nsa_sel.decisions()[-1].request.page_size, nsa_sel.decisions()[-1].request.S) == (16, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": 3}, r"^q is a int; allowed: a torch.Tensor"),
        ({"q": torch.zeros(2, 4)}, r"^q is of shape \(2, 4\); allowed: \[B,S_q,G,h,Dk\]"),
        ({"k_cache": torch.zeros(9, 2, 16, 16)}, r"^k_cache is of shape .* allowed: \[pages, page_size, G=2, D\]"),
        ({"v_cache": torch.zeros(9, 32, 2, 8)}, r"^v_cache is of shape"),
        ({"k_cache": torch.zeros(15, 16, 2, 16, dtype=torch.float64)}, r"^k_cache is of dtype .*call k_cache\.to\(q\.dtype\)"),
        ({"cache_seqlens": 5}, r"^cache_seqlens is a int"),
        ({"cache_seqlens": torch.zeros(4)}, r"^cache_seqlens is torch.float32 of shape \(4,\)"),
        ({"cache_seqlens": torch.tensor([0, 1, 2, 193])}, r"^cache_seqlens is from 0 to 193; allowed: lengths in \[0, 192\]"),
        ({"cache_seqlens": torch.tensor([0, 1, 2, -1])}, r"^cache_seqlens is from -1 to 2"),
        ({"cache_seqlens": torch.tensor([0, 1, 9, 161])}, r"^block_table\[3, 10\] is -1; allowed: pages in \[0, 15\) for all keys"),
        ({"block_table": None}, r"^k_cache is of shape \(15, .* allowed: \[B=4, S_max, G=2, D\].* pass block_table=, int32 \[B, pages"),
        ({"block_table": torch.zeros(4, 12)}, r"^block_table is torch.float32"),
        ({"block_table": torch.zeros(4, dtype=torch.int32)}, r"^block_table is torch.int32 of shape \(4,\)"),
        ({"block_table": torch.zeros(12, 4, dtype=torch.int32).t()}, r"^block_table is of strides"),
        ({"block_table": torch.zeros(4, 0, dtype=torch.int32)}, r"^q is of S_q = 1 tokens; allowed: at most the 0"),
        ({"selection": torch.zeros(4, 2, 2, 1, 2, dtype=torch.int32)}, r"^selection is over rows"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        selection_attention_with_kvcache(*make_cache()._replace(**changes))


def gpu_cache(page_size: int | None, **sizes: object) -> Cache:
    return make_cache(page_size=page_size, **{"dtype": torch.bfloat16, "device": "cuda", "Dk": 64, "Dv": 128, **sizes})  # type: ignore[arg-type]


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16])
def test_calls_never_wait_for_the_device(page_size: int | None) -> None:
    cache = gpu_cache(page_size)
    for backend in ("triton-group", "sdpa-packed", None):
        selection_attention_with_kvcache(*cache, backend=backend)
        with no_waiting():
            selection_attention_with_kvcache(*cache, backend=backend)


@pytest.mark.gpu
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
