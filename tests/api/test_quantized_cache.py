"""Decoding over e4m3 caches, against the float64 oracle on the numbers that they stand for; Triton's kernels are interpreted.

The interpreter reads e4m3 exactly, but for NaN, which it takes for 480: keys and values of NaN are tested on a GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import nsa_sel
from nsa_sel.core import registry
from nsa_sel.core.request import DeviceInfo, example_request
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.quantize import STORED
from nsa_sel.selection import Selection
from nsa_sel.serving import selection_attention_with_kvcache
from tests.helpers.caches import (
    EACH,
    LENGTHS,
    Cache,
    QuantizedCache,
    called,
    check_quantized,
    large_keys,
    make_quantized,
    replayed_with,
    shared_by_sequences,
    uneven_queries,
)
from tests.helpers.gpus import needs, needs_hopper, no_waiting

READERS = ("sdpa-packed", "triton-group")
FEW = (0, 1, 40)  # lengths: one Triton program takes 20 ms


@pytest.mark.parametrize(("page_size", "each"), [(None, "head"), (64, "page"), (16, "page")])
def test_padding_and_future_blocks_between_others_count_for_nothing(page_size: int | None, each: str) -> None:
    given = make_quantized(each, page_size, S_q=2, Dv=16, lengths=(100, 150), dtype=torch.float16)  # TMA wants rows of 16 bytes
    blocks = torch.tensor([2, -1, 0, 5, -1, 1]).expand(2, 2, 2, 6).int()
    check_quantized(given.replaced(selection=Selection.from_blocks(blocks, 32, disjoint=True)), "triton-group")


@pytest.mark.parametrize("backend", READERS)
def test_ranges_may_cross_pages(backend: str) -> None:
    given = make_quantized("page", 16, lengths=(64, 150), block=None, S_q=2, G=1)
    check_quantized(given, backend)
    longest = torch.tensor([15, 49]).expand(2, 2, 1, 1, 2)  # 34 keys on four pages, as many as 34 keys can touch
    check_quantized(given.replaced(selection=Selection(longest, None, 34)), backend)


@pytest.mark.parametrize("backend", READERS)
def test_a_prefill_attends_over_a_cache(backend: str) -> None:
    for page_size, each in ((None, "tensor"), (16, "page")):
        check_quantized(make_quantized(each, page_size, S_q=12, lengths=(12, 30), G=1, room=48, n=2, dtype=torch.float16), backend)


@pytest.mark.parametrize("backend", READERS)
@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_scales_may_be_zero_or_negative(backend: str, factor: float) -> None:
    check_quantized(make_quantized("head", 16, G=1, lengths=FEW).scaled(factor), backend)


@pytest.mark.parametrize("backend", READERS)
@pytest.mark.parametrize("factor", [1e-3, 100.0])
def test_weights_of_float16_keep_their_digits_beside_small_and_large_scales(backend: str, factor: float) -> None:
    """A weight times the scale of its page alone would be subnormal, or not exact beside weights of other pages."""
    check_quantized(make_quantized("page", 16, G=1, lengths=(40, 60), n=3, dtype=torch.float16).scaled(v=factor), backend)


@pytest.mark.parametrize("S_q", [1, 5])
@pytest.mark.parametrize("backend", READERS)
def test_keys_may_be_larger_than_float16_has_numbers(backend: str, S_q: int) -> None:
    for page_size, each in ((None, "head"), (16, "page")):
        sizes = {"S_q": S_q, "lengths": (5, 30), "G": 1, "room": 48, "n": 2}
        check_quantized(large_keys(make_quantized(each, page_size, dtype=torch.float16, **sizes)), backend)


@pytest.mark.parametrize("backend", READERS)
def test_one_scale_in_other_shapes_gives_equal_results(backend: str) -> None:
    given = make_quantized("tensor", 16, lengths=(40,))
    wanted = check_quantized(given, backend)
    for shape in ((), (1,), (2,)):
        scales = {name: scale.expand(shape) if shape else scale.squeeze() for name, scale in given.scales.items()}
        assert all(map(torch.equal, check_quantized(given._replace(scales=scales), backend), wanted))
    mixed = {**given.scales, "v_scale": given.scales["v_scale"].expand(len(given.cache.v_cache), 2)}
    check_quantized(given._replace(scales=mixed), backend)


@pytest.mark.parametrize("backend", READERS)
def test_pages_of_any_layout_give_equal_results(backend: str) -> None:
    """K and V of one buffer of bytes, as vLLM has them, and heads before keys: views, without copies."""
    given = make_quantized("page", 32, lengths=(40, 61), n=2, Dv=16, G=1)
    cache = given.cache
    wanted = check_quantized(given, backend)
    both = torch.stack((cache.k_cache.view(torch.uint8), cache.v_cache.view(torch.uint8)), 1).view(STORED)
    by_heads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (cache.k_cache, cache.v_cache)]
    for k_cache, v_cache in (both.unbind(1), by_heads):
        got = check_quantized(given.replaced(k_cache=k_cache, v_cache=v_cache), backend)
        assert all(map(torch.equal, got, wanted))


def test_packed_sdpa_gathers_within_its_workspace(configure: Callable[[str], Path]) -> None:
    given = make_quantized("page", 16, S_q=4)
    wanted = check_quantized(given, "sdpa-packed")
    configure("provenance: a test\nruntime: {workspace_bytes: 65536}\n")
    got = check_quantized(given, "sdpa-packed")
    assert all(map(torch.equal, got, wanted))


def test_events_count_the_bytes_of_stored_numbers(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    monkeypatch.setenv("NSA_DEBUG_COMPARE", "1")
    check_quantized(make_quantized("head", 16, n=12, lengths=(0, 40), G=1), "triton-group")
    assert logged("sel.triton.reads")[-1]["bytes"] == 40 * (16 + 8)
    assert logged("sel.compare")[-1]["mae"] < 1e-6


def test_quantized_caches_refuse_gradients() -> None:
    for page_size in (None, 16):
        given = make_quantized("head", page_size)
        wanted = given.cache._replace(q=given.cache.q.clone().requires_grad_())
        with pytest.raises(ArgumentError, match=r"^q is .* requires gradients.*none over a quantized cache.*no_grad|^q is .*paged"):
            selection_attention_with_kvcache(*wanted, **given.scales)
        with torch.no_grad():
            selection_attention_with_kvcache(*wanted, **given.scales)
        scales = {**given.scales, "k_scale": given.scales["k_scale"].clone().requires_grad_()}
        with pytest.raises(ArgumentError, match=r"^k_scale is a tensor that requires gradients"):
            selection_attention_with_kvcache(*given.cache, **scales)


def test_other_backends_refuse_quantized_caches() -> None:
    given = make_quantized("head", None)
    for backend in ("numba", "triton-token", "triton-tile", "triton-block"):
        with pytest.raises(BackendError, match=r"request\.quantized is e4m3/head"):
            selection_attention_with_kvcache(*given.cache, **given.scales, backend=backend)
    check_quantized(given, None)


@pytest.mark.parametrize(("sm", "forward"), [(80, "sdpa-packed"), (89, "sdpa-packed"), (90, "triton-group"), (100, "triton-group")])
def test_gpus_without_e4m3_take_packed_sdpa(sm: int, forward: str) -> None:
    """SM 8.0 has no instruction for it; on SM 8.9 Triton is off by the device rule."""
    device = DeviceInfo(kind="cuda", name="a GPU", sm=sm, sm_count=100, shared_memory=99 << 10)
    request = msgspec.structs.replace(example_request(), S=1, page_size=64, quantized="e4m3/head")
    decision = nsa_sel.explain_request(request, device)
    assert decision.forward == forward
    (verdict,) = (verdict for verdict in decision.verdicts if verdict.backend == "triton-group")
    assert ("quantized-sm" in {reason.code for reason in verdict.forward}) == (sm < 89)
    assert "quantized KV cache (e4m3/head)" in nsa_sel.describe(decision)


@pytest.mark.parametrize(
    ("sm", "facts", "found"),
    [
        (90, {}, None),
        (90, {"page_size": None, "S": 4, "block_size": 128}, None),
        (80, {}, ("quantized-sm", 80, ">= 90 for e4m3")),
        (100, {}, ("quantized-steps", "e4m3/head, blocks of 64, Dk 128, Dv 128, SM 10.0, pages of 64", "SM 9.0")),
        (90, {"page_size": 16}, ("quantized-steps", "pages of 16", "blocks and pages of a multiple of 64 keys")),
        (90, {"block_size": 32}, ("quantized-steps", "blocks of 32", "blocks and pages of a multiple of 64 keys")),
        (90, {"block_size": None}, ("quantized-steps", "blocks of None", "blocks and pages of a multiple of 64 keys")),
        (90, {"Dk": 192}, ("quantized-steps", "Dk 192", r"Dk and Dv in \(64, 128\)")),
        (90, {"aligned": False}, ("quantized-steps", "not aligned", "16-byte alignment")),
    ],
)
def test_cupy_cuda_reads_whole_steps_of_e4m3_on_hopper(sm: int, facts: dict[str, Any], found: tuple[str, object, str] | None) -> None:
    device = DeviceInfo(kind="cuda", name="a GPU", sm=sm, sm_count=100, shared_memory=227 << 10)
    request = msgspec.structs.replace(example_request(), **{"S": 1, "page_size": 64, "quantized": "e4m3/head", **facts})
    (verdict,) = (verdict for verdict in nsa_sel.explain_request(request, device).verdicts if verdict.backend == "cupy-cuda")
    reasons = [reason for reason in verdict.forward if reason.code.startswith("quantized")]
    assert [reason.code for reason in reasons] == ([] if found is None else [found[0]])
    if found is not None:
        assert str(found[1]) in str(reasons[0].actual)
        assert re.search(found[2], str(reasons[0].required))


def test_nothing_serves_gradients_of_a_quantized_request() -> None:
    request = msgspec.structs.replace(example_request(needs_grad=True), quantized="e4m3")
    decision = nsa_sel.explain_request(request, DeviceInfo(kind="cpu"))
    assert decision.forward is None
    assert all("quantized-grad" in {reason.code for reason in verdict.forward} for verdict in decision.verdicts)


@pytest.mark.parametrize("quantized", ["e4m3", "e4m3/tensor", "e4m3/head", "e4m3/page"])
def test_warmup_runs_over_quantized_caches(quantized: str) -> None:
    for page_size in (16,) if quantized == "e4m3/page" else (None, 16):
        facts = {"S": 1, "S_kv": 100, "dtype": "float32", "needs_grad": False, "page_size": page_size, "quantized": quantized}
        (warmed,) = nsa_sel.warmup("cpu", [facts])
        assert warmed.forward == "sdpa-packed"
        assert nsa_sel.decisions()[-1].request.quantized == quantized


@pytest.mark.parametrize(("page_size", "each"), [(None, None), (None, "head"), (16, "tensor"), (16, "page")])
def test_a_warmed_call_is_of_the_class_of_the_real_one(page_size: int | None, each: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `warmup`, and before the first call, which keeps its scales."""
    given = make_quantized(each, page_size)
    wanted = check_quantized(given, None)
    asked = nsa_sel.decisions()[-1].request
    nsa_sel.warmup("cpu", [asked])
    assert nsa_sel.decisions()[-1].request == asked
    monkeypatch.setenv("NSA_SEL_AUTOTUNE", "warmup")
    nsa_sel.reset()
    assert all(map(torch.equal, check_quantized(given, None), wanted))
    assert [decision.request for decision in nsa_sel.decisions()[-3:]] == [asked] * 3  # the call's, the warm-up's, and the call's again


def _e5m2(cache: Cache) -> dict[str, Any]:
    return {"k_cache": cache.k_cache.to(torch.float8_e5m2)}


ONE, HEAD = torch.ones(1), torch.ones(2)


@pytest.mark.parametrize(
    ("cache", "scales", "message"),
    [
        (_e5m2, {}, r"^k_cache is of dtype torch.float8_e5m2; allowed: .*e5m2 has 2 bits of mantissa.*quantize to torch.float8_e4m3fn"),
        (lambda c: {"v_cache": c.v_cache.to(torch.float8_e5m2)}, {}, r"^v_cache is of dtype torch.float8_e5m2"),
        (lambda c: {"k_cache": c.k_cache.view(torch.uint8)}, {}, r"^k_cache is of dtype torch.uint8.*k_cache\.view\(torch.float8_e4m3fn\)"),
        (lambda c: {"v_cache": c.v_cache.float()}, {}, r"^v_cache is of dtype torch.float32; allowed: k_cache's dtype torch.float8_e4m3fn"),
        (lambda c: {"k_cache": c.k_cache.float()}, {}, r"^v_cache is of dtype torch.float8_e4m3fn; allowed: k_cache's dtype torch.float32"),
        (lambda c: {"q": c.q.double()}, {}, r"^q is of dtype torch.float64; allowed: torch.float16, torch.bfloat16, torch.float32 over"),
        (lambda c: {"q": c.q.to(STORED)}, {}, r"^q is of dtype torch.float8_e4m3fn; allowed: torch.float16"),
        (lambda c: {"k_cache": c.k_cache.float(), "v_cache": c.v_cache.float()}, {"k_scale": ONE}, r"^k_scale is given for an unquantized"),
        (lambda c: {"k_cache": c.k_cache.float(), "v_cache": c.v_cache.float()}, {"v_scale": ONE}, r"^v_scale is given for an unquantized"),
        (lambda c: {}, {"k_scale": ONE}, r"^v_scale is None; allowed: a tensor, as k_scale is.*torch\.ones"),
        (lambda c: {}, {"v_scale": HEAD}, r"^k_scale is None; allowed: a tensor, as v_scale is"),
        (lambda c: {}, {"k_scale": 0.5, "v_scale": ONE}, r"^k_scale is a float; allowed: a torch.Tensor"),
        (
            lambda c: {},
            {"k_scale": ONE, "v_scale": ONE.double()},
            r"^v_scale is of dtype torch.float64; allowed: torch.float32.*v_scale\.float\(\)",
        ),
        (lambda c: {}, {"k_scale": ONE, "v_scale": ONE.half()}, r"^v_scale is of dtype torch.float16"),
        (lambda c: {}, {"k_scale": torch.ones(1, device="meta"), "v_scale": ONE}, r"^k_scale is on meta; allowed: q's device cpu"),
        (
            lambda c: {},
            {"k_scale": torch.ones(3), "v_scale": HEAD},
            r"^k_scale is of shape \(3,\); allowed: one number, \[G\] or \[pages,G\] for G = 2",
        ),
        (lambda c: {}, {"k_scale": HEAD, "v_scale": torch.ones(3, 2)}, r"^v_scale is of shape \(3, 2\); allowed: .*pages = 15"),
        (lambda c: {}, {"k_scale": HEAD, "v_scale": torch.ones(2, 15)}, r"^v_scale is of shape \(2, 15\)"),
    ],
)
def test_bad_arguments_are_refused(cache: Callable[[Cache], dict[str, Any]], scales: dict[str, Any], message: str) -> None:
    given = make_quantized(None).cache
    with pytest.raises(ArgumentError, match=message):
        selection_attention_with_kvcache(*given._replace(**cache(given)), **scales)


def test_a_contiguous_cache_has_no_scales_of_pages() -> None:
    given = make_quantized(None, None).cache
    with pytest.raises(ArgumentError, match=r"^k_scale is of shape \(4, 2\); allowed: one number, \[G\] for G = 2\. .*each group one"):
        selection_attention_with_kvcache(*given, k_scale=torch.ones(4, 2), v_scale=torch.ones(4, 2))


@pytest.mark.parametrize("each", ["tensor", "head", "page"])
def test_quantized_numbers_are_close_to_what_they_stand_for(each: str) -> None:
    x = torch.randn(3, 5, 2, 7, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-6, 1e3])[:, None]
    x[1] = 0
    stored, scale = nsa_sel.quantize_e4m3(x, each)  # type: ignore[arg-type]
    assert (stored.dtype, stored.shape) == (STORED, x.shape)
    assert scale.shape == {"tensor": (1,), "head": (2,), "page": (3, 2)}[each]
    wide = scale.reshape(-1, 1, scale.shape[-1], 1)
    assert bool(((stored.float() * wide - x).abs() <= torch.maximum(x.abs() / 16, wide / 1024)).all())
    assert float(stored.float().abs().max()) == 448
    assert each != "page" or bool((scale[1] == 1).all())


def test_numbers_that_are_not_finite_count_for_no_scale() -> None:
    x = torch.ones(1, 4, 1, 8)
    x[0, 1], x[0, 2] = math.nan, math.inf
    stored, scale = nsa_sel.quantize_e4m3(x, "tensor")
    assert float(scale) == pytest.approx(1 / 448)
    assert stored.float()[0, :, 0, 0].isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize(("each", "shape"), [("tensor", (1,)), ("head", (2,)), ("page", (0, 2))])
def test_scales_of_an_empty_cache_have_its_shape(each: str, shape: tuple[int, ...]) -> None:
    stored, scale = nsa_sel.quantize_e4m3(torch.empty(0, 3, 2, 4), each)  # type: ignore[arg-type]
    assert (stored.shape, scale.shape) == ((0, 3, 2, 4), shape)
    assert bool((scale == 1).all())


def test_scales_of_tiny_numbers_have_a_reciprocal() -> None:
    x = torch.tensor([0.0, 1e-42, -1e-40, 1e-38]).view(4, 1, 1, 1)
    stored, scale = nsa_sel.quantize_e4m3(x, "page")
    assert scale.flatten().tolist() == [1, *[torch.finfo(torch.float32).tiny] * 3]
    assert bool(((stored.float() * scale.view(4, 1, 1, 1) - x).abs() <= torch.maximum(x.abs() / 16, scale.view(4, 1, 1, 1) / 1024)).all())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((3,), r"^x is a int"),
        ((torch.ones(2, 3),), r"^x is torch.float32 of shape \(2, 3\); allowed: a cache \[B,S_max,G,D\]"),
        ((torch.ones(1, 1, 1, 1, dtype=torch.int32),), r"^x is torch.int32"),
        ((torch.ones(1, 1, 1, 1), "row"), r"^each is 'row'; allowed: tensor, head, page"),
    ],
)
def test_what_cannot_be_quantized_is_refused(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        nsa_sel.quantize_e4m3(*given)


_SM = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1] if torch.cuda.is_available() else 0

# Backends by the least page, and block, that they read: whole steps (more of them below), or any.
PAGES = {
    name: 16 if backend.quantized_by is None else 64
    for name, backend in registry.backends().items()
    if "cuda" in backend.limits.dtypes and backend.limits.quantized.get("e4m3", 1000) <= _SM and not registry.missing(name)
}


def gpu_cache(each: str | None, page_size: int | None, **sizes: Any) -> QuantizedCache:
    return make_quantized(each, page_size, **{"dtype": torch.bfloat16, "device": "cuda", "Dk": 64, "Dv": 128, **sizes})


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [-60, -8, 0, 12, 60])
@pytest.mark.parametrize("backend", PAGES)
def test_queries_of_any_magnitude_keep_their_digits(backend: str, exponent: int) -> None:
    """Queries of bfloat16 are scaled to float16."""
    check_quantized(uneven_queries(gpu_cache("head", 64, lengths=(150,), h=16, block=64), exponent), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("each", ["head", "page"])
@pytest.mark.parametrize(("backend", "page_size"), PAGES.items())
def test_a_graph_follows_writes_into_its_inputs(backend: str, page_size: int, each: str) -> None:
    """Scales, lengths, tables, selections, queries and pages; o and lse held NaN. Bit-equal to an eager call."""
    sizes = {"page_size": page_size if each == "page" else None, "block": page_size}
    first, other = (gpu_cache(each, lengths=lengths, seed=seed, **sizes) for lengths, seed in ((LENGTHS, 0), ((150, 9, 0, 1), 1)))
    found = replayed_with(first.cache, other.cache, backend, first.scales, other.scales)
    assert all(map(torch.equal, found, check_quantized(other, backend)))


@pytest.mark.gpu
@pytest.mark.parametrize("each", EACH)
@pytest.mark.parametrize(("backend", "page_size"), [*PAGES.items(), (None, 16)])
def test_calls_never_wait_for_the_device(backend: str | None, page_size: int, each: str | None) -> None:
    given = gpu_cache(each, page_size, block=page_size)
    called(given, backend)
    with no_waiting():
        called(given, backend)


GARBAGE = 2**30  # after a sequence's last page: a key there would be far outside of memory


def gpu_cache_gpu(each: str | None, page_size: int | None, **sizes: Any) -> QuantizedCache:
    given = make_quantized(
        each, page_size, **{"dtype": torch.bfloat16, "device": "cuda", "h": 16, "Dk": 128, "Dv": 128, "block": 64, "room": 512, **sizes}
    )
    table = given.cache.block_table
    return given if table is None else given.replaced(block_table=torch.where(table < 0, GARBAGE, table))


def check(given: QuantizedCache) -> tuple[torch.Tensor, torch.Tensor]:
    """`check_quantized`, and the same bits again."""
    found = check_quantized(given, "cupy-cuda")
    assert all(map(torch.equal, found, called(given, "cupy-cuda")))
    return found


@pytest.mark.gpu
@needs("cupy-cuda")
@needs_hopper
@pytest.mark.parametrize(
    ("S", "h", "D", "block", "page_size", "each"),
    [
        (4, 4, 128, 64, 64, "page"),
        (8, 3, 64, 128, None, "head"),
        (3, 8, 128, 64, 256, "page"),
        (8, 1, 128, 64, None, None),
    ],
)
def test_tiles_of_tokens(S: int, h: int, D: int, block: int, page_size: int | None, each: str | None, started: list[str]) -> None:
    """One tile of all tokens of a sequence, and several; sequences shorter than S among others."""
    given = gpu_cache_gpu(each, page_size, S_q=S, h=h, Dk=D, Dv=D, block=block, lengths=(0, 1, 7, 70, 575) * 11, room=640)
    o, lse = check(given)
    assert set(started) == {"forward_tokens.cu"}
    check(given.asked(given.cache.q.half()))
    for s in range(S):  # each token alone: of the last S_q, those before it
        one = given.replaced(
            q=given.cache.q[:, s : s + 1], selection=Selection(given.cache.selection.ranges[:, s : s + 1].contiguous(), block),
            cache_seqlens=(given.cache.cache_seqlens - (S - 1 - s)).clamp(min=0),
        )  # fmt: skip
        alone, alone_lse = called(one, "cupy-cuda")
        torch.testing.assert_close(alone[:, 0], o[:, s], rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(alone_lse[:, 0], lse[:, s], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@needs("cupy-cuda")
@needs_hopper
@pytest.mark.parametrize("factor", [0.0, -1.0])
@pytest.mark.parametrize("each", ["head", "page"])
def test_scales_may_be_zero_or_negative_gpu(each: str, factor: float) -> None:
    """The largest logit is that of the smallest product then."""
    check(gpu_cache_gpu(each, 64, lengths=(150, 300)).scaled(factor, -1.0))


@pytest.mark.gpu
@needs("cupy-cuda")
@needs_hopper
@pytest.mark.parametrize("factor", [1e-30, 1e-3, 100.0, 1e30])
def test_scales_of_pages_may_have_any_size(factor: float) -> None:
    check(gpu_cache_gpu("page", 64, lengths=(150, 300)).scaled(v=factor))


@pytest.mark.gpu
@needs("cupy-cuda")
@needs_hopper
@pytest.mark.parametrize(("page_size", "each"), [(None, "head"), (64, "page")])
@pytest.mark.parametrize("S_q", [1, 4, 12])
def test_keys_may_be_larger_than_float16_has_numbers_gpu(S_q: int, page_size: int | None, each: str) -> None:
    check(large_keys(gpu_cache_gpu(each, page_size, lengths=LENGTHS * 40, S_q=S_q, dtype=torch.float16)))


@pytest.mark.gpu
@needs("cupy-cuda")
@needs_hopper
def test_a_cache_that_sequences_share_is_copied() -> None:
    """TMA takes no stride of 0."""
    check(shared_by_sequences(gpu_cache_gpu("head", None, lengths=(300, 300, 300))))


@pytest.mark.gpu
@needs("cupy-cuda")
@needs_hopper
@pytest.mark.parametrize("each", EACH)
def test_a_step_is_one_launch(each: str | None, started: list[str]) -> None:
    given = gpu_cache_gpu(each, 64)
    called(given, "cupy-cuda")
    started.clear()
    called(given, "cupy-cuda")
    assert started == ["forward_blocks.cu"]
